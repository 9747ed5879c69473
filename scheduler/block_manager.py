"""The block manager: which physical block holds which tokens of which sequence. A BLOCK IS ALLOCATED HERE.

PagedAttention's block tables, reference counts and copy-on-write (Kwon et al., SOSP'23, sections 4.2 to 4.4). Blocks
are integers; nothing here knows what KV is or where it lies. The caller asks first whether there is room
(`num_blocks_to_append`, `num_free`); then the change cannot fail.

    allocate(sequence, n)        table covers n tokens: at admission, starting with the blocks that `match` found
    append_slots(sequence, n)    table covers n tokens, and none of the new ones falls into a shared block
    fork(parent, child)          child shares the parent's blocks
    free(sequence)               gives back the blocks that no other table holds
    swap_out(group), swap_in(group)     moves a group's blocks to the swap pool in CPU memory, and back

Every block is free, held by a table, or idle: in no table, but kept for its contents (`prefix_cache.py`).
"""

from array import array
from collections import Counter
from collections.abc import Iterable

from scheduler.prefix_cache import Parent, PrefixCache
from scheduler.sequence import Sequence, SequenceGroup
from scheduler.swap_pool import SwapPool

# Sequences, each with the number of tokens that its table has to cover.
Growth = Iterable[tuple[Sequence, int]]


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens each, and a swap pool of `num_swap_blocks`.

    Attributes:
        num_held: blocks in at least one table.
        num_shared: blocks in more than one.
        num_references: entries of all tables: what `num_held` would be without sharing.
    """

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0) -> None:
        if num_blocks < 1 or block_size < 1 or num_swap_blocks < 0:
            raise ValueError(f"a pool needs blocks, not {num_blocks} of {block_size} tokens, {num_swap_blocks} to swap")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_held = 0
        self.num_shared = 0
        self.num_references = 0
        # A stack: the block freed last is the warmest in cache, and memory that was never needed stays untouched.
        self._free = list(reversed(range(num_blocks)))
        self._ref_counts = [0] * num_blocks
        self._cache = PrefixCache()
        self._swap = SwapPool(num_swap_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, idle ones included."""
        return self.num_blocks - self.num_held

    @property
    def num_idle(self) -> int:
        """Blocks in no table, kept for their contents until the room is needed."""
        return self._cache.num_idle

    @property
    def num_swap_blocks(self) -> int:
        """Size of the swap pool."""
        return self._swap.num_blocks

    @property
    def num_free_swap_blocks(self) -> int:
        """Blocks of the swap pool that hold nothing."""
        return self._swap.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def has_slots(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `append_slots` would have nothing to do, as in most steps."""
        if num_tokens > len(sequence.block_table) * self.block_size:
            return False
        return self._ref_counts[sequence.block_table[sequence.num_computed_tokens // self.block_size]] == 1

    def num_blocks_to_append(self, growth: Growth) -> int:
        """Free blocks that `append_slots` takes for all of these: new blocks, and copies of shared ones to be written.

        The last holder of a block writes it in place: if all its holders are among these, one copy fewer is needed.
        """
        num_blocks = 0
        writers: dict[int, int] = {}
        for sequence, num_tokens in growth:
            num_blocks += max(0, self.num_blocks_for(num_tokens) - len(sequence.block_table))
            shared = self._shared_block_to_write(sequence)
            if shared is not None:
                writers[shared] = writers.get(shared, 0) + 1
        for block, num_writers in writers.items():
            num_blocks += min(num_writers, self._ref_counts[block] - 1)
        return num_blocks

    def match(self, token_ids: "array[int]", salt: str) -> list[tuple[int, int]]:
        """The longest run of blocks that hold these tokens, from the first one on: (block, content number) of each.

        The last token is left out: it has to be computed, to sample from its logits.
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

    def extends(self, prefix: list[tuple[int, int]], token_ids: "array[int]", salt: str) -> bool:
        """Whether `match`, which found `prefix` earlier, would find more now."""
        start, end = len(prefix) * self.block_size, (len(prefix) + 1) * self.block_size
        parent: Parent = prefix[-1][1] if prefix else salt
        return end < len(token_ids) and self._cache.find(parent, token_ids[start:end].tobytes()) is not None

    def num_held_of(self, prefix: list[tuple[int, int]]) -> int:
        """How many of these blocks are in a table already, so that sharing them takes nothing from `num_free`."""
        return sum(self._ref_counts[block] > 0 for block, _ in prefix)

    def allocate(self, sequence: Sequence, num_tokens: int, prefix: list[tuple[int, int]] | None = None) -> None:
        """Gives a sequence that has none the blocks for `num_tokens` tokens; `prefix` holds the first already."""
        assert not sequence.block_table, "allocated twice"
        for block, content in prefix or ():
            self._cache.enter(block)
            self._hold(block)
            sequence.block_table.append(block)
            sequence.contents.append(content)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size
        self._extend(sequence, num_tokens)

    def append_slots(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Extends the table to `num_tokens` tokens, of which those from `num_computed_tokens` on will be written.

        Returns:
            Pairs (from, to) of blocks that must be copied before the write; at most one.
        """
        copies = []
        shared = self._shared_block_to_write(sequence)
        if shared is not None:
            copy = self._take()
            sequence.block_table[sequence.num_computed_tokens // self.block_size] = copy
            self._let_go(shared)
            copies.append((shared, copy))
        self._extend(sequence, num_tokens)
        return copies

    def remember(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> None:
        """Lets `match` find the full blocks of the first `num_tokens` tokens, which a planned step has computed."""
        contents = sequence.contents
        while (len(contents) + 1) * self.block_size <= num_tokens:
            start = len(contents) * self.block_size
            tokens = group.token_ids(sequence, start, start + self.block_size).tobytes()
            parent: Parent = contents[-1] if contents else group.salt
            contents.append(self._cache.add(sequence.block_table[len(contents)], parent, tokens))

    def disown(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Forgets what this sequence's blocks hold, or held until it was preempted: it cannot be trusted."""
        for block in sequence.block_table:
            self._cache.forget(block)
        if not sequence.block_table:
            # `match` leaves out the last token: with one more behind it, it is looked up too.
            tokens = group.token_ids(sequence, 0, sequence.num_tokens) + array("i", [0])
            for block, _ in self.match(tokens, group.salt):
                if self._cache.forget(block):
                    self._free.append(block)

    def disown_all(self) -> None:
        """Forgets what all blocks hold: their memory is gone."""
        self._free.extend(self._cache.clear())

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child` all of `parent`'s blocks, in whichever pool; it lets go of other blocks that it has."""
        num_same = _num_same(parent.block_table, child.block_table)
        for block in parent.block_table[num_same:]:
            self._hold(block)
        for block in reversed(child.block_table[num_same:]):
            self._let_go(block)
        child.block_table[num_same:] = parent.block_table[num_same:]
        child.contents = parent.contents[:]
        child.num_computed_tokens = parent.num_computed_tokens
        for swap_block in parent.swap_table:
            self._swap.hold(swap_block)
        self._swap.release(child.swap_table)
        child.swap_table.extend(parent.swap_table)

    def free(self, sequence: Sequence) -> None:
        """Takes all blocks of both pools from `sequence`; a second call changes nothing."""
        self._release(sequence)
        self._swap.release(sequence.swap_table)
        sequence.num_computed_tokens = 0

    def num_blocks_to_swap(self, group: SequenceGroup) -> int:
        """Blocks that hold a group's computed tokens, in whichever pool; a shared one counts once."""
        return len({block for sequence in group.live for block in self._computed(sequence) or sequence.swap_table})

    def swap_out(self, group: SequenceGroup) -> None:
        """Moves the blocks of a group's computed tokens to the swap pool; shared ones stay shared."""
        copies: dict[int, int] = {}
        for sequence in group.live:
            for block in self._computed(sequence):
                if block not in copies:
                    copies[block] = self._swap.take(block)
                sequence.swap_table.append(self._swap.hold(copies[block]))
        for sequence in group.live:
            self._release(sequence)

    def take_swapped_out(self) -> list[tuple[int, int]]:
        """Pairs (block, swap block) of all copies that `swap_out` has asked for since the last call."""
        return self._swap.take_copies()

    def swap_in(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Moves a group's blocks back.

        Returns:
            Pairs (swap block, block) that must be copied before anything else in the step.
        """
        copies: dict[int, int] = {}
        for sequence in group.live:
            for swap_block in sequence.swap_table:
                if swap_block in copies:
                    self._hold(copies[swap_block])
                else:
                    copies[swap_block] = self._take()
                sequence.block_table.append(copies[swap_block])
        for sequence in group.live:
            self._swap.release(sequence.swap_table, copied=True)
        return list(copies.items())

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Asserts the pools' invariants; `sequences` are all those that may hold blocks."""
        sequences = list(sequences)
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & held.keys(), "a block is free and in a table"
        idle = self._cache.num_idle
        assert len(free) + len(held) + idle == self.num_blocks, "free + held + idle is not total: a block leaked"
        self._cache.check(free, set(held))
        for block, count in enumerate(self._ref_counts):
            assert count == held[block], f"block {block} has ref count {count} and is in {held[block]} tables"
        contents = {
            (block, number) for s in sequences for block, number in zip(s.block_table, s.contents, strict=False)
        }
        assert len(contents) == len({block for block, _ in contents}), "two tables differ on what a block holds"
        assert self.num_held == len(held)
        assert self.num_shared == sum(count > 1 for count in held.values())
        assert self.num_references == held.total()
        self._swap.check(Counter(block for sequence in sequences for block in sequence.swap_table))

    def _computed(self, sequence: Sequence) -> "array[int]":
        """The blocks with KV in them, without those behind that were allocated ahead."""
        return sequence.block_table[: self.num_blocks_for(sequence.num_computed_tokens)]

    def _shared_block_to_write(self, sequence: Sequence) -> int | None:
        """The block that the sequence writes next, if others hold it too. A full block is never written."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        if offset == 0:
            return None
        block = sequence.block_table[index]
        return block if self._ref_counts[block] > 1 else None

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        table = sequence.block_table
        while len(table) * self.block_size < num_tokens:
            table.append(self._take())

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._cache.evict()
        self._hold(block)
        return block

    def _hold(self, block: int) -> None:
        count = self._ref_counts[block]
        self._ref_counts[block] = count + 1
        self.num_references += 1
        self.num_held += count == 0
        self.num_shared += count == 1

    def _let_go(self, block: int) -> None:
        count = self._ref_counts[block]
        self._ref_counts[block] = count - 1
        self.num_references -= 1
        self.num_shared -= count == 2
        if count == 1:
            self.num_held -= 1
            if not self._cache.leave(block):
                self._free.append(block)

    def _release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.block_table):  # the deepest is let go first, so it is evicted first
            self._let_go(block)
        del sequence.block_table[:], sequence.contents[:]


def _num_same(one: "array[int]", other: "array[int]") -> int:
    """Length of the prefix that two tables share, by binary search: comparing slices costs next to nothing."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
