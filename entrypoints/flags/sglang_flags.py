"""SGLang's most used flags (`python -m sglang.launch_server`), those that vLLM has not.

Names and meanings are those of SGLang 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from .foreign_options import ANY, Option, Refused, Unneeded
from .vllm_values import chosen, fixed, part_of, renamed, synonyms

ALGORITHMS = {
    "EAGLE": "eagle", "EAGLE3": "eagle3", "NEXTN": "mtp", "NGRAM": "ngram",
    "STANDALONE": "draft_model",
}  # fmt: skip
"""SGLang's algorithm → method."""


def _algorithm(values: list[str]) -> Sequence[str]:
    method = ALGORITHMS.get(values[0].upper())
    if method is None:
        raise Refused(f"{values[0]} drafts are not supported; those of {', '.join(ALGORITHMS)} are")
    return [f"--speculative-config.method={method}"]


def _drafted(values: list[str]) -> Sequence[str]:
    """SGLang counts the tokens that are verified, one of which is no draft."""
    if not (values[0].isdecimal() and int(values[0]) > 1):
        raise Refused(f"must be a number from 2, got {values[0]!r}")
    return [f"--speculative-config.num_speculative_tokens={int(values[0]) - 1}"]


def _chain(values: list[str]) -> Sequence[str]:
    if values[0] == "1":
        raise Unneeded(_CHAINS)
    raise Refused(_CHAINS)


def _whole_prompts(values: list[str]) -> Sequence[str]:
    if values[0] == "-1":
        return ["--no-enable-chunked-prefill"]
    return [f"--max-num-batched-tokens={values[0]}"]


def _experts(values: list[str]) -> Sequence[str]:
    if values[0] == "1":
        raise Unneeded("this is how it is here")
    return ["--enable-expert-parallel"]


def _overrides(values: list[str]) -> Sequence[str]:
    return [f"--hf-overrides={values[0]}"]


def _host_cache(values: list[str]) -> Sequence[str]:
    config = {"kv_offloading_size": float(values[0])}
    return [
        "--kv-transfer-config.kv_connector=cpu_offload",
        f"--kv-transfer-config.kv_connector_extra_config={json.dumps(config)}",
    ]


def _first_host(values: list[str]) -> list[str]:
    host, colon, port = values[0].rpartition(":")
    if not colon or not port.isdecimal():
        raise Refused(f"must be HOST:PORT, got {values[0]}")
    return [f"--master-addr={host.strip('[]')}", f"--master-port={port}"]


