"""A worker that is started before anybody knows what it is to be told.

Of all that a cluster's start takes, a worker's imports take longest, and the launcher imports, too, before it
understands its own command line. So `pagewire up` begins with a worker's process: `python -m worker -` imports what a
worker needs, and then reads its arguments, of which wrong ones are refused that much later. One that is told nothing
ends with the launcher.
"""

import asyncio
import json
from collections.abc import Mapping

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

    def become(self, commands: Mapping[str, tuple[str, ...]]) -> dict[str, asyncio.subprocess.Process]:
        """The process, as what the command line of its name would have started; by that name.

        A worker alone may use all of this machine, as this process does. Of several each has a part of it, and a name
        of its own: then the process ends.
        """
        if NAME not in commands:
            self._process.kill()
            return {}
        stdin, arguments = self._process.stdin, commands[NAME][len(module_command(NAME)) :]
        assert stdin is not None, "it was started with a pipe"
        stdin.write(json.dumps(arguments).encode() + b"\n")
        stdin.close()
        return {NAME: self._process}


# What this process has begun with, if it has: before there was a command that could hand it on.
started: EarlyWorker | None = None
