"""`LLM` in the process of a trainer, which fills its weights and lends its memory."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

import jackfield
from jackfield.core.live.weight_update import WeightUpdate


class LLM(jackfield.LLM):
    """`jackfield.LLM` that takes vLLM's options, and weights as vLLM's model does.

    Trainers call `load_weights` of the model once per tensor, and say nothing at the end of the
    last one. So the first call begins an update, and whatever comes next and depends on the weights
    commits it: all tensors, or none, as ever.
    """

    def __init__(
        self,
        model: str = "",
        *,
        enable_sleep_mode: bool = False,
        distributed_executor_backend: str | None = None,
        **options: Any,
    ) -> None:
        """enable_sleep_mode: ignored, as every engine can sleep. distributed_executor_backend:
        "external_launcher": each process of the trainer has an engine of its own, so
        `tensor_parallel_size` must be 1. options: None means Jackfield's own."""
        if distributed_executor_backend == "external_launcher":
            distributed_executor_backend = None
            if options.get("tensor_parallel_size", 1) != 1:
                raise ValueError(
                    "tensor_parallel_size: must be 1 in a process of the trainer; use a server "
                    "(vllm_mode='server') for a model that one device does not hold"
                )
        options["distributed_executor_backend"] = distributed_executor_backend
        given = {name: value for name, value in options.items() if value is not None}
        super().__init__(model, **given)
        self._update: WeightUpdate | None = None

    @property
    def llm_engine(self) -> Any:
        """What leads trainers to `load_weights`, by vLLM's way."""
        model = SimpleNamespace(load_weights=self.load_weights)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        executor = SimpleNamespace(driver_worker=worker)
        return SimpleNamespace(model_executor=executor)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take tensors of new weights, named as in the checkpoint, and return their names. The next
        `generate` or `reset_prefix_cache` is the first with all of them."""
        named = [(name, tensor.detach()) for name, tensor in weights]
        if self._update is None:
            self._update = self._run(self.engine.begin_weight_update())
        try:
            self._run(self._update.put(named))
        except Exception:
            self._update = None
            raise
        return {name for name, _ in named}

    def _commit(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            self._run(update.commit())

    def generate(self, *args: Any, **options: Any) -> list[jackfield.RequestOutput]:
        self._commit()
        return super().generate(*args, **options)

    def reset_prefix_cache(self) -> bool:
        self._commit()
        return super().reset_prefix_cache()
