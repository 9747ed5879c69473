"""Drafts: guesses at a sequence's next tokens, computed in the step that samples the first of them.

Speculative decoding (Leviathan et al., ICML'23) without a second model: text repeats itself, so what followed the last
tokens earlier in prompt or output is a good guess at what follows now (inference with reference, Yang et al., 2023;
prompt lookup, Saxena, 2023). A step reads all weights, whether for one row or for eight, and gives a sequence one more
token for each of its drafts that was right.

A drafted token is a row like any other: one token of its sequence, in its place, with logits to sample from. So the
worker knows nothing of drafts. What the row samples counts if its token, and all drafts before it, are what the
sequence did sample (`decoding.py`).

WHY NO OUTPUT CHANGES. A step writes the KV of all its rows, layer by layer, before any of them attends to it. So the
row of a correct draft attends to the same KV as it would in a step of its own; and its draw, which is keyed by seed,
sequence and position, is the same. The row of a wrong draft leaves KV in slots behind the sequence's computed tokens.
These are written again before anything reads them, and lie in blocks that no other sequence shares and the prefix cache
cannot find. A kernel may round differently when a step has more rows, whatever rows they are; those for CPUs do not.

HOW MANY. Text repeats itself at all lengths. So about m / (m + k) of the places that match the last n tokens match k
tokens more, with m = n - 3/4: this is so in greedy answers of small models, while text written by people repeats itself
less (docs/measurements.md). A step of N rows takes as long as N + H rows would if time went by rows alone: H is its
fixed cost, in rows. Let E be the tokens that it gives on average, with its drafts so far. One more row pays as long as
it brings more tokens for its time than the step does without it: while m / (m + k) is over E / (N + H). That is many
drafts for a long match in a small step, and none for a short one in a large step. And since a match does not tell
everything, there are no more drafts than matching tokens, or four: text that goes on repeating itself gives longer
matches each time.
"""

import math
from array import array

from scheduler.block_manager import BlockManager
from scheduler.plan import Plan, Row

# H. It is 9 to 16 and more on two cores of a CPU, and far more on a GPU. Less than that allows for text that repeats
# itself less, such as text sampled at a high temperature.
_NUM_BALANCED_ROWS = 8
# The most tokens that are drafted for a match shorter than this.
_SHORT_DRAFT = 4
# m is n less this.
_SHORT_BY = 0.75
# The greatest n: a longer match counts as this long.
_LONGEST_MATCH = 32
# The most rows of a step with drafts: a worker has room for their logits in any case (worker/cache_size.py).
_MOST_ROWS = 256
# How many tokens back a match is looked for; that takes microseconds.
_WINDOW = 8192
_TOKEN_BYTES = 4


def add_drafts(plan: Plan, most: int, num_tokens_left: int, num_blocks_left: int, blocks: BlockManager) -> None:
    """Adds draft rows for the sequences of a plan, as far as they pay and there is room.

    Args:
        plan: complete but for its drafts.
        most: the most tokens drafted for one sequence.
        num_tokens_left: rows that may be added.
        num_blocks_left: free blocks that may be taken for them, 0 or more.
        blocks: the pool of the sequences' blocks.
    """
    num_expected: float = plan.num_tokens  # E
    most_rows = min(plan.num_tokens + num_tokens_left, _MOST_ROWS)
    least = math.ceil(plan.num_tokens / _NUM_BALANCED_ROWS + _SHORT_BY)  # a shorter match does not pay
    for row in plan.rows[:] if least <= _LONGEST_MATCH else ():
        group, sequence, start = row.group, row.sequence, row.sequence.num_tokens
        num_wanted = min(most, most_rows - plan.num_tokens, group.max_tokens - len(sequence.output_token_ids) - 1)
        if num_wanted < 1 or len(row.samples) != 1 or not group.can_be_drafted_for:
            continue
        match_length, tokens = look_up(group.token_ids(sequence, max(0, start - _WINDOW), start), least)
        num_held = len(sequence.block_table)
        num_slots = (num_held + num_blocks_left) * blocks.block_size - start
        end = start
        for place in range(min(num_wanted, num_slots, max(match_length, _SHORT_DRAFT))):
            chance = (match_length - _SHORT_BY) / (match_length - _SHORT_BY + place + 1)
            if chance * (plan.num_tokens + _NUM_BALANCED_ROWS) <= num_expected:
                break
            num_expected += chance
            plan.add(Row(group, sequence, end, 1, row.samples, draft=tokens[place % len(tokens)]))
            end += 1
        blocks.append_slots(sequence, end)
        num_blocks_left -= len(sequence.block_table) - num_held


def look_up(token_ids: "array[int]", least: int) -> tuple[int, "array[int]"]:
    """Finds where the last tokens stood before, in the longest run that doubling its length comes upon.

    Args:
        token_ids: tokens of a sequence, up to its last.
        least: the shortest run that counts.

    Returns:
        The length of the run, `_LONGEST_MATCH` at most, and the tokens behind it, up to the last one. A caller that
        wants more goes on from the first of these: the text found is taken to repeat itself. Length 0 for none.
    """
    text, match_length, end = token_ids.tobytes(), 0, 0
    length = least
    while length <= _LONGEST_MATCH and (found := _find_last(text, length * _TOKEN_BYTES)) >= 0:
        match_length, end = length, found // _TOKEN_BYTES + length
        length *= 2
    if not match_length:
        return 0, token_ids[:0]
    longest = min(_LONGEST_MATCH, end)
    while match_length < longest and token_ids[end - match_length - 1] == token_ids[-match_length - 1]:
        match_length += 1
    return match_length, token_ids[end:]


def _find_last(text: bytes, num_bytes: int) -> int:
    """Where the last `num_bytes` of a text of whole tokens last stood before; -1 for nowhere."""
    run, end = text[-num_bytes:], len(text) - _TOKEN_BYTES
    if len(text) <= num_bytes:
        return -1
    # Bytes may also match across the boundaries of tokens.
    while (at := text.rfind(run, 0, end)) % _TOKEN_BYTES and at >= 0:
        end = at + num_bytes - 1
    return at
