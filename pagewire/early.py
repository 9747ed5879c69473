"""A worker that is started before anybody knows what it is to be told.

Of all that a cluster's start takes, a worker's imports take longest, and the launcher imports, too, before it
understands its own command line. So `pagewire up` begins with a worker's process: `python -m worker -` imports what a
worker needs, and then reads its arguments. One that is told nothing ends with the launcher.
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

        Where there is none of that name it ends: of several workers each has cores of its own from its start on.
        """
        if NAME not in commands:
            self._process.kill()
            return {}
        stdin, arguments = self._process.stdin, commands[NAME][len(module_command(NAME)) :]
        assert stdin is not None, "it was started with a pipe"
        stdin.write(json.dumps(arguments).encode() + b"\n")
        stdin.close()
        return {NAME: self._process}


# The one of this process, if it has begun with that.
worker: EarlyWorker | None = None
