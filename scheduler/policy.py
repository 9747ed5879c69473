"""The bounds and choices that the core keeps to: made once, at construction."""

import enum
from dataclasses import dataclass

# Priorities that a request may have. Since they are bounded, so is the time for which a request can be overtaken.
MIN_PRIORITY, MAX_PRIORITY = -10, 10


class PreemptionMode(enum.Enum):
    """How a group loses its blocks (Kwon et al., SOSP'23, section 4.5)."""

    # Whichever of the other two is estimated to cost less.
    AUTO = "auto"
    # Free the blocks, and compute their tokens again.
    RECOMPUTE = "recompute"
    # Copy the blocks to the swap pool, and back.
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Policy:
    """What a step may hold, which group goes first, and how memory is found.

    Attributes:
        max_num_batched_tokens: the most tokens of a step, prefill and decode together.
        max_num_seqs: the most running sequences.
        max_waiting_requests: the most groups that wait: beyond it no new one is taken. Preempted ones come back to the
            queue in any case.
        max_waiting_tokens: the most prompt tokens that wait, in the same way; one group may always wait.
        max_waiting_requests_per_tenant: the most groups of one tenant that wait, in the same way; None for no bound.
        watermark: share of the blocks that admission leaves free, so that what runs can grow.
        prefix_caching: whether blocks are found again by the tokens in them.
        chunked_prefill: whether chunks of prompts join the decodes of a step (Sarathi-Serve, OSDI'24). Without it a
            step is all prefill or all decode, and the two alternate while there is work for both.
        delay_factor: without chunked_prefill, the next prompt waits for others to join it, for this many times as long
            as the last prefill step took.
        preemption_mode: how a group loses its blocks.
        aging_s: how long a group has to wait to go before a new one whose priority is one higher, s.
        max_steps_in_flight: the most steps planned and not answered, where the worker works on one at a time.
        num_speculative_tokens: the most tokens drafted for a sequence in a step (`drafts.py`); 0 for none.
        max_failed_steps: workers lost in a row in a group's steps, the last in a step of it alone, after which it ends.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_waiting_requests: int
    max_waiting_tokens: int = 1 << 20
    max_waiting_requests_per_tenant: int | None = None
    watermark: float = 0.01
    prefix_caching: bool = True
    chunked_prefill: bool = True
    delay_factor: float = 0.0
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    aging_s: float = 10.0
    max_steps_in_flight: int = 1
    num_speculative_tokens: int = 0
    max_failed_steps: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must be at least 1 and at most max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running sequence decodes one token a step"
            )
        for name in (
            "max_steps_in_flight",
            "max_failed_steps",
            "max_waiting_requests",
            "max_waiting_tokens",
            "max_waiting_requests_per_tenant",
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens ({self.num_speculative_tokens}) must be 0 or more")
        if self.num_speculative_tokens and self.max_steps_in_flight > 1:
            raise ValueError(
                f"num_speculative_tokens ({self.num_speculative_tokens}) goes with max_steps_in_flight 1: what follows "
                "a draft is planned when it is known how much of it was right"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark ({self.watermark}) must be in [0, 1)")
        for name in ("delay_factor", "aging_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} ({getattr(self, name)}) must be finite, and 0 or more")
        if self.delay_factor and self.chunked_prefill:
            raise ValueError("delay_factor spaces whole prompts: it goes with chunked_prefill off")
