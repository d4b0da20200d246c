"""What each kind of plugin must be: the typed contracts behind the hooks of `hooks.py`.

Torch is imported for type checking only, so that finding plugins stays cheap.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from .types import KVReport, SamplingParams, SlotStart, StepPlan, StepResult

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    import torch
    from torch import nn

    from .config import EngineConfig, KVTransferConfig
    from .loading.model_config import ModelConfig
    from .nn.context import BatchLayout, BuildContext, ForwardContext
    from .nn.operations import Norm
    from .nn.quantized import LinearSpec, QuantizedLinear
    from .registry import Plugins
    from .scheduling.request import Request


# ---------------------------------------------------------------- models


@runtime_checkable
class Model(Protocol):
    """An architecture, composed of `core.nn` blocks. Subclasses `torch.nn.Module`.

    `weight_map` is data: which checkpoint names stack into which parameter
    (`core.loading.weight_map`).
    """

    weight_map: ClassVar[Any]

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Create parameters (uninitialised) on `build.device` in `build.dtype`."""

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """input_ids: [num_tokens] int64 → hidden states [num_tokens, hidden_size].

        Whatever only `compute_logits` needs (the last norm) is left to it: it sees few rows.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_rows, hidden_size] → logits [num_rows, vocab_size], any float dtype."""

    def after_loading(self) -> None:
        """Once, when every parameter is filled: weights made of others. Optional; modules inside
        the model may have one, too, and are called before what holds them."""


class PoolingModel(Protocol):
    """An architecture whose hidden states are pooled to vectors. A `Model` may be one, too.

    What a class has tells what it is for: with `compute_logits` it generates, with
    `pooling_states` it can be pooled, with `classify` it is a classifier.
    """

    weight_map: ClassVar[Any]
    causal: ClassVar[bool]
    """False: an encoder. Each prompt runs whole in one step, `context.backend` is None and
    nothing is cached. Optional; without it, true."""
    pooling_type: ClassVar[Literal["CLS", "LAST", "MEAN"]]
    """For checkpoints that do not say. Optional; without it, LAST."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """As `Model`. `config.pooling` is set, and nothing that only generating needs is."""

    @classmethod
    def context_length(cls, hf_config: Any) -> int:
        """Most tokens a prompt may have. Optional; without it, as the configuration says."""

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """input_ids: [num_tokens] int64 → hidden states [num_tokens, hidden_size]."""

    def pooling_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [any, hidden_size], some of what `forward` gave → what is pooled, same shape."""

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """pooled: [num_rows, hidden_size] → logits [num_rows, num_labels]. Only classifiers."""


