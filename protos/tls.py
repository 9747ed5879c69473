"""TLS on every wire: which files a side reads, that they fit each other, and that they may be replaced while we run.

A server checks its files before each handshake: open connections go on, and new ones see the new certificate. A side
that dials checks when it has to connect again (`protos.rpc.Line`). Files that do not fit each other, as when only one
of a pair is written yet, are logged, change nothing, and are read again when they change.
"""

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from protos.watched_files import WatchedFiles

log = logging.getLogger(__name__)


class TlsError(ValueError):
    """A certificate, key or CA file cannot be used; the message names it."""


def read(path: Path) -> bytes:
    """A file's bytes.

    Raises:
        TlsError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"cannot read {path}: {error.strerror}") from error


def read_pair(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """A certificate chain and its private key.

    Raises:
        TlsError: they cannot be read, do not belong together, or are just being written.
    """
    files = WatchedFiles((certificate, key))
    files.changed()
    pair = read(certificate), read(key)
    try:
        # Fails if the key is another certificate's, and if it is encrypted, rather than ask a terminal for a password.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"{certificate} and {key} are no certificate and its key: {error}") from error
    if files.changed():
        raise TlsError(f"{certificate} or {key} is being written")
    return pair


def read_ca(path: Path) -> bytes:
    """CA certificates.

    Raises:
        TlsError: the file cannot be read, or holds none.
    """
    ca = read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"{path} holds no CA certificate in PEM form: {error}") from error
    return ca


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's certificate chain and key; with `client_ca`, clients must show a certificate of that CA."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for a port, which follow the files.

        Raises:
            TlsError: the files cannot be used.
        """
        source = _CertificateSource(self)
        # gRPC asks for the configuration before each handshake, on a thread of its own.
        return grpc.dynamic_ssl_server_credentials(
            source.current(),
            source.fetch,  # type: ignore[arg-type]  # None is valid, and keeps the configuration
            self.client_ca is not None,
        )


@dataclass(frozen=True, slots=True)
class ClientTls:
    """What a side that dials trusts, and the certificate that it shows where the server wants one.

    Attributes:
        ca: None for the CAs that gRPC brings along.
        certificate: given together with `key`, or not at all.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """All that are named."""
        return tuple(path for path in (self.ca, self.certificate, self.key) if path is not None)

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a channel, from the files as they are now.

        Raises:
            TlsError: the files cannot be used.
        """
        ca = None if self.ca is None else read_ca(self.ca)
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(ca)
        certificate, key = read_pair(self.certificate, self.key)
        return grpc.ssl_channel_credentials(ca, key, certificate)


class _CertificateSource:
    """What the files hold, as gRPC wants it."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        files = (tls.certificate, tls.key, tls.client_ca)
        self._files = WatchedFiles(path for path in files if path is not None)
        self._lock = threading.Lock()
        self._files.changed()

    def current(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = read_pair(self._tls.certificate, self._tls.key)
        client_ca = None if self._tls.client_ca is None else read_ca(self._tls.client_ca)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration if there is one; None keeps the old one."""
        with self._lock:
            if not self._files.changed():
                return None
            try:
                configuration = self.current()
            except TlsError as error:
                log.warning("new certificate files are no use, the old ones stay", extra={"error": str(error)})
                return None
        log.info("certificate replaced", extra={"certificate": str(self._tls.certificate)})
        return configuration
