"""The contract between engine and worker: `StepPlan` out, `StepResult` back; jobs between steps.

Plain `msgspec.Struct`s without torch, so that a plan can be sent, recorded, replayed and simulated:
`decode(encode(plan)) == plan`. What a step needs of this process travels beside its plan, in
`InProcess`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_args

import msgspec

from .live.worker_jobs import ApplyWeights, ReleaseMemory, ReportMemory, StagingJob
from .pooling_params import PooledRow, PoolingParams
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .protocols.grammars import Grammar
    from .protocols.parsers import ReasoningParser


class ReasoningGate(msgspec.Struct, frozen=True):
    """Delays a grammar until the reasoning ends, as the reasoning parser finds it."""

    prompt_end: str = ""
    """What the prompt ends with; "" where it is not known."""
    opening_ids: tuple[int, ...] | None = None
    """Tokens that begin the reasoning, for a model that may also do without; None: the output
    begins with reasoning."""


class GrammarStart(msgspec.Struct, frozen=True):
    """The grammar that constrains a slot's output: that of `SlotStart.params.structured_outputs`,
    compiled in `InProcess.grammars`. An executor elsewhere compiles it itself."""

    eos_token_ids: tuple[int, ...]
    """End tokens: allowed only where the grammar may end."""
    reasoning_gate: ReasoningGate | None = None
    """Where the grammar begins; None: with the first token."""


class SlotStart(msgspec.Struct, frozen=True):
    """A request takes a slot: newly admitted, or resumed after preemption."""

    slot: int
    request_id: str
    token_ids: tuple[int, ...]
    """All known tokens: the prompt, and those generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already cached (prefix hits); the blocks are in `table_writes`."""
    params: SamplingParams
    seed: int
    """Seed of the request's counter-based random numbers (drawn at admission when not given)."""
    stop_token_ids: tuple[int, ...] = ()
    """EOS and stop ids; masked while fewer than `params.min_tokens` tokens are out."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarStart | None = None
    pooling: PoolingParams | None = None
    """Set for a pooling request, with defaults filled in: a vector takes the place of sampled
    tokens."""
    token_type_ids: tuple[int, ...] = ()
    """[len(token_ids)] Which of two texts each token belongs to, for encoders; empty: all 0."""
    parts: dict[str, Any] = {}
    """Name of a part (`core.protocols.parts`) → what it sends of this request, a struct of its
    `start_type`."""


class CompiledGrammar(NamedTuple):
    """A grammar in this process."""

    start: GrammarStart
    grammar: Grammar
    token_bytes: Callable[[int], bytes]
    """Token id → the bytes that it adds to a text."""
    encode: Callable[[str], list[int]] | None = None
    """Text → token ids, for content in the same token as the end of the reasoning."""
    reasoning_parser: Callable[[], ReasoningParser] | None = None
    """Creates the reasoning parser of one output; set with `start.reasoning_gate`. It is one of its
    own: a mask depends on the token sampled right before it, which the worker knows before any text
    of it is made."""


class InProcess(NamedTuple):
    """Objects of this process that a plan refers to: they travel beside it, never in it."""

    grammars: Mapping[int, CompiledGrammar]
    """Slot → its grammar, for each of the plan's `starts` that has a `GrammarStart`."""


NOTHING_IN_PROCESS = InProcess({})
"""For a plan that starts no slot with a grammar."""


