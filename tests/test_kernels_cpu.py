"""The C++ kernels against their torch twins, over odd shapes, at every level that this CPU runs."""

import ctypes
import itertools
import mmap
import re
import shutil
import subprocess
import sys

import pytest
import torch
from test_kernels_reference import BATCHES

from kernels import build, choice, cpu, reference

if not build.LIBRARY.exists():
    pytest.skip("the C++ kernels are not built: no compiler when this was installed", allow_module_level=True)

# Levels that emulate their instructions stand for those that this CPU may lack.
LEVELS = [*cpu.runnable_levels(), *build.MODELS]
BEST = cpu.runnable_levels()[-1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
}
# The dtypes of the computation, and of the cache.
BOTH_DTYPES = list(itertools.product(DTYPES, DTYPES))
of_all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
of_both_dtypes = pytest.mark.parametrize("dtype, cache_dtype", BOTH_DTYPES, ids=NAMES.get)
LONG = [(1, 1000), (1, 129), (1, 128), (1, 257), (40, 300), (1, 1), (100, 100), (2, 385)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=LEVELS)
def kernels(request):
    return cpu.CpuKernels(request.param)


def misplaced(shape, dtype):
    """A cache in which every bit is set, so that what is not written is NaN."""
    cache = torch.empty(shape, dtype=dtype)
    cache.view(torch.int16).fill_(-1)
    return cache


