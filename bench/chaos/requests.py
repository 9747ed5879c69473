"""What the clients ask for: every way to decode, on prompts that partly share a prefix; and when two answers agree."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.control_plane import TEXT
from pagewire.request import Options
from pagewire.results import Completion, Output, TokenLogprobs

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    f"{TEXT}In short:",
    f"{TEXT}And then",
    "def fibonacci(n):",
    "Twelve plus thirty is",
)
KINDS: dict[str, Options] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "n=4": {"temperature": 1.0, "n": 4},
    "best of 3": {"temperature": 1.0, "n": 2, "best_of": 3},
    "beams": {"beam_width": 3},
    "logprobs": {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 1},
}
# Those whose answers come only when they are complete.
_HELD_BACK = ("best of 3", "beams")
# Of log-probabilities in float32: sums differ this much with the sizes of batches and chunks.
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        kind: of `KINDS`, or "stop strings".
        streamed: whether its tokens come as they are made.
    """

    kind: str
    prompt: str
    options: Options

    @property
    def streamed(self) -> bool:
        return self.kind not in _HELD_BACK

    def with_stop_string(self, answer: Completion) -> "Asked":
        """The same, but with a stop string from the middle of its answer."""
        text = answer.text
        options: Options = {**self.options, "stop": text[len(text) // 2 :][:6]}
        return Asked("stop strings", self.prompt, options)


def mixed(seed: int, max_tokens: int, prompts: Sequence[str] = PROMPTS) -> list[Asked]:
    """Each kind on each prompt, in a random order, of random lengths up to `max_tokens`."""
    rng = random.Random(seed)
    requests = []
    for kind, kind_options in KINDS.items():
        for prompt in prompts:
            most = max_tokens // 4 if kind in _HELD_BACK else max_tokens
            options: Options = {"max_tokens": rng.randint(most // 2, most), "ignore_eos": True, "token_ids": True}
            if kind != "beams":
                options["seed"] = rng.getrandbits(32)
            requests.append(Asked(kind, prompt, {**options, **kind_options}))
    rng.shuffle(requests)
    return requests


def difference(expected: Completion, got: Completion) -> str | None:
    """In what an answer differs from the one that was expected; None where they agree."""
    if got.usage is None or expected.usage is None:
        return "its last message did not come"
    if len(got.outputs) != len(expected.outputs):
        return f"{len(got.outputs)} outputs for {len(expected.outputs)}"
    for one, other in zip(expected.outputs, got.outputs, strict=True):
        if (difference := _output_difference(one, other)) is not None:
            return f"output {one.index}: {difference}"
    counts = [(usage.prompt_tokens, usage.completion_tokens) for usage in (expected.usage, got.usage)]
    if counts[0] != counts[1]:
        return f"usage: {counts[1]} for {counts[0]}"
    return _logprob_difference(expected.prompt_logprobs, got.prompt_logprobs, "prompt_logprobs")


def _output_difference(expected: Output, got: Output) -> str | None:
    if expected.token_ids != got.token_ids:
        pairs = zip(expected.token_ids, got.token_ids, strict=False)
        place = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
        where = f"from token {place} on" if place is not None else "in their number"
        return f"token ids differ {where}: {len(got.token_ids)} for {len(expected.token_ids)}"
    for name in ("text", "finish_reason", "stop_match"):
        if getattr(expected, name) != getattr(got, name):
            return f"{name}: {getattr(got, name)!r} for {getattr(expected, name)!r}"
    assert expected.cumulative_logprob is not None
    assert got.cumulative_logprob is not None
    if abs(expected.cumulative_logprob - got.cumulative_logprob) > _TOLERANCE * max(1, len(expected.token_ids)):
        return f"cumulative_logprob: {got.cumulative_logprob} for {expected.cumulative_logprob}"
    return _logprob_difference(expected.logprobs, got.logprobs, "logprobs")


def _logprob_difference(expected: Sequence[TokenLogprobs], got: Sequence[TokenLogprobs], name: str) -> str | None:
    if len(expected) != len(got):
        return f"{name}: {len(got)} for {len(expected)}"
    for place, (one, other) in enumerate(zip(expected, got, strict=True)):
        values = [[token.logprob, *(top.logprob for top in token.top)] for token in (one, other)]
        far = len(values[0]) != len(values[1]) or any(abs(a - b) > _TOLERANCE for a, b in zip(*values, strict=True))
        if one.token_id != other.token_id or far:
            return f"{name}, token {place}: {other} for {one}"
    return None
