"""How a preempted group loses its blocks: the cost of each mode, estimated from what the worker measured."""

from dataclasses import dataclass

from scheduler.block_manager import BlockManager
from scheduler.policy import PreemptionMode
from scheduler.sequence import SequenceGroup

# Steps with fewer prompt tokens say more about their fixed cost than about the rate.
_MIN_PREFILL_TOKENS = 64
# Weight of the newest measurement in an average.
_ALPHA = 0.3


@dataclass(slots=True)
class Rates:
    """How fast the worker is, as exponential averages over its steps; 0 until something was measured.

    Attributes:
        prefill_tokens_per_s: tokens computed in steps that are mostly prefill.
        swap_blocks_per_s: blocks moved between the pools, in either direction.
        decode_step_s: time of a step without prefill.
        prefill_token_s: time that each prefill token of a step that is mostly prefill adds to that.
    """

    prefill_tokens_per_s: float = 0.0
    swap_blocks_per_s: float = 0.0
    decode_step_s: float = 0.0
    prefill_token_s: float = 0.0

    def note_step(self, num_tokens: int, num_prefill_tokens: int, step_s: float) -> None:
        """Takes the time of a step, without its swapping."""
        if 2 * num_prefill_tokens > num_tokens and num_prefill_tokens >= _MIN_PREFILL_TOKENS and step_s > 0:
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, num_tokens / step_s)
            if self.decode_step_s:
                added_s = max(0.0, step_s - self.decode_step_s) / num_prefill_tokens
                self.prefill_token_s = _average(self.prefill_token_s, added_s)
        elif not num_prefill_tokens and step_s > 0:
            self.decode_step_s = _average(self.decode_step_s, step_s)

    def expected_step_s(self, num_tokens: int, num_prefill_tokens: int) -> float:
        """How long a step will take without swapping, rather too short than too long; 0 where nothing is known."""
        decode_s = self.decode_step_s if num_prefill_tokens < num_tokens else 0.0
        if not self.prefill_tokens_per_s:
            return decode_s
        return max(decode_s, num_prefill_tokens / self.prefill_tokens_per_s)

    def note_swap(self, num_blocks: int, swap_s: float) -> None:
        """Takes the time that it took to move blocks between the pools."""
        if num_blocks and swap_s > 0:
            self.swap_blocks_per_s = _average(self.swap_blocks_per_s, num_blocks / swap_s)


@dataclass(frozen=True, slots=True)
class Preemption:
    """A group that lost its blocks.

    Attributes:
        mode: how it lost them; never AUTO.
        reason: why in this mode, in words.
    """

    group: SequenceGroup
    mode: PreemptionMode
    reason: str


def choose_mode(
    group: SequenceGroup, mode: PreemptionMode, blocks: BlockManager, rates: Rates
) -> tuple[PreemptionMode, str]:
    """RECOMPUTE or SWAP for a running group, and why.

    `mode` decides unless it is AUTO; but SWAP needs room in the swap pool, and computed tokens. AUTO takes what costs
    less. Until the rates are known, it takes RECOMPUTE for one sequence and SWAP for several, whose shared blocks would
    come back unshared after a recomputation.
    """
    num_blocks = blocks.num_blocks_to_swap(group)
    num_free = blocks.num_free_swap_blocks
    if mode is PreemptionMode.RECOMPUTE:
        return mode, "recompute: preemption_mode says so"
    if not num_blocks:
        return PreemptionMode.RECOMPUTE, "recompute: nothing is computed yet"
    if num_blocks > num_free:
        return PreemptionMode.RECOMPUTE, f"recompute: {num_blocks} blocks to swap, {num_free} swap blocks free"
    if mode is PreemptionMode.SWAP:
        return mode, "swap: preemption_mode says so"
    if not rates.prefill_tokens_per_s or not rates.swap_blocks_per_s:
        if len(group.live) == 1:
            return PreemptionMode.RECOMPUTE, "recompute: one sequence, and rates are not measured yet"
        return PreemptionMode.SWAP, "swap: several sequences, and rates are not measured yet"
    num_tokens = _num_tokens_to_recompute(group)
    recompute_ms = num_tokens / rates.prefill_tokens_per_s * 1e3
    swap_ms = 2 * num_blocks / rates.swap_blocks_per_s * 1e3
    costs = f"{num_tokens} tokens take {recompute_ms:.1f} ms to compute, {num_blocks} blocks {swap_ms:.1f} ms to swap"
    if swap_ms < recompute_ms:
        return PreemptionMode.SWAP, f"swap: {costs}"
    return PreemptionMode.RECOMPUTE, f"recompute: {costs}"


def _num_tokens_to_recompute(group: SequenceGroup) -> int:
    """The prompt once, and each sequence's output, as far as computed."""
    num_computed = group.root.num_computed_tokens
    num_prompt = min(num_computed, group.num_prompt_tokens)
    return num_prompt + sum(max(0, sequence.num_computed_tokens - num_prompt) for sequence in group.live)


def _average(known: float, measured: float) -> float:
    return measured if not known else (1 - _ALPHA) * known + _ALPHA * measured
