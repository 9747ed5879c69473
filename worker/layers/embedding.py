"""Token ids to vectors, and vectors to logits."""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from worker.layers.linear import Linear


class Embedding(nn.Module):
    """One learned vector for each token id."""

    def __init__(self, vocabulary_size: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary_size, size, dtype=dtype, device=device), False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, size]."""
        return embedding(token_ids, self.weight)


class Head(Linear):
    """The product that scores every token id of the vocabulary."""

    def __init__(self, size: int, vocabulary_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, {"lm_head": vocabulary_size}, bias=False, dtype=dtype, device=device)

    def tie(self, embedding: Embedding) -> None:
        """Takes the embedding's vectors for weights; `pack` gives the head a copy of its own later."""
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """[num_samples, size] -> logits [num_samples, vocabulary_size] in float32."""
        return super().forward(x).float()
