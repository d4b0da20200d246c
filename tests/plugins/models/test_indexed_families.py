"""Families with indexers say what `transformers` says, of texts that are longer than what they
choose."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nights import some_by_day
from safetensors.torch import load_file, save_file
from test_families import (
    LEFT_OUT,
    PROMPTS,
    check_changed,
    check_divided,
    check_engine,
    check_logits,
    checkpoint,
    score,
)
from test_latent_families import V3, YARN, latent_reference, to_blocks
from test_text_parts import save

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.latent.layer import LatentAttention
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.quantized import QuantizedLinear
from jackfield.core.parallel.ranks import Pipeline, Ranks
from jackfield.core.protocols.latent_attention import LatentAttentionSpec
from jackfield.core.worker.selection import attention_refusal, cache_layers
from jackfield.plugins.attention.torch_latent import TorchLatentAttention
from jackfield.plugins.conformance.divided_models import check_ranks
from jackfield.plugins.conformance.kit import Kit
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_ranks
from jackfield.plugins.models.indexed import Indexer

from helpers import at_once

INDEXED = {**V3, "index_topk": 12, "index_head_dim": 16, "index_n_heads": 16}
"""With so many heads hardly a key has a score of 0, as all have whose products are negative: which
of equal ones `transformers` chooses is undefined."""
CASES: dict[str, dict[str, Any]] = {
    "AXK2ForCausalLM": {
        **INDEXED,
        "n_group": None,
        "topk_group": None,
        "first_k_dense_replace": LEFT_OUT,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "gated_norm_rank": 6,
    },
    "DeepseekV32ForCausalLM": {
        **INDEXED,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "GlmMoeDsaForCausalLM": {**INDEXED, "indexer_types": ["full", "full", "shared"]},
}


@pytest.mark.parametrize("case", CASES)
async def test_a_family_equals_transformers(case: str, tmp_path: Path) -> None:
    """Of texts that are three to five times as long as what attention reads."""
    reference = latent_reference(case, CASES[case])
    folder = checkpoint(reference, case, tmp_path)
    check_logits(folder, reference)
    await check_engine(folder, lambda tokens: score(reference, tokens))


@pytest.mark.parametrize("case", some_by_day(CASES, ["GlmMoeDsaForCausalLM"]))
def test_a_family_is_the_same_divided_and_changed(case: str, tmp_path: Path) -> None:
    folder = checkpoint(latent_reference(case, CASES[case]), case, tmp_path)
    check_divided(folder, case)
    check_changed(folder)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_kernels_equal_transformers(tmp_path: Path) -> None:
    """A prompt in two steps, beside a decode row in the second one, and a step of decode rows."""
    pytest.importorskip("triton")
    reference = saved_glm(tmp_path)
    model = PagedModel(tmp_path, "float32", kernels="triton")
    first, other = PROMPTS[1], PROMPTS[0]
    steps = (
        {0: first[:20], 1: other[:4]}, {1: other[4:5], 0: first[20:40]}, {0: first[40:], 1: [9]},
    )  # fmt: skip
    results = [model.run(step) for step in steps]
    for slot, tokens in ((0, first), (1, [*other, 9])):
        got = torch.cat([result[slot] for result in results]).log_softmax(-1).cpu()
        torch.testing.assert_close(got, score(reference, tokens), atol=1e-3, rtol=0)


def saved_glm(folder: Path, **changes: Any) -> Any:
    """Save a GLM-5 with two indexers and a layer that shares the second one's choice, and return
    its reference."""
    case = "GlmMoeDsaForCausalLM"
    reference = latent_reference(case, {**CASES[case], **changes})
    checkpoint(reference, case, folder)
    return reference


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
OFFLOAD = {
    "kv_connector": "cpu_offload", "kv_connector_extra_config": {"kv_offloading_size": 0.01},
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"kv_transfer_config": OFFLOAD}, {"speculative_config": NGRAM}],
    ids=["moved to the host", "speculation"],
)
async def test_requests_that_are_preempted_get_the_same_tokens(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """The cache holds two of three, in chunks beside decode rows."""
    reference = saved_glm(tmp_path)
    prompts = [[3 + (5 * i * n) % 90 for i in range(1, n)] for n in (36, 30, 24)]
    config = EngineConfig(
        model=str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=72,
        max_num_seqs=4, max_num_batched_tokens=16, block_size=4, num_gpu_blocks_override=32,
        **options,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

    async def tokens(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        *_, last = [output async for output in engine.generate(prompt, params)]
        return list(last.outputs[0].token_ids)

    async with AsyncEngine(config) as engine:
        answers = await at_once(engine, *(tokens(engine, prompt) for prompt in prompts))
        stats = engine.stats()
    assert stats.num_preemptions
    if "kv_transfer_config" in options:
        assert stats.preempted_tokens_restored
    else:
        assert stats.spec_decode_num_draft_tokens > stats.spec_decode_num_accepted_tokens
    for prompt, answer in zip(prompts, answers, strict=True):
        rows = score(reference, prompt + answer)[len(prompt) - 1 : -1]
        behind = rows.amax(-1) - rows[torch.arange(len(answer)), answer]
        assert float(behind.max()) <= 1e-3


def test_indexers_are_not_loaded_if_no_text_is_longer_than_their_choice(tmp_path: Path) -> None:
    """Nor is anything cached for them."""
    reference = saved_glm(tmp_path)
    short, long = (PagedModel(tmp_path, "float32", max_model_len=n) for n in (12, 13))
    prompt = PROMPTS[1][:12]
    got = torch.cat([short.run({0: part})[0] for part in (prompt[:5], prompt[5:])])
    torch.testing.assert_close(
        got.log_softmax(-1).cpu(), score(reference, prompt), atol=1e-3, rtol=0
    )
    assert torch.equal(got, torch.cat([long.run({0: p})[0] for p in (prompt[:5], prompt[5:])]))
    parts = [
        [[part.name for part in layer.cache_spec(torch.float32).parts] for layer in layers]
        for layers in (cache_layers(short.model), cache_layers(long.model))
    ]
    assert parts == [[["latent"]] * 3, [["latent", "index"]] * 2 + [["latent"]]]
    counts = [sum(isinstance(m, Indexer) for m in each.model.modules()) for each in (short, long)]
    assert counts == [0, 2]


def test_steps_of_short_rows_choose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a row is longer than what may be chosen; what was cached before then is chosen from."""
    calls = []
    choose = Operations.choose_cached_tokens

    def counted(self: Operations, *arguments: Any, **bounds: Any) -> Any:
        calls.append(bounds["max_seq_len"])
        return choose(self, *arguments, **bounds)

    monkeypatch.setattr(Operations, "choose_cached_tokens", counted)
    reference = saved_glm(tmp_path)
    model, prompt = PagedModel(tmp_path, "float32", kernels="torch"), PROMPTS[1][:14]
    steps = ({0: prompt[:7]}, {0: prompt[7:12]}, {0: prompt[12:13]}, {0: prompt[13:]})
    got = torch.cat([model.run(step)[0] for step in steps])
    torch.testing.assert_close(
        got.log_softmax(-1).cpu(), score(reference, prompt), atol=1e-3, rtol=0
    )
    assert calls == [13, 13, 14, 14], "two indexers, in two steps"


