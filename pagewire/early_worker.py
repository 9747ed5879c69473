"""A worker that is started before its arguments are known.

In the start of a cluster a worker's imports take longest, and the launcher, too, has imports of its own before it
understands its command line. So `pagewire up` begins with a worker's process: `python -m worker -` imports what a
worker needs, and only then reads its arguments, so that wrong ones are refused that much later. A worker that gets no
arguments ends with the launcher.
"""

import asyncio
import json
from collections.abc import Mapping

from pagewire.processes import module_command, start

NAME = "worker"


class EarlyWorker:
    """The process of a worker that was started early.

    Attributes:
        runner: runs the event loop that the process belongs to.
    """

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._process = self.runner.run(start(module_command(NAME, ["-"]), stdin=asyncio.subprocess.PIPE))

    def become(self, commands: Mapping[str, tuple[str, ...]]) -> dict[str, asyncio.subprocess.Process]:
        """Gives the process the arguments of the command of its name, and returns it by that name.

        A single worker may use all of this machine, as this process does. Several workers have a share each, and names
        of their own: then this process is killed, and the result is empty.
        """
        if NAME not in commands:
            self._process.kill()
            return {}
        stdin, arguments = self._process.stdin, commands[NAME][len(module_command(NAME)) :]
        assert stdin is not None, "it was started with a pipe"
        stdin.write(json.dumps(arguments).encode() + b"\n")
        stdin.close()
        return {NAME: self._process}


# The worker that `pagewire.__main__` started first of all, if it did, before any command could pass it on.
started: EarlyWorker | None = None
