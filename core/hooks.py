"""All hooks of the plugin framework: their signatures, their callers and when they are called.

A plugin is a module (or object) with functions marked `@hookimpl`, found through the entry-point
group `jackfield`:

    # pyproject.toml
    [project.entry-points.jackfield]
    my-plugin = "my_package.plugin"

    # my_package/plugin.py
    from jackfield import hookimpl

    jackfield_api = 3

    @hookimpl
    def register_tool_parsers(registry):
        registry.add("mine", "my_package.parser:MyToolParser")

Registration hooks run once, when the plugins are loaded (`core.registry.load_plugins`), and take a
typed registry. References are lazy: `"module:attribute"` is imported when the name is first used,
so discovery imports neither torch nor a plugin's heavy modules. Event hooks run on the event loop;
they may be `async def`, registration hooks may not. A hook without an implementation costs nothing
per step. A plugin that raises is named, with its distribution, in the log and by `jackfield
plugins`. Only the plugin itself, or the request that it was called for, fails.

`jackfield_api` is the version of these hooks that the plugin was written for
(core/hook_versions.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec
    from prometheus_client import CollectorRegistry

    from .cache.events import CacheEvent, KVCacheInfo
    from .nn.operations import Operations
    from .outputs import PoolingRequestOutput, RequestOutput
    from .pooling_params import PoolingParams
    from .protocols.adapters import AdapterFormat, AdapterResolver
    from .protocols.all2all import All2All
    from .protocols.attention import AttentionBackend
    from .protocols.collectives import Collectives
    from .protocols.executors import Executor, SchedulePolicy
    from .protocols.grammars import GrammarBackend
    from .protocols.kv import KVConnector
    from .protocols.kv_compressors import KVCompressor
    from .protocols.latent_attention import LatentAttentionBackend
    from .protocols.loaders import CheckpointFormat, WeightLoader
    from .protocols.logits_processors import LogitsProcessor
    from .protocols.media import MediaModel
    from .protocols.models import CheckpointConfig, Model, PlainConfig, PoolingModel
    from .protocols.parsers import ReasoningParser, ToolParser
    from .protocols.parts import StepPart
    from .protocols.quantization import QuantizationMethod
    from .protocols.speculators import Speculator
    from .registry import Registry
    from .sampling_params import SamplingParams
    from .step import StepPlan, StepResult
    from .tenancy import ReceivedRequest, RequestHead, Tenant

PROJECT = "jackfield"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as a plugin's implementation of the hook that has its name."""


# ---------------------------------------------------------------- registration


@hookspec
def register_models(registry: Registry[type[Model] | type[PoolingModel]]) -> None:
    """Architecture name (as in config.json's `architectures`) → module class.

        registry.add("LlamaForCausalLM", "jackfield.plugins.models.llama:LlamaForCausalLM")

    Used by the worker when it builds the model, and before that to determine whether the class
    generates text, is pooled to vectors, or both. Fields of config.json that no other family has
    are declared in the class's `config_fields`. Contract: `protocols.Model`,
    `protocols.PoolingModel`.

    `registry.refuse(name, reason)` says why an architecture is not served, for the error of who
    tries. `registry.add_text_part(name, of)` says that of a multimodal architecture the text part
    is served, as the architecture `of`, or as the one of its text configuration's type
    (`registry.add_text_type(model_type, of)`, or in `transformers`). The name "*" is asked where no
    other fits: its class has a classmethod `refusal(architecture)`, which says in one clause why it
    cannot serve one, or None.
    """


@hookspec
def register_configs(registry: Registry[type[CheckpointConfig] | PlainConfig]) -> None:
    """Model type (as in config.json's `model_type`) → configuration class, or a
    `protocols.PlainConfig`.

        registry.add("my_model", "my_package.config:MyConfig")

    Used by the engine and by each of its front ends, when they read a checkpoint's config.json: for
    a type that `transformers` does not know, or reads otherwise. To take over a type that Jackfield
    reads itself, register it with `override=True`. `config_fields` of the class declares the kinds
    of the family's own fields, which are checked before the class gets them. A subclass of
    `transformers`' PretrainedConfig keeps the contract: `protocols.CheckpointConfig`. A
    `PlainConfig` is data: by it a config.json of a type of `transformers` is read without it.
    """


