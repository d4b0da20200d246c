"""`ThroughTriton`: a quantization format's tests with the kernels in place of the reference."""

from __future__ import annotations

import pytest
import torch

from jackfield.plugins.operations.triton import TritonOperations


class ThroughTriton:
    """A base class before the format's own test. Without a GPU, kernels run in Triton's
    interpreter, where a whole engine would take too long."""

    operations = TritonOperations
    device = "cuda" if torch.cuda.is_available() else "cpu"
    test_engine_gives_the_dequantised_models_log_probabilities = None
    if not torch.cuda.is_available():  # The interpreter's products of bfloat16 are wrong.
        test_results_are_in_the_models_type = None

    @pytest.fixture(scope="class", params=["Qwen3"])
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> str:
        return str(request.param)
