"""LongCat-Flash-Lite is LongCat-Flash of `transformers` behind embeddings of tokens together, which
are computed here token by token in Python's integers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import (
    PROMPTS,
    check_divided,
    check_engine,
    check_names,
    checkpoint,
)
from test_latent_families import CASES as LATENT
from test_latent_families import latent_reference
from test_odd_configs import count_refused, odd_configs

from jackfield.core.errors import ConfigError
from jackfield.core.nn.context import BatchLayout, BuildContext, ForwardContext
from jackfield.core.nn.operations import Operations
from jackfield.plugins.conformance.paged_model import VOCAB, PagedModel
from jackfield.plugins.models.longcat_ngram import EarlierTokens

NAME = "LongcatFlashNgramForCausalLM"
HIDDEN, NEIGHBORS, SPLITS, RATIO = 64, 3, 2, 1.5
TABLES = SPLITS * (NEIGHBORS - 1)
END = PROMPTS[1][17]
"""A token amid the long prompt, as if a text ended there."""
CASES: dict[str, dict[str, Any]] = {
    "LongcatFlashNgramForCausalLM": {
        "model_type": "longcat_flash_ngram", "architectures": [NAME], "eos_token_id": END,
        "ngram_vocab_size_ratio": RATIO, "emb_neighbor_num": NEIGHBORS, "emb_split_num": SPLITS,
    },
}  # fmt: skip


def rows_of(table: int) -> int:
    return int(RATIO * VOCAB) + 1 + 2 * table


def rows_at(tokens: list[int], place: int) -> list[int]:
    """The row of each table that the token at a place has with those before it."""
    rows = []
    for table in range(TABLES):
        number, factor = tokens[place], 1
        for lag in range(1, table // SPLITS + 2):
            if place < lag or tokens[place - lag] == END:
                break
            factor *= VOCAB
            number += tokens[place - lag] * factor
        rows.append(number % rows_of(table))
    return rows


def write(folder: Path) -> Callable[[list[int]], torch.Tensor]:
    """Write a checkpoint; return its scores: tokens → log-probabilities [tokens, vocab_size]"""
    reference = latent_reference("LongcatFlashForCausalLM", LATENT["LongcatFlashForCausalLM"])
    checkpoint(reference, "LongcatFlashForCausalLM", folder)
    draw = torch.Generator().manual_seed(5)
    tables = [torch.randn(rows_of(n), HIDDEN // TABLES, generator=draw) for n in range(TABLES)]
    projections = [torch.randn(HIDDEN, HIDDEN // TABLES, generator=draw) for _ in range(TABLES)]
    file, here = folder / "model.safetensors", "model.ngram_embeddings"
    found = load_file(file) | {"model.mtp.norm.weight": torch.ones(4)}
    for n, (table, projection) in enumerate(zip(tables, projections, strict=True)):
        found[f"{here}.embedders.{n}.weight"] = table
        found[f"{here}.post_projs.{n}.weight"] = projection
    save_file(found, file)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = config["num_layers"]
    (folder / "config.json").write_text(json.dumps(config | CASES[NAME]))

    @torch.no_grad()
    def score(tokens: list[int]) -> torch.Tensor:
        own = reference.model.embed_tokens(torch.tensor(tokens))
        for place in range(len(tokens)):
            for n, row in enumerate(rows_at(tokens, place)):
                own[place] += projections[n] @ tables[n][row]
        own = own[None] / (1 + TABLES)
        logits: torch.Tensor = reference(inputs_embeds=own, use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    return score


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and its scores."""
    folder = tmp_path_factory.mktemp("longcat_ngram")
    return folder, write(folder)


@pytest.mark.parametrize("case", CASES)
async def test_tokens_are_embedded_with_those_before_them(
    case: str, model: tuple[Path, Any]
) -> None:
    folder, score = model
    paged = PagedModel(folder, "float32")
    prompt = PROMPTS[1]
    # A step that begins within what is embedded together, one right behind the end of a text.
    parts = prompt[:11], prompt[11:18], prompt[18:]
    got = torch.cat([paged.run({0: part})[0] for part in parts]).log_softmax(-1).cpu()
    torch.testing.assert_close(got, score(prompt), atol=1e-3, rtol=0)
    check_names(folder, paged.model)
    check_divided(folder, case)
    await check_engine(folder, score)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_kernels_embed_alike(model: tuple[Path, Any]) -> None:
    """A prompt in two steps, beside a decode row in the second one, and a step of decode rows."""
    pytest.importorskip("triton")
    folder, score = model
    paged = PagedModel(folder, "float32", kernels="triton")
    first, other = PROMPTS[1], PROMPTS[0]
    steps = (
        {0: first[:20], 1: other[:4]}, {1: other[4:5], 0: first[20:40]}, {0: first[40:], 1: [9]},
    )  # fmt: skip
    results = [paged.run(step) for step in steps]
    for slot, tokens in ((0, first), (1, [*other, 9])):
        got = torch.cat([result[slot] for result in results]).log_softmax(-1).cpu()
        torch.testing.assert_close(got, score(tokens), atol=1e-3, rtol=0)


def test_tokens_are_exact_in_16_bits() -> None:
    """Two steps, of which the second one reads what the first one kept."""
    build = BuildContext(torch.device("cpu"), torch.bfloat16, Operations())
    layer = EarlierTokens(2, build)
    (part,) = layer.cache.parts
    layer.bind({"conv": torch.full((3, *part.shape), float("nan"), dtype=torch.bfloat16)})
    tokens, got = [5, 131071, 0, 70000, (1 << 24) - 1, 9], []
    for start, end in ((0, 4), (4, 6)):
        lengths = np.array([0, end - start], np.int32), np.array([end], np.int32)
        layout = BatchLayout.of(
            query_start=torch.from_numpy(lengths[0]), seq_lens=torch.from_numpy(lengths[1]),
            query_start_cpu=lengths[0], seq_lens_cpu=lengths[1], slots=torch.tensor([1]),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=torch.zeros(end - start, dtype=torch.int64),
        )  # fmt: skip
        context = ForwardContext(None, None, layout, torch.arange(start, end))
        got += layer(torch.tensor(tokens[start:end]), context).tolist()
    before = [0, *tokens]
    assert got == [[before[n], before[n - 1] if n else 0] for n in range(len(tokens))]


@pytest.mark.slow
def test_no_value_of_any_field_is_a_bare_error(model: tuple[Path, Any], tmp_path: Path) -> None:
    config = json.loads((model[0] / "config.json").read_text())
    assert count_refused(tmp_path, odd_configs(config, None)) > 30


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("emb_split_num", 3, "emb_split_num"), ("emb_neighbor_num", 1, "model"),
        ("ngram_vocab_size_ratio", None, "model"), ("num_layers", 0, "model"),
        ("eos_token_id", None, "model"),
    ],
)  # fmt: skip
def test_odd_sizes_are_refused_by_name(
    field: str, value: Any, param: str, model: tuple[Path, Any], tmp_path: Path
) -> None:
    config = json.loads((model[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ConfigError, match=field) as caught:
        PagedModel(tmp_path, "float32", load_format="dummy")
    assert caught.value.param == param
