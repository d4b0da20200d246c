"""`transformers`, where several threads may import it at once."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def transformers_module() -> Any:
    """Return the module, imported now if it was not.

    At the end of its import it puts another module in its own place. `from transformers import …`
    of a thread that waited for that import looks into the first one, which has none of its names.
    """
    importlib.import_module("transformers")
    return sys.modules["transformers"]
