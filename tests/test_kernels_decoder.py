"""All layers in one call of C++, which must give the bits of the same operations called one by one."""

from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")
from kernels import build, choice  # noqa: E402
from kernels.cpu import CpuKernels, KernelsUnavailable, runnable_levels  # noqa: E402
from kernels.cpu_decoder import DecoderLayer, DecoderShape  # noqa: E402
from worker.layers.attention import AttentionMetadata  # noqa: E402
from worker.layers.rotary import DefaultRope  # noqa: E402
from worker.models.llama import LlamaConfig, LlamaForCausalLM  # noqa: E402

try:
    LEVELS = [*runnable_levels(), *build.MODELS]
except KernelsUnavailable:
    LEVELS = []
pytestmark = pytest.mark.skipif(not LEVELS, reason="the C++ kernels are not built: no compiler when this was installed")

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 64
CONFIG = LlamaConfig(
    vocabulary_size=101,
    hidden_size=72,
    mlp_size=96,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    norm_epsilon=1e-5,
    rope=DefaultRope(10_000.0),
    context_length=512,
    windows=(None, 20, None),
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    head_norms=False,
)
# Inputs in multiples of 64 may be multiplied as integers.
BY_64 = {"hidden_size": 64, "mlp_size": 128, "num_heads": 4}
QWEN3 = {"head_norms": True}
BIASED = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
# Rows of (new tokens, context length with them).
DECODES = [(1, 1), (1, 17), (1, 300), (1, 64)]
MIXED = [(5, 5), (1, 40), (70, 90), (1, 200), (16, 129)]


