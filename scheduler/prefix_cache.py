"""The prefix cache: which blocks hold the KV of which tokens, and which of them are idle.

KV depends on all tokens before it, so a block's content is named by its own tokens and by the content of the block
before it: a trie of blocks (SGLang's RadixAttention, arXiv:2312.07104, with blocks as its unit, as in vLLM). Names are
exact, not hashes: a lookup compares tokens, and no collision can give one request another request's KV.

Only full blocks have content. It is looked up under a salt, so that tenants that must not learn of each other's prompts
by timing do not share it.
"""

from collections import OrderedDict
from dataclasses import dataclass

# What a block's content follows: the number of another content, or, at the start of a prompt, the salt.
Parent = int | str


@dataclass(frozen=True, slots=True)
class _Content:
    number: int
    key: tuple[Parent, bytes]


class PrefixCache:
    """The content of blocks, and the idle blocks in the order in which they became idle."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[Parent, bytes], int] = {}
        self._contents: dict[int, _Content] = {}
        # Blocks with content that are in no table, the next one to evict first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_contents = 0

    @property
    def num_idle(self) -> int:
        """Blocks in no table that still have content."""
        return len(self._idle)

    def find(self, parent: Parent, tokens: bytes) -> tuple[int, int] | None:
        """The block that holds `tokens` after `parent`, and its content's number; None if there is none."""
        block = self._blocks.get((parent, tokens))
        return None if block is None else (block, self._contents[block].number)

    def add(self, block: int, parent: Parent, tokens: bytes) -> int:
        """Notes that `block` holds `tokens` after `parent`.

        Returns:
            The content's number. If another block has the same content already, `block` stays without any.
        """
        known = self.find(parent, tokens)
        if known is not None:
            return known[1]
        if block in self._contents:
            # It was named before, after another block with its parent's tokens, which has lost its content since.
            content = self._contents[block]
            assert content.key[1] == tokens, "a block with content was written"
            return content.number
        self._num_contents += 1
        self._blocks[parent, tokens] = block
        self._contents[block] = _Content(self._num_contents, (parent, tokens))
        return self._num_contents

    def leave(self, block: int) -> bool:
        """Makes `block`, which the last table has let go of, idle; returns False if it has no content to keep."""
        if block not in self._contents:
            return False
        self._idle[block] = None
        return True

    def enter(self, block: int) -> None:
        """Takes note that a table holds `block`, which may have been idle."""
        self._idle.pop(block, None)

    def evict(self) -> int:
        """Returns the block that was idle longest; its content is forgotten."""
        block, _ = self._idle.popitem(last=False)
        self.forget(block)
        return block

    def forget(self, block: int) -> bool:
        """Forgets the content of a block, if it has any; returns True if the block was idle, and is free now."""
        content = self._contents.pop(block, None)
        if content is not None:
            del self._blocks[content.key]
        if block not in self._idle:
            return False
        del self._idle[block]
        return True

    def clear(self) -> list[int]:
        """Forgets everything; returns the blocks that were idle."""
        idle = list(self._idle)
        self._idle.clear()
        self._blocks.clear()
        self._contents.clear()
        return idle

    def check(self, free: set[int], held: set[int]) -> None:
        """Asserts that content and blocks agree."""
        assert self._blocks.keys() == {content.key for content in self._contents.values()}
        assert all(self._contents[block].key == key for key, block in self._blocks.items())
        assert self._idle.keys() == self._contents.keys() - held, "idle blocks are those with content in no table"
        assert not free & self._contents.keys(), "a free block has content"
