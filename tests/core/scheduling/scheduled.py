"""A scheduler, requests for it, and the worker's part of a step, for tests of what it decides."""

from __future__ import annotations

from typing import Any

from jackfield.core.parts.adapters import AdapterRoom
from jackfield.core.parts.encoder_decoder import EncodeItem
from jackfield.core.parts.kv_compression import Compaction, LevelMoves
from jackfield.core.parts.speculation import DraftPlan, DraftResult
from jackfield.core.request import Request, Update
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.parts.adapters import Adapters
from jackfield.core.scheduling.parts.draft_widths import DraftWidths
from jackfield.core.scheduling.parts.encoder_decoder import EncoderDecoder
from jackfield.core.scheduling.parts.guarded_connector import GuardedConnector
from jackfield.core.scheduling.parts.input_embeds import InputEmbeds
from jackfield.core.scheduling.parts.kv_compression import CompressionRule, KVCompression
from jackfield.core.scheduling.parts.kv_transfer import KVTransfer
from jackfield.core.scheduling.parts.part import PartMaker
from jackfield.core.scheduling.parts.pipeline import Pipeline
from jackfield.core.scheduling.parts.speculation import Speculation
from jackfield.core.scheduling.parts.states import States
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan, StepResult
from jackfield.plugins.policies.builtin import FirstComeFirstServed

EOS = 2
_numbers = iter(range(10**9))


def parts_for(
    *,
    connector: GuardedConnector | None = None,
    num_stages: int = 1,
    num_drafts: int = 0,
    draft_widths: DraftWidths | None = None,
    longest: int = 0,
    kv_compression: CompressionRule | None = None,
    num_snapshots: int | None = None,
    max_source_tokens: int = 0,
    adapters: tuple[AdapterRoom, int, int] | None = None,
    media: tuple[Any, ...] | None = None,
) -> list[PartMaker]:
    """The parts of these capabilities, in an engine's order."""
    parts: list[PartMaker] = []
    if adapters is not None:
        parts.append(Adapters.maker(*adapters))
    if connector is not None:
        parts.append(KVTransfer.maker(connector))
    if num_stages > 1:
        parts.append(Pipeline.maker(num_stages))
    if num_drafts:
        parts.append(Speculation.maker(num_drafts, draft_widths, longest))
    if kv_compression is not None:
        parts.append(KVCompression.maker(kv_compression))
    if num_snapshots:
        parts.append(States)
    if max_source_tokens:
        parts.append(EncoderDecoder.maker(max_source_tokens))
    if media is not None:
        parts.append(InputEmbeds.maker(*media))
    return parts


def make_scheduler(**changes) -> Scheduler:
    capabilities = {
        name: changes.pop(name) for name in parts_for.__kwdefaults__ or {} if name in changes
    }
    options = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "max_model_len": 2048,
        "num_blocks": 1000,
        "block_size": 16,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "policy": FirstComeFirstServed(),
    }
    if "num_snapshots" in capabilities:
        options["num_snapshots"] = capabilities["num_snapshots"]
    return Scheduler(**{**options, **changes}, parts=parts_for(**capabilities))


def drafts_of(plan: StepPlan) -> DraftPlan:
    """What a plan says of drafts."""
    return plan.parts.get("speculation") or DraftPlan()


def compactions_of(plan: StepPlan) -> tuple[Compaction, ...]:
    part = plan.parts.get("kv_compression")
    return () if part is None else part.compactions


def moves_of(plan: StepPlan) -> tuple[LevelMoves, ...]:
    part = plan.parts.get("kv_compression")
    return () if part is None else part.moves


def encoded_by(plan: StepPlan) -> tuple[EncodeItem, ...]:
    part = plan.parts.get("encoder_decoder")
    return () if part is None else part.items


def metadata_of(plan: StepPlan) -> Any:
    """What goes to the worker half of a KV connector."""
    part = plan.parts.get("kv_transfer")
    return None if part is None else part.metadata


def drafted(**fields: list[int]) -> dict[str, Any]:
    """What a result says of drafts."""
    return {"speculation": DraftResult(**fields)}


def make_request(prompt_len: int = 10, *, max_tokens: int = 16, token: int | None = None, **more):
    """A prompt of one repeated token, by default one that no other request has."""
    number = next(_numbers)
    params = more.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=more.pop("prompt", None) or [token or 1000 + number] * prompt_len,
        params=params,
        max_tokens=params.max_tokens or max_tokens,
        seed=0,
        eos_token_ids=frozenset(() if params.ignore_eos else {EOS}),
        arrival=more.pop("arrival", float(number)),
        **more,
    )


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add_requests(request)


def run(scheduler: Scheduler, plan: StepPlan, token: int = 50, **result) -> list[Update]:
    """The worker's part: every sampling row gets the same token."""
    counts = [int(sampled) for sampled in plan.samples]
    return scheduler.update(plan, StepResult(plan.step, counts, [token] * sum(counts), **result))


def drain(scheduler: Scheduler, token: int = 50) -> None:
    while (plan := scheduler.schedule()) is not None:
        run(scheduler, plan, token)
