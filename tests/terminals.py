"""A terminal for commands under test: what they write on it, keys that are pressed, and the state they leave it in."""

import contextlib
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence

CTRL_C = b"\x03"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_WAIT_S = 60.0
# Becomes a command whose terminal is its standard input, and which heeds all signals, as where no `nohup` is about.
_LOG_IN = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.login_tty(0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """One command in a terminal of its own.

    Attributes:
        process: the command's.
        written: what has been read of what it wrote.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._ours, self._its = os.openpty()
        os.set_blocking(self._ours, False)
        self._modes = self.modes()
        self.written = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LOG_IN, *command], stdin=self._its, env=os.environ | {"TERM": "xterm"}
        )

    def modes(self) -> list:
        """How the terminal treats what is typed: whether it shows it, whether it gathers lines, and the like."""
        return termios.tcgetattr(self._its)

    @property
    def is_as_before(self) -> bool:
        """Whether the cursor shows, and keys do what they did before the command."""
        return self.modes() == self._modes and self.written.rfind(SHOW_CURSOR) >= self.written.rfind(HIDE_CURSOR)

    def press(self, key: bytes) -> None:
        """Types a key."""
        os.write(self._ours, key)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Reads what is written until the condition is true."""
        end = time.monotonic() + _WAIT_S
        while not condition():
            assert time.monotonic() < end, self.written[-1000:]
            assert self.process.poll() is None, self.written[-1000:]
            self._read()
            time.sleep(0.01)

    def wait(self) -> int:
        """The command's exit status, with all read that it wrote."""
        end = time.monotonic() + _WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.written[-1000:]
            self._read()
            time.sleep(0.01)
        self._read()
        return self.process.returncode

    def close(self) -> None:
        """Ends the command if it still runs."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._ours)
        os.close(self._its)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.written += os.read(self._ours, 1 << 16)
