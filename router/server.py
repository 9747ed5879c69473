"""The public gRPC API: check, tokenize, submit, relay. A TOKEN LEAVES THE SYSTEM HERE."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial

import grpc

from protos import session_pb2
from protos.errors import Refusal, Violation, invalid_argument, taken_over, unavailable
from protos.pagewire.v1 import generation_pb2 as pb
from protos.rpc import PUBLIC_MESSAGE_BYTES
from router.calls import TURNED_AWAY, ClientCall, ClientCalls
from router.check import (
    MAX_REQUEST_ID_BYTES,
    RequestLimits,
    ServedModel,
    check_before_tokenizing,
    check_model,
    check_token_ids,
    check_tokenize,
)
from router.client_stream import writing_to
from router.config import RouterSettings
from router.heartbeats import Heartbeats
from router.limits import Permit, TenantLimits
from router.live_request import LiveRequest
from router.load_reports import LoadMeter
from router.resolve import CheckedRequest, resolve
from router.schedulers import Schedulers
from router.tenants import Tenant, Tenants
from router.tokenizer import ChatTemplateError, Tokenizer

# Longer input is tokenized, decoded or rendered on a thread, off the event loop that all streams share; these sizes
# take 1 ms.
_INLINE_CHARS = 4096
_INLINE_TOKENS = 4096
_INLINE_MESSAGES = 256


class GenerationService:
    """Serves one model.

    Args:
        meter: supplies the trailers of calls; None to send none.
    """

    def __init__(
        self,
        settings: RouterSettings,
        tokenizer: Tokenizer,
        schedulers: Schedulers,
        tenants: Tenants,
        calls: ClientCalls,
        meter: LoadMeter | None,
    ) -> None:
        self.meter = meter
        self._settings = settings
        self._tokenizer = tokenizer
        self._schedulers = schedulers
        self.heartbeats = Heartbeats(schedulers, settings.heartbeat_s)
        self._tenants = tenants
        self._calls = calls
        self._tenant_limits = TenantLimits()
        # By the ids that the scheduler knows; None while a request is being admitted.
        self._live: dict[str, LiveRequest | None] = {}
        self._request_limits = RequestLimits(
            settings.max_prompt_tokens, settings.max_output_tokens, settings.max_n, settings.max_beam_width
        )

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams deltas as tokens are computed."""
        async with (
            self._admitted(request, context) as live,
            writing_to(context, self._settings.write_stall_s) as write,
        ):
            with self.heartbeats.over(live):
                response, last = await live.take()
                response.seed, response.model = live.request.sampling.seed, self._calls.of(context).model
                await _tell_id(live, context)
                await write(response)
                while not last:
                    response, last = await live.take()
                    await write(response)

    async def Complete(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.CompleteResponse:
        """Answers the same request in one message."""
        async with self._admitted(request, context, whole=True) as live:
            outputs = [pb.Output(index=index) for index in range(live.request.n)]
            # Texts grow outside the messages, as in `OutputStream`.
            pieces: list[list[str]] = [[] for _ in outputs]
            prompt_logprobs: list[pb.TokenLogprobs] = []
            last = False
            while not last:
                response, last = await live.take()
                prompt_logprobs += response.prompt_logprobs
                for delta in response.outputs:
                    pieces[delta.index].append(delta.text)
                    outputs[delta.index].MergeFrom(delta)
            for output, texts in zip(outputs, pieces, strict=True):
                output.text = "".join(texts)
            answer = pb.CompleteResponse(
                request_id=response.request_id,
                outputs=outputs,
                usage=response.usage,
                timings=response.timings,
                prompt_logprobs=prompt_logprobs,
            )
            if answer.ByteSize() > PUBLIC_MESSAGE_BYTES:
                too_long = f"the answer has {answer.ByteSize()} bytes, a message at most {PUBLIC_MESSAGE_BYTES}"
                raise invalid_argument([Violation("stop.max_tokens", f"{too_long}: use Generate, or ask for less")])
            await _tell_id(live, context)
            return answer

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        """Token ids as Generate would see them."""
        model = self._model()
        check_model(request.model, model.name)
        check_tokenize(request, model, self._tokenizer.max_token_bytes)
        match request.WhichOneof("prompt"):
            case "text":
                special = request.add_special_tokens or not request.HasField("add_special_tokens")
                token_ids = await self._encode(request.text, add_special_tokens=special)
            case "chat":
                token_ids = await self._encode(await self._render(request.chat), add_special_tokens=False)
            case _:
                raise invalid_argument([Violation("prompt", "is required: set text or chat")])
        return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Text of token ids."""
        model = self._model()
        check_model(request.model, model.name)
        if len(request.token_ids) > model.context_length:
            too_many = f"are {len(request.token_ids)}; at most {model.context_length}, the context length, are taken"
            raise invalid_argument([Violation("token_ids", too_many)])
        if violations := check_token_ids("token_ids", request.token_ids, model.vocabulary_size):
            raise invalid_argument(violations)
        skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
        return pb.DetokenizeResponse(text=await self._decode(request.token_ids, skip_special_tokens=skip))

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        """The served model and its limits."""
        model = self._model()
        check_model(request.model, model.name)
        welcome, tenant = self._welcome(), self._tenants.of(context)
        return pb.GetModelResponse(
            model=model.name,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            dtype=welcome.model.dtype,
            kv_dtype=welcome.model.kv_dtype,
            block_size=welcome.model.block_size,
            num_blocks=welcome.model.num_blocks,
            kv_cache_note=welcome.model.kv_cache_note,
            max_prompt_tokens=model.max_prompt_tokens,
            max_n=model.max_n,
            max_num_batched_tokens=welcome.limits.max_num_batched_tokens,
            max_num_seqs=welcome.limits.max_num_seqs,
            eos_token_ids=model.defaults.eos_token_ids,
            quantization=welcome.model.quantization,
            max_output_tokens=model.max_output_tokens,
            max_beam_width=model.max_beam_width,
            max_message_bytes=self._settings.max_message_bytes,
            max_requests=tenant.max_requests or 0,
            tokens_per_minute=tenant.tokens_per_minute or 0,
        )

    @contextlib.asynccontextmanager
    async def _admitted(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, *, whole: bool = False
    ) -> AsyncIterator[LiveRequest]:
        """Holds a request from its admission to its release, however it ends."""
        live, permit = await self._admit(request, context, whole=whole)
        try:
            yield live
        except BaseException as error:
            self._release(live, permit, error)
            raise
        else:
            self._release(live, permit, None)
        finally:
            if self.meter is not None:
                context.set_trailing_metadata(self.meter.count())

    async def _admit(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, *, whole: bool
    ) -> tuple[LiveRequest, Permit]:
        """Checks, tokenizes and submits a request, which is answered in one message if `whole`."""
        call = self._calls.of(context)
        call.request_id = request.request_id[:MAX_REQUEST_ID_BYTES]
        tenant = self._tenants.of(context)
        model = self._model()
        check_before_tokenizing(request, model, self._tokenizer.max_token_bytes, call.header_id)
        call.model = model.name
        call.operation = "chat" if request.HasField("chat") else "text_completion"
        call.request_id = request.request_id or self._new_id(tenant, call.header_id)
        scoped_id = self._tenants.scoped(tenant, call.request_id)
        held = self._held(scoped_id, request)
        permit = self._tenant_limits.enter(tenant, instead=held is not None)
        self._live.setdefault(scoped_id)
        try:
            checked = await self._resolve(request, call, tenant, model, whole=whole)
            holder = await self._schedulers.who_has(scoped_id) if checked.resume is not None else None
            is_paid = held is not None and _computed(checked) == _computed(held.request)
            if not is_paid:
                self._tenant_limits.charge_prompt(permit, len(checked.prompt_token_ids))
            handle = self._schedulers.new_handle()
            live = LiveRequest(
                handle,
                checked,
                self._tokenizer,
                call.arrival,
                on_stop=lambda stream: self._schedulers.stop_sequence(handle, stream),
                trace=call.trace,
                whole=whole,
                on_id_in_use=None if request.request_id else partial(self._rename, tenant=tenant, call=call),
            )
            self._schedulers.submit(live, context.time_remaining(), holder)
        except BaseException:
            self._tenant_limits.cancel(permit)
            if held is None:  # else the id is another call's
                del self._live[scoped_id]
            raise
        if held is not None:  # its call's connection is dead; the scheduler is about to give the request to this one
            held.fail(taken_over())
            if is_paid:
                live.num_charged_tokens = max(held.num_tokens, held.num_charged_tokens)
        call.live = self._live[scoped_id] = live
        return live, permit

    def _held(self, scoped_id: str, request: pb.GenerateRequest) -> LiveRequest | None:
        """The live request of another call that this one resumes, if any.

        Raises:
            Refusal: ALREADY_EXISTS, another request has this id; RESOURCE_EXHAUSTED, no more may be live.
        """
        held = self._live.get(scoped_id)
        if scoped_id in self._live and not _resumes(request, held):
            message = f"request_id: {request.request_id!r} is in use by a live request; send another or none"
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE", message)
        if len(self._live) >= self._settings.max_live_requests + (held is not None):  # the held request is one of them
            message = f"this router answers {len(self._live)} requests already; retry, or use another"
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS", message, retry_delay_ms=1000)
        return held

    async def _resolve(
        self, request: pb.GenerateRequest, call: ClientCall, tenant: Tenant, model: ServedModel, *, whole: bool
    ) -> CheckedRequest:
        """The request with its prompt's tokens and its defaults, kept apart from those of other tenants."""
        begin = time.monotonic()
        prompt_token_ids, text = await self._prompt(request)
        call.tokenizing = (begin, time.monotonic())
        echo = text if request.output.echo else ""
        checked = resolve(request, call.request_id, prompt_token_ids, echo, model, whole=whole)
        is_shared = self._settings.share_prefix_cache_across_tenants
        return replace(
            checked,
            scoped_id=self._tenants.scoped(tenant, call.request_id),
            cache_salt=checked.cache_salt if is_shared else self._tenants.scoped(tenant, checked.cache_salt),
            tenant=tenant.name,
            tenant_weight=tenant.weight,
        )

    def _release(self, live: LiveRequest, permit: Permit, error: BaseException | None) -> None:
        """Forgets a request that has ended, in whatever way."""
        if self._live.get(live.request.scoped_id) is live:
            del self._live[live.request.scoped_id]
        if isinstance(error, Refusal) and error.code in TURNED_AWAY and live.num_tokens == 0:
            self._tenant_limits.cancel(permit)
        else:
            self._tenant_limits.leave(permit, max(0, live.num_tokens - live.num_charged_tokens))
        self._schedulers.release(live)

    def _new_id(self, tenant: Tenant, header_id: str) -> str:
        """An id for a request without one: its x-request-id, made unique if another request has it, or a random one."""
        if not header_id:
            return f"req-{secrets.token_hex(8)}"
        is_taken = self._tenants.scoped(tenant, header_id) in self._live
        return _suffixed(header_id) if is_taken else header_id

    def _rename(self, live: LiveRequest, tenant: Tenant, call: ClientCall) -> None:
        """Gives a request that came without an id another one, since a request at another router has this one."""
        if self._live.get(live.request.scoped_id) is live:
            del self._live[live.request.scoped_id]
        call.request_id = request_id = _suffixed(call.header_id)
        scoped_id = self._tenants.scoped(tenant, request_id)
        live.request = replace(live.request, request_id=request_id, scoped_id=scoped_id)
        self._live[scoped_id] = live

    async def _prompt(self, request: pb.GenerateRequest) -> tuple[list[int], str]:
        """Token ids of the prompt, and its text."""
        match request.WhichOneof("prompt"):
            case "text":
                return await self._encode(request.text, add_special_tokens=True), request.text
            case "chat":
                text = await self._render(request.chat)
                return await self._encode(text, add_special_tokens=False), text
        token_ids = list(request.token_ids.ids)
        return token_ids, await self._decode(token_ids) if request.output.echo else ""

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= _INLINE_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def _decode(self, token_ids: Sequence[int], **options: bool) -> str:
        if len(token_ids) <= _INLINE_TOKENS:
            return self._tokenizer.decode(token_ids, **options)
        return await asyncio.to_thread(self._tokenizer.decode, token_ids, **options)

    async def _render(self, chat: pb.Chat) -> str:
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        opens_turn = chat.add_generation_prompt or not chat.HasField("add_generation_prompt")
        render = partial(self._tokenizer.render, messages, add_generation_prompt=opens_turn)
        try:
            return render() if len(messages) <= _INLINE_MESSAGES else await asyncio.to_thread(render)
        except ChatTemplateError as error:
            raise invalid_argument([Violation("chat", str(error))]) from error

    def _welcome(self) -> session_pb2.Welcome:
        if self._schedulers.welcome is None:
            message = (
                "no scheduler has answered yet: the model is still loading, or this router's log says why not; retry"
            )
            raise unavailable("NO_SCHEDULER", message)
        return self._schedulers.welcome

    def _model(self) -> ServedModel:
        welcome = self._welcome()
        model = welcome.model
        return ServedModel(
            name=model.model,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            max_num_seqs=welcome.limits.max_num_seqs,
            defaults=self._tokenizer.defaults,
            limits=self._request_limits,
        )


def _resumes(request: pb.GenerateRequest, held: LiveRequest | None) -> bool:
    """Whether a request resumes one that another call has; only the client that began that one knows its seed."""
    return held is not None and request.HasField("resume") and held.request.sampling.seed == request.resume.seed


def _computed(request: CheckedRequest) -> tuple[object, ...]:
    """What must be equal for the scheduler to continue one call's request for another call (its `_adopt`)."""
    return request.prompt_token_ids, request.sampling, request.num_sequences, request.max_tokens


def _suffixed(header_id: str) -> str:
    return f"{header_id or 'req'}-{secrets.token_hex(4)}"


async def _tell_id(live: LiveRequest, context: grpc.aio.ServicerContext) -> None:
    """Sends the request's id in a header: with the first answer, since a call cannot be retried after its headers."""
    await context.send_initial_metadata((("x-request-id", live.request.request_id),))
