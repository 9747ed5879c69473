"""RMSNorm with its learned weight, alone and fused with the residual addition before it."""

import torch
from torch import Tensor, nn

from kernels import reference


class RMSNorm(nn.Module):
    """x / rms(x) * weight; see `reference.rms_norm`."""

    def __init__(self, size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), False)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Like `x`, [num_tokens, size]."""
        return reference.rms_norm(x, self.weight, self.epsilon)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds `x` to `residual` in place, and gives the norm of the sum."""
        return reference.add_rms_norm(x, residual, self.weight, self.epsilon)
