"""What the clients return, as plain values, and how it is built from the public API's messages."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from protos.pagewire.v1 import generation_pb2 as pb


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    # An end-of-sequence id, a stop id or a stop string; `stop_match` says which.
    STOP = "stop"
    # `max_tokens`, the context length, or all that the KV cache holds of one request.
    LENGTH = "length"
    # Cancelled, or given up by the server.
    ABORTED = "aborted"
    # Never started: the prompt cannot fit into the KV cache.
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One of the most probable tokens at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability under the model's own distribution, before anything that sampling does to it.

    Attributes:
        rank: 1 for the most probable token at its position.
        top: the most probable tokens there, in the number asked for, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sequence has generated since its last delta.

    Attributes:
        index: which of the n sequences; from 0.
        text: whole characters only.
        token_ids: empty unless asked for with `token_ids=True`.
        finish_reason: None while the sequence goes on.
        stop_match: the stop string or the token id that ended the sequence.
        cumulative_logprob: sum of the log-probabilities of the sequence's tokens; set with `finish_reason`.
        logprobs: one for each token; empty unless asked for with `logprobs=N`.
        finish_message: why it ended, in words, if the request alone does not tell: for example, for lack of KV blocks.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_message: str = ""


@dataclass(frozen=True, slots=True)
class Output(Delta):
    """All that one sequence has generated."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all sequences of a request."""

    prompt_tokens: int
    # Prompt tokens whose KV was found in the prefix cache.
    cached_prompt_tokens: int
    # Over all sequences that were sampled, including those of `best_of` that are not returned.
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Measured at the router, from the arrival of the request."""

    # Until the scheduler first planned the request.
    queue_ms: float
    # Until the first token; 0 when there was none.
    ttft_ms: float
    total_ms: float
    # How often the request lost its blocks to others, and was later computed again or swapped in.
    preemptions: int


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer: complete, or as much of it as has arrived so far.

    Attributes:
        outputs: one per sequence, by index.
        usage: None until the answer is complete.
        timings: None until the answer is complete.
        prompt_logprobs: one for each prompt token but the first; empty unless asked for with `prompt_logprobs=N`.
    """

    request_id: str
    outputs: tuple[Output, ...]
    usage: Usage | None
    timings: Timings | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.outputs[0].text if self.outputs else ""


@dataclass(frozen=True, slots=True)
class Model:
    """The served model and its limits; the fields are those of GetModelResponse, which explains each of them."""

    model: str
    context_length: int
    vocabulary_size: int
    dtype: str
    kv_dtype: str
    block_size: int
    num_blocks: int
    kv_cache_note: str
    max_prompt_tokens: int
    max_n: int
    max_num_batched_tokens: int
    max_num_seqs: int
    adapters: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    quantization: str
    max_output_tokens: int
    max_beam_width: int
    max_message_bytes: int
    max_requests: int
    tokens_per_minute: int


class Transcript:
    """Assembles the messages of one stream into its answer."""

    def __init__(self) -> None:
        self._request_id = ""
        self._sequences: dict[int, _Sequence] = {}
        self._usage: Usage | None = None
        self._timings: Timings | None = None
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def add(self, response: pb.GenerateResponse) -> list[Delta]:
        """Takes the next message; returns its deltas."""
        self._request_id = response.request_id
        deltas = [_delta(output) for output in response.outputs]
        for delta in deltas:
            self._sequences.setdefault(delta.index, _Sequence()).add(delta)
        self._prompt_logprobs += _logprobs(response.prompt_logprobs)
        if response.HasField("usage"):
            self._usage = _usage(response.usage)
        if response.HasField("timings"):
            self._timings = _timings(response.timings)
        return deltas

    @property
    def is_whole(self) -> bool:
        """Whether the last message has come: only that one carries the usage."""
        return self._usage is not None

    def received(self) -> list[pb.Received]:
        """How much of each sequence has arrived, for a server that continues from there."""
        return [sequence.received(index) for index, sequence in sorted(self._sequences.items())]

    def completion(self) -> Completion:
        """The answer so far."""
        outputs = tuple(sequence.output(index) for index, sequence in sorted(self._sequences.items()))
        return Completion(self._request_id, outputs, self._usage, self._timings, self._prompt_logprobs)


@dataclass(slots=True)
class _Sequence:
    """Pieces of one sequence, joined only on demand, and its last delta."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.last = delta

    def received(self, index: int) -> pb.Received:
        num_bytes = sum(len(text.encode()) for text in self.texts)
        num_tokens = max(len(self.token_ids), len(self.logprobs))
        ended = self.last is not None and self.last.finish_reason is not None
        return pb.Received(index=index, text_bytes=num_bytes, num_tokens=num_tokens, ended=ended)

    def output(self, index: int) -> Output:
        end = self.last or Delta(index, "")
        return Output(
            index,
            "".join(self.texts),
            tuple(self.token_ids),
            end.finish_reason,
            end.stop_match,
            end.cumulative_logprob,
            tuple(self.logprobs),
            end.finish_message,
        )


def completion(response: pb.CompleteResponse) -> Completion:
    """The answer in a response of Complete."""
    outputs = tuple(Output(**_fields(output)) for output in response.outputs)
    usage, timings = _usage(response.usage), _timings(response.timings)
    return Completion(response.request_id, outputs, usage, timings, _logprobs(response.prompt_logprobs))


def model(response: pb.GetModelResponse) -> Model:
    """The model in a response of GetModel."""
    fields = {name: getattr(response, name) for name in Model.__dataclass_fields__}
    return Model(**fields | {"adapters": tuple(response.adapters), "eos_token_ids": tuple(response.eos_token_ids)})


_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORTED: FinishReason.ABORTED,
    pb.FINISH_REASON_IGNORED: FinishReason.IGNORED,
}


def _delta(output: pb.Output) -> Delta:
    return Delta(**_fields(output))


def _fields(output: pb.Output) -> dict[str, Any]:
    match = output.stop_match.WhichOneof("match")
    return {
        "index": output.index,
        "text": output.text,
        "token_ids": tuple(output.token_ids),
        "finish_reason": _FINISH_REASONS.get(output.finish_reason),
        "stop_match": getattr(output.stop_match, match) if match else None,
        "cumulative_logprob": output.cumulative_logprob if output.HasField("cumulative_logprob") else None,
        "logprobs": _logprobs(output.logprobs),
        "finish_message": output.finish_message,
    }


def _logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token.token_id,
            token.logprob,
            token.rank,
            tuple(TokenLogprob(top.token_id, top.logprob) for top in token.top),
        )
        for token in messages
    )


def _usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens)


def _timings(timings: pb.Timings) -> Timings:
    return Timings(timings.queue_ms, timings.ttft_ms, timings.total_ms, timings.preemptions)
