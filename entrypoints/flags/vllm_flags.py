"""vLLM's flags that are unnecessary (accepted and reported), unsupported (refused with an
alternative), or here under another name. docs/reference/vllm-options.md is made from them.

Names and meanings are those of vLLM 0.33.0, and of earlier versions where scripts still have them.
"""

from __future__ import annotations

from . import vllm_values as values
from .foreign_options import ANY, Option
from .vllm_values import chosen, fixed, part_of, renamed, synonyms

_STEPS = "two steps are always in flight"
_LOADS = "loading shows a bar on terminals"
_ALLOCATOR = "memory comes from torch's allocator"
_COHERE = "Cohere's own routes and templates are not served; the checkpoint's template is used"
_GRAPHS = "a graph is recorded for a number of rows when it is needed"
_HEADERS = "headers are bounded already; docs/reference/limits.md has the numbers"
_KERNELS = "the kernels that are here are chosen by shape and device; see --operations"
_MODEL_OWN = "it is for a model that has no such form here"
_NO_SUPERVISOR = "no process supervises servers of one port each"
_MEDIA_ROWS = "what an encoder gave is kept for requests that share the picture"
_PIXELS = "pixels travel with the plan that encodes them"
_PROCESSED = "pictures are processed on the CPU, as the checkpoint's processor says"
_READS = "files are mapped, and read in the order in which they lie on disk"
_STATES = "states and windows are kept at the blocks that prefix caching needs"
_TUNED = "kernels are tuned by `jackfield bench tune`, not at a start"
_WARMED = "kernels are compiled before the server is ready"
NO_EFFECT: dict[str, tuple[int | str, str]] = {
    "--async-scheduling": (0, _STEPS),
    "--no-async-scheduling": (0, _STEPS),
    "--code-revision": (1, "a checkpoint's code is never run"),
    "--collect-detailed-traces": (1, "a trace always has a span for each phase of a request"),
    "--max-seq-len-to-capture": (1, "graphs hold sequences of any length"),
    "--cuda-graph-sizes": ("+", "a graph is recorded for a number of rows when it is needed"),
    "--disable-custom-all-reduce": (0, "collectives are chosen by --collectives"),
    "--disable-frontend-multiprocessing": (0, "engine and worker share a process"),
    "--enable-ep-weight-filter": (0, "a rank reads its own experts alone"),
    "--enable-prompt-tokens-details": (0, "usage always has them"),
    "--enable-reasoning": (0, "--reasoning-parser is enough"),
    "--enable-server-load-tracking": (0, "/load always counts"),
    "--enable-lora-bias": (0, "biases of adapters are served"),
    "--enable-mixed-moe-lora-format": (0, "an adapter's files tell the form of its experts"),
    "--fully-sharded-loras": (0, "each rank keeps what its part of the layers needs"),
    "--lora-extra-vocab-size": (1, "an adapter that adds tokens is refused by name"),
    "--prefix-caching-hash-algo": (1, "blocks are always found by a hash that cannot be forged"),
    "--weight-transfer-config": (
        1,
        "see POST /init_weight_transfer_engine",
    ),
    "--specialize-active-lora": (0, "kernels do the work of the adapters that a step has"),
    "--swap-space": (1, "preempted requests are computed again"),
    "--use-tqdm-on-load": (0, _LOADS),
    "--no-use-tqdm-on-load": (0, _LOADS),
    "--additional-config": (1, "it is for plugins of vLLM; see --plugin-option"),
    "--aggregate-engine-logging": (0, "a line of statistics is about all engines"),
    "--allow-deprecated-quantization": (0, "no method of quantization is deprecated"),
    "--cohere-format": (1, _COHERE),
    "--cohere-is-reasoning-model": (0, _COHERE),
    "--cpu-distributed-timeout-seconds": (1, "see --distributed-timeout-seconds"),
    "--cudagraph-capture-sizes": ("+", _GRAPHS),
    "--cudagraph-metrics": (0, _GRAPHS),
    "--data-parallel-supervisor-port": (1, _NO_SUPERVISOR),
    "--disable-async-output-proc": (0, _STEPS),
    "--disable-cascade-attn": (0, "requests read what they share once where that is faster"),
    "--disable-chunked-mm-input": (0, _MEDIA_ROWS),
    "--disable-hybrid-kv-cache-manager": (0, "layers with windows need no cache of their own"),
    "--disable-nccl-for-dp-synchronization": (0, "engines take no steps for each other's sake"),
    "--dp-supervisor-probe-failure-threshold": (1, _NO_SUPERVISOR),
    "--dp-supervisor-probe-interval-s": (1, _NO_SUPERVISOR),
    "--dp-supervisor-probe-timeout-s": (1, _NO_SUPERVISOR),
    "--dp-sync-interval": (1, "engines take no steps for each other's sake"),
    "--enable-batch-sharded-sampling": (0, "each rank samples what it needs to"),
    "--enable-cumem-allocator": (0, _ALLOCATOR),
    "--enable-flash-late-interaction": (0, "late interaction is computed by the same operations"),
    "--enable-flashinfer-autotune": (0, _TUNED),
    "--enable-hc-sp": (0, _MODEL_OWN),
    "--enable-log-deltas": (0, "outputs are not logged"),
    "--enable-logging-iteration-details": (0, "GET /metrics tells what steps hold"),
    "--enable-offline-docs": (0, "/docs needs no other site"),
    "--enable-shm-tensor-arena": (0, "plans travel to ranks through shared memory where they can"),
    "--fail-on-environ-validation": (0, "an unknown variable has no effect, and the log says so"),
    "--gdn-prefill-backend": (1, _KERNELS),
    "--h11-max-header-count": (1, _HEADERS),
    "--h11-max-incomplete-event-size": (1, _HEADERS),
    "--ignore-patterns": ("+", "only the files that a checkpoint needs are downloaded"),
    "--ir-op-priority": (1, _KERNELS),
    "--jit-monitor-mode": (1, _WARMED),
    "--jit-monitor-verbose": (0, _WARMED),
    "--kda-decode-backend": (1, _KERNELS),
    "--kda-prefill-backend": (1, _KERNELS),
    "--kernel-config": (1, _KERNELS),
    "--linear-backend": (1, _KERNELS),
    "--log-config-file": (1, "the log goes to standard error; see --log-level and --access-log"),
    "--log-error-stack": (0, "the log has the stack of an error that is the server's own"),
    "--mamba-backend": (1, _KERNELS),
    "--mamba-ssu-algorithm": (1, _KERNELS),
    "--mamba-block-size": (1, _STATES),
    "--max-cudagraph-capture-size": (1, _GRAPHS),
    "--max-parallel-loading-workers": (1, "each rank reads its own part, file by file"),
    "--moe-backend": (1, _KERNELS),
    "--monokernel": (0, _KERNELS),
    "--mm-device-do-normalize": (0, _PROCESSED),
    "--mm-encoder-attn-backend": (1, _KERNELS),
    "--mm-encoder-attn-dtype": (1, "encoders compute in the type of --dtype"),
    "--mm-encoder-tp-mode": (1, "each rank has the whole encoder"),
    "--mm-hasher-algorithm": (1, "media are always found by a hash that cannot be forged"),
    "--mm-ipc-gpu-memory-gb": (1, _PIXELS),
    "--mm-processor-cache-gb": (1, _MEDIA_ROWS),
    "--mm-processor-cache-type": (1, _MEDIA_ROWS),
    "--mm-processor-device": (1, _PROCESSED),
    "--mm-shm-cache-max-object-size-mb": (1, _MEDIA_ROWS),
    "--mm-tensor-ipc": (1, _PIXELS),
    "--num-lookahead-slots": (1, "drafts get blocks when they come"),
    "--num-scheduler-steps": (1, _STEPS),
    "--multi-step-stream-outputs": (0, _STEPS),
    "--performance-mode": (1, "no kernel is chosen by it; see --max-num-batched-tokens"),
    "--prefix-cache-retention-interval": (1, _STATES),
    "--prefix-match-unit": (1, "a match is as long as the blocks that are the same"),
    "--preemption-mode": (1, "preempted requests are computed again"),
    "--pt-load-map-location": (1, "tensors are read to host memory, and copied from there"),
    "--ray-workers-use-nsight": (0, "start the profiler around the server"),
    "--renderer-num-workers": (1, "texts are tokenized on threads of their own"),
    "--replayssm-buffer-len": (1, _STATES),
    "--safetensors-load-strategy": (1, _READS),
    "--safetensors-prefetch-block-size": (1, _READS),
    "--safetensors-prefetch-num-threads": (1, _READS),
    "--scheduler-delay-factor": (1, "a request starts in the next step that has room for it"),
    "--scheduler-reserve-full-isl": (0, "a prompt starts when its blocks fit"),
    "--show-hidden-metrics-for-version": (1, "no metric is hidden; see --metrics-prefix"),
    "--skip-mm-profiling": (0, "no step is taken to measure encoders"),
    "--sparse-indexer-topk-backend": (1, _KERNELS),
    "--swa-bounded-replay": (0, _STATES),
    "--trust-request-mm-kwargs": (0, "requests may send mm_processor_kwargs"),
    "--tokenizer-pool-size": (1, "texts are tokenized on threads of their own"),
    "--enable-mamba-shared-prefix-checkpoint": (0, _STATES),
    "--use-replayssm": (0, _STATES),
    "--worker-use-ray": (0, "see --executor ray"),
    "--watermark": (1, "a preempted request is computed again when there is room"),
}
"""Flag → number of values, and why it is unnecessary."""