@hookspec
def register_checkpoint_formats(registry: Registry[type[CheckpointFormat]]) -> None:
    """Checkpoint format: how a configuration and a tokenizer are read that are not in config.json
    and tokenizer.json.

        registry.add("mine", "my_package.format:MyFormat")

    Used by the engine and by each of its front ends at start (`EngineConfig.config_format`,
    `EngineConfig.tokenizer_mode`); `auto` takes the highest priority whose file a folder without
    the usual one has. The weights are a weight loader's. Contract: `protocols.CheckpointFormat`.
    """


@hookspec
def register_options(registry: Registry[type[msgspec.Struct]]) -> None:
    """Options of the plugin: name in `plugin_options` → a `msgspec.Struct`.

        registry.add("my_plugin", "my_package.options:Options")

    Used by the engine when it is created: the options in `EngineConfig.plugin_options` under that
    name (`--plugin-option my_plugin.key=value`) must fit the Struct. Every field has a default. A
    field's meaning is its `Meta` description; `jackfield plugins my_plugin` shows them. The plugin
    gets the Struct through `options_ready`; code with access to the engine or the `Plugins` gets it
    by `plugins.options(Options)`.
    """


@hookspec
def register_attention_backends(registry: Registry[type[AttentionBackend]]) -> None:
    """Attention over the paged KV cache, prefill and decode.

        registry.add("triton", "jackfield.plugins.attention.triton:TritonAttention", priority=20)

    Used by the worker at start; `auto` takes the highest priority that supports the model here and
    logs why. Contract: `protocols.AttentionBackend`, a `protocols.PagedBackend`.

    `registry.refuse(name, reason)` says why there is none of a name that users may know, and which
    to take; so in registries of every kind.
    """


@hookspec
def register_latent_attention_backends(registry: Registry[type[LatentAttentionBackend]]) -> None:
    """Attention of models whose cache has one latent a token in place of keys and values (MLA).

        registry.add("mine", "my_package.latent:MyLatentAttention", priority=25)

    Used by the worker at start, for such models: `EngineConfig.attention_backend` names it, and
    `auto` takes the highest priority that supports the model here. Contract:
    `protocols.LatentAttentionBackend`, a `protocols.PagedBackend`, for layers with a
    `protocols.LatentAttentionSpec`.
    """


@hookspec
def register_operations(registry: Registry[type[Operations]]) -> None:
    """The arithmetic of layers outside attention: norms, products, activations, rotation.

        registry.add("triton", "jackfield.plugins.operations.triton:TritonOperations", priority=20)

    Used by the worker at start; `auto` takes the highest priority that supports the device and
    dtype. Contract: subclass `core.nn.operations.Operations`, the reference, and override the
    operations that you implement faster.
    """


@hookspec
def register_quantization(registry: Registry[type[QuantizationMethod]]) -> None:
    """Quantization method: how a format's layers are stored, loaded and applied.

        registry.add("fp8", "jackfield.plugins.quantization.fp8:Fp8")

    Used by the worker when it builds the model: by `EngineConfig.quantization`, else by the
    checkpoint's `quantization_config.quant_method`. Contract: `protocols.QuantizationMethod`.
    """


@hookspec
def register_reasoning_parsers(registry: Registry[type[ReasoningParser]]) -> None:
    """Reasoning parsers: separate a model's reasoning from its content.

        registry.add("qwen3", "jackfield.plugins.reasoning.think_tags:Qwen3Reasoning")

    Used by the server, one instance per choice, and by the engine, one per request whose grammar
    begins after the reasoning. Contract: `protocols.ReasoningParser`.
    """


@hookspec
def register_tool_parsers(registry: Registry[type[ToolParser]]) -> None:
    """A model family's tool-call dialect.

        registry.add("hermes", "jackfield.plugins.tools.hermes:HermesToolParser")

    Used by the server, one instance per choice. Contract: `protocols.ToolParser`.
    """


