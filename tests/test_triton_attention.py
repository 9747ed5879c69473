"""Paged attention in Triton against its torch twin."""

import itertools

import pytest
import torch
from triton_device import DEVICE, DOT_DTYPES, everywhere

from kernels import reference
from kernels.batch_bounds import BatchBounds
from kernels.decode_attention import plan_splits
from kernels.paged_attention import paged_attention

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def attention_case(
    device,
    rows,
    num_heads,
    num_kv_heads,
    head_dim=64,
    block_size=16,
    dtype=torch.float32,
    integers=torch.int32,
    cache_dtype=None,
):
    """Arguments for rows of (queries, context length); every slot that no row owns holds NaN."""
    torch.manual_seed(0)
    widths = [-(-context // block_size) for _, context in rows]
    pool = torch.randperm(sum(widths) + 3)
    shape = (len(pool), block_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    tables = torch.full((len(rows), max(widths, default=1)), int(pool[-1]), dtype=integers)
    taken = 0
    for row, (_, context) in enumerate(rows):
        blocks = pool[taken : taken + widths[row]]
        tables[row, : widths[row]] = blocks
        taken += widths[row]
        for cache in (k_cache, v_cache):
            kept = cache[blocks].flatten(0, 1)
            kept[:context] = torch.randn(context, num_kv_heads, head_dim)
            cache[blocks] = kept.view(-1, *shape[1:])
    starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0).to(integers)
    contexts = torch.tensor([context for _, context in rows], dtype=integers)
    q = torch.randn(int(starts[-1]), num_heads, head_dim)
    q = q.to(device=device, dtype=dtype)
    k_cache, v_cache = (x.to(device=device, dtype=cache_dtype or dtype) for x in (k_cache, v_cache))
    return q, k_cache, v_cache, *(x.to(device) for x in (tables, starts, contexts)), head_dim**-0.5


def twin(q, k_cache, v_cache, *others):
    """The reference on the same numbers in float32, with empty slots finite."""
    return reference.paged_attention(q.float(), k_cache.float().nan_to_num(), v_cache.float().nan_to_num(), *others)


def assert_equals_twin(case, *variants, **facts):
    out = paged_attention(*case, *variants, **facts)
    tolerance = TOLERANCES[case[0].dtype]
    assert out.is_contiguous()
    assert out.dtype == case[0].dtype
    torch.testing.assert_close(out.float(), twin(*case, *variants), atol=tolerance, rtol=tolerance)


BATCHES = {
    "one token": [(1, 1)],
    "block edges": [(1, 16), (1, 17), (1, 15)],
    "decodes split unevenly": [(1, 600), (1, 1), (1, 130), (1, 129)],
    "whole prompts": [(1, 1), (3, 3), (40, 40), (17, 17)],
    "chunks": [(20, 70), (64, 65), (33, 200)],
    "few queries each": [(2, 150), (4, 300), (3, 3)],
    "mixed": [(1, 200), (36, 36), (1, 1), (5, 90), (1, 31), (30, 130)],
    "empty": [],
}


@everywhere
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("num_heads, num_kv_heads", [(2, 2), (6, 2), (8, 2), (8, 1)], ids=["1", "3", "4", "8"])
def test_attention_equals_its_twin_for_groups_of(device, rows, num_heads, num_kv_heads):
    assert_equals_twin(attention_case(device, rows, num_heads, num_kv_heads))


@everywhere
@pytest.mark.parametrize("queries", [4, 5])
def test_a_row_may_have_as_many_queries_as_are_short_or_one_more(device, queries):
    assert_equals_twin(attention_case(device, [(queries, 30), (1, 9)], 4, 1))


@everywhere
def test_a_group_may_have_more_heads_than_a_tile_has_rows(device):
    assert_equals_twin(attention_case(device, [(1, 40), (3, 5), (6, 30)], 40, 1))


@everywhere
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 600), (1, 128), (1, 256)],
        [(1, 641), (1, 1), (1, 130), (1, 640)],
        [(4, 130), (3, 257), (1, 300)],
    ],
)
def test_contexts_may_end_where_a_split_begins_or_soon_after(device, rows):
    assert_equals_twin(attention_case(device, rows, 4, 2))


@everywhere
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention_equals_its_twin_for_heads_of(device, head_dim, dtype):
    assert_equals_twin(attention_case(device, [(1, 150), (1, 5), (20, 140)], 4, 1, head_dim, dtype=dtype))


@everywhere
@pytest.mark.parametrize("dtype, cache_dtype", list(itertools.permutations(TOLERANCES, 2)))
def test_the_cache_may_be_of_another_dtype(device, dtype, cache_dtype):
    for scores in ((None, None), (20, 1.5)):
        case = attention_case(device, BATCHES["mixed"], 6, 2, dtype=dtype, cache_dtype=cache_dtype)
        assert_equals_twin(case, *scores)


