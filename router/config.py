"""The router's settings."""

from typing import Self

from pydantic import Field, model_validator

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
    health_stall_s: float = Field(
        5.0,
        gt=0,
        description="seconds without a sign of life from the scheduler after which health is NOT_SERVING until there "
        "is one; requests are taken all the same, and wait",
    )
    max_connection_age_s: float = Field(
        0.0,
        ge=0,
        description="seconds, give or take a tenth, after which a client's connection takes no new calls, so that it "
        "opens another, perhaps to another router; 0 for never. For clients behind what balances connections",
    )
    max_connection_age_grace_s: float = Field(
        900.0,
        gt=0,
        description="seconds that live calls of such a connection get to finish before they are cut: no less than the "
        "longest generation takes, its time in the queue included",
    )
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        description="seconds after SIGTERM that new calls are still taken, so that proxies see NOT_SERVING",
    )
    drain_grace_s: float = Field(30.0, ge=0, description="seconds that live streams get to finish after that")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_connection_age_s and self.max_connection_age_grace_s < self.drain_grace_s:
            raise ValueError(
                f"max_connection_age_grace_s ({self.max_connection_age_grace_s:g}) is less than drain_grace_s "
                f"({self.drain_grace_s:g}): make it as long as the longest generation takes"
            )
        return self

    @property
    def connection_age_options(self) -> list[tuple[str, int]]:
        """What bounds the age of connections; gRPC varies each one's by a tenth."""
        if not self.max_connection_age_s:
            return []
        return [
            ("grpc.max_connection_age_ms", max(1, int(self.max_connection_age_s * 1e3))),
            ("grpc.max_connection_age_grace_ms", int(self.max_connection_age_grace_s * 1e3)),
        ]
