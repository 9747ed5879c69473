"""W3C Trace Context (https://www.w3.org/TR/trace-context/): which trace a call belongs to, as headers pass it on."""

import re
from dataclasses import dataclass
from typing import Self

# Later versions may append fields, which a reader of this version ignores.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")
_MAX_TRACEPARENT_CHARS = 128
_MAX_TRACESTATE_CHARS = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span that a call is part of.

    Attributes:
        trace_id: 32 hex digits.
        sampled: whether the caller records this trace.
        traceparent: both and the span's id, as the header has them.
        tracestate: what vendors pass along; may be empty.
    """

    trace_id: str
    sampled: bool
    traceparent: str
    tracestate: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> Self | None:
        """The context in a pair of headers; None if they hold none: a broken header does not fail a request."""
        if not traceparent or len(traceparent) > _MAX_TRACEPARENT_CHARS:
            return None
        found = _TRACEPARENT.fullmatch(traceparent)
        if found is None or (traceparent.startswith("00") and found[3]):
            return None
        if len(tracestate) > _MAX_TRACESTATE_CHARS:
            tracestate = ""
        return cls(found[1], bool(int(found[2], 16) & 1), traceparent, tracestate)
