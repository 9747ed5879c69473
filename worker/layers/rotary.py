"""Rotary position embedding: the frequencies of each rope type, and the table of cosines and sines made from them."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Rope(Protocol):
    """A rope type with its numbers."""

    @property
    def attention_factor(self) -> float:
        """The factor of cosines and sines; it multiplies the scores by its square."""

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each pair of components, [head_dim / 2] float32."""


class _PlainRotation:
    """Rotates without scaling."""

    __slots__ = ()

    @property
    def attention_factor(self) -> float:
        """See `Rope`."""
        return 1.0


@dataclass(frozen=True, slots=True)
class DefaultRope(_PlainRotation):
    """theta^(-2i / head_dim), as in the paper (Su et al. 2021, arXiv:2104.09864)."""

    theta: float

    def frequencies(self, head_dim: int) -> Tensor:
        """See `Rope`."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / self.theta**exponents


@dataclass(frozen=True, slots=True)
class LinearRope(_PlainRotation):
    """Positions divided by a factor (position interpolation: Chen et al. 2023, arXiv:2306.15595)."""

    theta: float
    factor: float

    def frequencies(self, head_dim: int) -> Tensor:
        """See `Rope`."""
        return DefaultRope(self.theta).frequencies(head_dim) / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Rope(_PlainRotation):
    """Llama 3.1: long wavelengths are stretched by a factor, short ones stay, those between are blended.

    Wavelengths are compared with `original_context_length`, the context that the model was pretrained with.
    """

    theta: float
    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_length: int

    def frequencies(self, head_dim: int) -> Tensor:
        """See `Rope`."""
        plain = DefaultRope(self.theta).frequencies(head_dim)
        turns = self.original_context_length * plain / (2 * math.pi)  # in the original context
        span = self.high_frequency_factor - self.low_frequency_factor
        share = ((turns - self.low_frequency_factor) / span).clamp(0, 1)  # 0: stretched, 1: as it was
        return share * plain + (1 - share) * plain / self.factor


@dataclass(frozen=True, slots=True)
class DynamicRope(_PlainRotation):
    """A theta that grows with the context beyond the original one ("dynamic NTK", by bloc97 and emozilla on Reddit).

    The original, which has no paper, grows it with each token, but keys in the cache, which sequences may share, were
    rotated by the theta of their time, which later queries do not match. So it is that of the longest context from the
    start, as in vLLM; if that is within the original context, it is the plain one.
    """

    theta: float
    factor: float
    original_context_length: int
    context_length: int

    def frequencies(self, head_dim: int) -> Tensor:
        """See `Rope`."""
        stretch = max(self.context_length / self.original_context_length, 1)
        growth = self.factor * stretch - (self.factor - 1)
        return DefaultRope(self.theta * growth ** (head_dim / (head_dim - 2))).frequencies(head_dim)


@dataclass(frozen=True, slots=True)
class YarnRope:
    """Interpolates the slow pairs, leaves the fast ones, blends between (YaRN: Peng et al. 2023, arXiv:2309.00071).

    A pair is fast if it makes `beta_fast` turns in the original context, and slow if it makes `beta_slow`; the blend is
    linear in the pair's index, between indices that are rounded outwards if `truncate`.
    """

    theta: float
    factor: float
    original_context_length: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    def frequencies(self, head_dim: int) -> Tensor:
        """See `Rope`."""
        plain = DefaultRope(self.theta).frequencies(head_dim)
        low, high = (self._index_with(turns, head_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        indices = torch.arange(head_dim // 2, dtype=torch.float32)
        share = ((indices - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: as it was, 1: interpolated
        return (1 - share) * plain + share * plain / self.factor

    def _index_with(self, turns: float, head_dim: int) -> float:
        """The index, not rounded, of the pair that makes `turns` turns in the original context."""
        period = self.original_context_length / (turns * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(self.theta))


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """How much sharper attention is made for a context `factor` times as long (YaRN, equation 22, as implemented)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class LongRope:
    """Divides each pair's frequency by a factor found by search (LongRoPE: Ding et al. 2024, arXiv:2402.13753)."""

    theta: float
    factors: tuple[float, ...]
    attention_factor: float

    def frequencies(self, head_dim: int) -> Tensor:
        """See `Rope`."""
        return DefaultRope(self.theta).frequencies(head_dim) / torch.tensor(self.factors)


class RotaryTable:
    """cos and sin of every position, computed in float32 and rounded to the model's dtype once."""

    def __init__(
        self, rope: Rope, head_dim: int, num_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), rope.frequencies(head_dim))
        factor = rope.attention_factor
        self._cos = (angles.cos() * factor).to(dtype=dtype, device=device)  # [num_positions, head_dim / 2]
        self._sin = (angles.sin() * factor).to(dtype=dtype, device=device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token, [num_tokens, head_dim / 2]; looked up once per step for all layers."""
        return self._cos[positions], self._sin[positions]
