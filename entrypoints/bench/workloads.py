"""Workloads: real architectures with random weights, token ids as input, seeded."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from .family_shapes import FAMILY_SHAPES

Kind = Literal[
    "latency", "decode", "batch", "prefill", "context", "chats", "http", "start", "first",
    "minute",
]  # fmt: skip

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "max_window_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "max_window_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "max_window_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
        "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
        "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 32768,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 100000,
        "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
        "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
    },
    "Gemma-2-9B": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False,
        "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "bos_token_id": 2,
        "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42,
        "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 256000,
    },
    "Gemma-3-27B": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None,
        "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 128,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "initializer_range": 0.02,
        "intermediate_size": 21504, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16, "pad_token_id": 0,
        "query_pre_attn_scalar": 168, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000.0,
        "sliding_window": 1024, "sliding_window_pattern": 6, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262208,
    },
    "Mamba2-2.7B": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "bos_token_id": 0,
        "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 0, "expand": 2, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.1,
        "layer_norm_epsilon": 1e-5, "n_groups": 1, "norm_before_gate": True, "num_heads": 80,
        "num_hidden_layers": 64, "pad_token_id": 0, "residual_in_fp32": True, "rms_norm": True,
        "state_size": 128, "tie_word_embeddings": True, "time_step_rank": 160,
        "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True,
        "vocab_size": 50288,
    },
    "Falcon-H1-1.5B": {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1",
        "attention_bias": False, "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375, "bos_token_id": 1,
        "embedding_multiplier": 5.656854249492381, "eos_token_id": 11, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 4096, "key_multiplier": 0.390625,
        "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 256, "mamba_conv_bias": True,
        "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 3072, "mamba_d_state": 256,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
        "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
        "max_position_embeddings": 131072, "mlp_bias": False,
        "mlp_multipliers": [0.8838834764831844, 0.5859375], "num_attention_heads": 8,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "pad_token_id": 0,
        "projectors_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 65537,
    },
    "Qwen3-Next-12L": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
        "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 12, "num_key_value_heads": 2,
        "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
        "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "GPT-OSS-20B": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head",
            ],
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": 201088,
    },
    **FAMILY_SHAPES,
}  # fmt: skip
"""Configurations of published checkpoints (some with fewer layers); weights are random."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark's requests. Lengths in tokens; a pair is a uniform range, both ends included."""

    id: str
    title: str
    kind: Kind
    models: tuple[str, ...]
    """Architectures that define it."""
    headline: str
    """The representative number."""
    higher_is_better: bool = False
    prompt: tuple[int, int] = (1, 1)
    output: tuple[int, int] = (1, 1)
    requests: int = 1
    batches: tuple[int, ...] = ()
    """Numbers of requests decoding together."""
    concurrency: tuple[int, ...] = ()
    """Numbers of clients with one open request each."""
    shares: tuple[float, ...] = ()
    """Open loops: Poisson arrivals at these shares of the closed loops' rate."""
    mixed: bool = False
    """Whether requests also differ in sampling options, and a quarter disconnect mid-stream."""
    lengths: tuple[int, ...] = ()
    """Prompt lengths, measured in sequence."""
    system: int = 0
    """Tokens of a prefix common to all chats."""
    turns: int = 1
    parts: tuple[tuple[int, int, int], ...] = ()
    """Parts of a mix, each (requests, prompt, output); requests come in random order."""
    median: int = 0
    """If not 0, prompts are of log-normal lengths with this median, cut off to `prompt`."""
    streams: int = 0
    """Requests that decode all the time, of `stream` tokens of prompt and output."""
    stream: tuple[int, int] = (0, 0)
    burst: int = 0
    """Requests that come together, beside the streams."""
    interval: float = 0.0
    """Seconds from burst to burst."""
    temperature: float = 0.0
    warmup: int = 1
    repeats: int = 3

    def scaled(self, scale: float) -> Workload:
        """Return the workload with scaled lengths and counts, for a small machine."""
        if scale == 1.0:
            return self

        def less(value: int, least: int = 1) -> int:
            return max(least, round(value * scale))

        return msgspec.structs.replace(
            self,
            median=less(self.median, 2) if self.median else 0,
            streams=less(self.streams) if self.streams else 0,
            stream=tuple(less(n, 2) if n else 0 for n in self.stream),
            burst=less(self.burst) if self.burst else 0,
            prompt=(less(self.prompt[0], 2), less(self.prompt[1], 2)),
            output=tuple(n if n == 1 else less(n, 2) for n in self.output),
            lengths=tuple(dict.fromkeys(less(n, 2) for n in self.lengths)),
            requests=less(self.requests, min(2, self.requests)),
            batches=tuple(dict.fromkeys(less(n) for n in self.batches)),
            concurrency=tuple(dict.fromkeys(less(n) for n in self.concurrency)),
            parts=tuple((less(n), less(a, 2), less(b, 2)) for n, a, b in self.parts),
            system=less(self.system) if self.system else 0,
            turns=min(self.turns, less(self.turns, 2)),
        )

    @property
    def max_model_len(self) -> int:
        """Longest sequence, with a margin."""
        prompt = max(self.prompt[1], *self.lengths, 0)
        longest = self.system + self.turns * (prompt + self.output[1])
        mixed = (prompt + output for _, prompt, output in self.parts)
        return max(longest, sum(self.stream), *mixed) + 16


