"""`TwoRanksKit`: `ExecutorKit` for an executor with two ranks."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import transformers

from jackfield import EngineConfig
from jackfield.plugins.conformance.executors import ExecutorKit

from helpers import COMMON


class TwoRanksKit(ExecutorKit):
    model: ClassVar[str]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        """The embedded model's heads cannot be divided by two."""
        folder = tmp_path_factory.mktemp("ranks")
        sizes = {**COMMON, "vocab_size": 1000, "head_dim": 16}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
        model.save_pretrained(folder)
        cls.model = str(folder)

    def config(self, **options: Any) -> EngineConfig:
        ranks = 1 if options.get("executor") == "inprocess" else 2
        shared = {"model": self.model, "skip_tokenizer_init": True, "tensor_parallel_size": ranks}
        return super().config(**{**shared, **options})
