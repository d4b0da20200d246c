"""Jackfield as the engine of verl's rollouts.

    export PYTHONPATH=examples/frameworks VERL_USE_EXTERNAL_MODULES=verl_jackfield
    python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=jackfield ...

verl imports the modules that the variable names, in each of its processes; this one registers a
rollout with the name "jackfield". A replica is an engine in an actor of Ray, on one host.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from typing import Any

import ray
import torch
from verl.workers.rollout import base
from verl.workers.rollout.replica import (
    RolloutMode,
    RolloutReplica,
    RolloutReplicaRegistry,
    TokenOutput,
)

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.live.engine_jobs import BeginUpdate, LiveJob, OpenTensors, Sleep
from jackfield.core.live.weight_update import WeightUpdate
from jackfield.core.live.worker_jobs import SharedBucket, SharedTensor, TensorPart
from jackfield.core.outputs import RequestOutput
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.server.listen import Listen
from jackfield.entrypoints.server.server import listening

NAME = "jackfield"
BUCKET_BYTES = 512 << 20
"""Of tensors whose handles are sent at once."""
KV_CACHE = ("kv_cache",)


class Server:
    """An engine in an actor of Ray, with the methods that verl calls."""

    def __init__(
        self, config: Any, model_config: Any, rollout_mode: RolloutMode, replica_rank: int
    ) -> None:
        self._config, self._mode = config, rollout_mode
        options = {
            "model": model_config.local_path or model_config.path,
            "dtype": config.dtype,
            "load_format": config.load_format,
            "seed": replica_rank + config.get("seed", 0),
            "max_model_len": config.max_model_len or config.prompt_length + config.response_length,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enforce_eager": config.enforce_eager,
            "enable_prefix_caching": config.enable_prefix_caching,
            "tensor_parallel_size": config.tensor_model_parallel_size,
            "logprobs_mode": config.logprobs_mode,
            "enable_sleep_mode": config.free_cache_engine,
            **(config.engine_kwargs.get(NAME) or {}),
        }
        self._engine = AsyncEngine(EngineConfig.from_options(options))
        self._running = AsyncExitStack()
        self._address = ("", 0)
        self._open = asyncio.Event()
        """Set while requests may come."""
        self._open.set()
        self._rejects = False
        self._live: dict[str, Any] = {}
        """Request → its stream."""
        self._step: int | None = None

    async def launch_server(self) -> None:
        """Start the engine, and serve it over HTTP for agents that speak so."""
        await self._running.enter_async_context(self._engine)
        host = ray.util.get_node_ip_address()
        listen = listening(self._engine, Listen(host=host, port=0), ServerOptions())
        url = await self._running.enter_async_context(listen)
        self._address = (host, int(url.rpartition(":")[2]))

    async def get_server_address(self) -> tuple[str, int]:
        return self._address

    # ------------------------------------------------------------ generation

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        priority: int = 0,
        **unsupported: Any,
    ) -> TokenOutput:
        """Complete a prompt. During a pause it waits, or ends at once."""
        if given := [name for name, value in unsupported.items() if value]:
            raise NotImplementedError(f"{', '.join(given)}: not served by Jackfield's rollout")
        prompt: dict[str, Any] = {"prompt_token_ids": [int(token) for token in prompt_ids]}
        if image_data:
            prompt["multi_modal_data"] = {"image": image_data}
        params = self._params(sampling_params, len(prompt_ids))
        while not self._open.is_set():
            if self._rejects:
                return self._output(None)
            await self._open.wait()
        stream = self._engine.generate(prompt, params, request_id=request_id, priority=priority)
        self._live[request_id] = stream
        last: RequestOutput | None = None
        try:
            async for output in stream:
                last = output
        finally:
            self._live.pop(request_id, None)
        return self._output(last)

    def _params(self, given: dict[str, Any], prompt_length: int) -> SamplingParams:
        config, given = self._config, dict(given)
        most = given.pop("max_tokens", None) or given.pop("max_new_tokens", None)
        if most is None:
            room = config.prompt_length + config.response_length - prompt_length
            most = min(config.response_length, room)
        room = self._engine.model_config.max_model_len - prompt_length
        given["logprobs"] = 0 if given.pop("logprobs", False) else None
        given.setdefault("repetition_penalty", config.repetition_penalty)
        given.setdefault("ignore_eos", config.ignore_eos)
        return SamplingParams(max_tokens=max(1, min(most, room)), **given)

    def _output(self, last: RequestOutput | None) -> TokenOutput:
        facts: dict[str, Any] = {"global_steps": self._step}
        if last is None:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=facts)
        if last.error is not None:
            raise last.error
        [completion] = last.outputs
        tokens = list(completion.token_ids)
        logprobs = None
        if completion.logprobs is not None:
            pairs = zip(completion.logprobs, tokens, strict=True)
            logprobs = [position[token].logprob for position, token in pairs]
        facts["num_cached_tokens"] = last.num_cached_tokens
        aborted = completion.finish_reason == "abort"
        return TokenOutput(
            token_ids=tokens,
            log_probs=logprobs,
            stop_reason="aborted" if aborted else "completed",
            extra_fields=facts,
        )

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """Let a request end with what it has."""
        if request_id not in self._live:
            return {"aborted": False, "request_id": request_id, "error": "not found"}
        await self._engine.abort(request_id)
        return {"aborted": True, "request_id": request_id}

    async def abort_all_requests(self, reject_request: bool = False, **_: Any) -> dict[str, Any]:
        """Pause. New requests wait for `resume_generation`, or are rejected."""
        self._rejects = reject_request
        self._open.clear()
        live = list(self._live)
        await self._engine.pause_generation("abort", lease=None)
        return {"aborted_count": len(live), "request_ids": live}

    async def resume_generation(self) -> None:
        if not await self._engine.is_sleeping():
            await self._engine.resume_generation()
        self._open.set()

    async def wait_for_requests_to_drain(self) -> None:
        await asyncio.gather(*(self._ended(each) for each in list(self._live)))

    async def _ended(self, request_id: str) -> None:
        while request_id in self._live:
            await asyncio.sleep(0.01)

    # ------------------------------------------------------------ memory and weights

    async def sleep(self) -> None:
        """Lend the memory to the trainer."""
        if self._config.free_cache_engine and self._mode != RolloutMode.STANDALONE:
            if not await self._engine.is_sleeping():
                await self._engine.sleep(2 if self._mode == RolloutMode.HYBRID else 1)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if self._mode != RolloutMode.STANDALONE:
            await self._engine.wake_up(tags)

    async def release_kv_cache(self) -> None:
        if self._config.free_cache_engine and self._mode != RolloutMode.COLOCATED:
            await self._engine.ask_live(Sleep(tags=KV_CACHE))

    async def resume_kv_cache(self) -> None:
        if self._config.free_cache_engine and self._mode != RolloutMode.COLOCATED:
            await self._engine.wake_up(KV_CACHE)

    async def clear_kv_cache(self) -> None:
        await self._engine.reset_prefix_cache(reset_running_requests=True)

    async def live(self, job: LiveJob) -> dict[str, Any]:
        """Do a job of an update."""
        return await self._engine.ask_live(job)

    async def set_global_steps(self, global_steps: int) -> None:
        self._step = global_steps

    async def start_profile(self, **_: Any) -> None:
        await self._engine.start_profile()

    async def stop_profile(self) -> None:
        await self._engine.stop_profile()

    async def stop(self) -> None:
        await self._running.aclose()


class Replica(RolloutReplica):
    """A `Server` for some workers of the trainer."""

    async def launch_servers(self) -> None:
        if self.nnodes > 1:
            raise NotImplementedError("rollout: a replica of Jackfield's is on one host")
        name = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
        options: dict[str, Any] = {
            "name": f"{NAME}_server{name}_{self.replica_rank}_0{self.name_suffix}",
            "max_concurrency": self.max_concurrency,
        }
        if self.workers:
            options |= await self._beside(self.workers)
        server = ray.remote(Server).options(**options)
        self.servers = [
            server.remote(self.config, self.model_config, self.rollout_mode, self.replica_rank)
        ]
        [self._server_handle] = self.servers
        await self._server_handle.launch_server.remote()
        host, port = await self._server_handle.get_server_address.remote()
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _beside(self, workers: list[Any]) -> dict[str, Any]:
        """Return options of an actor with the workers' GPUs, which it shares."""

        def place(_: Any) -> tuple[str, list[str]]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids().get("GPU", [])

        calls = [worker.__ray_call__.remote(place) for worker in workers]
        places = await asyncio.gather(*calls)
        devices = ",".join(gpus[0] for _, gpus in places if gpus)
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        if devices:
            variables["CUDA_VISIBLE_DEVICES"] = devices
        return {
            "scheduling_strategy": affinity(node_id=places[0][0], soft=False),
            "runtime_env": {"env_vars": variables},
        }


