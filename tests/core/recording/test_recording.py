"""What an engine records is computed again, bit for bit, or the first difference is named."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

import jackfield
from jackfield import AsyncEngine, EngineConfig, PoolingParams, SamplingParams
from jackfield.core.errors import ConfigError
from jackfield.core.recording.recording import (
    HEAD,
    FailureEntry,
    JobEntry,
    PlanEntry,
    Recording,
    ResultEntry,
    Writer,
)
from jackfield.core.registry import load_plugins
from jackfield.core.sampling_params import OutputKind, StructuredOutputsParams
from jackfield.core.step import Recover
from jackfield.core.worker.runner import ModelRunner
from jackfield.entrypoints.cli.debug import run
from jackfield.entrypoints.replay import Difference, Replayed, replay, replay_config
from jackfield.entrypoints.replay import _shown as shown
from jackfield.plugins.executors.inprocess import InProcessExecutor

from helpers import at_once

EMBEDDED = Path(jackfield.__file__).parent / "plugins" / "models" / "embedded"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
POISON = 44


def sampling(**options: Any) -> SamplingParams:
    settings = {"max_tokens": 12, "ignore_eos": True, **options}
    return SamplingParams(output_kind=OutputKind.FINAL_ONLY, **settings)


MIXED = [
    sampling(temperature=0.0, logprobs=3, prompt_logprobs=1),
    sampling(n=3, top_p=0.9, logit_bias={70: 2.5}),
    sampling(ignore_eos=False, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    sampling(ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[ab]{3,9}")),
    sampling(presence_penalty=0.5, repetition_penalty=1.2, bad_words=["the"], min_tokens=4),
]


def config(path: Path | None, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "block_size": 4, "max_model_len": 128,
        "max_num_seqs": 6, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 40,
        "record_steps": None if path is None else str(path), **options,
    }  # fmt: skip
    return EngineConfig(**settings)


async def ask(engine: AsyncEngine, first: int, params: SamplingParams) -> Any:
    stream = engine.generate([first, *[60 + (i * i) % 190 for i in range(24)]], params)
    return [output async for output in stream][-1]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixed load, in which requests are preempted and one step fails as a whole."""
    path = tmp_path_factory.mktemp("recordings") / "mixed"

    async def record() -> None:
        async with AsyncEngine(config(path)) as engine:
            outputs = await at_once(
                engine, *(ask(engine, 70 + number, params) for number, params in enumerate(MIXED))
            )
            assert all(output.error is None for output in outputs)
            assert engine.stats().num_preemptions > 0
            with pytest.MonkeyPatch.context() as patch:
                poison(patch)
                assert (await ask(engine, POISON, MIXED[0])).error is not None
            assert (await ask(engine, 70, MIXED[0])).error is None

    asyncio.run(record())
    return path


def poison(patch: pytest.MonkeyPatch) -> None:
    """Steps that start a prompt with this token fail."""
    launch = ModelRunner.launch

    def failing(runner: ModelRunner, plan: Any, *beside: Any) -> Any:
        if any(start.token_ids[0] == POISON for start in plan.starts):
            raise RuntimeError("no luck")
        return launch(runner, plan, *beside)

    patch.setattr(ModelRunner, "launch", failing)


def replayed(path: Path, **changes: Any) -> Replayed:
    found = Recording(str(path))
    settings = replay_config(found.header.config, found.header.info, **changes)
    return asyncio.run(replay(found, settings, load_plugins()))


def rewritten(path: Path, folder: Path, change: Callable[[Any], Any]) -> Path:
    """The recording, with `change(entry)` for each entry; None drops it."""
    found = Recording(str(path))
    writer = Writer(str(folder / "rewritten"))
    writer.write(found.header)
    for entry in found.entries():
        if (new := change(entry)) is not None:
            writer.write(new)
    writer.close()
    return folder / "rewritten"


