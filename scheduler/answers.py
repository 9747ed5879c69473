"""What a worker has to answer to a plan. The core trusts the results that it gets, so a bad one must not reach it.

The worker is another process, perhaps of another release: a bug there may cost a worker, but never the scheduler.
"""

from collections.abc import Iterator

from protos.columns import unpack
from protos.sampling_pb2 import LogprobColumns
from protos.worker_pb2 import ExecuteModelResponse
from scheduler.plan import Plan

_ENTRY_BYTES = 4


class MalformedAnswer(Exception):
    """An answer does not fit its step; the message names the field, and what it should hold."""


def check_answer(plan: Plan, epoch: int, response: ExecuteModelResponse) -> None:
    """Raises MalformedAnswer unless `response` holds exactly what a result of `plan` has to hold.

    Args:
        plan: the oldest step in flight.
        epoch: the epoch of the worker that it was sent to.
        response: the worker's next answer.
    """
    if (response.step_id, response.epoch) != (plan.step_id, epoch):
        came = f"came for step_id {response.step_id} of epoch {response.epoch}"
        raise MalformedAnswer(f"an answer {came}, and {plan.step_id} of epoch {epoch} is the oldest in flight")
    num_samples = sum([len(row.samples) for row in plan.rows])
    for field, column, num_entries in _columns(plan, num_samples, response):
        if len(column) != num_entries * _ENTRY_BYTES:
            has = f"has {len(column)} bytes, and should have {num_entries} entries of {_ENTRY_BYTES}"
            raise MalformedAnswer(f"the answer to step {plan.step_id} is malformed: {field} {has}")
    failed = response.failed_samples
    if len(failed) % _ENTRY_BYTES or not all(0 <= place < num_samples for place in unpack(failed)):
        names = f"names others than the {num_samples} samples of the step"
        raise MalformedAnswer(f"the answer to step {plan.step_id} is malformed: failed_samples {names}")


def _columns(plan: Plan, num_samples: int, response: ExecuteModelResponse) -> Iterator[tuple[str, bytes, int]]:
    """Each column's field, the column, and how many entries it should have."""
    yield "token_ids", response.token_ids, num_samples
    yield "logprobs", response.logprobs, num_samples
    # Few rows want more than tokens.
    wanting = [row for row in plan.rows if row.group.beam is not None or row.group.num_top_logprobs is not None]
    num_candidates = sum(len(row.samples) * row.group.beam.num_candidates for row in wanting if row.group.beam)
    yield "candidate_token_ids", response.candidate_token_ids, num_candidates
    yield "candidate_logprobs", response.candidate_logprobs, num_candidates
    tops = [(len(row.samples), row.group.num_top_logprobs) for row in wanting]
    yield from _logprob_columns("top_logprobs", response.top_logprobs, [(n, top) for n, top in tops if top is not None])
    rows = [(plan.rows[place], start) for place, start in plan.telling]
    prompts = [(row.prompt_logprobs_end - start, row.group.prompt_logprobs) for row, start in rows]
    told = [(num_tokens, logprobs.num_top) for num_tokens, logprobs in prompts if logprobs is not None]
    yield from _logprob_columns("prompt_logprobs", response.prompt_logprobs, told)


def _logprob_columns(
    field: str, columns: LogprobColumns, told: list[tuple[int, int]]
) -> Iterator[tuple[str, bytes, int]]:
    """The columns of log-probabilities: `told` has pairs of a number of tokens, and of top tokens for each of them."""
    num_tokens = sum([num for num, _ in told])
    num_tops = sum([num * num_top for num, num_top in told])
    yield f"{field}.logprobs", columns.logprobs, num_tokens
    yield f"{field}.ranks", columns.ranks, num_tokens
    yield f"{field}.top_token_ids", columns.top_token_ids, num_tops
    yield f"{field}.top_logprobs", columns.top_logprobs, num_tops
