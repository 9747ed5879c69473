"""The Python client, sync and asyncio: one channel to a router, typed results, named errors, streams that cancel.

    with Client() as client:
        print(client.generate("The capital of France is", max_tokens=8, temperature=0).text)
        with client.stream([{"role": "user", "content": "Tell me a story."}], max_tokens=200) as story:
            for delta in story:
                print(delta.text, end="", flush=True)
        print(story.completion.timings)

The options are listed in `pagewire.request`, the results in `pagewire.results`, the errors in `pagewire.errors`.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from pagewire import results
from pagewire.access import DEFAULT_TARGET, OPEN, Access
from pagewire.errors import RequestError, from_rpc_error, named
from pagewire.request import (
    Message,
    Options,
    Prompt,
    as_messages,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from pagewire.results import Completion, Delta, Model
from pagewire.resumption import Attempts, Connection, Resumption
from protos.errors import Refusal
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import PUBLIC_MESSAGE_BYTES, options_towards

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", PUBLIC_MESSAGE_BYTES),
    ("grpc.max_send_message_length", PUBLIC_MESSAGE_BYTES),
    # So that a stream that waits for a server notices if the server has vanished without closing the connection.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A restarted server is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A proxy named in the environment is meant for the outside world.
    ("grpc.enable_http_proxy", 0),
]

Response = TypeVar("Response")
Metadata = tuple[tuple[str, str], ...]
_END: Any = grpc.aio.EOF


class Stream:
    """Deltas as they arrive. Closing it, leaving its `with` block, or dropping it cancels a request that still runs.

    A stream that breaks off resumes by itself, at the same server once it is back, or at another one (`Resumption`).
    """

    def __init__(self, start: Callable[..., Any], call: Any, resumption: Resumption) -> None:
        self._start = start
        self._call = call
        self._resumption = resumption
        self._pending: deque[Delta] = deque()
        self._closed = threading.Event()

    @property
    def completion(self) -> Completion:
        """The answer so far; complete, with usage and timings, once the stream has ended."""
        return self._resumption.transcript.completion()

    def close(self) -> None:
        """Cancels the request if it still runs; the stream yields nothing more."""
        self._closed.set()
        self._call.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while not self._closed.is_set():
            if self._pending:
                return self._pending.popleft()
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                self._resume(from_rpc_error(error))
            else:
                self._pending.extend(self._resumption.add(response))
        raise StopIteration

    def _resume(self, error: RequestError) -> None:
        if self._resumption.is_over_after(error):
            self._closed.set()
        if self._closed.is_set():  # or closed meanwhile by another thread
            return
        if self._closed.wait(self._resumption.delay_after(error)):
            return
        try:
            self._call = self._start(self._resumption.request(), timeout=self._resumption.timeout)
        except ValueError:  # the channel was closed
            raise error from None
        if self._closed.is_set():  # meanwhile, by another thread, which cancelled the previous call
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncStream:
    """Deltas as they arrive. `aclose()`, leaving the `async with` block, or dropping it cancels a running request.

    A stream that breaks off resumes by itself, as a `Stream` does.
    """

    def __init__(self, start: Callable[..., Any], call: Any, resumption: Resumption) -> None:
        self._start = start
        self._call = call
        self._resumption = resumption
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Delta] = deque()
        self._closed = False

    @property
    def completion(self) -> Completion:
        """The answer so far; complete, with usage and timings, once the stream has ended."""
        return self._resumption.transcript.completion()

    async def aclose(self) -> None:
        """Cancels the request if it still runs; the stream yields nothing more."""
        self._closed = True
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._closed:
            if self._pending:
                return self._pending.popleft()
            try:
                response = await _answer(self._call.read())
            except RequestError as error:
                await self._resume(error)
                continue
            if response is _END:
                break
            self._pending.extend(self._resumption.add(response))
        raise StopAsyncIteration

    async def _resume(self, error: RequestError) -> None:
        if self._resumption.is_over_after(error):
            self._closed = True
        if self._closed:  # or closed meanwhile by another task
            return
        await asyncio.sleep(self._resumption.delay_after(error))
        if self._closed:
            return
        try:
            self._call = self._start(self._resumption.request(), timeout=self._resumption.timeout)
        except grpc.aio.UsageError:  # the channel was closed
            raise error from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # gRPC never collects, and so never cancels, a call to which no reference is left (grpc#43462). Garbage
        # collection may run on any thread; the call belongs to the loop's thread.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)


class Client:
    """A connection to a Pagewire server; safe to share between threads. `timeout` is in seconds, None for no limit.

    `access` holds what a server may require: `Client("host:443", Access(tls=True, token="..."))`.

    Every method raises the errors of `pagewire.errors`. If the server goes away, and it or another one at the same
    target is there within seconds, that costs only a pause: streams resume, and unanswered calls are made again.
    """

    def __init__(self, target: str = DEFAULT_TARGET, access: Access = OPEN) -> None:
        self.target = target
        self._channel = access.channel(target, [*CHANNEL_OPTIONS, *options_towards(target)])
        self._metadata = access.metadata
        self._connection = Connection()
        self._stub = GenerationServiceStub(self._channel)

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer to a text, to token ids, or to chat messages."""
        return results.completion(self._call(self._stub.Complete, generate_request(prompt, options), timeout))

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Stream:
        """The same answer as it is generated. A refusal by the server is raised when the first delta is read."""
        request, start = generate_request(prompt, options), partial(self._stub.Generate, metadata=self._metadata)
        resumption = Resumption(request, timeout, self._connection)
        return Stream(start, start(request, timeout=resumption.timeout), resumption)

    def chat(
        self, messages: str | Sequence[Message], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The assistant's answer to a conversation, or to one user turn given as a str."""
        return self.generate(as_messages(messages), timeout=timeout, **options)

    def stream_chat(
        self, messages: str | Sequence[Message], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Stream:
        """The same answer as it is generated."""
        return self.stream(as_messages(messages), timeout=timeout, **options)

    def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids that `generate` would see for a text or for chat messages."""
        request = tokenize_request(prompt, add_special_tokens)
        return list(self._call(self._stub.Tokenize, request, timeout).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout: float | None = None
    ) -> str:
        """The text of token ids."""
        request = detokenize_request(token_ids, skip_special_tokens)
        return self._call(self._stub.Detokenize, request, timeout).text

    def model(self, *, timeout: float | None = None) -> Model:
        """The served model and its limits."""
        return results.model(self._call(self._stub.GetModel, pb.GetModelRequest(), timeout))

    def _call(self, method: Callable[..., Response], request: object, timeout: float | None) -> Response:
        """The one answer to a request, which is sent again if the server goes away."""
        attempts = Attempts(timeout, self._connection)
        while True:
            try:
                answer = method(request, timeout=attempts.timeout, metadata=self._metadata)
            except grpc.RpcError as error:
                delay_s = attempts.delay_after(from_rpc_error(error))
            except ValueError as closed:  # the channel was closed
                raise attempts.broken_by or closed from None
            else:
                self._connection.was_up = True
                return answer
            time.sleep(delay_s)

    def close(self) -> None:
        """Closes the connection; live streams are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The same as `Client`, for asyncio; create it inside the loop that uses it. Cancelling a task cancels its call."""

    def __init__(self, target: str = DEFAULT_TARGET, access: Access = OPEN) -> None:
        self.target = target
        self._channel = access.aio_channel(target, [*CHANNEL_OPTIONS, *options_towards(target)])
        self._metadata = access.metadata
        self._connection = Connection()
        self._stub = GenerationServiceStub(self._channel)

    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer to a text, to token ids, or to chat messages."""
        return results.completion(await self._call(self._stub.Complete, generate_request(prompt, options), timeout))

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> AsyncStream:
        """The same answer as it is generated. A refusal by the server is raised when the first delta is read."""
        request, start = generate_request(prompt, options), partial(self._stub.Generate, metadata=self._metadata)
        resumption = Resumption(request, timeout, self._connection)
        return AsyncStream(start, start(request, timeout=resumption.timeout), resumption)

    async def chat(
        self, messages: str | Sequence[Message], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The assistant's answer to a conversation, or to one user turn given as a str."""
        return await self.generate(as_messages(messages), timeout=timeout, **options)

    def stream_chat(
        self, messages: str | Sequence[Message], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """The same answer as it is generated."""
        return self.stream(as_messages(messages), timeout=timeout, **options)

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids that `generate` would see for a text or for chat messages."""
        request = tokenize_request(prompt, add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout: float | None = None
    ) -> str:
        """The text of token ids."""
        request = detokenize_request(token_ids, skip_special_tokens)
        return (await self._call(self._stub.Detokenize, request, timeout)).text

    async def model(self, *, timeout: float | None = None) -> Model:
        """The served model and its limits."""
        return results.model(await self._call(self._stub.GetModel, pb.GetModelRequest(), timeout))

    async def _call(
        self, method: Callable[..., Awaitable[Response]], request: object, timeout: float | None
    ) -> Response:
        """The one answer to a request, which is sent again if the server goes away."""
        attempts = Attempts(timeout, self._connection)
        while True:
            try:
                answer = await _answer(method(request, timeout=attempts.timeout, metadata=self._metadata))
            except RequestError as error:
                delay_s = attempts.delay_after(error)
            except grpc.aio.UsageError as closed:  # the channel was closed
                raise attempts.broken_by or closed from None
            else:
                self._connection.was_up = True
                return answer
            await asyncio.sleep(delay_s)

    async def close(self) -> None:
        """Closes the connection; live streams are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _answer(call: Awaitable[Response]) -> Response:
    """Awaits a call. If the channel is closed meanwhile, gRPC raises CancelledError, as if our own task were cancelled.

    Raises:
        RequestError: the call failed, or another task has closed the client or the stream.
    """
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        closed = Refusal(grpc.StatusCode.CANCELLED, "", "the client or the stream was closed")
        raise named(closed) from None
