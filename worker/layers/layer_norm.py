"""LayerNorm with its learned weight and bias (Ba et al. 2016, arXiv:1607.06450).

torch computes it on every device: that is one launch already, so a kernel of ours would save nothing.
"""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from worker.shares import Target


class LayerNorm:
    """(x - mean(x)) / deviation(x) * weight + bias, over the last dimension.

    Args:
        size: of the last dimension.
        epsilon: added to the variance.
        learned: whether weight and bias are learned; if not, they are ones and zeros.
        dtype: of both, and of the input.
        device: where they live.
    """

    def __init__(
        self, size: int, epsilon: float, *, dtype: torch.dtype, device: torch.device, learned: bool = True
    ) -> None:
        self.weight = torch.ones(size, dtype=dtype, device=device)
        self.bias = torch.zeros(size, dtype=dtype, device=device)
        self._epsilon = epsilon
        self._learned = learned

    def checkpoint_tensors(self, prefix: str) -> dict[str, Target]:
        """The name of each tensor in the checkpoint -> the one that it fills."""
        return {f"{prefix}.weight": self.weight, f"{prefix}.bias": self.bias} if self._learned else {}

    def __call__(self, x: Tensor) -> Tensor:
        """Like `x`, [num_tokens, size]."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self._epsilon)
