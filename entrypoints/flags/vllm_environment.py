"""vLLM's environment variables: what each becomes on this command line, or why it has no effect.

A variable sets a flag's value; the command line and the file of --config take precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from . import vllm_values as values
from .foreign_options import Line, Refused, State, Unneeded


class Variable(NamedTuple):
    state: State
    text: str
    """The flag, or the reason."""
    words: Callable[[str], list[str]] | None = None
    """Returns a value's words, each with its flag. Raises Refused."""


def _flag(flag: str) -> Variable:
    return Variable("equivalent", flag, lambda value: [f"{flag}={value}"])


def _switch(flag: str) -> Variable:
    return Variable("equivalent", flag, lambda value: [flag] * _is_on(value))


def _off(flag: str) -> Variable:
    return Variable("equivalent", flag, lambda value: [flag] * (not _is_on(value)))


def _none(why: str) -> Variable:
    return Variable("no effect", why)


def _refused_if_on(why: str) -> Variable:
    def words(value: str) -> list[str]:
        if _is_on(value):
            raise Refused(why)
        return []

    return Variable("refused", why, words)


def _is_on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on")


def _milliseconds(flag: str) -> Callable[[str], list[str]]:
    def words(value: str) -> list[str]:
        try:
            return [f"{flag}={float(value) / 1000:g}"]
        except ValueError:
            raise Refused(f"must be a number, got {value!r}") from None

    return words


