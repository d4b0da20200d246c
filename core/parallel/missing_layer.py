"""Parts of a model that another stage of the pipeline has."""

from __future__ import annotations

from torch import nn


class MissingLayer(nn.Module):
    """Stands in the place of a module that this stage does not have, under its name: the tensors
    that a checkpoint has for it are not loaded."""


def missing_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return name prefixes of parameters that this stage lacks."""
    modules = model.named_modules()
    return tuple(f"{name}." for name, module in modules if isinstance(module, MissingLayer))
