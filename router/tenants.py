"""Who a client is: by its token, by its certificate, or by what a trusted proxy says about it.

Of a client's identity, the rest of the router knows only the tenant's name. It separates what tenants must not share:
request ids and cache salts begin with it, and no name contains the "/" that follows it.
"""

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from grpc_status import rpc_status

from protos.errors import Refusal, to_status
from router.config import RouterSettings
from router.tenant_file import TENANT_NAME, Entry, TenantFile, TokenFile

_NAME = re.compile(TENANT_NAME)
_NAME_IN_WORDS = "1 to 64 letters, digits, dots, underscores, hyphens or at signs, and begin with a letter or a digit"
_HEALTH = "/grpc.health.v1.Health/"
_SCHEME = "bearer "
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client's identity and what it may use.

    Attributes:
        name: "" where the client is not identified.
        weight: its share, relative to the others', when tenants want more than there is.
        max_requests: requests that it may have live at once; None for no limit.
        tokens_per_minute: tokens of prompts and outputs together; None for no limit.
    """

    name: str = ""
    weight: float = 1.0
    max_requests: int | None = None
    tokens_per_minute: int | None = None


class Tenants(Protocol):
    """One way to identify a client."""

    def of(self, context: grpc.aio.ServicerContext) -> Tenant:
        """The tenant that calls.

        Raises:
            Refusal: UNAUTHENTICATED, the client is no tenant.
        """

    def scoped(self, tenant: Tenant, name: str) -> str:
        """A tenant's `name`, made unique among those of all tenants."""


class Anonymous:
    """No client is identified: all are one tenant without a name."""

    def __init__(self, settings: RouterSettings) -> None:
        self._tenant = _tenant("", Entry(), settings)

    def of(self, context: grpc.aio.ServicerContext) -> Tenant:
        return self._tenant

    def scoped(self, tenant: Tenant, name: str) -> str:
        return name


class _Named:
    """Tenants have names, and a file may say what each may use."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._file = None if settings.tenants is None else TenantFile(settings.tenants)

    def named(self, name: str) -> Tenant:
        """The tenant of a name that comes from a trusted source."""
        return _tenant(name, Entry() if self._file is None else self._file.find(name), self._settings)

    def scoped(self, tenant: Tenant, name: str) -> str:
        return f"{tenant.name}/{name}"


class ByHeader(_Named):
    """A trusted proxy names the tenant in a header; without it the client is anonymous."""

    def __init__(self, header: str, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._header = header.lower()

    def of(self, context: grpc.aio.ServicerContext) -> Tenant:
        name = _value(context.invocation_metadata() or (), self._header)
        if name and not _NAME.fullmatch(name):
            raise unauthenticated("TENANT_MALFORMED", f"{self._header}: must be {_NAME_IN_WORDS}")
        return self.named(name)


class ByCertificate(_Named):
    """The common name of a client's certificate, which TLS has verified, is the tenant's."""

    def of(self, context: grpc.aio.ServicerContext) -> Tenant:
        names = list(context.auth_context().get("x509_common_name", ()))
        name = names[0].decode(errors="replace") if len(names) == 1 else ""
        if not _NAME.fullmatch(name):
            message = f"the certificate's common name must be {_NAME_IN_WORDS}: it is the tenant's name"
            raise unauthenticated("TENANT_MALFORMED", message)
        return self.named(name)


class ByToken(_Named):
    """A token file names the tenants."""

    def __init__(self, tokens: TokenFile, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._tokens = tokens

    def of(self, context: grpc.aio.ServicerContext) -> Tenant:
        return self.of_metadata(context.invocation_metadata() or ())

    def of_metadata(self, metadata: Metadata) -> Tenant:
        """The tenant whose token this metadata carries."""
        authorization = _value(metadata, "authorization")
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            message = "authorization: this server wants metadata of this name with the value 'Bearer TOKEN'"
            raise unauthenticated("TOKEN_MISSING", message)
        found = self._tokens.find(authorization[len(_SCHEME) :].strip())
        if found is None:
            raise unauthenticated("TOKEN_UNKNOWN", "authorization: this token is not known; ask for a new one")
        return _tenant(*found, self._settings)


class TokenGate(grpc.aio.ServerInterceptor):
    """Refuses calls of any method without a known token, except health checks, which probes make."""

    def __init__(self, tenants: ByToken) -> None:
        self._tenants = tenants

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        if not details.method.startswith(_HEALTH):
            try:
                self._tenants.of_metadata(details.invocation_metadata or ())
            except Refusal as refusal:
                return _refusing(refusal)
        return await continuation(details)


def tenants_of(settings: RouterSettings) -> Tenants:
    """The way to identify clients that the settings choose."""
    if settings.auth_tokens is not None:
        return ByToken(TokenFile(settings.auth_tokens), settings)
    if settings.tenant_header is not None:
        return ByHeader(settings.tenant_header, settings)
    if settings.tenant_from_certificate:
        return ByCertificate(settings)
    return Anonymous(settings)


def unauthenticated(reason: str, message: str) -> Refusal:
    """UNAUTHENTICATED: the client has to say who it is, and retrying unchanged does not help."""
    return Refusal(grpc.StatusCode.UNAUTHENTICATED, reason, message)


def _tenant(name: str, entry: Entry, settings: RouterSettings) -> Tenant:
    """A tenant with the router's defaults where its entry says nothing."""
    return Tenant(
        name,
        entry.weight,
        settings.tenant_max_requests if entry.max_requests is None else entry.max_requests,
        settings.tenant_tokens_per_minute if entry.tokens_per_minute is None else entry.tokens_per_minute,
    )


def _value(metadata: Metadata, key: str) -> str:
    """The one value of a header; "" when there is none, or several, of which a proxy may have set only one."""
    values = [value for name, value in metadata if name == key]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else ""


def _refusing(refusal: Refusal) -> Any:
    """A handler that refuses any kind of call without reading it."""

    async def refuse(requests: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort_with_status(rpc_status.to_status(to_status(refusal)))

    return grpc.stream_stream_rpc_method_handler(refuse)
