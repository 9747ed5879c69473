"""Asks a server for its health, as container health checks do; kept small, since it runs every few seconds."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.access import OPEN, Access, as_grpc_takes

SERVING = "SERVING"
# How the answer begins when no server replies; SILENT is all of it if the connection is accepted and nothing follows.
NO_ANSWER = "no answer"
SILENT = f"{NO_ANSWER} (DEADLINE_EXCEEDED)"
# How it begins when the connection is accepted, but the TLS handshake fails.
NOT_LET_IN = "not let in by TLS"
# gRPC's words for that: it does not trust the server, or not under that name, or the server does not trust us.
_DISTRUST = ("handshake failed", "verification check failed", "socket closed")


def check(target: str, service: str = "", timeout_s: float = 2.0, access: Access = OPEN) -> str:
    """The health of one service, or of the whole server, in gRPC's words; a sentence if there is no such answer.

    Args:
        target: "host:port" or "unix:/path".
        service: a full name like "pagewire.v1.GenerationService"; "" for the whole server.
        timeout_s: bounds the wait for a connection and an answer; no bound if it is infinite.
        access: TLS, if the server requires it.
    """
    with access.channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=as_grpc_takes(timeout_s))
        except grpc.RpcError as error:
            code, why = error.code(), (error.details() or "").rpartition("last error: ")[2]
            if code is grpc.StatusCode.NOT_FOUND:
                return f"no service {service!r}"
            return not_let_in(why) if is_distrust(why, access) else f"{NO_ANSWER} ({code.name})"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def is_distrust(why: str, access: Access) -> bool:
    """Whether gRPC says that a server is there, but TLS with it fails."""
    return access.is_tls and any(words in why.lower() for words in _DISTRUST)


def not_let_in(why: str) -> str:
    """The sentence for a server with which TLS fails."""
    return f"{NOT_LET_IN}; leave it out, or look at --ca, --certificate and --key ({why})"
