"""Each architecture on a GPU says what `transformers` says on the CPU: through the whole engine,
with its kernels and recorded steps, prompts in chunks and prefixes from the cache.

The cases are those of the other files here. `examples/benchmarks/conformance.py --architectures`
runs them, and records how near each comes; docs/reference/models.md says when it did.
"""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_encoder_decoder as sources
import test_families as families
import test_formulas as formulas
import test_indexed_families as indexed
import test_latent_families as latents
import test_longcat_ngram as ngrams
import test_mixtures as mixtures
import test_model_kit as kits
import test_plamo2 as plamo2
import test_renamed_families as renamed
import test_state_families as states
import test_zaya as zaya
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.step import PrepareAhead
from jackfield.plugins.conformance.models import ModelKit

PROMPTS = [*families.PROMPTS, families.PROMPTS[1][:30]]
OUTPUT, LOGPROBS = 8, 4
TOLERANCE, RELATIVE = 1e-3, 1e-5
FAR = 0.25
"""Of a mixture, which share of tokens may be farther from the reference in bfloat16: rounded, a
near tie between experts has other ones chosen, and later tokens see that."""


class Distance(NamedTuple):
    """How far log-probabilities are from the reference's."""

    largest: float
    bound: float
    """A fixed one, and besides of float32 a part of what the likeliest token has before the least
    likely one, of bfloat16 three times what the reference differs from itself when rounded."""
    beyond: float
    """Share of tokens that are farther."""


class Subject(NamedTuple):
    """A checkpoint, and what its reference says."""

    folder: Path
    scores: Callable[[list[int], list[int]], torch.Tensor]
    """Prompt, and what follows it → log-probabilities after each of the latter, float32."""
    rounded: Callable[[list[int], list[int]], torch.Tensor] | None
    """The same by the reference in bfloat16; None: it is in float32 or better alone."""
    prompts: list[list[int]] = PROMPTS
    has_experts: bool = False


def of_decoder(reference: Any, folder: Path) -> Subject:
    half = copy.deepcopy(reference).to(torch.bfloat16)

    def scores_of(model: Any) -> Callable[[list[int], list[int]], torch.Tensor]:
        def scores(prompt: list[int], answer: list[int]) -> torch.Tensor:
            return families.score(model, prompt + answer)[len(prompt) - 1 : -1]

        return scores

    has_experts = any("expert" in name for name, _ in reference.named_parameters())
    return Subject(folder, scores_of(reference), scores_of(half), has_experts=has_experts)


def of_family(case: str, folder: Path) -> Subject:
    reference = families.make_reference(case)
    return of_decoder(reference, families.checkpoint(reference, case.partition(":")[0], folder))


def of_mixture(case: str, folder: Path) -> Subject:
    return of_decoder(*mixtures.folder_of(case, mixtures.CASES[case], folder))


def of_latents(case: str, folder: Path) -> Subject:
    reference = latents.latent_reference(case)
    return of_decoder(reference, latents.checkpoint(reference, case.partition(":")[0], folder))


def of_indexed(case: str, folder: Path) -> Subject:
    reference = latents.latent_reference(case, indexed.CASES[case])
    return of_decoder(reference, latents.checkpoint(reference, case, folder))


def of_states(case: str, folder: Path) -> Subject:
    return of_decoder(*states.reference_and_folder(case, folder))


def of_renamed(case: str, folder: Path) -> Subject:
    return of_decoder(renamed.write(renamed.CASES[case], case, folder), folder)


def of_plamo2(case: str, folder: Path) -> Subject:
    tensors = plamo2.save(case, folder)

    def scores(prompt: list[int], answer: list[int]) -> torch.Tensor:
        return plamo2.scores(tensors, prompt + answer)[len(prompt) - 1 : -1]

    return Subject(folder, scores, None)


def of_formulas(case: str, folder: Path) -> Subject:
    tensors = formulas.save(case, folder)

    def scores(prompt: list[int], answer: list[int]) -> torch.Tensor:
        return formulas.scores(case, tensors, prompt + answer)[len(prompt) - 1 : -1]

    return Subject(folder, scores, None)


def of_ngrams(case: str, folder: Path) -> Subject:
    score = ngrams.write(folder)

    def scores(prompt: list[int], answer: list[int]) -> torch.Tensor:
        return score(prompt + answer)[len(prompt) - 1 : -1]

    return Subject(folder, scores, None, has_experts=True)


def of_zaya(case: str, folder: Path) -> Subject:
    return of_decoder(*zaya.reference_and_folder(case, folder))


def of_kit(case: str, folder: Path) -> Subject:
    kit: type[ModelKit] = getattr(kits, case)
    reference = kit.make_reference()
    return of_decoder(reference, families.checkpoint(reference, kit.name, folder))


