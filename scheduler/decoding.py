"""What a step's tokens do to their groups: append, fork, finish. Every decoding method is made of these three."""

import math
from array import array
from collections.abc import Sequence as Seq

from protos.logprobs import LogprobReader
from scheduler.admission import why_no_more
from scheduler.beam import Beam, Hypothesis
from scheduler.plan import Finished, NewTokens, Plan, Row, StepOutputs, StepResult
from scheduler.queues import Queues
from scheduler.sequence import Sequence, SequenceGroup, Status


class Decoder:
    """Gives tokens to the groups in `queues`; `cached`: whether others can find the blocks that they fill."""

    def __init__(self, queues: Queues, *, cached: bool) -> None:
        self._queues = queues
        self._cached = cached

    def decode(self, plan: Plan, result: StepResult) -> StepOutputs:
        """Takes the results of all rows, wherever their groups are by now; sequences that have ended are skipped."""
        outputs = StepOutputs()
        place, first_candidate = 0, 0
        running, failed = Status.RUNNING, set(result.failed)
        tops, prompts = LogprobReader(result.top_logprobs), LogprobReader(result.prompt_logprobs)
        for telling, start in plan.telling:
            self._tell_of_prompt(plan.rows[telling], start, prompts, outputs)
        searches: dict[int, list[tuple[Sequence, list[tuple[int, float]]]]] = {}
        for row in plan.rows:
            group = row.group
            if row.draft is not None and not self._accept(row, outputs):
                if row.sequence.logprobs is not None:
                    tops.take(1, row.sequence.logprobs.num_top)
                place += 1
                continue
            for sampled in row.samples:
                if failed and place in failed and not sampled.status.finished:
                    self._fail(group, outputs)
                # Nearly all run, and `finished` takes longer to ask.
                ended = sampled.status is not running and sampled.status.finished
                if group.beam is not None:
                    end = first_candidate + group.beam.num_candidates
                    ids, logprobs = result.candidate_token_ids, result.candidate_logprobs
                    candidates = list(zip(ids[first_candidate:end], logprobs[first_candidate:end], strict=True))
                    searches.setdefault(group.number, []).append((sampled, candidates))
                    first_candidate = end
                elif not ended:
                    if sampled.logprobs is not None:
                        sampled.logprobs.extend(tops.take(1, sampled.logprobs.num_top))
                    if row.draft is None:
                        outputs.new_tokens.append(NewTokens(group, sampled, len(sampled.output_token_ids)))
                    self._append(group, sampled, result.token_ids[place], result.logprobs[place], outputs)
                elif sampled.logprobs is not None:
                    tops.take(1, sampled.logprobs.num_top)
                place += 1
        for number, beams in searches.items():
            if number in self._queues.groups:
                self._search(self._queues.groups[number], beams, outputs)
        return outputs

    def end_unfinished(self, plan: Plan, group: SequenceGroup, message: str) -> None:
        """Ends a waiting group that cannot run: as IGNORED, or by length if it is a search that ran in another pool."""
        if group.beam is not None and group.root.output_token_ids:
            group.beam.conclude([_beam(sequence, []) for sequence in group.live])
            self._end_search(group, plan.new_tokens, plan.finished, message)
            return
        for sequence in list(group.live):
            self._queues.finish(group, sequence, Status.FINISHED_IGNORED)
            plan.finished.append(Finished(group, sequence, message))
        if group.beam is not None:  # the client waits for n ends
            group.sequences = [_ended(group, index, None, Status.FINISHED_IGNORED) for index in range(group.n)]
            plan.finished[-1:] = [Finished(group, sequence, message) for sequence in group.sequences]

    def end_outgrown(self, plan: Plan, group: SequenceGroup) -> bool:
        """Ends the sequences of a waiting group that have all the tokens that the pool has room for.

        Another pool had more room. Beside them the other sequences would not fit, though each fits into its own share.

        Returns:
            Whether that ended the whole group.
        """
        outgrown = [sequence for sequence in group.live if len(sequence.output_token_ids) >= group.max_tokens]
        ends = [Finished(group, sequence, why_no_more(group, sequence, self._queues.blocks)) for sequence in outgrown]
        for sequence in outgrown:
            self._queues.finish(group, sequence, Status.FINISHED_LENGTH_CAPPED)
        plan.finished += ends
        return not group.live

    def _accept(self, row: Row, outputs: StepOutputs) -> bool:
        """Whether a draft is the token that its sequence sampled there; then the token sampled after it counts too."""
        sequence = row.sequence
        # A sequence for which an earlier draft was wrong, or which has ended, has no token in this place.
        if sequence.num_tokens != row.start + 1 or sequence.output_token_ids[-1] != row.draft:
            return False
        if sequence.status.finished:
            return False
        if sequence.status is Status.RUNNING:  # others compute it again, like all that comes late
            sequence.num_computed_tokens = row.start + 1
            if self._cached:
                self._queues.blocks.remember(row.group, sequence, row.start + 1)
        self._queues.waiting.charge([row.group])
        outputs.num_accepted += 1
        return True

    def _append(
        self, group: SequenceGroup, sequence: Sequence, token_id: int, logprob: float, outputs: StepOutputs
    ) -> None:
        num_before = len(sequence.output_token_ids)
        sequence.append(token_id, logprob)
        if token_id in group.stop_token_ids and num_before >= group.min_tokens:
            sequence.stop_token_id = token_id
            self._queues.finish(group, sequence, Status.FINISHED_STOPPED)
            outputs.finished.append(Finished(group, sequence))
        elif num_before + 1 >= group.max_tokens:
            self._queues.finish(group, sequence, Status.FINISHED_LENGTH_CAPPED)
            outputs.finished.append(Finished(group, sequence, self._why_no_more(group, sequence)))

    def _why_no_more(self, group: SequenceGroup, sequence: Sequence) -> str:
        """Why a sequence has ended by length, if its client wanted more; otherwise nothing."""
        is_capped = group.max_tokens <= len(sequence.output_token_ids) < group.wanted_max_tokens
        return why_no_more(group, sequence, self._queues.blocks) if is_capped else ""

    def _tell_of_prompt(self, row: Row, start: int, prompts: LogprobReader, outputs: StepOutputs) -> None:
        group = row.group
        assert group.prompt_logprobs is not None
        told = prompts.take(row.prompt_logprobs_end - start, group.prompt_logprobs.num_top)
        assert len(group.prompt_logprobs) == start, "the prompt's log-probabilities have a gap"
        group.prompt_logprobs.extend(told)
        if any(map(math.isnan, told.logprobs)):
            self._fail(group, outputs)

    def _fail(self, group: SequenceGroup, outputs: StepOutputs) -> None:
        if group.live:
            outputs.failed.append(group)
            for sequence in list(group.live):
                self._queues.blocks.disown(group, sequence)
                self._queues.finish(group, sequence, Status.FINISHED_ABORTED)

    # Beam search

    def _search(
        self, group: SequenceGroup, beams: Seq[tuple[Sequence, list[tuple[int, float]]]], outputs: StepOutputs
    ) -> None:
        """Takes all beams of a group a token further: forks those with several continuations, frees those with none."""
        search, blocks = group.beam, self._queues.blocks
        assert search is not None
        assert len(beams) == len(group.live), "beams sample together or not at all"
        extensions = search.step([_beam(sequence, candidates) for sequence, candidates in beams], group.max_tokens)
        if search.done:
            self._end_search(group, outputs.new_tokens, outputs.finished)
            return
        parents = [beams[extension.parent][0] for extension in extensions]
        last_place = {parent.index: place for place, parent in enumerate(parents)}
        pruned = [sequence for sequence in group.live if sequence.index not in last_place]
        spare = iter(sorted(set(range(search.width)) - last_place.keys() - {sequence.index for sequence in pruned}))
        live = []
        for place, parent in enumerate(parents):
            if place == last_place[parent.index]:  # the last continuation keeps the sequence
                live.append(parent)
                continue
            # A pruned beam takes over from one that forks: most of their blocks are the same.
            child = parent.fork(pruned.pop() if pruned else next(spare))
            blocks.fork(parent, child)
            live.append(child)
        for sequence in pruned:
            blocks.free(sequence)
        for sequence, extension in zip(live, extensions, strict=True):
            sequence.append(extension.token_id, extension.logprob)
        group.live = live
        group.sequences = list(live)
        if group.status is Status.WAITING:  # preempted since: one of them computes what they share
            group.forked = len(live) == 1

    def _end_search(
        self, group: SequenceGroup, new_tokens: list[NewTokens], finished: list[Finished], message: str = ""
    ) -> None:
        """Ends a search: from then on, the group's sequences are its n best hypotheses."""
        assert group.beam is not None
        self._queues.leave_for_good(group)
        for sequence in group.live:
            self._queues.blocks.free(sequence)
        group.live = []
        group.sequences = []
        for index, hypothesis in enumerate(group.beam.hypotheses[: group.n]):
            stopped = hypothesis.stop_token_id is not None
            status = Status.FINISHED_STOPPED if stopped else Status.FINISHED_LENGTH_CAPPED
            group.sequences.append(_ended(group, index, hypothesis, status))
        for index in range(len(group.sequences), group.n):  # the vocabulary is too small for n hypotheses
            group.sequences.append(_ended(group, index, None, Status.FINISHED_ABORTED))
        new_tokens += [NewTokens(group, sequence, 0) for sequence in group.sequences if sequence.output_token_ids]
        for sequence in group.sequences:
            is_cut = sequence.status is Status.FINISHED_LENGTH_CAPPED
            why = self._why_no_more(group, sequence) if is_cut else ""
            finished.append(Finished(group, sequence, message or why))


def _beam(sequence: Sequence, candidates: list[tuple[int, float]]) -> Beam:
    return Beam(sequence.output_token_ids, sequence.cumulative_logprob, candidates)


def _ended(group: SequenceGroup, index: int, hypothesis: Hypothesis | None, status: Status) -> Sequence:
    """A sequence that never ran: one of a search's results for the client."""
    sequence = Sequence(index, group.num_prompt_tokens)
    if hypothesis is not None:
        sequence.output_token_ids = hypothesis.token_ids
        sequence.output_logprobs = array("f", bytes(4 * len(hypothesis.token_ids)))  # only their sum is known
        sequence.num_tokens += len(hypothesis.token_ids)
        sequence.cumulative_logprob = hypothesis.cumulative_logprob
        sequence.stop_token_id = hypothesis.stop_token_id
    sequence.status = status
    return sequence
