"""RMSNorm with its learned weight, alone and fused with the residual addition before it."""

import torch
from torch import Tensor

from kernels import reference


class RMSNorm:
    """x / rms(x) * weight; see `reference.rms_norm`."""

    def __init__(self, size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """Like `x`, [num_tokens, size]."""
        return reference.rms_norm(x, self.weight, self.epsilon)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds `x` to `residual` in place, and gives the norm of the sum."""
        return reference.add_rms_norm(x, residual, self.weight, self.epsilon)
