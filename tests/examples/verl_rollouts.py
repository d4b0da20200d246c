"""Roll out with verl and an engine of Jackfield's, for test_verl.py: a checkpoint's folder as the
argument. Prints what happened, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ |= {"RANK": "0", "VERL_USE_EXTERNAL_MODULES": "verl_jackfield"}

import ray
import torch
import transformers
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class

PROMPT = list(range(5, 25))


class Rollouts:
    """A trainer's model, and the engine that has its weights."""

    def __init__(self, folder: str) -> None:
        own = {"device": "cpu", "num_gpu_blocks_override": 100}
        config = RolloutConfig(
            name="jackfield", tensor_model_parallel_size=1, prompt_length=64, response_length=64,
            dtype="float32", load_format="dummy", max_num_seqs=8, max_num_batched_tokens=256,
            engine_kwargs={"jackfield": own},
        )  # fmt: skip
        model_config = HFModelConfig(path=folder)
        replica = get_rollout_replica_class("jackfield")
        self.replica: Any = replica(0, config, model_config, gpus_per_node=1)
        self.replica.rollout_mode = RolloutMode.HYBRID
        self.adapter = get_rollout_class("jackfield")(config, model_config, None, replica_rank=0)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).float()

    def generate(self, request_id: str, **params: Any) -> Any:
        params = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 12, **params}
        return self.replica.server_handle.generate.remote(
            prompt_ids=PROMPT, sampling_params=params, request_id=request_id
        )

    async def difference(self) -> float:
        """The largest one of both sides' log-probabilities."""
        output = await self.generate("scored", logprobs=True)
        assert output.stop_reason == "completed" and len(output.token_ids) == 12
        ids = torch.tensor([PROMPT + output.token_ids])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(PROMPT) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None]).squeeze(1)
        return float((own - torch.tensor(output.log_probs)).abs().max())

    async def train(self, step: int) -> None:
        """As verl's hybrid mode does: the engine lends its memory, and then takes weights."""
        await self.adapter.release()
        for parameter in self.model.parameters():
            parameter.data.mul_(1.01)
        await self.adapter.resume(["weights"])
        await self.adapter.update_weights(self.model.named_parameters(), global_steps=step)
        await self.adapter.resume(["kv_cache"])


async def run(folder: str) -> dict[str, Any]:
    rollouts = Rollouts(folder)
    server, seen = rollouts.replica, {}
    await server.launch_servers()
    differences = []
    for step in (1, 2):
        await rollouts.train(step)
        differences.append(await rollouts.difference())
    output = await rollouts.generate("steps")
    seen["step"] = output.extra_fields["global_steps"]

    cut = rollouts.generate("cut", max_tokens=44)
    while not (await server.server_handle.abort_all_requests.remote())["aborted_count"]:
        await server.resume_generation()
    seen["cut"] = (await cut).stop_reason
    waiting = rollouts.generate("waiting")
    await server.release_kv_cache()
    await server.resume_kv_cache()
    await server.resume_generation()
    seen["waiting"] = (await waiting).stop_reason
    await server.abort_all_requests(reject_request=True)
    seen["rejected"] = (await rollouts.generate("rejected")).stop_reason
    await server.resume_generation()

    half = list(rollouts.model.named_parameters())[:5]
    try:
        await rollouts.adapter.update_weights(half, global_steps=3)
    except Exception as error:
        seen["half"] = str(error)
    await server.clear_kv_cache()
    differences.append(await rollouts.difference())
    await server.server_handle.stop.remote()
    return {**seen, "differences": differences}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    print(json.dumps(asyncio.run(run(sys.argv[1]))))
    ray.shutdown()
