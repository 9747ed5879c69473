"""The block manager: which physical block holds which tokens of which sequence. A BLOCK IS ALLOCATED HERE.

PagedAttention's block tables, reference counts and copy-on-write (Kwon et al., SOSP'23, sections 4.2 to 4.4). Blocks
are integers; nothing here knows what KV is or where it lies. Whether there is room is asked first
(`num_blocks_to_append`, `num_free`); then the change can not fail.

    allocate(sequence, n)        table covers n tokens: the prompt, at admission, behind what `match` found of it
    append_slots(sequence, n)    table covers n tokens, and none of the new ones falls into a shared block
    fork(parent, child)          child shares the parent's blocks
    free(sequence)               gives back what nobody else holds

Every block is free, held by a table, or idle: held by none, but kept for the tokens in it (`prefix_cache.py`).
"""

from array import array
from collections import Counter
from collections.abc import Iterable

from scheduler.prefix_cache import Parent, PrefixCache
from scheduler.sequence import Sequence, SequenceGroup


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
        self._cache = PrefixCache()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, the idle ones among them."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_idle(self) -> int:
        """Blocks in no table, kept for the tokens in them until their room is needed."""
        return self._cache.num_idle

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def num_blocks_to_append(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that `append_slots` takes: new ones, and one to copy a shared block to that is written."""
        table = sequence.block_table
        num_blocks = max(0, self.num_blocks_for(num_tokens) - len(table))
        return num_blocks + self._writes_shared_block(sequence)

    def match(self, token_ids: "array[int]", salt: str) -> list[tuple[int, int]]:
        """The longest run of blocks that hold these tokens from the first one on: (block, content number) of each.

        The last token is left out: to sample behind it, it has to be computed.
        """
        found: list[tuple[int, int]] = []
        parent: Parent = salt
        for end in range(self.block_size, len(token_ids), self.block_size):
            hit = self._cache.find(parent, token_ids[end - self.block_size : end].tobytes())
            if hit is None:
                break
            found.append(hit)
            parent = hit[1]
        return found

    def num_held_of(self, prefix: list[tuple[int, int]]) -> int:
        """How many of these blocks are in a table, so that sharing them takes nothing from `num_free`."""
        return sum(self._ref_counts[block] > 0 for block, _ in prefix)

    def allocate(self, sequence: Sequence, num_tokens: int, prefix: list[tuple[int, int]] | None = None) -> None:
        """Gives a sequence without blocks what `num_tokens` tokens need; `prefix` holds the first of them already."""
        assert not sequence.block_table, "allocated twice"
        for block, content in prefix or ():
            self._cache.enter(block)
            self._ref_counts[block] += 1
            sequence.block_table.append(block)
            sequence.contents.append(content)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size
        self._extend(sequence, num_tokens)

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
        self._extend(sequence, num_tokens)
        return copies

    def remember(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> None:
        """Makes the full blocks among the first `num_tokens` tokens, which a planned step has computed, findable."""
        contents = sequence.contents
        while (len(contents) + 1) * self.block_size <= num_tokens:
            start = len(contents) * self.block_size
            tokens = group.token_ids(sequence, start, start + self.block_size).tobytes()
            parent: Parent = contents[-1] if contents else group.salt
            contents.append(self._cache.add(sequence.block_table[len(contents)], parent, tokens))

    def disown(self, sequence: Sequence) -> None:
        """Forgets what this sequence's blocks hold: it is not to be trusted."""
        for block in sequence.block_table:
            self._cache.forget(block)

    def disown_all(self) -> None:
        """Forgets what all blocks hold: their memory is gone."""
        self._free.extend(self._cache.clear())

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child`, which has no blocks, all those of `parent`."""
        assert not child.block_table, "forked into a sequence with blocks"
        for block in parent.block_table:
            self._ref_counts[block] += 1
        child.block_table.extend(parent.block_table)
        child.contents.extend(parent.contents)

    def free(self, sequence: Sequence) -> None:
        """Takes all blocks from `sequence`; a second time changes nothing."""
        for block in reversed(sequence.block_table):  # the deepest is left first, so it is evicted first
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0 and not self._cache.leave(block):
                self._free.append(block)
        del sequence.block_table[:], sequence.contents[:]
        sequence.num_computed_tokens = 0

    def num_shared(self) -> int:
        """Blocks in more than one table."""
        return sum(count > 1 for count in self._ref_counts)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Asserts the pool's invariants; `sequences` are all that may hold blocks."""
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held.keys(), "a block is free and in a table"
        idle = self._cache.num_idle
        assert len(free) + len(held) + idle == self.num_blocks, "free + held + idle is not total: a block leaked"
        self._cache.check(free, set(held))
        for block, count in enumerate(self._ref_counts):
            assert count == held[block], f"block {block} has ref count {count} and is in {held[block]} tables"

    def _writes_shared_block(self, sequence: Sequence) -> bool:
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return offset > 0 and self._ref_counts[sequence.block_table[index]] > 1

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        table = sequence.block_table
        while len(table) * self.block_size < num_tokens:
            table.append(self._take())

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._cache.evict()
        self._ref_counts[block] = 1
        return block
