"""Delivers a scheduler's StepOutputs to the requests whose tokens they hold."""

import logging
from collections.abc import Mapping, Sequence

import grpc

from protos import session_pb2 as pb
from protos.columns import unpack, unpack_floats
from protos.errors import Refusal
from protos.logprobs import LogprobReader, Logprobs
from router.live_request import LiveRequest

log = logging.getLogger(__name__)


def deliver(outputs: pb.StepOutputs, live: Mapping[int, LiveRequest]) -> None:
    """Hands each request in `live` (by handle) its tokens and how its sequences ended; skips other requests."""
    if outputs.prompt_handles:
        _deliver_prompt_logprobs(outputs, live)
    ends = {(end.handle, end.sequence_index): end for end in outputs.finished}
    token_ids = unpack(outputs.token_ids).tolist()
    logprobs = _read_logprobs(outputs) if outputs.logprob_rows else {}
    position = 0
    columns = (outputs.handles, outputs.sequence_indexes, outputs.first_indexes, outputs.counts)
    token_logprobs = unpack_floats(outputs.token_logprobs).tolist()
    rows = zip(*map(unpack, columns), strict=True)
    for place, (handle, index, first_index, count) in enumerate(rows):
        request, behind = live.get(handle), position + count
        if request is not None:
            tokens, values = token_ids[position:behind], token_logprobs[position:behind]
            _push(request, index, first_index, tokens, ends.pop((handle, index), None), logprobs.get(place), values)
        position = behind
    for (handle, index), end in ends.items():
        request = live.get(handle)
        if request is not None:
            _push(request, index, request.streams[index].num_received, [], end)


def _deliver_prompt_logprobs(outputs: pb.StepOutputs, live: Mapping[int, LiveRequest]) -> None:
    reader = LogprobReader(outputs.prompt_logprobs)
    columns = (outputs.prompt_handles, outputs.prompt_counts, outputs.prompt_num_tops)
    for handle, count, num_top in zip(*map(unpack, columns), strict=True):
        logprobs = reader.take(count, num_top)
        if handle in live:
            live[handle].push_prompt_logprobs(logprobs)


def _read_logprobs(outputs: pb.StepOutputs) -> dict[int, Logprobs]:
    """Log-probabilities of the rows whose requests asked for them, by row."""
    reader, counts = LogprobReader(outputs.logprobs), unpack(outputs.counts)
    rows = zip(unpack(outputs.logprob_rows), unpack(outputs.logprob_num_tops), strict=True)
    return {place: reader.take(counts[place], num_top) for place, num_top in rows}


def _push(
    request: LiveRequest,
    index: int,
    first_index: int,
    token_ids: list[int],
    end: pb.Finished | None,
    logprobs: Logprobs | None = None,
    own_logprobs: Sequence[float] = (),
) -> None:
    """Hands tokens to their request; a bug in one request's text ends that request alone."""
    try:
        request.push(index, first_index, token_ids, end, logprobs, own_logprobs)
    except Exception:
        log.exception("bug", extra={"request_id": request.request.request_id})
        request.fail(
            Refusal(grpc.StatusCode.INTERNAL, "BUG", "the answer could not be written; the router's log says why")
        )
