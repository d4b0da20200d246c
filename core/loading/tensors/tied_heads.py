"""Tied heads, and checkpoints' tensors for them.

As in `transformers`: a head equal to the embeddings is dropped; one without embeddings fills both;
one that differs is loaded, and the configuration is wrong (`OwnHead`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from ...errors import LoadError, listed
from .staging import Staging

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → integer type."""
ROWS_AT_ONCE = 1024


class OwnHead(LoadError):
    """A checkpoint has a head, but its configuration ties it to the embeddings."""

    @classmethod
    def of(cls, names: Collection[str]) -> OwnHead:
        return cls(
            f"{listed(sorted(names))} differs from the embeddings, and tie_word_embeddings is "
            "true; set it to false in config.json, or by hf_overrides"
        )


class TiedHeads:
    """Compares tied heads' tensors with the embeddings'.

    All ranks agree: for sharded or quantized embeddings, digests of whole tensors are compared.
    """

    def __init__(
        self,
        tied: Mapping[str, str],
        parameters: Mapping[str, torch.nn.Parameter],
        quantized: Mapping[str, Staging],
    ) -> None:
        """tied: as `WeightMap.tied`; existing heads are ignored."""
        self._embeddings = {
            head: embedding for weight, embedding in tied.items()
            if weight not in parameters and (head := _module(weight)) not in quantized
        }  # fmt: skip
        """Head → parameter that stands for its weight."""
        self._parameters = parameters
        self._quantized = {
            embedding: quantized[_module(embedding)] for embedding in self._embeddings.values()
            if _module(embedding) in quantized
        }  # fmt: skip
        self._digests: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        """Head or embedding → rest of the name → digest."""
        self._heads: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        """Tensors of heads whose quantized embeddings lack theirs."""
        self._filled: dict[str, str] = {}
        """Embedding → head tensor that filled it."""
        self._loaded: set[str] = set()
        """Embeddings with tensors."""
        self._own: set[str] = set()
        """Heads' tensors that differ."""

    @property
    def names(self) -> Iterator[str]:
        return (f"{head}.weight" for head in self._embeddings)

    @property
    def filled(self) -> Iterable[str]:
        """Embeddings filled from heads."""
        return self._filled.keys()

    def embedding(self, parameter_name: str) -> str | None:
        """Return the parameter for a tied head's tensor, or None; biases are not tied."""
        head = self._head(parameter_name)
        return None if head is None else self._embeddings[head]

    def add_head(
        self, name: str, parameter_name: str, whole: torch.Tensor, part: torch.Tensor
    ) -> None:
        """Take a head's tensor. part: this rank's, of the embeddings' rows."""
        head = self._head(parameter_name)
        assert head is not None, "it is of a tied head"
        embedding, leaf = self._embeddings[head], parameter_name[len(head) + 1 :]
        parameter = self._parameters.get(embedding)
        if embedding in self._quantized:
            self._digests[head][leaf] = _digest(whole)
            if embedding not in self._loaded:
                self._heads[head][leaf] = whole
        elif parameter is None:  # Another stage has the embeddings.
            return
        elif leaf != "weight" or part.shape != parameter.shape:
            self._own.add(name)
        else:
            if part is not whole:
                self._digests[head][leaf] = _digest(whole.to(parameter.dtype))
            if embedding not in self._loaded:
                parameter.data.copy_(part)
                self._filled[embedding] = name
            elif not _equal(parameter.data, part):
                self._own.add(name)

    def add_embedding(self, parameter_name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Note an embedding's tensor before it replaces a head's. part: this rank's."""
        if parameter_name not in self._embeddings.values():
            return
        parameter = self._parameters[parameter_name]
        self._loaded.add(parameter_name)
        if part is not whole:
            self._digests[parameter_name]["weight"] = _digest(whole.to(parameter.dtype))
        head = self._filled.pop(parameter_name, None)
        if head is not None and not _equal(parameter.data, part):
            self._own.add(head)

    def add_quantized(self, prefix: str, leaf: str, whole: torch.Tensor) -> None:
        """Note a quantized embedding's tensor."""
        embedding = f"{prefix}.weight"
        if embedding in self._quantized:
            self._loaded.add(embedding)
            self._heads.clear()
            self._digests[embedding][leaf] = _digest(whole)

    def finish(self) -> None:
        """Fill quantized embeddings from heads' tensors. Raises OwnHead."""
        for head, tensors in self._heads.items():
            for leaf, tensor in tensors.items():
                layer = self._quantized[self._embeddings[head]]
                layer.add(f"{head}.{leaf}", leaf, None, tensor)
        for head, embedding in self._embeddings.items():
            own, other = self._digests.get(head, {}), self._digests.get(embedding, {})
            if own and other and not _same(own, other):
                self._own |= {f"{head}.{leaf}" for leaf in own}
        if self._own:
            raise OwnHead.of(self._own)

    def _head(self, parameter_name: str) -> str | None:
        for head in self._embeddings:
            if parameter_name.startswith(f"{head}.") and parameter_name != f"{head}.bias":
                return head
        return None


def _module(parameter_name: str) -> str:
    return parameter_name.rpartition(".")[0]


def _equal(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether filling would change nothing."""
    return parameter.shape == tensor.shape and torch.equal(parameter, tensor.to(parameter))


def _same(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return own.keys() == other.keys() and all(
        torch.equal(digest, other[leaf]) for leaf, digest in own.items()
    )


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest: per row, the sum of its bits' integers times random ones."""
    rows = tensor.contiguous().reshape(len(tensor) if tensor.dim() > 1 else 1, -1)
    bits = rows.view(INTEGERS[tensor.element_size()])
    random = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, bits.shape[1:], generator=random).to(bits.device)
    sums = [(part.to(torch.int64) * factors).sum(-1) for part in bits.split(ROWS_AT_ONCE)]
    return torch.cat(sums).cpu()
