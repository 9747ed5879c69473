"""The Llama family, to be read alongside its papers: Llama 2 (Touvron et al. 2023, arXiv:2307.09288), Llama 3
(Grattafiori et al. 2024, arXiv:2407.21783), SmolLM2 (Allal et al. 2025, arXiv:2502.02737), and those that followed it:
Mistral (Jiang et al. 2023, arXiv:2310.06825), Qwen2 (Yang et al. 2024, arXiv:2407.10671), Qwen3 (Yang et al. 2025,
arXiv:2505.09388).

Hidden states are [num_tokens, hidden_size]: the tokens of all sequences are laid end to end, and only attention knows
where one sequence ends. What differs between members of the family is in `LlamaConfig`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from kernels.choice import Operations
from kernels.cpu_decoder import CpuDecoder, DecoderShape
from kernels.cpu_decoder import DecoderLayer as DescribedLayer
from worker.checkpoint import UnsupportedModel
from worker.layers.attention import AttentionMetadata, attend_rotated
from worker.layers.embedding import Embedding, Head
from worker.layers.linear import Linear, SummedLinear
from worker.layers.norm import RMSNorm
from worker.layers.rotary import Rope, RotaryTable
from worker.models.rope_config import longest_context, read_rope
from worker.ranks import ALONE, Ranks
from worker.shares import MLP_UNIT, Target
from worker.weights import Piece


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The architecture's numbers, as a checkpoint's config.json gives them."""

    vocabulary_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: Rope
    context_length: int
    windows: tuple[int | None, ...]  # of each layer: how many tokens a query sees; None: all before it
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool  # an RMSNorm over each query and key head before the rotation

    @classmethod
    def from_json(cls, config: dict[str, Any], context_length: int | None = None) -> Self:
        """Reads a config.json of one of Hugging Face's classes in `_DEFAULTS`, with that class's defaults.

        Args:
            config: config.json.
            context_length: the longest context to be served, cut to the most that the model can serve; None: what it
                was made for.

        Raises:
            UnsupportedModel: it asks for something that is not built.
        """
        architecture = (config.get("architectures") or ["LlamaForCausalLM"])[0]
        config = _DEFAULTS[architecture] | config
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"activation {config['hidden_act']!r} is not supported, only silu")
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        usual_length, longest = longest_context(config)
        context_length = min(context_length or usual_length, longest)
        # Mistral has no biases, whatever its config.json says, and Qwen2 has them only in q, k and v.
        bias = config.get("attention_bias", False) and architecture != "MistralForCausalLM"
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        return cls(
            vocabulary_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            mlp_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            rope=read_rope(config, head_dim, context_length),
            context_length=context_length,
            windows=_read_windows(config, architecture, context_length),
            tied_embeddings=config.get("tie_word_embeddings", False),
            qkv_bias=is_qwen2 or bias,
            output_bias=bias and not is_qwen2,
            mlp_bias=config.get("mlp_bias", False) and architecture == "LlamaForCausalLM",
            head_norms=architecture == "Qwen3ForCausalLM",
        )


# For each architecture, the defaults of Hugging Face's class, which a config.json may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}


