"""Replays a recording of steps, comparing results bit for bit."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, TypeAlias

import msgspec

from ..core.config import EngineConfig
from ..core.engine.grammars import Grammars
from ..core.engine.resolve_config import bind_parsers, check_names, resolve_config, resolve_runner
from ..core.errors import ConfigError
from ..core.loading.model_config import ModelConfig, resolve_model_config
from ..core.parts.part_types import PartTypes
from ..core.protocols.executors import Executor, ExecutorInfo
from ..core.recording.recorder import model_fingerprint, prepare_all, versions
from ..core.recording.recording import FailureEntry, JobEntry, PlanEntry, Recording, ResultEntry
from ..core.registration.step_parts import part_types
from ..core.registry import Plugins
from ..core.step import NOTHING_IN_PROCESS, InProcess, StepPlan, StepResult
from ..core.text.tokenizer import Tokenizer

BY_ROW = ("logprobs", "prompt_logprobs", "failed", "pooled")
"""Fields of a result, besides tokens, that are computed, not timings."""
InFlight: TypeAlias = deque[tuple[StepPlan, asyncio.Future[StepResult]]]


class Difference(Exception):
    """The replay differs from the recording: where, and how."""


class Replayed(msgspec.Struct, frozen=True):
    """Outcome of a replay without differences."""

    num_steps: int
    num_tokens: int
    cut_off: bool
    """Whether the recording ends within an object, as after a crash."""
    other_versions: dict[str, tuple[str, str]]
    """Library → its recorded and present version, if different; "" for none."""


def replay_config(recorded: EngineConfig, info: ExecutorInfo, **changes: Any) -> EngineConfig:
    """Return the recorded configuration, with the same number of blocks."""
    settings: dict[str, Any] = {"record_steps": None, **changes}
    if info.num_blocks:
        settings["num_gpu_blocks_override"] = info.num_blocks
    return msgspec.structs.replace(recorded, **settings)


async def replay(recording: Recording, config: EngineConfig, plugins: Plugins) -> Replayed:
    """Replay a recording. `config`: from `replay_config`.

    Raises Difference, ConfigError for a damaged recording, and errors of an executor's start.
    """
    header = recording.header
    check_names(config, plugins)
    resolved = resolve_config(config, plugins)
    model_config = await asyncio.to_thread(resolve_model_config, resolved, plugins)
    resolved, model_config = resolve_runner(config, resolved, model_config, plugins)
    plugins.configure(resolved.plugin_options)
    executor: Executor = plugins["executor"].load(resolved.executor)(
        resolved, model_config, plugins
    )
    grammars = _grammars(resolved, model_config, plugins)
    try:
        info = await executor.start()
        await prepare_all(executor)
        await _check_model(executor, header.fingerprint)
        for name in ("num_blocks", "cache_groups"):
            if (here := getattr(info, name)) != (there := getattr(header.info, name)):
                raise Difference(f"{name} is {here!r} here, and {there!r} in the recording")
        types = part_types(plugins, resolved)
        num_steps, num_tokens = await _Replay(executor, grammars, types).run(recording)
    finally:
        await grammars.close()
        await executor.stop()
    here = versions()
    differing = {
        name: (header.versions.get(name, ""), here.get(name, ""))
        for name in sorted(here.keys() | header.versions.keys())
        if header.versions.get(name) != here.get(name)
    }
    return Replayed(num_steps, num_tokens, recording.cut_off, differing)


def _grammars(config: EngineConfig, model_config: ModelConfig, plugins: Plugins) -> Grammars:
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = Tokenizer.load(
            config.tokenizer or str(model_config.path),
            revision=config.tokenizer_revision,
            formats=plugins["checkpoint_format"],
            mode=config.tokenizer_mode,
            download_dir=config.download_dir,
        )
    bind_parsers(config, model_config, plugins)
    return Grammars(plugins, config, tokenizer, model_config.vocab_size, model_config.eos_token_ids)


async def _check_model(executor: Executor, recorded: bytes | None) -> None:
    here = await model_fingerprint(executor)
    if recorded is not None and here is not None and recorded != here:
        raise Difference(
            f"the model is another one: its weights' fingerprint is {here.hex()[:16]} here, and "
            f"{recorded.hex()[:16]} in the recording"
        )


class _Replay:
    def __init__(self, executor: Executor, grammars: Grammars, types: PartTypes) -> None:
        """types: of parts' data."""
        self._executor = executor
        self._types = types
        self._grammars = grammars
        self._flying: InFlight = deque()
        self._requests: dict[int, str] = {}
        """Slot → its request in the last plan."""

    async def run(self, recording: Recording) -> tuple[int, int]:
        """Return the number of equal steps and tokens."""
        num_steps = num_tokens = 0
        try:
            for entry in recording.entries(self._types):
                if isinstance(entry, PlanEntry):
                    await self._submit(entry.plan)
                elif isinstance(entry, JobEntry):
                    await self._executor.ask(entry.job)
                else:
                    await self._compare(recording.path, entry)
                    num_steps += 1
                    num_tokens += (
                        len(entry.result.token_ids) if isinstance(entry, ResultEntry) else 0
                    )
        finally:
            await asyncio.gather(*(future for _, future in self._flying), return_exceptions=True)
        return num_steps, num_tokens

    async def _submit(self, plan: StepPlan) -> None:
        in_process = NOTHING_IN_PROCESS
        if any(start.grammar is not None for start in plan.starts):
            in_process = InProcess({
                start.slot: await self._grammars.restore(start.params, start.grammar)
                for start in plan.starts
                if start.grammar is not None
            })  # fmt: skip
        self._flying.append((plan, self._executor.submit(plan, in_process)))

    async def _compare(self, path: str, entry: ResultEntry | FailureEntry) -> None:
        step = entry.step if isinstance(entry, FailureEntry) else entry.result.step
        # A step that fails at its launch fails before the result of the one before it comes.
        entries = (entry for entry in self._flying if entry[0].step == step)
        if (recorded := next(entries, None)) is None:
            raise ConfigError(f"{path}: there is a result of step {step}, which was not planned")
        self._flying.remove(recorded)
        plan, future = recorded
        self._requests |= {start.slot: start.request_id for start in plan.starts}
        try:
            result = await future
        except Exception as error:
            if isinstance(entry, FailureEntry):
                return
            raise Difference(
                f"step {step} failed here ({type(error).__name__}: {error}), and ended well in the "
                "recording"
            ) from error
        if isinstance(entry, FailureEntry):
            raise Difference(
                f"step {step} ended well here, and failed in the recording ({entry.error})"
            )
        difference = self._difference(plan, entry.result, result)
        if difference is not None:
            raise Difference(difference)

    def _difference(self, plan: StepPlan, there: StepResult, here: StepResult) -> str | None:
        """Return the first difference of two results."""
        num_rows, num_slots = len(there.counts), len(plan.slots)
        if num_rows != num_slots:
            return f"step {plan.step}: the recording's result has {num_rows} rows of {num_slots}"
        try:
            tokens = there.rows()
        except ValueError as error:
            return f"the recording contradicts itself: {error}"
        for row, (slot, left, right) in enumerate(
            zip(plan.slots, tokens, here.rows(), strict=True)
        ):
            pairs = {"token_ids": (left, right)}
            pairs |= {n: (getattr(there, n).get(row), getattr(here, n).get(row)) for n in BY_ROW}
            for name, (recorded, computed) in pairs.items():
                if not _same(recorded, computed):
                    request = self._requests.get(slot, "unknown")
                    return (
                        f"step {plan.step}, row {row} (slot {slot}, request {request}), {name}: "
                        f"{_shown(recorded)} in the recording, {_shown(computed)} here"
                    )
        return None


def _same(left: Any, right: Any) -> bool:
    """Whether two values have the same bits; NaN equals itself."""
    return msgspec.msgpack.encode(left) == msgspec.msgpack.encode(right)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
