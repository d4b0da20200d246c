"""Train the embedded model with TRL's GRPO, and Jackfield as what TRL calls vLLM.

    pip install trl
    PYTHONPATH=examples/frameworks python examples/frameworks/train_trl.py --steps 20

The engine is in the trainer's process, and lends it its memory between rollouts. With a server:

    jackfield serve tiny --enable-admin --dtype float32 --logprobs-mode processed_logprobs
    PYTHONPATH=examples/frameworks python examples/frameworks/train_trl.py --server http://localhost:8000

The reward is how many of a completion's letters are "e". The difference is that of both sides'
log-probabilities: rounding alone, unless an update was lost.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl.generation.vllm_generation
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

import jackfield

MODEL = str(Path(jackfield.__file__).resolve().parent / "plugins/models/embedded")
PROMPTS = ("Once upon a time", "The engine", "A short story:", "In the morning")
GROUP = 8


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the share of "e" among each completion's letters."""
    letters = [[each for each in text.lower() if each.isalpha()] for text in completions]
    return [each.count("e") / max(1, len(each)) for each in letters]


class CPUClient(VLLMClient):
    """TRL's client, for a trainer on a CPU, whose tensors travel by gloo."""

    def init_communicator(self, device: Any = 0) -> None:
        super().init_communicator("cuda")  # Nothing is done with the name, and "cpu" is refused.


def train(steps: int, server: str | None, folder: str) -> list[dict[str, float]]:
    """Train for some steps; return TRL's log of each."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        trl.generation.vllm_generation.VLLMClient = CPUClient
    config = GRPOConfig(
        output_dir=folder, max_steps=steps, learning_rate=5e-4, lr_scheduler_type="constant",
        per_device_train_batch_size=GROUP * len(PROMPTS), num_generations=GROUP,
        max_completion_length=24, temperature=1.0, use_cpu=on_cpu, bf16=False, seed=1,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[],
        use_vllm=True, vllm_mode="server" if server else "colocate", vllm_server_base_url=server,
        vllm_enable_sleep_mode=not server, vllm_max_model_length=256,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS] * 8),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--server", help="address of a server; default: an engine in this process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number, entry in enumerate(train(args.steps, args.server, folder), 1):
            difference = entry["sampling/sampling_logp_difference/mean"]
            print(f"step {number:3d}  reward {entry['reward']:.3f}  |Δ| {difference:.1e}")


if __name__ == "__main__":
    main()