class TableWrite(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks to write into a slot's table. Columns before a group's reach are omitted, because
    they are not read any more."""

    slot: int
    group: int
    """Group of layers (`core.cache.groups`); a slot has one table per group, then one for each part
    that has blocks of its own."""
    column: int
    """Column of the first block; block c of a table holds the tokens from c * block_size on."""
    block_ids: tuple[int, ...]


class PartPlan(msgspec.Struct, frozen=True):
    """What the scheduler half of a part sends its worker half with a plan: base of `plan_type`."""

    @property
    def num_more_tokens(self) -> int:
        """Tokens that the step computes besides those of its rows."""
        return 0


class StepPlan(msgspec.Struct, frozen=True):
    """One step of work: the whole contract between the event loop and the worker.

    It carries differences: a slot's tokens, blocks and parameters travel once. Applied in order:
    `released`, `starts`, `table_writes`; then rows run as given by `slots`/`num_tokens`. When the
    worker half of a part applies what it finds in `parts` is said by its struct.
    """

    step: int
    slots: tuple[int, ...]
    """[num_rows] Each scheduled row's slot. Decode rows (one token) come first, then rows with
    drafts, then prefill rows."""
    num_tokens: tuple[int, ...]
    """[num_rows] Tokens to compute for each row, after those that its slot has computed."""
    samples: tuple[bool, ...]
    """[num_rows] Whether the row reaches its last known token, so that a token is sampled or the
    request is pooled."""
    released: tuple[int, ...] = ()
    """Slots whose request ended or was preempted."""
    starts: tuple[SlotStart, ...] = ()
    table_writes: tuple[TableWrite, ...] = ()
    """Tables of the slots that start, and new blocks of the others."""
    parts: dict[str, Any] = {}
    """Name of a part → what its scheduler half sends its worker half, a struct of its `plan_type`.
    A plan may have nothing else."""

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step's rows."""
        return sum(self.num_tokens)

    @property
    def num_more_tokens(self) -> int:
        """Tokens that parts compute besides them."""
        return sum(part.num_more_tokens for part in self.parts.values())


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position, from the model's raw logits (before any processing)."""

    token_id: int
    """The sampled token (or the prompt token)."""
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    """[k], most likely first."""
    top_logprobs: list[float]
    """[k]"""


NO_TOKEN = "no token can be chosen: NaN logits, or every token is masked"
"""Why a row failed that the sampler found no token for."""


class StepResult(msgspec.Struct, frozen=True):
    """Results of a step, row by row as in its plan."""

    step: int
    counts: list[int]
    """[num_rows] Tokens of each row: 0 where it does not sample, is pooled, or has failed; with
    drafts, 1 and the accepted ones."""
    token_ids: list[int]
    """[sum(counts)] The tokens of all rows, row after row, each row's in order."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """Row → log-probabilities of its tokens, if requested: [counts[row]]."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Row → log-probabilities of the prompt tokens that FOLLOW the positions computed in this
    step (position p predicts token p + 1), in order, if requested."""
    failed: dict[int, str] = {}
    """Row → why this row alone failed."""
    failed_params: dict[int, str] = {}
    """Row of `failed` → the field of its request that is at fault; the others are not theirs."""
    pooled: dict[int, PooledRow] = {}
    """Row → the result of a pooling request whose prompt is computed."""
    device_seconds: float = 0.0
    """Launch to result, as the worker saw it."""
    parts: dict[str, Any] = {}
    """Name of a part → what its worker half reports, a struct of its `result_type`."""
    late_preparations: int = 0
    """Kernels compiled or loaded, and graphs recorded, while this step was launched."""
    launch_wait_seconds: float = 0.0
    """Seconds of the launch in which the thread could not run, mostly waiting for the interpreter
    lock."""
    graph_recording_failures: int = 0
    """Failed attempts to record a step as a graph, since the previous result."""

    def rows(self) -> list[list[int]]:
        """Return the tokens of each row, in new lists. Raises ValueError if `counts` and
        `token_ids` contradict each other."""
        counts, token_ids = self.counts, self.token_ids
        if counts.count(1) == len(counts) == len(token_ids):
            return [[token_id] for token_id in token_ids]
        if sum(counts) != len(token_ids):
            raise ValueError(f"step {self.step}: {len(token_ids)} tokens, not {sum(counts)}")
        ends = accumulate(counts)
        return [token_ids[end - count : end] for end, count in zip(ends, counts, strict=True)]


# ---------------------------------------------------------------- jobs


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Does nothing, once the results of all plans before it are there. → None"""


class Recover(msgspec.Struct, frozen=True, tag="recover"):
    """Reset after a failed step, with no step queued: release every slot, and check the device.
    → None

    Raises if the device is lost. From a step's failure until this job, queued steps fail without
    running, because their inputs may be missing. Communication of KV connectors continues: the
    worker half gets the metadata of every plan, also of those that fail or are not run, and a
    report that a failed step did not deliver comes with the next result.
    """


class PrepareAhead(msgspec.Struct, frozen=True, tag="prepare_ahead"):
    """Prepare one more thing for later steps: record a graph, compile a kernel. → whether there is
    more to prepare

    Asked while no step is in flight. Short: a step that arrives meanwhile waits for it.
    """


class ModelFingerprint(msgspec.Struct, frozen=True, tag="model_fingerprint"):
    """Compute a digest of the model's names, shapes, dtypes and a sample of each weight.
    → [32] bytes"""


class BalanceExperts(msgspec.Struct, frozen=True, tag="balance_experts"):
    """Place a mixture's experts on ranks by the tokens that chose them since the last such job, and
    begin to count again. → how many places of all ranks got another expert

    Asked while no step is in flight. Raises if the model's experts do not move.
    """

    moves: bool = True
    """False: only begin to count."""


class ReadAdapter(msgspec.Struct, frozen=True, tag="read_adapter"):
    """Read an adapter into host memory, on a thread: steps go on meanwhile. → `AdapterInfo`

    Raises ConfigError for one that cannot be served, with the reason; then nothing is kept.
    """

    number: int
    """Of this load of the adapter, never used before."""
    path: str
    format: str
    """Name of the `AdapterFormat`."""


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """Free an adapter's host memory, and what it has on the device besides rank rows; no request
    uses it any more. → None"""

    number: int


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Begin to trace what is launched, and the device. → None"""

    folder: str
    name: str
    """Beginning of the files' names."""
    with_stack: bool = False
    record_shapes: bool = False
    with_memory: bool = False


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """End a trace, and write it. → the path of its file, in Chrome's format; "" without a trace"""


WorkerJob: TypeAlias = (
    Ping
    | Recover
    | PrepareAhead
    | ModelFingerprint
    | BalanceExperts
    | StartProfile
    | StopProfile
    | ReadAdapter
    | DropAdapter
    | StagingJob
    | ApplyWeights
    | ReleaseMemory
    | ReportMemory
)
"""What an engine asks of the worker apart from steps: see `Executor.ask`."""
LASTING = (ReadAdapter, *get_args(StagingJob))
"""Jobs that go on on another thread, beside steps: the worker's answer is a future. They may fail
on some ranks alone, and change nothing that serves."""
