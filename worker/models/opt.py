"""OPT, to be read alongside its paper: Zhang et al. 2022, arXiv:2205.01068.

GPT-3's decoder with ReLU and learned positions, whose first two rows no token ever uses. Only the 350m model puts its
LayerNorms after each block instead of before it, has none after the last, and embeds tokens in a smaller space than its
layers work in.
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

# Position 0 is row 2 of the table: fairseq kept the rows up to its padding id for padding.
_FIRST_POSITION = 2
_NORM_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class OPTConfig:
    """The architecture's numbers, as a checkpoint's config.json gives them."""

    vocabulary_size: int
    embedding_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    context_length: int  # positions that the model has learned
    norm_first: bool
    final_norm: bool
    bias: bool
    learned_norms: bool
    tied_embeddings: bool

    @classmethod
    def from_json(cls, config: dict[str, Any], context_length: int | None = None) -> Self:
        """Reads a config.json of Hugging Face's `OPTForCausalLM`, with that class's defaults.

        Args:
            config: config.json.
            context_length: the longest context to be served; it changes nothing: positions are learned.

        Raises:
            UnsupportedModel: it asks for something that is not built.
        """
        if config.get("activation_function", "relu") != "relu":
            raise UnsupportedModel(f"activation {config['activation_function']!r} is not supported, only relu")
        hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
        if hidden_size % num_heads != 0:
            raise UnsupportedModel(f"{num_heads} heads do not share a hidden size of {hidden_size} equally")
        norm_first = config.get("do_layer_norm_before", True)
        return cls(
            vocabulary_size=config["vocab_size"],
            embedding_size=config.get("word_embed_proj_dim") or hidden_size,
            hidden_size=hidden_size,
            mlp_size=config["ffn_dim"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            context_length=config.get("max_position_embeddings", 2048),
            norm_first=norm_first,
            final_norm=norm_first and not config.get("_remove_final_layer_norm", False),
            bias=config.get("enable_bias", True),
            learned_norms=config.get("layer_norm_elementwise_affine", True),
            tied_embeddings=config.get("tie_word_embeddings", True),
        )

    @property
    def num_kv_heads(self) -> int:
        """Every query head has its own K and V."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """The number of values in a head."""
        return self.hidden_size // self.num_heads


class OPTForCausalLM:
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
        config: OPTConfig,
        *,
        operations: Operations,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.operations = operations
        self.ranks = ranks
        self.heads = ranks.deal_heads(config.num_heads, config.num_heads)
        self.layer_indexes = ranks.place.layers(config.num_layers)
        size, embedding_size = config.hidden_size, config.embedding_size
        tied = config.tied_embeddings
        self.embedding = Embedding(
            config.vocabulary_size, embedding_size, ranks=ranks, tied=tied, dtype=dtype, device=device
        )
        self.positions = Embedding(_FIRST_POSITION + config.context_length, size, dtype=dtype, device=device)
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if embedding_size != size:
            self.project_in = Linear(embedding_size, {"project_in": size}, bias=False, dtype=dtype, device=device)
            self.project_out = Linear(size, {"project_out": embedding_size}, bias=False, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(config, operations=operations, dtype=dtype, device=device, ranks=ranks)
            for _ in self.layer_indexes
        ]
        self.norm: LayerNorm | None = None
        if config.final_norm:
            self.norm = LayerNorm(size, _NORM_EPSILON, learned=config.learned_norms, dtype=dtype, device=device)
        self.head = Head(embedding_size, config.vocabulary_size, ranks=ranks, dtype=dtype, device=device)
        if tied:
            self.head.tie(self.embedding)

    def pieces(self) -> Iterator[Piece]:
        """What is loaded at a time: the ends, then each layer."""
        yield Piece(self._ends, self._pack_ends)
        for index, layer in zip(self.layer_indexes, self.layers, strict=True):
            yield Piece(partial(layer.checkpoint_tensors, f"layers.{index}."), partial(layer.pack, self.operations))

    def _ends(self) -> dict[str, Target]:
        """The name of each of the ends' tensors in the checkpoint -> the part of our parameters that it fills."""
        place = self.ranks.place
        tensors = self.embedding.checkpoint_tensors("embed_tokens.weight")
        if place.is_first:
            tensors |= self.positions.checkpoint_tensors("embed_positions.weight")
        for projection in self._projections():
            tensors |= projection.checkpoint_tensors("")
        if self.norm is not None and place.is_last:
            tensors |= self.norm.checkpoint_tensors("final_layer_norm")
        if place.is_last and not self.config.tied_embeddings:
            tensors |= self.head.checkpoint_tensors("")
        return tensors

    def _pack_ends(self) -> None:
        for projection in self._projections():
            projection.pack(self.operations)
        self.head.pack(self.operations)

    def _projections(self) -> Iterator[Linear]:
        """The projections that this stage calls."""
        place = self.ranks.place
        for projection, is_here in ((self.project_in, place.is_first), (self.project_out, place.is_last)):
            if projection is not None and is_here:
                yield projection

    def checkpoint_name(self, name: str) -> str:
        """Names begin with "model.decoder.", or, if the model was saved without its head, with "decoder."."""
        return name.removeprefix("model.").removeprefix("decoder.")

    def leaves_out(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although we compute its values, or already have them."""
        return self.config.tied_embeddings and name == "lm_head.weight"

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layer_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `worker.models.model.Model`; the size of the result is embedding_size."""
        if self.ranks.place.is_first:
            x = self._embed(token_ids, positions)  # [T, E]
        else:
            x = self.ranks.receive(len(token_ids), self.positions.weight)
        for layer, layer_cache in zip(self.layers, layer_caches, strict=True):
            x = layer(x, layer_cache, metadata)
        if not self.ranks.place.is_last:
            return self.ranks.send(x)
        x = metadata.pick_scored(x)
        if self.norm is not None:
            x = self.norm(x)
        return self.project_out(x) if self.project_out is not None else x

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(token_ids)  # [T, embedding_size]
        if self.project_in is not None:
            x = self.project_in(x)
        return x + self.positions(positions + _FIRST_POSITION)


class DecoderLayer:
    """x += attention(norm(x)); x += mlp(norm(x)); or, in 350m, x = norm(x + attention(x)); x = norm(x + mlp(x))."""

    def __init__(
        self, config: OPTConfig, *, operations: Operations, dtype: torch.dtype, device: torch.device, ranks: Ranks
    ) -> None:
        size, mlp = config.hidden_size, ranks.deal(config.mlp_size, MLP_UNIT)
        heads = ranks.deal_heads(config.num_heads, config.num_heads).queries
        values = heads.times(config.head_dim)

        def linear(*names: str, outputs: Share) -> Linear:
            return Linear(size, dict.fromkeys(names, outputs), bias=config.bias, dtype=dtype, device=device)

        def summed(inputs: Share, name: str) -> SummedLinear:
            return SummedLinear(inputs, name, size, ranks=ranks, bias=config.bias, dtype=dtype, device=device)

        def norm() -> LayerNorm:
            return LayerNorm(size, _NORM_EPSILON, learned=config.learned_norms, dtype=dtype, device=device)

        self._operations = operations
        self._num_heads = heads.size
        self._scale = config.head_dim**-0.5
        self._norm_first = config.norm_first
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", outputs=values)
        self.output = summed(values, "self_attn.out_proj")
        self.up = linear("fc1", outputs=mlp)
        self.down = summed(mlp, "fc2")

    def checkpoint_tensors(self, prefix: str) -> dict[str, Target]:
        """As `OPTForCausalLM._ends`, for one layer."""
        tensors = self.attention_norm.checkpoint_tensors(f"{prefix}self_attn_layer_norm")
        tensors |= self.mlp_norm.checkpoint_tensors(f"{prefix}final_layer_norm")
        for linear in (self.qkv, self.output, self.up, self.down):
            tensors |= linear.checkpoint_tensors(prefix)
        return tensors

    def pack(self, operations: Operations) -> None:
        """See `Linear.pack`."""
        for linear in (self.qkv, self.output, self.up, self.down):
            linear.pack(operations)

    def __call__(self, x: Tensor, layer_cache: tuple[Tensor, Tensor], metadata: AttentionMetadata) -> Tensor:
        """Like `x`, [num_tokens, hidden_size]."""
        if self._norm_first:
            x = x + self._attend(self.attention_norm(x), layer_cache, metadata)
            return x + self._transform(self.mlp_norm(x))
        x = self.attention_norm(x + self._attend(x, layer_cache, metadata))
        return self.mlp_norm(x + self._transform(x))

    def _attend(self, x: Tensor, layer_cache: tuple[Tensor, Tensor], metadata: AttentionMetadata) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], 3, self._num_heads, -1)  # [T, 3, H, D]
        q, k, v = heads.unbind(1)
        attended = attend(self._operations, q, k, v, layer_cache, metadata, self._scale)  # [T, H, D]
        return self.output(attended.flatten(1))

    def _transform(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu_())
