"""Which attention backend `auto` takes, the reasons it gives, and FlashInfer's refusals."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.hooks import hookimpl
from jackfield.core.protocols.attention import AttentionBackend, AttentionSpec
from jackfield.core.registration.choice import choose
from jackfield.core.registry import Plugins, load_plugins
from jackfield.core.worker.selection import attention_refusal
from jackfield.plugins.attention import flashinfer
from jackfield.plugins.attention.flashinfer import FlashInferAttention, make_pages
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.conformance.paged import make_batch

from helpers import make_checkpoint

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
CPU = torch.device("cpu")


class Refusing(TorchAttention):
    name = "refusing"

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        return "it is out for lunch"


class OfTheFirstVersion(TorchAttention):
    """Written when layers had neither slopes nor sinks."""

    name = "old"
    features = AttentionBackend.features


class NoSubclass:
    name = "stranger"


class Plugin:
    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        registry.add("refusing", Refusing, priority=99)
        registry.add("old", OfTheFirstVersion, priority=98)
        registry.add("stranger", NoSubclass, priority=97)
        registry.add("broken", "no_such_module_anywhere:Backend", priority=96)


@pytest.fixture
def plugins() -> Plugins:
    return load_plugins(extra=[Plugin()])


def pick(plugins: Plugins, name: str, **features: Any) -> tuple[str, str]:
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=64, scale=0.125, **features)
    selection, _, reason = choose(
        plugins["attention_backend"],
        "attention_backend",
        name,
        lambda backend: attention_refusal(backend, spec, CPU, torch.float32),
    )
    return selection, reason


def test_auto_takes_the_first_that_serves_and_says_why(
    plugins: Plugins, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "jackfield.worker"):
        assert pick(plugins, "auto") == ("old", "because refusing: it is out for lunch")
    assert "attention_backend: old, because refusing: it is out for lunch" in caplog.text


def test_a_backend_older_than_a_feature_is_passed_over(plugins: Plugins) -> None:
    name, reason = pick(plugins, "auto", sinks=True)
    assert name in ("torch", "triton")
    assert "old: it has no sinks" in reason
    assert re.search(r"'stranger' of .* is none: it does not subclass", reason)
    assert "broken: " in reason and "no_such_module_anywhere" in reason


@pytest.mark.parametrize(
    ("name", "features", "reason"),
    [
        ("old", {"alibi_slopes": (0.5, 0.25), "sinks": True}, "it has no alibi_slopes, sinks"),
        ("refusing", {}, "it is out for lunch"),
        ("stranger", {}, "AttentionBackend"),
    ],
)
def test_one_chosen_by_name_is_refused_with_the_reason(
    plugins: Plugins, name: str, features: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        pick(plugins, name, **features)
    assert caught.value.param == "attention_backend"


# ---------------------------------------------------------------- FlashInfer


async def test_flashinfer_is_refused_for_a_model_with_sinks(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(make_checkpoint("gpt-oss", tmp_path)),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="flashinfer",
    )
    with pytest.raises(ConfigError, match=r"'flashinfer' cannot serve this model.* no sinks"):
        async with AsyncEngine(config):
            pass


def test_flashinfer_says_why_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cuda = torch.device("cuda")
    assert FlashInferAttention.supports(SPEC, CPU, torch.bfloat16) == "it needs a CUDA device"
    missing = flashinfer._missing.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(flashinfer, "PACKAGE", "flashinfer_that_nobody_has")
        patch.setattr(flashinfer, "_missing", missing)
        reason = FlashInferAttention.supports(SPEC, cuda, torch.bfloat16)
        assert reason == "flashinfer is not installed"
    (tmp_path / "flashinfer_that_breaks.py").write_text("raise OSError('no libcudart\\nhere')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flashinfer, "PACKAGE", "flashinfer_that_breaks")
    assert missing() == "flashinfer cannot be imported (OSError: no libcudart"
    monkeypatch.setattr(flashinfer, "_missing", lambda: None)
    assert "float32" in str(FlashInferAttention.supports(SPEC, cuda, torch.float32))
    narrow = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=80, scale=0.1)
    assert "head_dim 80" in str(FlashInferAttention.supports(narrow, cuda, torch.bfloat16))
    assert FlashInferAttention.supports(SPEC, cuda, torch.bfloat16) is None


def test_tables_of_pages_have_each_rows_blocks_and_no_gaps() -> None:
    sizes = [(9, 1), (1, 1), (40, 20), (16, 3)]
    layout = make_batch(sizes, SPEC, 8, CPU, torch.float32).layout
    for first, end in ((0, 2), (2, 4)):
        pages = make_pages(layout, first, end, 8)
        assert pages.tokens == slice(*layout.query_start_cpu[[first, end]].tolist())
        for row in range(first, end):
            tokens, queries = sizes[row]
            begin, stop = pages.indptr[row - first : row - first + 2].tolist()
            assert stop - begin == -(-tokens // 8)
            own = layout.block_table[row, : stop - begin]
            assert pages.indices[begin:stop].tolist() == own.tolist()
            assert (stop - begin - 1) * 8 + int(pages.last_page_len[row - first]) == tokens
            query_start = pages.query_start
            assert int(query_start[row - first + 1] - query_start[row - first]) == queries
        assert int(pages.indptr[-1]) == len(pages.indices)
        assert pages.indices.dtype == torch.int32