_CHOSEN = "the kernels that are here are chosen by shape and device; see --operations"
VARIABLES: dict[str, Variable] = {
    "VLLM_API_KEY": Variable("same", "keys that clients must send"),
    "VLLM_ATTENTION_BACKEND": Variable(
        "equivalent",
        "--attention-backend",
        lambda value: list(values.ATTENTION.words([value]) if values.ATTENTION.words else ()),
    ),
    "VLLM_CPU_KVCACHE_SPACE": Variable(
        "equivalent",
        "--cpu-kvcache-space",
        lambda value: [] if value.strip() in ("", "0") else [f"--cpu-kvcache-space={value}"],
    ),
    "VLLM_ENABLE_KV_COMPRESSION": _refused_if_on("see --kv-compression"),
    "VLLM_ENABLE_RESPONSES_API_STORE": _none("/v1/responses keeps responses; see "
                                             "--max-stored-responses"),
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": _flag("--rank-timeout"),
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": _flag("--max-body-bytes"),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": _flag("--timeout-keep-alive"),
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": Variable(
        "equivalent",
        "--plugin-option kv_events.int_block_hashes=...",
        lambda value: [] if _is_on(value) else ["--plugin-option=kv_events.int_block_hashes=false"],
    ),
    "VLLM_LOGGING_LEVEL": Variable(
        "equivalent",
        "--log-level",
        lambda value: list(values.LOG_LEVEL.words([value]) if values.LOG_LEVEL.words else ()),
    ),
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": Variable(
        "equivalent",
        "--max-audio-bytes",
        lambda value: [f"--max-audio-bytes={int(value) << 20}" if value.isdecimal() else value],
    ),
    "VLLM_MAX_N_SEQUENCES": _flag("--max-completions-per-request"),
    "VLLM_PLUGINS": _none("it names plugins of vLLM; see JACKFIELD_PLUGINS"),
    "VLLM_PP_LAYER_PARTITION": _flag("--pipeline-layer-partition"),
    "VLLM_SERVER_DEV_MODE": _switch("--enable-admin"),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _switch("--enable-admin"),
    "VLLM_USE_MODELSCOPE": _refused_if_on(
        "name the model modelscope://owner/name, with the package examples/modelscope"
    ),
    "VLLM_BATCH_INVARIANT": _switch("--batch-invariant"),
    "VLLM_DO_NOT_TRACK": _none("nothing is reported to anyone"),
    "VLLM_NO_USAGE_STATS": _none("nothing is reported to anyone"),
    "VLLM_USAGE_SOURCE": _none("nothing is reported to anyone"),
    "VLLM_USAGE_STATS_SERVER": _none("nothing is reported to anyone"),
    "VLLM_HOST_IP": _none("ranks of one host meet on its loopback address; see --executor ray"),
    "VLLM_PORT": _none("ports between processes are any free ones; the server's is --port"),
    "VLLM_WORKER_MULTIPROC_METHOD": _none("ranks are started as processes of their own"),
    "VLLM_ENGINE_READY_TIMEOUT_S": _none("front ends wait for the engine as long as it starts"),
    "VLLM_RPC_TIMEOUT": _none("front ends wait for the engine as long as it lives"),
    "VLLM_FLOAT32_MATMUL_PRECISION": _none("products of float32 are computed as such"),
    "VLLM_USE_V1": _none("there is one engine"),
    "VLLM_USE_V2_MODEL_RUNNER": _none("there is one engine"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": _none("engine and worker share a process; see "
                                            "--api-server-count"),
    "VLLM_LOG_STATS_INTERVAL": _flag("--log-stats-interval"),
    "VLLM_CONFIGURE_LOGGING": _none("the log goes to standard error; see --log-level"),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": _none(
        "a length that the scaling of the rope gives is taken; for a longer one see "
        "--hf-overrides.max_position_embeddings"
    ),
}  # fmt: skip
GROUPS: dict[str, str] = {
    "VLLM_ROCM_": "no such device is supported",
    "VLLM_XPU_": "no such device is supported",
    "VLLM_TPU_": "no such device is supported",
    "VLLM_XLA_": "no such device is supported",
    "VLLM_ZENTORCH_": "no such device is supported",
    "VLLM_KV_COMPRESSION_": "see --kv-compression-ratio and --kv-compression-levels",
    "VLLM_LOGGING_": "the log goes to standard error; see --log-level and --access-log",
    "VLLM_FLASHINFER_": _CHOSEN,
    "VLLM_USE_FLASHINFER_": _CHOSEN,
    "VLLM_USE_DEEP_GEMM": _CHOSEN,
    "VLLM_MOE_": _CHOSEN,
    "VLLM_MARLIN_": _CHOSEN,
    "VLLM_HUMMING_": _CHOSEN,
    "VLLM_DEEPEP_": "experts' tokens travel by the exchange that is here; see --all2all-backend",
    "VLLM_MOONCAKE_": "there is no such connector; see --kv-transfer-config with peer_store",
    "VLLM_NIXL_": "there is no such connector; see --kv-transfer-config with peer_store",
    "VLLM_P2P_": "there is no such connector; see --kv-transfer-config with peer_store",
    "VLLM_EC_": "prompts are encoded where they are computed",
    "VLLM_MEDIA_": "media are fetched and decoded within the bounds of docs/reference/limits.md",
    "VLLM_VIDEO_": "videos are decoded in processes of their own; see --media-io-kwargs",
    "VLLM_AUDIO_": "recordings come with the request",
    "VLLM_MAX_AUDIO_": "recordings are decoded piece by piece",
    "VLLM_IMAGE_": "pictures are fetched within the bounds of docs/reference/limits.md",
    "VLLM_RAY_": "see --executor ray",
    "VLLM_DP_": "engines find each other by themselves; see --data-parallel-size",
    "VLLM_ELASTIC_EP_": "ranks are fixed at the start",
    "VLLM_COMPILE_": "no graph is compiled",
    "VLLM_USE_AOT_COMPILE": "no graph is compiled",
    "VLLM_DISABLE_COMPILE_CACHE": "no graph is compiled",
    "VLLM_CPU_": "torch sets the threads (OMP_NUM_THREADS); see --cpu-kvcache-space",
}
"""Beginning of variables' names → why they have no effect."""
OTHERWISE = "it is about vLLM's own code"


def variable(name: str) -> Variable:
    if (entry := VARIABLES.get(name)) is not None:
        return entry
    why = next((why for start, why in GROUPS.items() if name.startswith(start)), OTHERWISE)
    return _none(why)


def environment_lines(environ: Mapping[str, str]) -> Iterator[Line]:
    """Yield what the variables of vLLM that are set become."""
    for name in sorted(name for name in environ if name.startswith("VLLM_")):
        known, given = variable(name), (f"{name}={environ[name]}",)
        if known.state == "same":
            yield Line(("VLLM_API_KEY=...",), (), "same", "")
        elif known.words is None:
            yield Line(given, (), "no effect", known.text)
        else:
            try:
                words = known.words(environ[name])
            except Refused as error:
                yield Line(given, (), "refused", str(error))
            except Unneeded as error:
                yield Line(given, (), "no effect", str(error))
            else:
                yield Line(given, tuple(words), "equivalent")
