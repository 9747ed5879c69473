"""The Llama family, to be read beside its papers: Llama 2 (Touvron et al. 2023, arXiv:2307.09288), Llama 3 (Grattafiori
et al. 2024, arXiv:2407.21783), SmolLM2 (Allal et al. 2025, arXiv:2502.02737).

Hidden states are [num_tokens, hidden_size]: the tokens of all sequences stand in one row, and only attention knows
where one sequence ends. What differs between members of the family stands in `LlamaConfig`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kernels import reference
from worker.checkpoint import UnsupportedModel
from worker.layers.attention import AttentionMetadata, attend
from worker.layers.embedding import Embedding, Head
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.rotary import DefaultRope, LinearRope, Llama3Rope, Rope, RotaryTable


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
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        """Reads a config.json of Hugging Face's `LlamaForCausalLM`, with that class's defaults.

        Raises:
            UnsupportedModel: it asks for what is not built.
        """
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"activation {config['hidden_act']!r} is not supported, only silu")
        if config.get("quantization_config"):
            raise UnsupportedModel("quantized checkpoints are not supported yet")
        num_heads = config["num_attention_heads"]
        return cls(
            vocabulary_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            mlp_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            rope=_read_rope(config),
            context_length=config.get("max_position_embeddings", 2048),
            tied_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
        )


def _read_rope(config: dict[str, Any]) -> Rope:
    # transformers 5 keeps everything in rope_parameters; before it, rope_theta stood beside rope_scaling.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return DefaultRope(theta)
    if kind == "linear":
        return LinearRope(theta, parameters["factor"])
    if kind == "llama3":
        return Llama3Rope(
            theta,
            factor=parameters["factor"],
            low_frequency_factor=parameters["low_freq_factor"],
            high_frequency_factor=parameters["high_freq_factor"],
            original_context_length=parameters["original_max_position_embeddings"],
        )
    raise UnsupportedModel(f"rope type {kind!r} is not supported, only default, linear and llama3")


class LlamaForCausalLM:
    """The whole model; parameters are uninitialised until the checkpoint's tensors have been copied into them."""

    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.embedding = Embedding(config.vocabulary_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon, dtype=dtype, device=device)
        self.head = Head(config.hidden_size, config.vocabulary_size, dtype=dtype, device=device)
        if config.tied_embeddings:
            self.head.tie(self.embedding)
        self.rotary = RotaryTable(config.rope, config.head_dim, config.context_length, dtype=dtype, device=device)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The name of each tensor in the checkpoint -> the part of our parameters that it fills."""
        tensors = {"model.embed_tokens.weight": self.embedding.weight, "model.norm.weight": self.norm.weight}
        for index, layer in enumerate(self.layers):
            tensors |= layer.checkpoint_tensors(f"model.layers.{index}.")
        if not self.config.tied_embeddings:
            tensors |= self.head.checkpoint_tensors("")
        return tensors

    def leaves_out(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor though we compute, or already have, what is in it."""
        return name.endswith("rotary_emb.inv_freq") or (self.config.tied_embeddings and name == "lm_head.weight")

    def pack(self) -> None:
        """Puts the loaded weights into the layout that the device multiplies fastest."""
        for layer in self.layers:
            for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down):
                linear.pack()
        self.head.pack()

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
            metadata: where the tokens stand in those caches.

        Returns:
            [num_tokens, hidden_size], for `head`.
        """
        rotation = self.rotary.at(positions)
        residual = self.embedding(token_ids)
        x = torch.zeros_like(residual)  # what the layer before the first one adds
        for layer, layer_cache in zip(self.layers, layer_caches, strict=True):
            x = layer(x, residual, rotation, layer_cache, metadata)
        return self.norm.add(x, residual)


class DecoderLayer:
    """x += attention(norm(x)); x += mlp(norm(x)), each sum fused with the norm that follows it."""

    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon, dtype=dtype, device=device)
        self.attention = Attention(config, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """As the model's, for one layer."""
        return {
            f"{prefix}input_layernorm.weight": self.attention_norm.weight,
            f"{prefix}post_attention_layernorm.weight": self.mlp_norm.weight,
            **self.attention.qkv.checkpoint_tensors(f"{prefix}self_attn."),
            **self.attention.output.checkpoint_tensors(f"{prefix}self_attn."),
            **self.mlp.gate_up.checkpoint_tensors(f"{prefix}mlp."),
            **self.mlp.down.checkpoint_tensors(f"{prefix}mlp."),
        }

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor],
        layer_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """What the MLP adds, [num_tokens, hidden_size]; the sum of all before it stands in `residual`, in place."""
        x = self.attention(self.attention_norm.add(x, residual), rotation, layer_cache, metadata)
        return self.mlp(self.mlp_norm.add(x, residual))


class Attention:
    """Grouped-query attention over the paged cache, with rotary positions."""

    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        bias = config.attention_bias
        self.qkv = Linear(config.hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.output = Linear(q_size, {"o_proj": config.hidden_size}, bias=bias, dtype=dtype, device=device)

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        layer_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Like `x`, [num_tokens, hidden_size]."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [T, Hq + 2 * Hkv, D]
        reference.rotary_embedding(heads[:, : -self.num_kv_heads], *rotation)  # q and k at once
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        attended = attend(q, k, v, layer_cache, metadata, self.head_dim**-0.5)
        return self.output(attended.flatten(1))


class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        parts = {"gate_proj": config.mlp_size, "up_proj": config.mlp_size}
        bias = config.mlp_bias
        self.gate_up = Linear(config.hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.down = Linear(config.mlp_size, {"down_proj": config.hidden_size}, bias=bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Like `x`, [num_tokens, hidden_size]."""
        return self.down(reference.silu_and_mul(self.gate_up(x)))
