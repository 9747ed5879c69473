"""The router's settings."""

from pydantic import Field

from protos.process import Settings


class RouterSettings(Settings):
    """Pagewire router: the public gRPC API in front of a scheduler."""

    listen: str = Field("127.0.0.1:50051", description='address for clients: "host:port"')
    scheduler: str = Field("127.0.0.1:50052", description='the scheduler\'s address: "host:port" or "unix:/path"')
    model: str = Field(description="checkpoint directory or hub name, of which the router reads the tokenizer")
    max_live_requests: int = Field(4096, ge=1, description="requests answered at once at most; more are refused")
    introspection: bool = Field(True, description="serve IntrospectionService")
    reflection: bool = Field(True, description="serve gRPC reflection")
    write_stall_s: float = Field(60.0, gt=0, description="seconds after which a client that does not read is given up")
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        description="seconds after SIGTERM that new calls are still taken, so that proxies see NOT_SERVING",
    )
    heartbeat_s: float = Field(
        15.0, ge=0, description="seconds after which a silent stream says where it waits; 0: never"
    )
    drain_grace_s: float = Field(30.0, ge=0, description="seconds that live streams get to finish after that")
