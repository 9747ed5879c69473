"""Drafts: tokens that a sequence may sample next, computed beside the one that it samples now.

Speculative decoding (Leviathan et al., ICML'23) without a second model: text repeats itself, so what followed the last
tokens earlier in prompt or output is a good guess at what follows now (inference with reference, Yang et al., 2023;
prompt lookup, Saxena, 2023). A step reads all weights, whether for one row or for eight, and gives a sequence as many
tokens more as its draft was right for.

A drafted token is a row like any other: one token of its sequence, at its place, with logits to sample from. So the
worker knows nothing of drafts. What the row samples counts if all before it is what the sequence did sample
(`decoding.py`).

WHY NO OUTPUT CHANGES. A step writes the KV of all its rows, layer by layer, before any of them attends to it. So the
row of a draft that is right has the context that it would have had in a step of its own; and its draw, which is keyed
by seed, sequence and position, is the same. The row of a wrong one leaves KV in slots behind the sequence's computed
tokens, which are written again before anything reads them, in blocks that nobody shares and no prefix can be found in.
That a kernel may round otherwise where a step has more rows is as with any other rows; those for CPUs do not.

HOW MANY. Text repeats itself at all lengths. So of the places that match the last n tokens, a share of m / (m + k) or
so match k tokens more, with m = n - 3/4: about as in greedy answers of small models, while text that people wrote
repeats itself less (docs/measurements.md). Of N rows, of which so many are drafts that they give E tokens on average,
a step takes as long as N + H rows would, H being how many take as long as it takes without any. One row more pays as
long as it brings more tokens for its time than the step does without it: m / (m + k) is over E / (N + H). That is many
tokens for a long match in a small step, and none for a short one in a large step. And as matches do not say all, there
are no more than match, or four: text that goes on repeating itself matches longer each time.
"""

import math
from array import array

from scheduler.block_manager import BlockManager
from scheduler.plan import Plan, Row

# H above. Two cores of a CPU have 9 to 16 and more, and a GPU has many more. Less than that allows for text that
# repeats itself less, such as is drawn at a high temperature.
_NUM_BALANCED_ROWS = 8
# So many tokens are drafted for a match that is shorter.
_SHORT_DRAFT = 4
# What m is short of n by.
_SHORT_BY = 0.75
# A match counts as no longer than this.
_LONGEST_MATCH = 32
# Of a step with drafts: for logits of so many a worker has room in any case (worker/cache_size.py).
_MOST_ROWS = 256
# So many tokens back it is looked for, which takes microseconds.
_WINDOW = 8192
_TOKEN_BYTES = 4


def add_drafts(plan: Plan, most: int, num_tokens_left: int, num_blocks_left: int, blocks: BlockManager) -> None:
    """Adds rows for what the sequences of a plan may sample next, as far as that pays and there is room.

    Args:
        plan: with all of its other rows.
        most: tokens that are drafted for one sequence at most.
        num_tokens_left: rows that may be added.
        num_blocks_left: free blocks that may be taken for them, 0 or more.
        blocks: where the sequences have theirs.
    """
    num_expected: float = plan.num_tokens  # tokens
    most_rows = min(plan.num_tokens + num_tokens_left, _MOST_ROWS)
    least = math.ceil(plan.num_tokens / _NUM_BALANCED_ROWS + _SHORT_BY)  # a match of less is worth nothing
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
    """The place before where the last tokens stand too, in the longest run that doubling its length comes upon.

    Args:
        token_ids: of a sequence.
        least: length from which on a run counts.

    Returns:
        Length of the run, up to the longest that counts, and the tokens behind it, to the sequence's end. Who wants
        more goes on from the first: what was found last repeats itself. Length 0 where there is none.
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
    """Where the last `num_bytes` of a text of whole tokens stand before, for the last time; -1 for nowhere."""
    run, end = text[-num_bytes:], len(text) - _TOKEN_BYTES
    if len(text) <= num_bytes:
        return -1
    # Bytes may look alike where tokens do not.
    while (at := text.rfind(run, 0, end)) % _TOKEN_BYTES and at >= 0:
        end = at + num_bytes - 1
    return at
