"""A request being answered: its sequences' text as it grows, and the mailbox that its stream is written from.

Output that the writer has not taken is merged into one delta per sequence, so a slow client costs at most the length of
its own output, and no other client's time. Log-probabilities, up to a hundred times as long as their text, are sent in
as many messages as their size needs, and a client that leaves too many unread is given up.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import grpc

from protos import session_pb2
from protos.columns import pack
from protos.errors import Refusal
from protos.logprobs import Logprobs
from protos.pagewire.v1 import generation_pb2 as pb
from protos.trace_context import TraceContext
from router.detokenizer import Detokenizer, Match, StopStrings
from router.logprobs import of_prompt, token_logprobs
from router.received import Received, received_of
from router.resolve import MAX_LOGPROBS_TOLD, CheckedRequest
from router.tokenizer import Tokenizer

# For all sequences together: about 1 MB; clients take messages of up to 4 MiB by default.
_LOGPROBS_OF_A_MESSAGE = 50_000
_MAX_FULL_DELTAS = MAX_LOGPROBS_TOLD // _LOGPROBS_OF_A_MESSAGE

_FINISH_REASON = {
    session_pb2.FINISH_STATUS_STOPPED: pb.FINISH_REASON_STOP,
    session_pb2.FINISH_STATUS_LENGTH_CAPPED: pb.FINISH_REASON_LENGTH,
    session_pb2.FINISH_STATUS_ABORTED: pb.FINISH_REASON_ABORTED,
    session_pb2.FINISH_STATUS_IGNORED: pb.FINISH_REASON_IGNORED,
}


class OutputStream:
    """One sequence: tokens in, text out, with the delta that the client has not received yet.

    Attributes:
        num_tokens: tokens received that count: none after the last one of a stop string.
        ended: whether the scheduler has reported its end.
        cumulative_logprob: of the tokens that count.
        finish_reason: why it ended, when it has.
    """

    def __init__(self, index: int, request: CheckedRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.ended = False
        self.cumulative_logprob = 0.0
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED
        # For a scheduler that takes over from another one.
        self._token_ids = array("i")
        self._match: Match | None = None
        self._request = request
        self._detokenizer = Detokenizer(tokenizer.backend, request.prompt_token_ids)
        self._stops = StopStrings(request.stop_strings, include=request.include_stop_string)
        # What the client has not received yet: full deltas, and the one that grows.
        self._full: deque[pb.Output] = deque()
        self._delta = pb.Output(index=index)
        self._room = self._max_logprobs = _LOGPROBS_OF_A_MESSAGE // request.num_sequences
        # The delta's text. Appending to it in the message would leave a copy of it behind each time (arenas).
        self._pieces = [request.echo]
        self._has_delta = bool(request.echo)

    @property
    def num_received(self) -> int:
        """Tokens that came from the scheduler."""
        return len(self._token_ids)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; what the scheduler still sends is overrun."""
        return self._match is not None

    @property
    def has_delta(self) -> bool:
        """Whether there is something that the client has not received."""
        return self._has_delta or bool(self._full)

    @property
    def is_far_ahead(self) -> bool:
        """Whether the client has left more unread than is kept for it."""
        return len(self._full) > _MAX_FULL_DELTAS

    @property
    def progress(self) -> session_pb2.Progress:
        """What it has output so far."""
        if self.ended:
            return session_pb2.Progress(ended=True)
        return session_pb2.Progress(token_ids=pack(self._token_ids), cumulative_logprob=self.cumulative_logprob)

    def lose_overrun(self) -> None:
        """Drops the tokens after a stop string: their scheduler is gone, and another one will not have them."""
        del self._token_ids[self.num_tokens :]

    def push(
        self,
        token_ids: Sequence[int],
        end: session_pb2.Finished | None,
        logprobs: Logprobs | None = None,
        own_logprobs: Sequence[float] = (),
    ) -> None:
        """Takes tokens in order; with `end` they are the last ones.

        Args:
            token_ids: the tokens.
            end: how the sequence has ended.
            logprobs: what the client wants to know of each.
            own_logprobs: the log-probability of each, for their sum; 0 for a beam, whose sum comes with its end.
        """
        self._token_ids.extend(token_ids)
        hidden = end is not None and end.HasField("stop_token_id") and not self._request.include_stop_string
        for place, token_id in enumerate(token_ids):
            if self.stopped:
                break
            self.num_tokens += 1
            self.cumulative_logprob += own_logprobs[place] if own_logprobs else 0.0
            if self._request.with_token_ids:
                self._delta.token_ids.append(token_id)
                self._has_delta = True
            if logprobs is not None:
                self._delta.logprobs.append(token_logprobs(token_id, logprobs, place))
                self._has_delta = True
                self._room -= 1 + logprobs.num_top
            if hidden and place == len(token_ids) - 1:
                break
            self._push_text(self._detokenizer.push(token_id))
            if self._room <= 0:
                self._full.append(self._close_delta())
        if end is not None:
            self._end(end)

    def leave_out(self, received: Received) -> None:
        """Drops full deltas, as far as the client already has them."""
        while self._full and not received.cut(self._full[0]):
            self._full.popleft()

    def take_delta(self) -> pb.Output | None:
        """What came since the last call, or as much of it as goes into one message; None if nothing came."""
        if self._full:
            return self._full.popleft()
        return self._close_delta() if self._has_delta else None

    def _close_delta(self) -> pb.Output:
        delta, self._delta, self._has_delta = self._delta, pb.Output(index=self.index), False
        delta.text = "".join(self._pieces)
        self._pieces.clear()
        self._room = self._max_logprobs
        return delta

    def _push_text(self, piece: str) -> None:
        shown = self._stops.push(piece, counts=self.num_tokens > self._request.min_tokens)
        if isinstance(shown, Match):
            self._match = shown
            piece = shown.text
        else:
            piece = shown
        if piece:
            self._pieces.append(piece)
            self._has_delta = True

    def _end(self, end: session_pb2.Finished) -> None:
        self.ended = True
        if not self.stopped:  # else it may have ended before the scheduler was told, its sum with the overrun's
            self.cumulative_logprob = end.cumulative_logprob
            self._push_text(self._detokenizer.flush())
        self._has_delta = True
        self._delta.cumulative_logprob = self.cumulative_logprob
        self.finish_reason = pb.FINISH_REASON_STOP if self.stopped else _FINISH_REASON[end.status]
        self._delta.finish_reason = self.finish_reason
        if self._match is not None:
            self._delta.stop_match.string = self._match.stop
            return
        self._pieces.append(self._stops.flush())
        self._delta.finish_message = end.message
        if end.HasField("stop_token_id"):
            self._delta.stop_match.token_id = end.stop_token_id


