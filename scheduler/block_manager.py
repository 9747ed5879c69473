"""The block manager: which physical block holds which tokens of which sequence. A BLOCK IS ALLOCATED HERE.

PagedAttention's block tables, reference counts and copy-on-write (Kwon et al., SOSP'23, sections 4.2 to 4.4). Blocks
are integers; nothing here knows what KV is or where it lies. Whether there is room is asked first
(`num_blocks_to_append`, `num_free`); then the change can not fail.

    allocate(sequence, n)        table covers n tokens: the prompt, at admission
    append_slots(sequence, n)    table covers n tokens, and none of the new ones falls into a shared block
    fork(parent, child)          child shares the parent's blocks
    free(sequence)               gives back what nobody else holds
"""

from collections import Counter
from collections.abc import Iterable

from scheduler.sequence import Sequence


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks, not {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is the warmest, and memory that was never needed stays untouched.
        self._free = list(reversed(range(num_blocks)))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def num_blocks_to_append(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that `append_slots` takes: new ones, and one to copy a shared block to that is written."""
        table = sequence.block_table
        num_blocks = max(0, self.num_blocks_for(num_tokens) - len(table))
        return num_blocks + self._writes_shared_block(sequence)

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives a sequence without blocks what `num_tokens` tokens need."""
        assert not sequence.block_table, "allocated twice"
        sequence.block_table.extend(self._take() for _ in range(self.num_blocks_for(num_tokens)))

    def append_slots(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Extends the table to `num_tokens` tokens, those from `num_computed_tokens` on about to be written.

        Returns:
            Pairs (from, to) of blocks that must be copied before the write; at most one.
        """
        table = sequence.block_table
        copies = []
        if self._writes_shared_block(sequence):
            index = sequence.num_computed_tokens // self.block_size
            shared, table[index] = table[index], self._take()
            self._ref_counts[shared] -= 1
            copies.append((shared, table[index]))
        while len(table) * self.block_size < num_tokens:
            table.append(self._take())
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child`, which has no blocks, all those of `parent`."""
        assert not child.block_table, "forked into a sequence with blocks"
        for block in parent.block_table:
            self._ref_counts[block] += 1
        child.block_table.extend(parent.block_table)

    def free(self, sequence: Sequence) -> None:
        """Takes all blocks from `sequence`; a second time changes nothing."""
        for block in sequence.block_table:
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)
        del sequence.block_table[:]

    def num_shared(self) -> int:
        """Blocks in more than one table."""
        return sum(count > 1 for count in self._ref_counts)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Asserts the pool's invariants; `sequences` are all that may hold blocks."""
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held.keys(), "a block is free and in a table"
        assert len(free) + len(held) == self.num_blocks, "free + held is not total: a block leaked"
        for block, count in enumerate(self._ref_counts):
            assert count == held[block], f"block {block} has ref count {count} and is in {held[block]} tables"

    def _writes_shared_block(self, sequence: Sequence) -> bool:
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return offset > 0 and self._ref_counts[sequence.block_table[index]] > 1

    def _take(self) -> int:
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block
