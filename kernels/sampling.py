"""One token for each row of logits: the best, or one drawn from what filters keep; without sorting or waiting.

A draw is the argmax of scaled logits plus Gumbel noise (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030); the noise
is that of `kernels.philox`, a function of (seed, sequence index, position, token id) alone, so the token is the one
that the twin in `kernels.draws` draws. What filters keep is an interval of scaled logits, which `kernels.thresholds`
finds.

Launches, none of which the host waits for:
- parts: one program per (part of the vocabulary, row) finds its best logit;
- bounds, with filters only: one program per row finds the interval;
- draws: one program per (part, row) adds the noise to what the filters keep, and finds the best sum;
- choice: one program per row picks the best of its parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import check_sampling
from kernels.thresholds import best_of_row, find_bounds

_PART = 8192  # tokens
_COUNTERS = 256  # counters of the generator, four tokens each


@triton.jit
def _parts_kernel(
    best_values: tl.tensor,  # [num_rows, num_parts]
    best_ids: tl.tensor,
    logits: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    PART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = part * PART + tl.arange(0, TILE)
    values = tl.full([TILE], float("-inf"), tl.float32)
    winners = ids
    for start in tl.range(0, tl.minimum(PART, size - part * PART), TILE):
        there = ids + start < size
        found = tl.load(logits + row * row_stride + ids + start, mask=there, other=float("-inf"))
        better = found > values
        values = tl.where(better, found, values)
        winners = tl.where(better, ids + start, winners)
    _keep_best(best_values, best_ids, row * tl.num_programs(0) + part, values, winners, size)


@triton.jit
def _keep_best(
    best_values: tl.tensor,
    best_ids: tl.tensor,
    place: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    size: tl.tensor,
) -> None:
    # The smallest of the ids that share the best value; in range even if all values are NaN.
    best = tl.max(values, 0)
    tl.store(best_values + place, best)
    tl.store(best_ids + place, tl.min(tl.where(values == best, ids, size - 1), 0).to(best_ids.dtype.element_ty))


@triton.jit
def _draws_kernel(
    drawn_values: tl.tensor,  # [num_rows, num_parts]
    drawn_ids: tl.tensor,
    logits: tl.tensor,
    best_values: tl.tensor,
    temperatures: tl.tensor,
    bounds: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    sequence_indexes: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    FILTERED: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    PART: tl.constexpr,
    COUNTERS: tl.constexpr,
) -> None:
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_parts, num_rows = tl.num_programs(0), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    if temperature <= 0:
        return  # the best token is taken
    best = best_of_row(best_values, row, num_parts, PADDED_PARTS)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row).to(tl.uint32)
    sequence_index = tl.load(sequence_indexes + row).to(tl.uint32)
    lanes = tl.arange(0, 4 * COUNTERS)
    values = tl.full([4 * COUNTERS], float("-inf"), tl.float32)
    winners = part * PART + lanes
    for start in tl.range(part * PART, tl.minimum((part + 1) * PART, size), 4 * COUNTERS):
        # -- scale, after subtracting the best: in the other order, small temperatures would make infinities --
        ids = start + lanes
        found = tl.load(logits + row * row_stride + ids, mask=ids < size, other=float("-inf"))
        scaled = tl.div_rn(found - best, temperature)
        if FILTERED:
            kept = (scaled >= tl.load(bounds + row)) & (scaled <= tl.load(bounds + num_rows + row))
            scaled = tl.where(kept, scaled, float("-inf"))
        # -- noise: token id 4 c + i has word i of counter c --
        counters = (start // 4 + tl.arange(0, COUNTERS)).to(tl.uint32)
        zeros = counters * 0
        words = tl.philox(seed, counters, zeros + position, zeros + sequence_index, zeros)
        noise = tl.interleave(tl.interleave(words[0], words[2]), tl.interleave(words[1], words[3]))
        noisy = scaled + _gumbel(noise)
        better = noisy > values
        values = tl.where(better, noisy, values)
        winners = tl.where(better, ids, winners)
    _keep_best(drawn_values, drawn_ids, row * num_parts + part, values, winners, size)


@triton.jit
def _gumbel(words: tl.tensor) -> tl.tensor:
    # -log(-log1p(-u)), u = (word + 1/2) / 2^32, as in `kernels.philox`. log1p from the rounded w = 1 - u, with the
    # factor u / (1 - w) for what rounding lost (Goldberg 1991, "What every computer scientist should know", theorem 4).
    complement = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 2.0**-24)
    rounded = 1.0 - complement
    lost = 1.0 - rounded
    exact = tl.log(rounded) * tl.div_rn(complement, tl.where(lost == 0.0, 1.0, lost))
    return -tl.log(tl.where(lost == 0.0, complement, -exact))


@triton.jit(do_not_specialize=["num_parts"])
def _choice_kernel(
    token_ids: tl.tensor,
    best_values: tl.tensor,
    best_ids: tl.tensor,
    drawn_values: tl.tensor,
    drawn_ids: tl.tensor,
    temperatures: tl.tensor,
    num_parts: tl.tensor,
    size: tl.tensor,
    PADDED_PARTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PADDED_PARTS)
    there = parts < num_parts
    places = row * num_parts + parts
    values = tl.load(best_values + places, mask=there, other=float("-inf"))
    ids = tl.load(best_ids + places, mask=there, other=0x7FFFFFFF)
    if tl.load(temperatures + row) > 0:
        values = tl.load(drawn_values + places, mask=there, other=float("-inf"))
        ids = tl.load(drawn_ids + places, mask=there, other=0x7FFFFFFF)
    best = tl.max(values, 0)
    tl.store(token_ids + row, tl.min(tl.where(values == best, ids, size - 1), 0).to(tl.int64))


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    sequence_indexes: Tensor,
    filters: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """`reference.sample_tokens`, on the device and without waiting for it; arguments and result are the same."""
    check_sampling(logits, temperatures, (seeds, positions, sequence_indexes), filters)
    num_rows, size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    if size == 1:
        filters = None  # they keep the only token; and Triton's compiler fails at a loop over a single one
    num_parts = triton.cdiv(size, _PART)
    padded_parts = triton.next_power_of_2(num_parts)
    # For each part, the best logit, the best sum with noise, and the ids of both. In four tensors, since slices of one
    # would not always be aligned, and Triton compiles a kernel anew for pointers that are not.
    best_values, drawn_values = (
        torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    best_ids, drawn_ids = (torch.empty_like(best_values, dtype=torch.int32) for _ in range(2))
    grid, stride = (num_parts, num_rows), logits.stride(0)
    _parts_kernel[grid](best_values, best_ids, logits, stride, size, PART=_PART, TILE=1024)
    bounds = temperatures  # not touched without filters
    if filters is not None:
        bounds = find_bounds(logits, best_values, temperatures, filters)
    _draws_kernel[grid](
        *(drawn_values, drawn_ids, logits, best_values, temperatures, bounds, seeds, positions, sequence_indexes),
        *(stride, size),
        FILTERED=filters is not None,
        PADDED_PARTS=padded_parts,
        PART=_PART,
        COUNTERS=_COUNTERS,
    )
    _choice_kernel[(num_rows,)](
        *(token_ids, best_values, best_ids, drawn_values, drawn_ids, temperatures, num_parts, size),
        PADDED_PARTS=padded_parts,
    )
    return token_ids
