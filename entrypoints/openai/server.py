"""Public face of the server; see `entrypoints/server/server.py`."""

from ..server.listen import Listen
from ..server.server import listening

__all__ = ["Listen", "listening"]
