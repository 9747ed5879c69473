"""The command line, as `pagewire` and as `python -m pagewire`. It first starts what takes longest: a worker."""

import os
import signal
import sys
from types import FrameType

_STARTS_NO_WORKER = {"-d", "--detach", "--help"}
# Standard streams, and how the null device is opened where one is closed: input cannot be read, output cannot be
# written, and standard error, where nobody would see an error, takes all. As glibc does it (csu/check_fds.c), nearly.
_STREAMS = (("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))


def main() -> None:
    """Runs the command that this process's arguments name."""
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:
        # Ctrl-C during the imports: nothing runs that needs an orderly end, and a traceback would be of no interest.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_closed_streams()
    # gRPC's own messages, such as one for each failed handshake, would only stand before what we say about it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # After access options, as in `pagewire --token T up`, the worker is started only when its turn comes.
    if sys.argv[1:2] == ["up"] and _STARTS_NO_WORKER.isdisjoint(sys.argv):
        from pagewire import early_worker

        early_worker.started = early_worker.EarlyWorker()
    from pagewire.cli import app

    signal.signal(signal.SIGINT, interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # else it is ignored, as `nohup` wants it
            signal.signal(number, _end)
    try:
        app()
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # it has been reported; what is left in the buffer would fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Opens standard streams that are closed: else Python drops what is written, and other files get their numbers."""
    for name, mode, flags in _STREAMS:
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)  # the lowest that is free, which is the stream's own
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the command in order, as Ctrl-C does: with the terminal as it was, and nothing left behind."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
