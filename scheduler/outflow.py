"""How fast the waiting queue empties, and when it makes sense to knock again where it is full.

Looked at when requests come, and only for the time in which others wait: an idle hour says nothing of the rate. If
something waits when a request comes, something has waited ever since the one before came.
"""

import math

# Measurements lose their weight in this time.
_MEMORY_S = 10.0
# What is told at least and at most.
_LEAST_S, _MOST_S = 0.1, 60.0
# What is taken to leave in a second before anything was measured.
_REQUESTS, _TOKENS = 1.0, 1000.0


class Outflow:
    """Requests and prompt tokens that leave the queue in a second, as averages over the last seconds."""

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None
        self._seconds, self._requests, self._tokens = 1.0, _REQUESTS, _TOKENS
        # When there is room for the last one that was refused.
        self._room = 0.0

    def note(self, now: float, num_waiting: int, num_left: int, num_tokens_left: int) -> None:
        """A request comes, `num_waiting` wait, and so many requests and tokens have left in all."""
        if self._last is not None and num_waiting:
            then, requests, tokens = self._last
            fade = math.exp((then - now) / _MEMORY_S)
            self._seconds = self._seconds * fade + now - then
            self._requests = self._requests * fade + num_left - requests
            self._tokens = self._tokens * fade + num_tokens_left - tokens
        self._last = (now, num_left, num_tokens_left)

    def seconds_for(self, num_requests: int, num_tokens: int, share: float = 1.0) -> float:
        """Time in which so many requests, or else tokens, leave of what has this share of the service."""
        amount, passed = (num_requests, self._requests) if num_requests else (num_tokens, self._tokens)
        seconds = amount * self._seconds / max(passed * share, 1e-9)
        return min(_MOST_S, max(_LEAST_S, seconds))

    def refuse(self, now: float, num_requests: int, num_tokens: int) -> float:
        """When one that is refused should come again: behind all that were refused before, s from now."""
        room = max(self._room, now) + self.seconds_for(num_requests, num_tokens)
        self._room = min(room, now + _MOST_S)
        return self._room - now