@everywhere
def test_keys_may_be_larger_than_the_dtype_of_the_queries_holds(device):
    case = attention_case(device, [(1, 200), (20, 40)], 4, 2, dtype=torch.float16, cache_dtype=torch.bfloat16)
    case[0].mul_(2**-15)
    case[1].mul_(2**17)
    assert_equals_twin(case)


@everywhere
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_attention_equals_its_twin_for_blocks_of(device, block_size, integers):
    case = attention_case(device, [(1, 150), (18, 40), (2, 66)], 4, 2, block_size=block_size, integers=integers)
    assert_equals_twin(case)


@everywhere
@pytest.mark.parametrize("rows", [[(1, 400), (1, 3), (1, 70)], [(30, 90), (2, 300), (1, 1), (40, 40)]])
@pytest.mark.parametrize("window", [1, 16, 50, 1000])
def test_attention_with_a_window_equals_its_twin(device, rows, window):
    assert_equals_twin(attention_case(device, rows, 4, 2), window, None)


@everywhere
def test_a_window_may_be_cut_into_splits(device):
    assert_equals_twin(attention_case(device, [(1, 900), (1, 700), (1, 80)], 4, 2), 300, None)


@everywhere
def test_large_scores_do_not_overflow(device):
    case = attention_case(device, [(1, 600), (20, 40)], 4, 1)
    case[0].mul_(40)
    torch.testing.assert_close(paged_attention(*case), twin(*case), atol=1e-3, rtol=1e-3)


@everywhere
@pytest.mark.parametrize("window", [None, 20])
def test_capped_scores_equal_their_twins(device, window):
    assert_equals_twin(attention_case(device, [(30, 90), (2, 300), (1, 1), (40, 40)], 4, 2), window, 1.5)


@everywhere
@pytest.mark.parametrize(
    "rows, bounds",
    [
        ([(1, 600), (1, 5)], BatchBounds(longest_context=600, total_context=605, fewest_queries=1, most_queries=1)),
        ([(40, 40), (20, 90)], BatchBounds(longest_context=90, fewest_queries=20, most_queries=40)),
        ([(4, 500), (1, 7)], BatchBounds(total_context=10, most_queries=4)),
        ([(1, 7), (40, 64)], BatchBounds(total_context=10**9)),
    ],
)
def test_bounds_that_the_host_knows_change_the_splits_and_not_the_result(device, rows, bounds):
    assert_equals_twin(attention_case(device, rows, 4, 1), bounds=bounds)


@everywhere
def test_queries_may_lie_in_a_fused_projection(device):
    q, *others = attention_case(device, BATCHES["mixed"], 4, 2)
    fused = torch.cat([q, torch.ones_like(q)], dim=1)
    assert torch.equal(paged_attention(fused[:, :4], *others), paged_attention(q, *others))


@everywhere
@pytest.mark.parametrize("queries", [1, 40])
def test_a_cache_may_hold_more_values_than_an_int32_counts(device, queries):
    q, *caches, tables, starts, contexts, scale = attention_case(device, [(queries, 40)], 2, 1, dtype=torch.float16)
    blocks = [cache[tables[0].long()] for cache in caches]
    strides, size = (2**30, *blocks[0].stride()[1:]), blocks[0][0].numel()
    memory = torch.empty(2**31 + 2 * size, dtype=torch.float16, device=device)  # of which little is touched
    far = [memory.as_strided(block.shape, strides, number * size).copy_(block) for number, block in enumerate(blocks)]
    found = paged_attention(q, *far, torch.arange(3, device=device).int()[None], starts, contexts, scale)
    assert torch.equal(found, paged_attention(q, *caches, tables, starts, contexts, scale))


@everywhere
def test_a_decode_row_without_context_is_padding_and_gets_zeros(device):
    case = attention_case(device, [(1, 40), (1, 1), (1, 3)], 4, 2)
    case[5][1] = 0
    out = paged_attention(*case)
    assert (out[1] == 0).all()
    assert out.isfinite().all()


@everywhere
def test_context_lengths_are_read_only_on_the_device(device):
    """As in a recorded graph: the same launch serves lengths that the host does not know."""
    case = attention_case(device, [(1, 900), (1, 900)], 2, 1)
    for lengths in ([900, 700], [1, 2], [129, 900]):
        case[5].copy_(torch.tensor(lengths))
        assert_equals_twin(case)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="NO GPU: no graph was recorded")
