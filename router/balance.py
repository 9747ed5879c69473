"""Which of several schedulers gets a request: the one that knows its prompt's beginning, unless it is too busy.

Rendezvous hashing (Thaler & Ravishankar 1998, "Using name-based mappings to increase hit rates") orders the schedulers
for each beginning of a prompt, alike in every router; when one comes or goes, only prompts that prefer it move. Bounded
loads (Mirrokni, Thorup & Zadimoghaddam 2018, "Consistent hashing with bounded loads", arXiv:1608.01350): the request
goes to the first in that order whose load stays within 1 + slack times the average. Pure: no clock, no I/O.
"""

import math
from array import array
from collections.abc import Sequence
from hashlib import blake2b


def prefix_key(token_ids: Sequence[int], block_size: int, max_blocks: int, salt: str) -> bytes | None:
    """A key that requests have in common if their KV can be shared; None if there is no full block to share.

    Args:
        token_ids: the prompt.
        block_size: tokens in a block.
        max_blocks: the most full blocks, from the beginning, that count.
        salt: requests with different salts share nothing.
    """
    num_tokens = min(len(token_ids) // block_size, max_blocks) * block_size
    if num_tokens == 0:
        return None
    return _hash(salt.encode() + b"\0" + array("i", token_ids[:num_tokens]).tobytes())


def choose(key: bytes, names: Sequence[bytes], loads: Sequence[int], slack: float) -> int:
    """The index of the scheduler for a request.

    Args:
        key: equal for requests that should go to the same scheduler.
        names: of the schedulers, the same in all routers.
        loads: requests that each of them has; not empty.
        slack: how far above the average a load may be with this request, as a share of the average.
    """
    capacity = math.ceil((1 + slack) * (sum(loads) + 1) / len(loads))
    # The least load is below the average with one more request, so one always qualifies.
    return max(
        (place for place, load in enumerate(loads) if load < capacity), key=lambda place: _hash(key + names[place])
    )


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()
