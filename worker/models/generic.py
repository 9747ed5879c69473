"""Any causal model of transformers, on our paged cache: its own layers, our attention.

transformers calls the attention that a model's configuration names, and passes on to it what the model was called with
(`AttentionInterface`, transformers 5). Ours takes the step from there, writes K and V into the layer's cache and
attends with the same operations as our own models. The tokens of all rows are laid end to end, [1, num_tokens];
positions are given, so that no layer asks where a sequence begins, and no cache object of transformers is made.

What else a model does cannot be known from its configuration. So each model proves itself when it is loaded: the logits
of two short sequences in one step have to match those of transformers' eager attention, each sequence alone. This is
the only module that imports transformers, which takes seconds.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

from kernels.choice import LinearLayer, Operations
from kernels.reference import PlainLinear
from worker.checkpoint import ModelError, UnsupportedModel
from worker.layers.attention import AttentionMetadata, attend
from worker.ranks import ALONE
from worker.weights import check_files, listed, memory_for_weights, not_finite

_ATTENTION = "pagewire"
# Relative error of the logits, as vectors, below which a model has proved itself; for one that fails it is near one.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Tensors that attention may be given besides q, k and v without being another kind of attention.
_KNOWN_TENSORS = frozenset({"position_ids", "cache_position"})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenericNumbers:
    """The numbers of the architecture that the worker needs; transformers handles the others."""

    vocabulary_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_length: int

    @classmethod
    def from_config(cls, config: PreTrainedConfig, context_length: int | None) -> "GenericNumbers":
        """Reads a configuration of transformers.

        Args:
            config: of the text model.
            context_length: the longest context to be served; None, or more than the model was made for: what it was
                made for.

        Raises:
            UnsupportedModel: it does not give the shape of the cache.
        """
        try:
            num_heads = config.num_attention_heads
            longest = config.max_position_embeddings
            return cls(
                vocabulary_size=config.vocab_size,
                num_layers=config.num_hidden_layers,
                num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
                context_length=min(context_length or longest, longest),
            )
        except Exception as error:  # see `_read_config`
            reason = _first_line(error)
            raise UnsupportedModel(f"its configuration does not give the shape of a KV cache: {reason}") from error


@dataclass(slots=True)
class _Step:
    """What one forward pass attends with; and, for the proof, what each layer asked for.

    Attributes:
        dtype: of the model; queries and keys that a layer has rotated in another dtype are converted to it.
        windows: (layer, window) of each call.
    """

    operations: Operations
    layer_caches: Sequence[tuple[Tensor, Tensor]]
    metadata: AttentionMetadata
    context_length: int
    dtype: torch.dtype
    windows: list[tuple[int, int | None]] = field(default_factory=list)


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    pagewire_step: _Step | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it.

    Args:
        module: the layer's attention; its `layer_idx` names its cache.
        query: [1, num_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim].
        value: like `key`.
        attention_mask: None, since transformers makes none for attention that it does not know.
        scaling: factor of the scores; None: 1 / sqrt(head_dim).
        sliding_window: how many tokens a query sees; None: all.
        softcap: bound of the scores; None: none.
        pagewire_step: the step, as it was given to the model.
        others: what else the model was called with, and what other kinds of attention need.

    Returns:
        [1, num_tokens, num_heads, head_dim], and None for the attention's weights.
    """
    if pagewire_step is None:
        raise UnsupportedModel("its layers do not pass on what the model was called with")
    _check_plain(module, key, value, attention_mask, others)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    window = sliding_window if sliding_window and sliding_window < pagewire_step.context_length else None
    pagewire_step.windows.append((layer, window))
    layer_cache = pagewire_step.layer_caches[layer]
    q, k, v = (
        heads[0].transpose(0, 1).to(pagewire_step.dtype).contiguous() for heads in (query, key, value)
    )  # [T, H, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    attended = attend(pagewire_step.operations, q, k, v, layer_cache, pagewire_step.metadata, scale, window, softcap)
    return attended[None].to(query.dtype), None