class ServerAdapter(base.BaseRollout):
    """The rollout in a worker of the trainer: it sends weights to the replica's engine."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rank, size = int(os.environ["RANK"]), self._size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_first = rank % size == 0
        """Whether it speaks to the server, for all workers of the replica."""
        self._handle: Any = None

    @property
    def _size(self) -> int:
        sizes = self.config.tensor_model_parallel_size, self.config.data_parallel_size
        return int(sizes[0] * sizes[1] * self.config.pipeline_model_parallel_size)

    @property
    def server(self) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(f"{NAME}_server_{self.replica_rank}_0")
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        if self.is_first and self.config.free_cache_engine:
            await self.server.wake_up.remote(tags)

    async def release(self) -> None:
        if self.is_first and self.config.free_cache_engine:
            await self.server.sleep.remote()

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **_: Any,
    ) -> None:
        """Send all weights, as one update: all of them or none."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"wire_format: {wire_format} is not taken by Jackfield")
        if not self.is_first:
            async for _pair in _each(weights):
                pass  # Each tensor is gathered from all workers.
            return

        async def ask(job: LiveJob) -> dict[str, Any]:
            return dict(await self.server.live.remote(job))

        async with await WeightUpdate.begin(ask, BeginUpdate()) as update:
            if self._size == 1 and torch.cuda.is_available():
                async for buckets, kept in _handles(_each(weights)):
                    await ask(OpenTensors(update=update.name, buckets=buckets))
                    kept.clear()  # The engine has read them.
            else:
                await update.put(_each(weights))
            await update.commit(None if global_steps is None else f"step {global_steps}")
        if global_steps is not None:
            await self.server.set_global_steps.remote(global_steps)


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, Iterable):
        for name, tensor in weights:
            yield name, tensor.detach()
    else:
        async for name, tensor in weights:
            yield name, tensor.detach()


async def _handles(
    weights: AsyncIterator[tuple[str, torch.Tensor]],
) -> AsyncIterator[tuple[tuple[SharedBucket, ...], list[torch.Tensor]]]:
    """Yield handles of tensors on this process's GPU, and the tensors, to be kept until they are
    read."""
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    buckets: list[SharedBucket] = []
    kept: list[torch.Tensor] = []
    async for name, tensor in weights:
        own = tensor.to("cuda").contiguous()
        _, handle = reduce_tensor(own)
        dtype, shape = str(own.dtype).removeprefix("torch."), tuple(own.shape)
        place = SharedTensor(
            dtype, shape, tuple(handle[2]), handle[3], *handle[7:10], *handle[11:15]
        )
        buckets.append(SharedBucket((TensorPart(name, dtype, shape),), {uuid: place}))
        kept.append(own)
        if sum(each.nbytes for each in kept) >= BUCKET_BYTES:
            yield tuple(buckets), kept
            buckets, kept = [], []
    if buckets:
        yield tuple(buckets), kept


base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{ServerAdapter.__name__}"
RolloutReplicaRegistry.register(NAME, lambda: Replica)
