"""How fast the waiting queue empties, and when a request that was refused because it is full should try again.

Measured when requests arrive, and only over time in which others wait: an idle hour says nothing about the rate. If
something waits when a request arrives, something has waited ever since the one before arrived.
"""

import math

# Measurements lose their weight over this time.
_MEMORY_S = 10.0
# The shortest and the longest time that a client is told to wait.
_LEAST_S, _MOST_S = 0.1, 60.0
# What is assumed to leave in a second until something is measured.
_REQUESTS, _TOKENS = 1.0, 1000.0


class Outflow:
    """How many requests and prompt tokens leave the queue per second, as averages over the last seconds."""

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None
        self._seconds, self._requests, self._tokens = 1.0, _REQUESTS, _TOKENS
        # When there should be room for the last request that was refused.
        self._room = 0.0

    def note(self, now: float, num_waiting: int, num_left: int, num_tokens_left: int) -> None:
        """Measures, as a request arrives while `num_waiting` wait; the last two say what has left in all, ever."""
        if self._last is not None and num_waiting:
            then, requests, tokens = self._last
            fade = math.exp((then - now) / _MEMORY_S)
            self._seconds = self._seconds * fade + now - then
            self._requests = self._requests * fade + num_left - requests
            self._tokens = self._tokens * fade + num_tokens_left - tokens
        self._last = (now, num_left, num_tokens_left)

    def seconds_for(self, num_requests: int, num_tokens: int, share: float = 1.0) -> float:
        """How long `num_requests`, or else `num_tokens`, take to leave, out of those with this share of the service."""
        amount, passed = (num_requests, self._requests) if num_requests else (num_tokens, self._tokens)
        seconds = amount * self._seconds / max(passed * share, 1e-9)
        return min(_MOST_S, max(_LEAST_S, seconds))

    def refuse(self, now: float, num_requests: int, num_tokens: int) -> float:
        """When a refused request should come again, s from now: after all those that were refused before it."""
        room = max(self._room, now) + self.seconds_for(num_requests, num_tokens)
        self._room = min(room, now + _MOST_S)
        return self._room - now
