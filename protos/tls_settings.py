"""The settings that name TLS files, checked at the start: an error names the option."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from protos.process import Settings
from protos.tls import ClientTls, ServerTls, TlsError, read, read_ca, read_pair


def _is_readable(path: Path) -> Path:
    read(path)
    return path


def _is_ca(path: Path) -> Path:
    read_ca(path)
    return path


# Settings that are files: what cannot be used is refused at the start, under the option's name.
ReadableFile = Annotated[Path, AfterValidator(_is_readable)]
CaFile = Annotated[Path, AfterValidator(_is_ca)]


class ServerTlsSettings(Settings):
    """The TLS settings of every service's port; without a certificate it is plaintext."""

    tls_certificate: ReadableFile | None = Field(
        None, description="this server's certificate chain, in PEM form; read again when it changes"
    )
    tls_key: ReadableFile | None = Field(None, description="the certificate's private key, in PEM form, unencrypted")
    tls_client_ca: CaFile | None = Field(
        None, description="CA certificates; clients must then show a certificate of one of them (mTLS)"
    )

    @model_validator(mode="after")
    def _check_server_tls(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key: give both, or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("--tls-client-ca: needs --tls-certificate and --tls-key")
        if self.tls_certificate is not None and self.tls_key is not None:
            _check_pair("tls", self.tls_certificate, self.tls_key)
        return self

    @property
    def server_tls(self) -> ServerTls | None:
        """TLS of the port; None for plaintext."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_certificate, self.tls_key, self.tls_client_ca)


def client_tls(option: str, ca: Path | None, certificate: Path | None, key: Path | None) -> ClientTls | None:
    """What the settings `--{option}-ca`, `-certificate` and `-key` say together; None for plaintext.

    Raises:
        ValueError: they do not go together; the message names the options.
    """
    if (certificate is None) != (key is None):
        raise ValueError(f"--{option}-certificate and --{option}-key: give both, or neither")
    if ca is None:
        if certificate is not None:
            raise ValueError(f"--{option}-certificate: needs --{option}-ca, without which the wire is plaintext")
        return None
    if certificate is not None and key is not None:
        _check_pair(option, certificate, key)
    return ClientTls(ca, certificate, key)


def _check_pair(option: str, certificate: Path, key: Path) -> None:
    try:
        read_pair(certificate, key)
    except TlsError as error:
        raise ValueError(f"--{option}-certificate, --{option}-key: {error}") from error
