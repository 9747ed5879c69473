"""How gRPC waits for messages in a process that imports this before it imports grpc.

gRPC's event engine, on by default since 1.80, wakes one more thread for each message than the pollers before it.
Between two processes a message and its answer take 165 us with it and 80 without; a token costs each of our processes a
quarter more CPU time. A gRPC release without those pollers says so on standard error and goes on.
"""

import os

EXPERIMENTS = (
    "-event_engine_client,-event_engine_listener,-event_engine_for_all_other_endpoints,-event_engine_callback_cq"
)

os.environ.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)


def keep() -> None:
    """Keeps the waiting thread alive as long as the process; call it before the first server or channel is made.

    When the last server and channel go, gRPC joins that thread. It may be stuck then, writing to an event loop that
    has ended and reads no more (grpc/grpc#40989).
    """
    from grpc import aio

    aio.init_grpc_aio()
