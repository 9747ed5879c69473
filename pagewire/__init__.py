"""What a user touches: the CLI, the Python client, the local launcher.

`from pagewire import Client` is a promise to users, hence the one re-export of this repository. The modules behind it
are loaded only on demand: neither launching services nor checking health loads them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagewire.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pagewire import client

    return getattr(client, name)