def test_a_mixed_load_is_replayed_bit_for_bit(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recording.stat().st_mode & 0o077 == 0, "prompts are for their owner's eyes"
    entries = list(Recording(str(recording)).entries())
    starts = [start for e in entries if isinstance(e, PlanEntry) for start in e.plan.starts]
    assert any(start.grammar is not None for start in starts)
    assert any(start.num_prompt_tokens < len(start.token_ids) for start in starts), "preempted"
    failed = [entry.error for entry in entries if isinstance(entry, FailureEntry)]
    assert failed[0] == "RuntimeError: no luck"
    assert JobEntry(Recover()) in entries
    poison(monkeypatch)
    outcome = replayed(recording)
    assert outcome.num_steps == sum(isinstance(e, ResultEntry | FailureEntry) for e in entries)
    assert outcome.num_tokens == sum(
        len(e.result.token_ids) for e in entries if isinstance(e, ResultEntry)
    )
    assert outcome.num_tokens > 80 and not outcome.cut_off and not outcome.other_versions


def test_a_step_may_fail_before_the_result_of_the_one_before_it(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch fails at once, while the device still computes the step before."""
    entries = list(Recording(str(recording)).entries())
    failure = next(n for n, entry in enumerate(entries) if isinstance(entry, FailureEntry))
    result = max(n for n in range(failure) if isinstance(entries[n], ResultEntry))
    entries.insert(failure, entries.pop(result))
    found = Recording(str(recording))
    writer = Writer(str(tmp_path / "reordered"))
    for entry in (found.header, *entries):
        writer.write(entry)
    writer.close()
    poison(monkeypatch)
    assert replayed(tmp_path / "reordered").num_steps == replayed(recording).num_steps


def test_a_step_that_fails_in_the_recording_alone_is_named(recording: Path) -> None:
    failed = next(e for e in Recording(str(recording)).entries() if isinstance(e, FailureEntry))
    with pytest.raises(Difference) as caught:
        replayed(recording)
    assert str(caught.value) == (
        f"step {failed.step} ended well here, and failed in the recording (RuntimeError: no luck)"
    )


def other_token(entry: Any) -> Any:
    if not isinstance(entry, ResultEntry) or entry.result.step != 4:
        return entry
    tokens = [*entry.result.token_ids]
    tokens[2] += 1
    return ResultEntry(msgspec.structs.replace(entry.result, token_ids=tokens))


def other_logprob(entry: Any) -> Any:
    if not isinstance(entry, ResultEntry) or not entry.result.logprobs:
        return entry
    (row, (first, *_)), *_ = entry.result.logprobs.items()
    changed = msgspec.structs.replace(first, logprob=first.logprob * (1 + 1e-15))
    return ResultEntry(msgspec.structs.replace(entry.result, logprobs={row: [changed]}))


def other_parameters(entry: Any) -> Any:
    if not isinstance(entry, PlanEntry):
        return entry
    starts = tuple(
        msgspec.structs.replace(
            start, params=msgspec.structs.replace(start.params, logit_bias={5: 90})
        )
        for start in entry.plan.starts
    )
    return PlanEntry(msgspec.structs.replace(entry.plan, starts=starts))


def lost_plan(entry: Any) -> Any:
    return None if isinstance(entry, PlanEntry) and entry.plan.step == 3 else entry


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (other_token, Difference, r"step 4, row \d \(slot \d, request \w+(-\d)?\), token_ids: "
         r"\[\d+\] in the recording, \[\d+\] here"),
        (other_logprob, Difference, r"step \d, row \d \(slot 0, .*\), logprobs: \[TokenLogprobs"),
        (other_parameters, Difference, r"step \d, row \d .*, token_ids: .* here"),
        (lost_plan, ConfigError, "there is a result of step 3, which was not planned"),
    ],
)  # fmt: skip
def test_the_first_step_row_and_field_that_differ_are_named(
    recording: Path, tmp_path: Path, change: Any, error: Any, told: str
) -> None:
    with pytest.raises(error, match=told):
        replayed(rewritten(recording, tmp_path, change))


def test_another_model_is_told_apart(recording: Path, tmp_path: Path) -> None:
    model = shutil.copytree(EMBEDDED, tmp_path / "model")
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    name = min(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = tensors[name] + torch.tensor(1, dtype=tensors[name].dtype)
    save_file(tensors, file)
    with pytest.raises(Difference, match="the model is another one: its weights' fingerprint is"):
        replayed(recording, model=str(model))


def test_a_file_that_is_cut_off_is_replayed_as_far_as_it_goes(
    recording: Path, tmp_path: Path
) -> None:
    part = tmp_path / "part"
    data = recording.read_bytes()
    end = 0
    while end <= len(data) // 2:
        end += HEAD.size + HEAD.unpack_from(data, end)[1]
    part.write_bytes(data[: end - 1])  # Within an object.
    outcome = replayed(part)
    assert outcome.cut_off and 3 < outcome.num_steps


def test_files_that_are_no_recordings_are_refused(recording: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    data = recording.read_bytes()
    size = HEAD.size + HEAD.unpack_from(data)[1]
    for content, told in (
        (b"", "is not a recording of steps"),
        (b"not one", "byte 0 begins no object"),
        (data[:40], "is not a recording of steps"),
        (data.replace(b"jackfield steps 3", b"jackfield steps 9"), "'jackfield steps 9', and this"),
        (data[:size] + b"x" * 9, f"byte {size} begins no object"),
        (data[:size] + HEAD.pack(0xC6, 3) + b"\x81\xa1x", "object 1 is damaged"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=told):
            list(Recording(str(file)).entries())
    with pytest.raises(ConfigError, match="No such file"):
        Recording(str(tmp_path / "none"))


async def test_a_recording_ends_at_its_limit_and_at_what_cannot_be_encoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small, odd = tmp_path / "small", tmp_path / "odd"
    async with AsyncEngine(config(small, record_steps_max_gb=1e-5)) as engine:
        for _ in range(3):
            assert (await ask(engine, 70, sampling(seed=1))).error is None
    assert "small ends after " in caplog.text and "reached record_steps_max_gb" in caplog.text
    assert small.stat().st_size < 15_000
    params = sampling(kv_transfer_params={"x": object()})
    async with AsyncEngine(config(odd)) as engine:
        assert (await ask(engine, 70, params)).error is None
    assert "odd ends after 0 steps: TypeError: " in caplog.text
    assert [type(entry) for entry in Recording(str(odd)).entries()] == []
    # The plans at its end have no results: they run, and are compared with nothing.
    assert (await asyncio.to_thread(replayed, small)).num_steps > 2


async def test_pooling_is_recorded_and_nothing_is_written_where_nothing_is_asked(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pooled"
    async with AsyncEngine(config(path, runner="pooling")) as engine:
        await engine.encode([5, 6, 7], PoolingParams())
    assert (await asyncio.to_thread(replayed, path)).num_steps == 1
    async with AsyncEngine(config(None)) as engine:
        assert type(engine.core.executor) is InProcessExecutor
    with pytest.raises(ConfigError, match=r"record_steps: there is a file .* already"):
        async with AsyncEngine(config(path)):
            pass
    unborn = tmp_path / "unborn"
    with pytest.raises(ConfigError, match="attention_backend"):
        async with AsyncEngine(config(unborn, attention_backend="no-such")):
            pass
    assert not unborn.exists(), "the next start would be refused"
    with pytest.raises(ConfigError, match=r"record_steps: .* cannot be created: No such file"):
        async with AsyncEngine(config(tmp_path / "no" / "folder")):
            pass
    with pytest.raises(ConfigError, match="record_steps: what a KV connector loads"):
        config(path, kv_transfer_config={"kv_connector": "cpu_offload"})


def test_the_command_says_whether_all_is_equal(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def until_it_fails(entry: Any) -> Any:
        nonlocal over
        over = over or isinstance(entry, FailureEntry)
        return None if over else entry

    over = False
    well = rewritten(recording, tmp_path, until_it_fails)
    assert run(["replay", str(well)]) == 0
    assert capsys.readouterr().out.startswith("equal: ")
    well.unlink()
    assert run(["replay", str(rewritten(recording, tmp_path, other_token))]) == 1
    assert "jackfield: the replay differs: step 4, row " in capsys.readouterr().err
    assert run(["replay", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(("length", "cut"), [(298, False), (299, True)])
def test_a_value_that_differs_is_shown_up_to_300_characters(length: int, cut: bool) -> None:
    whole = repr("x" * length)
    assert shown("x" * length) == (whole[:300] + "…" if cut else whole)
