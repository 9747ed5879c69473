"""How the sequences of a request are sampled, and what one token's draw depends on."""

import math
from dataclasses import dataclass
from typing import Self

from protos.columns import unpack, unpack_floats
from protos.sampling_pb2 import Sampling
from worker.adjustments import TokenHistory


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """A `Sampling` message read once, field by field; None or a neutral value where the message's 0 changes nothing.

    Attributes:
        bias_token_ids: tokens whose logits get the `biases`.
        num_top_logprobs: None if no log-probabilities are wanted besides the tokens' own.
        num_prompt_logprobs: like `num_top_logprobs`, for the prompt.
    """

    temperature: float
    top_p: float
    top_k: int | None
    min_p: float
    seed: int
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    num_prompt_tokens: int
    num_candidates: int
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_token_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    num_top_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @classmethod
    def from_message(cls, message: Sampling, vocabulary_size: int) -> Self:
        """Reads and checks a message.

        Raises:
            ValueError: a value is out of its range.
        """
        _check_ranges(message, vocabulary_size)
        biases = zip(unpack(message.bias_token_ids), unpack_floats(message.biases), strict=True)
        # A token beyond the vocabulary is never drawn anyway.
        known = [(id_, bias) for id_, bias in biases if 0 <= id_ < vocabulary_size]
        return cls(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k or None,
            min_p=message.min_p,
            seed=message.seed,
            stop_token_ids=tuple(id_ for id_ in message.stop_token_ids if 0 <= id_ < vocabulary_size),
            min_tokens=message.min_tokens,
            num_prompt_tokens=message.num_prompt_tokens,
            num_candidates=message.num_candidates,
            typical_p=message.typical_p or 1.0,
            repetition_penalty=message.repetition_penalty or 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            bias_token_ids=tuple(id_ for id_, _ in known),
            biases=tuple(bias for _, bias in known),
            num_top_logprobs=message.num_top_logprobs if message.HasField("num_top_logprobs") else None,
            num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        )

    @property
    def draws(self) -> bool:
        """Whether chance decides; otherwise the token is the most probable one."""
        return self.temperature > 0 and self.num_candidates == 0

    @property
    def filters(self) -> bool:
        """Whether any tokens are cut before the draw."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1

    @property
    def penalizes_occurrences(self) -> bool:
        """Whether logits depend on the output."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on tokens seen before."""
        return self.repetition_penalty != 1 or self.penalizes_occurrences

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the draw."""
        return bool(self.bias_token_ids) or self.penalizes


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to be drawn: how, and what its randomness depends on.

    Attributes:
        parameters: of its request.
        sequence_index: which of the request's sequences it is for.
        position: of the token, 0-based in that sequence, prompt included.
        history: the tokens before; set if the parameters penalize any.
    """

    parameters: SamplingParameters
    sequence_index: int
    position: int
    history: TokenHistory | None = None

    @property
    def is_too_early_to_stop(self) -> bool:
        """Whether its stop tokens are forbidden."""
        p = self.parameters
        return bool(p.stop_token_ids) and self.position - p.num_prompt_tokens < p.min_tokens

    @property
    def takes_best(self) -> bool:
        """Whether it is the best token by the model's own logits, and nothing more of these is asked for."""
        p = self.parameters
        is_plain = p.temperature == 0 and p.num_candidates == 0 and p.num_top_logprobs is None
        return is_plain and not p.adjusts and not self.is_too_early_to_stop


def _check_ranges(message: Sampling, vocabulary_size: int) -> None:
    if not 0 <= message.temperature < math.inf:
        raise ValueError(f"temperature {message.temperature} is no finite number from 0 up")
    if not 0 < message.top_p <= 1:
        raise ValueError(f"top_p {message.top_p} is not in (0, 1]")
    if not 0 <= message.min_p <= 1:
        raise ValueError(f"min_p {message.min_p} is not in [0, 1]")
    if message.top_k < 0:
        raise ValueError(f"top_k {message.top_k} is less than 0")
    if not 0 <= message.typical_p <= 1:
        raise ValueError(f"typical_p {message.typical_p} is not in (0, 1]")
    if not 0 <= message.repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty {message.repetition_penalty} is no finite number over 0")
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(message, name)):
            raise ValueError(f"{name} {getattr(message, name)} is not finite")
    if len(message.bias_token_ids) != len(message.biases):
        raise ValueError("bias_token_ids and biases are not of one length")
    if not all(map(math.isfinite, unpack_floats(message.biases))):
        raise ValueError("not all biases are finite")
    for name in ("num_candidates", "num_top_logprobs", "num_prompt_logprobs"):
        if not 0 <= getattr(message, name) <= vocabulary_size:
            raise ValueError(f"{name} {getattr(message, name)} is not in 0 .. {vocabulary_size}")
