"""The router's front: what it refuses by itself, and what it does beside its event loop."""

import math
import tempfile
from pathlib import Path

import fakes
import grpc
import pytest

import router.__main__ as router_main
import router.server as router_server
from pagewire.errors import from_rpc_error
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import dial
from router.config import RouterSettings
from router.tokenizer import Tokenizer


async def refusal_of(call: grpc.aio.UnaryUnaryCall) -> str:
    """Why a call is refused, as the command line says it."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return str(from_rpc_error(refused.value))


async def test_tokenize_and_detokenize_refuse_what_no_prompt_could_be():
    async with fakes.control_plane() as plane:
        tokenize, detokenize = plane.generation.Tokenize, plane.generation.Detokenize
        assert "prompt: is required: set text or chat" in await refusal_of(tokenize(pb.TokenizeRequest()))
        most = [1] * fakes.CONTEXT_LENGTH
        assert (await detokenize(pb.DetokenizeRequest(token_ids=most))).text == "\x01" * len(most)
        too_many = await refusal_of(detokenize(pb.DetokenizeRequest(token_ids=[*most, 1])))
        assert "token_ids: are 201; at most 200, the context length, are taken" in too_many
        unknown = await refusal_of(detokenize(pb.DetokenizeRequest(token_ids=[1, fakes.VOCABULARY_SIZE])))
        assert "token_ids" in unknown


async def test_a_refused_call_frees_its_id_but_not_that_of_the_call_whose_request_it_would_resume():
    worker = fakes.FakeWorker()
    async with fakes.control_plane(worker) as plane:
        complete, first, refused = plane.generation.Complete, fakes.request(max_tokens=3), fakes.request("x" * 250)
        first.request_id = refused.request_id = "r"
        first.sampling.seed = 7
        for _ in range(2):
            assert "has 250 tokens" in await refusal_of(complete(refused))
        worker.gate.clear()
        call = complete(first)
        await plane.until(lambda state: state.num_running == 1)
        refused.resume.seed = 7
        assert "has 250 tokens" in await refusal_of(complete(refused))
        assert "request_id: 'r' is in use" in await refusal_of(complete(first)), "as the router itself knows"
        worker.gate.set()
        assert (await call).outputs[0].text == "The"


async def test_long_texts_are_tokenized_as_short_ones_are(monkeypatch):
    async with fakes.control_plane() as plane:
        for _ in range(2):
            for special in (False, True):
                wanted = pb.TokenizeRequest(text="hello", add_special_tokens=special)
                token_ids = list((await plane.generation.Tokenize(wanted)).token_ids)
                assert token_ids == list(b"hello"), "this tokenizer adds none"
            monkeypatch.setattr(router_server, "_INLINE_CHARS", 2)  # beside the event loop


async def test_before_any_scheduler_has_answered_calls_are_refused_with_the_reason():
    with tempfile.TemporaryDirectory(prefix="pw") as directory:
        tokenizer = Tokenizer(fakes.write_tokenizer(Path(directory) / "model"))
        settings = RouterSettings(model=directory, listen=f"unix:{directory}/r", scheduler=f"unix:{directory}/nobody")
        async with (
            fakes.running(lambda stop: router_main.serve(settings, tokenizer, stop)),
            dial(settings.listen) as channel,
        ):
            generation = GenerationServiceStub(channel)
            for call in (
                generation.GetModel(pb.GetModelRequest(), wait_for_ready=True),
                generation.Complete(fakes.request()),
            ):
                assert "no scheduler has answered yet" in await refusal_of(call)
                assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_connections_may_age_for_ever_and_messages_have_the_greatest_size_that_grpc_counts():
    endless = {"max_connection_age_s": math.inf, "max_connection_age_grace_s": math.inf}
    async with fakes.control_plane(router={**endless, "max_message_bytes": (2 << 30) - 1}) as plane:
        assert (await plane.generation.Complete(fakes.request())).outputs[0].text
    with pytest.raises(ValueError, match="should be less than or equal to 2147483647"):
        RouterSettings(model="m", max_message_bytes=2 << 30)
