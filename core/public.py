"""The public API: the modules and names that code outside Jackfield may import.

They keep their names and meaning. A change that requires plugins to change raises
`hook_versions.API_VERSION`; an addition (an argument with a default, an optional method) does not.
Everything else is internal, whatever its name, and may move or be removed in any version.
docs/reference/public-api.md is written from here, and a test holds the packages outside the tree,
the skeletons and the documentation to it.
"""

from __future__ import annotations

PUBLIC: dict[str, dict[str, tuple[str, ...]]] = {
    "Use an engine": {
        "jackfield": (
            "AsyncEngine", "BeamSearchParams", "EngineConfig", "LLM", "LoRARequest", "OutputKind",
            "PoolingParams", "PoolingRequestOutput", "RequestOutput", "SamplingParams",
            "StructuredOutputsParams", "hookimpl",
        ),
        "jackfield.core.engine.input_session": ("StreamingInput",),
        "jackfield.core.lora_request": ("AdapterCard", "AdapterRef", "LoadAdapter"),
        "jackfield.lora.request": ("LoRARequest",),
        "jackfield.core.config": ("KVTransferConfig", "StructuredOutputsConfig"),
        "jackfield.core.errors": (
            "AuthenticationFailed", "ConfigError", "Conflict", "ContextLengthExceeded",
            "EngineOverloaded", "EnginePaused", "EngineStopped", "Forbidden", "InvalidRequest",
            "JackfieldError", "LoadError", "OutOfMemory", "PluginError", "RateLimited",
            "RequestFailed",
        ),
        "jackfield.core.metrics.reader": ("Counter", "Gauge", "Histogram"),
        "jackfield.core.outputs": (
            "CompletionOutput", "DraftUsage", "KVCompressionUsage", "RequestTimings", "WeightSpan",
        ),
        "jackfield.core.live.weight_update": ("WeightUpdate",),
        "jackfield.core.live.worker_jobs": ("TensorPart",),
        "jackfield.core.live.engine_jobs": (
            "AskLive", "JoinGroup", "LeaveGroup", "NameWeights",
        ),
        "jackfield.core.parallel.broadcast": ("BroadcastGroup",),
        "jackfield.core.pooling_params": ("PooledRow", "PoolingOutput"),
        "jackfield.entrypoints.beam_search": ("BeamSearchOutput", "BeamSearchSequence"),
        "jackfield.entrypoints.openai.server": ("Listen", "listening"),
        "jackfield.entrypoints.cli.main": ("main",),
    },
    "Write a plugin": {
        "jackfield.core.registry": ("ParserMarks", "Plugins", "Registry", "load_plugins"),
        "jackfield.core.protocols": (
            "AdapterFormat", "AdapterResolver", "All2All", "All2AllSetup", "ArgumentForm",
            "AttentionBackend", "AttentionSpec", "AudioProcessor", "BackendSetup", "CallForm",
            "CallText", "CheckpointConfig", "CheckpointFormat", "ChosenTokens", "Collectives",
            "CollectivesSetup", "ComputedTokens", "Content", "Dispatched", "DraftRows", "DraftSite",
            "Drafts", "EngineHosts", "EngineProcess", "Executor", "ExecutorInfo", "Grammar",
            "GrammarBackend", "GrammarMatcher", "GrammarSpec", "ImageProcessor", "KVCompressor",
            "KVConnector", "KVConnectorScheduler", "KVConnectorSetup", "KVConnectorWorker",
            "KVLayout", "KnownTokens", "LatentAttentionBackend", "LatentAttentionSpec", "LayerSpec",
            "LogitsProcessor", "LogitsProcessorSetup", "MediaEncoder", "MediaModel",
            "MediaProcessor", "MediaSetup", "Model", "PagedBackend", "ParserEvent", "PartSetup",
            "PlainConfig",
            "PlainText", "PoolingModel", "ProcessedMedia", "ProcessedRows", "ProjectedLayer",
            "Projection", "QuantizationMethod", "RankState", "Reasoning", "ReasoningParser",
            "RequestText", "RopeSections", "SchedulePolicy", "Spans", "SpeechChat", "Speculator",
            "SpeculatorNeeds", "SpeculatorSetup", "StepPart", "ToolCallArguments", "ToolCallEnd",
            "ToolCallStart", "ToolParser", "Vocabulary", "WeightLoader",
        ),
        "jackfield.core.tenancy": ("ReceivedRequest", "RequestHead", "Tenant", "TenantLimits"),
        "jackfield.core.types": (
            "AdapterLoad", "AdapterPlan", "AdapterStart",
            "Compaction", "CompactionPlan", "CompiledGrammar", "DraftPlan", "DraftResult",
            "DraftStart", "EncodeItem", "EncodePlan", "GrammarStart", "InProcess", "KVDetached",
            "KVReport", "ModelFingerprint", "PartPlan", "Ping", "PrepareAhead", "ReasoningGate",
            "Recover", "Rejection", "SlotStart", "StateCopy", "StatePlan", "StepPlan", "StepResult",
            "TableWrite", "TokenLogprobs", "TransferPlan", "TransferResult",
        ),
        "jackfield.core.request": ("Request",),
        "jackfield.core.adapters.file": (
            "AdapterFile", "ExpertsLowRank", "LowRank", "TokenRows",
        ),
        "jackfield.core.cache.events": (
            "AllBlocksCleared", "BlockRemoved", "BlockStored", "KVCacheInfo",
        ),
        "jackfield.core.cache.groups": ("CacheGroup", "CachePart"),
        "jackfield.core.cache.level_options": ("LevelFormat",),
        "jackfield.core.cache.reach": ("Reach",),
        "jackfield.core.parallel.ranks": (
            "Group", "LinkedGroup", "Pipeline", "Product", "Ranks", "Transfer",
        ),
        "jackfield.core.parallel.expert_share": ("ExpertShare",),
        "jackfield.core.parallel.round": ("Round",),
        "jackfield.core.loading.state.record": ("StateRecord",),
        "jackfield.core.text.tokenizer": ("Tokenizer",),
        "jackfield.core.scheduling.parts.part": (
            "PartServices", "Readiness", "SchedulerPart",
        ),
        "jackfield.core.worker.parts.part": (
            "PartNeeds", "PartSite", "PartStart", "Route", "StartContext", "WorkerPart",
        ),
        "jackfield.core.text.parsing": ("OutputParser", "ParsedMessage", "ParsedToolCall", "fold"),
    },
    "Build a model": {
        "jackfield.core.loading.model_config": ("ModelConfig",),
        "jackfield.core.protocols.field_kinds": (
            "COUNT", "FLAG", "FieldKind", "INTEGER", "INTEGERS", "INTEGER_OR_INTEGERS", "NUMBER",
            "NUMBERS", "NUMBERS_OR_NULLS", "OBJECT", "POSITIVE", "POSITIVE_OR_LIST", "SIZE",
            "SIZE_OR_SIZES", "SIZE_OR_ZERO", "TEXT", "TEXTS",
        ),
        "jackfield.core.loading.weight_map": (
            "ParameterFiller", "RowOrder", "Shard", "StackedExperts", "WeightMap",
        ),
        "jackfield.core.nn.attention": ("Attention",),
        "jackfield.core.nn.context": (
            "BatchLayout", "BuildContext", "CacheLevels", "ForwardContext", "GroupContext",
            "MixedRows", "QueryPlaces", "SourceContext", "Taps",
        ),
        "jackfield.core.nn.embedding": ("Embedding",),
        "jackfield.core.nn.input_embeds": ("InputEmbedsContext",),
        "jackfield.core.nn.spans": ("Span",),
        "jackfield.core.parts.media": ("PlacedItem",),
        "jackfield.core.parts.routed_experts": ("RoutedShape",),
        "jackfield.core.nn.encoder": ("BidirectionalAttention",),
        "jackfield.core.nn.experts": ("SparseMLP",),
        "jackfield.core.nn.latent.layer": ("LatentAttention",),
        "jackfield.core.nn.linear": ("GatedLinear", "Linear", "MergedLinear"),
        "jackfield.core.nn.mlp": ("GatedMLP", "PlainMLP"),
        "jackfield.core.nn.norm": (
            "BiaslessLayerNorm", "LayerNorm", "OffsetRMSNorm", "RMSNorm", "norm_eps",
        ),
        "jackfield.core.nn.operations": (
            "CenteredNorm", "HeadLayout", "Norm", "NormSums", "Operations", "PositionRows",
            "Precompiler",
        ),
        "jackfield.core.nn.ragged": ("RaggedRows",),
        "jackfield.core.nn.rotary": ("Rotary",),
        "jackfield.core.nn.routing": ("Routing", "RoutingRule"),
        "jackfield.core.nn.state.layer": ("StateLayer",),
        "jackfield.core.nn.state.operations": (
            "ChannelDeltaWeights", "ConvWeights", "DeltaWeights", "GatedNorm", "Mamba2Factors",
            "ScanWeights",
        ),
        "jackfield.core.nn.state.rows": ("StateRows",),
        "jackfield.core.nn.state.sizes": ("DeltaSizes", "Mamba2Sizes"),
        "jackfield.core.nn.latent.operations": ("LatentTokens",),
        "jackfield.core.nn.step_operations.adapters": (
            "AdapterChunks", "AdapterTables", "SiteWeights",
        ),
        "jackfield.core.nn.step_operations.compaction": ("CacheMoves", "LevelCopy"),
        "jackfield.core.nn.step_operations.drafts": ("DraftTables",),
        "jackfield.core.nn.step_operations.inputs": ("DecodeTensors", "StepTensors"),
        "jackfield.core.nn.step_operations.sampling": (
            "GrammarBits", "SampleOutputs", "SlotTables",
        ),
        "jackfield.plugins.models.decoder": (
            "QKV_SHARDS", "Block", "BlockParts", "CausalLM", "Decoder", "DecoderClassifier",
            "HeadlessLM", "NormedBlock", "ParallelBlock", "SelfAttention",
        ),
        "jackfield.plugins.attention.torch": ("TorchAttention",),
        "jackfield.plugins.attention.torch_latent": ("TorchLatentAttention",),
        "jackfield.plugins.collectives.all_to_all": ("AllToAll",),
        "jackfield.plugins.collectives.builtin": ("Gloo",),
        "jackfield.plugins.executors.inprocess": ("InProcessExecutor",),
        "jackfield.plugins.grammar_backends.llguidance": ("LLGuidance",),
    },
    "Store weights in another form": {
        "jackfield.core.loading.quantization_config": ("ConfigReader", "is_ignored"),
        "jackfield.core.nn.quantized": (
            "PRODUCTS", "LinearSpec", "QuantizedLinear", "QuantizedWeightLinear", "TensorSpec",
        ),
        "jackfield.core.nn.quantized_weight": ("QuantizedWeight",),
    },
    "Move KV blocks": {
        "jackfield.plugins.kv_connectors.options": ("read_options",),
        "jackfield.plugins.kv_connectors.store": ("StoreConnector",),
    },
    "Parse outputs": {
        "jackfield.plugins.parsing.cursor": ("SPACES", "Marks", "Read"),
        "jackfield.plugins.parsing.json_calls": ("JsonCallsParser", "peek_after_space"),
        "jackfield.plugins.parsing.tagged_reasoning": ("TaggedReasoningParser",),
        "jackfield.plugins.parsing.tool_machine": ("ToolMachine",),
    },
    "Test a plugin": {
        "jackfield.plugins.conformance.adapters": ("AdapterFormatKit", "AdapterResolverKit"),
        "jackfield.plugins.conformance.all2all": ("All2AllKit",),
        "jackfield.plugins.conformance.attention": ("AttentionBackendKit",),
        "jackfield.plugins.conformance.checkpoint_formats": ("CheckpointFormatKit",),
        "jackfield.plugins.conformance.collectives": ("CollectivesKit",),
        "jackfield.plugins.conformance.executors": ("ExecutorKit",),
        "jackfield.plugins.conformance.grammars": ("GrammarBackendKit",),
        "jackfield.plugins.conformance.kit": ("Kit",),
        "jackfield.plugins.conformance.kv_compressors": ("KVCompressorKit",),
        "jackfield.plugins.conformance.kv_connectors": ("KVConnectorKit",),
        "jackfield.plugins.conformance.kv_halves": ("Halves", "random_cache"),
        "jackfield.plugins.conformance.latent_attention": ("LatentAttentionBackendKit",),
        "jackfield.plugins.conformance.loaders": ("WeightLoaderKit",),
        "jackfield.plugins.conformance.logits_processors": ("LogitsProcessorKit",),
        "jackfield.plugins.conformance.metrics": ("MetricsKit",),
        "jackfield.plugins.conformance.models": ("ModelKit",),
        "jackfield.plugins.conformance.operations": ("OperationsKit",),
        "jackfield.plugins.conformance.parsers": (
            "ReasoningParserKit", "Sample", "ToolParserKit", "tool",
        ),
        "jackfield.plugins.conformance.parts": ("PartKit",),
        "jackfield.plugins.conformance.policies": ("SchedulePolicyKit",),
        "jackfield.plugins.conformance.pooling_models": ("PoolingModelKit",),
        "jackfield.plugins.conformance.quantization": ("QuantizationKit",),
        "jackfield.plugins.conformance.speculators": ("LikeliestRows", "SpeculatorKit",),
        "jackfield.plugins.conformance.tenants": ("TenantKit",),
    },
}  # fmt: skip
"""Topic → module → names."""