@pytest.mark.parametrize("rows", [[(1, 900), (1, 900)], [(40, 900), (1, 900)]])
def test_a_recorded_graph_serves_other_contexts_and_nothing_waits_for_the_device(rows):
    case = attention_case(DEVICE, rows, 8, 2, dtype=torch.float16)
    paged_attention(*case)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        paged_attention(*case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*case)
    for lengths in ([900, 700], [40, 2], [129, 900]):
        case[5].copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close(out.float(), twin(*case), atol=4e-3, rtol=4e-3)


def test_contexts_are_split_until_the_gpu_is_full_and_no_further():
    assert plan_splits(num_lanes=8, longest=32768, total=8 * 32768, num_processors=132) == (64, 497)
    assert plan_splits(num_lanes=8, longest=512, total=8 * 512, num_processors=132) == (4, 128)
    assert plan_splits(num_lanes=256 * 8, longest=4096, total=256 * 8 * 4096, num_processors=132) == (1, 15888)
    assert plan_splits(num_lanes=10_000, longest=512, total=None, num_processors=132) == (1, 128)
    assert plan_splits(num_lanes=8, longest=0, total=None, num_processors=132) == (1, 128)
    # One long context among short ones is split so that no program has much more than its share.
    assert plan_splits(num_lanes=32 * 8, longest=32768, total=8 * (32768 + 31 * 100), num_processors=132) == (33, 544)
    # A recorded graph has as many splits as the bound needs; their length depends on the context on the device.
    assert plan_splits(num_lanes=8, longest=131072, total=None, num_processors=132) == (64, 128)


@everywhere
@pytest.mark.parametrize(
    "spoil, complaint",
    [
        (lambda c: c[0].unsqueeze_(0), "do not fit together"),
        (lambda c: c.__setitem__(0, c[0][..., :32]), "do not fit together"),
        (lambda c: c.__setitem__(2, c[2][1:]), "do not fit together"),
        (lambda c: c.__setitem__(0, c[0].double()), "differ in dtype"),
        (lambda c: c.__setitem__(slice(1, 3), [x.double() for x in c[1:3]]), "none that the kernels take"),
        (lambda c: c.__setitem__(0, c[0][:, :3]), "share 2 K/V heads"),
        (lambda c: c.__setitem__(0, c[0][:, :0]), "share 2 K/V heads"),
        (lambda c: c.__setitem__(0, c[0][:1]), "every row has a query"),
        (lambda c: c.__setitem__(3, c[3][:1]), "same rows"),
        (lambda c: c.__setitem__(3, c[3][:, 0]), "same rows"),
        (lambda c: c.__setitem__(4, c[4][:2]), "same rows"),
        (lambda c: c.__setitem__(3, c[3].float()), "int32 or int64"),
        (lambda c: c.__setitem__(4, c[4].float()), "int32 or int64"),
        (lambda c: c.__setitem__(5, c[5].float()), "int32 or int64"),
        (lambda c: c.__setitem__(5, c[5].repeat_interleave(2)[::2]), "not dense"),
        (lambda c: c.__setitem__(slice(1, 3), [x.repeat(1, 1, 1, 2)[..., ::2] for x in c[1:3]]), "not dense"),
        (lambda c: c.__setitem__(1, c[1].transpose(1, 2).contiguous().transpose(1, 2)), "strides"),
        (lambda c: c.__setitem__(0, c[0].transpose(1, 2).contiguous().transpose(1, 2)), "not dense"),
    ],
)
def test_attention_refuses_arguments_that_do_not_fit(device, spoil, complaint):
    case = list(attention_case(device, [(1, 9), (2, 2)], 4, 2))
    spoil(case)
    with pytest.raises(ValueError, match=complaint):
        paged_attention(*case)


@everywhere
@pytest.mark.parametrize(
    "sizes, reach, complaint",
    [
        ({"head_dim": 257}, (None, None), "head_dim 257 is more than 256"),
        ({"block_size": 24}, (None, None), "block_size 24 no power of two"),
        ({}, (0, None), "window 0"),
        ({}, (2**31, None), "window 2147483648"),
        ({}, (None, 0.0), "softcap 0.0"),
    ],
)
def test_attention_refuses_what_the_kernels_cannot_compute(device, sizes, reach, complaint):
    with pytest.raises(ValueError, match=complaint):
        paged_attention(*attention_case(device, [(1, 9)], 2, 1, **sizes), *reach)


@everywhere
def test_attention_refuses_more_rows_than_a_launch_takes(device):
    q, k_cache, v_cache, tables, _, contexts, scale = attention_case(device, [(1, 9)], 2, 1)
    q, tables, contexts = q.repeat(65536, 1, 1), tables.repeat(65536, 1), contexts.repeat(65536)
    with pytest.raises(ValueError, match="65535 at most"):
        paged_attention(q, k_cache, v_cache, tables, torch.arange(65537, device=device), contexts, scale)
