"""The file of bearer tokens: who may come in, as hashes of what they show. Read again when it changes.

    [acme]                                    # the tenant's name
    sha256 = ["9f86d081...", "60303ae2..."]   # of each of its tokens; two while one takes over from the other
    weight = 2                                # the rest is optional
    max_requests = 32
    tokens_per_minute = 600000

`pagewire token new NAME` writes such an entry. A token has 256 random bits, so a plain hash of it tells nothing.
"""

import hashlib
import hmac
import logging
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from protos.watched_files import WatchedFiles

log = logging.getLogger(__name__)


class TokenFileError(ValueError):
    """A token file can not be used; the message names it and what is wrong."""


class Entry(BaseModel):
    """A tenant of the file; limits that it does not name are the router's defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: tuple[Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")], ...] = Field(min_length=1)
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    max_requests: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)


# Of a tenant; no name holds a "/".
TENANT_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
_Name = Annotated[str, StringConstraints(pattern=f"^{TENANT_NAME}$")]
_FILE = TypeAdapter(dict[_Name, Entry])


class TokenFile:
    """The tenants of a file by their tokens.

    Raises:
        TokenFileError: the file can not be used now; later, what was read before stays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = WatchedFiles([path])
        self._files.changed()
        self._tokens = read(path)

    def find(self, token: str) -> tuple[str, Entry] | None:
        """The tenant that a token is of; takes as long for each, known or not."""
        self._follow()
        digest, found = hashlib.sha256(token.encode()).digest(), None
        for known, name, entry in self._tokens:
            if hmac.compare_digest(known, digest):
                found = name, entry
        return found

    def _follow(self) -> None:
        if not self._files.changed():
            return
        try:
            self._tokens = read(self._path)
        except TokenFileError as error:
            log.warning("the new token file is no use, the old tokens stay", extra={"error": str(error)})
        else:
            log.info("tokens replaced", extra={"tokens": len(self._tokens)})


def read(path: Path) -> list[tuple[bytes, str, Entry]]:
    """Digest, tenant's name and entry of each token.

    Raises:
        TokenFileError: the file can not be read or is no token file.
    """
    try:
        tenants = _FILE.validate_python(tomllib.loads(path.read_text()))
    except OSError as error:
        raise TokenFileError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        row = error.errors()[0]
        place = ".".join(str(part) for part in row["loc"] if part != "[key]")
        raise TokenFileError(f"{path}: {place}: {row['msg']}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise TokenFileError(f"{path} is no token file: {error}") from error
    tokens = [(bytes.fromhex(digest), name, entry) for name, entry in tenants.items() for digest in entry.sha256]
    if len({digest for digest, _, _ in tokens}) < len(tokens):
        raise TokenFileError(f"{path}: a hash stands there twice: a token is of one tenant only")
    return tokens