class LiveRequest:
    """What the router knows of a request between its submission and its last message.

    When more sequences are sampled than returned (best_of), all are held back until the last has ended.

    Args:
        handle: its number on the session.
        on_stop: called with a sequence in whose text a stop string was found.
        on_id_in_use: gives the request another id; None if its client chose the id.
        trace: the span that the request is part of, for the scheduler.
        whole: whether the client gets one answer, and nothing before it.

    Attributes:
        num_taken: messages taken, heartbeats not counted.
        deadline: when its client stops waiting, by time.monotonic; None for never.
        stats: what the scheduler reported with the last end of a sequence; None before the first.
        accepted: whether a scheduler has taken it.
        refused_by: addresses of the schedulers that would not take it.
        num_charged_tokens: output tokens that the tenant was already charged for by earlier calls with this request.
    """

    def __init__(
        self,
        handle: int,
        request: CheckedRequest,
        tokenizer: Tokenizer,
        arrival: float,
        on_stop: Callable[[OutputStream], None],
        clock: Callable[[], float] = time.monotonic,
        trace: TraceContext | None = None,
        *,
        whole: bool = False,
        on_id_in_use: Callable[["LiveRequest"], None] | None = None,
    ) -> None:
        self.handle = handle
        self.request = request
        self.streams = [OutputStream(index, request, tokenizer) for index in range(request.num_sequences)]
        self.finished = False
        self.deadline: float | None = None
        self.ttft_ms = 0.0
        self.num_taken = 0
        self.stats: session_pb2.RequestStats | None = None
        self.trace = trace
        self.accepted = False
        self.refused_by: set[str] = set()
        self.num_charged_tokens = 0
        # `SchedulerLink.life` of those lost without a token in between, and how many tokens there were then.
        self._lost: set[tuple[str, int]] = set()
        self._num_tokens_when_lost = 0
        self._arrival = arrival
        self._on_stop = on_stop
        self._on_id_in_use = on_id_in_use
        self._whole = whole
        self._clock = clock
        self._refusal: Refusal | None = None
        self._prompt_logprobs: Logprobs | None = None
        # Whether the client has been told its id, in a message.
        self._is_named = False
        # The prompt's log-probabilities as messages; None until they are made, empty once they are sent.
        self._prompt_messages: list[pb.TokenLogprobs] | None = None
        # What a client that resumes already has, by the index of the output.
        self._received = {} if request.resume is None else received_of(request.resume)
        num_echoed = len(request.echo.encode())
        if any(row.ended or row.num_tokens or row.text_bytes > num_echoed for row in self._received.values()):
            self._prompt_messages = []  # they came with the first tokens
        self._heartbeat: pb.Heartbeat | None = None
        self._filled = asyncio.Event()

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, of all its sequences."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def finish_reasons(self) -> list[pb.FinishReason]:
        """Why the outputs ended, in the client's order; unspecified for those that have not."""
        return [stream.finish_reason for stream in self._answered()]

    @property
    def has_told(self) -> bool:
        """Whether the client has a token, or is about to get one."""
        return self.num_tokens > 0 and not self._holds_back and not self._whole

    @property
    def over(self) -> bool:
        """Whether no scheduler has anything left to do for it."""
        return self.finished or self._refusal is not None

    @property
    def total_ms(self) -> float:
        """Time since arrival."""
        return (self._clock() - self._arrival) * 1e3

    def accept(self) -> None:
        """Notes that a scheduler has taken it: from now on the client may get output, its echo first."""
        self.accepted = True
        if self.request.echo and not self._holds_back:
            self._filled.set()

    def push_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Takes those of all prompt tokens but the first, to go with the first delta; a second call does nothing."""
        if self._prompt_logprobs is None:
            self._prompt_logprobs = logprobs

    def push(
        self,
        sequence_index: int,
        first_index: int,
        token_ids: Sequence[int],
        end: session_pb2.Finished | None,
        logprobs: Logprobs | None = None,
        own_logprobs: Sequence[float] = (),
    ) -> None:
        """Takes tokens of a sequence, which begin at `first_index` in its output; skips those that are already here."""
        stream = self.streams[sequence_index]
        if stream.ended or self._refusal is not None:  # sent again after a lost connection, or too late
            return None
        if first_index > stream.num_received:
            return self.fail(Refusal(grpc.StatusCode.INTERNAL, "BUG", "tokens were lost between scheduler and router"))
        if not self.accepted:
            self.accept()
        if token_ids and not self.ttft_ms:
            self.ttft_ms = self.total_ms
        was_stopped = stream.stopped
        num_known = stream.num_received - first_index
        if logprobs is not None:
            logprobs = logprobs.part(num_known)
        stream.push(token_ids[num_known:], end, logprobs, own_logprobs[num_known:])
        if stream.stopped and not was_stopped and not stream.ended:
            self._on_stop(stream)
        if end is not None:
            self.stats = end.stats
            self.finished = all(stream.ended for stream in self.streams)
        if sequence_index in self._received and self.request.num_sequences == self.request.n:
            stream.leave_out(self._received[sequence_index])
        if stream.has_delta and not self._holds_back:
            self._filled.set()
            if stream.is_far_ahead and not self.finished:
                text = f"more than {MAX_LOGPROBS_TOLD} log-probabilities are unread: read faster, or ask for fewer"
                self.fail(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_STALLED", text))
        return None

    def fail(self, refusal: Refusal) -> None:
        """Ends the request with an error, after what is already in the mailbox."""
        self._refusal = refusal
        self._filled.set()

    def beat(self, heartbeat: pb.Heartbeat) -> None:
        """Sends a sign of life, unless there is output to send."""
        self._heartbeat = heartbeat
        self._filled.set()

    def lose(self, life: tuple[str, int]) -> int:
        """Notes that its scheduler is lost, or out of reach; returns how many were without a token in between.

        One process of a scheduler counts once: a connection that breaks again and again is no crash.
        """
        if self.num_tokens > self._num_tokens_when_lost:
            self._num_tokens_when_lost = self.num_tokens
            self._lost.clear()
        self._lost.add(life)
        return len(self._lost)

    def spare(self, lives: AbstractSet[tuple[str, int]]) -> None:
        """Takes back the loss of these schedulers: they are alive, and were only out of reach."""
        self._lost -= lives

    def rename(self) -> bool:
        """Takes another id, since this one is in use elsewhere; False if its client chose it, or was told it."""
        if self._on_id_in_use is None or self._is_named:
            return False
        self._on_id_in_use(self)
        return True

    def continuation(self) -> session_pb2.Continuation:
        """What a scheduler that takes it over from another one has to know."""
        for stream in self.streams:
            stream.lose_overrun()
        progress = [] if self.request.beam_search is not None else [stream.progress for stream in self.streams]
        return session_pb2.Continuation(progress=progress, waited_ms=int(self.total_ms))

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities have come."""
        return self._prompt_logprobs is not None

    async def take(self) -> tuple[pb.GenerateResponse, bool]:
        """The next message to the client as soon as there is one, and whether it is the last.

        Raises:
            Refusal: the request failed, and all text before has been taken.
        """
        while True:
            await self._filled.wait()
            if self._prompt_logprobs is not None and self._prompt_messages is None:
                self._prompt_messages = await of_prompt(self.request.prompt_token_ids, self._prompt_logprobs)
            self._filled.clear()
            streams = self._answered()
            outputs = self._take_deltas(streams)
            has_more = any(stream.has_delta for stream in streams)
            if self._refusal is not None or has_more:
                self._filled.set()
            if self._refusal is not None and not (outputs and self.accepted):  # an echo alone is no answer
                raise self._refusal
            heartbeat, self._heartbeat = self._heartbeat, None
            self._is_named = True
            is_last = self.finished and not has_more
            if outputs or is_last:  # a client that resumes may lack only the last message
                self.num_taken += 1
                response = pb.GenerateResponse(request_id=self.request.request_id, outputs=outputs)
                if self._prompt_messages:
                    response.prompt_logprobs.extend(self._prompt_messages)
                    self._prompt_messages = []
                if is_last:
                    self._conclude(response)
                return response, is_last
            if heartbeat is not None:
                return pb.GenerateResponse(request_id=self.request.request_id, heartbeat=heartbeat), False

    @property
    def _holds_back(self) -> bool:
        return self.request.num_sequences > self.request.n and not self.finished

    def _answered(self) -> Sequence[OutputStream]:
        """The sequences that the client gets, in its order; none until that is known."""
        if self._holds_back:
            return []
        if self.request.num_sequences == self.request.n:
            return self.streams
        ranked = sorted(self.streams, key=lambda stream: stream.cumulative_logprob, reverse=True)  # ties by index
        return ranked[: self.request.n]

    def _take_deltas(self, streams: Sequence[OutputStream]) -> list[pb.Output]:
        """The delta of each, without what the client already has."""
        outputs = []
        for index, stream in enumerate(streams):
            delta = stream.take_delta()
            if delta is not None and (index not in self._received or self._received[index].cut(delta)):
                delta.index = index
                outputs.append(delta)
        return outputs

    def _conclude(self, response: pb.GenerateResponse) -> None:
        stats = self.stats
        assert stats is not None, "finished, and the scheduler has told of no end"
        response.usage.prompt_tokens = len(self.request.prompt_token_ids)
        response.usage.cached_prompt_tokens = stats.num_cached_prompt_tokens
        response.usage.completion_tokens = self.num_tokens
        response.timings.queue_ms = stats.queue_ms
        response.timings.ttft_ms = self.ttft_ms
        response.timings.total_ms = self.total_ms
        response.timings.preemptions = stats.num_preemptions
