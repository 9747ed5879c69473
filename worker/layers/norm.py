"""RMSNorm with its learned weight, alone and fused with the residual addition before it."""

import torch
from torch import Tensor

from kernels.choice import Operations


class RMSNorm:
    """x / rms(x) * weight; see `reference.rms_norm`."""

    def __init__(
        self, size: int, epsilon: float, *, operations: Operations, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.epsilon = epsilon
        self._operations = operations

    def __call__(self, x: Tensor) -> Tensor:
        """Like `x`, [num_tokens, size]."""
        return self._operations.rms_norm(x, self.weight, self.epsilon)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds `x` to `residual` in place, and returns the norm of the sum."""
        return self._operations.add_rms_norm(x, residual, self.weight, self.epsilon)
