"""`transformers`, where several threads may import it at once."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def transformers_module() -> Any:
    """Return the module, importing it.

    The import ends by replacing the module; a waiting thread's `from transformers import …` would
    see the old one, without names.
    """
    importlib.import_module("transformers")
    return sys.modules["transformers"]