def _check_plain(
    module: nn.Module, key: Tensor, value: Tensor, attention_mask: Tensor | None, others: dict[str, Any]
) -> None:
    if key.shape != value.shape:
        sizes = f"its keys are {list(key.shape)} and its values {list(value.shape)}"
        raise UnsupportedModel(f"{sizes} (latent attention?), but the cache has one size")
    if attention_mask is not None or not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise UnsupportedModel("its attention is not merely causal")
    unknown = [name for name, given in others.items() if isinstance(given, Tensor) and name not in _KNOWN_TENSORS]
    if unknown:
        raise UnsupportedModel(f"its attention takes {', '.join(unknown)}")


AttentionInterface.register(_ATTENTION, _paged_attention)


class _Packed(nn.Module):
    """Replaces an nn.Linear: the same product, with the weight in the layout that the device multiplies fastest."""

    def __init__(self, product: LinearLayer, weight: Tensor) -> None:
        super().__init__()
        self._product = product
        self.weight = weight.new_empty(0)  # for layers that ask for its dtype

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x.flatten(0, -2)).to(x.dtype).unflatten(0, x.shape[:-1])


class _Hidden:
    """The output of a model's layers, as its head reads it: None for what it only passes on, which differs by class."""

    def __init__(self, hidden: Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


class _Given(nn.Module):
    """Replaces a model's layers: returns the hidden states that it is given, for the head to score."""

    @property
    def decoder(self) -> nn.Module:
        """The part of OPT's layers that the model with its head calls."""
        return self

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **_: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


class GenericForCausalLM:
    """A model of transformers with its weights, as `worker.models.model.Model`.

    Args:
        whole: the model with its head; its layers are replaced, and kept beside it.
        layers: its layers, which it called for the hidden states.
        numbers: of its architecture.
        operations: what its attention computes with.
    """

    def __init__(
        self, whole: PreTrainedModel, layers: nn.Module, numbers: GenericNumbers, operations: Operations
    ) -> None:
        self.config = numbers
        self.operations = operations
        self.ranks = ALONE
        self.heads = ALONE.deal_heads(numbers.num_kv_heads, numbers.num_kv_heads)
        self.layer_indexes = range(numbers.num_layers)
        self._whole, self._layers = whole, layers
        self._dtype = whole.dtype
        setattr(whole, whole.base_model_prefix, _Given())

    @property
    def embedding(self) -> Any:
        """What turns token ids into vectors."""
        return self._layers.get_input_embeddings()  # type: ignore[operator]

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        layer_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `worker.models.model.Model`."""
        return metadata.pick_scored(self.run(token_ids, positions, self.step(layer_caches, metadata)))

    def step(self, layer_caches: Sequence[tuple[Tensor, Tensor]], metadata: AttentionMetadata) -> _Step:
        """What a forward pass on these caches attends with."""
        return _Step(self.operations, layer_caches, metadata, self.config.context_length, self._dtype)

    def run(self, token_ids: Tensor, positions: Tensor, step: _Step) -> Tensor:
        """The same for all tokens, with a step that the caller has made."""
        output = self._layers(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, pagewire_step=step
        )
        return output.last_hidden_state[0]  # [T, E]

    def head(self, hidden: Tensor) -> Tensor:
        """[num_samples, hidden_size] -> logits [num_samples, vocabulary_size] in float32.

        Calls the model's own forward, since what is done to the logits (bounds, factors) is there.
        """
        return self._whole(inputs_embeds=hidden[None], use_cache=False).logits[0].float()


def load_generic(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    choose_operations: Callable[[int], Operations],
    context_length: int | None,
    cache_dtype: torch.dtype,
) -> GenericForCausalLM:
    """The model in `directory`, once it has proved itself.

    Args:
        directory: of the checkpoint.
        dtype: of the weights.
        device: where they and the KV cache are to be.
        choose_operations: returns those for heads of a given number of values.
        context_length: the longest context to be served; None: as long as the model was made for.
        cache_dtype: of the KV cache.

    Raises:
        UnsupportedModel: transformers does not know the model, or it needs more than attention on a paged cache.
        ModelError: weights are missing or damaged or have the wrong shape, or there is no memory for them.
    """
    disable_progress_bar()  # it would write over the log
    config = _read_config(directory)
    numbers = GenericNumbers.from_config(config.get_text_config(), context_length)
    whole = _load(directory, config, dtype, device).eval()
    _fix_rotation(whole, numbers.context_length)
    # What else its own layers do cannot be known: they may look at what is on the device.
    operations = replace(choose_operations(numbers.head_dim), recordable=False)
    return _prove(directory, whole, numbers, operations, cache_dtype, device)


def _read_config(directory: Path) -> PreTrainedConfig:
    """The configuration, once the model's kind is known to run here; this is checked before its weights are read."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever the code of a hundred architectures raises, it means the same here
        raise UnsupportedModel(f"transformers does not know it: {_first_line(error)}") from error
    _check_kind(skeleton, config.get_text_config())
    return config


def _load(directory: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    check_files(directory)
    try:
        with memory_for_weights(directory):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported, and refused below
            )
            model, info = loaded
            model.to(device)
    except ModelError:
        raise
    except Exception as error:  # see `_read_config`
        raise UnsupportedModel(f"transformers cannot load it: {_first_line(error)}") from error
    if info["mismatched_keys"]:
        name, found, meant = min(info["mismatched_keys"])
        raise ModelError(f"{name} is {list(found)} in {directory}, but config.json means {list(meant)}")
    if info["missing_keys"]:
        raise ModelError(f"{directory} lacks {listed(info['missing_keys'])}")
    if info["unexpected_keys"]:
        log.warning("%d tensors of %s are of no use to the model", len(info["unexpected_keys"]), directory)
    return model


def _check_kind(whole: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Refuses a model by what its class and configuration say about it; see also `_check_plain`."""
    if getattr(whole, "_is_stateful", False):
        raise UnsupportedModel("its layers keep a state beside their keys and values (state space, linear attention)")
    if whole.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise UnsupportedModel("it has cross-attention")
    if not whole._supports_attention_backend:
        raise UnsupportedModel("its layers do not call the attention that its configuration names")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModel(f"it has layers of {', '.join(sorted(kinds))}")
    if whole.base_model is whole:
        raise UnsupportedModel("its head cannot be told from its layers")


def _fix_rotation(whole: nn.Module, context_length: int) -> None:
    """Fixes frequencies that would depend on the longest sequence of a step to those of the longest context.

    Keys in the cache, which sequences may share, do not match queries rotated by others (see `DynamicRope`).
    """
    module: Any
    for module in whole.modules():
        types = getattr(module, "rope_type", None)
        by_layer: dict[Any, Any] = types if isinstance(types, dict) else {None: types}
        for layer_type, rope_type in by_layer.items():
            if rope_type is None or not ("dynamic" in rope_type or rope_type == "longrope"):
                continue
            prefix, chosen = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
            old: Tensor = getattr(module, f"{prefix}inv_freq")
            make = ROPE_INIT_FUNCTIONS[rope_type]
            frequencies, factor = make(module.config, old.device, seq_len=context_length, **chosen)
            module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
            setattr(module, f"{prefix}attention_scaling", factor)
            by_layer[layer_type] = "default"
            log.info("rope type %s turns as at %d tokens of context, whatever the step", rope_type, context_length)
        if isinstance(types, str):
            module.rope_type = by_layer[None]


def _settle(whole: nn.Module, head: nn.Module | None, operations: Operations) -> None:
    """Packs the weight of every nn.Linear where that pays, and copies all others out of the checkpoint's files.

    transformers leaves weights on the CPU in the mapped files, and a mapping counts as our memory as long as one tensor
    is in it. This goes weight by weight, so that the model is in memory once, and only one file twice.
    """
    places = [(parent, name) for parent in whole.modules() for name, _ in parent.named_children()]
    for parent, name in places:
        child = getattr(parent, name)
        # Not for subclasses of nn.Linear: their forward is their own.
        packed = _pack(child, operations, is_head=child is head) if type(child) is nn.Linear else None
        if packed is not None:
            setattr(parent, name, packed)
            continue
        for parameter in child.parameters(recurse=False):
            if parameter.device.type == "cpu":
                parameter.data = parameter.data.clone()


def _pack(plain: nn.Linear, operations: Operations, *, is_head: bool) -> _Packed | None:
    """The same product with a packed weight; None if packing does not pay."""
    weight, bias = plain.weight.data, None if plain.bias is None else plain.bias.data.clone()
    product = operations.linear(weight, bias, widened=is_head)
    return None if isinstance(product, PlainLinear) else _Packed(product, weight)


@torch.inference_mode()
def _prove(
    directory: Path,
    whole: PreTrainedModel,
    numbers: GenericNumbers,
    operations: Operations,
    cache_dtype: torch.dtype,
    device: torch.device,
) -> GenericForCausalLM:
    """The packed model, once its logits on the paged cache match those of eager attention, before and after packing.

    Raises:
        UnsupportedModel: they do not match, or the model fails on the way.
        ModelError: the logits are not finite.
    """
    tokens = torch.arange(5, device=device) % numbers.vocabulary_size
    positions = torch.tensor([0, 1, 2, 0, 1], device=device)
    metadata = AttentionMetadata(
        slot_mapping=torch.tensor([4, 5, 6, 0, 1], device=device),
        block_tables=torch.tensor([[1], [0]], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, 3, 5], dtype=torch.int32, device=device),
        context_lengths=torch.tensor([3, 2], dtype=torch.int32, device=device),
    )
    shape = (numbers.num_layers, 2, 2, 4, numbers.num_kv_heads, numbers.head_dim)
    layer_caches = [(layer[0], layer[1]) for layer in torch.zeros(shape, dtype=cache_dtype, device=device)]
    tolerance = max(_TOLERANCES[whole.dtype], _TOLERANCES[cache_dtype])
    try:
        expected = torch.cat([whole(part[None], use_cache=False).logits[0] for part in tokens.split([3, 2])]).float()
        if not expected.isfinite().all():  # they prove nothing
            raise not_finite(directory, whole.dtype)
        whole.set_attn_implementation(_ATTENTION)
        layers, head = whole.base_model, whole.get_output_embeddings()
        model = GenericForCausalLM(whole, layers, numbers, operations)
        step = model.step(layer_caches, metadata)
        plain = model.head(model.run(tokens, positions, step))
        _settle(nn.ModuleList([whole, layers]), head, operations)
        packed = model.head(model.run(tokens, positions, model.step(layer_caches, metadata)))
    except ModelError:
        raise
    except Exception as error:  # see `_read_config`
        raise UnsupportedModel(f"it fails on the paged cache: {_first_line(error)}") from error
    _check_calls(whole.config.get_text_config(), numbers, step.windows)
    # Quantized weights are meant to give other logits, and very different ones where they lead to another expert.
    for logits in (plain,) if operations.bytes_per_weight is not None else (plain, packed):
        error_share = ((logits - expected).norm() / expected.norm()).item()
        if not error_share < tolerance:
            raise UnsupportedModel(f"its logits on the paged cache are off by {error_share:.1%} from eager attention's")
    return model


def _check_calls(config: PreTrainedConfig, numbers: GenericNumbers, windows: list[tuple[int, int | None]]) -> None:
    """Refuses layers that have not called our attention once each, or not with the windows of the configuration.

    Windows are longer than the proof's sequences: one that is forgotten would not show in their logits.
    """
    called = [layer for layer, _ in windows]
    if called != list(range(numbers.num_layers)):
        raise UnsupportedModel(f"of its {numbers.num_layers} layers, {len(set(called))} attend by our attention")
    # Some models mask what a window leaves out without telling their attention, and some never use the field.
    usual = "full_attention" if getattr(config, "use_sliding_window", True) is False else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * numbers.num_layers
    shortest = getattr(config, "sliding_window", None) or numbers.context_length
    for (layer, window), kind in zip(windows, kinds, strict=True):
        if kind == "sliding_attention" and window is None and shortest < numbers.context_length:
            raise UnsupportedModel(f"layer {layer} does not tell its attention of its sliding window")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
