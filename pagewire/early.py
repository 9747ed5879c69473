"""A worker that is started before anybody knows what it is to be told.

Of all that a cluster's start takes, a worker's imports take longest, and the launcher imports, too, before it
understands its own command line. So `pagewire up` begins with a worker's process: `python -m worker -` imports what a
worker needs, and then reads its arguments. One that is told nothing ends with the launcher.
"""

import asyncio
import json

from pagewire.processes import module_command, start

NAME = "worker"


class EarlyWorker:
    """Its process.

    Attributes:
        runner: of the event loop that the process belongs to.
    """

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._process = self.runner.run(start(module_command(NAME, ["-"]), stdin=asyncio.subprocess.PIPE))

    def become(self, command: tuple[str, ...]) -> asyncio.subprocess.Process:
        """The process as it would have been if that worker's command line had started it."""
        stdin, arguments = self._process.stdin, command[len(module_command(NAME)) :]
        assert stdin is not None, "it was started with a pipe"
        stdin.write(json.dumps(arguments).encode() + b"\n")
        stdin.close()
        return self._process

    def end(self) -> None:
        """Nobody needs it."""
        self._process.kill()


# The one of this process, if it has begun with that.
worker: EarlyWorker | None = None
