"""What a rank in another process tells the front, as bytes: that it is ready, its outcomes, why it ends."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from protos.worker_pb2 import ExecuteModelResponse, GetInfoResponse
from worker.checkpoint import ModelError
from worker.executor.executor import RankLost
from worker.executor.rank import Outcome
from worker.inputs import MalformedStep

# The first byte of each message.
_INFO, _RESPONSE, _MALFORMED, _MODEL_ERROR, _FAILURE = b"I", b"R", b"M", b"E", b"F"


def tag_info(info: GetInfoResponse) -> bytes:
    """The message of a rank that is ready."""
    return _INFO + info.SerializeToString()


def tag_end(error: Exception) -> bytes:
    """The message of a rank that ends."""
    if isinstance(error, ModelError):
        return _MODEL_ERROR + str(error).encode()
    return _FAILURE + "".join(traceback.format_exception(error)).rstrip().encode()


def tag_outcome(outcome: Outcome) -> bytes:
    """The message with the outcome of a step."""
    match outcome:
        case ExecuteModelResponse():
            return _RESPONSE + outcome.SerializeToString()
        case MalformedStep():
            return _MALFORMED + f"{outcome.field}\n{outcome.description}".encode()
    return tag_end(outcome)


def read_outcome(message: bytes) -> Outcome:
    """The outcome of a step; RankLost if the rank has failed in it, or ended before."""
    tag, text = message[:1], message[1:]
    if tag == _RESPONSE:
        return ExecuteModelResponse.FromString(text)
    if tag == _MALFORMED:
        return MalformedStep(*text.decode().split("\n", 1))
    return RankLost(text.decode())


@dataclass(frozen=True, slots=True)
class NumberedAnswer:
    """The answer of a step; see `Answer`. Those of the same executor are asked for in order.

    Attributes:
        outcome_of: waits for the outcome of a step, by its number, and returns it.
        number: of the step, in the order of launch.
    """

    outcome_of: Callable[[int], Outcome]
    number: int

    @property
    def is_finished(self) -> bool:
        """See `Answer`; it is not known without waiting."""
        return False

    def result(self) -> ExecuteModelResponse:
        """See `Answer`."""
        outcome = self.outcome_of(self.number)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def wait_for_infos(ranks: Sequence[Connection]) -> GetInfoResponse:
    """Rank 0's info, once all ranks are ready.

    Args:
        ranks: the line or pipe from each of them.

    Raises:
        ModelError: one cannot load the model.
        RankLost: one has failed.
        EOFError, OSError: one has ended without a message.
    """
    info = GetInfoResponse()
    missing = dict(zip(ranks, range(len(ranks)), strict=True))
    while missing:
        # One may end because another one cannot load, which says why: that counts.
        end: Exception | None = None
        for told in wait(list(missing)):
            assert isinstance(told, Connection)
            try:
                message = told.recv_bytes()
            except (EOFError, OSError) as error:
                end = end or error
                continue
            tag, text = message[:1], message[1:]
            if tag == _MODEL_ERROR:
                raise ModelError(text.decode())
            if tag != _INFO:
                end = RankLost(f"rank {missing[told]} failed: {text.decode()}")
            elif missing.pop(told) == 0:
                info.ParseFromString(text)
        if end is not None:
            raise end
    return info
