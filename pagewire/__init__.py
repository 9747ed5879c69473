"""What a user touches: the CLI, the Python client, the local launcher.

`from pagewire import Client` is a promise to users, hence the one re-export of this repository.
"""

from pagewire.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
