"""One token for each row of logits: the best, or one drawn after temperature, top-k, top-p and min-p; without a sort.

A draw is the argmax of scaled logits plus Gumbel noise (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030); the noise
is that of `kernels.philox`, a function of (seed, sequence index, position, token id) alone, so the token is the one
that `worker.sampler` draws. Every filter keeps a head of the tokens ordered by logit, so every filter is a threshold,
and a threshold is found by bisection of the float's bits, which are ordered as the floats are (the idea of radix
selection: Alabi et al. 2012, "Fast k-selection algorithms for graphics processing units"), in three places at once.

Launches, none of which the host waits for:
- parts: a program for each (part of the vocabulary, row) finds its best logit;
- thresholds, with filters only: a program for each row;
- draws: a program for each (part, row) adds the noise to what the filters keep, and finds the best sum;
- choice: a program for each row looks through its parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import form

_PART = 8192  # tokens
_COUNTERS = 256  # of the generator, four tokens each
_SEARCHED = 4096  # tokens that a threshold's program looks at together


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
    # The smallest of the ids that share the best value; in range even where nothing is a number.
    best = tl.max(values, 0)
    tl.store(best_values + place, best)
    tl.store(best_ids + place, tl.min(tl.where(values == best, ids, size - 1), 0).to(best_ids.dtype.element_ty))


@triton.jit(do_not_specialize=["num_parts"])
def _thresholds_kernel(
    thresholds: tl.tensor,  # [num_rows] float32: the least scaled logit that is kept
    logits: tl.tensor,
    best_values: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    least_scaled: tl.tensor,  # [num_rows] float32, min-p's threshold
    row_stride: tl.tensor,
    size: tl.tensor,
    num_parts: tl.tensor,
    PADDED_PARTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    best = _best_of_row(best_values, row, num_parts, PADDED_PARTS)
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    count_target = tl.load(top_k + row).to(tl.int32)
    share = tl.load(top_p + row)
    row_logits = logits + row * row_stride
    threshold = tl.load(least_scaled + row)
    last = tl.full([], 0x7F800000, tl.int32)  # the bits of infinity: everything
    if count_target < size:
        last = _search(row_logits, best, temperature, size, last, count_target.to(tl.float32), False, TILE)
        threshold = tl.maximum(threshold, -tl.div_rn(last.to(tl.float32, bitcast=True), temperature))
    if share < 1.0:
        total = _mass_within(row_logits, best, temperature, size, last, TILE)
        last = _search(row_logits, best, temperature, size, last, share * total, True, TILE)
        threshold = tl.maximum(threshold, -tl.div_rn(last.to(tl.float32, bitcast=True), temperature))
    tl.store(thresholds + row, threshold)


@triton.jit
def _search(
    row_logits: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    size: tl.tensor,
    last: tl.tensor,
    target: tl.tensor,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    # The least distance from the best logit, as bits, within which the tokens measure `target`: by mass or by number.
    # Too little is within `low`, enough within `high`; where only one token lies between, `high` keeps the right ones.
    low, high = last * 0 - 1, last
    count_low, count_high = size * 0, size
    while (high - low > 1) & (count_high - count_low > 1):
        step = (high - low) // 4
        first, second, third = low + tl.maximum(step, 1), low + tl.maximum(2 * step, 1), low + tl.maximum(3 * step, 1)
        tokens = tl.arange(0, TILE)
        count_1, count_2 = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
        count_3 = tl.zeros([TILE], tl.int32)
        mass_1, mass_2 = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
        mass_3 = tl.zeros([TILE], tl.float32)
        for start in tl.range(0, size, TILE):
            bits, mass = _distances(row_logits, best, temperature, tokens + start, size, BY_MASS)
            count_1 += (bits <= first).to(tl.int32)
            count_2 += (bits <= second).to(tl.int32)
            count_3 += (bits <= third).to(tl.int32)
            if BY_MASS:
                mass_1 += tl.where(bits <= first, mass, 0.0)
                mass_2 += tl.where(bits <= second, mass, 0.0)
                mass_3 += tl.where(bits <= third, mass, 0.0)
        within_1, within_2, within_3 = tl.sum(count_1, 0), tl.sum(count_2, 0), tl.sum(count_3, 0)
        if BY_MASS:
            enough_1, enough_2 = tl.sum(mass_1, 0) >= target, tl.sum(mass_2, 0) >= target
            enough_3 = tl.sum(mass_3, 0) >= target
        else:
            enough_1, enough_2 = within_1.to(tl.float32) >= target, within_2.to(tl.float32) >= target
            enough_3 = within_3.to(tl.float32) >= target
        low = tl.where(enough_1, low, tl.where(enough_2, first, tl.where(enough_3, second, third)))
        count_low = tl.where(enough_1, count_low, tl.where(enough_2, within_1, tl.where(enough_3, within_2, within_3)))
        high = tl.where(enough_1, first, tl.where(enough_2, second, tl.where(enough_3, third, high)))
        count_high = tl.where(
            enough_1, within_1, tl.where(enough_2, within_2, tl.where(enough_3, within_3, count_high))
        )
    return high


@triton.jit
def _mass_within(
    row_logits: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    size: tl.tensor,
    last: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    # The mass of the tokens within the distance `last`, where the best token's is 1.
    tokens = tl.arange(0, TILE)
    masses = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, size, TILE):
        bits, mass = _distances(row_logits, best, temperature, tokens + start, size, True)
        masses += tl.where(bits <= last, mass, 0.0)
    return tl.sum(masses, 0)


@triton.jit
def _distances(
    row_logits: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    BY_MASS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    # How far below the best logit each token's is, as the bits of a float from 0 up, and its mass.
    there = tokens < size
    distance = best - tl.load(row_logits + tokens, mask=there, other=float("-inf"))
    mass = distance
    if BY_MASS:
        mass = tl.exp(-tl.div_rn(distance, temperature))
    bits = tl.where(there, tl.abs(distance).to(tl.int32, bitcast=True), 0x7FFFFFFF)
    return bits, mass


@triton.jit
def _best_of_row(best_values: tl.tensor, row: tl.tensor, num_parts: tl.tensor, PADDED_PARTS: tl.constexpr) -> tl.tensor:
    parts = tl.arange(0, PADDED_PARTS)
    return tl.max(tl.load(best_values + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")), 0)


@triton.jit
def _draws_kernel(
    drawn_values: tl.tensor,  # [num_rows, num_parts]
    drawn_ids: tl.tensor,
    logits: tl.tensor,
    best_values: tl.tensor,
    temperatures: tl.tensor,
    thresholds: tl.tensor,
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
    num_parts = tl.num_programs(0)
    temperature = tl.load(temperatures + row)
    if temperature <= 0:
        return  # the best one it is
    best = _best_of_row(best_values, row, num_parts, PADDED_PARTS)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row).to(tl.uint32)
    sequence_index = tl.load(sequence_indexes + row).to(tl.uint32)
    lanes = tl.arange(0, 4 * COUNTERS)
    values = tl.full([4 * COUNTERS], float("-inf"), tl.float32)
    winners = part * PART + lanes
    for start in tl.range(part * PART, tl.minimum((part + 1) * PART, size), 4 * COUNTERS):
        # -- scale, after the best became 0: the other way round, small temperatures would make infinities --
        ids = start + lanes
        found = tl.load(logits + row * row_stride + ids, mask=ids < size, other=float("-inf"))
        scaled = tl.div_rn(found - best, temperature)
        if FILTERED:
            scaled = tl.where(scaled >= tl.load(thresholds + row), scaled, float("-inf"))
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
    # -log(-log1p(-u)), u = (word + 1/2) / 2^32, as in `kernels.philox`. log1p by its rounded argument w = 1 - u, and
    # u / (1 - w) for what the rounding lost (Goldberg 1991, "What every computer scientist should know", theorem 4).
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
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """One token id for each row, on the device and without waiting for it.

    A row with a NaN or an infinity gets some id of the vocabulary; whether there is one, its logsumexp tells.

    Args:
        logits: [num_rows, vocabulary_size] float32; rows may be strided. -inf forbids a token.
        temperatures: [num_rows] float32; 0 takes the best token, the first of those that tie.
        seeds: [num_rows] int64, the bits of an unsigned 64-bit number.
        positions: [num_rows] int64, of the token to be drawn.
        sequence_indexes: [num_rows] int64.
        filters: top_k [num_rows] int64, the vocabulary's size where it cuts nothing; top_p [num_rows] float32, 1
            likewise; min_p [num_rows] float32, 0 likewise. A token that ties with the last one kept is kept. None when
            no row has any.

    Returns:
        [num_rows] int64.
    """
    _check(logits, temperatures, (seeds, positions, sequence_indexes), filters)
    num_rows, size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    num_parts = triton.cdiv(size, _PART)
    padded_parts = triton.next_power_of_2(num_parts)
    values = torch.empty((2, num_rows, num_parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((2, num_rows, num_parts), dtype=torch.int32, device=logits.device)
    grid, stride = (num_parts, num_rows), logits.stride(0)
    _parts_kernel[grid](values[0], ids[0], logits, stride, size, PART=_PART, TILE=1024)
    thresholds = temperatures  # not touched without filters
    if filters is not None:
        top_k, top_p, min_p = filters
        thresholds = torch.empty_like(temperatures)
        _thresholds_kernel[(num_rows,)](
            *(thresholds, logits, values[0], temperatures, top_k, top_p, min_p.log(), stride, size, num_parts),
            PADDED_PARTS=padded_parts,
            TILE=_SEARCHED,
            num_warps=16,
        )
    _draws_kernel[grid](
        *(values[1], ids[1], logits, values[0], temperatures, thresholds, seeds, positions, sequence_indexes),
        *(stride, size),
        FILTERED=filters is not None,
        PADDED_PARTS=padded_parts,
        PART=_PART,
        COUNTERS=_COUNTERS,
    )
    _choice_kernel[(num_rows,)](
        *(token_ids, values[0], ids[0], values[1], ids[1], temperatures, num_parts, size), PADDED_PARTS=padded_parts
    )
    return token_ids


def _check(
    logits: Tensor, temperatures: Tensor, names: tuple[Tensor, ...], filters: tuple[Tensor, Tensor, Tensor] | None
) -> None:
    if logits.ndim != 2 or logits.dtype != torch.float32 or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits are {form(logits)} with strides {logits.stride()}; float32 with dense rows is meant")
    if logits.shape[1] == 0:
        raise ValueError("the vocabulary is empty")
    floats, integers = [temperatures], list(names)
    if filters is not None:
        integers.append(filters[0])
        floats.extend(filters[1:])
    for columns, dtype in ((floats, torch.float32), (integers, torch.int64)):
        for column in columns:
            if column.shape != logits.shape[:1] or column.dtype != dtype or not column.is_contiguous():
                raise ValueError(f"{form(column)} is to be one {dtype} for each of {logits.shape[0]} rows")
