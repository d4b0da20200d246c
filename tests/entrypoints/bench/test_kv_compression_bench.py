"""`jackfield bench kv-compression`: the whole cache's numbers, and those of what is left of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield import LLM, SamplingParams
from jackfield.core.nn.attention import Attention
from jackfield.entrypoints.bench.kv_compression import command, measure
from jackfield.entrypoints.bench.kv_compression.command import run

SIZES = ["--context", "96", "--scored", "24", "--samples", "1", "--device", "cpu"]


@pytest.fixture(autouse=True, scope="module")
def text() -> Iterator[str]:
    """The beginning of the library's text, of which a sample is the first part: all of it takes
    seconds to write and to encode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "MODULES", command.MODULES[:1])
        beginning = command.library_text()[:20_000]
        assert len(beginning) == 20_000
        patch.setattr(command, "library_text", lambda: beginning)
        yield beginning


def bench(folder: Path, *more: str) -> list[dict[str, Any]]:
    output = folder / "results.jsonl"
    assert run([*SIZES, "--dtype", "float32", "--output", str(output), *more]) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The whole cache's numbers, and those of a window that keeps all, and some."""
    folder = tmp_path_factory.mktemp("windows")
    return bench(folder, "--policies", "window", "--ratios", "1", "0.25")


def test_what_is_kept_decides_what_is_lost(windows: list[dict[str, Any]]) -> None:
    whole, all_kept, some = windows
    assert (whole["policy"], all_kept["ratio"], some["ratio"]) == ("none", 1.0, 0.25)
    assert all_kept["perplexity"] == whole["perplexity"] and all_kept["recall"] == whole["recall"]
    assert set(all_kept["cosines"]) == {1.0} and all_kept["dropped"] == 0
    assert len(some["cosines"]) == len(all_kept["cosines"]) > 1
    assert 0 < some["cosine_least"] < 0.999 and some["dropped"] > 0.6
    assert some["perplexity"] != whole["perplexity"]
    assert (some["num_scored"], some["num_copied"]) == (24, 24 * 4)
    assert "cosine, mean" in command.summary([whole, all_kept, some])


def test_levels_stand_beside_compressors_with_their_bytes(tmp_path: Path) -> None:
    """In as few bytes as what is left of a cut cache, rounded tokens lose less."""
    whole, cut, rounded, both = bench(
        tmp_path, "--policies", "key_norm", "--ratios", "0.3",
        "--levels", "4@16", "key_norm=8:0.5@16,4:0.25@16", "--context", "192",
    )  # fmt: skip
    assert whole["bytes"] == 1.0 and (rounded["policy"], rounded["ratio"]) == ("4@16", 1.0)
    assert both["policy"] == "key_norm=8:0.5@16,4:0.25@16" and both["ratio"] == 0.75
    assert rounded["bytes"] <= cut["bytes"] == both["bytes"] < 0.4
    assert rounded["cosine_mean"] > both["cosine_mean"] > cut["cosine_mean"]
    assert rounded["recall"] >= cut["recall"]


def test_perplexity_is_that_of_the_next_tokens(windows: list[dict[str, Any]], text: str) -> None:
    whole = windows[0]
    with LLM(device="cpu", dtype="float32", enable_prefix_caching=False) as llm:
        tokens = llm.get_tokenizer().encode(text, add_special_tokens=False)
        prompt = list(tokens)[: 96 + 24]
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    pairs = list(zip(prompt, output.prompt_logprobs, strict=True))[96:]
    mean = sum(found[token].logprob for token, found in pairs) / len(pairs)
    assert whole["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-3)


def test_similarity_is_that_of_the_layers_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen from outside of the part: the last two requests that score the text."""
    seen: list[list[torch.Tensor]] = []
    forward, ask = Attention.forward, measure.ask

    def watched(layer: Attention, *arguments: Any, **more: Any) -> torch.Tensor:
        output = forward(layer, *arguments, **more)
        if seen:
            seen[-1].append(output.clone())
        return output

    async def asked(engine: Any, tokens: Any, ratio: Any, role: Any) -> Any:
        seen.append([])
        if role is None:
            seen.pop()
        return await ask(engine, tokens, ratio, role)

    monkeypatch.setattr(Attention, "forward", watched)
    monkeypatch.setattr(measure, "ask", asked)
    monkeypatch.setattr(measure, "DEPTHS", (0.1,))
    *_, some = bench(tmp_path, "--policies", "key_diff", "--ratios", "0.3")
    num_layers = len(some["cosines"])
    whole, left = (
        [torch.cat(request[n::num_layers])[96 : 96 + 24] for n in range(num_layers)]
        for request in seen[-2:]
    )
    for cosine, one, other in zip(some["cosines"], whole, left, strict=True):
        assert cosine == pytest.approx(float(torch.cosine_similarity(one, other).mean()), abs=1e-3)


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        (["--ratios", "1.5"], "--ratios"), (["--samples", "0"], "--samples"),
        (["--scored", "96"], "--scored"), (["--context", "10"], "--context"),
        (["--levels", "window"], "--levels"), (["--levels", "5@9"], "--levels"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(
    more: list[str], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(command, "say", said.append)
    assert run([*SIZES, "--output", "-", *more]) == 2
    assert flag in said[0]


def test_a_short_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(command, "say", said.append)
    (tmp_path / "text").write_text("too short")
    options = ["--text", str(tmp_path / "text"), "--output", "-", "--dtype", "float32"]
    assert run([*SIZES, *options]) == 2
    assert "--text: it has" in said[0]
