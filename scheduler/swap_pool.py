"""The swap pool: blocks in CPU memory that hold the KV of preempted groups until there is room again.

Its size is what the worker set aside for it. Blocks are integers here, as in the block manager, the only caller.
"""

from array import array
from collections import Counter


class SwapPool:
    """`num_blocks` blocks, shared within a group as the blocks were that they are copies of."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._ref_counts: Counter[int] = Counter()
        # Copies that `take_copies` has not returned yet: swap block -> block. Keyed by swap block, so that one that was
        # given back and taken again is written once, for its last owner.
        self._copies: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    def take(self, block: int) -> int:
        """Takes a free swap block, into which `block` is to be copied."""
        swap_block = self._free.pop()
        self._copies[swap_block] = block
        return swap_block

    def hold(self, swap_block: int) -> int:
        """Counts one more table that names `swap_block`, and returns it."""
        self._ref_counts[swap_block] += 1
        return swap_block

    def release(self, swap_table: "array[int]", *, copied: bool = False) -> None:
        """Empties a table; blocks that no other table names become free.

        Args:
            swap_table: the table, emptied in place.
            copied: whether the next step copies the blocks back, so that pending copies into them must still be made.
        """
        for swap_block in swap_table:
            self._ref_counts[swap_block] -= 1
            if not self._ref_counts[swap_block]:
                del self._ref_counts[swap_block]
                self._free.append(swap_block)
                if not copied:
                    self._copies.pop(swap_block, None)
        del swap_table[:]

    def take_copies(self) -> list[tuple[int, int]]:
        """Pairs (block, swap block) to be copied, each returned once."""
        copies, self._copies = self._copies, {}
        return [(block, swap_block) for swap_block, block in copies.items()]

    def check(self, held: Counter[int]) -> None:
        """Asserts that the blocks of all tables, counted in `held`, and the free ones are all there are."""
        assert self._ref_counts == held, "swap tables and ref counts differ"
        free = set(self._free)
        assert len(free) == len(self._free), "a swap block is free twice"
        assert not free & held.keys(), "a swap block is free and in a table"
        assert len(free) + len(held) == self.num_blocks, "a swap block leaked"
