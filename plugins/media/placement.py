"""What a multimodal model of `transformers` does with the rows of pictures: its `forward` runs with
others in the place of its tower and its text part."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TEXT_PARTS = ("language_model", "text_model")
COUNT = 3
"""Rows of the picture with which a model is tried."""


class NotPlacedError(Exception):
    """A model does more than to put rows in the place of embeddings. The message is a clause."""


@dataclass(frozen=True)
class FeatureCall:
    """How a model calls its `get_image_features`."""

    inputs: Mapping[str, str]
    """Parameter → name of the processor's tensor that it passes."""
    constants: Mapping[str, Any]
    """What it passes besides."""
    known: frozenset[str]
    """Parameters of its `forward`."""

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return what `get_image_features` gets for a picture. Raises ValueError for tensors that
        the model uses in another way."""
        names = set(self.inputs.values())
        if others := sorted(tensors.keys() & self.known - names):
            raise ValueError(f"{others[0]} does not go to get_image_features of this model")
        given = {own: tensors[name] for own, name in self.inputs.items() if name in tensors}
        return {**self.constants, **given}


class Rows(nn.Module):
    """Embeddings that are computed from ids."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1, size + 1) * 1.0, requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.sin(token_ids[..., None] * self.weight)


class TextPart(nn.Module):
    """Keeps what a text part is given."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.given = config, dict[str, Any]()
        self.embed_tokens = Rows(config.hidden_size)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, **given: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        self.given = given
        return BaseModelOutputWithPast(last_hidden_state=given["inputs_embeds"])


def feature_call(whole: Any, config: Any) -> FeatureCall:
    """Return how a model without its head calls `get_image_features`; its text part is replaced.

    Raises NotPlacedError, unless its `forward` puts the rows in the place of embeddings, gives
    these to its text part, and does nothing else.
    """
    name = next((name for name in TEXT_PARTS if name in whole._modules), None)
    image = getattr(config, "image_token_id", None)
    if name is None or not hasattr(whole, "get_image_features"):
        raise NotPlacedError("its class has no text part beside a tower")
    if not isinstance(image, int):
        raise NotPlacedError("its configuration has no image_token_id")
    if hasattr(whole, "get_rope_index"):
        raise NotPlacedError("its tokens turn by their place in a picture")
    with torch.device("cpu"), torch.no_grad():
        text = TextPart(config.get_text_config(decoder=True))
        setattr(whole, name, text)
        return _feature_call(whole, text, image)


def _feature_call(whole: Any, text: TextPart, image: int) -> FeatureCall:
    token_ids = torch.tensor([[image + 1, image + 2, *[image] * COUNT, image + 3]])
    expected = text.embed_tokens(token_ids)
    rows = torch.randn(COUNT, expected.shape[-1])
    expected[token_ids == image] = rows
    signature = inspect.signature(whole.get_image_features)
    known = inspect.signature(whole.forward).parameters
    names = [
        name
        for name, parameter in signature.parameters.items()
        if name in known and "Tensor" in str(parameter.annotation)
    ]
    tensors: dict[str, Any] = {name: torch.full((1, 2), n) for n, name in enumerate(names, 1)}
    kinds = (token_ids == image).int()
    types = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in known}
    passed = _tried(whole, signature, rows, {"input_ids": token_ids, **tensors, **types})
    given = dict(text.given)
    if not torch.equal(given.pop("inputs_embeds"), expected):
        raise NotPlacedError("it changes the rows of a picture, or puts them elsewhere")
    positions = given.pop("position_ids", None)
    if positions is not None and not torch.equal(
        positions, torch.arange(token_ids.shape[1]).view(1, -1)
    ):
        raise NotPlacedError("its tokens have positions of their own")
    if others := [name for name, value in given.items() if any(_tensors(value))]:
        raise NotPlacedError(f"its text part gets {others[0]} beside embeddings")
    inputs = {
        own: name
        for own, value in passed.items()
        for name, tensor in tensors.items()
        if isinstance(value, torch.Tensor) and torch.equal(value.to(tensor.dtype), tensor)
    }
    constants = {own: value for own, value in passed.items() if own not in inputs}
    if others := [own for own, value in constants.items() if any(_tensors(value))]:
        raise NotPlacedError(f"it computes {others[0]} of its tower")
    return FeatureCall(inputs, constants, frozenset(known))


def _tried(
    whole: Any, signature: inspect.Signature, rows: torch.Tensor, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Run `forward`; return with what it has called `get_image_features`, by name."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    calls: list[dict[str, Any]] = []
    error: Exception | None = None
    for form in (rows, rows[None], (rows,)):  # In which classes have them.

        def features(*args: Any, form: Any = form, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            calls.append({**bound, **bound.pop("kwargs", {})})
            return BaseModelOutputWithPooling(pooler_output=form)

        whole.get_image_features = features
        try:
            whole(**inputs)
            break
        except Exception as caught:
            error = caught
        finally:
            del whole.get_image_features
    else:
        raise NotPlacedError(f"its forward does more ({type(error).__name__}: {error})")
    if not calls:
        raise NotPlacedError("its forward does not call get_image_features")
    return {name: value for name, value in calls[-1].items() if value is not None}


def _tensors(value: Any) -> Iterator[bool]:
    """Yield True if tensors are in a value."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, torch.Tensor):
        yield True
