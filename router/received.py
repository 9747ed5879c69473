"""What a client already has of an output that it resumes: left out when the output is sent again."""

from dataclasses import dataclass

from protos.errors import Violation
from protos.pagewire.v1 import generation_pb2 as pb


@dataclass(slots=True)
class Received:
    """What is still to be left out.

    Attributes:
        text_bytes: bytes of text in UTF-8.
        num_tokens: tokens, with their ids and log-probabilities.
        ended: whether the client has the end, and all before it.
    """

    text_bytes: int = 0
    num_tokens: int = 0
    ended: bool = False

    def cut(self, delta: pb.Output) -> bool:
        """Removes from a delta what the client has; returns whether anything is left."""
        if self.ended:
            return False
        text, num_tokens = delta.text.encode(), max(len(delta.token_ids), len(delta.logprobs))
        delta.text = text[self.text_bytes :].decode(errors="ignore")
        del delta.token_ids[: self.num_tokens], delta.logprobs[: self.num_tokens]
        self.text_bytes = max(0, self.text_bytes - len(text))
        self.num_tokens = max(0, self.num_tokens - num_tokens)
        return bool(delta.text or delta.token_ids or delta.logprobs or delta.finish_reason)


def check_resume(request: pb.GenerateRequest) -> list[Violation]:
    """What is wrong with a resumption, apart from what depends on the resumed request."""
    resume, n = request.resume, request.sampling.n if request.sampling.HasField("n") else 1
    found = []
    if not request.request_id:
        found.append(Violation("request_id", "is required with resume: the one that the first message told"))
    if not resume.HasField("seed"):
        found.append(Violation("resume.seed", "is required: the one that the first message told"))
    elif request.sampling.HasField("seed") and request.sampling.seed != resume.seed:
        found.append(Violation("resume.seed", "must be the same as sampling.seed, where that is set"))
    if len(resume.received) > n or len({row.index for row in resume.received}) < len(resume.received):
        found.append(Violation("resume.received", f"must be at most one for each of the {n} outputs"))
    for place, row in enumerate(resume.received[:n]):
        if not (0 <= row.index < n and row.text_bytes >= 0 and row.num_tokens >= 0):
            wanted = f"must have an index in 0 .. {n - 1}, and text_bytes and num_tokens of at least 0"
            found.append(Violation(f"resume.received[{place}]", wanted))
    return found


def received_of(resume: pb.Resume) -> dict[int, Received]:
    """What a client has, by the index of the output."""
    return {row.index: Received(row.text_bytes, row.num_tokens, row.ended) for row in resume.received}
