"""Tiny random checkpoints and reference computations, shared by the tests."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import tempfile
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from jackfield import AsyncEngine, RequestOutput

T = TypeVar("T")

VOCAB = 199
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}

SWIGLU_LIMIT = {"swiglu_limit": 0.75} if hasattr(transformers.GptOssConfig, "swiglu_limit") else {}
"""Of GPT-OSS; older versions of transformers know one limit only."""

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-rope-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-rope-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.6,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                },
            },
        },
    ),
    "glm4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", {"sliding_window": 24, "partial_rotary_factor": 0.5}),
    # Every sequence with a nonzero rotation is longer than the original context.
    "phi3-long": (
        "Phi3",
        {
            "original_max_position_embeddings": 1,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "attention_factor": 1.4,
                "short_factor": [1.0, 1.1, 1.3, 1.6],
                "long_factor": [1.5, 2.0, 3.0, 5.0],
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 12,
            **SWIGLU_LIMIT,
            "initializer_range": 0.1,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            "head_dim": 16,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 14,
            "floor_scale": 16,
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "tie_word_embeddings": False,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 40,
            "sliding_window": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 40,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
            },
        },
    ),
}
LAYER_INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": (
        "Gemma3nText",
        {
            "num_hidden_layers": 5,
            "intermediate_size": 96,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 200,
            "num_kv_shared_layers": 1,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0, 0.0],
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "num_hidden_layers": 5,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "global_head_dim": 32,
            "num_key_value_heads": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 200,
            "num_kv_shared_layers": 1,
        },
    ),
}
"""Families whose layers have inputs of their own; their parity is test_families.py's."""


@functools.cache
def _files_of(name: str, dtype: torch.dtype) -> tuple[dict[str, bytes], torch.Tensor]:
    """→ the files of a random model, and the state of torch's generator behind it"""
    family, extra = (CONFIGS | LAYER_INPUTS)[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **extra})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("output_scale"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            if parameter_name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            if parameter_name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1.0, 3.0, len(parameter)))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files, torch.get_rng_state()


def make_checkpoint(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random model of CONFIGS or LAYER_INPUTS (no tokenizer) and return its folder."""
    files, state = _files_of(name, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    torch.set_rng_state(state)  # What is drawn next does not depend on who asked before.
    return folder


def changed_checkpoint(old: Path, new: Path) -> Path:
    """Save a checkpoint of the same model with other weights, as after some training, and return
    its folder."""
    shutil.copytree(old, new)
    torch.manual_seed(5)
    tensors = load_file(old / "model.safetensors")
    changed = {name: t + 0.1 * torch.randn_like(t) for name, t in tensors.items()}
    save_file(changed, new / "model.safetensors", metadata={"format": "pt"})
    return new


def reference_model(folder: Path, device: str = "cpu") -> Any:
    """The `transformers` model of a checkpoint, float32, eager attention."""
    return (
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        .to(device)
        .eval()
    )


@torch.no_grad()
def greedy_reference(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy continuation without a cache → (token ids, logprobs [count, vocab])."""
    tokens = list(prompt)
    rows = []
    for _ in range(count):
        logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0, -1]
        logprobs = torch.log_softmax(logits.float(), -1)
        rows.append(logprobs.cpu())
        tokens.append(int(logprobs.argmax()))
    return tokens[len(prompt) :], torch.stack(rows)


async def queued(engine: AsyncEngine, *requests: Coroutine[Any, Any, T]) -> list[asyncio.Task[T]]:
    """Start requests that all wait before the first of them runs, however slowly each comes.

    What they share then, as steps or too few blocks, does not depend on the machine's speed. One
    call at a time, and no adapters: they are loaded between steps.
    """
    await engine.pause_generation("keep", clear_cache=False, lease=None)
    states = engine.core.requests.states
    wanted = len(states) + len(requests)
    tasks = [asyncio.create_task(request) for request in requests]
    while len(states) < wanted and not any(task.done() for task in tasks):
        await asyncio.sleep(0.001)
    await engine.resume_generation()
    return tasks


async def at_once(engine: AsyncEngine, *requests: Coroutine[Any, Any, T]) -> list[T]:
    """Run requests that are `queued` together; return what they return."""
    return list(await asyncio.gather(*await queued(engine, *requests)))


async def joining(engine: AsyncEngine, requests: Sequence[tuple[Any, Any]]) -> list[RequestOutput]:
    """Run (prompt, params) of which number n comes once number n // 2 has its first output: some
    join the steps of others, many come at once. Return the last output of each.
    """
    begun = [asyncio.Event() for _ in requests]

    async def run_one(number: int) -> RequestOutput:
        if number:
            await begun[number // 2].wait()
        try:
            outputs = engine.generate(*requests[number])
            last = await anext(outputs)
            begun[number].set()
            async for output in outputs:
                last = output
            return last
        finally:
            begun[number].set()

    return list(await asyncio.gather(*map(run_one, range(len(requests)))))


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs kernels on the CPU, in Triton's interpreter"
)


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps(data))


def kept_tokens(scores: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the tokens that stay by a compressor's scores, [num_tokens, num_kv_heads]: [kept,
    num_kv_heads], ascending."""
    from jackfield.core.nn.operations import Operations

    chosen = torch.empty(1, kept, scores.shape[1], dtype=torch.int32)
    Operations().best_tokens(scores.T.float()[None], chosen)
    return chosen[0]


def few_interpreted(cases: Iterable[tuple[Any, ...]], few: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parametrize a kernel's cases: in the interpreter, all but these few are marked slow; on a
    GPU, none.

    `few`: covers each value of each parameter once, and the branches of the kernel.
    """
    unmarked = list(few)
    slow = () if torch.cuda.is_available() else (pytest.mark.slow,)
    params = [pytest.param(*case, marks=() if case in unmarked else slow) for case in cases]
    assert len(unmarked) == sum(not param.marks for param in params) or not slow, "one is no case"
    return params
