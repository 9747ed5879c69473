"""The choice among schedulers, as a pure function: beginnings of prompts meet, loads stay bounded, little moves."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.balance import choose, prefix_key

NAMES = [f"scheduler-{number}:50052".encode() for number in range(5)]
KEYS = st.binary(min_size=8, max_size=8)
SLACK = st.sampled_from([0.0, 0.1, 0.25, 1.0])


def loads_of(names=NAMES):
    return st.lists(st.integers(0, 50), min_size=len(names), max_size=len(names))


@given(KEYS, loads_of(), SLACK)
def test_no_load_exceeds_the_average_by_more_than_the_slack(key, loads, slack):
    place = choose(key, NAMES, loads, slack)
    assert loads[place] + 1 <= math.ceil((1 + slack) * (sum(loads) + 1) / len(loads))


@given(st.lists(KEYS, min_size=1, max_size=200), SLACK)
def test_requests_that_stay_are_spread_within_the_bound_whatever_they_prefer(keys, slack):
    loads = [0] * len(NAMES)
    for key in keys:
        loads[choose(key, NAMES, loads, slack)] += 1
    assert max(loads) <= math.ceil((1 + slack) * len(keys) / len(loads))


@given(KEYS, st.permutations(range(len(NAMES))))
def test_the_order_in_which_a_router_knows_its_schedulers_does_not_matter(key, order):
    names = [NAMES[place] for place in order]
    assert names[choose(key, names, [0] * 5, 0.25)] == NAMES[choose(key, NAMES, [0] * 5, 0.25)]


@given(KEYS, st.integers(0, 4))
def test_only_what_prefers_a_scheduler_moves_when_it_goes(key, gone):
    favourite = choose(key, NAMES, [0] * 5, 0.25)
    others = [name for place, name in enumerate(NAMES) if place != gone]
    now = others[choose(key, others, [0] * 4, 0.25)]
    assert now != NAMES[gone]
    assert favourite == gone or now == NAMES[favourite]


@given(KEYS, loads_of())
def test_who_is_too_busy_gives_way_to_the_next_in_the_same_order(key, loads):
    """What a favourite cannot take goes where it would go without the favourite."""
    first = choose(key, NAMES, [0] * 5, 0.25)
    busy = [0] * 5
    busy[first] = 100
    others = [name for name in NAMES if name != NAMES[first]]
    assert NAMES[choose(key, NAMES, busy, 0.25)] == others[choose(key, others, [0] * 4, 0.25)]


def test_many_beginnings_are_spread_evenly():
    counts = Counter(choose(number.to_bytes(8, "big"), NAMES, [0] * 5, 0.25) for number in range(5000))
    assert sorted(counts) == [0, 1, 2, 3, 4]
    assert all(900 < count < 1100 for count in counts.values())


def test_a_beginning_is_its_full_blocks_up_to_the_most_that_count():
    prompt = list(range(20))
    key = prefix_key(prompt, 4, 3, "")
    assert key == prefix_key([*prompt[:12], 99, 98], 4, 3, ""), "what follows the third block does not count"
    assert key != prefix_key([*prompt[:11], 99], 4, 3, "")
    assert prefix_key(prompt[:7], 4, 3, "") == prefix_key([*prompt[:4], 99], 4, 3, ""), "nor does a part of a block"
    assert prefix_key(prompt[:3], 4, 3, "") is None


def test_requests_of_different_salts_have_nothing_in_common():
    keys = {prefix_key([1, 2, 3, 4], 4, 4, salt) for salt in ("", "a", "b")}
    assert len(keys) == 3
