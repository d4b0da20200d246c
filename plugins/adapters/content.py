"""What all formats check of an adapter's numbers, and the digest of its content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...core.adapters.file import AdapterFile, ReadTensor, is_finite
from ...core.errors import ConfigError


def with_digest(file: AdapterFile) -> AdapterFile:
    """Read all tensors of an adapter once, and return it with the digest of its content.

    Raises ConfigError with the tensor's name for a number that is not finite: it would spread to
    what the adapter's rows are computed with.
    """
    digest = hashlib.sha256()
    digest.update(repr(file.invocation_tokens).encode())
    for name, settings, read in _parts(file):
        tensor = read().contiguous()
        if not is_finite(tensor):
            raise ConfigError(f"{name}: has a value that is not finite", param=name)
        head = (name, *settings, str(tensor.dtype), tuple(tensor.shape))
        digest.update(f"{head!r}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return replace(file, digest=digest.hexdigest())


def check_invocation(file: AdapterFile, field: str) -> None:
    """Refuse an adapter that acts from a token on, but not in all that it changes. field: the one
    that has the tokens."""
    whole = file.replaced or file.token_rows or file.experts
    if file.invocation_tokens and (whole or any(each.embedding for each in file.low_rank)):
        raise ConfigError(
            f"{field}: only low-rank changes of linear layers can begin at a token, and this "
            "adapter has others",
            param=field,
        )


def _parts(file: AdapterFile) -> Iterator[tuple[str, tuple[object, ...], ReadTensor]]:
    """Yield each tensor: its name, what else is said of it, and how to read it; in an order of
    their own."""
    for layer in sorted(file.low_rank, key=lambda each: each.name):
        settings = (layer.scale.hex(), layer.embedding, layer.pairs)
        parts = {
            "A": layer.a, "B": layer.b, "bias": layer.bias, "magnitude": layer.magnitude
        }  # fmt: skip
        for kind, read in parts.items():
            if read is not None:
                yield f"{layer.name}: {kind}", settings, read
    for experts in sorted(file.experts, key=lambda each: each.name):
        yield f"{experts.name}: A", (experts.scale.hex(), "experts"), experts.a
        yield f"{experts.name}: B", (experts.scale.hex(), "experts"), experts.b
    for name, read in sorted(file.replaced.items()):
        yield name, ("replaced",), read
    for rows in sorted(file.token_rows, key=lambda each: each.name):
        yield f"{rows.name}: rows", (rows.token_ids,), rows.rows