WORKLOADS: dict[str, Workload] = {
    each.id: each
    for each in (
        Workload(
            id="W1", title="batch 1, prompt 128, output 256", kind="latency",
            models=("Qwen3-0.6B", "Qwen3-8B"), prompt=(128, 128), output=(256, 256),
            headline="ms_per_token",
        ),
        Workload(
            id="decode", title="decode step by batch, prompt 128", kind="decode",
            models=("Qwen3-8B", "Qwen3-0.6B"), prompt=(128, 128), output=(129, 129),
            batches=(8, 32, 64, 128, 256), headline="ms_per_step",
        ),
        Workload(
            id="W2", title="256 requests, prompt and output each uniform in 100..1024",
            kind="batch", models=("Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B"),
            prompt=(100, 1024), output=(100, 1024), requests=256, temperature=0.6, repeats=2,
            headline="output_tokens_per_second", higher_is_better=True,
        ),
        Workload(
            id="W3", title="64 distinct prompts of 4096 tokens, one output token",
            kind="prefill", models=("Qwen3-8B",), prompt=(4096, 4096), requests=64, repeats=2,
            headline="prompt_tokens_per_second", higher_is_better=True,
        ),
        Workload(
            id="long-prompts", title="4 distinct prompts of 32768 tokens, one output token",
            kind="prefill", models=(), prompt=(32768, 32768), requests=4, repeats=3,
            headline="prompt_tokens_per_second", higher_is_better=True,
        ),
        Workload(
            id="mix", title="64 prompts of 6000 tokens with 32 out, 192 of 64 with 384, at once",
            kind="batch", models=(), parts=((64, 6000, 32), (192, 64, 384)), requests=256,
            repeats=2, headline="tokens_per_second", higher_is_better=True,
        ),
        Workload(
            id="W4", title="32 requests of 16384 tokens, 64 output tokens", kind="context",
            models=("Qwen3-8B",), prompt=(16384, 16384), output=(64, 64), requests=32,
            headline="ms_per_step",
        ),
        Workload(
            id="W5", title="HTTP streams, prompt 512, output 128, by concurrency; then Poisson",
            kind="http", models=("Qwen3-8B",), prompt=(512, 512), output=(128, 128), requests=256,
            concurrency=(1, 64, 256), shares=(0.7,), headline="output_tokens_per_second",
            higher_is_better=True,
        ),
        Workload(
            id="streams", title="W2's lengths as 256 HTTP streams at once", kind="http",
            models=("Qwen3-8B", "Qwen3-0.6B"), prompt=(100, 1024), output=(100, 1024),
            requests=256, concurrency=(256,), temperature=0.6,
            headline="output_tokens_per_second", higher_is_better=True,
        ),
        Workload(
            id="traffic", title="300 clients, mixed lengths, options and departures; then Poisson",
            kind="http", models=("Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B"), prompt=(1, 3000),
            output=(1, 200), requests=2400, concurrency=(300,), shares=(0.5, 0.8), mixed=True,
            repeats=1, headline="requests_per_second", higher_is_better=True,
        ),
        Workload(
            id="first-token", title="one prompt alone to its first token", kind="first",
            models=("Qwen3-8B", "Qwen3-0.6B", "Qwen2.5-7B", "Gemma-2-9B"), prompt=(128, 128),
            output=(1, 1), requests=30, concurrency=(1,), lengths=(16, 128, 512, 1024),
            headline="first_token_ms",
        ),
        Workload(
            id="first-minute", title="W2's 256 requests right after a start, and again",
            kind="minute", models=("Qwen3-0.6B", "Qwen3-8B", "Qwen2.5-7B"), prompt=(100, 1024),
            output=(100, 1024), requests=256, temperature=0.6, warmup=0, repeats=2,
            headline="first_over_second",
        ),
        Workload(
            id="first-documents", kind="minute", models=("Qwen3-8B",), prompt=(2048, 8000),
            title="64 prompts of 2048 to 8000 tokens right after a start, and again",
            requests=64, warmup=0, repeats=2, headline="first_over_second",
        ),
        Workload(
            id="W6", title="process start to ready to first token, cold and warm", kind="start",
            models=("Qwen3-8B",), prompt=(128, 128), output=(1, 1), headline="first_token_s",
        ),
        Workload(
            id="W7", title="64 chats of 8 turns that share a system prompt of 2000 tokens",
            kind="chats", models=("Qwen3-8B",), prompt=(64, 64), output=(128, 128), requests=64,
            system=2000, turns=8, repeats=1,
            headline="output_tokens_per_second", higher_is_better=True,
        ),
        Workload(
            id="agents", kind="chats", models=(),
            title="64 agents of 6 turns: a system prompt of 2000 tokens, tool results of some 400",
            prompt=(20, 4000), median=400, output=(32, 256), requests=64, system=2000, turns=6,
            repeats=1, headline="requests_per_second", higher_is_better=True,
        ),
        Workload(
            id="chat", title="256 chats of 3 turns over HTTP", kind="chats", models=(),
            prompt=(20, 2000), median=150, output=(64, 512), requests=256, system=500, turns=3,
            temperature=0.6, repeats=1, headline="itl_p99_ms",
        ),
        Workload(
            id="bursts", title="48 prompts of 1500 tokens every 2 s beside 128 streams",
            kind="http", models=(), prompt=(1500, 1500), output=(1, 1), requests=240,
            streams=128, stream=(128, 1300), burst=48, interval=2.0, repeats=1,
            headline="stream_itl_p99_ms",
        ),
    )
}  # fmt: skip


