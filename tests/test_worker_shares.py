"""Which part of a model each rank holds: every entry somebody's, and heads with the K/V heads that they look at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.checkpoint import ModelError
from worker.ranks import Host, Place
from worker.shares import Share, deal, deal_heads, whole


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 600))
def test_shares_follow_each_other_and_are_all_of_it(size, unit, total):
    if total < size:
        with pytest.raises(ModelError, match="--tensor-parallel-size"):
            deal(total, 0, size)
        return
    shares = [deal(total, rank, size, unit) for rank in range(size)]
    entries = [entry for share in shares for start, end in share.ranges for entry in range(start, end)]
    assert entries == list(range(total))
    assert all(share.size > 0 for share in shares)
    assert max(share.size for share in shares) - min(share.size for share in shares) <= unit
    if total >= size * unit:
        assert all(share.start % unit == 0 for share in shares), "a unit was cut up"


def test_smollm2s_nine_heads_on_three_go_to_two_ranks_as_two_groups_and_one():
    first, second = (deal_heads(9, 3, rank, 2) for rank in range(2))
    assert (first.queries.ranges, first.kv.ranges) == (((0, 3),), ((0, 1),))
    assert (second.queries.ranges, second.kv.ranges) == (((3, 9),), ((1, 3),))


def test_ranks_that_are_more_than_kv_heads_hold_them_together():
    heads = [deal_heads(8, 2, rank, 4) for rank in range(4)]
    assert [h.queries.ranges for h in heads] == [((0, 2),), ((2, 4),), ((4, 6),), ((6, 8),)]
    assert [h.kv.ranges for h in heads] == [((0, 1),), ((0, 1),), ((1, 2),), ((1, 2),)]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 24))
def test_every_query_head_is_one_ranks_and_that_one_has_its_kv_head(num_kv_heads, group, size):
    num_heads = num_kv_heads * group
    if size > num_kv_heads and (size % num_kv_heads or num_heads % size):
        with pytest.raises(ModelError, match=f"{num_heads} query heads on {num_kv_heads}"):
            deal_heads(num_heads, num_kv_heads, 0, size)
        return
    heads = [deal_heads(num_heads, num_kv_heads, rank, size) for rank in range(size)]
    queries = [q for h in heads for start, end in h.queries.ranges for q in range(start, end)]
    assert queries == list(range(num_heads))
    for h in heads:
        own, kv = h.queries.size, h.kv.size
        assert own % kv == 0  # what attention takes for a group
        for index, q in enumerate(range(h.queries.start, h.queries.start + own)):
            assert q // group == h.kv.start + index // (own // kv)


def test_heads_that_can_not_be_dealt_out_are_refused_with_the_sizes_that_can():
    with pytest.raises(ModelError, match=r"possible are 1, 2, 3, 9$"):
        deal_heads(9, 3, 0, 4)


def test_a_share_of_stacked_values_is_one_of_each():
    share = deal(4, 1, 2).times(8)
    assert (share.total, share.ranges) == (32, ((16, 32),))
    assert share.repeated(3) == Share(96, ((16, 32), (48, 64), (80, 96)))
    assert whole(5).repeated(3) == whole(15)
    assert not share.is_whole


def test_rank_0_is_of_the_last_stage_and_layers_are_dealt_in_order():
    places = [Place(rank, tensor_size=2, num_stages=3) for rank in range(6)]
    assert [(p.stage, p.tensor_rank) for p in places] == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    assert [p.layers(7) for p in places[::-2]] == [range(2), range(2, 4), range(4, 7)]
    assert places[0].is_last
    assert places[5].is_first
    with pytest.raises(ModelError, match="--pipeline-parallel-size is 3, but the model has 2 layers"):
        places[0].layers(2)


def test_ranks_of_a_host_share_its_cores_out_and_more_of_them_than_cores_share_one():
    assert [Host(index, 2).cores({3, 5, 7}) for index in range(2)] == [[3, 7], [5]]
    assert [Host(index, 3).cores({4, 6}) for index in range(3)] == [[4], [6], [4]]
