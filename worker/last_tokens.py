"""The token that each live sequence sampled last, kept on the device, where the next step needs it.

The host knows which place is which sequence's, but never what is in it, so a step can be launched before the previous
one has been computed.
"""

import torch
from torch import Tensor

_FEWEST_PLACES = 256


class LastTokens:
    """Token ids by place. A place that is given back may be taken again at once: the device runs the steps in order."""

    def __init__(self, device: torch.device) -> None:
        self._token_ids = torch.zeros(_FEWEST_PLACES, dtype=torch.int64, device=device)
        self._free = list(range(_FEWEST_PLACES - 1, -1, -1))

    @property
    def num_taken(self) -> int:
        """Places that are taken."""
        return len(self._token_ids) - len(self._free)

    def take(self) -> int:
        """Takes a free place; its content is arbitrary until a step has written to it."""
        if not self._free:
            num_places = len(self._token_ids)
            self._token_ids = torch.cat([self._token_ids, torch.zeros_like(self._token_ids)])
            self._free.extend(range(2 * num_places - 1, num_places - 1, -1))
        return self._free.pop()

    def give_back(self, place: int) -> None:
        """Frees a place that `take` returned."""
        self._free.append(place)

    def read(self, places: Tensor) -> Tensor:
        """The tokens at these places, both [n] int64."""
        return self._token_ids.index_select(0, places)

    def write(self, places: Tensor, token_ids: Tensor) -> None:
        """Writes tokens to these places, both [n] int64."""
        self._token_ids.index_copy_(0, places, token_ids)