_PICTURES = "no such option of media: see --limit-mm-per-prompt and --media-io-kwargs"
_ONE_HOST = (
    "the engines of --data-parallel-size are those of one server, on its host or where a Ray "
    "cluster has room (--executor ray)"
)
_MERGED = "tokens of a cache are merged by --kv-compression snap_kv_merge_fast"
_AUXILIARY = "responses hold texts, token ids and log-probabilities; a part of a plugin adds more"
_FIXED_RANKS = "ranks are fixed at the start; a rank that fails ends its engine"
_KWARGS = "see --default-chat-template-kwargs, and chat_template_kwargs of a request"
_NUMA = "start the server with numactl"
MISSING: dict[str, str] = {
    **dict.fromkeys(
        ("--default-mm-loras", "--enable-tower-connector-lora"), _PICTURES,
    ),
    "--enable-moe-shared-loras": "experts of an adapter have matrices of their own",
    "--long-lora-scaling-factors": "adapters do not lengthen the context",
    "--max-lora-cls-labels": "an adapter's classifier has as many labels as the model's",
    **dict.fromkeys(
        ("--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr",
         "--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa",
         "--data-parallel-rpc-port", "-dpp", "--data-parallel-hybrid-lb"), _ONE_HOST,
    ),
    "--expert-placement-strategy": "ranks hold neighbours; --enable-eplb moves experts by load",
    "--cpu-offload-gb": "weights stay on the device; see --quantization, --tensor-parallel-size",
    "--middleware": "a plugin adds routes and middleware: register_routes",
    "--scheduler-cls": "see --scheduling-policy, which takes a plugin's",
    "--anthropic-disabled-thinking-effort": _KWARGS,
    "--aux-output-config": _AUXILIARY,
    "--custom-histogram-buckets": "buckets are fixed; docs/reference/metrics.md has them",
    **dict.fromkeys(
        ("--cp-kv-cache-interleave-size", "--dcp-comm-backend", "--dcp-kv-cache-interleave-size",
         "--dcp-q-replicate", "--decode-context-parallel-size", "-dcp",
         "--prefill-context-parallel-size", "-pcp"),
        "a context is not divided among ranks; see --tensor-parallel-size",
    ),
    "--cpu-offload-params": "weights stay on the device; see --quantization",
    "--data-parallel-external-lb": _ONE_HOST,
    "-dpe": _ONE_HOST,
    "-dph": _ONE_HOST,
    "--data-parallel-multi-port-external-lb": _ONE_HOST,
    "-dpm": _ONE_HOST,
    **dict.fromkeys(
        ("--dbo-decode-token-threshold", "--dbo-prefill-token-threshold", "--enable-dbo",
         "--ubatch-size"), "a step is one batch; two steps are always in flight",
    ),
    "--diffusion-config": "models that denoise texts are not supported yet",
    "-dc": "models that denoise texts are not supported yet",
    "--ec-manager-config": _PICTURES,
    "--ec-transfer-config": _PICTURES,
    "--elastic-ep-max-dp-size": _FIXED_RANKS,
    "--enable-elastic-ep": _FIXED_RANKS,
    "--enable-fault-tolerance": _FIXED_RANKS,
    "--fault-tolerance-config": _FIXED_RANKS,
    "--enable-kv-cache-compression": "see --kv-compression",
    "--enable-kv-cache-compression-advanced": "see --kv-compression",
    "--kv-compression-cosine-threshold": _MERGED,
    "--kv-compression-max-merge-ratio": _MERGED,
    "--kv-compression-importance-threshold": "see --kv-compression weighted",
    "--kv-compression-outlier-threshold": "see --kv-compression weighted",
    "--kv-compression-memory-pressure-threshold": "see --kv-compression-threshold",
    "--kv-compression-temporal-window": "see the ages of --kv-compression-levels",
    "--enable-mamba-cache-stochastic-rounding": "states are rounded to the nearest value",
    "--mamba-cache-philox-rounds": "states are rounded to the nearest value",
    "--enable-mfu-metrics": "see `jackfield bench`, which compares with the device's bounds",
    "--enable-nccl-comm-suspend": "connections between ranks last while an engine sleeps",
    "--enable-per-request-metrics": "responses have no metrics; GET /metrics has them in all",
    "--enable-scale-out": "prompts are rendered and computed by one server",
    "--enable-trace-replay": "see --record-steps and `jackfield debug replay`",
    "--engram-config": "no model with such a memory is supported yet",
    "--fingerprint-mode": "responses have no system_fingerprint",
    "--fingerprint-value": "responses have no system_fingerprint",
    "--grpc": "the server speaks HTTP",
    "--grpc-port": "the server speaks HTTP",
    "--hf-config-path": "put config.json into the checkpoint's folder; see --hf-overrides",
    "--interleave-mm-strings": _PICTURES,
    "--io-processor-plugin": "a plugin adds routes: register_routes",
    "--kv-cache-metrics": "single blocks are not followed; GET /metrics has the cache's use",
    "--kv-cache-metrics-sample": "single blocks are not followed; GET /metrics has the cache's use",
    "--kv-sharing-fast-prefill": "every layer computes the whole prompt",
    "--long-prefill-token-threshold-adaptive": "see --long-prefill-token-threshold",
    "--max-long-partial-prefills": "see --long-prefill-token-threshold",
    "--max-num-partial-prefills": "see --long-prefill-token-threshold",
    "--max-num-active-seqs": "see --max-num-seqs",
    "--max-num-queued-tokens": "see --limit-waiting and --max-waiting-requests",
    "--max-num-scheduled-tokens": "see --max-num-batched-tokens",
    **dict.fromkeys(
        ("--mm-encoder-fp8-scale-path", "--mm-encoder-fp8-scale-save-margin",
         "--mm-encoder-fp8-scale-save-path", "--mm-encoder-only", "--video-pruning-method",
         "--video-pruning-rate"), _PICTURES,
    ),
    "--model-class-overrides": "a plugin registers a model for an architecture: register_models",
    "--numa-bind": _NUMA,
    "--numa-bind-cpus": _NUMA,
    "--numa-bind-nodes": _NUMA,
    **dict.fromkeys(
        ("--offload-backend", "--offload-group-size", "--offload-num-in-group",
         "--offload-params", "--offload-prefetch-step"),
        "weights stay on the device; see --quantization",
    ),
    "--override-attention-dtype": "attention has the type of --dtype; see --kv-cache-dtype",
    "--per-request-spec-decode-metrics": "GET /metrics has what drafts came to, in all",
    "--prefill-schedule-interval": "see --ttft-target-ms and --long-prefill-token-threshold",
    "--quantization-config": "see --quantization, and the checkpoint's own quantization_config",
    "--reasoning-effort-map": _KWARGS,
    "--return-sampling-mask": _AUXILIARY,
    **dict.fromkeys(
        ("--sleep-mode-backend", "--sleep-mode-offload-cudagraph",
         "--sleep-preserve-parameter-names"), "see POST /sleep of --enable-admin",
    ),
    "--tokens-only": "send token ids as prompt; see --skip-tokenizer-init",
    "--tool-server": "leave it out: tools run at the client, which the model calls as functions",
    "--tool-strict-level": "send strict in the tools of the requests",
    "--use-fp64-gumbel": "samples are drawn from float32",
    "--watchdog-config": "see --rank-timeout",
    "--watermark-config": "a plugin marks samples: --logits-processors",
    "--worker-cls": "see --executor, which takes a plugin's",
    "--worker-extension-cls": "a part of a plugin offers methods: see WorkerPart.methods",
}  # fmt: skip
NEUTRAL: dict[str, tuple[str, ...]] = {
    "--cp-kv-cache-interleave-size": ("1",),
    "--cpu-offload-gb": ("0", "0.0"),
    "--data-parallel-rank": ("0",),
    "--data-parallel-start-rank": ("0",),
    "--dcp-kv-cache-interleave-size": ("1",),
    "--decode-context-parallel-size": ("1",), "-dcp": ("1",),
    "--expert-placement-strategy": ("linear",),
    "--fingerprint-mode": ("none",),
    "--mamba-cache-philox-rounds": ("0",),
    "--max-long-partial-prefills": ("1",),
    "--max-num-partial-prefills": ("1",),
    "--offload-backend": ("auto",),
    "--offload-group-size": ("0",),
    "--per-request-spec-decode-metrics": ("none",),
    "--prefill-context-parallel-size": ("1",), "-pcp": ("1",),
    "--prefill-schedule-interval": ("1",),
    "--tool-strict-level": ("auto",),
    "--ubatch-size": ("0", "1"),
    "--worker-cls": ("auto",),
}  # fmt: skip
"""Refused flag → values in lower case for which nothing changes here."""
EQUIVALENT: dict[str, Option] = {
    "--all2all-backend": values.ALL2ALL,
    "--attention-backend": values.ATTENTION,
    "--attention-config": values.ATTENTION_CONFIG,
    "-ac": values.ATTENTION_CONFIG,
    "--compilation-config": values.COMPILATION,
    "-cc": values.COMPILATION,
    "--optimization-level": values.LEVEL,
    "-O": values.LEVEL,
    "--convert": values.CONVERT,
    "--data-parallel-backend": values.DP_BACKEND,
    "-dpb": values.DP_BACKEND,
    "--device-memory-utilization": renamed("--gpu-memory-utilization"),
    "--disable-sliding-window": fixed("--hf-overrides.sliding_window=null"),
    "--eplb-step-interval": part_of("--eplb-config", "step-interval"),
    "--eplb-window-size": part_of("--eplb-config", "window-size"),
    "--num-redundant-experts": part_of("--eplb-config", "num-redundant-experts"),
    "--override-pooler-config": renamed("--pooler-config"),
    "--reasoning-config": values.REASONING,
    "--reasoning-parser": synonyms("--reasoning-parser", {"nano_v3": "nemotron_v3"}),
    "--reasoning-parser-plugin": values.parser_file("reasoning-parser"),
    "--rope-scaling": part_of("--hf-overrides", "rope_scaling"),
    "--rope-theta": part_of("--hf-overrides", "rope_theta"),
    "--disable-uvicorn-access-log": fixed("--access-log=off"),
    "--disable-log-requests": fixed("--no-enable-log-requests"),
    "--expand-tools-even-if-tool-choice-none": fixed("--no-exclude-tools-when-tool-choice-none"),
    "--guided-decoding-backend": values.GRAMMARS,
    "--structured-outputs-config.backend": values.GRAMMARS,
    "--structured-outputs-config": values.STRUCTURED,
    "--guided-decoding-disable-any-whitespace": fixed(
        "--structured-outputs-config.disable-any-whitespace"
    ),
    "--kv-events-config": values.KV_EVENTS,
    "--kv-offloading-backend": chosen(
        "nothing", unneeded={"native": "--kv-offloading-size alone keeps blocks in host memory"}
    ),
    "--kv-offloading-size": values.KV_OFFLOADING,
    "--kv-transfer-config": values.KV_TRANSFER,
    "--limit-mm-per-prompt": values.MEDIA_LIMITS,
    "--load-format": values.LOAD_FORMAT,
    "--log-level": values.LOG_LEVEL,
    "--uvicorn-log-level": values.LOG_LEVEL,
    "--logging-config": values.LOGGING,
    "--mamba-cache-mode": values.CACHE_MODE,
    "--max-num-queued-reqs": renamed("--limit-concurrency"),
    "--otlp-traces-endpoint": values.plugin_option("traces.endpoint"),
    "-sc": renamed("--speculative-config"),
    "--spec-method": part_of("--speculative-config", "method"),
    "--spec-model": part_of("--speculative-config", "model"),
    "--spec-tokens": part_of("--speculative-config", "num_speculative_tokens"),
    "--task": synonyms("--task", {"embedding": "embed"}),
    "--tokenizer-mode": values.TOKENIZER_MODE,
    "--tool-parser-plugin": values.parser_file("tool-parser"),
    "--trust-remote-code": Option(
        "no effect",
        "a checkpoint's code is never run; a model that is not built in is refused by name, and "
        "comes as a plugin",
        0,
    ),
}
"""vLLM's flag, or one of ours with values of vLLM's → what it becomes."""


VLLM_GROUPS = {
    "attention": "execution",
    "compilation": "execution",
    "device": "model",
    "frontend": "server",
    "kvtransfer": "cache",
    "load": "model",
    "lora": "adapter",
    "observability": "HTTP",
    "pooler": "model",
    "scheduler": "scheduling",
    "speculative": "execution",
    "vllm": "engine",
}
"""vLLM's group in lower case without "Config" → the corresponding group."""


def vllm_options() -> dict[str, Option]:
    """Return vLLM's flag → what becomes of it."""
    options = {flag: Option("no effect", why, nargs) for flag, (nargs, why) in NO_EFFECT.items()}
    for flag, why in MISSING.items():
        options[flag] = Option("refused", why, ANY, neutral=frozenset(NEUTRAL.get(flag, ())))
    return options | EQUIVALENT
