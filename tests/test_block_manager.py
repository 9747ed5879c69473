"""The block manager, with pools small enough to count by hand."""

import pytest

from scheduler.block_manager import BlockManager
from scheduler.sequence import Sequence


def sequence_of(num_tokens: int) -> Sequence:
    return Sequence(0, num_tokens)


@pytest.mark.parametrize("sizes", [(0, 4, 0), (4, 0, 0), (4, 4, -1)])
def test_a_pool_without_blocks_is_refused(sizes):
    with pytest.raises(ValueError, match="needs blocks"):
        BlockManager(*sizes)


def test_a_pool_may_have_a_single_block_of_a_single_token():
    assert BlockManager(1, 1).num_free == 1


def test_five_tokens_take_two_blocks_of_four():
    blocks = BlockManager(num_blocks=4, block_size=4)
    sequence = sequence_of(5)
    blocks.allocate(sequence, 5)
    assert len(sequence.block_table) == 2
    assert blocks.num_free == 2
    blocks.check([sequence])


def test_appending_within_the_last_block_takes_none_and_over_its_edge_takes_one():
    blocks = BlockManager(num_blocks=4, block_size=4)
    sequence = sequence_of(3)
    blocks.allocate(sequence, 3)
    sequence.num_computed_tokens = 3
    assert blocks.num_blocks_to_append([(sequence, 4)]) == 0
    assert blocks.append_slots(sequence, 4) == []
    sequence.num_computed_tokens = 4
    assert blocks.num_blocks_to_append([(sequence, 5)]) == 1
    blocks.append_slots(sequence, 5)
    assert len(sequence.block_table) == 2
    blocks.check([sequence])


def test_a_fork_shares_all_blocks_and_the_first_writer_copies_the_last_one():
    blocks = BlockManager(num_blocks=4, block_size=4)
    parent, child = sequence_of(6), sequence_of(6)
    blocks.allocate(parent, 6)
    parent.num_computed_tokens = child.num_computed_tokens = 6
    blocks.fork(parent, child)
    assert blocks.num_free == 2
    assert blocks.num_shared == 2

    shared = parent.block_table[1]
    assert blocks.num_blocks_to_append([(parent, 7)]) == 1
    assert blocks.append_slots(parent, 7) == [(shared, parent.block_table[1])]
    assert parent.block_table[0] == child.block_table[0]
    assert child.block_table[1] == shared != parent.block_table[1]

    assert blocks.num_blocks_to_append([(child, 7)]) == 0, "the last holder writes in place"
    assert blocks.append_slots(child, 7) == []
    blocks.check([parent, child])


def test_a_fork_at_a_block_edge_copies_nothing():
    blocks = BlockManager(num_blocks=4, block_size=4)
    parent, child = sequence_of(4), sequence_of(4)
    blocks.allocate(parent, 4)
    parent.num_computed_tokens = child.num_computed_tokens = 4
    blocks.fork(parent, child)
    assert blocks.append_slots(parent, 5) == []
    assert blocks.append_slots(child, 5) == []
    assert parent.block_table[1] != child.block_table[1]
    blocks.check([parent, child])


def test_a_block_is_free_when_its_last_holder_lets_go():
    blocks = BlockManager(num_blocks=2, block_size=4)
    parent, child = sequence_of(4), sequence_of(4)
    blocks.allocate(parent, 4)
    blocks.fork(parent, child)
    blocks.free(parent)
    assert blocks.num_free == 1
    blocks.free(child)
    blocks.free(child)
    assert blocks.num_free == 2
    blocks.check([])


def test_check_notices_a_leaked_block():
    blocks = BlockManager(num_blocks=2, block_size=4)
    sequence = sequence_of(4)
    blocks.allocate(sequence, 4)
    with pytest.raises(AssertionError, match="leaked"):
        blocks.check([])
