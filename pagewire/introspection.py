"""Asks a server for its state, for the commands that show it: its IntrospectionService, with this package's errors.

Also describes one scheduler of several in a line, the same in all these commands.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from pagewire.access import OPEN, Access
from pagewire.client import CHANNEL_OPTIONS
from pagewire.errors import Unsupported, from_rpc_error
from protos.errors import Refusal
from protos.pagewire.v1.introspection_pb2 import NamedScheduler
from protos.pagewire.v1.introspection_pb2_grpc import IntrospectionServiceStub


@contextmanager
def introspection(target: str, access: Access = OPEN) -> Iterator[IntrospectionServiceStub]:
    """The IntrospectionService of the server at `target`, while the `with` block lasts.

    Raises:
        RequestError: a call in the block failed; Unsupported if the server shows no state.
    """
    with access.channel(target, CHANNEL_OPTIONS) as channel:
        try:
            yield IntrospectionServiceStub(channel)
        except grpc.RpcError as error:
            named = from_rpc_error(error)
            if isinstance(named, Unsupported) and not named.reason:  # gRPC's own answer for a service that is not there
                message = f"{target} shows no state: its router runs with --no-introspection or --admin-listen"
                named = Unsupported(Refusal(named.code, "", message))
            raise named from None


def in_a_line(scheduler: NamedScheduler) -> str:
    """A scheduler's address, whether it gets requests, and how busy it is, if known."""
    words = [scheduler.obstacle or "serving"]
    if scheduler.HasField("state"):
        state, pool = scheduler.state, scheduler.state.block_pool
        held = f"{pool.num_held / max(1, pool.num_total):.0%} of {pool.num_total:,} blocks held"
        words += [f"{state.num_running} running", f"{state.num_waiting} waiting", held]
    return f"{scheduler.address}: {', '.join(words)}"
