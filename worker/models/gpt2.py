"""GPT-2, to be read alongside its paper: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

A decoder of Radford et al. 2018 with each block's LayerNorm moved before it and one more after the last; positions are
learned, the MLP is four times as wide as the model, and the head is the token embedding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from kernels.choice import Operations
from worker.checkpoint import UnsupportedModel
from worker.layers.attention import AttentionMetadata, attend
from worker.layers.embedding import Embedding, Head
from worker.layers.layer_norm import LayerNorm
from worker.layers.linear import Linear, SummedLinear
from worker.ranks import ALONE, Ranks
from worker.shares import MLP_UNIT, Share, Target
from worker.weights import Piece


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The architecture's numbers, as a checkpoint's config.json gives them."""

    vocabulary_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    norm_epsilon: float
    context_length: int  # positions that the model has learned
    tied_embeddings: bool
    scaled_attention: bool  # scores times 1 / sqrt(head_dim)
    scaled_by_layer: bool  # and times 1 / (layer index + 1)

    @classmethod
    def from_json(cls, config: dict[str, Any], context_length: int | None = None) -> Self:
        """Reads a config.json of Hugging Face's `GPT2LMHeadModel`, with that class's defaults.

        Args:
            config: config.json.
            context_length: the longest context to be served; it changes nothing: positions are learned.

        Raises:
            UnsupportedModel: it asks for something that is not built.
        """
        activation = config.get("activation_function", "gelu_new")
        if activation not in ("gelu_new", "gelu_pytorch_tanh"):
            raise UnsupportedModel(f"activation {activation!r} is not supported, only gelu_new")
        if config.get("add_cross_attention", False):
            raise UnsupportedModel("cross-attention is not supported")
        hidden_size, num_heads = config.get("n_embd", 768), config.get("n_head", 12)
        if hidden_size % num_heads != 0:
            raise UnsupportedModel(f"{num_heads} heads do not share a hidden size of {hidden_size} equally")
        return cls(
            vocabulary_size=config["vocab_size"],
            hidden_size=hidden_size,
            mlp_size=config.get("n_inner") or 4 * hidden_size,
            num_layers=config.get("n_layer", 12),
            num_heads=num_heads,
            norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
            context_length=config.get("n_positions", 1024),
            tied_embeddings=config.get("tie_word_embeddings", True),
            scaled_attention=config.get("scale_attn_weights", True),
            scaled_by_layer=config.get("scale_attn_by_inverse_layer_idx", False),
        )

    @property
    def num_kv_heads(self) -> int:
        """Every query head has its own K and V."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """The number of values in a head."""
        return self.hidden_size // self.num_heads


class GPT2ForCausalLM:
    """The whole model; parameters are uninitialised until the checkpoint's tensors have been copied into them.

    Args:
        config: the architecture's numbers.
        operations: what its layers compute with.
        dtype: of the weights and of everything between the layers.
        device: where the weights are.
        ranks: those that share the model.
    """

    def __init__(
        self,
        config: GPT2Config,
        *,
        operations: Operations,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.operations = operations
        self.ranks = ranks
        self.heads = ranks.deal_heads(config.num_heads, config.num_kv_heads)
        self.layer_indexes = ranks.place.layers(config.num_layers)
        size = config.hidden_size
        tied = config.tied_embeddings
        self.embedding = Embedding(config.vocabulary_size, size, ranks=ranks, tied=tied, dtype=dtype, device=device)
        self.positions = Embedding(config.context_length, size, dtype=dtype, device=device)
        self.blocks = [
            Block(config, index, operations=operations, dtype=dtype, device=device, ranks=ranks)
            for index in self.layer_indexes
        ]
        self.norm = LayerNorm(size, config.norm_epsilon, dtype=dtype, device=device)
        self.head = Head(size, config.vocabulary_size, ranks=ranks, dtype=dtype, device=device)
        if tied:
            self.head.tie(self.embedding)

    def pieces(self) -> Iterator[Piece]:
        """What is loaded at a time: the ends, then each block."""
        yield Piece(self._ends, partial(self.head.pack, self.operations))
        for index, block in zip(self.layer_indexes, self.blocks, strict=True):
            yield Piece(partial(block.checkpoint_tensors, f"h.{index}."), partial(block.pack, self.operations))

    def _ends(self) -> dict[str, Target]:
        """The name of each of the ends' tensors in the checkpoint -> the part of our parameters that it fills."""
        tensors = self.embedding.checkpoint_tensors("wte.weight")
        if self.ranks.place.is_first:
            tensors |= self.positions.checkpoint_tensors("wpe.weight")
        if self.ranks.place.is_last:
            tensors |= self.norm.checkpoint_tensors("ln_f")
            tensors |= {} if self.config.tied_embeddings else self.head.checkpoint_tensors("")
        return tensors

    def checkpoint_name(self, name: str) -> str:
        """OpenAI's own checkpoints have no "transformer." before the names; those fine-tuned since then do."""
        return name.removeprefix("transformer.")

    def leaves_out(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although we compute its values, or already have them."""
        mask = name.endswith((".attn.bias", ".attn.masked_bias"))  # the causal mask, not a projection's bias
        return mask or (self.config.tied_embeddings and name == "lm_head.weight")

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layer_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `worker.models.model.Model`."""
        if self.ranks.place.is_first:
            x = self.embedding(token_ids) + self.positions(positions)  # [T, E]
        else:
            x = self.ranks.receive(len(token_ids), self.norm.weight)
        for block, layer_cache in zip(self.blocks, layer_caches, strict=True):
            x = block(x, layer_cache, metadata)
        return self.norm(metadata.pick_scored(x)) if self.ranks.place.is_last else self.ranks.send(x)


def _transposed(tensors: dict[str, Target]) -> dict[str, Target]:
    """Targets for weights that are [in_features, out_features] in the checkpoint, as in OpenAI's TensorFlow code."""
    return {name: target.t() if name.endswith(".weight") else target for name, target in tensors.items()}


class Block:
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(
        self,
        config: GPT2Config,
        index: int,
        *,
        operations: Operations,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        size, mlp = config.hidden_size, ranks.deal(config.mlp_size, MLP_UNIT)
        heads = ranks.deal_heads(config.num_heads, config.num_heads).queries
        values = heads.times(config.head_dim)

        def linear(name: str, outputs: Share) -> Linear:
            return Linear(size, {name: outputs}, bias=True, dtype=dtype, device=device)

        def summed(inputs: Share, name: str) -> SummedLinear:
            return SummedLinear(inputs, name, size, ranks=ranks, bias=True, dtype=dtype, device=device)

        self._operations = operations
        self._num_heads = heads.size
        self._scale = config.head_dim**-0.5 if config.scaled_attention else 1.0
        if config.scaled_by_layer:
            self._scale /= index + 1
        self.attention_norm = LayerNorm(size, config.norm_epsilon, dtype=dtype, device=device)
        self.qkv = linear("attn.c_attn", values.repeated(3))
        self.output = summed(values, "attn.c_proj")
        self.mlp_norm = LayerNorm(size, config.norm_epsilon, dtype=dtype, device=device)
        self.up = linear("mlp.c_fc", mlp)
        self.down = summed(mlp, "mlp.c_proj")

    def checkpoint_tensors(self, prefix: str) -> dict[str, Target]:
        """As `GPT2ForCausalLM._ends`, for one block."""
        tensors = self.attention_norm.checkpoint_tensors(f"{prefix}ln_1")
        tensors |= self.mlp_norm.checkpoint_tensors(f"{prefix}ln_2")
        for linear in (self.qkv, self.output, self.up, self.down):
            tensors |= _transposed(linear.checkpoint_tensors(prefix))
        return tensors

    def pack(self, operations: Operations) -> None:
        """See `Linear.pack`."""
        for linear in (self.qkv, self.output, self.up, self.down):
            linear.pack(operations)

    def __call__(self, x: Tensor, layer_cache: tuple[Tensor, Tensor], metadata: AttentionMetadata) -> Tensor:
        """Like `x`, [num_tokens, hidden_size]."""
        x = x + self._attend(self.attention_norm(x), layer_cache, metadata)
        return x + self.down(self._operations.gelu(self.up(self.mlp_norm(x)), "tanh"))

    def _attend(self, x: Tensor, layer_cache: tuple[Tensor, Tensor], metadata: AttentionMetadata) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], 3, self._num_heads, -1)  # [T, 3, H, D]
        q, k, v = heads.unbind(1)
        attended = attend(self._operations, q, k, v, layer_cache, metadata, self._scale)  # [T, H, D]
        return self.output(attended.flatten(1))
