"""Recorded steps of a model that keeps states give what launched ones give, prompts included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from replaying import MixedRecordingExecutor

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.nn.operations import Operations
from jackfield.core.registry import Provenance, load_plugins

from helpers import interpreted, joining

pytest.importorskip("triton")

VOCAB = 61


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("recording", MixedRecordingExecutor)

    @hookimpl
    def register_operations(self, registry: Any) -> None:
        from jackfield.plugins.operations.states import TritonStates

        class StateKernels(TritonStates, Operations):
            """The kernels over states, and torch for all else: the interpreter is slow."""

            name = "state_kernels"

        registry.add("state_kernels", StateKernels)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_heads=2, head_dim=16,
        state_size=8, n_groups=1, chunk_size=8, initializer_range=0.4, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("mamba2")
    transformers.Mamba2ForCausalLM(config).save_pretrained(folder)
    return folder


async def tokens(config: EngineConfig, plugins: Any) -> list[list[int]]:
    """More requests than slots, with prompts of several lengths, one longer than a step."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, detokenize=False)
    prompts = [
        [3 + (7 * number * at) % (VOCAB - 3) for at in range(1, 3 + 5 * number)]
        for number in range(5)
    ]
    async with AsyncEngine(config, plugins=plugins) as engine:
        outputs = await joining(engine, [(prompt, params) for prompt in prompts])
    return [list(output.outputs[0].token_ids) for output in outputs]


@interpreted
async def test_recorded_steps_equal_launched_ones(checkpoint: Path) -> None:
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    common: dict[str, Any] = {
        "model": str(checkpoint), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "max_model_len": 40, "max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 8,
    }  # fmt: skip
    launched = await tokens(EngineConfig(**common, operations="torch"), plugins)
    config = EngineConfig(**common, operations="state_kernels", executor="recording")
    recorded = await tokens(config, plugins)
    assert recorded == launched
    assert MixedRecordingExecutor.recorders[-1].replays >= 12
