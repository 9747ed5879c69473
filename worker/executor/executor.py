"""What the worker's front knows of whoever runs its steps. How many ranks there are, only the executor knows.

Steps are launched in order, by one thread; their answers come in the same order, and another thread may wait for them.
"""

from collections.abc import Callable
from typing import Protocol

from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoResponse


class RankLost(Exception):
    """A rank died, hangs or failed in a step; the others can not go on without it, nor can this process."""


class Answer(Protocol):
    """Of a step that was launched."""

    @property
    def is_finished(self) -> bool:
        """Whether `result` need not wait."""

    def result(self) -> ExecuteModelResponse:
        """The answer, when it is there.

        Raises:
            MalformedStep: nothing was computed.
            RankLost: there will be none.
        """


class Executor(Protocol):
    """Runs steps on one rank or on many."""

    def load(self, on_lost: Callable[[], None]) -> GetInfoResponse:
        """Loads the model; takes seconds, and belongs on the thread that will launch the steps.

        Args:
            on_lost: called, by any thread, when steps can not be run any more, though none was being run.

        Returns:
            The answer to GetInfo, but for the epoch.

        Raises:
            ModelError: it can not be had; the message says why.
            RankLost: a rank ended meanwhile, and the log says why.
        """

    def launch(self, request: ExecuteModelRequest) -> Answer:
        """Gives the ranks one step, behind those that they were given before.

        Raises:
            MalformedStep: nothing was computed.
            RankLost: there is a rank less.
        """

    def is_usable(self) -> bool:
        """Whether steps can still be run, after one that failed."""

    def close(self) -> None:
        """Ends the ranks that are not this process; no step is launched any more."""
