"""A model whose results are the same bits in any batch, if its operations' and attention's are."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.errors import ConfigError
from ...core.old_names import RenamedMethod
from ...core.registry import Plugins
from .paged_model import PagedModel, example_prompts

SUMS = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "sum", "mean", "var", "std",
    "var_mean", "norm", "linalg_vector_norm", "logsumexp", "_softmax", "_log_softmax", "cumsum",
    "native_layer_norm", "convolution", "_scaled_dot_product_flash_attention_for_cpu",
    "exp", "expm1", "sigmoid", "tanh", "silu", "gelu", "softplus", "log", "erf",
})  # fmt: skip
"""What a device may compute in another order, or otherwise at the end of an array, if there are
more rows; by torch's names."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes `SUMS` outside of operations and the attention backend."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.within = 0
        self.differing: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.within and name.removesuffix("_") in SUMS:
            self.differing.add(name)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self.within += 1
        try:
            yield
        finally:
            self.within -= 1

    def enter(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count what a method computes as inside."""
        method = getattr(owner, name)

        def watched(*args: Any, **more: Any) -> Any:
            with self.inside():
                return method(*args, **more)

        monkeypatch.setattr(owner, name, watched)


def check_batch_invariance(folder: Path, plugins: Plugins) -> None:
    """Compare a prompt's logits in one step with those in chunks, beside another row: the same
    bits; and check that the model computes nothing in an order of its own. A model that does not
    claim it must be refused by the option's name."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = "triton_invariant" if device == "cuda" else "torch_invariant"
    try:
        model = PagedModel(
            folder, "float32", kernels=kernels, plugins=plugins, batch_invariant=True
        )
    except ConfigError as error:
        assert error.param in ("batch_invariant", "attention_backend"), error
        return
    if model.keeps_states:
        return  # `core.parts.exclusions` refuses it.
    prompt, beside = example_prompts()[2], example_prompts()[1]
    want = model.run({0: prompt})[0]
    parts = [model.run({1: prompt[:4]})[1], model.run({1: prompt[4:12], 2: beside})[1]]
    parts += [model.run({1: [token], 2: [token]})[1] for token in prompt[12:]]
    assert torch.equal(torch.cat(parts), want), "the batch changes bits of the logits"
    with pytest.MonkeyPatch.context() as monkeypatch, _Watch() as watch:
        operations = {
            id(module.operations): module.operations
            for module in model.model.modules()
            if hasattr(module, "operations")
        }
        for each in operations.values():
            for name in dir(each):
                method = inspect.getattr_static(each, name)
                renamed = name.startswith("_") or isinstance(method, RenamedMethod)
                if not renamed and callable(getattr(each, name)):
                    watch.enter(each, name, monkeypatch)
        watch.enter(model.backend, "forward", monkeypatch)
        model.run({3: prompt})
    assert not watch.differing, f"not by its operations: {', '.join(sorted(watch.differing))}"
