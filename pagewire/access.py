"""How a client gets in: TLS and what it trusts, a certificate of its own, a token."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pagewire.errors import PagewireError
from protos.tls import ClientTls, TlsError

DEFAULT_TARGET = "127.0.0.1:50051"
# Some thirty years. gRPC counts nanoseconds in 64 bits, and takes a timeout that does not fit for passed.
_ENDLESS_S = 1e9


def as_grpc_takes(timeout_s: float | None) -> float | None:
    """A timeout of a call; one so long that gRPC can not count it is none."""
    return None if timeout_s is None or timeout_s >= _ENDLESS_S else timeout_s


class AccessError(PagewireError):
    """A CA, certificate, key or token can not be used, or they do not go together."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a server may ask of its clients.

    Attributes:
        tls: whether the connection is TLS; a CA or a certificate says so too.
        ca: file of the CA certificates that the server's must come from; None for the well-known ones.
        certificate: file of the certificate that the server is shown where it asks (mTLS), with `key`.
        token: sent with each call. Without TLS it can be read on the way, which suits a sidecar on this machine only.
    """

    tls: bool = False
    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    token: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The same for a `pagewire` that is started by this one."""
        values = {"CA": self.ca, "CERTIFICATE": self.certificate, "KEY": self.key, "TOKEN": self.token}
        values["TLS"] = "1" if self.tls else None
        return {f"PAGEWIRE_CLIENT_{name}": str(value) for name, value in values.items() if value is not None}

    @property
    def is_tls(self) -> bool:
        """Whether the connection is TLS."""
        return bool(self.tls or self.ca or self.certificate)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries.

        Raises:
            AccessError: the token can not stand in a header.
        """
        token = (self.token or "").strip()  # of the line end that it has from a file
        if not token.isascii() or not token.isprintable():
            raise AccessError("--token: must be of printable ASCII characters only")
        return (("authorization", f"Bearer {token}"),) if token else ()

    def channel(self, target: str, options: list[tuple[str, Any]]) -> grpc.Channel:
        """A channel for the sync stubs.

        Raises:
            AccessError: the files can not be used.
        """
        credentials = self._credentials()
        if credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, credentials, options=[*options, *_server_name(target)])

    def aio_channel(self, target: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel for the asyncio stubs.

        Raises:
            AccessError: the files can not be used.
        """
        credentials = self._credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=[*options, *_server_name(target)])

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if (self.certificate is None) != (self.key is None):
            raise AccessError("--certificate and --key: give both, or neither")
        if not self.is_tls:
            return None
        try:
            return ClientTls(_path(self.ca), _path(self.certificate), _path(self.key)).credentials()
        except TlsError as error:
            raise AccessError(f"--ca, --certificate, --key: {error}") from error


# For a server that asks for nothing.
OPEN = Access()


def _server_name(target: str) -> list[tuple[str, Any]]:
    """Whom a certificate must name where it can not name the target, which is a socket's path."""
    return [("grpc.ssl_target_name_override", "localhost")] if target.startswith("unix:") else []


def _path(file: Path | str | None) -> Path | None:
    return None if file is None else Path(file)
