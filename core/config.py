"""`EngineConfig`: every engine option, documented once. The command line is derived from it.

Field names are vLLM's wherever the meaning is the same.
"""

from __future__ import annotations

import difflib
import functools
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from .errors import ConfigError
from .registration.parallel_options import IN_PLACE, EPLBConfig, layer_partition, parallel_refusal
from .registration.speculative_config import SpeculativeConfig

Device = Literal["auto", "cuda", "cpu"]
DType = Literal["auto", "bfloat16", "float16", "float32"]
"""Types of models, and of states of sequences."""
KVCacheDType = Literal[
    "auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2",
    "int8", "int8_int4", "int4", "int8_per_token_head",
]  # fmt: skip
LoadFormat = str


AtLeastOne = Annotated[int, Meta(ge=1)]
AtLeastTwo = Annotated[int, Meta(ge=2)]
Bits64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(min_length=1)]


SYNONYMS = {"distributed_executor_backend": "executor"}
"""vLLM's names of options that have another one here."""


def _doc(text: str, **bounds: Any) -> Any:
    return Meta(description=text, **bounds)


class StructuredOutputsConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Options of structured outputs. The first two names are vLLM's."""

    backend: Annotated[
        str, _doc("Grammar backend by name; auto: the best one for each grammar.", min_length=1)
    ] = "auto"
    disable_any_whitespace: Annotated[
        bool, _doc("JSON in one line: one space after each comma and colon, none elsewhere.")
    ] = False
    max_grammar_bytes: Annotated[
        int, _doc("Largest schema, expression or grammar of a request, in bytes.", ge=1)
    ] = 131072
    max_grammar_depth: Annotated[
        int, _doc("Deepest nesting of a schema, expression or grammar.", ge=1, le=500)
    ] = 64
    max_grammar_references: Annotated[
        int, _doc("Longest chain of a schema's references or a grammar's rules.", ge=1, le=1000)
    ] = 256
    compile_timeout: Annotated[
        float, _doc("Seconds that a grammar may take to compile.", gt=0.0, le=3600.0)
    ] = 10.0
    compile_memory: Annotated[
        float, _doc("GiB that a sandbox process, which tries grammars, may add.", gt=0.0, le=1024.0)
    ] = 2.0
    compile_threads: Annotated[int, _doc("Grammars compiled at once.", ge=1, le=64)] = 2
    cache_size: Annotated[int, _doc("Compiled grammars kept.", ge=1)] = 256
    mask_timeout: Annotated[
        float,
        _doc("Seconds that one token's mask may take; a slower request fails alone.", gt=0.0),
    ] = 0.5


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV connector and its options: `EngineConfig.kv_transfer_config`. Names are vLLM's."""

    kv_connector: Annotated[str, _doc("KV connector by name.", min_length=1)]
    kv_role: Annotated[
        Literal["kv_both", "kv_producer", "kv_consumer"],
        _doc("kv_producer only saves, kv_consumer only loads, kv_both does both."),
    ] = "kv_both"
    kv_connector_extra_config: Annotated[dict[str, Any], _doc("The connector's own options.")] = {}
    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        _doc("What a request does when its KV cannot be loaded: compute it, or end with an error."),
    ] = "recompute"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All options of an engine. Frozen; checked on creation.

    Raises `ConfigError` with the field's name.
    """

    model: Annotated[
        str, _doc("Path of a checkpoint folder, or a hub name. Empty: the embedded tiny model.")
    ] = ""
    tokenizer: Annotated[str | None, _doc("Tokenizer path or name; default: the model's.")] = None
    revision: Annotated[str | None, _doc("Hub revision of the checkpoint.")] = None
    tokenizer_revision: Annotated[str | None, _doc("Hub revision of the tokenizer.")] = None
    served_model_name: Annotated[
        tuple[Name, ...], _doc("Names the server answers to; default: the value of model.")
    ] = ()
    trust_remote_code: Annotated[
        bool,
        _doc(
            "Kept for compatibility. Jackfield never imports a checkpoint's code; True is refused."
        ),
    ] = False
    skip_tokenizer_init: Annotated[
        bool, _doc("Load no tokenizer: prompts are token ids and outputs have no text.")
    ] = False
    chat_template: Annotated[
        str | None, _doc("Chat template (Jinja text or a file's path) instead of the tokenizer's.")
    ] = None
    assistant_control_tokens: Annotated[
        bool,
        _doc(
            "Let control tokens in the text of assistant messages be tokens, for clients that send "
            "back tool-call markup or reasoning as the model wrote it; off, no message's text "
            "becomes a control token."
        ),
    ] = False
    device: Annotated[Device, _doc("Where the model runs; auto: cuda if there is one.")] = "auto"
    dtype: Annotated[
        DType, _doc("Type of weights and activations; auto: the checkpoint's, float32 on a CPU.")
    ] = "auto"
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        _doc("Generate text, or pool hidden states to vectors; auto: what the checkpoint is for."),
    ] = "auto"
    task: Annotated[
        Literal["auto", "generate", "embed", "classify", "score"],
        _doc("What the model is used for, as in older vLLM: sets runner, and is validated."),
    ] = "auto"
    pooler_config: Annotated[
        dict[str, Any] | None,
        _doc(
            "What to change in how states are pooled: pooling_type (CLS, LAST, MEAN), normalize, "
            "activation."
        ),
    ] = None
    seed: Annotated[Bits64, _doc("Seeds the requests that bring no seed, and dummy weights.")] = 0
    load_format: Annotated[
        LoadFormat,
        _doc(
            "Weight loader: auto (safetensors), runai_streamer (safetensors, by its package), pt "
            "(torch's files, as tensors alone), gguf, sharded_state (a file for each rank, by "
            "jackfield convert), tensorizer (*.tensors, by its package), dummy (random), or a "
            "plugin's."
        ),
    ] = "auto"
    model_loader_extra_config: Annotated[
        dict[str, Any] | None,
        _doc(
            "The weight loader's own options; sharded_state: pattern, of its files' names; "
            "tensorizer: tensorizer_uri, a path; num_readers; verify_hash (true)."
        ),
    ] = None
    model_impl: Annotated[
        Literal["auto", "jackfield", "vllm", "transformers"],
        _doc(
            "Whose model code runs: jackfield (or vllm: the engine's own), transformers (its "
            "modules; slower), or auto: the engine's own where there is one."
        ),
    ] = "auto"
    max_model_len: Annotated[
        AtLeastOne | None, _doc("Context length in tokens; default: the model's.")
    ] = None
    max_num_seqs: Annotated[int, _doc("Requests that run at once (slots).", ge=1)] = 256
    max_num_batched_tokens: Annotated[
        AtLeastOne | None, _doc("Token budget of one step; default: 8192 on a GPU, 2048 on a CPU.")
    ] = None
    max_waiting_requests: Annotated[
        AtLeastOne | None,
        _doc("Refuse new requests (503) if this many are waiting; default: no limit."),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, _doc("Split long prompts over several steps. Off: a prompt must fit in one budget.")
    ] = True
    long_prefill_token_threshold: Annotated[
        int, _doc("Most tokens of one prompt in a step; 0: no limit.", ge=0)
    ] = 0
    scheduling_policy: Annotated[
        str, _doc("Who goes first: fcfs, priority (lower value first), or a plugin's.")
    ] = "fcfs"
    block_size: Annotated[int, _doc("Tokens in a KV-cache block.", ge=1, le=1024)] = 16
    enable_prefix_caching: Annotated[bool, _doc("Reuse KV blocks of equal prefixes.")] = True
    gpu_memory_utilization: Annotated[
        float, _doc("Share of the device's memory this engine may use.", gt=0.0, le=1.0)
    ] = 0.9
    num_gpu_blocks_override: Annotated[
        AtLeastTwo | None, _doc("KV-cache blocks, instead of what profiling finds.")
    ] = None
    cpu_kvcache_space: Annotated[
        float, _doc("GiB for the KV cache when the device is a CPU.", gt=0.0, le=1e6)
    ] = 1.0
    kv_cache_dtype: Annotated[
        KVCacheDType,
        _doc(
            "Type of cached keys and values; auto: the model's. fp8 (which is fp8_e4m3) takes "
            "half the room of bfloat16. int8 (vLLM's int8_per_token_head) and int4 have a scale "
            "and a zero for each token and head, int8_int4 has keys in 8 bits and values in 4. Of "
            "the others, the model's alone."
        ),
    ] = "auto"
    kv_cache_dtype_skip_layers: Annotated[
        tuple[Name, ...],
        _doc(
            "Layers that cache in the model's type, whatever kv_cache_dtype is: numbers of layers "
            "with attention from 0, or from the end with -1, or sliding_window for all with a "
            "window."
        ),
    ] = ()
    mamba_cache_dtype: Annotated[
        DType,
        _doc(
            "Type of states of sequences (of state-space layers, gated delta nets and short "
            "convolutions); auto: the model's for inputs of convolutions, and float32 for the rest."
        ),
    ] = "auto"
    mamba_ssm_cache_dtype: Annotated[
        DType,
        _doc(
            "Type of states of sequences but inputs of convolutions; auto: as mamba_cache_dtype. "
            "Sums are float32; a state is rounded where a step leaves it: once per generated token."
        ),
    ] = "auto"
    calculate_kv_scales: Annotated[
        bool,
        _doc(
            "With an fp8 cache: take the scales that the checkpoint does not have from the first "
            "step's keys and values. Off: they are 1."
        ),
    ] = False
    kv_transfer_config: Annotated[
        KVTransferConfig | None,
        _doc(
            "KV connector and its options: kv_connector, kv_role, kv_connector_extra_config, "
            "kv_load_failure_policy; default: none."
        ),
    ] = None
    kv_compression: Annotated[
        Name | None,
        _doc(
            "KV compressor by name: it drops tokens from requests' caches, and their blocks become "
            "free; default: none."
        ),
    ] = None
    kv_compression_ratio: Annotated[
        float,
        _doc(
            "Share of a request's tokens that kv_compression keeps, but at least 16 tokens.",
            gt=0.0,
            le=1.0,
        ),
    ] = 0.5
    kv_compression_budget: Annotated[
        AtLeastOne | None,
        _doc(
            "Tokens of a request that kv_compression keeps, instead of a share, but at least 16; "
            "default: kv_compression_ratio decides."
        ),
    ] = None
    kv_compression_interval: Annotated[
        int,
        _doc(
            "Generated tokens between two compactions of a request's cache; 0: its cache is "
            "compacted only once, after the prompt.",
            ge=0,
        ),
    ] = 0
    kv_compression_prompt_interval: Annotated[
        int,
        _doc(
            "Prompt tokens between two compactions while a prompt is computed, so that a cache "
            "never holds all of it; 0: only once the prompt is computed.",
            ge=0,
        ),
    ] = 0
    kv_compression_on_pressure: Annotated[
        bool,
        _doc(
            "Compact caches only when KV blocks run out, before a request is preempted or another "
            "one has to wait, instead of after each prompt."
        ),
    ] = False
    speculative_config: Annotated[
        SpeculativeConfig | None,
        _doc(
            "Speculative decoding: method (a speculator by name), num_speculative_tokens, and the "
            "speculator's own options beside them; default: none."
        ),
    ] = None
    attention_backend: Annotated[str, _doc("Attention backend by name, or auto.")] = "auto"
    operations: Annotated[
        str, _doc("Implementation of norms, products and activations by name, or auto.")
    ] = "auto"
    quantization: Annotated[
        str | None,
        _doc("Quantization method by name; default: what the checkpoint says, or none."),
    ] = None
    executor: Annotated[
        str,
        _doc(
            "Where ranks run: inprocess (one; uni is the same), processes (one or several of this "
            "host; mp is the same), ray (on hosts of a Ray cluster), a plugin's, or auto, by their "
            "number."
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int, _doc("GPUs that share each layer: ranks, each with a process of its own.", ge=1)
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        _doc(
            "Divide a mixture's experts whole among the ranks of tensor_parallel_size, instead of "
            "each expert; with one rank nothing is divided."
        ),
    ] = False
    all2all_backend: Annotated[
        str,
        _doc(
            "How tokens come to the ranks that hold their experts, with enable_expert_parallel: "
            "allgather_reducescatter or naive (each rank has all tokens, and one sum adds what "
            "experts compute), all_to_all (tokens are exchanged by torch.distributed), or a "
            "plugin's."
        ),
    ] = IN_PLACE[0]
    enable_eplb: Annotated[
        bool,
        _doc(
            "With enable_expert_parallel: count the tokens that choose each expert, and move "
            "experts between ranks so that each computes about as many."
        ),
    ] = False
    eplb_config: Annotated[
        EPLBConfig,
        _doc("How experts are placed by load: window_size, step_interval, num_redundant_experts."),
    ] = EPLBConfig()
    pipeline_parallel_size: Annotated[
        int,
        _doc(
            "Stages that each hold some of the layers, on tensor_parallel_size GPUs of its own: "
            "as many steps are in flight.",
            ge=1,
        ),
    ] = 1
    pipeline_layer_partition: Annotated[
        tuple[AtLeastOne, ...] | None,
        _doc(
            "Layers of each stage of pipeline_parallel_size, from the first, such as 10,11,11; "
            "default: as evenly as possible."
        ),
    ] = None
    data_parallel_size: Annotated[
        int,
        _doc(
            "Engines with the same model behind one server, each on tensor_parallel_size * "
            "pipeline_parallel_size GPUs of its own; a request runs on one of them.",
            ge=1,
        ),
    ] = 1
    collectives: Annotated[
        str,
        _doc("How ranks exchange tensors: peer_memory, nccl, gloo, a plugin's; auto: by device."),
    ] = "auto"
    distributed_timeout_seconds: Annotated[
        float, _doc("Seconds that a rank waits for the others.", gt=0.0, le=1e6)
    ] = 600.0
    rank_timeout: Annotated[
        float,
        _doc(
            "Seconds without a sign of life of a rank, or without progress of any rank in a step, "
            "after which an engine of several ranks ends; to compile kernels is progress. 0: "
            "never.",
            ge=0.0,
            le=1e6,
        ),
    ] = 8.0
    enforce_eager: Annotated[bool, _doc("Never record CUDA graphs of decode steps.")] = False
    max_logprobs: Annotated[
        int, _doc("Largest logprobs that a request may have; -1: no limit.", ge=-1)
    ] = 20
    reasoning_parser: Annotated[
        str | None,
        _doc(
            "Reasoning parser by name, none, or auto (by the checkpoint's chat template and model "
            "type); default: by its jackfield.json."
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _doc(
            "Tool-call parser by name, none, or auto (by the checkpoint's chat template and model "
            "type); default: by its jackfield.json."
        ),
    ] = None
    structured_outputs_config: Annotated[
        StructuredOutputsConfig,
        _doc("How outputs are constrained by grammars: JSON, or one flag per field."),
    ] = StructuredOutputsConfig()
    disable_plugins: Annotated[
        tuple[str, ...], _doc("Entry points or distributions not to load.")
    ] = ()
    logits_processors: Annotated[
        tuple[Name, ...] | None,
        _doc(
            "Plugged-in logits processors that requests may use, by name, in the order they "
            "are applied; default: all that are registered."
        ),
    ] = None
    plugin_options: Annotated[
        dict[str, dict[str, Any]],
        _doc(
            "Options of plugins: name → its options. `jackfield plugins NAME` lists them; "
            "--plugin-option NAME.KEY=VALUE gives one."
        ),
    ] = {}
    generation_config: Annotated[
        str,
        _doc(
            "Where requests get what they leave open (temperature, top_p, top_k, min_p, "
            "repetition_penalty; max_new_tokens limits all): auto (the model's "
            "generation_config.json), vllm (from nowhere), or a folder with such a file."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None, _doc("Values that replace those of generation_config.json.")
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None, _doc("Values that replace those of the checkpoint's config.json.")
    ] = None

    record_steps: Annotated[
        str | None,
        _doc(
            "Write every plan and result to this new file, for `jackfield debug replay`. It holds "
            "prompts and outputs as token ids."
        ),
    ] = None
    record_steps_max_gb: Annotated[
        float, _doc("GB (1e9 bytes) after which the recording ends; the engine goes on.", gt=0)
    ] = 1.0

    def __post_init__(self) -> None:
        for name in ("served_model_name", "disable_plugins", "kv_cache_dtype_skip_layers"):
            value = getattr(self, name)
            if value is None:
                value = ()
            if isinstance(value, str):
                value = (value,)
            if isinstance(value, list):
                value = tuple(value)
            if name == "kv_cache_dtype_skip_layers" and isinstance(value, tuple):
                value = tuple(str(word) if isinstance(word, int) else word for word in value)
            msgspec.structs.force_setattr(self, name, value)
        if self.pipeline_layer_partition is not None:
            partition = layer_partition(self.pipeline_layer_partition)
            msgspec.structs.force_setattr(self, "pipeline_layer_partition", partition)
        if isinstance(self.kv_transfer_config, dict | KVTransferConfig):
            msgspec.structs.force_setattr(
                self, "kv_transfer_config", _transfer_config(self.kv_transfer_config)
            )
        if isinstance(self.speculative_config, dict | SpeculativeConfig):
            speculative = SpeculativeConfig.read(self.speculative_config)
            msgspec.structs.force_setattr(self, "speculative_config", speculative)
        for name, hint in _field_types(type(self)).items():
            value = getattr(self, name)
            try:
                if isinstance(value, msgspec.Struct):
                    value = msgspec.structs.asdict(value)
                converted = msgspec.convert(value, hint)
                if isinstance(converted, msgspec.Struct):
                    msgspec.structs.force_setattr(self, name, converted)
            except msgspec.ValidationError as error:
                raise ConfigError(
                    f"{name}: {error} (got {getattr(self, name)!r})", param=name
                ) from None
        self._check_together()

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names for requests; responses have the first one."""
        return self.served_model_name or (self.model or "jackfield-tiny",)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def exchanges_tokens(self) -> bool:
        """Whether tokens are sent to the ranks that hold their experts."""
        divided = self.enable_expert_parallel and self.tensor_parallel_size > 1
        return divided and self.all2all_backend not in IN_PLACE

    def _check_together(self) -> None:
        if self.trust_remote_code:
            raise ConfigError(
                "trust_remote_code: Jackfield never runs code from a checkpoint; write a model "
                "plugin instead (docs/how-to)",
                param="trust_remote_code",
            )
        if refusal := parallel_refusal(
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            layer_partition=self.pipeline_layer_partition,
            data=self.data_parallel_size,
            expert_parallel=self.enable_expert_parallel,
            all2all=self.all2all_backend,
            eplb=self.eplb_config if self.enable_eplb else None,
        ):
            raise refusal
        if self.eplb_config.num_redundant_experts and not self.enable_eplb:
            raise ConfigError(
                "eplb_config.num_redundant_experts: copies are placed by load; set enable_eplb",
                param="eplb_config",
            )
        if self.kv_transfer_config is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_transfer_config: what a connector loads becomes part of the prefix cache, "
                "which enable_prefix_caching turns off",
                param="kv_transfer_config",
            )
        if self.record_steps is not None and self.kv_transfer_config is not None:
            raise ConfigError(
                "record_steps: what a KV connector loads (kv_transfer_config) is not in a "
                "recording, so it could not be replayed",
                param="record_steps",
            )
        if self.speculative_config is not None:
            self._check_speculative()
        intervals = {
            "kv_compression_interval": self.kv_compression_interval,
            "kv_compression_prompt_interval": self.kv_compression_prompt_interval,
        }
        for name, interval in intervals.items():
            if self.kv_compression_on_pressure and interval:
                raise ConfigError(
                    f"{name}: caches are compacted only when blocks run out "
                    "(kv_compression_on_pressure); leave one of them out",
                    param=name,
                )
        if self.kv_compression_prompt_interval and not self.enable_chunked_prefill:
            raise ConfigError(
                "kv_compression_prompt_interval: prompts are computed in one step "
                "(enable_chunked_prefill is off), so their caches are compacted only after it",
                param="kv_compression_prompt_interval",
            )
        if self.calculate_kv_scales and self.kv_transfer_config is not None:
            raise ConfigError(
                "calculate_kv_scales: keys and values from elsewhere (kv_transfer_config) were "
                "cached with other scales",
                param="calculate_kv_scales",
            )
        if (
            not self.enable_chunked_prefill
            and self.max_num_batched_tokens is not None
            and self.max_model_len is not None
            and self.max_num_batched_tokens < self.max_model_len
        ):
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is below max_model_len "
                f"({self.max_model_len}), and enable_chunked_prefill is off: such prompts could "
                "never run",
                param="max_num_batched_tokens",
            )

    def _check_speculative(self) -> None:
        reason = None
        if self.kv_compression is not None:
            reason = "caches with drafts are not compacted (kv_compression)"
        elif self.kv_transfer_config is not None:
            reason = "KV connectors (kv_transfer_config) would save drafts"
        elif self.num_ranks > 1:
            reason = (
                "drafts are verified by one rank alone (tensor_parallel_size 1, "
                "pipeline_parallel_size 1)"
            )
        if reason is not None:
            raise ConfigError(
                f"speculative_config: {reason}; leave one of them out", param="speculative_config"
            )

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """Build from a plain dict. The error for an unknown name suggests the nearest valid one."""
        field_names = set(cls.__struct_fields__)
        options = {SYNONYMS.get(name, name): value for name, value in options.items()}
        for name in options:
            if name not in field_names:
                near = difflib.get_close_matches(name, field_names, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{name}: no such engine option{hint}", param=name)
        return cls(**options)


def _transfer_config(value: dict[str, Any] | KVTransferConfig) -> KVTransferConfig:
    if isinstance(value, KVTransferConfig):  # Its constructor checks nothing.
        value = msgspec.structs.asdict(value)
    try:
        return msgspec.convert(value, KVTransferConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_transfer_config: {error} (got {value!r})", param="kv_transfer_config"
        ) from None


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    hints: dict[str, Any] = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}  # type: ignore[attr-defined]
