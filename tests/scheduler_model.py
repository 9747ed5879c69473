"""What the scheduler core is held against: a model that is a function of tokens, and the KV memory of a worker.

The model draws a token as counter-based sampling makes the real one draw: by (request, sequence index, position) alone.
For a beam search its log-probabilities are a function of the tokens before; of a prompt's tokens it tells the place.
"""

import random
import zlib
from array import array

from protos.logprobs import Logprobs, to_columns
from scheduler.beam import EarlyStopping
from scheduler.plan import Plan, Row, StepResult
from scheduler.sequence import Sequence, SequenceGroup

STOP = 0
VOCABULARY_SIZE = 13


def next_token(group: SequenceGroup, sequence_index: int, position: int) -> int:
    """What the model samples: the same few tokens again and again, though not always; STOP is seldom among them."""
    num_tokens = len(group.prompt_token_ids)
    place = position % (2 + num_tokens % 4) + (position % 7 == 3)
    return (num_tokens * 7907 + group.n * 131 + sequence_index * 31 + place * 17) % VOCABULARY_SIZE


def candidates(tokens: "array[int]", num_candidates: int) -> list[tuple[int, float]]:
    """The most probable tokens behind `tokens`, best first, no two equally probable."""
    source = random.Random(zlib.crc32(tokens.tobytes()))
    logprobs = [-source.expovariate(1) for _ in range(VOCABULARY_SIZE)]
    return sorted(enumerate(logprobs), key=lambda pair: -pair[1])[:num_candidates]


def expected_outputs(group: SequenceGroup) -> list[list[int]]:
    """The whole outputs of a group that nothing cuts short."""
    if group.beam is not None:
        return expected_beams(group)
    return [expected_output(group, sequence.index) for sequence in group.sequences]


def expected_output(group: SequenceGroup, sequence_index: int) -> list[int]:
    """The whole output of one sampled sequence."""
    tokens: list[int] = []
    while len(tokens) < group.wanted_max_tokens:
        tokens.append(next_token(group, sequence_index, len(group.prompt_token_ids) + len(tokens)))
        if tokens[-1] == STOP and len(tokens) > group.min_tokens:
            break
    return tokens


def expected_beams(group: SequenceGroup) -> list[list[int]]:
    """Beam search over whole outputs, written the other way round: candidates of all beams, sorted, step by step."""
    params = group.beam._params
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, group.max_tokens + 1):
        found = []
        for total, tokens in beams:
            for token, logprob in candidates(group.prompt_token_ids + array("i", tokens), VOCABULARY_SIZE):
                found.append((total + logprob, [*tokens, token]))
        found.sort(key=lambda pair: -pair[0])
        ends = [(t[-1] == STOP and length > group.min_tokens) or length == group.max_tokens for _, t in found]
        for (total, tokens), stops in list(zip(found, ends, strict=True))[: params.width]:
            if stops:
                done.append((total / length**params.length_penalty, tokens))
        done = sorted(done, key=lambda pair: -pair[0])[: params.width]
        beams = [beam for beam, stops in zip(found, ends, strict=True) if not stops][: params.width]
        if not beams:
            break
        if len(done) == params.width:
            far = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0
            hope = beams[0][0] / (group.max_tokens if far else length) ** params.length_penalty
            if params.early_stopping is EarlyStopping.TRUE or hope <= done[-1][0]:
                break
    return [tokens for _, tokens in done[: group.n]]


def run(plan: Plan, step_s: float = 0.0, swap_s: float = 0.0) -> StepResult:
    """The model's answer to a step."""
    tokens, logprobs, candidate_ids, candidate_logprobs = [], [], [], []
    for row in plan.rows:
        for sequence in row.samples:
            if row.group.beam is None:
                tokens.append(next_token(row.group, sequence.index, row.start + row.num_new_tokens))
                logprobs.append(-1.0)
                continue
            best = candidates(row.group.token_ids(sequence, 0, sequence.num_tokens), row.group.beam.num_candidates)
            tokens.append(best[0][0])
            logprobs.append(best[0][1])
            missing = [(0, float("-inf"))] * (row.group.beam.num_candidates - len(best))
            for token, logprob in best + missing:
                candidate_ids.append(token)
                candidate_logprobs.append(logprob)
    told = []
    for place, start in plan.telling:
        positions = array("i", range(start + 1, plan.rows[place].prompt_logprobs_end + 1))
        told.append(Logprobs(0, array("f", [-1.0] * len(positions)), positions))
    return StepResult(
        tokens, logprobs, (), candidate_ids, candidate_logprobs, step_s, swap_s, prompt_logprobs=to_columns(told)
    )


