"""How a client gains access: TLS and the CAs it trusts, a certificate of its own, a token."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pagewire.errors import PagewireError
from protos.tls import ClientTls, TlsError

DEFAULT_TARGET = "127.0.0.1:50051"
# About thirty years. gRPC counts nanoseconds in 64 bits, and treats a timeout that does not fit as expired.
_ENDLESS_S = 1e9


def as_grpc_takes(timeout_s: float | None) -> float | None:
    """A call's timeout as gRPC takes it; None if it is too long for gRPC to count."""
    return None if timeout_s is None or timeout_s >= _ENDLESS_S else timeout_s


class AccessError(PagewireError):
    """A CA, certificate, key or token cannot be used, or they do not go together."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a server may ask of its clients.

    Attributes:
        tls: whether the connection is TLS; a CA or a certificate implies it.
        ca: file of CA certificates, one of which must have issued the server's; None for the well-known CAs.
        certificate: file of the certificate to show a server that asks for one (mTLS), with `key`.
        token: sent with each call. Without TLS it can be read on the way: fit only for a sidecar on this machine.
    """

    tls: bool = False
    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None
    token: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables, for a `pagewire` that this one starts."""
        values = {"CA": self.ca, "CERTIFICATE": self.certificate, "KEY": self.key, "TOKEN": self.token}
        values["TLS"] = "1" if self.tls else None
        return {f"PAGEWIRE_CLIENT_{name}": str(value) for name, value in values.items() if value is not None}

    @property
    def is_tls(self) -> bool:
        """Whether the connection is TLS."""
        return bool(self.tls or self.ca or self.certificate)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of each call.

        Raises:
            AccessError: the token cannot be sent in a header.
        """
        token = (self.token or "").strip()  # a token from a file may end with a newline
        if not token.isascii() or not token.isprintable():
            raise AccessError("--token: must be of printable ASCII characters only")
        return (("authorization", f"Bearer {token}"),) if token else ()

    def channel(self, target: str, options: list[tuple[str, Any]]) -> grpc.Channel:
        """A channel for the sync stubs.

        Raises:
            AccessError: the files cannot be used.
        """
        credentials = self._credentials()
        if credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, credentials, options=[*options, *_server_name(target)])

    def aio_channel(self, target: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel for the asyncio stubs.

        Raises:
            AccessError: the files cannot be used.
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
    """The name that a certificate must carry if the target is a socket's path, which no certificate can name."""
    return [("grpc.ssl_target_name_override", "localhost")] if target.startswith("unix:") else []


def _path(file: Path | str | None) -> Path | None:
    return None if file is None else Path(file)
