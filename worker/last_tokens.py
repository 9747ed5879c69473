"""The token that each live sequence sampled last, kept on the device, where the next step needs it.

The host knows whose place is whose and never what stands in it, so a step can be given to the device before the one
before it has been computed.
"""

import torch
from torch import Tensor

_FEWEST_PLACES = 256


class LastTokens:
    """Token ids by place. Who gives a place back may be followed by another at once: steps use places in order."""

    def __init__(self, device: torch.device) -> None:
        self._token_ids = torch.zeros(_FEWEST_PLACES, dtype=torch.int64, device=device)
        self._free = list(range(_FEWEST_PLACES - 1, -1, -1))

    @property
    def num_taken(self) -> int:
        """Places that somebody has."""
        return len(self._token_ids) - len(self._free)

    def take(self) -> int:
        """A place of one's own; what stands there is anything, until a step has written to it."""
        if not self._free:
            num_places = len(self._token_ids)
            self._token_ids = torch.cat([self._token_ids, torch.zeros_like(self._token_ids)])
            self._free.extend(range(2 * num_places - 1, num_places - 1, -1))
        return self._free.pop()

    def give_back(self, place: int) -> None:
        """The opposite of `take`."""
        self._free.append(place)

    def read(self, places: Tensor) -> Tensor:
        """The tokens at these places, both [n] int64."""
        return self._token_ids.index_select(0, places)

    def write(self, places: Tensor, token_ids: Tensor) -> None:
        """Puts tokens there, both [n] int64."""
        self._token_ids.index_copy_(0, places, token_ids)