def test_every_rank_has_the_indexers_of_a_layer_in_fp8_blocks(tmp_path: Path) -> None:
    """As published: of an indexer's weights, those of heads alone are not quantized."""
    sizes = {"q_lora_rank": 128, "index_head_dim": 128, "num_hidden_layers": 1}
    dense = {"mlp_layer_types": ["dense"], "indexer_types": ["full"]}
    reference = saved_glm(tmp_path, **sizes, **dense)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    for name, weight in reference.named_parameters():
        if name.endswith(("indexer.wq_b.weight", "indexer.wk.weight")):
            rounded, scale = to_blocks(weight.detach())
            stored[name], stored[f"{name}_scale_inv"] = rounded, scale
            spread = scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
            weight.data = rounded.float() * spread[:, : weight.shape[1]]
    save_file(stored, path, {"format": "pt"})
    layer = "model.layers.0"
    plain = [
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if tensor.dim() == 2 and name.startswith(layer) and tensor.dtype == torch.float32
    ]
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "modules_to_not_convert": plain,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    models = [PagedModel(tmp_path, "float32", ranks=rank) for rank in thread_ranks(2)]
    indexer: Any = models[1].model.model.layers[0].self_attn.indexer  # type: ignore[union-attr, index]
    assert isinstance(indexer.wk, QuantizedLinear) and isinstance(indexer.wq_b, QuantizedLinear)
    assert indexer.weights_proj.weight.dtype == torch.float32
    prompt = PROMPTS[1]
    want = score(reference, prompt)
    for got in run_ranks([functools.partial(model.run, {0: prompt}) for model in models]):
        torch.testing.assert_close(got[0].log_softmax(-1).cpu(), want, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("index_topk", 0),
        ("index_head_dim", 4),
        ("q_lora_rank", None),
        ("indexer_types", ["shared", "full", "full"]),
        ("indexer_types", ["full", "full"]),
        ("indexer_types", ["full", "full", "other"]),
    ],
)
def test_what_is_no_indexer_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    saved_glm(tmp_path)
    with pytest.raises(ConfigError, match=field) as caught:
        PagedModel(tmp_path, "float32", load_format="dummy", hf_overrides={field: value})
    assert caught.value.param in (field, "model")


