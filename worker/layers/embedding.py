"""Token ids to vectors, and vectors to logits."""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from worker.layers.linear import Linear


class Embedding:
    """One learned vector for each token id."""

    def __init__(self, vocabulary_size: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocabulary_size, size, dtype=dtype, device=device)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, size]."""
        return embedding(token_ids, self.weight)


class Head(Linear):
    """The product that scores every token id of the vocabulary: [num_samples, size] -> float32 logits."""

    def __init__(self, size: int, vocabulary_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, {"lm_head": vocabulary_size}, bias=False, dtype=dtype, device=device, widened=True)

    def tie(self, embedding: Embedding) -> None:
        """Takes the embedding's vectors for weights; packed, the head may have a copy of its own."""
        self.weight = embedding.weight