class BenchRequest(msgspec.Struct, frozen=True):
    prompt: list[int]
    output: int
    temperature: float = 0.0
    options: dict[str, Any] = {}
    """Further fields over HTTP."""
    leave_after: int | None = None
    """Chunks after which the client disconnects."""
    group: str = ""
    """If not empty, latencies of this group are also reported alone."""


def draw(
    workload: Workload, vocab_size: int, trial: int, *, requests: int = 0, turn: int = 0
) -> list[BenchRequest]:
    """Return a trial's requests: the same lengths per trial, but different tokens, against prefix
    caches.

    Ranges are drawn as in nano-vllm's benchmark (seed 0, prompts first, then output lengths), for
    comparable numbers. turn: of chats, whose turns differ in length.
    """
    usable = vocab_size - vocab_size // 150
    count = requests or workload.requests
    if workload.mixed:
        return _draw_mixed(workload, usable, trial, count)
    if workload.parts:
        each = [size for number, *size in workload.parts for _ in range(number)]
        order, source = random.Random(workload.id), random.Random(f"{workload.id} {trial}")
        return [
            BenchRequest(source.choices(range(usable), k=prompt), output, workload.temperature)
            for prompt, output in order.sample(each, min(count, len(each)))
        ]
    (low, high), (least, most) = workload.prompt, workload.output
    if workload.median:
        sizes, source = random.Random(f"{workload.id} {turn} {count}"), random.Random(trial)
        mean = math.log(workload.median)
        lengths = [
            min(max(round(sizes.lognormvariate(mean, 1.0)), low), high) for _ in range(count)
        ]
        return [
            BenchRequest(
                source.choices(range(usable), k=length), sizes.randint(least, most),
                workload.temperature,
            )
            for length in lengths
        ]  # fmt: skip
    if low == high and least == most:
        source = random.Random(f"{workload.id} {trial} {count}")
        return [
            BenchRequest(source.choices(range(usable), k=low), least, workload.temperature)
            for _ in range(count)
        ]
    source = random.Random(0)
    prompts = [
        [source.randint(0, 10000) for _ in range(source.randint(low, high))] for _ in range(count)
    ]
    outputs = [source.randint(least, most) for _ in range(count)]
    shift = 10007 * trial
    return [
        BenchRequest([(token + shift) % usable for token in prompt], output, workload.temperature)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


LEAVING = 0.25
"""Share of mixed requests that disconnect mid-stream."""
OPTIONS: tuple[tuple[float, Callable[[random.Random, int], dict[str, Any]]], ...] = (
    (0.2, lambda source, usable: {"top_p": 0.9}),
    (0.1, lambda source, usable: {"top_k": 40}),
    (0.05, lambda source, usable: {"min_p": 0.05}),
    (0.1, lambda source, usable: {"presence_penalty": 0.5}),
    (0.05, lambda source, usable: {"frequency_penalty": 0.3}),
    (0.1, lambda source, usable: {"repetition_penalty": 1.1}),
    (0.05, lambda source, usable: {"logprobs": 3}),
    (0.2, lambda source, usable: {"seed": source.randrange(1 << 31)}),
    (0.05, lambda source, usable: {"logit_bias": {str(source.randrange(usable)): 2.0}}),
    (0.05, lambda source, usable: {"min_tokens": 2, "stop_token_ids": [source.randrange(usable)]}),
    (0.1, lambda source, usable: {"stop": ["no such word"]}),
    (
        0.05,
        lambda source, usable: {"allowed_token_ids": source.sample(range(usable), 200)},
    ),
)
"""Options of mixed requests, drawn independently by share; none ends an output."""


def _draw_mixed(workload: Workload, usable: int, trial: int, count: int) -> list[BenchRequest]:
    """Return requests of uniform lengths; 70 % have a temperature. `stop_token_ids` may end an
    output.
    """
    source = random.Random(f"{workload.id} {trial}")
    requests = []
    for _ in range(count):
        prompt = source.choices(range(usable), k=source.randint(*workload.prompt))
        output = source.randint(*workload.output)
        options: dict[str, Any] = {}
        for share, make in OPTIONS:
            if source.random() < share:
                options |= make(source, usable)
        if output < 2:
            options.pop("min_tokens", None)
        leave_after = None
        if output > 4 and source.random() < LEAVING:
            leave_after = source.randint(1, output // 2)
        temperature = source.choice((0.0, 0.7, 1.0)) if source.random() < 0.9 else 0.3
        requests.append(BenchRequest(prompt, output, temperature, options, leave_after))
    return requests


def write_model(name: str, folder: Path, *, tokenizer: bool = False) -> Path:
    """Write ARCHITECTURES[name]'s config.json, and a synthetic tokenizer if needed.

    Return the folder, which has no weights.
    """
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    config = ARCHITECTURES[name]
    (target / "config.json").write_text(json.dumps(config, indent=1))
    if tokenizer:
        _write_tokenizer(target, int(config["vocab_size"]))
    return target


def model_config_dict(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with one word per token: t0, t1 …, so that detokenizing has a cost."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t151645",
        "pad_token": "t151643", "unk_token": "t0", "model_max_length": 131072,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def choose(names: Sequence[str], kinds: Sequence[Kind]) -> list[Workload]:
    """Return workloads by id. Raises ValueError with the known ids."""
    workloads = {each.id.lower(): each for each in WORKLOADS.values() if each.kind in kinds}
    selection = []
    for name in names:
        if name.lower() not in workloads:
            known_names = ", ".join(each.id for each in workloads.values())
            raise ValueError(f"workload: {name!r} is none of those that run here: {known_names}")
        selection.append(workloads[name.lower()])
    return selection
