"""What the worker knows of any model: its numbers, one forward pass, and the head that scores its result."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels.choice import Operations
from worker.layers.attention import AttentionMetadata
from worker.ranks import Ranks
from worker.shares import Heads


class ModelNumbers(Protocol):
    """The numbers that the cache and the limits of a step follow from."""

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids that the model knows."""

    @property
    def num_layers(self) -> int:
        """The number of layers with a KV cache."""

    @property
    def num_kv_heads(self) -> int:
        """The number of K/V heads of each layer."""

    @property
    def head_dim(self) -> int:
        """The number of values in a head."""

    @property
    def context_length(self) -> int:
        """Most tokens in a sequence."""


class Model(Protocol):
    """A causal language model on the paged cache, with its weights."""

    @property
    def config(self) -> ModelNumbers:
        """The architecture's numbers."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that share it."""

    @property
    def heads(self) -> Heads:
        """This rank's heads of each layer."""

    @property
    def layer_indexes(self) -> range:
        """The layers of this rank."""

    @property
    def operations(self) -> Operations:
        """What its layers compute with; they decide how K and V are laid out in a block."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layer_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Runs the step's tokens through all layers.

        Args:
            token_ids: [num_tokens] int64.
            positions: [num_tokens] int64, 0-based in each token's own sequence.
            layer_caches: K and V cache of each layer, written in place.
            metadata: where the tokens are in those caches, and which hidden states are asked for.

        Returns:
            [num_scored, hidden_size], for `head` at the last stage; meaningless at the others.
        """

    def head(self, hidden: Tensor) -> Tensor:
        """[num_samples, hidden_size] -> logits [num_samples, vocabulary_size] in float32."""
