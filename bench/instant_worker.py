"""`python -m bench.instant_worker`: a worker that answers steps as fast as Python can, or at a given pace. No torch.

Every sequence says the same text again and again: the token at a position is the text's token at that position, modulo
its length. So what the router decodes is text, not noise.
"""

import argparse
import asyncio
import json
import secrets
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from protos import process, worker_pb2
from protos.columns import pack_floats, unpack
from protos.rpc import Server, Service
from protos.worker_pb2_grpc import add_WorkerServiceServicer_to_server


class InstantWorker:
    """Answers steps.

    Args:
        token_ids: the text.
        info: what it says about itself.
        step_s: seconds that a step takes at least, as if there were a model; 0 answers at once.
    """

    def __init__(self, token_ids: list[int], info: worker_pb2.GetInfoResponse, step_s: float = 0.0) -> None:
        self._token_ids = token_ids
        self._info = info
        self._step_s = step_s

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        """What it would have loaded."""
        return self._info

    async def Execute(
        self, requests: AsyncIterator[worker_pb2.ExecuteModelRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """Answers steps in order."""
        while (request := await context.read()) is not grpc.aio.EOF:
            if self._step_s:
                await asyncio.sleep(self._step_s)
            await context.write(self.answer(request))

    async def ExecuteModel(
        self, request: worker_pb2.ExecuteModelRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ExecuteModelResponse:
        """Answers one step."""
        return self.answer(request)

    def answer(self, request: worker_pb2.ExecuteModelRequest) -> worker_pb2.ExecuteModelResponse:
        """A token for each sample."""
        text, length = self._token_ids, len(self._token_ids)
        starts, counts = unpack(request.num_computed_tokens), unpack(request.num_new_tokens)
        token_ids = array("i", [text[(starts[row] + counts[row]) % length] for row in unpack(request.sample_rows)])
        return worker_pb2.ExecuteModelResponse(
            step_id=request.step_id,
            epoch=request.epoch,
            token_ids=token_ids.tobytes(),
            logprobs=pack_floats([-0.5]) * len(token_ids),
        )


async def serve(listen: str, worker: InstantWorker, stop: asyncio.Event) -> None:
    """Serves a scheduler until `stop` is set."""
    name = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
    server = Server([Service(name, add_WorkerServiceServicer_to_server, worker)])
    await server.start(listen)
    await server.set_serving(True)
    await stop.wait()
    await server.stop(0)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True, help='"host:port" or "unix:/path"')
    parser.add_argument("--text", type=Path, required=True, help="JSON file: the text's token ids")
    parser.add_argument("--vocabulary-size", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, default=1 << 15)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time that a step takes at least")
    arguments = parser.parse_args()
    info = worker_pb2.GetInfoResponse(
        epoch=secrets.randbits(63),
        model="instant",
        context_length=8192,
        vocabulary_size=arguments.vocabulary_size,
        dtype="none",
        kv_dtype="none",
        block_size=16,
        num_blocks=arguments.num_blocks,
        kv_cache_note="no memory behind it",
        max_num_batched_tokens=1 << 20,
    )
    worker = InstantWorker(json.loads(arguments.text.read_text()), info, arguments.step_ms / 1e3)
    process.run(lambda stop: serve(arguments.listen, worker, stop))


if __name__ == "__main__":
    main()
