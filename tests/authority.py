"""A private certificate authority for a test, and the files of its certificates."""

import os
import socket
import ssl
from pathlib import Path

import trustme

from protos.tls import ClientTls, ServerTls


class Authority:
    """Issues certificates into a directory; `ca` is the file to verify them with."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA()
        self.ca = directory / f"ca-{id(self)}.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str = "server", common_name: str | None = None) -> tuple[Path, Path]:
        """A certificate chain and its key for this machine; they replace those of the same name, each by a rename."""
        issued = self._authority.issue_cert("localhost", "127.0.0.1", common_name=common_name)
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        replace(certificate, b"".join(part.bytes() for part in issued.cert_chain_pems))
        replace(key, issued.private_key_pem.bytes())
        return certificate, key

    def server(self, *, client_ca: bool = False) -> ServerTls:
        return ServerTls(*self.issue("server"), self.ca if client_ca else None)

    def client(self, common_name: str | None = None) -> ClientTls:
        """Trusts this authority, and shows one of its certificates if it is given a name."""
        if common_name is None:
            return ClientTls(self.ca)
        return ClientTls(self.ca, *self.issue(common_name, common_name))


def replace(path: Path, content: bytes) -> None:
    """Writes a file as deployments do: whole, by a rename."""
    aside = path.with_name(path.name + ".new")
    aside.write_bytes(content)
    os.replace(aside, path)


def serial_number(certificate: Path) -> str:
    """Of the first certificate in a file."""
    return ssl._ssl._test_decode_cert(str(certificate))["serialNumber"]  # type: ignore[attr-defined]


def shown_serial_number(port: int, ca: Path) -> str:
    """Of the certificate that a server on this machine shows a new connection."""
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return connection.getpeercert()["serialNumber"]  # type: ignore[index]