class CheckpointConfig(Protocol):
    """What config.json says, of one model type. Its attributes are read by the name that the file
    has for them; `vocab_size`, `architectures`, `num_hidden_layers`, `hidden_size` and
    `num_attention_heads` are needed by all models that generate, others by the model itself."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> CheckpointConfig:
        """From config.json, with defaults for what it leaves out. Raises ValueError or TypeError
        for what is wrong with it."""


# ---------------------------------------------------------------- attention


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's attention, as a backend needs to know it.

    A field with a default is a feature: a layer that sets it is served only by backends that list
    its name in `AttentionBackend.features`. So a backend that is older than a field cannot ignore
    it unknowingly.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    """Each query sees itself and the `sliding_window - 1` tokens before it."""
    soft_cap: float | None = None
    """logits = soft_cap * tanh(logits / soft_cap)"""
    key_scale: float = 1.0
    """An fp8 cache holds keys divided by this. Of each call's spec: with `calculate_kv_scales`, the
    first step with tokens brings others than those before it."""
    value_scale: float = 1.0
    """An fp8 cache holds values divided by this."""
    alibi_slopes: tuple[float, ...] | None = None
    """[num_heads] A head's slope * (key's position - query's position) is added to its logits,
    after the soft cap. Source: ALiBi (arXiv 2108.12409)."""
    sinks: bool = False
    """Each head has one more logit, learned, that takes part in the softmax and has no value;
    `forward` gets them as `sinks`."""

    @property
    def features(self) -> frozenset[str]:
        """Names of the optional fields that this layer sets."""
        return frozenset(
            name for name, default in _defaults(type(self)) if getattr(self, name) != default
        )


@functools.cache
def _defaults(spec: type[AttentionSpec]) -> tuple[tuple[str, Any], ...]:
    """Name and default of each field that has one."""
    fields = msgspec.structs.fields(spec)
    return tuple((f.name, f.default) for f in fields if f.default is not msgspec.NODEFAULT)


class AttentionBackend(ABC):
    """Causal attention over a paged KV cache, prefill and decode rows in one batch. Subclass it.

    One instance serves a model; it may keep workspaces. The cache of one layer is
    [2 (key, value), num_blocks, block_size, num_kv_heads, head_dim]. Block 0 is the null block:
    padding rows write there. Whether yours is right: `jackfield.plugins.conformance.attention`.
    """

    name: ClassVar[str]
    features: ClassVar[frozenset[str]] = frozenset({"sliding_window", "soft_cap"})
    """Optional fields of `AttentionSpec` that it knows of. The default is what there was in the
    first version, and stays so; `supports` may still refuse one of them."""
    graph_safe: ClassVar[bool] = False
    """Whether a decode-only `forward` may be captured in a CUDA graph."""
    mixed_graph_safe: ClassVar[bool] = False
    """Whether any `forward` may be, with a layout whose `mixed` says what the device alone knows:
    launches then depend on nothing but the layout's sizes and upper bounds."""
    standard_cache: ClassVar[bool] = True
    """The cache has the layout above, and the step's keys and values are in it when `forward` is
    called; otherwise writing them is up to `forward`."""
    fp8_cache: ClassVar[bool] = False
    """It can read a float8_e4m3fn or float8_e5m2 cache, with the spec's scales."""

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when it can serve this layer here, else the reason why not, in one clause.

        Asked only about layers whose features it lists, whatever else they are: also about
        `num_heads` that is no multiple of `num_kv_heads`, and a dtype that is no floating-point
        type. Both are to be refused.
        """

    @abstractmethod
    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None: ...

    @abstractmethod
    def build_metadata(self, layout: BatchLayout) -> Any:
        """Once a step, before the first layer; what `forward` gets as `metadata`."""

    def prefers_launch(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> bool:
        """Whether a step of these rows, [num_rows] each, is faster launched than recorded: with
        lengths that the host knows there may be a better kernel. Asked where `mixed_graph_safe`."""
        return False

    @abstractmethod
    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache. Where `standard_cache` is false, write key and value to it first.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim];
        sinks: [num_heads], given only for layers whose spec has them (a backend without that
        feature needs no such argument)
        → [num_tokens, num_heads, head_dim]
        """

    def forward_projection(
        self,
        spec: AttentionSpec,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        kv_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor | None:
        """All of it from the fused projection: cut into heads, norm, rotate, write, attend.

        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; the rest as for
        `Operations.heads`. → as `forward`, or None, with nothing done (the default): such a step
        is left to the operations and `forward`. Not called for layers with sinks.
        """
        return None


# ---------------------------------------------------------------- quantization


class QuantizationMethod(Protocol):
    """A way to store and apply weights: a checkpoint format, or a rounding done at load.

    One instance serves a model. It decides, layer by layer, what takes a layer's place:
    `core.nn.quantized` has what such layers subclass, `core.nn.packed` the layouts that the
    operations multiply by; a method that repacks into one of these needs no kernel of its own.
    One linear layer of all experts of a mixture (`core.nn.experts`) is a merged layer of the role
    "experts"; answer None to a role that you do not know. Scales of an fp8 cache need no method:
    the checkpoint's `k_scale` and `v_scale` go to the attention layers.
    """

    name: ClassVar[str]
    kv_cache_dtype: str | None
    """What `EngineConfig.kv_cache_dtype` "auto" becomes, where the checkpoint wants another than
    the model's type. Optional."""

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when it can run here, else the reason why not, in one clause."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationMethod:
        """From the checkpoint's `quantization_config`; empty where it has none (the method was
        named in `EngineConfig.quantization`). Raises ConfigError with the field's name. A field
        that says how weights are stored (bits, group size, …) is followed or refused.
        """

    def layer(self, spec: LinearSpec) -> QuantizedLinear | None:
        """What takes the place of the layer `spec`; None: it stays as it is. It adds the layer's
        bias, and gives results in the type of its inputs."""


# ---------------------------------------------------------------- parsers


class Content(msgspec.Struct, frozen=True, tag="content"):
    """Text of the answer."""

    text: str


class CallText(Content, frozen=True, tag="call_text"):
    """A call's text, as a reasoning parser hands it on to the tool parser of its family. Where
    there is none, it is not shown."""


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """Text of the thought."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, tag="tool_call_start"):
    """A tool call begins; its name is known."""

    index: int
    name: str
    id: str = ""
    """The model's own id for the call, where its format has one that the template wants back."""


class ToolCallArguments(msgspec.Struct, frozen=True, tag="tool_call_arguments"):
    """The next fragment of a call's arguments, as JSON text."""

    index: int
    fragment: str


class ToolCallEnd(msgspec.Struct, frozen=True, tag="tool_call_end"):
    """A tool call is complete."""

    index: int


ParserEvent: TypeAlias = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd
"""What parsers of model output say, in the order of the text."""


class ReasoningParser(Protocol):
    """Splits thought from answer, for one request. Any cutting of the text gives the same fold.

    Never raises on text; linear time, whatever pieces the text comes in, so a piece costs the same
    however much came before it; events are `Content` and `Reasoning`.

    A class may have two more attributes. `markers: tuple[str, ...]`: texts it looks for that may be
    special tokens, which are shown to it then. `thinking_switch: tuple[str, bool]`: the chat
    template's argument that turns thinking on or off, and what the template does without it;
    default ("enable_thinking", True).

    It may have a method `see_prompt_end(text: str) -> None`, called before `feed` with what the
    chat template writes last before an answer: some templates open the thought, or close it.
    """

    reasoning_ended: bool
    """Whether thought is over, or none is to come: what follows the text fed so far is answer, and
    a grammar may hold from here. True as early as the text allows; once true, it stays true."""

    def __init__(self, *, thinking: bool = True) -> None:
        """`thinking`: whether the template lets this request think."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...


class ArgumentForm(msgspec.Struct, frozen=True, kw_only=True):
    """How one argument of a call is written, where arguments are not one JSON object."""

    begin: str
    """`{key}` stands for the parameter's name."""
    end: str = ""
    between: str = ""
    plain: bool = False
    """Strings stand as they are, up to `end`. Other values are JSON."""
    never: tuple[str, ...] = ()
    """Texts that such a string cannot have in it, besides `end`."""
    named: Mapping[str, str] = {}
    """Another way to write a constant: JSON text → what the family writes."""


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes its calls, for grammars: open, call, between, call, …, close; each call
    is begin, arguments, end. Texts that are special tokens of the tokenizer mean those.

    With it, an answer is held like this: free text until `trigger`, then calls, then the end.
    """

    trigger: str
    """What `open` begins with, and free text has nowhere: once it is written, calls follow."""
    open: str
    begin: str
    """`{name}` stands for the tool's name, `{number}` for a number that the model chooses."""
    end: str
    between: str
    """What follows a call when another comes, and the beginning of that."""
    close: str = ""
    quoted: bool = True
    """The name stands inside JSON quotes; otherwise as it is: letters, digits, `_`, `-`, `.`"""
    arguments: ArgumentForm | None = None
    """None: a JSON object."""
    never: tuple[str, ...] = ()
    """Other texts by which the parser finds a call: free text has them nowhere."""
    never_pattern: str = ""
    """The same, as an expression."""
    never_first: str = ""
    """An expression for what begins calls at the start of a text: free text does not start so."""
    only_first: bool = False
    """Calls stand at the start of an answer, and nowhere else."""


class ToolParser(Protocol):
    """Finds tool calls in the answer, for one request. Rules as for `ReasoningParser`.

    Events are `Content`, `ToolCallStart`, `ToolCallArguments`, `ToolCallEnd`. Calls are numbered
    from 0 and do not overlap; only a call with valid JSON for arguments has an end: an object by
    RFC 8259, without NaN, Infinity or control characters within strings.

    A class may have `markers`, as reasoning parsers have, and a function `new_id() -> str`: an id
    for a call whose text has none, where the family's template wants a certain form.

    It may have `call_form: CallForm | tuple[CallForm, ...]`, too: how its family writes calls.
    With it, calls that are forced, and those of tools marked `strict`, are held to their schemas by
    a grammar in the family's own form. Without it, forced calls are plain JSON, and `strict` is
    refused.
    """

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools`: the request's tools in OpenAI's form, for typing arguments."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...


# ---------------------------------------------------------------- structured outputs


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an output has to look like, in one canonical form; the key of the cache."""

    kind: Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
    text: str = ""
    """json, structural_tag: JSON text; choice: a JSON list of strings; json_object: empty."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a grammar chooses among."""

    token_bytes: list[bytes]
    """[size] What each id adds to a text; empty for special tokens and ids without a token, which
    no grammar allows."""
    size: int
    """The model's vocab_size, which may be larger than the tokenizer's."""
    eos_token_ids: tuple[int, ...]
    """Allowed where a grammar may end, and only there. At least one."""
    encode: Callable[[str], list[int]]
    """Text to token ids, without special tokens."""
    compact_json: bool = False
    """JSON has one form: no whitespace but one space after each comma and colon."""
    special_tokens: Mapping[str, int] = {}
    """Text of each special token → its id. Structural tags may name them in what stands around
    their contents, and nowhere else is one allowed."""


class GrammarMatcher(Protocol):
    """One output on its way through a grammar. Used by one thread at a time."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Go on by these tokens. False: the grammar does not allow them.

        Raises RuntimeError when the grammar is past the backend's limits.
        """

    def fill_bitmask(self, row: np.ndarray) -> None:
        """Write which tokens may come next. Not called once an end token was accepted.

        row: [ceil(size / 32)] int32, contiguous; bit i % 32 of word i // 32 is token i. Every bit
        is written, those past `size` too (as 0). Raises RuntimeError as `accept` does.
        """

    @classmethod
    def fill_bitmasks(
        cls, matchers: Sequence[Any], bits: np.ndarray, rows: Sequence[int]
    ) -> list[Exception | None]:
        """`fill_bitmask` for many at once, bits[rows[i]] by matchers[i]; what each would raise.

        bits: [count, ceil(size / 32)] int32, contiguous. Optional: without it, threads of the
        worker share the rows. With it, all of a step is one call, which should let go of the
        interpreter lock once and use more than one core.
        """

    @classmethod
    def accept_each(
        cls, matchers: Sequence[Any], token_ids: Sequence[int]
    ) -> Sequence[bool | Exception]:
        """`accept` for many at once, matchers[i] one token, token_ids[i]; what each would return or
        raise. A matcher that did not accept is not used again. Optional, as `fill_bitmasks` is.
        """

    def is_terminated(self) -> bool:
        """Whether an end token was accepted."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens. Optional: a matcher need not have it."""


class Grammar(Protocol):
    """A compiled grammar; shared by requests."""

    def matcher(self) -> GrammarMatcher:
        """A new one, at the beginning."""


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary."""

    bounded: ClassVar[bool]
    """Whether `compile` and `fill_bitmask` end in little time and memory whatever they are given.
    Such a backend is asked first for costly grammars, and gets short ones without a sandbox. All
    others that are not provably small are compiled in a process of its own first: so the class has
    to be one that its module and qualified name lead to."""

    @classmethod
    def unavailable(cls) -> str | None:
        """None when it can be used here, else the reason, in one clause."""

    @classmethod
    def refusal(cls, spec: GrammarSpec) -> str | None:
        """Why it cannot hold an output to this, in one clause; None when it may try."""

    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def compile(self, spec: GrammarSpec) -> Grammar:
        """On a thread of a pool. Raises ValueError with what is wrong with the grammar."""


# ---------------------------------------------------------------- loading and running


class WeightLoader(Protocol):
    """Fills a model with a checkpoint, which it only reads."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None: ...

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Fill every parameter of `model`, and process each of its quantized layers
        (`core.loading.weight_map.ParameterFiller` does both, from named tensors).

        In place, in each parameter's type; the same checkpoint gives the same numbers each time.
        Raises LoadError naming the tensor that is missing, unknown or of another shape, and for
        files that are damaged or not there.
        """


class Executor(Protocol):
    """Where the ranks run. The event loop talks to the worker through this alone."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, plugins: Plugins
    ) -> None: ...

    @staticmethod
    def get_ready(config: EngineConfig, plugins: Plugins) -> None:
        """Do what a start can do before anything is known of the model.

        Called on a thread, while the model's configuration is read and before `__init__`; an
        executor without this method does all in `start`. What fails here is to fail there again.
        """

    async def start(self) -> ExecutorInfo:
        """Load the model, size the cache, warm up."""

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Queue one step; plans run in order. The future fails if the step as a whole does."""

    async def recover(self) -> None:
        """After a failed step, with no step queued: forget every slot, and check the device.

        From a step's failure until this is called, steps must not run: what they are made of may
        never have arrived. They fail, too. Raises when the device is lost. With an executor
        without this method, a failed step ends the engine; so it does with a KV connector, and
        when several steps fail in a row.
        """

    async def stop(self) -> None:
        """Finish what is queued, free the device. Safe to call twice."""

    async def ping(self) -> None:
        """Return when the worker has done what was queued before, and answers.

        What `AsyncEngine.check_health` asks; an executor without this method counts as alive until
        a step fails.
        """

    def watch_transfers(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop when a KV connector's worker half has news.

        Called once, before `start`, and only where a connector is configured: an executor without
        this method serves without connectors.
        """


class ExecutorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine learns from a started executor."""

    num_blocks: int
    """KV blocks, the null block included; 0: the model has no cache."""
    device: str
    dtype: str
    attention_backend: str
    attention_reason: str
    """Why this backend was chosen, in one clause."""
    weight_bytes: int
    kv_cache_bytes: int
    load_seconds: float
    kv_layout: KVLayout | None = None
    """Where a KV connector is configured."""


class SchedulePolicy(Protocol):
    """Who goes first, and who is preempted. Made once an engine, without arguments."""

    def key(self, request: Request) -> tuple[Any, ...]:
        """Smallest first. The victim of a preemption is the running request with the largest.

        Asked once, when the request is added: the answer holds for its life. Equal keys: by
        order of addition. A tuple of numbers, texts, bytes or such tuples, of one shape for all
        requests, those for a vector too, and without NaN, so that any two compare: another key, or
        an exception, refuses this request alone. The request is read and not changed. Called on
        the event loop: it must not cost more, the more requests came before.
        """


# ---------------------------------------------------------------- KV connectors


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache, as a connector needs to know it."""

    num_blocks: int
    """The null block (0) included."""
    block_size: int
    """Tokens in a block."""
    dtype: str
    """As torch names it: "bfloat16", …"""
    layers: tuple[tuple[int, int], ...]
    """[num_layers] (num_kv_heads, head_dim) of each layer's cache."""
    block_bytes: int
    """Of one block over all layers, keys and values."""
    fingerprint: bytes
    """[32] What KV content depends on besides tokens: the model's configuration and weights, dtype
    and layout. Engines with equal fingerprints may read each other's blocks. Block keys are made
    with it, so equal keys mean equal content."""


@dataclass(frozen=True)
class KVConnectorSetup:
    """What both halves of a connector are made from."""

    transfer: KVTransferConfig
    """The user's configuration; a connector's own options in `kv_connector_extra_config`."""
    layout: KVLayout
    plugins: Plugins
    """For connectors that use others."""
    notify: Callable[[], None]
    """Call it when something has happened outside a step: an answer of `num_external_tokens` that
    was None is known now (scheduler half), `poll` has something to tell (worker half). From any
    thread; make the news visible first. What is told without it is seen with the next step, and
    an idle engine makes none."""


class KVConnectorScheduler(Protocol):
    """The half on the event loop: decides. Nothing here may block or raise: what needs I/O goes to
    a thread, and a far side that fails has nothing to load and saves nothing.

    A transfer is a number that the engine gives to one load, one save or one hold of blocks. From
    the call that names it until the worker half reports its end (`KVReport`), the engine neither
    frees nor reuses its blocks, whatever becomes of the request. So each transfer must end, once,
    and a load of a request that was aborted ends like any other.
    """

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens past `num_computed_tokens` (a multiple of the block size, found in the engine's
        own prefix cache) that could be loaded.

        None: not known yet; the request is passed over, others go on, and after `notify` it is
        asked again. Once answered it is not asked again, unless the request is preempted.
        `request.block_hashes[i]` is the key of the prompt's block i, for all full blocks but one
        that would leave nothing to compute; the answer counts from its block
        num_computed_tokens / block_size on, and is rounded down to whole blocks.
        `request.params.kv_transfer_params` is what the caller sent.
        """

    def start_load(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Blocks have been allocated for what `num_external_tokens` promised: fill `block_ids[i]`
        with what `keys[i]` names. Part of the promise may have come from elsewhere by now.

        The request waits; once the load has ended, what was filled is in the prefix cache, and the
        rest is computed.
        """

    def start_save(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[int]:
        """Full blocks that steps have computed, and whose content is final: → those of `block_ids`
        that this connector will read, which the engine then holds; empty: none, no transfer.
        """

    def request_finished(
        self, transfer: int, request: Request
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended (`request.finish_reason`) → (hold its blocks, kv_transfer_params).

        With True, `request.block_ids` are held under `transfer` until the worker half reports its
        end: for a far side that fetches them. The dictionary goes into the response. Blocks of a
        request that never ran are an empty list, and are not held.
        """

    def build_metadata(self) -> Any:
        """What the worker half must know of the calls above; None: nothing. Called once for each
        step that is planned, and when there is something to send but nothing to compute: return
        everything new, once. Plain data, so that a plan may be sent to another process.
        """

    def update(self, report: KVReport) -> None:
        """The worker half's report; the engine has taken it in."""

    def close(self) -> None:
        """The engine stops. The worker half is closed later."""


class KVConnectorWorker(Protocol):
    """The half beside the device: moves. Its methods run on the launch thread, and must not wait
    for a transfer: that is for a thread or stream of its own.

    On a GPU, transfers run on the connector's own streams. A save needs no order: what it reads was
    final before `start` was called. A load must wait for an event that `start` records on the
    current stream, since steps under way may still use the blocks' former content; its end is
    reported after the device has finished it.
    """

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Once, before the first step. [num_layers] tensors
        [2 (key, value), num_blocks, block_size, num_kv_heads, head_dim], as `KVLayout` says. They
        are inference tensors: write to them within `torch.inference_mode()`."""

    def start(self, metadata: Any) -> None:
        """What `build_metadata` returned, before its step is launched: start the transfers.

        A far side that fails is reported by `poll`; an error raised here ends the engine.
        """

    def poll(self) -> KVReport | None:
        """What has ended since the last call. Called with every step, so it must be cheap."""

    def close(self) -> None:
        """The engine stops: finish the saves under way, drop the loads, leave no thread that
        touches the cache."""


class KVConnector(Protocol):
    """KV blocks from and to elsewhere: disaggregated prefill, offloading, shared stores.

    What is registered is a class (or any object) that makes both halves. They share no state but
    what travels: metadata with the step plan, reports with the step result. What the far side has
    kept damaged is never used, and is replaced when its blocks are computed again.
    """

    @classmethod
    def make_scheduler(cls, setup: KVConnectorSetup) -> KVConnectorScheduler:
        """Raises ConfigError with the name of a wrong option, or of one that it does not know."""

    @classmethod
    def make_worker(cls, setup: KVConnectorSetup) -> KVConnectorWorker:
        """As `make_scheduler`."""


# ---------------------------------------------------------------- logits processors


@dataclass(frozen=True)
class LogitsProcessorSetup:
    """What a logits processor is made for."""

    vocab_size: int
    num_slots: int
    """Slots are 0 to num_slots - 1."""
    max_model_len: int
    device: torch.device
    history: torch.Tensor
    """[num_slots or more, positions] int32 on `device`: the tokens of each slot. Only to be read,
    and only in `apply`."""


@dataclass(frozen=True)
class ProcessedRows:
    """Which rows of a step a processor is given."""

    slots: tuple[int, ...]
    """[num_rows]"""
    device_slots: torch.Tensor
    """[num_rows] int64, the same on the device"""
    lengths: torch.Tensor
    """[num_rows] int64 on the device: tokens known, so that row r's are
    `history[device_slots[r], :lengths[r]]`."""


class LogitsProcessor(ABC):
    """Changes the logits of requests that ask for it, before sampling. Subclass it.

    One instance serves an engine; all but `check` runs on the launch thread. Requests ask by
    `SamplingParams.extra_args` (over HTTP: `vllm_xargs`). An error costs the requests that were
    being served, names the distribution, and ends nothing else. Rows of requests that do not ask
    are never shown, and cost nothing. Whether yours is right:
    `jackfield.plugins.conformance.logits_processors`.
    """

    parameters: ClassVar[frozenset[str]] = frozenset()
    """Keys of `extra_args` that it reads. A key that no active processor reads is refused."""
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()
    """Some `extra_args` that ask for it, different ones: what the kit tries it with."""
    argmax_invariant: ClassVar[bool] = False
    """It never changes which logit is the largest. Then it is applied behind the temperature, in
    front of min_p, top_k and top_p, and greedy rows are left out. Others are applied behind
    logit_bias, allowed tokens, bad words and min_tokens, in front of the penalties."""

    @classmethod  # noqa: B027
    def check(cls, params: SamplingParams) -> None:
        """Refuse a request, on the event loop. Raises InvalidRequest with the field's name."""

    @abstractmethod
    def __init__(self, setup: LogitsProcessorSetup) -> None: ...

    @abstractmethod
    def start(self, slot: int, request: SlotStart) -> bool:
        """A request takes a slot: → whether it asks for anything. After a preemption it starts
        again, maybe in another slot, with the tokens there are."""

    def end(self, slot: int) -> None:  # noqa: B027
        """The request that started in the slot has ended, or lost it."""

    def batch_changed(self, slots: tuple[int, ...]) -> None:  # noqa: B027
        """The rows of the next `apply` are others than of the last one, or in another order."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        """logits: [num_rows, vocab_size] float32, may be changed in place → the same shape.

        Of the rows in `rows`, on the device, and without waiting for it: what is launched here runs
        behind the forward pass.
        """


# ---------------------------------------------------------------- specified, not called yet