def build_model(config=CONFIG, dtype=torch.bfloat16, level=None, *, quantize=None):
    operations = choice.cpp(CpuKernels(level))
    if quantize is not None:
        operations = quantize(operations)
    model = LlamaForCausalLM(config, operations=operations, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for piece in model.pieces():
        for name, tensor in piece.tensors().items():
            values = torch.randn(tensor.shape, generator=generator) * 0.2
            tensor.copy_(values + 1 if "norm" in name else values)
        piece.pack()
    return model


def make_step(rows, seed=0):
    """Token ids, positions and metadata; the caches hold random values for earlier tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-context // BLOCK_SIZE) for _, context in rows]
    tables = torch.zeros(len(rows), max(num_blocks), dtype=torch.int32)
    free = iter(torch.randperm(NUM_BLOCKS, generator=generator).tolist())
    positions, slots = [], []
    for row, (new, context) in enumerate(rows):
        table = torch.tensor([next(free) for _ in range(num_blocks[row])])
        tables[row, : len(table)] = table
        own = torch.arange(context - new, context)
        positions.append(own)
        slots.append(table[own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE)
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    token_ids = torch.randint(CONFIG.vocabulary_size, (int(starts[-1]),), generator=generator)
    return token_ids, torch.cat(positions), AttentionMetadata(torch.cat(slots), tables, starts, contexts)


def make_caches(config=CONFIG, dtype=torch.bfloat16):
    shape = (config.num_layers, 2, NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [(layer[0], layer[1]) for layer in pool]


def both(model, rows, cache_dtype=torch.bfloat16, scored=None):
    """Hidden states and caches, all layers at once and one by one."""
    token_ids, positions, metadata = make_step(rows)
    metadata = replace(metadata, scored=scored)
    found = []
    at_once = model.layers_at_once
    assert at_once is not None
    for model.layers_at_once in (at_once, None):
        caches = make_caches(model.config, cache_dtype)
        found.append((model(token_ids, positions, caches, metadata), torch.stack([torch.stack(c) for c in caches])))
    model.layers_at_once = at_once
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [DECODES[:1], DECODES, MIXED], ids=["one", "decodes", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_at_once_give_the_bits_of_layers_one_by_one(level, rows, dtype):
    (hidden, caches), (expected, expected_caches) = both(build_model(dtype=dtype, level=level), rows, dtype)
    assert hidden.isfinite().all()
    assert hidden.equal(expected)
    assert caches.equal(expected_caches)


@pytest.mark.parametrize(
    "changes", [QWEN3, BIASED, QWEN3 | BIASED, BY_64], ids=["head norms", "biases", "both", "by 64"]
)
@pytest.mark.parametrize("quantize", [None, choice.with_int8_weights, choice.with_int4_weights])
def test_head_norms_biases_and_quantized_weights_give_the_same_bits_too(changes, quantize):
    operations = choice.cpp(CpuKernels())
    if quantize is choice.with_int4_weights and operations.int4_linear is None:
        pytest.skip("this CPU has no products of 4 bits")
    model = build_model(replace(CONFIG, **changes), quantize=quantize)
    (hidden, caches), (expected, expected_caches) = both(model, MIXED)
    assert hidden.equal(expected)
    assert caches.equal(expected_caches)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16])
def test_the_cache_may_be_of_another_dtype(cache_dtype):
    (hidden, caches), (expected, expected_caches) = both(build_model(), MIXED, cache_dtype)
    assert hidden.equal(expected)
    assert caches.equal(expected_caches)


@pytest.mark.parametrize("num_threads", [1, 2, 7, 11])
def test_any_number_of_threads_gives_the_same_bits(num_threads):
    """Seven threads on fewer cores wait for each other, so most of them sleep at each barrier."""
    expected = both(build_model(), MIXED)[1]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = both(build_model(), MIXED)[0]
    finally:
        torch.set_num_threads(before)
    assert found[0].equal(expected[0])
    assert found[1].equal(expected[1])


def test_steps_of_any_size_follow_each_other():
    model = build_model()
    for rows in (DECODES[:1], MIXED, DECODES, DECODES[1:2]):
        (hidden, _), (expected, _) = both(model, rows)
        assert hidden.equal(expected)


@pytest.mark.parametrize("scored", [[4, 5, 75, 91], [0], [90, 91], list(range(92)), []])
@pytest.mark.parametrize("level", LEVELS)
def test_scored_tokens_have_the_same_bits_as_among_all(level, scored):
    model = build_model(replace(CONFIG, **QWEN3), level=level)
    (everything, caches), _ = both(model, MIXED)
    for hidden, found in both(model, MIXED, scored=torch.tensor(scored, dtype=torch.int64)):
        assert hidden.equal(everything[scored])
        assert found.equal(caches)


def test_a_step_without_tokens_gives_no_hidden_states():
    token_ids, positions, metadata = make_step([(1, 1)])
    empty = AttentionMetadata(
        metadata.slot_mapping[:0],
        metadata.block_tables[:0],
        metadata.query_starts[:1],
        metadata.context_lengths[:0],
    )
    assert build_model()(token_ids[:0], positions[:0], make_caches(), empty).shape == (0, CONFIG.hidden_size)


def test_layers_may_differ_in_the_size_of_their_mlp():
    """The second layer's MLP is padded with zeros to a hundred times the first one's size."""
    kernels, num_heads, size, num_tokens = CpuKernels(), 4, 64, 200
    random = partial(torch.randn, generator=torch.Generator().manual_seed(3))
    qkv, output, gates, values, down = (
        random(*shape) / 8 for shape in ((3 * size, size), (size, size), (32, size), (32, size), (size, 32))
    )

    def layer(mlp_size):
        more = mlp_size - len(gates)
        gate_up = torch.cat([filled for part in (gates, values) for filled in (part, torch.zeros(more, size))])
        last = kernels.linear(torch.cat([down, torch.zeros(size, more)], dim=1), None)
        first = (kernels.linear(qkv, None), None, kernels.linear(output, None))
        return DecoderLayer(
            torch.ones(size), *first, torch.ones(size), kernels.linear(gate_up, None, gated=True), last, None
        )

    def hidden(*sizes):
        shape, layers = DecoderShape(num_heads, num_heads, size // num_heads, 1e-5), list(map(layer, sizes))
        caches = [tuple(torch.zeros(13, 16, num_heads, size // num_heads) for _ in range(2)) for _ in layers]
        turns = (torch.ones(num_tokens, size // num_heads // 2), torch.zeros(num_tokens, size // num_heads // 2))
        tables, ends = torch.arange(13, dtype=torch.int32)[None], torch.tensor([0, num_tokens], dtype=torch.int32)
        decoder = kernels.decoder(shape, layers, torch.ones(size))
        return decoder(x.clone(), *turns, caches, torch.arange(num_tokens), tables, ends, ends[1:])

    x = random(num_tokens, size)
    torch.testing.assert_close(hidden(32, 3200), hidden(32, 32))


def test_a_window_that_sees_nothing_is_refused():
    with pytest.raises(ValueError, match="window 0 and softcap None are to be positive"):
        build_model(replace(CONFIG, windows=(None, 0, None)))


def test_arguments_that_do_not_fit_are_refused_before_anything_is_written():
    model = build_model()
    token_ids, positions, metadata = make_step(DECODES)
    slots, tables = metadata.slot_mapping.clone(), metadata.block_tables.clone()
    slots[2], tables[3, 1] = NUM_BLOCKS * BLOCK_SIZE, NUM_BLOCKS
    short, contexts = metadata.query_starts.clone(), metadata.context_lengths.clone()
    short[-1] -= 1
    contexts[0] = 0
    for changes, message in (
        ({"slot_mapping": slots}, "token 2 has slot 1024 in 64 blocks of 16"),
        ({"block_tables": tables}, "row 3 has 1 queries, a context of 64"),
        ({"query_starts": short}, "row 3 has 0 queries"),
        ({"context_lengths": contexts}, "row 0 has 1 queries, a context of 0"),
        ({"slot_mapping": slots[:-1]}, "slot_mapping is int64"),
        ({"block_tables": tables.long()}, "are not contiguous int32"),
        ({"scored": torch.tensor([0, 4])}, "scored .* ascending and less than 4"),
        ({"scored": torch.tensor([2, 1])}, "scored .* ascending"),
        ({"scored": torch.tensor([-1, 1])}, "scored .* ascending"),
        ({"scored": torch.tensor([0, 1], dtype=torch.int32)}, "scored .* contiguous int64"),
    ):
        caches = make_caches()
        with pytest.raises(ValueError, match=message):
            model(token_ids, positions, caches, replace(metadata, **changes))
        for (k_cache, v_cache), (k_before, v_before) in zip(caches, make_caches(), strict=True):
            assert k_cache.equal(k_before)
            assert v_cache.equal(v_before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda caches: caches[:-1], "2 caches, 3 layers"),
        (lambda caches: [(k[:, :, :1], v[:, :, :1]) for k, v in caches], "strided|do not fit|does not fit"),
        (lambda caches: [*caches[:-1], (caches[-1][0][:-1], caches[-1][1][:-1])], "does not fit"),
    ],
)
def test_caches_that_do_not_fit_are_refused(change, message):
    token_ids, positions, metadata = make_step(DECODES)
    with pytest.raises(ValueError, match=message):
        build_model()(token_ids, positions, change(make_caches()), metadata)


def test_layers_that_torch_multiplies_are_called_one_by_one():
    """Gates of 24 outputs do not fill panels."""
    assert build_model(replace(CONFIG, mlp_size=24)).layers_at_once is None
