"""The router's settings."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, ByteSize, Field, field_validator, model_validator

from protos.rpc import PUBLIC_MESSAGE_BYTES
from protos.tls import ClientTls
from protos.tls_settings import CaFile, ReadableFile, ServerTlsSettings, client_tls
from router import tenant_file

# gRPC takes sizes and times as C's int; as a time, the greatest one is for ever.
_MAX_INT = 2**31 - 1


def _is_token_file(path: Path) -> Path:
    tenant_file.read_tokens(path)
    return path


def _is_tenant_file(path: Path) -> Path:
    tenant_file.read_tenants(path)
    return path


class RouterSettings(ServerTlsSettings):
    """Pagewire router: the public gRPC API in front of one or more schedulers."""

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
    scheduler_tls_ca: CaFile | None = Field(
        None, description="CA certificates that the schedulers' must come from; without it that wire is plaintext"
    )
    scheduler_tls_certificate: ReadableFile | None = Field(
        None, description="what a scheduler is shown where it asks (mTLS)"
    )
    scheduler_tls_key: ReadableFile | None = Field(None, description="that certificate's private key")
    model: str = Field(description="checkpoint directory or hub name, of which the router reads the tokenizer")
    max_live_requests: int = Field(4096, ge=1, description="requests answered at once at most; more are refused")
    max_message_bytes: ByteSize = Field(
        ByteSize(PUBLIC_MESSAGE_BYTES),
        ge=1 << 10,
        le=_MAX_INT,
        description='size of a request at most, such as "16MiB"',
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="tokens of a prompt at most; without it, one less than the model's context"
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="output tokens of a sequence at most; without it, what the context leaves"
    )
    max_n: int | None = Field(
        None, ge=1, description="sequences of a request at most; without it, as many as the scheduler runs together"
    )
    max_beam_width: int | None = Field(
        None, ge=0, description="beams of a search at most; 0 for none; without it, as many as it runs together"
    )
    auth_tokens: Annotated[Path, AfterValidator(_is_token_file)] | None = Field(
        None, description="file of bearer tokens, one of which each call must carry; read again when it changes"
    )
    tenant_header: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="metadata in which a trusted proxy names the tenant; the proxy must drop what clients send of it",
    )
    tenant_from_certificate: bool = Field(
        False, description="the common name of a client's certificate names the tenant; needs --tls-client-ca"
    )
    tenants: Annotated[Path, AfterValidator(_is_tenant_file)] | None = Field(
        None,
        description="file of tenants' weights and limits for --tenant-header or --tenant-from-certificate (that of "
        "--auth-tokens has them itself); read again when it changes",
    )
    tenant_max_requests: int | None = Field(
        None, ge=1, description="live requests of a tenant at this router at most, unless its file says otherwise"
    )
    tenant_tokens_per_minute: int | None = Field(
        None, ge=1, description="tokens of a tenant, prompts and outputs, in a minute at this router; likewise"
    )
    share_prefix_cache_across_tenants: bool = Field(
        False, description="let tenants find each other's prompts in the cache, and learn of them by timing"
    )
    introspection: bool = Field(True, description="serve IntrospectionService")
    load_reports: bool = Field(True, description="report the load to balancers (ORCA), out of band and in trailers")
    reflection: bool = Field(True, description="serve gRPC reflection")
    admin_listen: str | None = Field(
        None,
        description="address of a port for operators, in plaintext and open to all who reach it: introspection of all "
        "tenants, reflection, channelz and health; of these the clients' port has only health then",
    )
    scheduler_patience_s: float = Field(
        60.0,
        gt=0,
        description="seconds that requests wait for a scheduler that was lost to come back, where no other takes them",
    )
    write_stall_s: float = Field(60.0, gt=0, description="seconds after which a client that does not read is given up")
    health_stall_s: float = Field(
        5.0,
        gt=0,
        description="seconds without a sign of life from a scheduler after which others get its requests; where there "
        "is no other, health is NOT_SERVING until there is one, and requests are taken all the same, and wait",
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
    heartbeat_s: float = Field(
        15.0, ge=0, description="seconds after which a silent stream says where it waits; 0: never"
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        _ = self.scheduler_tls
        ways = {
            "--auth-tokens": self.auth_tokens is not None,
            "--tenant-header": self.tenant_header is not None,
            "--tenant-from-certificate": self.tenant_from_certificate,
        }
        named = [option for option, given in ways.items() if given]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)}: each says who a client is; give one of them")
        if self.tenant_from_certificate and self.tls_client_ca is None:
            raise ValueError("--tenant-from-certificate: needs --tls-client-ca, which makes clients show a certificate")
        if self.tenant_header is not None and self.tenant_header.lower().endswith("-bin"):
            raise ValueError("--tenant-header: metadata whose name ends with -bin holds bytes, and no tenant's name")
        if self.tenants is not None and self.auth_tokens is not None:
            raise ValueError("--tenants and --auth-tokens: the token file has weights and limits too; give it alone")
        if self.tenants is not None and not named:
            raise ValueError("--tenants: needs --tenant-header or --tenant-from-certificate, which say who a client is")
        if self.max_connection_age_s and self.max_connection_age_grace_s < self.drain_grace_s:
            raise ValueError(
                f"max_connection_age_grace_s ({self.max_connection_age_grace_s:g}) is less than drain_grace_s "
                f"({self.drain_grace_s:g}): make it as long as the longest generation takes"
            )
        return self

    @property
    def scheduler_tls(self) -> ClientTls | None:
        """TLS of the wire to the scheduler; None for plaintext."""
        return client_tls(
            "scheduler-tls", self.scheduler_tls_ca, self.scheduler_tls_certificate, self.scheduler_tls_key
        )

    @property
    def connection_age_options(self) -> list[tuple[str, int]]:
        """Options that bound the age of connections; gRPC varies each one's by up to a tenth."""
        if not self.max_connection_age_s:
            return []
        return [
            ("grpc.max_connection_age_ms", _milliseconds(self.max_connection_age_s)),
            ("grpc.max_connection_age_grace_ms", _milliseconds(self.max_connection_age_grace_s)),
        ]


def _milliseconds(seconds: float) -> int:
    return int(min(max(seconds * 1e3, 1), _MAX_INT))
