"""`pagewire explain`: why a live request has its status, in readable lines."""

from collections.abc import Iterator

from rich.console import Console

from pagewire.access import OPEN, Access
from pagewire.introspection import introspection
from protos.pagewire.v1 import introspection_pb2 as pb

_TIMEOUT_S = 5.0
_STATUS = {
    pb.REQUEST_STATUS_WAITING: "waiting",
    pb.REQUEST_STATUS_RUNNING: "running",
    pb.REQUEST_STATUS_SWAPPED: "swapped out",
}


def show(target: str, request_id: str, console: Console, access: Access = OPEN) -> None:
    """Prints what the server says about a request.

    Raises:
        RequestError: NotFound if no live request has this id.
    """
    with introspection(target, access) as stub:
        request = pb.ExplainRequestRequest(request_id=request_id)
        facts = stub.ExplainRequest(request, timeout=_TIMEOUT_S, metadata=access.metadata)
    for name, words in explained(facts):
        console.print(f"{name:<10} {words}", markup=False)


def explained(facts: pb.ExplainRequestResponse) -> Iterator[tuple[str, str]]:
    """Names and sentences, most important first; what does not apply to the request's status is left out."""
    status = _STATUS.get(facts.status, "in a state that this version does not know")
    runs = facts.status == pb.REQUEST_STATUS_RUNNING
    yield "status", status if runs else f"{status}: {facts.message}"
    if facts.HasField("queue_position"):
        ahead = facts.queue_position
        yield "queue", f"{ahead} before it" if ahead else "first"
    needed = "" if runs else f", {facts.num_blocks_needed} needed to run"
    yield "blocks", f"{facts.num_blocks_held} held{needed}, {facts.num_blocks_free} can be allocated now"
    cached = f"{facts.num_cached_prompt_tokens} of the prompt found cached"
    yield "tokens", f"{facts.num_computed_tokens} computed, {facts.num_output_tokens} sampled, {cached}"
    yield "sequences", f"{facts.num_running_seqs} of at most {facts.max_num_seqs} run, of all requests"
    yield "steps", f"{facts.last_step_tokens} tokens in the last one, of at most {facts.max_num_batched_tokens}"
    if facts.num_preemptions:
        times = "once" if facts.num_preemptions == 1 else f"{facts.num_preemptions} times"
        by = f" for {facts.preempted_by}" if facts.preempted_by else ""
        why = f": {facts.preemption_reason}" if facts.preemption_reason else ""
        yield "preempted", f"{times}, last{by}{why}"
    yield "submitted", f"{facts.waited_ms / 1e3:.1f} s ago"
