"""Rotary position embedding: the frequencies of each rope type, and the table of cosines and sines made from them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """theta^(-2i / head_dim), as in the paper (Su et al. 2021, arXiv:2104.09864)."""

    theta: float

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each pair of components, [head_dim / 2] float32."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / self.theta**exponents


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by a factor (position interpolation: Chen et al. 2023, arXiv:2306.15595)."""

    theta: float
    factor: float

    def frequencies(self, head_dim: int) -> Tensor:
        """As `DefaultRope.frequencies`."""
        return DefaultRope(self.theta).frequencies(head_dim) / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1: long wavelengths are stretched by a factor, short ones stay, those between are blended.

    A wavelength is long or short beside `original_context_length`, the context that the model was pretrained with.
    """

    theta: float
    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_length: int

    def frequencies(self, head_dim: int) -> Tensor:
        """As `DefaultRope.frequencies`."""
        plain = DefaultRope(self.theta).frequencies(head_dim)
        turns = self.original_context_length * plain / (2 * math.pi)  # in the original context
        span = self.high_frequency_factor - self.low_frequency_factor
        share = ((turns - self.low_frequency_factor) / span).clamp(0, 1)  # 0: stretched, 1: as it was
        return share * plain + (1 - share) * plain / self.factor


Rope = DefaultRope | LinearRope | Llama3Rope


class RotaryTable:
    """cos and sin of every position, computed in float32 and rounded to the model's dtype once."""

    def __init__(
        self, rope: Rope, head_dim: int, num_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), rope.frequencies(head_dim))
        self._cos = angles.cos().to(dtype=dtype, device=device)  # [num_positions, head_dim / 2]
        self._sin = angles.sin().to(dtype=dtype, device=device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token, [num_tokens, head_dim / 2]; looked up once a step for all layers."""
        return self._cos[positions], self._sin[positions]