@hookspec
def register_kv_connectors(registry: Registry[type[KVConnector]]) -> None:
    """KV connectors, which load and save KV blocks: disaggregated prefill, offloading, shared
    stores.

        registry.add("my_store", "my_package.store:StoreConnector")

    Used by the engine and by the worker at start (`EngineConfig.kv_transfer_config`), one half in
    each.
    Contract: `protocols.KVConnector`, `protocols.KVConnectorScheduler`,
    `protocols.KVConnectorWorker`, made from a `protocols.KVConnectorSetup` with a
    `protocols.KVLayout`.
    """


@hookspec
def register_kv_compressors(registry: Registry[type[KVCompressor]]) -> None:
    """KV compressors, which choose the tokens that stay in a request's cache.

        registry.add("my_scores", "my_package.scores:MyScores")

    Used by the worker (`EngineConfig.kv_compression`) whenever a request's cache is compacted:
    after its prompt, at intervals, or when blocks run out.
    Contract: `protocols.KVCompressor`.
    """


@hookspec
def register_speculators(registry: Registry[type[Speculator]]) -> None:
    """Speculators, which propose drafts: tokens that one step verifies together.

        registry.add("my_drafts", "my_package.drafts:MyDrafts")

    Used by the worker at start (`EngineConfig.speculative_config`). Contract:
    `protocols.Speculator`, made from a `protocols.SpeculatorSetup`; it gets `protocols.KnownTokens`
    and returns `protocols.Drafts`. One that has weights, or reads states of the model, says so in
    `protocols.SpeculatorNeeds`, from a `protocols.DraftSite`, and gets `protocols.ComputedTokens`
    and `protocols.DraftRows`, too.
    """


@hookspec
def register_parts(registry: Registry[type[StepPart]]) -> None:
    """Capabilities of a step: parts, each with a half in the scheduler and one on the device.

        registry.add("my_part", "my_package.part:MyPart")

    Used by the engine and by each worker at start (`EngineConfig.parts`). Contract:
    `protocols.StepPart`, whose halves are a `SchedulerPart` and a `WorkerPart`.
    """


@hookspec
def register_media_models(registry: Registry[type[MediaModel]]) -> None:
    """Architecture name of a multimodal checkpoint → how its pictures are processed and encoded.

        registry.add("LlavaForConditionalGeneration", "my_package.llava:Llava")

    Used by the engine, its front ends and each worker at start, for a checkpoint whose text part is
    served (`registry.add_text_part` of `register_models`). The name "*" is asked where no other
    fits: its `refusal` says why it cannot serve a checkpoint's pictures.
    Contract: `protocols.MediaModel`.
    """


@hookspec
def register_adapter_formats(registry: Registry[type[AdapterFormat]]) -> None:
    """Forms in which adapters (LoRA) are stored.

        registry.add("mine", "my_package.adapters:MyFormat")

    Used by the engine for each adapter that is loaded, with `EngineConfig.enable_lora`: of those
    that say that one of their form `is_at` a path, the highest priority is taken. The worker reads
    it. Contract: `protocols.AdapterFormat`, which returns an `AdapterFile`.
    """


@hookspec
def register_adapter_resolvers(registry: Registry[type[AdapterResolver]]) -> None:
    """Resolvers, which find adapters (LoRA) by names that are not loaded.

        registry.add("my_store", "my_package.store:MyResolver")

    Used by the engine with `EngineConfig.enable_lora`, when a request names an adapter that is not
    loaded: all of them, by priority, until one finds it. Contract: `protocols.AdapterResolver`.
    """


@hookspec
def register_structured_backends(registry: Registry[type[GrammarBackend]]) -> None:
    """Grammar → token bitmask.

        registry.add("xgrammar", "my_package.xgrammar:XGrammar", priority=10)

    Used by the engine for requests with `SamplingParams.structured_outputs`
    (`StructuredOutputsConfig.backend`); `auto` takes, for each grammar, the highest priority that
    supports it. Contract: `protocols.GrammarBackend`.
    """


@hookspec
def register_logits_processors(registry: Registry[type[LogitsProcessor]]) -> None:
    """Logits processors, which change logits before sampling.

        registry.add("my_processor", "my_package.processor:Processor")

    Used by the worker (`EngineConfig.logits_processors`; all of them by default), for requests that
    set its `SamplingParams.extra_args`. Contract: `protocols.LogitsProcessor`, made from a
    `protocols.LogitsProcessorSetup`, given `protocols.ProcessedRows`.
    """


