"""The dashboard in examples/grafana: every query finds its metrics, and their labels, on a live
server."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import prometheus_client.parser
import pytest

import jackfield
from jackfield import AsyncEngine, EngineConfig
from jackfield.entrypoints.server.listen import Listen
from jackfield.entrypoints.server.server import listening

BOARD = Path(jackfield.__file__).resolve().parent / "examples/grafana/jackfield.json"
PROMPT = "The same long prompt, twice, so that its blocks are found the second time. " * 3


def queries(node: Any) -> Iterator[str]:
    """All PromQL of a dashboard."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query") and isinstance(value, str) and value != "prometheus":
                yield value
            else:
                yield from queries(value)
    elif isinstance(node, list):
        for value in node:
            yield from queries(value)


async def samples() -> tuple[dict[str, set[str]], dict[tuple[str, str], float], dict[str, Any]]:
    """Names of samples with their labels, values by name and last label, and the second usage."""
    config = EngineConfig(device="cpu", max_model_len=512, num_gpu_blocks_override=100)
    async with AsyncEngine(config) as engine, listening(engine, Listen(port=0)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for _ in range(2):
                body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
                usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            text = (await client.get("/metrics")).text
    labels: dict[str, set[str]] = defaultdict(set)
    values = {}
    for family in prometheus_client.parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels[sample.name] |= sample.labels.keys()
            last = next(reversed(sample.labels.values()), "")
            values[sample.name, last] = sample.value
    return labels, values, usage


@pytest.mark.asyncio
async def test_every_query_finds_its_metrics_which_count_what_usage_says() -> None:
    board = json.loads(BOARD.read_text())
    labels, values, usage = await samples()
    texts = list(queries(board))
    assert len(texts) > 30
    for text in texts:
        names = re.findall(r"(?:jackfield:|http_)\w+", text)
        assert names, text
        for name in names:
            assert name in labels, f"{name} of {text!r} is not in /metrics"
        used = re.findall(r"(\w+)=~?\"", text)
        used += [word for by in re.findall(r"by \((.*?)\)", text) for word in by.split(", ")]
        for label in used:
            assert all(label in labels[name] for name in names), f"{label} of {text!r}"
    # Of two equal prompts the second is found but for what has to be computed.
    num_prompt, num_cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < num_cached < num_prompt
    of = "jackfield:prompt_tokens_by_source_total"
    assert values[of, "local_cache_hit"] == num_cached
    assert values[of, "local_compute"] == 2 * num_prompt - num_cached
    assert values[of, "external_kv_transfer"] == 0
    assert [v for (n, _), v in values.items() if n == "jackfield:prompt_tokens_cached_total"] == [
        num_cached
    ]
    sums = {n: v for (n, _), v in values.items() if n.endswith(("_sum", "_count"))}
    computed = sums["jackfield:request_prefill_kv_computed_tokens_sum"]
    assert computed == 2 * num_prompt - num_cached
    assert sums["jackfield:request_max_num_generation_tokens_sum"] == 8
    assert sums["jackfield:request_num_preemptions_count"] == 2
    assert sums["http_request_duration_seconds_count"] == 2
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