class Memory:
    """A worker's memory: in each slot of KV the tokens whose KV it is, all that it depends on; and what it sampled."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self._swapped: dict[tuple[int, int], tuple[int, ...]] = {}
        # (request, sequence index) -> position -> token
        self._sampled: dict[tuple[int, int], dict[int, int]] = {}

    def clear(self) -> None:
        """The worker is gone."""
        self._slots.clear()
        self._swapped.clear()
        self._sampled.clear()

    def execute(self, plan: Plan) -> None:
        """Swaps out, swaps in, copies, writes what the rows compute, reads all that they attend to, then samples.

        To be called in the order of the plans, and as soon as a plan is made: it is sent as it is then.
        """
        self._move(self._slots, self._swapped, plan.blocks_to_swap_out)
        self._move(self._swapped, self._slots, plan.blocks_to_swap_in)
        self._move(self._slots, self._slots, plan.blocks_to_copy)
        written = set()
        tokens_of = self._tokens(plan)
        for row, tokens in tokens_of:
            for position in range(row.start, row.start + row.num_new_tokens):
                slot = self._slot(row, position)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self._slots[slot] = tokens[: position + 1]
        for row, tokens in tokens_of:
            for position in range(row.start + row.num_new_tokens):
                kv = self._slots.get(self._slot(row, position))
                assert kv == tokens[: position + 1], "a row attends to another one's KV"
        for row in plan.rows:
            end = row.start + row.num_new_tokens
            for sequence in row.samples if row.group.beam is None else ():
                sampled = self._sampled.setdefault((row.group.number, sequence.index), {})
                sampled[end] = next_token(row.group, sequence.index, end)

    def _tokens(self, plan: Plan) -> list[tuple[Row, tuple[int, ...]]]:
        """Each row with all tokens up to its last: a draft's are those of the row before it, and itself."""
        tokens_of: list[tuple[Row, tuple[int, ...]]] = []
        last: dict[Sequence, tuple[int, ...]] = {}
        for row in plan.rows:
            tokens = self._known_tokens(row) if row.draft is None else (*last[row.sequence], row.draft)
            assert len(tokens) == row.start + row.num_new_tokens, "a draft has a gap before it"
            last[row.sequence] = tokens
            tokens_of.append((row, tokens))
        return tokens_of

    def _known_tokens(self, row: Row) -> tuple[int, ...]:
        """All tokens up to the row's last: those that the scheduler knows, then those that only the worker does."""
        end = row.start + row.num_new_tokens
        tokens = row.group.token_ids(row.sequence, 0, end).tolist()
        if len(tokens) < end:
            assert len(tokens) >= row.start or row.num_new_tokens == 1, "a row of which more than one token is unknown"
            sampled = self._sampled[row.group.number, row.sequence.index]
            assert max(sampled) == end - 1, "the token before was not the last one to be sampled"
            tokens += [sampled[position] for position in range(len(tokens), end)]
        return tuple(tokens)

    def _move(self, source: dict, target: dict, pairs: list[tuple[int, int]]) -> None:
        """All pairs at once, in no order: that no block is written twice is part of the claim."""
        assert len({to for _, to in pairs}) == len(pairs), "two blocks are copied to one"
        moved = {
            (to, offset): source[block, offset]
            for block, to in pairs
            for offset in range(self._block_size)
            if (block, offset) in source
        }
        target |= moved

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.sequence.block_table[position // self._block_size], position % self._block_size