class Case:
    """Rows of (queries, context length) with their K and V written into both implementations' caches."""

    def __init__(
        self,
        kernels,
        rows,
        *,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        dtype=torch.float32,
        cache_dtype=None,
    ):
        cache_dtype = cache_dtype or dtype
        widths = [-(-context // block_size) for _, context in rows]
        num_blocks = sum(widths) + 3
        pool = torch.randperm(num_blocks, dtype=torch.int32)
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        # As in a pool of the worker: between two blocks of a layer lie those of other layers.
        self.caches = misplaced((num_blocks, 2, *shape[1:]), cache_dtype).unbind(1)
        self.twin_caches = torch.zeros(shape, dtype=cache_dtype), torch.zeros(shape, dtype=cache_dtype)
        self.tables = torch.zeros(len(rows), max(widths, default=1), dtype=torch.int32)
        taken, slots = 0, []
        for row, (width, (_, context)) in enumerate(zip(widths, rows, strict=True)):
            self.tables[row, :width] = pool[taken : taken + width]
            taken += width
            positions = torch.arange(context)
            slots.append(self.tables[row, positions // block_size].long() * block_size + positions % block_size)
        slots = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
        k, v = torch.randn(2, len(slots), num_kv_heads, head_dim).to(dtype)
        kernels.reshape_and_cache(k, v, *self.caches, slots)
        reference.reshape_and_cache(k, v, *self.twin_caches, slots)
        self.starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0).int()
        self.contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
        self.q = torch.randn(int(self.starts[-1]), num_heads, head_dim).to(dtype)
        self.scale = head_dim**-0.5

    def ours(self, kernels, q=None, **scores):
        q = self.q if q is None else q
        return kernels.paged_attention(q, *self.caches, self.tables, self.starts, self.contexts, self.scale, **scores)

    def twins(self, **scores):
        places = (self.tables, self.starts, self.contexts)
        return reference.paged_attention(self.q, *self.twin_caches, *places, self.scale, **scores)


def check(kernels, rows, dtype, *, scores=None, **shape):
    case = Case(kernels, rows, dtype=dtype, **shape)
    scores = scores or {}
    torch.testing.assert_close(case.ours(kernels, **scores), case.twins(**scores), **TOLERANCE[dtype])


@of_all_dtypes
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("num_heads, num_kv_heads", [(1, 1), (9, 3), (4, 1), (16, 2), (50, 1)])
def test_attention_equals_its_twin_for_every_kind_of_batch_and_group(kernels, rows, num_heads, num_kv_heads, dtype):
    check(kernels, rows, dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=4)
    check(kernels, rows, dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=16)


@of_all_dtypes
@pytest.mark.parametrize(
    "block_size, head_dim",
    [(2, 6), (8, 64), (16, 64), (16, 80), (16, 96), (16, 128), (24, 64), (32, 64), (48, 32), (64, 256), (256, 128)],
)
def test_attention_equals_its_twin_for_every_shape_of_block(kernels, head_dim, block_size, dtype):
    rows = [*BATCHES["mixed"], (1, 200), (70, 90)]
    check(kernels, rows, dtype, num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=NAMES.get)
@pytest.mark.parametrize("block_size, head_dim", [(1, 1), (3, 5), (7, 33)])
def test_blocks_and_heads_of_odd_sizes_work_in_dtypes_that_need_no_pairs(kernels, block_size, head_dim, dtype):
    check(kernels, BATCHES["mixed"], dtype, head_dim=head_dim, block_size=block_size)


@of_all_dtypes
def test_attention_equals_its_twin_on_contexts_of_several_splits(kernels, dtype):
    for rows in (LONG, *([row] for row in LONG)):
        check(kernels, rows, dtype, num_heads=9, num_kv_heads=3)


@of_all_dtypes
@pytest.mark.parametrize("num_heads, num_kv_heads", [(9, 3), (2, 2)])
def test_a_prompt_whose_first_queries_see_fewer_splits_than_its_last_equals_the_twin(
    kernels, num_heads, num_kv_heads, dtype
):
    check(kernels, [(150, 260)], dtype, num_heads=num_heads, num_kv_heads=num_kv_heads)


@of_all_dtypes
@pytest.mark.parametrize("scores", [{"window": 1}, {"window": 50}, {"window": 200, "softcap": 3.0}, {"softcap": 50.0}])
def test_windows_and_capped_scores_equal_the_twins(kernels, scores, dtype):
    for rows in (LONG, *([row] for row in LONG)):
        check(kernels, rows, dtype, scores=scores, num_heads=9, num_kv_heads=3)


@pytest.mark.parametrize("wrong", [{"window": 0}, {"window": 2**31}, {"softcap": -1.0}])
def test_a_window_or_cap_of_zero_or_less_is_refused(wrong):
    kernels = cpu.CpuKernels()
    with pytest.raises(ValueError, match="positive"):
        Case(kernels, [(1, 1)]).ours(kernels, **wrong)


@of_both_dtypes
def test_the_cache_may_be_of_another_dtype(kernels, dtype, cache_dtype):
    for scores in ({}, {"window": 50, "softcap": 3.0}):
        for head_dim in (64, 10):
            shape = {"num_heads": 9, "num_kv_heads": 3, "head_dim": head_dim, "cache_dtype": cache_dtype}
            check(kernels, LONG, dtype, scores=scores, **shape)


@of_both_dtypes
def test_the_output_of_a_query_depends_on_its_context_alone(kernels, dtype, cache_dtype):
    """To the last bit, whatever the batch, the number of threads and the chunks of the prompt are."""
    case = Case(kernels, LONG, num_heads=9, num_kv_heads=3, dtype=dtype, cache_dtype=cache_dtype)
    together = case.ours(kernels)
    for row, (queries, context) in enumerate(LONG):
        start = int(case.starts[row])
        for chunk in {queries, 7, 1}:
            found = []
            for first in range(0, queries, chunk):
                end = min(queries, first + chunk)
                found.append(
                    kernels.paged_attention(
                        case.q[start + first : start + end],
                        *case.caches,
                        case.tables[row : row + 1],
                        torch.tensor([0, end - first], dtype=torch.int32),
                        torch.tensor([context - queries + end], dtype=torch.int32),
                        case.scale,
                    )
                )
            assert torch.equal(torch.cat(found), together[start : start + queries]), (row, chunk)


def in_families(kernels, dtype, depths, **shape):
    """Decode rows of several splits each; those of a family begin with the blocks of its first row.

    `depths` are (family, splits shared with the family's first row), a pair for each row.
    """
    contexts = [128 * depth + 1 + 37 * row % 300 for row, (_, depth) in enumerate(depths)]
    case = Case(kernels, [(1, context) for context in contexts], dtype=dtype, **shape)
    first_rows = {}
    for row, (family, depth) in enumerate(depths):
        first = first_rows.setdefault(family, row)
        case.tables[row, : 8 * depth] = case.tables[first, : 8 * depth]
    return case


def check_alone(kernels, case, **scores):
    """Each decode row gets the same bits in a batch of its own."""
    together, starts = case.ours(kernels, **scores), torch.tensor([0, 1], dtype=torch.int32)
    for row in range(len(case.contexts)):
        here = slice(row, row + 1)
        places = (case.tables[here], starts, case.contexts[here])
        alone = kernels.paged_attention(case.q[here], *case.caches, *places, case.scale, **scores)
        assert torch.equal(together[here], alone), row


FAMILIES = {
    "all of one": [(0, 2)] * 33,
    "two, mixed": [(row % 2, 1 + row % 2) for row in range(16)],
    "some share more than others": [(0, 4)] + [(0, depth) for depth in (1, 4, 4, 2, 4, 4, 1, 0, 4)],
    "one shares nothing": [(0, 3)] * 5 + [(1, 3)] + [(0, 3)] * 5,
}


@of_all_dtypes
@pytest.mark.parametrize("depths", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("scores", [{}, {"window": 200}, {"softcap": 3.0}], ids=str)
def test_rows_that_read_a_shared_prefix_together_get_what_each_gets_alone(kernels, depths, scores, dtype):
    for num_heads, num_kv_heads in ((9, 3), (12, 1)):
        case = in_families(kernels, dtype, depths, num_heads=num_heads, num_kv_heads=num_kv_heads)
        check_alone(kernels, case, **scores)


@pytest.mark.parametrize("place", [0, 3, 7], ids=["first", "inner", "last"])
def test_rows_share_no_split_in_which_one_block_differs(kernels, place):
    case = in_families(kernels, torch.float32, [(0, 3)] * 16, num_heads=9, num_kv_heads=3)
    case.tables[1::2, 8 + place] = case.tables[1::2, 24]
    check_alone(kernels, case)


@pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
def test_rows_share_no_split_behind_the_end_of_a_context(kernels, order):
    case = in_families(kernels, torch.float32, [(0, 5)] * 16, num_heads=9, num_kv_heads=3)
    case.contexts = torch.tensor(range(130, 642, 32)[::order], dtype=torch.int32)
    check_alone(kernels, case)


@of_all_dtypes
def test_a_shared_prefix_equals_the_twin_beside_prompts_and_long_rows(kernels, dtype):
    rows = [(1, 300), (40, 300), (1, 290), (1, 2000), (1, 310), (7, 280), (1, 257), (1, 256)]
    case = Case(kernels, rows, num_heads=9, num_kv_heads=3, dtype=dtype)
    for table in case.tables[1:]:
        table[:16] = case.tables[0, :16]
    case.twin_caches = tuple(cache.nan_to_num() for cache in as_the_twins(*case.caches))
    torch.testing.assert_close(case.ours(kernels), case.twins(), **TOLERANCE[dtype])


def test_attention_takes_queries_from_a_fused_projection(kernels):
    case = Case(kernels, BATCHES["mixed"])
    fused = torch.randn(case.q.shape[0], 8, case.q.shape[2])
    fused[:, :4] = case.q
    out = case.ours(kernels, fused[:, :4])
    assert torch.equal(out, case.ours(kernels))
    assert out.is_contiguous()


@of_both_dtypes
def test_nan_behind_the_context_does_no_harm(kernels, dtype, cache_dtype):
    for context in (1, 2, 15, 31, 40):
        rows = [(1, context), (min(3, context), context)]
        case = Case(kernels, rows, dtype=dtype, cache_dtype=cache_dtype)  # all NaN except what was written
        assert case.ours(kernels).isfinite().all(), context


def at_the_end_of_memory(x):
    """A copy of a tensor, behind which a read is a crash."""
    size, page = x.numel() * x.element_size(), mmap.PAGESIZE
    end = -(-size // page) * page
    memory = mmap.mmap(-1, end + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + end), ctypes.c_size_t(page), 0) == 0
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=end - size).view(x.shape).copy_(x)


@of_all_dtypes
@pytest.mark.parametrize("block_size, head_dim", [(2, 6), (16, 64), (16, 74), (24, 64)])
def test_nothing_behind_the_queries_and_caches_is_read(kernels, block_size, head_dim, dtype):
    case = Case(kernels, [(1, 3 * block_size), (3, 40)], block_size=block_size, head_dim=head_dim, dtype=dtype)
    expected, num_blocks = case.ours(kernels), int(case.tables.max()) + 1
    case.caches = [at_the_end_of_memory(cache[:num_blocks]) for cache in case.caches]
    assert torch.equal(case.ours(kernels, at_the_end_of_memory(case.q)), expected)


@of_all_dtypes
@pytest.mark.parametrize("num_inputs", [6, 320])
def test_nothing_behind_the_rows_and_the_bias_of_a_product_is_read(kernels, num_inputs, dtype):
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((33, num_inputs), (33,), (21, num_inputs)))
    layer, guarded = kernels.linear(weight, bias), kernels.linear(weight, at_the_end_of_memory(bias))
    for num_rows in (1, 2, 7, 13, 21):
        assert guarded(at_the_end_of_memory(x[:num_rows])).equal(layer(x[:num_rows]))


def test_a_sequence_that_holds_a_nan_fails_alone(kernels):
    case = Case(kernels, [(1, 20), (1, 20)])
    case.q[0, 0, 0] = torch.nan
    out = case.ours(kernels)
    assert out[0, 0].isnan().all()
    assert out[1].isfinite().all()


def as_the_twins(k_cache, v_cache):
    """The two caches of [num_blocks, block_size, num_kv_heads, head_dim] in the layout of the twins."""
    num_blocks, block_size, num_kv_heads, head_dim = shape = k_cache.shape
    unit = cpu.unit_of(k_cache.dtype)
    k = k_cache.view(num_blocks, num_kv_heads, head_dim // unit, block_size, unit).permute(0, 3, 1, 2, 4)
    v = v_cache.view(num_blocks, num_kv_heads, block_size // unit, head_dim, unit).permute(0, 2, 4, 1, 3)
    return k.reshape(shape), v.reshape(shape)


@of_both_dtypes
@pytest.mark.parametrize("num_tokens, head_dim", [(0, 64), (1, 64), (5, 6), (100, 80)])
def test_rotation_with_the_cache_write_equals_its_twin(kernels, num_tokens, head_dim, dtype, cache_dtype):
    num_heads, num_kv_heads = 6, 2
    angles = torch.randn(num_tokens, head_dim // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    slots = torch.randperm(160)[:num_tokens]
    slots[1::3] = -1
    theirs = heads.clone()
    caches, twin_caches = torch.zeros(2, 2, 40, 4, num_kv_heads, head_dim, dtype=cache_dtype)
    q = kernels.rotate_and_cache(heads, cos, sin, *caches, slots)
    twin_q = reference.rotate_and_cache(theirs, cos, sin, *twin_caches, slots)
    torch.testing.assert_close(heads, theirs, **TOLERANCE[dtype])
    torch.testing.assert_close(q, twin_q, **TOLERANCE[dtype])
    assert q.data_ptr() == heads.data_ptr()
    k, v = as_the_twins(*caches)
    coarser = max(dtype, cache_dtype, key=lambda kind: TOLERANCE[kind]["atol"])
    torch.testing.assert_close(k, twin_caches[0], **TOLERANCE[coarser])
    assert torch.equal(v, twin_caches[1])


def numbers_of(dtype):
    """Numbers of all kinds: every one of 16 bits, or for float32 those that are hard to round to 16 bits."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    if dtype != torch.float32:
        return halves.view(dtype)
    words = torch.randint(-(2**31), 2**31, (2**16,)).int()
    ties = torch.cat([halves.view(kind).float() for kind in (torch.float16, torch.bfloat16)]).view(torch.int32)
    ties = torch.cat([ties + step for step in (0, 1, -1, 0x800, 0x1000, 0x1001, 0x8000, 0x8001, 0x7FFF)])
    special = torch.tensor([65504, 65519, 65520, 65536, 1e30, torch.inf, -torch.inf, 2.0**-24, 2.0**-25, 1e-45, -0.0])
    return torch.cat([words.view(torch.float32), ties.view(torch.float32), special])


@of_both_dtypes
def test_every_number_is_rounded_to_the_dtype_of_the_cache_as_by_torch(kernels, dtype, cache_dtype):
    numbers = numbers_of(dtype)
    for numbers_at_once in (2, 64):  # some one by one, some in vectors
        x = numbers[: len(numbers) // numbers_at_once * numbers_at_once].view(-1, 1, numbers_at_once)
        x = torch.cat([x, x[: len(x) % 2]])  # an even number of slots
        caches = torch.zeros(2, 1, len(x), 1, numbers_at_once, dtype=cache_dtype).view(2, -1, 2, 1, numbers_at_once)
        kernels.reshape_and_cache(x, x, *caches, torch.arange(len(x)))
        for found in as_the_twins(*caches):
            # Except denormals, which the instruction that rounds to bfloat16 treats as zero.
            expected = x.to(cache_dtype)
            torch.testing.assert_close(found.reshape(x.shape), expected, rtol=0, atol=2**-126, equal_nan=True)


@of_all_dtypes
@pytest.mark.parametrize("num_rows, size", [(0, 8), (1, 1), (3, 7), (5, 16), (2, 576), (200, 100)])
def test_norms_and_gates_equal_their_twins(kernels, num_rows, size, dtype):
    x, residual = (3 * torch.randn(2, num_rows, size)).to(dtype)
    weight, sum_of_both = torch.randn(size).to(dtype), residual.clone()
    close = {"atol": 1e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else TOLERANCE[dtype]
    torch.testing.assert_close(kernels.rms_norm(x, weight, 0.1), reference.rms_norm(x, weight, 0.1), **close)
    ours, theirs = (f.add_rms_norm(x, r, weight, 0.1) for f, r in ((kernels, residual), (reference, sum_of_both)))
    torch.testing.assert_close(ours, theirs, **close)
    assert torch.equal(residual, sum_of_both)
    both = torch.cat([10 * x, residual], dim=1)
    torch.testing.assert_close(kernels.silu_and_mul(both), reference.silu_and_mul(both), **close)


def test_extreme_values_pass_through_the_gate(kernels):
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, torch.nan, 1, 1, 1, 1, 1]])
    torch.testing.assert_close(kernels.silu_and_mul(x), torch.tensor([[0, 0, 100, 1e4, torch.nan]]), equal_nan=True)


@pytest.mark.parametrize(
    "spoil, complaint",
    [
        (lambda c: setattr(c, "q", c.q.double()), "differ in dtype"),
        (lambda c: setattr(c, "q", c.q[:, :3]), "share 2 K/V heads"),
        (lambda c: setattr(c, "q", c.q[:, :0]), "share 2 K/V heads"),
        (lambda c: setattr(c, "q", c.q[:-1]), "query_starts ends"),
        (lambda c: setattr(c, "q", c.q.repeat_interleave(2, 2)[..., ::2]), "side by side"),
        (lambda c: setattr(c, "tables", c.tables[:1]), "same rows"),
        (lambda c: setattr(c, "tables", c.tables.long()), "contiguous int32"),
        (lambda c: setattr(c, "tables", c.tables[:, :1].contiguous()), "row 0 has"),
        (lambda c: c.tables.fill_(999), "row 0 has"),
        (lambda c: c.tables.fill_(len(c.caches[0])), "row 0 has"),
        (lambda c: c.tables.fill_(-1), "row 0 has"),
        (lambda c: c.contexts.sub_(1), "row 1 has 2 queries, a context of 1"),
        (lambda c: (setattr(c, "q", c.q.repeat(2, 1, 1)[:4]), c.starts.add_(1)), "query_starts"),
        (lambda c: setattr(c, "caches", (c.caches[0], c.caches[1][1:])), "do not fit"),
    ],
)
def test_attention_refuses_arguments_that_do_not_fit(spoil, complaint):
    kernels = cpu.CpuKernels()
    case = Case(kernels, [(1, 19), (2, 2)])
    spoil(case)
    with pytest.raises(ValueError, match=complaint):
        case.ours(kernels)


def test_slots_outside_the_cache_are_refused():
    kernels = cpu.CpuKernels()
    k, cache = torch.zeros(2, 1, 4), torch.zeros(2, 4, 1, 4)
    for slots, complaint in (([0, 8], "token 1 has slot 8"), ([8, 0], "token 0 has slot 8")):
        with pytest.raises(ValueError, match=complaint):
            kernels.reshape_and_cache(k, k, cache, cache, torch.tensor(slots))


def test_the_fastest_kernels_are_chosen_once_and_a_reason_is_given_for_the_reference():
    device = torch.device("cpu")
    assert choice.choose(device, torch.bfloat16, head_dim=64, block_size=16).name == f"cpu: C++ {BEST}"
    odd = choice.choose(device, torch.bfloat16, head_dim=64, block_size=3)
    assert (odd.name, "pairs" in odd.note) == ("reference", True)
    wide = choice.choose(device, torch.bfloat16, cache_dtype=torch.float32, head_dim=64, block_size=3)
    assert wide.name == f"cpu: C++ {BEST}"
    double = choice.choose(device, torch.float64, head_dim=64, block_size=16)
    assert (double.name, "float64" in double.note) == ("reference", True)


def test_a_library_that_is_missing_or_older_than_its_sources_is_not_used(tmp_path, monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr(build, "source_digest", lambda: "0" * 16)
    assert "older than its sources" in choice.choose(device, torch.float32, head_dim=64, block_size=16).note
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "cpu_kernels.so")
    assert "was not built" in choice.choose(device, torch.float32, head_dim=64, block_size=16).note
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.build()


def test_a_level_that_the_cpu_cannot_run_is_refused(monkeypatch):
    with pytest.raises(cpu.KernelsUnavailable, match="but not sse9"):
        cpu.CpuKernels("sse9")


@pytest.mark.skipif("amx_bf16" not in build.levels(), reason="not the architecture that has tile registers")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump to look into the library with")
def test_the_level_with_tile_registers_uses_their_instructions_and_its_emulation_does_not():
    """Tests can run them only on a CPU that has them; on others they can only be found in the library."""
    listing = subprocess.run(["objdump", "-d", str(build.LIBRARY)], capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"\b(ldtilecfg|tilerelease|tilezero|tileloadd|tilestored|tdpbf16ps)\b", listing))
    assert found == {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps"}
    assert not set(build.MODELS) & set(build.levels())
    assert not set(build.MODELS) & set(cpu.runnable_levels())


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="no compiler for another architecture")
@pytest.mark.parametrize("level", ["portable", *build.MODELS])
def test_portable_levels_compile_for_another_architecture_without_a_warning(tmp_path, level):
    flags = (*build.FLAGS, *{**build.OTHER_LEVELS, **build.MODELS}[level], "-Werror")
    for source, define in (("level.cpp", f"-DLEVEL={level}"), ("library.cpp", '-DSOURCE_DIGEST="none"')):
        arguments = [*flags, define, "-c", str(build.SOURCES / source), "-o", str(tmp_path / "compiled.o")]
        run = subprocess.run(["aarch64-linux-gnu-g++", *arguments], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr


def test_each_thread_is_bound_to_a_core_of_its_own():
    """In a process of its own, since threads and processes that it starts later would be bound as well."""
    script = """
import os, torch
from kernels.cpu import pin_threads
cores = os.sched_getaffinity(0)
torch.set_num_threads(len(cores))
assert pin_threads()
bound = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
assert all({core} in bound for core in cores), bound
os.sched_setaffinity(0, cores)
torch.set_num_threads(len(cores) + 1)
assert not pin_threads()
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=build.SOURCES.parents[1], timeout=60)