def test_groups_that_count_as_0_are_refused_by_name(tmp_path: Path) -> None:
    case = "AXK2ForCausalLM"
    checkpoint(latent_reference(case, CASES[case]), case, tmp_path)
    groups = {"n_group": 2, "topk_group": 1}
    with pytest.raises(ConfigError, match="n_group") as caught:
        PagedModel(tmp_path, "float32", load_format="dummy", hf_overrides=groups)
    assert caught.value.param == "n_group"


def test_a_stage_that_would_begin_with_a_shared_choice_is_refused_by_name(tmp_path: Path) -> None:
    """Unless no text is so long that anything is chosen."""
    saved_glm(tmp_path)
    ranks = Ranks(pipeline=Pipeline(0, 2, partition=(2, 1)))
    with pytest.raises(ConfigError, match="layers 0, 1,") as caught:
        PagedModel(tmp_path, "float32", ranks=ranks)
    assert caught.value.param == "pipeline_layer_partition"
    PagedModel(tmp_path, "float32", ranks=ranks, max_model_len=12)


def test_a_backend_that_reads_all_tokens_is_refused(tmp_path: Path) -> None:
    saved_glm(tmp_path)
    (layer, *_) = cache_layers(PagedModel(tmp_path, "float32").model)

    class ReadsAll(TorchLatentAttention):
        features = frozenset()

    cpu = torch.device("cpu")
    assert attention_refusal(ReadsAll, layer.spec, cpu, torch.float32) == "it has no index_topk"


async def test_minimax_m3_reads_all_blocks_that_its_indexers_keep(tmp_path: Path) -> None:
    """16 blocks of 8 tokens."""
    reference = save("MiniMaxM3SparseForConditionalGeneration", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".block_sparse_moe.experts.0.w1." in name for name in stored), "as published"
    for name, buffer in reference.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    reference.save_pretrained(tmp_path)
    check_ranks(tmp_path, "MiniMaxM3SparseForCausalLM", 2, Kit.plugins(), 2e-4)
    await check_engine(tmp_path, lambda tokens: score(reference, tokens))
    path = tmp_path / "config.json"
    path.write_text(re.sub(r'"index_topk_blocks": \d+', '"index_topk_blocks": 8', path.read_text()))
    with pytest.raises(ConfigError, match="128 is more than 64") as caught:
        PagedModel(tmp_path, "float32")
    assert caught.value.param == "max_model_len"


@pytest.mark.parametrize(
    ("longest", "precompiling", "all_read"), [(4, False, True), (4, True, False), (5, False, False)]
)
def test_a_step_chooses_tokens_once_a_row_has_more_than_are_kept(
    longest: int, precompiling: bool, all_read: bool
) -> None:
    """And when kernels are compiled in advance, those of longer rows, too."""
    build = BuildContext(torch.device("cpu"), torch.float32, Operations())
    spec = LatentAttentionSpec(
        num_heads=2, latent_dim=8, rope_dim=4, nope_dim=4, value_dim=4, scale=1.0, index_topk=4
    )
    layer = LatentAttention(spec, build, interleaved=False, index_dim=4)
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(max_seq_len=longest), precompiling=precompiling
    )
    assert layer.reads_all(context) is all_read
