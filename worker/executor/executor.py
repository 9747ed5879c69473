"""What the worker's front knows of what runs its steps. Only the executor knows how many ranks there are.

Steps are launched in order, by one thread; their answers come in the same order, and another thread may wait for them.
"""

from collections.abc import Callable
from typing import Protocol

from protos.worker_pb2 import ExecuteModelRequest, ExecuteModelResponse, GetInfoResponse


class RankLost(Exception):
    """A rank died, hangs or failed in a step; neither the others nor this process can go on without it."""


class Answer(Protocol):
    """The answer of a launched step."""

    @property
    def is_finished(self) -> bool:
        """Whether `result` need not wait."""

    def result(self) -> ExecuteModelResponse:
        """The answer; waits until it is there.

        Raises:
            MalformedStep: nothing was computed.
            RankLost: there will be none.
        """


class Executor(Protocol):
    """Runs steps on one rank or on many."""

    def load(self, on_lost: Callable[[], None]) -> GetInfoResponse:
        """Loads the model; takes seconds, and belongs on the thread that will launch the steps.

        Args:
            on_lost: called, by any thread, when steps cannot be run any more, even if none is being run.

        Returns:
            The answer to GetInfo, except for the epoch.

        Raises:
            ModelError: the model cannot be loaded; the message says why.
            RankLost: a rank ended meanwhile, and the log says why.
        """

    def launch(self, request: ExecuteModelRequest) -> Answer:
        """Launches one step on the ranks, after those launched before.

        Raises:
            MalformedStep: nothing was computed.
            RankLost: a rank is gone.
        """

    def is_usable(self) -> bool:
        """Whether steps can still be run after one that failed."""

    def close(self) -> None:
        """Ends the ranks that are not this process; no step may be launched afterwards."""
