"""The router's settings."""

from pydantic import Field, field_validator

from protos.process import Settings


class RouterSettings(Settings):
    """Pagewire router: the public gRPC API in front of a scheduler."""

    listen: str = Field(
        "127.0.0.1:50051",
        description='address for clients: "host:port" or "unix:/path"; several with commas between',
    )
    share_port: bool = Field(
        False, description="let other routers with this option listen on the same port; each connection goes to one"
    )
    scheduler: str = Field(
        "127.0.0.1:50052",
        description='the scheduler\'s address: "host:port", "unix:/path", or "dns:///host:port" for one at each of a '
        "name's addresses; several with commas between",
    )
    affinity_blocks: int = Field(
        4,
        ge=0,
        description="with several schedulers: blocks of a prompt's beginning that say which one prefers it",
    )
    load_slack: float = Field(
        0.25,
        ge=0,
        description="with several schedulers: share of the average load by which the preferred one may exceed it",
    )
    model: str = Field(description="checkpoint directory or hub name, of which the router reads the tokenizer")
    max_live_requests: int = Field(4096, ge=1, description="requests answered at once at most; more are refused")
    introspection: bool = Field(True, description="serve IntrospectionService")
    load_reports: bool = Field(True, description="report the load to balancers (ORCA), out of band and in trailers")
    reflection: bool = Field(True, description="serve gRPC reflection")
    write_stall_s: float = Field(60.0, gt=0, description="seconds after which a client that does not read is given up")
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        description="seconds after SIGTERM that new calls are still taken, so that proxies see NOT_SERVING",
    )
    drain_grace_s: float = Field(30.0, ge=0, description="seconds that live streams get to finish after that")

    @field_validator("scheduler")
    @classmethod
    def _check_scheduler(cls, scheduler: str) -> str:
        for address in scheduler.split(","):
            _, colon, rest = address.removeprefix("dns:///").rpartition(":")
            if not colon or not rest or " " in address:
                raise ValueError(f'{address!r} is none of "host:port", "unix:/path", "dns:///host:port"')
        return scheduler