def of_sources(case: str, folder: Path) -> Subject:
    model = sources.make(case, folder)
    half = copy.deepcopy(model).to(torch.bfloat16)
    begin = [model.config.decoder_start_token_id]
    forced = model.generation_config.forced_bos_token_id
    begin += [] if forced is None else [forced]

    def scores_of(model: Any) -> Callable[[list[int], list[int]], torch.Tensor]:
        def scores(prompt: list[int], answer: list[int]) -> torch.Tensor:
            return sources.scores(model, prompt, begin + answer)[len(begin) - 1 : -1]

        return scores

    return Subject(folder, scores_of(model), scores_of(half), sources.SOURCES)


KITS = [
    name
    for name, kit in vars(kits).items()
    if name.startswith("Test") and issubclass(kit, ModelKit) and "name" in vars(kit)
]
FILES: dict[str, tuple[Any, Callable[[str, Path], Subject]]] = {
    "test_encoder_decoder": (sources.CASES, of_sources),
    "test_families": (families.CASES, of_family),
    "test_formulas": (formulas.CASES, of_formulas),
    "test_indexed_families": (indexed.CASES, of_indexed),
    "test_latent_families": (latents.CASES, of_latents),
    "test_longcat_ngram": (ngrams.CASES, of_ngrams),
    "test_mixtures": (mixtures.CASES, of_mixture),
    "test_model_kit": (KITS, of_kit),
    "test_plamo2": (plamo2.CASES, of_plamo2),
    "test_renamed_families": (renamed.CASES, of_renamed),
    "test_state_families": (states.CASES, of_states),
    "test_zaya": (zaya.CASES, of_zaya),
}
"""File → its cases, and what makes one."""


async def answers(subject: Subject, dtype: str, device: str) -> list[Any]:
    """Every prompt at once, the long ones in chunks, and again from the cache of prefixes."""
    encodes = subject.prompts is sources.SOURCES
    config = EngineConfig(
        model=str(subject.folder), dtype=dtype, device=device, skip_tokenizer_init=True,
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64 if encodes else 16,
        num_gpu_blocks_override=96, gpu_memory_utilization=0.05,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=LOGPROBS)

    async def answer(engine: AsyncEngine, prompt: list[int]) -> Any:
        *_, last = [output async for output in engine.generate(prompt, params)]
        return last

    async with AsyncEngine(config) as engine:
        while await engine.core.executor.ask(PrepareAhead()):
            pass
        made = []
        for _ in range(2):
            made += await asyncio.gather(*(answer(engine, prompt) for prompt in subject.prompts))
        engine.core.check_idle()
        assert engine.stats().graph_recording_failures == 0
        assert encodes or made[-1].num_cached_tokens > 0
    return made


async def compare(subject: Subject, dtype: str, device: str) -> Distance:
    """Measure what was told, the likeliest tokens after each of the answers'."""
    made = await answers(subject, dtype, device)
    distances, rounding, spread = [], 0.0, 0.0
    for prompt, output in zip(subject.prompts * 2, made, strict=True):
        (chosen,) = output.outputs
        assert len(chosen.token_ids) == OUTPUT
        wanted = subject.scores(prompt, chosen.token_ids)
        spread = max(spread, float(wanted.max() - wanted.min()))
        if dtype == "bfloat16":
            assert subject.rounded is not None
            half = subject.rounded(prompt, chosen.token_ids)
            rounding = max(rounding, float((half - wanted).abs().max()))
        for row, told in zip(wanted, chosen.logprobs, strict=True):
            assert len(told) >= LOGPROBS
            far = [abs(entry.logprob - float(row[token])) for token, entry in told.items()]
            distances.append(max(far))
    bound = TOLERANCE + (3 * rounding if dtype == "bfloat16" else RELATIVE * spread)
    beyond = sum(not distance <= bound for distance in distances) / len(distances)
    return Distance(max(distances), bound, beyond)


@pytest.fixture
def own_errors() -> Iterator[None]:
    """End this process after an error of the device, which all later work in it would meet too."""
    yield
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("file", "case"),
    [
        pytest.param(file, case, id=f"{file}/{case}")
        for file, (cases, _) in FILES.items()
        for case in cases
    ],
)
async def test_an_architecture_equals_transformers(
    file: str,
    case: str,
    tmp_path: Path,
    device: str,
    record_property: Callable[[str, object], None],
    own_errors: None,
) -> None:
    subject = FILES[file][1](case, tmp_path)
    dtypes = ["float32"] if subject.rounded is None else ["float32", "bfloat16"]
    far = []
    for dtype in dtypes:
        distance = await compare(subject, dtype, device)
        record_property(dtype, " ".join(f"{number:.3g}" for number in distance))
        if distance.beyond > (FAR if subject.has_experts and dtype == "bfloat16" else 0):
            far.append(f"{dtype}: {distance}")
    assert not far
