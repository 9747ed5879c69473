"""The spans of a request at the scheduler, made when it has ended: queue, prefill, decode, and each pause.

All are children of the router's span. A pause overlaps prefill or decode, which go on through it.
"""

from typing import TYPE_CHECKING

from protos.errors import code_from_number
from scheduler.sessions import Ticket

if TYPE_CHECKING:
    from protos.tracing import Tracer


def record_request(tracer: "Tracer", ticket: Ticket, end: float) -> None:
    """Records the spans of a traced request that ended, or was given up, at `end`."""
    group, timeline = ticket.group, ticket.timeline
    trace = timeline.trace
    assert trace is not None, "not traced"
    error = ""
    if ticket.rejected is not None:
        error = f"{code_from_number(ticket.rejected.code).name}: {ticket.rejected.message}"
    elif group.live and not ticket.moved:
        error = "CANCELLED: the client is gone, or its deadline, or the connection to its router"
    scheduled, first_token = group.first_scheduled, timeline.first_token
    prompt = {
        "gen_ai.usage.input_tokens": group.num_prompt_tokens,
        "pagewire.cached_prompt_tokens": group.num_cached_prompt_tokens,
    }
    output = {
        "gen_ai.usage.output_tokens": sum(len(sequence.output_token_ids) for sequence in group.sequences),
        "pagewire.preemptions": group.num_preemptions,
    }
    request_id = {"pagewire.request_id": group.request_id}
    phases: list[tuple[str, float | None, float | None, dict[str, int]]] = [
        ("queue", group.arrival, scheduled, {}),
        ("prefill", scheduled, first_token, prompt),
        ("decode", first_token, None, output),
    ]
    for name, begin, finish, facts in phases:
        if begin is None:
            continue
        if finish is not None:
            tracer.record(name, trace, begin, finish, {**request_id, **facts})
            continue
        # What ended the request ended the phase that it was in, and no other.
        moved = {"pagewire.moved": True} if ticket.moved else {}
        tracer.record(name, trace, begin, end, {**request_id, **facts, **moved}, error)
    for pause in timeline.pauses:
        why = {"pagewire.reason": pause.reason, "pagewire.preempted_by": pause.by}
        tracer.record("preempted", trace, pause.begin, end if pause.end is None else pause.end, {**request_id, **why})