_CHAINS = "drafts are chains: one token follows another, not several"
_GRAPHS = "a graph is recorded for a number of rows when it is needed"
_NO_EFFECT: dict[str, tuple[int | str, str]] = {
    "--constrained-json-whitespace-pattern": (
        1, "see --structured-outputs-config.disable-any-whitespace"),
    "--cuda-graph-bs": ("+", _GRAPHS),
    "--cuda-graph-max-bs": (1, _GRAPHS),
    "--decode-log-interval": (1, "a line of statistics comes every --log-stats-interval seconds"),
    "--deepep-mode": (1, "see --all2all-backend"),
    "--disable-cuda-graph-padding": (0, _GRAPHS),
    "--disable-overlap-schedule": (0, "two steps are always in flight"),
    "--enable-cache-report": (0, "usage always has prompt_tokens_details"),
    "--enable-metrics": (0, "GET /metrics is always served"),
    "--enable-mixed-chunk": (0, "prompts and outputs always share steps"),
    "--enable-p2p-check": (0, "collectives are chosen by --collectives"),
    "--enable-multimodal": (0, "a checkpoint's encoders are loaded; see --language-model-only"),
    "--enable-torch-compile": (0, "no graph is compiled"),
    "--hicache-ratio": (1, "the cache in host memory has a size in GiB: --hicache-size"),
    "--load-balance-method": (1, "engines get requests by their load and by what they cache"),
    "--moe-a2a-backend": (1, "see --all2all-backend"),
    "--moe-runner-backend": (1, "kernels are chosen by shape and device"),
    "--sampling-backend": (1, "kernels are chosen by shape and device"),
    "--schedule-conservativeness": (1, "a preempted request is computed again"),
    "--show-time-cost": (0, "GET /metrics has the times of requests"),
    "--skip-server-warmup": (0, "the server is ready when its kernels are compiled"),
}  # fmt: skip
_MISSING: dict[str, str] = {
    "--base-gpu-id": "see --device-ids",
    "--disaggregation-mode": "see --kv-transfer-config with peer_store, kv_producer or kv_consumer",
    "--enable-dp-attention": "of --tp N --dp D: --data-parallel-size D, --tensor-parallel-size N/D "
    "and --enable-expert-parallel",
    "--max-total-tokens": "see --num-gpu-blocks-override",
}
_EQUIVALENT: dict[str, Option] = {
    "--enable-memory-saver": fixed("--enable-sleep-mode"),
    "--model-path": renamed("--model"),
    "--tokenizer-path": renamed("--tokenizer"),
    "--chunked-prefill-size": Option(
        "equivalent", "--max-num-batched-tokens; -1: --no-enable-chunked-prefill", 1,
        _whole_prompts),
    "--context-length": renamed("--max-model-len"),
    "--disable-cuda-graph": fixed("--enforce-eager"),
    "--disable-radix-cache": fixed("--no-enable-prefix-caching"),
    "--dist-init-addr": Option(
        "equivalent", "--master-addr and --master-port", 1, _first_host),
    "--dist-timeout": renamed("--distributed-timeout-seconds"),
    "--dp": renamed("--data-parallel-size"),
    "--dp-size": renamed("--data-parallel-size"),
    "--enable-deterministic-inference": fixed("--batch-invariant"),
    "--enable-hierarchical-cache": Option(
        "equivalent", "--kv-transfer-config with cpu_offload", 0,
        lambda _: ["--kv-transfer-config.kv_connector=cpu_offload"]),
    "--ep": Option("equivalent", "--enable-expert-parallel", 1, _experts),
    "--ep-num-redundant-experts": part_of("--eplb-config", "num-redundant-experts"),
    "--ep-size": Option("equivalent", "--enable-expert-parallel", 1, _experts),
    "--expert-parallel-size": Option("equivalent", "--enable-expert-parallel", 1, _experts),
    "--fastapi-root-path": renamed("--root-path"),
    "--file-storage-path": renamed("--batch-dir"),
    "--grammar-backend": synonyms(
        "--structured-outputs-config.backend", {"guidance": "llguidance"}),
    "--hicache-size": Option(
        "equivalent", "--kv-transfer-config with cpu_offload", 1, _host_cache),
    "--is-embedding": fixed("--runner=pooling"),
    "--json-model-override-args": Option("equivalent", "--hf-overrides", 1, _overrides),
    "--log-level-http": chosen(
        "--access-log", {level: ("--access-log=off",) for level in ("warning", "error")},
        otherwise=lambda _: ("--access-log=text",)),
    "--log-requests": fixed("--enable-log-requests"),
    "--max-prefill-tokens": renamed("--max-num-batched-tokens"),
    "--max-queued-requests": renamed("--max-waiting-requests"),
    "--max-running-requests": renamed("--max-num-seqs"),
    "--mem-fraction-static": renamed("--gpu-memory-utilization"),
    "--page-size": chosen(
        "--block-size", unneeded={"1": "blocks hold --block-size tokens"},
        otherwise=lambda value: (f"--block-size={value}",)),
    "--pp": renamed("--pipeline-parallel-size"),
    "--pp-size": renamed("--pipeline-parallel-size"),
    "--random-seed": renamed("--seed"),
    "--schedule-policy": synonyms(
        "--scheduling-policy", {}, {"lpm": "what waits is cached where it was, whatever its order",
                                    "random": "see --scheduling-policy"}),
    "--speculative-algorithm": Option(
        "equivalent", "--speculative-config.method", 1, _algorithm),
    "--speculative-draft-model-path": part_of("--speculative-config", "model"),
    "--speculative-eagle-topk": Option("equivalent", "nothing, for 1", 1, _chain),
    "--speculative-num-draft-tokens": Option(
        "equivalent", "--speculative-config.num_speculative_tokens, which leaves out the token "
        "before the drafts", 1, _drafted),
    "--speculative-num-steps": part_of("--speculative-config", "num_speculative_tokens"),
    "--tp": renamed("--tensor-parallel-size"),
    "--tp-size": renamed("--tensor-parallel-size"),
    "--watchdog-timeout": renamed("--rank-timeout"),
}  # fmt: skip


def sglang_options() -> dict[str, Option]:
    """Return SGLang's flag → what becomes of it."""
    options = {flag: Option("no effect", why, nargs) for flag, (nargs, why) in _NO_EFFECT.items()}
    options |= {flag: Option("refused", why, ANY) for flag, why in _MISSING.items()}
    return options | _EQUIVALENT