def _read_windows(config: dict[str, Any], architecture: str, context_length: int) -> tuple[int | None, ...]:
    """The window of each layer, or None; a window as long as the context counts as none."""
    num_layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if window is None or window >= context_length or architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture != "MistralForCausalLM" and not config.get("use_sliding_window", False):
        return (None,) * num_layers
    if window < 1:
        raise UnsupportedModel(f"sliding_window is {window}: it has to be positive, or null for none")
    # With layer_types, transformers takes a Mistral for a Ministral, whose layers differ.
    if architecture == "MistralForCausalLM" and not config.get("layer_types"):
        return (window,) * num_layers
    first_windowed = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "full_attention" if index < first_windowed else "sliding_attention" for index in range(num_layers)
    ]
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"layer_types is {kinds}: it has to say full_attention or sliding_attention for each of {num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class LlamaForCausalLM:
    """The whole model; parameters are uninitialised until the checkpoint's tensors have been copied into them.

    Args:
        config: the architecture's numbers.
        operations: what its layers compute with; they decide how K and V are laid out in a block.
        dtype: of the weights and of everything between the layers.
        device: where the weights are.
        ranks: those that share the model.
    """

    def __init__(
        self,
        config: LlamaConfig,
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
        tied = config.tied_embeddings
        self.embedding = Embedding(
            config.vocabulary_size, config.hidden_size, ranks=ranks, tied=tied, dtype=dtype, device=device
        )
        self.layers = [
            DecoderLayer(config, config.windows[index], operations=operations, dtype=dtype, device=device, ranks=ranks)
            for index in self.layer_indexes
        ]
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon, operations=operations, dtype=dtype, device=device)
        self.head = Head(config.hidden_size, config.vocabulary_size, ranks=ranks, dtype=dtype, device=device)
        if tied:
            self.head.tie(self.embedding)
        self.rotary = RotaryTable(config.rope, config.head_dim, config.context_length, dtype=dtype, device=device)
        # One call that computes the same as all layers, if the operations have one; see `_join_layers`.
        self.layers_at_once: CpuDecoder | None = None

    def pieces(self) -> Iterator[Piece]:
        """What is loaded at a time: the ends, then each layer; the last piece loads nothing and joins the layers."""
        yield Piece(self._ends, partial(self.head.pack, self.operations))
        for index, layer in zip(self.layer_indexes, self.layers, strict=True):
            name = f"model.layers.{index}."
            yield Piece(partial(layer.checkpoint_tensors, name), partial(layer.pack, self.operations))
        yield Piece(dict, self._join_layers)

    def _ends(self) -> dict[str, Target]:
        """The name of each of the ends' tensors in the checkpoint -> the part of our parameters that it fills."""
        tensors = self.embedding.checkpoint_tensors("model.embed_tokens.weight")
        if self.ranks.place.is_last:
            tensors["model.norm.weight"] = self.norm.weight
            tensors |= {} if self.config.tied_embeddings else self.head.checkpoint_tensors("")
        return tensors

    def checkpoint_name(self, name: str) -> str:
        """Our name for a tensor that checkpoints may name in several ways; here each has only one name."""
        return name

    def leaves_out(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although we compute its values, or already have them."""
        return name.endswith("rotary_emb.inv_freq") or (self.config.tied_embeddings and name == "lm_head.weight")

    def _join_layers(self) -> None:
        """Joins all packed layers into one call, if the operations can."""
        if self.operations.decoder is not None and self.ranks.place.size == 1:
            shape = DecoderShape(
                self.config.num_heads, self.config.num_kv_heads, self.config.head_dim, self.config.norm_epsilon
            )
            layers = [layer.described() for layer in self.layers]
            self.layers_at_once = self.operations.decoder(shape, layers, self.norm.weight)

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
            metadata: where the tokens are in those caches.

        Returns:
            [num_scored, hidden_size], for `head`.
        """
        rotation = self.rotary.at(positions)
        is_first, is_last = self.ranks.place.is_first, self.ranks.place.is_last
        residual = self.embedding(token_ids) if is_first else self.ranks.receive(len(token_ids), self.norm.weight)
        if self.layers_at_once is not None:
            places = (metadata.slot_mapping, metadata.block_tables, metadata.query_starts, metadata.context_lengths)
            return self.layers_at_once(residual, *rotation, layer_caches, *places, scored=metadata.scored)
        x = torch.zeros_like(residual)  # what a layer before the first one would add
        for layer, layer_cache in zip(self.layers, layer_caches, strict=True):
            x = layer(x, residual, rotation, layer_cache, metadata)
        if not is_last:
            return self.ranks.send(residual.add_(x))
        return self.norm.add(metadata.pick_scored(x), metadata.pick_scored(residual))


class DecoderLayer:
    """x += attention(norm(x)); x += mlp(norm(x)), each sum fused with the norm that follows it."""

    def __init__(
        self,
        config: LlamaConfig,
        window: int | None,
        *,
        operations: Operations,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        size, epsilon = config.hidden_size, config.norm_epsilon
        self.attention_norm = RMSNorm(size, epsilon, operations=operations, dtype=dtype, device=device)
        self.attention = Attention(config, window, operations=operations, dtype=dtype, device=device, ranks=ranks)
        self.mlp_norm = RMSNorm(size, epsilon, operations=operations, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device, ranks=ranks)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Target]:
        """As `LlamaForCausalLM._ends`, for one layer."""
        return {
            f"{prefix}input_layernorm.weight": self.attention_norm.weight,
            f"{prefix}post_attention_layernorm.weight": self.mlp_norm.weight,
            **self.attention.checkpoint_tensors(f"{prefix}self_attn."),
            **self.mlp.gate_up.checkpoint_tensors(f"{prefix}mlp."),
            **self.mlp.down.checkpoint_tensors(f"{prefix}mlp."),
        }

    def pack(self, operations: Operations) -> None:
        """See `Linear.pack`."""
        for linear in (self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down):
            linear.pack(operations)

    def described(self) -> DescribedLayer:
        """This packed layer, as the operations take it to make one call of all layers."""
        norms = self.attention.head_norms
        return DescribedLayer(
            attention_norm=self.attention_norm.weight,
            qkv=self.attention.qkv.packed,
            head_norms=(norms["q_norm"].weight, norms["k_norm"].weight) if norms else None,
            output=self.attention.output.packed,
            mlp_norm=self.mlp_norm.weight,
            gate_up=self.mlp.gate_up.packed,
            down=self.mlp.down.packed,
            window=self.attention.window,
        )

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        layer_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """What the MLP adds, [num_tokens, hidden_size]; the sum of all before it is put into `residual`, in place."""
        x = self.attention(self.attention_norm.add(x, residual), rotation, layer_cache, metadata)
        return self.mlp(self.mlp_norm.add(x, residual))


class Attention:
    """Grouped-query attention over the paged cache, with rotary positions."""

    def __init__(
        self,
        config: LlamaConfig,
        window: int | None,
        *,
        operations: Operations,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        self._operations = operations
        self.window = window
        self.head_dim = config.head_dim
        heads = ranks.deal_heads(config.num_heads, config.num_kv_heads)
        self._num_kv_heads = heads.kv.size
        queries, kv = heads.queries.times(config.head_dim), heads.kv.times(config.head_dim)
        parts = {"q_proj": queries, "k_proj": kv, "v_proj": kv}
        self.qkv = Linear(config.hidden_size, parts, bias=config.qkv_bias, dtype=dtype, device=device)
        self.output = SummedLinear(
            queries,
            "o_proj",
            config.hidden_size,
            ranks=ranks,
            bias=config.output_bias,
            dtype=dtype,
            device=device,
        )
        self.head_norms: dict[str, RMSNorm] = {}
        if config.head_norms:
            for name in ("q_norm", "k_norm"):
                self.head_norms[name] = RMSNorm(
                    config.head_dim, config.norm_epsilon, operations=operations, dtype=dtype, device=device
                )

    def checkpoint_tensors(self, prefix: str) -> dict[str, Target]:
        """As `LlamaForCausalLM._ends`, for this part of one layer."""
        norms: dict[str, Target] = {f"{prefix}{name}.weight": norm.weight for name, norm in self.head_norms.items()}
        return self.qkv.checkpoint_tensors(prefix) | self.output.checkpoint_tensors(prefix) | norms

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        layer_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Like `x`, [num_tokens, hidden_size]."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [T, Hq + 2 * Hkv, D]
        if self.head_norms:
            self._normalize(heads)
        scale = self.head_dim**-0.5
        attended = attend_rotated(self._operations, heads, rotation, layer_cache, metadata, scale, self.window)
        return self.output(attended.flatten(1))

    def _normalize(self, heads: Tensor) -> None:
        """Qwen3's norms over each head of q and k, in place; heads: [T, Hq + 2 * Hkv, D]."""
        q, k = heads[:, : -2 * self._num_kv_heads], heads[:, -2 * self._num_kv_heads : -self._num_kv_heads]
        for part, norm in zip((q, k), self.head_norms.values(), strict=True):
            part.copy_(norm(part.contiguous()))


class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> None:
        size, bias = config.hidden_size, config.mlp_bias
        share = ranks.deal(config.mlp_size, MLP_UNIT)
        parts = {"gate_proj": share, "up_proj": share}
        self.gate_up = Linear(size, parts, bias=bias, dtype=dtype, device=device, gated=True)
        self.down = SummedLinear(share, "down_proj", size, ranks=ranks, bias=bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Like `x`, [num_tokens, hidden_size]."""
        return self.down(self.gate_up(x))
