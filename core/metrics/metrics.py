"""Prometheus metrics of one engine. Names are vLLM's where equivalent."""

from __future__ import annotations

import prometheus_client as prometheus

from ..outputs import EngineStats, RequestOutput, RequestTimings
from ..sampling_params import SamplingParams
from .histogram import Histogram

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
           20, 40, 80, 160, 640)  # fmt: skip
ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
               0.75, 1, 2.5, 5, 10, 20, 40, 80)  # fmt: skip
WAIT_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class EngineMetrics:
    """A registry per engine, as a process may have several."""

    def __init__(
        self, model_name: str, *, registry: prometheus.CollectorRegistry | None = None
    ) -> None:
        self.registry = registry or prometheus.CollectorRegistry()
        self._model = model_name
        self._seen = EngineStats()

        def gauge(name: str, text: str) -> prometheus.Gauge:
            return prometheus.Gauge(
                f"jackfield:{name}", text, ["model_name"], registry=self.registry
            ).labels(model_name)

        def counter(name: str, text: str) -> prometheus.Counter:
            return prometheus.Counter(
                f"jackfield:{name}", text, ["model_name"], registry=self.registry
            ).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            labels = {"model_name": model_name}
            return Histogram(f"jackfield:{name}", text, buckets, labels, self.registry)

        self._running = gauge("num_requests_running", "Requests in the batch.")
        self._waiting = gauge("num_requests_waiting", "Requests waiting for a slot.")
        by_reason = prometheus.Gauge(
            "jackfield:num_requests_waiting_by_reason",
            "Requests waiting: for capacity, or deferred while a KV connector loads.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._at_capacity = by_reason.labels(model_name, "capacity")
        self._deferred = by_reason.labels(model_name, "deferred")
        self._usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._saved = gauge(
            "kv_saved_bytes",
            "Bytes, on each rank, that compactions spare in the caches of running requests.",
        )
        self._saved_by_level = prometheus.Gauge(
            "jackfield:kv_level_saved_bytes",
            "Of kv_saved_bytes, what tokens in each level of caches would take besides.",
            ["model_name", "level"],
            registry=self.registry,
        )
        self._ratio = gauge(
            "kv_compression_ratio",
            "Share of running requests' computed tokens in the caches of compacted layers, 0 to 1.",
        )
        self._counters = {
            "prefix_cache_queries": counter("prefix_cache_queries", "Prompt tokens looked up."),
            "prefix_cache_hits": counter("prefix_cache_hits", "Prompt tokens found."),
            "external_prefix_cache_queries": counter(
                "external_prefix_cache_queries", "Prompt tokens looked up in a KV connector."
            ),
            "external_prefix_cache_hits": counter(
                "external_prefix_cache_hits", "Tokens that a KV connector loaded."
            ),
            "num_kv_load_failures": counter(
                "kv_load_failures", "Loads of fewer tokens than the KV connector had announced."
            ),
            "num_preemptions": counter("num_preemptions", "Preemptions."),
            "preempted_tokens_restored": counter(
                "preempted_tokens_restored",
                "Tokens of preempted requests found cached, or loaded, when they ran again.",
            ),
            "preempted_tokens_recomputed": counter(
                "preempted_tokens_recomputed", "Tokens of preempted requests computed again."
            ),
            "kv_compactions": counter("kv_compactions", "Compactions of a request's cache."),
            "kv_blocks_returned": counter(
                "kv_blocks_returned", "KV blocks that compactions made free."
            ),
            "kv_bytes_returned": counter(
                "kv_returned_bytes",
                "Bytes, on each rank, of the KV blocks that compactions made free.",
            ),
            "kv_tokens_compacted": counter(
                "kv_tokens_compacted", "Tokens in caches that were compacted, before that."
            ),
            "kv_tokens_dropped": counter(
                "kv_tokens_dropped", "Tokens that compactions have dropped from caches."
            ),
            "kv_compaction_seconds": counter(
                "kv_compaction_seconds", "Seconds that compactions took on the device."
            ),
            "late_preparations": counter(
                "late_preparations",
                "Kernels compiled or loaded, and graphs recorded, in steps that waited for it.",
            ),
            "graph_recording_failures": counter(
                "graph_recording_failures",
                "Failed attempts to record a step as a CUDA graph; such steps are launched.",
            ),
            "spec_decode_num_drafts": counter(
                "spec_decode_num_drafts", "Rows whose drafts were verified."
            ),
            "spec_decode_num_draft_tokens": counter(
                "spec_decode_num_draft_tokens", "Drafts that were verified."
            ),
            "spec_decode_num_accepted_tokens": counter(
                "spec_decode_num_accepted_tokens", "Drafts that were accepted."
            ),
            "prompt_tokens": counter("prompt_tokens", "Prompt tokens of admitted requests."),
            "generation_tokens": counter("generation_tokens", "Tokens generated."),
        }
        by_source = prometheus.Counter(
            "jackfield:prompt_tokens_by_source",
            "Prompt tokens of finished requests by where their KV came from.",
            ["model_name", "source"],
            registry=self.registry,
        )
        self._prompt_sources = {
            source: by_source.labels(model_name, source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }
        self._prompt_cached = counter(
            "prompt_tokens_cached", "Prompt tokens of finished requests that were not computed."
        )
        self._accepted_at = prometheus.Counter(
            "jackfield:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by their place in a row, from 0.",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._success = prometheus.Counter(
            "jackfield:request_success",
            "Finished requests.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._part_counts = prometheus.Counter(
            "jackfield:part_count",
            "What parts from plugins count, by the part's name and the count's.",
            ["model_name", "count"],
            registry=self.registry,
        )
        self._iteration = histogram("iteration_tokens_total", "Tokens per step.", TOKENS)
        self._step_seconds = histogram("iteration_seconds", "Seconds a step took.", ITL_SECONDS)
        self._launch_wait = histogram(
            "launch_wait_seconds",
            "Seconds of a step's launch in which its thread could not run.",
            WAIT_SECONDS,
        )
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.")
        self._itl = histogram("inter_token_latency_seconds", "Between tokens.", ITL_SECONDS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean time a token.", ITL_SECONDS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.")
        self._queue = histogram("request_queue_time_seconds", "Arrival to first schedule.")
        self._prefill = histogram("request_prefill_time_seconds", "Schedule to first token.")
        self._decode = histogram("request_decode_time_seconds", "First to last token.")
        self._inference = histogram("request_inference_time_seconds", "Schedule to last token.")
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self._generated = histogram(
            "request_generation_tokens", "Generated tokens per request.", TOKENS
        )
        self._computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens per request that were computed, not found or loaded.",
            TOKENS,
        )
        self._longest = histogram(
            "request_max_num_generation_tokens",
            "Generated tokens of a request's longest completion.",
            TOKENS,
        )
        self._preempted = histogram(
            "request_num_preemptions", "Preemptions per request.", (0, 1, 2, 5, 10, 20)
        )
        self._n = histogram("request_params_n", "n a request.", (1, 2, 5, 10, 20))
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens per request.", TOKENS)

    def observe_step(self, num_tokens: int, seconds: float, launch_wait: float) -> None:
        """Record a step: seconds on the device, and seconds in which its launch thread could not
        run.
        """
        self._iteration.observe(num_tokens)
        self._step_seconds.observe(seconds)
        self._launch_wait.observe(launch_wait)

    def observe_stats(self, stats: EngineStats) -> None:
        """Set gauges and counters from a snapshot, before a scrape."""
        self._running.set(stats.num_requests_running)
        self._waiting.set(stats.num_requests_waiting)
        self._at_capacity.set(stats.num_requests_waiting - stats.num_requests_deferred)
        self._deferred.set(stats.num_requests_deferred)
        self._usage.set(stats.kv_cache_usage)
        self._saved.set(stats.kv_bytes_saved)
        for level, saved in stats.kv_level_bytes_saved.items():
            self._saved_by_level.labels(self._model, level).set(saved)
        self._ratio.set(stats.kv_compression_ratio)
        for name, counter in self._counters.items():
            increase = getattr(stats, name) - getattr(self._seen, name)
            if increase:
                counter.inc(increase)
        before = self._seen.spec_decode_num_accepted_tokens_per_pos
        for place, count in stats.spec_decode_num_accepted_tokens_per_pos.items():
            self._accepted_at.labels(self._model, str(place)).inc(count - before.get(place, 0))
        for reason, count in stats.requests_finished.items():
            increase = count - self._seen.requests_finished.get(reason, 0)
            if increase:
                self._success.labels(self._model, reason).inc(increase)
        for name, number in stats.part_counts.items():
            increase = number - self._seen.part_counts.get(name, 0)
            self._part_counts.labels(self._model, name).inc(increase)
        self._seen = stats

    def observe_cache_config(self, **facts: object) -> None:
        """Record the KV cache's properties as labels, once."""
        labels = {name: str(value) for name, value in facts.items()}
        prometheus.Gauge(
            "jackfield:cache_config_info",
            "How the KV cache is set up.",
            ["model_name", *labels],
            registry=self.registry,
        ).labels(model_name=self._model, **labels).set(1)

    def observe_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def observe_inter_token(self, seconds: float, count: int) -> None:
        self._itl.observe(seconds, count)

    def observe_finished(
        self, output: RequestOutput, params: SamplingParams, num_loaded: int = 0
    ) -> None:
        """num_loaded: prompt tokens that a KV connector has loaded."""
        generated = sum(len(completion.token_ids) for completion in output.outputs)
        self._prompt.observe(len(output.prompt_token_ids))
        self._generated.observe(generated)
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)
        times = output.timings
        if times.finished is not None:
            self._e2e.observe(times.finished - times.arrival)
        if times.first_scheduled is None or times.first_token is None or times.last_token is None:
            return
        self._observe_prompt(len(output.prompt_token_ids), output.num_cached_tokens, num_loaded)
        self._preempted.observe(times.num_preemptions)
        self._queue.observe(times.first_scheduled - times.arrival)
        self._prefill.observe(times.first_token - times.first_scheduled)
        self._decode.observe(times.last_token - times.first_token)
        self._inference.observe(times.last_token - times.first_scheduled)
        longest = max(len(completion.token_ids) for completion in output.outputs)
        self._longest.observe(longest)
        if longest > 1:
            self._tpot.observe((times.last_token - times.first_token) / (longest - 1))

    def _observe_prompt(self, num_tokens: int, num_cached: int, num_loaded: int) -> None:
        num_computed, num_loaded = num_tokens - num_cached, min(num_loaded, num_cached)
        self._computed.observe(num_computed)
        self._prompt_cached.inc(num_cached)
        self._prompt_sources["local_compute"].inc(num_computed)
        self._prompt_sources["local_cache_hit"].inc(num_cached - num_loaded)
        self._prompt_sources["external_kv_transfer"].inc(num_loaded)

    def observe_pooled(
        self, num_prompt_tokens: int, times: RequestTimings, num_cached: int = 0
    ) -> None:
        self._prompt.observe(num_prompt_tokens)
        if times.finished is not None:
            self._e2e.observe(times.finished - times.arrival)
        if times.first_scheduled is not None:
            self._queue.observe(times.first_scheduled - times.arrival)
            self._observe_prompt(num_prompt_tokens, num_cached, 0)

    def render(self) -> bytes:
        text: bytes = prometheus.generate_latest(self.registry)
        return text
