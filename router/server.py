"""The public gRPC API: check, tokenize, submit, relay. A TOKEN LEAVES THE SYSTEM HERE."""

import asyncio
import logging
import secrets
import time

import grpc

from protos import session_pb2
from protos.errors import Refusal, Violation, invalid_argument, unavailable
from protos.pagewire.v1 import generation_pb2 as pb
from router.check import ServedModel, check_before_tokenizing, check_length, check_model, check_token_ids, resolve
from router.client_stream import writing_to
from router.config import RouterSettings
from router.live_request import LiveRequest
from router.load_reports import LoadMeter
from router.schedulers import Schedulers
from router.tokenizer import ChatTemplateError, Tokenizer

# Longer texts are tokenized and decoded beside the event loop, which all streams share: this takes about 1 ms.
_INLINE_CHARS = 4096
log = logging.getLogger(__name__)


class GenerationService:
    """Serves one model.

    Args:
        meter: gives the trailers of calls; None for none.
    """

    def __init__(
        self, settings: RouterSettings, tokenizer: Tokenizer, schedulers: Schedulers, meter: LoadMeter | None
    ) -> None:
        self.meter = meter
        self._settings = settings
        self._tokenizer = tokenizer
        self._schedulers = schedulers
        self._live_ids: set[str] = set()

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams deltas as tokens are computed."""
        async with (
            _Admission(self, request, context) as live,
            writing_to(context, self._settings.write_stall_s) as write,
        ):
            last = False
            while not last:
                response, last = await live.take()
                await write(response)

    async def Complete(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.CompleteResponse:
        """Answers the same request whole."""
        async with _Admission(self, request, context) as live:
            outputs = [pb.Output(index=index) for index in range(live.request.n)]
            prompt_logprobs: list[pb.TokenLogprobs] = []
            last = False
            while not last:
                response, last = await live.take()
                prompt_logprobs += response.prompt_logprobs
                for delta in response.outputs:
                    text = outputs[delta.index].text + delta.text
                    outputs[delta.index].MergeFrom(delta)  # appends ids, but replaces text
                    outputs[delta.index].text = text
            return pb.CompleteResponse(
                request_id=response.request_id,
                outputs=outputs,
                usage=response.usage,
                timings=response.timings,
                prompt_logprobs=prompt_logprobs,
            )

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        """Token ids as Generate would see them."""
        model = self._model()
        check_model(request.model, model.name)
        check_length(request, model, self._tokenizer.max_token_bytes)
        match request.WhichOneof("prompt"):
            case "text":
                special = request.add_special_tokens or not request.HasField("add_special_tokens")
                token_ids = await self._encode(request.text, add_special_tokens=special)
            case "chat":
                token_ids = await self._encode(self._render(request.chat), add_special_tokens=False)
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
        return pb.DetokenizeResponse(text=self._tokenizer.decode(request.token_ids, skip_special_tokens=skip))

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        """What is served, and within which limits."""
        model = self._model()
        check_model(request.model, model.name)
        welcome = self._welcome()
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
        )

    async def admit(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> LiveRequest:
        """Checks, tokenizes and submits a request."""
        arrival = time.monotonic()
        model = self._model()
        check_before_tokenizing(request, model, self._tokenizer.max_token_bytes)
        request_id = request.request_id or f"req-{secrets.token_hex(8)}"
        if request_id in self._live_ids:
            message = f"request_id: {request_id!r} is in use by a live request; send another or none"
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE", message)
        if len(self._live_ids) >= self._settings.max_live_requests:
            message = f"this router answers {len(self._live_ids)} requests already; retry, or use another"
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS", message, retry_delay_ms=1000)
        self._live_ids.add(request_id)
        try:
            prompt_token_ids, text = await self._prompt(request)
            checked = resolve(request, request_id, prompt_token_ids, text if request.output.echo else "", model)
            handle = self._schedulers.new_handle()
            live = LiveRequest(
                handle,
                checked,
                self._tokenizer,
                arrival,
                on_stop=lambda stream: self._schedulers.stop_sequence(handle, stream),
            )
            self._schedulers.submit(live, context.time_remaining())
        except BaseException:
            self._live_ids.discard(request_id)
            raise
        return live

    def release(self, live: LiveRequest, outcome: str) -> None:
        """Forgets a request that has ended, one way or another."""
        self._live_ids.discard(live.request.request_id)
        self._schedulers.release(live)
        facts = {
            "request_id": live.request.request_id,
            "outcome": outcome,
            "prompt_tokens": len(live.request.prompt_token_ids),
            "output_tokens": live.num_tokens,
            "ttft_ms": round(live.ttft_ms, 1),
            "total_ms": round(live.total_ms, 1),
        }
        log.info("request", extra=facts)

    async def _prompt(self, request: pb.GenerateRequest) -> tuple[list[int], str]:
        """Token ids of the prompt, and its text."""
        match request.WhichOneof("prompt"):
            case "text":
                return await self._encode(request.text, add_special_tokens=True), request.text
            case "chat":
                text = self._render(request.chat)
                return await self._encode(text, add_special_tokens=False), text
        token_ids = list(request.token_ids.ids)
        return token_ids, self._tokenizer.decode(token_ids) if request.output.echo else ""

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= _INLINE_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def _render(self, chat: pb.Chat) -> str:
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        opens_turn = chat.add_generation_prompt or not chat.HasField("add_generation_prompt")
        try:
            return self._tokenizer.render(messages, add_generation_prompt=opens_turn)
        except ChatTemplateError as error:
            raise invalid_argument([Violation("chat", str(error))]) from error

    def _welcome(self) -> session_pb2.Welcome:
        if self._schedulers.welcome is None:
            raise unavailable("NO_SCHEDULER", "the model is still loading; retry")
        return self._schedulers.welcome

    def _model(self) -> ServedModel:
        welcome = self._welcome()
        model = welcome.model
        return ServedModel(
            name=model.model,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            max_n=welcome.limits.max_num_seqs,
            defaults=self._tokenizer.defaults,
        )


class _Admission:
    """A request from its admission to its release, however it ends."""

    def __init__(
        self, service: GenerationService, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        self._service = service
        self._request = request
        self._context = context

    async def __aenter__(self) -> LiveRequest:
        self._live = await self._service.admit(self._request, self._context)
        return self._live

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        match error:
            case None:
                outcome = "OK"
            case Refusal():
                outcome = error.code.name
            case asyncio.CancelledError():
                outcome = "CANCELLED"
            case _:
                outcome = "INTERNAL"
        self._service.release(self._live, outcome)
        if self._service.meter is not None:
            self._context.set_trailing_metadata(self._service.meter.count())
