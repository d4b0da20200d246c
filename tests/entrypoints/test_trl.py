"""TRL trains with Jackfield in vLLM's place: `examples/frameworks`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from serving import engine_config, running

import jackfield
from jackfield import SamplingParams
from jackfield.entrypoints.http.options import ServerOptions

EXAMPLES = Path(jackfield.__file__).resolve().parent / "examples/frameworks"
MODEL = EXAMPLES.parents[1] / "plugins/models/embedded"
OPTIONS: dict[str, Any] = {
    # As TRL 1.16 makes it in the trainer's process.
    "tensor_parallel_size": 1, "gpu_memory_utilization": 0.3, "max_model_len": 256,
    "max_num_seqs": 8, "enable_sleep_mode": True, "model_impl": "auto",
    "distributed_executor_backend": "external_launcher", "seed": 0, "quantization": None,
    "max_num_batched_tokens": 4096, "logprobs_mode": "processed_logprobs",
    "trust_remote_code": False, "dtype": "float32", "device": "cpu",
}  # fmt: skip


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Jackfield under vLLM's name; the name is nobody's afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("vllm")
    for name in [each for each in sys.modules if each.split(".")[0] == "vllm"]:
        del sys.modules[name]


def test_a_trainer_in_the_process_lends_memory_and_sends_weights(vllm: Any) -> None:
    """The calls of TRL's colocated mode, in their order."""
    tensors = {name: t.float() for name, t in load_file(MODEL / "model.safetensors").items()}
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9] * 20}]
    params = SamplingParams(n=1, temperature=0.0, top_k=0, max_tokens=8, logprobs=0)

    def tokens(llm: Any) -> list[tuple[int, ...]]:
        outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False)
        assert all(step for output in outputs for step in output.outputs[0].logprobs)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    with vllm.LLM(model=str(MODEL), **OPTIONS) as llm:
        before = tokens(llm)
        llm.sleep(level=2)
        for scale in (1.0, 1.5, 1.0):
            llm.wake_up(tags=["weights"])
            model = llm.llm_engine.model_executor.driver_worker.model_runner.model
            for name, tensor in tensors.items():
                parameter = torch.nn.Parameter(tensor * (scale if "mlp" in name else 1))
                assert model.load_weights([(name, parameter)]) == {name}
            assert llm.reset_prefix_cache()
            llm.wake_up(tags=["kv_cache"])
            assert (tokens(llm) == before) == (scale == 1.0)
            llm.sleep(level=2)


def test_weights_that_do_not_fit_leave_the_old_ones(vllm: Any) -> None:
    tensors = {name: t.float() for name, t in load_file(MODEL / "model.safetensors").items()}
    name, *_ = tensors
    with vllm.LLM(model=str(MODEL), **OPTIONS) as llm:
        llm.load_weights([(name, tensors[name])])
        with pytest.raises(jackfield.core.errors.InvalidRequest, match="missing"):
            llm.reset_prefix_cache()
        with pytest.raises(jackfield.core.errors.InvalidRequest, match=name):
            llm.load_weights([(name, tensors[name][:3])])
        assert llm.weights_version == "default" and llm.reset_prefix_cache()
        llm.load_weights(tensors.items())
        llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=1), use_tqdm=False)
        assert llm.weights_version == "1"
    with pytest.raises(ValueError, match="tensor_parallel_size: must be 1"):
        vllm.LLM(model=str(MODEL), **{**OPTIONS, "tensor_parallel_size": 2})


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_grpo_trains(mode: str) -> None:
    """Both sides' log-probabilities differ by rounding alone: no update is lost."""
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_HOST_IP": "127.0.0.1"}
    command = [sys.executable, str(EXAMPLES / "train_trl.py"), "--steps", "3"]

    def train(*more: str) -> str:
        done = subprocess.run(
            [*command, *more], env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    if mode == "colocate":
        printed = train()
    else:
        config = engine_config(
            MODEL, device="cpu", max_model_len=256, logprobs_mode="processed_logprobs",
            max_logprobs=-1,
        )  # fmt: skip
        with running(config, ServerOptions(enable_admin=True)) as server:
            printed = train("--server", server.url)
            assert server.call(lambda engine: engine.weights_version()) == "3"
    differences = [float(each) for each in re.findall(r"\|Δ\| (\S+)", printed)]
    assert len(differences) == 3 and max(differences) < 1e-4
