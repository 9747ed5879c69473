"""The torch twins against arithmetic done the slow way, over odd shapes."""

import itertools
import math

import pytest
import torch

from kernels import reference

BLOCK_SIZE = 4
# One unit in the last place of a result near one.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def caches(num_blocks, num_kv_heads=1, head_dim=4, dtype=torch.float32):
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def naive_attention(q, k_cache, v_cache, block_tables, query_starts, context_lengths, scale, window=None, softcap=None):
    """One query and one head at a time, in float64, from the slots that the tables name."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group_size = q.shape[1] // k_cache.shape[2]
    for row, length in enumerate(context_lengths.tolist()):
        start, end = query_starts[row : row + 2].tolist()
        for token in range(start, end):
            past_last = length - (end - token) + 1
            seen = range(0 if window is None else max(0, past_last - window), past_last)
            slots = [(int(block_tables[row, p // BLOCK_SIZE]), p % BLOCK_SIZE) for p in seen]
            for head in range(q.shape[1]):
                k = torch.stack([k_cache[block, offset, head // group_size].double() for block, offset in slots])
                v = torch.stack([v_cache[block, offset, head // group_size].double() for block, offset in slots])
                scores = k @ q[token, head].double() * scale
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                out[token, head] = torch.softmax(scores, 0) @ v
    return out


def attention_case(rows, num_heads, num_kv_heads, head_dim=4, dtype=torch.float32):
    """Arguments for rows of (queries, context length), with block tables drawn from one shuffled pool."""
    widths = [-(-context // BLOCK_SIZE) for _, context in rows]
    pool = torch.randperm(sum(widths) + 3)
    k_cache, v_cache = caches(len(pool), num_kv_heads, head_dim, dtype)
    tables = torch.zeros(len(rows), max(widths, default=1), dtype=torch.int32)
    taken = 0
    for row, width in enumerate(widths):
        tables[row, :width] = pool[taken : taken + width]
        taken += width
    starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    q = torch.randn(int(starts[-1]), num_heads, head_dim).to(dtype)
    return q, k_cache, v_cache, tables, starts, contexts, head_dim**-0.5


BATCHES = {
    "one token": [(1, 1)],
    "a full block": [(1, 4)],
    "one past a block": [(1, 5)],
    "decodes of like length": [(1, 5), (1, 8), (1, 7)],
    "decodes from 1 to 60": [(1, 60), (1, 1), (1, 17), (1, 2), (1, 33)],
    "whole prompts": [(1, 1), (3, 3), (8, 8), (9, 9)],
    "chunks": [(3, 7), (4, 8), (2, 17)],
    "mixed": [(1, 9), (4, 4), (1, 1), (3, 10), (1, 30)],
    "empty": [],
}


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (3, 1), (8, 2), (9, 3), (8, 1)])
def test_paged_attention_equals_attention_over_the_slots_in_the_tables(rows, num_heads, num_kv_heads):
    case = attention_case(rows, num_heads, num_kv_heads)
    torch.testing.assert_close(reference.paged_attention(*case).double(), naive_attention(*case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window, softcap", [(1, None), (3, None), (8, 0.5), (1000, None), (None, 0.5)])
def test_a_query_sees_only_its_window_and_scores_stay_within_their_cap(rows, window, softcap):
    case = (*attention_case(rows, num_heads=6, num_kv_heads=2), window, softcap)
    torch.testing.assert_close(reference.paged_attention(*case).double(), naive_attention(*case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", [{"window": 0}, {"softcap": 0.0}])
def test_a_window_or_cap_of_zero_or_less_is_refused(wrong):
    with pytest.raises(ValueError, match="positive"):
        reference.paged_attention(*attention_case([(1, 1)], 1, 1), **wrong)


def test_paged_attention_in_bfloat16_stays_close():
    case = attention_case(BATCHES["mixed"], num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    torch.testing.assert_close(reference.paged_attention(*case).double(), naive_attention(*case), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype, cache_dtype", list(itertools.permutations(TOLERANCES, 2)))
def test_queries_and_a_cache_of_different_dtypes_are_computed_in_float32(dtype, cache_dtype):
    for scores in ((None, None), (3, 0.5)):
        q, k_cache, v_cache, *others = attention_case(BATCHES["mixed"], num_heads=6, num_kv_heads=2, dtype=dtype)
        case = (q, k_cache.to(cache_dtype), v_cache.to(cache_dtype), *others, *scores)
        out = reference.paged_attention(*case)
        assert out.dtype == dtype
        # Only the result is rounded.
        expected = naive_attention(*case).to(dtype)
        torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_paged_attention_takes_queries_from_a_fused_projection():
    q, *others = attention_case(BATCHES["mixed"], num_heads=4, num_kv_heads=2)
    fused = torch.randn(q.shape[0], 4 + 2 + 2, q.shape[2])
    fused[:, :4] = q
    out = reference.paged_attention(fused[:, :4], *others)
    assert torch.equal(out, reference.paged_attention(q, *others))
    assert out.is_contiguous()


@pytest.mark.parametrize("rows", [[(1, 5)], [(5, 5)], [(2, 5)]], ids=["decode", "prompt", "chunk"])
def test_paged_attention_never_reads_behind_the_context(rows):
    q, k_cache, v_cache, tables, *others = attention_case(rows, num_heads=1, num_kv_heads=1)
    before = reference.paged_attention(q, k_cache, v_cache, tables, *others)
    last = tables[0, 1].item()
    k_cache[last, 1:], v_cache[last, 1:] = 1e4, 1e4
    assert torch.equal(reference.paged_attention(q, k_cache, v_cache, tables, *others), before)


@pytest.mark.parametrize(
    "spoil, complaint",
    [
        (lambda c: c[0].unsqueeze_(0), "do not fit together"),
        (lambda c: c.__setitem__(0, c[0].double()), "differ in dtype"),
        (lambda c: c.__setitem__(2, c[2].half()), "differ in dtype"),
        (lambda c: c.__setitem__(0, c[0][:, :3]), "share 2 K/V heads"),
        (lambda c: c.__setitem__(0, c[0][:-1]), "query_starts ends"),
        (lambda c: c.__setitem__(3, c[3][:1]), "same rows"),
        (lambda c: c.__setitem__(3, c[3][:, :1]), "row 0 has"),
    ],
)
def test_paged_attention_refuses_arguments_that_do_not_fit(spoil, complaint):
    case = list(attention_case([(1, 9), (2, 2)], num_heads=4, num_kv_heads=2))
    spoil(case)
    with pytest.raises(ValueError, match=complaint):
        reference.paged_attention(*case)


def test_reshape_and_cache_writes_each_token_into_its_slot_and_skips_padding():
    k_cache, v_cache = torch.zeros(3, BLOCK_SIZE, 1, 2), torch.zeros(3, BLOCK_SIZE, 1, 2)
    k = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]])
    reference.reshape_and_cache(k, 10 * k, k_cache, v_cache, torch.tensor([9, -1, 3]))
    assert k_cache[2, 1, 0].tolist() == [1, 2]
    assert k_cache[0, 3, 0].tolist() == [5, 6]
    assert k_cache.sum() == 14
    assert torch.equal(v_cache, 10 * k_cache)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_are_rounded_to_the_dtype_of_the_cache(cache_dtype):
    """To the nearest, ties to even; what is too large for float16 becomes infinite."""
    k = torch.tensor([[[1.0, 1.00390625, 1.01171875, 1e5]]])
    k_cache, v_cache = caches(1, dtype=cache_dtype)
    reference.reshape_and_cache(k, -k, k_cache, v_cache, torch.tensor([2]))
    expected = {
        torch.float32: [1.0, 1.00390625, 1.01171875, 1e5],
        torch.bfloat16: [1.0, 1.0, 1.015625, 99840.0],
        torch.float16: [1.0, 1.00390625, 1.01171875, torch.inf],
    }
    assert k_cache[0, 2, 0].tolist() == expected[cache_dtype]
    assert torch.equal(v_cache[0, 2, 0], -k_cache[0, 2, 0])


def test_reshape_and_cache_of_no_tokens_writes_nothing():
    k_cache, v_cache = caches(1)
    before = k_cache.clone()
    nothing = torch.empty(0, 1, 4)
    reference.reshape_and_cache(nothing, nothing, k_cache, v_cache, torch.empty(0, dtype=torch.int64))
    assert torch.equal(k_cache, before)


def test_reshape_and_cache_refuses_arguments_that_do_not_fit():
    k_cache, v_cache = caches(1)
    k, slots = torch.zeros(2, 1, 4), torch.tensor([0, 1])
    for arguments in (
        (k, k[:1], k_cache, v_cache, slots),
        (k.double(), k.double(), k_cache, v_cache, slots),
        (k, k.half(), k_cache, v_cache, slots),
        (k, k, k_cache, v_cache.half(), slots),
        (k, k, k_cache, v_cache, slots.int()),
        (k, k, k_cache, v_cache, slots[:1]),
    ):
        with pytest.raises(ValueError):
            reference.reshape_and_cache(*arguments)


def numbered_cache(num_blocks):
    """A cache whose block b holds b everywhere, in 2 layers."""
    return torch.arange(num_blocks).view(1, 1, -1, 1, 1, 1).expand(2, 2, -1, BLOCK_SIZE, 1, 3).clone()


def contents(cache):
    assert (cache == cache[:1, :1, :, :1, :, :1]).all(), "layers, K and V, or slots differ"
    return cache[0, 0, :, 0, 0, 0].tolist()


def test_copy_blocks_reads_every_block_before_it_writes_any():
    cache = numbered_cache(4)
    reference.copy_blocks(cache, torch.tensor([[0, 1], [1, 2], [3, 0]]))
    assert contents(cache) == [3, 0, 1, 3]


def test_copy_blocks_copies_blocks_that_are_not_overwritten():
    cache = numbered_cache(5)
    reference.copy_blocks(cache, torch.tensor([[3, 0], [3, 1], [4, 2]]))
    assert contents(cache) == [3, 3, 4, 3, 4]


def test_swap_blocks_copies_between_pools_in_all_layers():
    gpu, cpu = numbered_cache(4), 100 + numbered_cache(2)
    reference.swap_blocks(gpu, cpu, torch.tensor([[3, 0]]))
    reference.swap_blocks(cpu, gpu, torch.tensor([[1, 2], [0, 0]]))
    assert contents(cpu) == [3, 101]
    assert contents(gpu) == [3, 1, 101, 3]


def test_swap_blocks_of_no_pairs_does_nothing_and_pools_that_do_not_fit_are_refused():
    cache = numbered_cache(2)
    reference.copy_blocks(cache, torch.empty(0, 2, dtype=torch.int64))
    assert contents(cache) == [0, 1]
    for other, pairs in ((cache[:1], [[0, 1]]), (cache.float(), [[0, 1]]), (cache, [0, 1])):
        with pytest.raises(ValueError):
            reference.swap_blocks(cache, other, torch.tensor(pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_hugging_faces(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(6, eps=1e-5)
    theirs.weight.data = torch.randn(6)
    theirs.to(dtype)
    x = torch.randn(5, 6).to(dtype)
    ours, before = reference.rms_norm(x, theirs.weight.data, 1e-5), x.clone()
    torch.testing.assert_close(ours, theirs(x).detach())
    assert torch.equal(x, before)


def test_add_rms_norm_adds_in_place_and_returns_the_norm_of_the_sum():
    x, residual, weight = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 1.0]]), torch.tensor([1.0, 2.0])
    out = reference.add_rms_norm(x, residual, weight, 0.0)
    assert residual.tolist() == [[3, 4]]
    torch.testing.assert_close(out, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)
    with pytest.raises(ValueError):
        reference.add_rms_norm(x[:, :1], residual, weight, 0.0)
    with pytest.raises(ValueError):
        reference.rms_norm(x, weight.double(), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding_equals_hugging_faces(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angles = torch.randn(7, 4)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    heads = torch.randn(7, 5, 8).to(dtype)
    expected, _ = apply_rotary_pos_emb(heads, heads, cos.repeat(1, 2), sin.repeat(1, 2))
    fused = torch.cat([heads, torch.ones(7, 2, 8, dtype=dtype)], dim=1)
    reference.rotary_embedding(fused[:, :5], cos, sin)
    # In bfloat16, ours rounds once and theirs twice.
    torch.testing.assert_close(fused[:, :5], expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-6, rtol=0)
    assert (fused[:, 5:] == 1).all()


def test_rotary_embedding_turns_by_a_quarter_and_refuses_arguments_that_do_not_fit():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    reference.rotary_embedding(x, torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert x.tolist() == [[[-3, 2, 1, 4]]]
    with pytest.raises(ValueError):
        reference.rotary_embedding(x, torch.zeros(1, 4), torch.zeros(1, 4))


def test_silu_and_mul_gates_the_second_half_by_the_first():
    x = torch.randn(3, 8)
    torch.testing.assert_close(reference.silu_and_mul(x), x[:, :4] * x[:, :4].sigmoid() * x[:, 4:])
    with pytest.raises(ValueError):
        reference.silu_and_mul(x[:, :7])


@pytest.mark.parametrize("approximate, half", [("none", 0.5 * (1 + math.erf(1 / 2**0.5))), ("tanh", 0.8411919906)])
def test_gelu_is_x_times_the_gaussian_integral_alone_and_as_a_gate(approximate, half):
    x = torch.tensor([[1.0, 0.0, 3.0, 5.0]])
    assert reference.gelu(x, approximate)[0, :2].tolist() == pytest.approx([half, 0])
    assert reference.gelu_and_mul(x, approximate).tolist() == [pytest.approx([3 * half, 0])]
    for refused in (lambda: reference.gelu_and_mul(x[:, :3]), lambda: reference.gelu(x, "sigmoid")):
        with pytest.raises(ValueError):
            refused()


def test_sample_tokens_takes_the_best_token_of_greedy_rows_and_a_kept_one_of_the_others():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.5]]).repeat(6, 1)
    heats = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    top_k, top_p = torch.tensor([4, 1, 4, 4, 2, 2]), torch.tensor([1.0, 1.0, 0.3, 1.0, 1.0, 1.0])
    min_p, typical_p = torch.tensor([0.0, 0.0, 0.0, 0.9, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 1.0, 1e-6, 1.0])
    names = (torch.arange(6),) * 3
    found = reference.sample_tokens(logits, heats, *names, (top_k, top_p, min_p, typical_p)).tolist()
    # Of tokens 1 and 3, which top-k leaves with 62 and 38 %, the former's information content is nearer to the mean.
    assert found == [1, 1, 1, 1, 1, 1]
    positions = torch.arange(99)
    drawn = reference.sample_tokens(logits[:1].repeat(99, 1), torch.ones(99), positions, positions, positions)
    assert set(drawn.tolist()) == {0, 1, 2, 3}


def test_sample_tokens_refuses_arguments_that_do_not_fit():
    logits, heat, numbers = torch.zeros(2, 5), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    for arguments in (
        (logits.double(), heat, numbers, numbers, numbers),
        (logits, heat[:1], numbers, numbers, numbers),
        (logits, heat, numbers, numbers, numbers.int()),
        (logits, heat, numbers, numbers, numbers, (numbers, heat, heat)),
        (logits[:, :0], heat, numbers, numbers, numbers),
    ):
        with pytest.raises(ValueError):
            reference.sample_tokens(*arguments)