@hookspec
def register_weight_loaders(registry: Registry[type[WeightLoader]]) -> None:
    """Load format → loader.

        registry.add("dummy", "jackfield.plugins.loaders.dummy:DummyLoader")

    Used by the worker at start (`EngineConfig.load_format`). Contract: `protocols.WeightLoader`.
    """


@hookspec
def register_executors(registry: Registry[type[Executor]]) -> None:
    """Executors, which run the worker's ranks.

        registry.add("inprocess", "jackfield.plugins.executors.inprocess:InProcessExecutor",
                     priority=20, aliases=("uni",))

    Used by the engine at start (`EngineConfig.executor`); `auto` takes the highest priority that
    runs as many ranks. Contract: `protocols.Executor`.
    """


@hookspec
def register_collectives(registry: Registry[type[Collectives]]) -> None:
    """Collectives, by which the ranks of an engine exchange tensors.

        registry.add("nccl", "jackfield.plugins.collectives.builtin:Nccl", priority=10)

    Used by executors with several ranks at start (`EngineConfig.collectives`); `auto` takes the
    highest priority that supports the device. Contract: `protocols.Collectives`, made from a
    `protocols.CollectivesSetup`.
    """


@hookspec
def register_all2all_backends(registry: Registry[type[All2All]]) -> None:
    """All-to-all backends, by which tokens come to the ranks that hold their experts.

        registry.add("all_to_all", "jackfield.plugins.collectives.all_to_all:AllToAll")

    Used by executors with several ranks at start, with `EngineConfig.enable_expert_parallel`, where
    `EngineConfig.all2all_backend` names one; called by layers with experts in each step. Contract:
    `protocols.All2All`, made from a `protocols.All2AllSetup`.
    """


@hookspec
def register_schedule_policies(registry: Registry[type[SchedulePolicy]]) -> None:
    """Schedule policies, which order requests and choose which one is preempted.

        registry.add("priority", "jackfield.plugins.policies.builtin:Priority")

    Used by the engine at start (`EngineConfig.scheduling_policy`).
    Contract: `protocols.SchedulePolicy`.
    """


@hookspec
def register_routes(app: Any, engine: Any) -> None:
    """Add HTTP routes and middlewares to the `aiohttp.web.Application`, before the server starts.

        app.router.add_get("/hello", hello)
        app.middlewares.append(count_requests)

    Called by the server when it builds its application, after its own routes are in: in each of its
    front ends, if there are several. The engine has started. A new route asks for the API key like
    the others. The OpenAPI document lists it by its docstring; a handler's attribute `openapi`, an
    operation as OpenAPI 3.1 writes it in which a Struct may stand for a schema, gives more detail,
    and None leaves it out.

    A route that is hidden by a route of Jackfield or of another plugin is refused, unless its
    handler has an attribute `override = True`: then it replaces that route. If the hook is refused
    or raises, none of its routes and middlewares are added. A middleware sees requests that have a
    key, after Jackfield's own; see [middlewares](../how-to/write-a-server-plugin.md#middlewares).
    """


@hookspec
def register_commands(commands: Registry[Any]) -> None:
    """Command-line commands: name → `module:function` taking (argv: list[str]) → exit status.

        commands.add("hello", "my_package.cli:hello", help="Say hello")

    Used by the `jackfield` command, whose own commands cannot be replaced; `jackfield --help` shows
    the help. An error of `core.errors` is printed without a traceback.
    """


@hookspec
def register_metrics(registry: CollectorRegistry, engine: Any) -> None:
    """Metrics of the plugin, for `GET /metrics`.

        started = prometheus_client.Counter("my_things", "Things.", registry=registry)

    Called by the engine before it is ready, and by each of its front ends, with a
    `prometheus_client.CollectorRegistry` of this plugin alone. The values of several processes are
    added up, series by series, so count each event in the process where it happens. A metric whose
    name is taken is left out; if a collector raises, only its plugin's metrics are left out.
    """


