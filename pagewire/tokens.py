"""`pagewire token new`: a bearer token, and its entry for the router's token file, which holds only its hash."""

import hashlib
import re
import secrets

from pagewire.errors import PagewireError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class TokenError(PagewireError):
    """A token cannot be made."""


def new(name: str) -> tuple[str, str]:
    """A token of 256 random bits for the tenant `name`, and its lines for the router's token file.

    Raises:
        TokenError: the router would refuse the name.
    """
    if not _NAME.fullmatch(name):
        allowed = "1 to 64 letters, digits, dots, underscores, hyphens or at signs, a letter or a digit first"
        raise TokenError(f"{name!r} cannot be a tenant's name: {allowed}")
    token = f"pw-{secrets.token_urlsafe(32)}"
    return token, f'["{name}"]\nsha256 = ["{hashlib.sha256(token.encode()).hexdigest()}"]'
