"""One token for each row of logits: the best, or one drawn from what filters keep; without a sort, or a wait.

A draw is the argmax of scaled logits plus Gumbel noise (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030); the noise
is that of `kernels.philox`, a function of (seed, sequence index, position, token id) alone, so the token is the one
that the twin in `kernels.draws` draws. Top-k, top-p and min-p keep a head of the tokens ordered by logit; typical
sampling (Meister et al. 2022, arXiv:2202.00666) keeps a head of those ordered by how far they are from the expected
scaled logit. So each filter is a greatest distance, and what they keep together an interval. A distance is found by
bisection of the float's bits, which are ordered as the floats are (the idea of radix selection: Alabi et al. 2012,
"Fast k-selection algorithms for graphics processing units"), in three places at once, and once few tokens are left to
be told apart, among these alone.

Launches, none of which the host waits for:
- parts: a program for each (part of the vocabulary, row) finds its best logit;
- bounds, with filters only: a program for each row finds the interval;
- draws: a program for each (part, row) adds the noise to what the filters keep, and finds the best sum;
- choice: a program for each row looks through its parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.forms import check_sampling

_PART = 8192  # tokens
_COUNTERS = 256  # of the generator, four tokens each
_SEARCHED = 4096  # tokens that a threshold's program looks at together: one for each of its lanes
_SIFTED = 8  # tokens that are put aside for each lane at most


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
def _bounds_kernel(
    bounds: tl.tensor,  # [2, num_rows] float32: the least and the greatest scaled logit that is kept
    sifted: tl.tensor,  # [num_rows, DEPTH, TILE] float32: logits among which is looked further
    logits: tl.tensor,
    best_values: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    least_scaled: tl.tensor,  # [num_rows] float32, min-p's threshold
    typical_p: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    num_parts: tl.tensor,
    PADDED_PARTS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    best = _best_of_row(best_values, row, num_parts, PADDED_PARTS)
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    count_target = tl.load(top_k + row).to(tl.int32)
    share, typical_share = tl.load(top_p + row), tl.load(typical_p + row)
    source, count = logits + row * row_stride, size  # all that may be kept is among these
    sifted += row * DEPTH * TILE
    least = tl.load(least_scaled + row)
    greatest = tl.full([], float("inf"), tl.float32)
    last = tl.full([], 0x7F800000, tl.int32)  # the bits of infinity: everything

    # -- distances from the best logit: their order is that of the logits, whatever the temperature --
    if count_target < size:
        target = count_target.to(tl.float32)
        last, source, count = _search(source, count, sifted, best, 1.0, 0.0, least, last, target, "count", TILE, DEPTH)
        least = tl.maximum(least, -tl.div_rn(last.to(tl.float32, bitcast=True), temperature))
    if share < 1.0:
        total, _ = _mass_within(source, count, best, temperature, 0.0, least, last, "head", TILE)
        target = share * total
        last, source, count = _search(
            source, count, sifted, best, temperature, 0.0, least, last, target, "head", TILE, DEPTH
        )
        least = tl.maximum(least, -tl.div_rn(last.to(tl.float32, bitcast=True), temperature))

    # -- distances from the expected scaled logit, of what the others keep --
    if typical_share < 1.0:
        last = tl.full([], 0x7F800000, tl.int32)
        total, weighted = _mass_within(source, count, best, temperature, 0.0, least, last, "typical", TILE)
        center = tl.div_rn(weighted, total)
        target = typical_share * total
        last, source, count = _search(
            source, count, sifted, best, temperature, center, least, last, target, "typical", TILE, DEPTH
        )
        least, greatest = _ends_within(source, count, best, temperature, center, least, last, TILE)
    tl.store(bounds + row, least)
    tl.store(bounds + tl.num_programs(0) + row, greatest)


@triton.jit
def _search(
    source: tl.tensor,
    count: tl.tensor,
    sifted: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    center: tl.tensor,
    least: tl.tensor,
    last: tl.tensor,
    target: tl.tensor,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    # The least distance, as bits, within which the tokens measure `target`: by mass, or for "count" by number. And
    # where all tokens within it are found, with how many there: `sifted`, where they are few.
    low, high, count_low, count_high = last * 0 - 1, last, count * 0, count
    low, high, count_low, count_high = _narrow(
        source, count, best, temperature, center, least, low, high, count_low, count_high, target, TILE // 4, KIND, TILE
    )
    if (count > DEPTH * TILE) & (count_high <= TILE // 4):
        depth = _sift(source, count, sifted, best, temperature, center, least, high, KIND, TILE, DEPTH)
        if depth <= DEPTH:
            source, count = sifted, depth * TILE
    _, high, _, _ = _narrow(
        source, count, best, temperature, center, least, low, high, count_low, count_high, target, 1, KIND, TILE
    )
    return high, source, count


@triton.jit
def _narrow(
    source: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    center: tl.tensor,
    least: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    count_low: tl.tensor,
    count_high: tl.tensor,
    target: tl.tensor,
    FEW: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    # Too little is within `low`, enough within `high`; where only one token lies between, `high` keeps the right ones.
    # Ends where so few are within it.
    while (high - low > 1) & (count_high - count_low > 1) & (count_high > FEW):
        step = (high - low) // 4
        first, second, third = low + tl.maximum(step, 1), low + tl.maximum(2 * step, 1), low + tl.maximum(3 * step, 1)
        if (low < 0) & (high == 0x7F800000):  # of all distances most are no one's: begin with 4, 8 and 16
            first, second, third = first * 0 + 0x40800000, first * 0 + 0x41000000, first * 0 + 0x41800000
        tokens = tl.arange(0, TILE)
        count_1, count_2 = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
        count_3 = tl.zeros([TILE], tl.int32)
        mass_1, mass_2 = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
        mass_3 = tl.zeros([TILE], tl.float32)
        for start in tl.range(0, count, TILE):
            bits, mass, _ = _distances(source, count, best, temperature, center, least, tokens + start, KIND)
            count_1 += (bits <= first).to(tl.int32)
            count_2 += (bits <= second).to(tl.int32)
            count_3 += (bits <= third).to(tl.int32)
            if KIND != "count":
                mass_1 += tl.where(bits <= first, mass, 0.0)
                mass_2 += tl.where(bits <= second, mass, 0.0)
                mass_3 += tl.where(bits <= third, mass, 0.0)
        within_1, within_2, within_3 = tl.sum(count_1, 0), tl.sum(count_2, 0), tl.sum(count_3, 0)
        if KIND != "count":
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
    return low, high, count_low, count_high


@triton.jit
def _sift(
    source: tl.tensor,
    count: tl.tensor,
    sifted: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    center: tl.tensor,
    least: tl.tensor,
    last: tl.tensor,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    # Puts each lane's logits within the distance `last` aside, in the order they come in: `sifted` is [DEPTH, TILE],
    # filled up with those of forbidden tokens. Gives how many a lane has at most; beyond DEPTH they are left out.
    lanes = tl.arange(0, TILE)
    depths = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, count, TILE):
        bits, _, _ = _distances(source, count, best, temperature, center, least, lanes + start, KIND)
        found = tl.load(source + lanes + start, mask=lanes + start < count, other=float("-inf"))
        is_within = bits <= last
        tl.store(sifted + depths * TILE + lanes, found, mask=is_within & (depths < DEPTH))
        depths += is_within.to(tl.int32)
    for level in tl.static_range(DEPTH):
        tl.store(sifted + level * TILE + lanes, float("-inf"), mask=depths <= level)
    tl.debug_barrier()  # a lane may be another thread's where it is read
    return tl.max(depths, 0)


@triton.jit
def _mass_within(
    source: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    center: tl.tensor,
    least: tl.tensor,
    last: tl.tensor,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    # The mass of the tokens within the distance `last`, where the best token's is 1; and their scaled logits, weighted.
    tokens = tl.arange(0, TILE)
    masses, weighted = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in tl.range(0, count, TILE):
        bits, mass, scaled = _distances(source, count, best, temperature, center, least, tokens + start, KIND)
        masses += tl.where(bits <= last, mass, 0.0)
        weighted += tl.where((bits <= last) & (mass > 0.0), mass * scaled, 0.0)  # 0 * -inf is no summand
    return tl.sum(masses, 0), tl.sum(weighted, 0)


@triton.jit
def _ends_within(
    source: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    center: tl.tensor,
    least: tl.tensor,
    last: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    # The least and the greatest scaled logit within the distance `last` from the center, as they are: center - distance
    # and center + distance would be rounded, and a token at the end be cut or not as chance has it.
    tokens = tl.arange(0, TILE)
    lows, highs = tl.full([TILE], float("inf"), tl.float32), tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, count, TILE):
        bits, _, scaled = _distances(source, count, best, temperature, center, least, tokens + start, "typical")
        lows = tl.minimum(lows, tl.where(bits <= last, scaled, float("inf")))
        highs = tl.maximum(highs, tl.where(bits <= last, scaled, float("-inf")))
    return tl.min(lows, 0), tl.max(highs, 0)


@triton.jit
def _distances(
    source: tl.tensor,
    count: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    center: tl.tensor,
    least: tl.tensor,
    tokens: tl.tensor,
    KIND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    # Each token's distance, as the bits of a float from 0 up: for "count" and "head" how far its logit is below the
    # best, for "typical" how far its scaled logit is from the center, and none where it is cut. Its mass, for which
    # "count" has no use, and its scaled logit.
    there = tokens < count
    below = best - tl.load(source + tokens, mask=there, other=float("-inf"))
    scaled, mass, distance = below, below, tl.abs(below)
    if KIND != "count":
        scaled = -tl.div_rn(below, temperature)
        mass = tl.exp(scaled)
    if KIND == "typical":
        there = there & (scaled >= least)
        distance = tl.abs(scaled - center)
    bits = tl.where(there, distance.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    return bits, mass, scaled


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
    filters: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """`reference.sample_tokens`, on the device and without waiting for it; arguments and result are the same."""
    check_sampling(logits, temperatures, (seeds, positions, sequence_indexes), filters)
    num_rows, size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    if size == 1:
        filters = None  # they keep the best one; and a loop over one is what Triton's compiler fails at
    num_parts = triton.cdiv(size, _PART)
    padded_parts = triton.next_power_of_2(num_parts)
    # Of each part the best logit and the best sum with noise, and whose they are. In four pieces of memory, since parts
    # of one would not always be aligned, and Triton compiles a kernel anew for pointers that are not.
    best_values, drawn_values = (
        torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    best_ids, drawn_ids = (torch.empty_like(best_values, dtype=torch.int32) for _ in range(2))
    grid, stride = (num_parts, num_rows), logits.stride(0)
    _parts_kernel[grid](best_values, best_ids, logits, stride, size, PART=_PART, TILE=1024)
    bounds = temperatures  # not touched without filters
    if filters is not None:
        top_k, top_p, min_p, typical_p = filters
        bounds = torch.empty((2, num_rows), dtype=torch.float32, device=logits.device)
        sifted = torch.empty((num_rows, _SIFTED, _SEARCHED), dtype=torch.float32, device=logits.device)
        _bounds_kernel[(num_rows,)](
            *(bounds, sifted, logits, best_values, temperatures, top_k, top_p, min_p.log(), typical_p),
            *(stride, size, num_parts),
            PADDED_PARTS=padded_parts,
            TILE=_SEARCHED,
            DEPTH=_SIFTED,
            num_warps=16,
        )
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
