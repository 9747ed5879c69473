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
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return f"no service {service!r}"
            return not_let_in(error.details() or "", access) or f"{NO_ANSWER} ({error.code().name})"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def not_let_in(details: str, access: Access) -> str:
    """What to say if gRPC could not connect to a server because TLS failed; "" if that is not what `details` tell."""
    _, failed_to_connect, why = details.rpartition("last error: ")
    if not (access.is_tls and failed_to_connect and any(words in why.lower() for words in _DISTRUST)):
        return ""
    return f"{NOT_LET_IN}; leave it out, or look at --ca, --certificate and --key ({why})"
