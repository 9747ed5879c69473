"""Which of several schedulers gets a request: the one that knows its prompt's beginning, unless it has too much to do.

Rendezvous hashing (Thaler & Ravishankar 1998, "Using name-based mappings to increase hit rates") orders the schedulers
for each beginning of a prompt, the same in every router; when one comes or goes, only what prefers it moves. Bounded
loads (Mirrokni, Thorup & Zadimoghaddam 2018, "Consistent hashing with bounded loads", arXiv:1608.01350): the request
goes to the first in that order whose load stays within 1 + slack times the average. Pure: no clock, no I/O.
"""

import math
from array import array
from collections.abc import Sequence
from hashlib import blake2b


def prefix_key(token_ids: Sequence[int], block_size: int, max_blocks: int, salt: str) -> bytes | None:
    """What requests have in common whose KV can be shared; None where there is no full block to share.

    Args:
        token_ids: the prompt.
        block_size: tokens of a block.
        max_blocks: full blocks from the beginning that count at most.
        salt: requests of different ones share nothing.
    """
    num_tokens = min(len(token_ids) // block_size, max_blocks) * block_size
    if num_tokens == 0:
        return None
    return _hash(salt.encode() + b"\0" + array("i", token_ids[:num_tokens]).tobytes())


def choose(key: bytes, names: Sequence[bytes], loads: Sequence[int], slack: float) -> int:
    """The place of the scheduler for a request.

    Args:
        key: equal for requests that should meet.
        names: of the schedulers, alike in all routers.
        loads: requests that each of them has; not empty.
        slack: how much over the average a load may be with this request, as a share of it.
    """
    capacity = math.ceil((1 + slack) * (sum(loads) + 1) / len(loads))
    # The least load is below the average with one request more, so there is always one.
    return max(
        (place for place, load in enumerate(loads) if load < capacity), key=lambda place: _hash(key + names[place])
    )


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()
