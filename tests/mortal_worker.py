"""A stand-in for a worker that dies when it has to compute POISON. `python tests/mortal_worker.py --listen ADDRESS`."""

import os
import secrets
import signal
import sys

from fakes import TEXT, VOCABULARY_SIZE

from bench.instant_worker import InstantWorker, serve
from protos import process
from protos.columns import unpack
from protos.worker_pb2 import GetInfoResponse

POISON = ord("Z")


class MortalWorker(InstantWorker):
    """Answers steps with TEXT; one step kills it."""

    def answer(self, request):
        if POISON in unpack(request.token_ids):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().answer(request)


def main() -> None:
    info = GetInfoResponse(
        epoch=secrets.randbits(63),
        model="mortal",
        context_length=8192,
        vocabulary_size=VOCABULARY_SIZE,
        block_size=16,
        num_blocks=1000,
        max_num_batched_tokens=1 << 20,
    )
    worker = MortalWorker(list(TEXT.encode()), info, step_s=0.02)
    process.run(lambda stop: serve(sys.argv[2], worker, stop))


if __name__ == "__main__":
    main()
