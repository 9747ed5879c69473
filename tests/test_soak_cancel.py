"""Cancels at every stage, thousands of them: the memory of router and scheduler stays flat, and all blocks are free.

Real router and scheduler processes, a worker in this one that takes its time, so that requests wait, prefill, run and
are swapped out. `make soak-cancel` cancels 100,000 times.
"""

import asyncio
import contextlib
import itertools
import os
import random
import tempfile
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from deployment import START_TIMEOUT_S, Deployment
from fakes import FakeWorker, start_worker, write_tokenizer

from protos import session_pb2
from protos.columns import pack
from protos.pagewire.v1 import generation_pb2 as pb
from protos.pagewire.v1.generation_pb2_grpc import GenerationServiceStub
from protos.rpc import SESSION_PROTOCOL_VERSION, dial, wait_for_serving
from protos.sampling_pb2 import Sampling
from protos.session_pb2_grpc import SessionServiceStub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_CANCELS = int(os.environ.get("SOAK_CANCELS", "2000"))
NUM_CLIENTS = 40
STEP_S = 0.002
# How much a process may grow from a third of the cancels to the end: 126 bytes for each if there are 100,000.
FLAT_BYTES = 8 << 20
STAGES = ("before acceptance", "at any time", "running", "later", "finished", "twice", "out of time")


class SlowWorker(FakeWorker):
    """Takes a moment for each step, and keeps no record of it."""

    async def Execute(self, requests, context):
        async for request in requests:
            await asyncio.sleep(STEP_S)
            await context.write(self.answer(request))
            self.new_requests.clear()


@dataclass
class Soak:
    """A router and a scheduler in processes of their own, and the cancels so far, by stage."""

    plane: Deployment
    cancels: Counter[str] = field(default_factory=Counter)

    async def rss_bytes(self) -> dict[str, int]:
        """Memory of both once nothing is live and no block held."""
        await self.plane.idle()
        return {name: service.rss_bytes() for name, service in self.plane.services.items()}

    async def cancel(self, num: int, seed: int) -> None:
        """Sends so many requests, each cancelled at some stage, some of them on a session without a router."""
        async with dial(self.plane.router_address) as channel, asyncio.TaskGroup() as group:
            stub, rng = GenerationServiceStub(channel), random.Random(seed)
            stages = iter([rng.choice(STAGES) for _ in range(num * 3 // 4)])
            for _ in range(NUM_CLIENTS):
                group.create_task(self._clients(stub, stages, rng))
            group.create_task(self._session(num - num * 3 // 4, rng))

    async def _clients(self, stub: GenerationServiceStub, stages, rng: random.Random) -> None:
        for stage in stages:
            request = pb.GenerateRequest(
                text="x" * rng.randint(1, 60),
                sampling=pb.SamplingParams(n=rng.choice((1, 1, 2, 3))),
                stop=pb.StopConditions(max_tokens=rng.choice((3, 20, 60)), ignore_eos=True),
            )
            call = stub.Generate(request, timeout=rng.uniform(0, 0.1) if stage == "out of time" else None)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await self._at(stage, call, rng)
            call.cancel()
            if stage == "twice":
                call.cancel()
            self.cancels[stage] += 1

    async def _at(self, stage: str, call, rng: random.Random) -> None:
        match stage:
            case "at any time" | "twice":
                await asyncio.sleep(rng.uniform(0, 0.2))
            case "running":
                await call.read()
            case "later":
                for _ in range(5):
                    await call.read()
            case "finished" | "out of time":
                while await call.read() is not grpc.aio.EOF:
                    pass

    async def _session(self, num: int, rng: random.Random) -> None:
        """Cancels what is not accepted yet, unknown, or cancelled already, as no router does."""
        async with dial(f"unix:{self.plane.directory}/scheduler") as channel:
            call = SessionServiceStub(channel).Session()
            reader = asyncio.create_task(_read(call))
            hello = session_pb2.Hello(router_id="soak", protocol_version=SESSION_PROTOCOL_VERSION)
            await call.write(session_pb2.SessionRequest(hello=hello))
            for handle in itertools.islice(itertools.count(1), num):
                submit = session_pb2.Submit(
                    handle=handle,
                    request_id=f"soak-{handle}",
                    prompt_token_ids=pack([7] * rng.randint(1, 60)),
                    sampling=Sampling(num_prompt_tokens=1),
                    n=1,
                    max_tokens=20,
                    tenant=f"tenant {handle}",
                )
                cancels = [handle, handle, -handle, max(1, handle - 20)][: rng.choice((0, 1, 4, 4))]
                messages = [session_pb2.SessionRequest(submit=submit)]
                messages += [session_pb2.SessionRequest(cancel=session_pb2.Cancel(handle=each)) for each in cancels]
                for message in messages:
                    await call.write(message)
                self.cancels["on a session"] += 1
                await asyncio.sleep(0.001)
            call.cancel()  # the end of the lease ends what is left
            await reader


async def _read(call) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while await call.read() is not grpc.aio.EOF:
            pass


@contextlib.asynccontextmanager
async def soaking() -> AsyncIterator[Soak]:
    with tempfile.TemporaryDirectory(prefix="pw") as directory:
        model = write_tokenizer(Path(directory) / "model")
        worker = SlowWorker(num_blocks=80, num_cpu_blocks=60, requests=deque(maxlen=1))  # type: ignore[arg-type]
        server = await start_worker(worker, f"unix:{directory}/worker")
        plane = Deployment(directory, f"unix:{directory}/router")
        try:
            quiet = ("--log-level", "warning")
            plane.start(
                "scheduler",
                *("--listen", f"unix:{directory}/scheduler", "--worker", f"unix:{directory}/worker", *quiet),
                *("--max-num-seqs", "16", "--preemption-mode", "swap", "--lease-s", "0.5"),
            )
            plane.start(
                "router",
                *("--listen", plane.router_address, "--scheduler", f"unix:{directory}/scheduler", *quiet),
                *("--model", str(model), "--heartbeat-s", "0.1"),
            )
            async with dial(plane.router_address) as channel, asyncio.timeout(START_TIMEOUT_S):
                await wait_for_serving(channel)
            yield Soak(plane)
            for name in ("router", "scheduler"):
                plane.services.pop(name).stop()
            assert len(worker.known) <= 16, "the worker was told of all that ended, except those of the last step"
        finally:
            for service in plane.services.values():
                service.process.kill()
                service.process.wait()
            await server.stop(0)


async def test_cancels_at_every_stage_leave_memory_flat_and_all_blocks_free():
    async with soaking() as soak:
        await soak.cancel(NUM_CANCELS // 3, seed=1)
        before = await soak.rss_bytes()
        await soak.cancel(NUM_CANCELS - NUM_CANCELS // 3, seed=2)
        after = await soak.rss_bytes()
        state = await soak.plane.state()
        print(dict(soak.cancels), f"{state.num_swap_outs} swapped out", f"RSS {before} -> {after}")
        assert sum(soak.cancels.values()) == NUM_CANCELS
        assert min(soak.cancels[stage] for stage in (*STAGES, "on a session")) > NUM_CANCELS // 20
        assert state.num_swap_outs > 0
        assert state.block_pool.num_swap_free == state.block_pool.num_swap_total
        for name in before:
            assert after[name] - before[name] < FLAT_BYTES, f"the {name} grew"
