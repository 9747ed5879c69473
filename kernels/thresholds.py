"""What top-k, top-p, min-p and typical sampling keep of each row of logits: an interval, found without sorting.

Top-k, top-p and min-p keep a head of the tokens ordered by logit; typical sampling (Meister et al. 2022,
arXiv:2202.00666) keeps a head of those ordered by how far they are from the expected scaled logit. So each filter is a
greatest distance, and all of them together keep an interval. A distance is found by bisection of the float's bits,
which are ordered as the floats are (the idea of radix selection: Alabi et al. 2012, "Fast k-selection algorithms for
graphics processing units"), at three points at once, and, once few tokens are left to tell apart, among these alone.

`among` is what to search, and what to measure distances by: pointer to logits, their number, the best logit, the
temperature, the expected scaled logit, and the least scaled logit that is kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_SEARCHED = 4096  # tokens that a program looks at together: one for each of its lanes
_SIFTED = 8  # the most tokens put aside for each lane


@triton.jit(do_not_specialize=["num_parts"])
def _bounds_kernel(
    bounds: tl.tensor,  # [2, num_rows] float32: the least and the greatest scaled logit that is kept
    sifted: tl.tensor,  # [num_rows, DEPTH, TILE] float32: the logits among which the search continues
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
    best = best_of_row(best_values, row, num_parts, PADDED_PARTS)
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
        last, source, count = _search(
            (source, count, best, 1.0, 0.0, least), sifted, last, target, "count", TILE, DEPTH
        )
        least = tl.maximum(least, -tl.div_rn(last.to(tl.float32, bitcast=True), temperature))
    if share < 1.0:
        total, _ = _mass_within((source, count, best, temperature, 0.0, least), last, "head", TILE)
        target = share * total
        last, source, count = _search(
            (source, count, best, temperature, 0.0, least), sifted, last, target, "head", TILE, DEPTH
        )
        least = tl.maximum(least, -tl.div_rn(last.to(tl.float32, bitcast=True), temperature))

    # -- distances from the expected scaled logit, of what the others keep --
    if typical_share < 1.0:
        last = tl.full([], 0x7F800000, tl.int32)
        total, weighted = _mass_within((source, count, best, temperature, 0.0, least), last, "typical", TILE)
        center = tl.div_rn(weighted, total)
        target = typical_share * total
        last, source, count = _search(
            (source, count, best, temperature, center, least), sifted, last, target, "typical", TILE, DEPTH
        )
        least, greatest = _ends_within((source, count, best, temperature, center, least), last, TILE)
    tl.store(bounds + row, least)
    tl.store(bounds + tl.num_programs(0) + row, greatest)


@triton.jit
def _search(
    among: tl.tuple,
    sifted: tl.tensor,
    last: tl.tensor,
    target: tl.tensor,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    # The least distance, as bits, within which the tokens reach `target`: by mass, or, for "count", by number. And a
    # pointer to logits that include all within it, with their number: `sifted`, if they are few.
    source, count, best, temperature, center, least = among
    low, high, count_low, count_high = _narrow(
        among, last * 0 - 1, last, count * 0, count, target, TILE // 4, KIND, TILE
    )
    if (count > DEPTH * TILE) & (count_high <= TILE // 4):
        depth = _sift(among, sifted, high, KIND, TILE, DEPTH)
        if depth <= DEPTH:
            source, count = sifted, depth * TILE
    among = (source, count, best, temperature, center, least)
    _, high, _, _ = _narrow(among, low, high, count_low, count_high, target, 1, KIND, TILE)
    return high, source, count


@triton.jit
def _narrow(
    among: tl.tuple,
    low: tl.tensor,
    high: tl.tensor,
    count_low: tl.tensor,
    count_high: tl.tensor,
    target: tl.tensor,
    FEW: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    # Too little is within `low`, enough within `high`; if only one token lies between, `high` keeps the right ones.
    # Also ends when at most FEW are within `high`.
    while (high - low > 1) & (count_high - count_low > 1) & (count_high > FEW):
        step = (high - low) // 4
        first, second, third = low + tl.maximum(step, 1), low + tl.maximum(2 * step, 1), low + tl.maximum(3 * step, 1)
        if (low < 0) & (high == 0x7F800000):  # most floats are no token's distance: begin with 4, 8, 16
            first, second, third = first * 0 + 0x40800000, first * 0 + 0x41000000, first * 0 + 0x41800000
        tokens = tl.arange(0, TILE)
        count_1, count_2 = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
        count_3 = tl.zeros([TILE], tl.int32)
        mass_1, mass_2 = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
        mass_3 = tl.zeros([TILE], tl.float32)
        for start in tl.range(0, among[1], TILE):
            bits, mass, _ = _distances(among, tokens + start, KIND)
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
    among: tl.tuple,
    sifted: tl.tensor,
    last: tl.tensor,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    # Puts each lane's logits within the distance `last` aside, in the order of the tokens: `sifted` is [DEPTH, TILE],
    # padded with -inf. Returns the most that a lane has; those beyond DEPTH are left out.
    source, count = among[0], among[1]
    lanes = tl.arange(0, TILE)
    depths = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, among[1], TILE):
        bits, _, _ = _distances(among, lanes + start, KIND)
        found = tl.load(source + lanes + start, mask=lanes + start < count, other=float("-inf"))
        is_within = bits <= last
        tl.store(sifted + depths * TILE + lanes, found, mask=is_within & (depths < DEPTH))
        depths += is_within.to(tl.int32)
    for level in tl.static_range(DEPTH):
        tl.store(sifted + level * TILE + lanes, float("-inf"), mask=depths <= level)
    tl.debug_barrier()  # a lane may be read by another thread than wrote it
    return tl.max(depths, 0)


@triton.jit
def _mass_within(
    among: tl.tuple,
    last: tl.tensor,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    # The mass of the tokens within the distance `last`, if the best token's is 1; and the sum of their scaled logits,
    # weighted by mass.
    tokens = tl.arange(0, TILE)
    masses, weighted = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in tl.range(0, among[1], TILE):
        bits, mass, scaled = _distances(among, tokens + start, KIND)
        masses += tl.where(bits <= last, mass, 0.0)
        weighted += tl.where((bits <= last) & (mass > 0.0), mass * scaled, 0.0)  # skips 0 * -inf
    return tl.sum(masses, 0), tl.sum(weighted, 0)


@triton.jit
def _ends_within(
    among: tl.tuple,
    last: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    # The least and the greatest scaled logit within the distance `last` from the center, exactly: center - distance and
    # center + distance would be rounded, and chance would decide whether a token at either end is cut.
    tokens = tl.arange(0, TILE)
    lows, highs = tl.full([TILE], float("inf"), tl.float32), tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, among[1], TILE):
        bits, _, scaled = _distances(among, tokens + start, "typical")
        lows = tl.minimum(lows, tl.where(bits <= last, scaled, float("inf")))
        highs = tl.maximum(highs, tl.where(bits <= last, scaled, float("-inf")))
    return tl.min(lows, 0), tl.max(highs, 0)


@triton.jit
def _distances(
    among: tl.tuple,
    tokens: tl.tensor,
    KIND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    # Each token's distance, as the bits of a float from 0 up: for "count" and "head" how far its logit is below the
    # best, for "typical" how far its scaled logit is from the center, beyond infinity if it is cut. Its mass and its
    # scaled logit, which "count" does not use.
    source, count, best, temperature, center, least = among
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
def best_of_row(best_values: tl.tensor, row: tl.tensor, num_parts: tl.tensor, PADDED_PARTS: tl.constexpr) -> tl.tensor:
    parts = tl.arange(0, PADDED_PARTS)
    return tl.max(tl.load(best_values + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")), 0)


def find_bounds(logits: Tensor, best_values: Tensor, temperatures: Tensor, filters: tuple[Tensor, ...]) -> Tensor:
    """The least and the greatest scaled logit that the filters keep, [2, num_rows] float32.

    Args:
        logits: [num_rows, vocabulary_size] float32, of more than one token; rows may be strided.
        best_values: [num_rows, num_parts] float32; the greatest in a row is its best logit.
        temperatures: [num_rows] float32.
        filters: as in `reference.sample_tokens`.
    """
    num_rows, size = logits.shape
    num_parts = best_values.shape[1]
    top_k, top_p, min_p, typical_p = filters
    bounds = torch.empty((2, num_rows), dtype=torch.float32, device=logits.device)
    sifted = torch.empty((num_rows, _SIFTED, _SEARCHED), dtype=torch.float32, device=logits.device)
    _bounds_kernel[(num_rows,)](
        *(bounds, sifted, logits, best_values, temperatures, top_k, top_p, min_p.log(), typical_p),
        *(logits.stride(0), size, num_parts),
        PADDED_PARTS=triton.next_power_of_2(num_parts),
        TILE=_SEARCHED,
        DEPTH=_SIFTED,
        num_warps=16,
    )
    return bounds
