"""The file of tenants: what each may use and, where tokens are required, who may come in. Read again when it changes.

    [acme]                                    # the tenant's name
    sha256 = ["9f86d081...", "60303ae2..."]   # one for each token; two while one replaces the other
    weight = 2                                # the rest is optional
    max_requests = 32
    tokens_per_minute = 600000

Hashes are for `--auth-tokens`, where each tenant needs one; `--tenants` takes only the rest. `pagewire token new
NAME` writes such an entry. A token has 256 random bits, so a plain hash of it reveals nothing.
"""

import hashlib
import hmac
import logging
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from protos.watched_files import WatchedFiles

T = TypeVar("T")
log = logging.getLogger(__name__)


class TenantFileError(ValueError):
    """A file of tenants cannot be used; the message names it and what is wrong."""


class Entry(BaseModel):
    """A tenant in the file; limits that it does not set are the router's defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    max_requests: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None


class TokenEntry(Entry):
    """A tenant that is known by its tokens."""

    sha256: tuple[Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")], ...] = Field(min_length=1)


# Of a tenant; no name contains a "/".
TENANT_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}"
_Name = Annotated[str, StringConstraints(pattern=f"^{TENANT_NAME}$")]
_TENANTS = TypeAdapter(dict[_Name, Entry])
_TOKENS = TypeAdapter(dict[_Name, TokenEntry])


class TenantFile:
    """The tenants of a file by their names.

    Raises:
        TenantFileError: the file cannot be used at the start; later, what was read before stays in use.
    """

    def __init__(self, path: Path) -> None:
        self._file = _Followed(path, read_tenants)

    def find(self, name: str) -> Entry:
        """What a tenant may use; an empty entry for one that is not in the file."""
        return self._file.content().get(name, Entry())


class TokenFile:
    """The tenants of a file by their tokens, with the same errors."""

    def __init__(self, path: Path) -> None:
        self._file = _Followed(path, read_tokens)

    def find(self, token: str) -> tuple[str, Entry] | None:
        """The tenant that a token belongs to; takes equally long for each token, known or not."""
        digest, found = hashlib.sha256(token.encode()).digest(), None
        for known, name, entry in self._file.content():
            if hmac.compare_digest(known, digest):
                found = name, entry
        return found


def read_tenants(path: Path) -> dict[str, Entry]:
    """Each tenant's entry by its name.

    Raises:
        TenantFileError: the file cannot be read or is no file of tenants.
    """
    return _read(path, _TENANTS)


def read_tokens(path: Path) -> list[tuple[bytes, str, Entry]]:
    """Digest, tenant's name and entry of each token.

    Raises:
        TenantFileError: the file cannot be read or is no token file.
    """
    tenants = _read(path, _TOKENS)
    tokens: list[tuple[bytes, str, Entry]] = [
        (bytes.fromhex(digest), name, entry) for name, entry in tenants.items() for digest in entry.sha256
    ]
    if len({digest for digest, _, _ in tokens}) < len(tokens):
        raise TenantFileError(f"{path}: a hash stands there twice: a token is of one tenant only")
    return tokens


class _Followed(Generic[T]):
    """What a file holds now; while it cannot be used, what it held before."""

    def __init__(self, path: Path, read: Callable[[Path], T]) -> None:
        self._path = path
        self._read = read
        self._files = WatchedFiles([path])
        self._files.changed()
        self._content = read(path)

    def content(self) -> T:
        if self._files.changed():
            try:
                self._content = self._read(self._path)
            except TenantFileError as error:
                log.warning("the new file of tenants is no use, the old one counts", extra={"error": str(error)})
            else:
                log.info("tenants replaced", extra={"file": str(self._path)})
        return self._content


def _read(path: Path, form: TypeAdapter[T]) -> T:
    try:
        return form.validate_python(tomllib.loads(path.read_text()))
    except OSError as error:
        raise TenantFileError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        row = error.errors()[0]
        place = ".".join(str(part) for part in row["loc"] if part != "[key]")
        raise TenantFileError(f"{path}: {place}: {row['msg']}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise TenantFileError(f"{path} is no file of tenants: {error}") from error