# ---------------------------------------------------------------- requests


@hookspec
def authenticate(request: RequestHead) -> Tenant | None:
    """Return the tenant of a request, by its headers. May be async.

        async def authenticate(request):
            account = await accounts.find(request.key)
            return account and Tenant(account.name, owner=account.id)

    Called by the server before the body is read, for every route but the open ones, if the server's
    own keys (`--api-key`, `--api-key-file`: the first implementation) do not know the request: in
    the order in which plugins were loaded, until one returns a `Tenant`. If none does, the request
    gets a 401; so installing such a plugin makes a server without keys require authentication.
    Raise `core.errors.AuthenticationFailed`, or another error of that family, to refuse at once.
    Any other exception denies access: that request gets a 500, which names the plugin. Contract:
    `tenancy.RequestHead`, `tenancy.Tenant`, `tenancy.TenantLimits`.
    """


@hookspec
def request_received(request: ReceivedRequest) -> None:
    """Refuse or change a decoded request before it is checked. May be async.

        def request_received(request):
            if request.route == "/v1/chat/completions":
                request.body.setdefault("max_tokens", 500)

    Called by the server for every route that takes JSON: chat, completions, responses, embeddings,
    pooling, scores, tokens, batches and the lines of each batch; with several front ends, in the
    one that serves the request. Refuse by raising an error of `core.errors`: `InvalidRequest`
    (400), `RateLimited` (429). On any other exception that request gets a 500, which names the
    plugin. If no plugin implements the hook, it costs nothing. Contract: `tenancy.ReceivedRequest`.
    """


# ---------------------------------------------------------------- events


@hookspec
def options_ready(options: Any) -> object:
    """Receive the plugin's own options, an instance of its schema (`register_options`) with
    defaults filled in. May return an object with event hooks, `register_routes` and
    `register_metrics`, which is plugged in, too: what is on with these options only costs nothing
    without them.

    Called by the engine when it is created, for each plugin that registered options, before
    anything of the plugin but its registration is used. A ConfigError raised here stops the start.
    """


@hookspec
def engine_started(engine: Any) -> None:
    """Called after an engine is ready, before its first request. May be async.

    Called by `AsyncEngine.start`, which waits for it; of several processes of one server, in the
    engine's.
    """


@hookspec
def engine_stopping(engine: Any) -> None:
    """Called before an engine stops its worker. May be async.

    Called by `AsyncEngine.stop`, after running requests were aborted; it waits for it.
    """


@hookspec
def request_finished(
    output: RequestOutput | PoolingRequestOutput, params: SamplingParams | PoolingParams
) -> None:
    """Called after a request's last output was published. Read-only. May be async.

    Called by the engine, in a task of its own: the stream does not wait for it. The task runs in
    the caller's context (`contextvars`), as it was when the request was added. The output is
    cumulative, whatever `output_kind` the caller chose. A pooling engine passes pooling outputs, of
    requests that neither failed nor were aborted. With several front ends (`jackfield serve
    --api-server-count`), called in the one that serves the request.
    """


@hookspec
def step_finished(plan: StepPlan, result: StepResult) -> None:
    """Called after a step's result was applied. Read-only. Runs on the event loop, so it must be
    quick.

    Called by the engine, in a task of its own. May be async.
    """


@hookspec
def kv_cache_started(cache: KVCacheInfo) -> None:
    """Called when an engine has its KV cache, before its first request; with
    `data_parallel_size`, in the process of each engine. An error that it raises stops the start.

        def kv_cache_started(cache):
            self.index = Index(cache.block_size)

    Called by the engine, on its event loop; not async.
    """


@hookspec
def kv_cache_changed(events: Sequence[CacheEvent]) -> None:
    """Called with what has changed in the set of blocks that prefix hits find, in order, after each
    step that has changed it. A block is found once the step that computes it is planned. Read-only.
    Runs on the event loop, so it must be quick; not async.

        def kv_cache_changed(events):
            for event in events:
                self.index.apply(event)  # BlockStored, BlockRemoved or AllBlocksCleared

    Called by the engine, with prefix caching. If no plugin implements the hook, nothing is
    collected. Contract: `core.cache.events`.
    """
