"""Pictures given as embeddings: what an encoder returns for them says what their pixels say."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from seeing_models import FAMILIES, picture, save
from serving import Server, running

from jackfield import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from jackfield.core.errors import InvalidRequest
from jackfield.plugins.conformance.media import MediaModelKit

FIELDS = {
    "LlavaForConditionalGeneration": (),
    "Gemma3ForConditionalGeneration": (),
    "Mistral3ForConditionalGeneration": ("image_sizes",),
    "Qwen3VLForConditionalGeneration": ("image_grid_thw",),
}
"""Sizes of which a family's embeddings are given with."""
QWEN = "Qwen3VLForConditionalGeneration"
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PICTURES = [picture(1), picture(2, 60, 110)]


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device="cpu", dtype="float32", block_size=4, max_model_len=400,
        num_gpu_blocks_override=400, max_num_batched_tokens=40, enable_mm_embeds=True, **options,
    )  # fmt: skip


def kit_of(architecture: str) -> Any:
    return type("Kit", (MediaModelKit,), {"name": architecture})


def rows_of(architecture: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return what a family's encoder returns for the pictures, with their sizes."""
    from jackfield.core.engine.resolve_config import resolve_config, resolve_runner
    from jackfield.core.loading.build import build_model
    from jackfield.core.loading.model_config import resolve_model_config
    from jackfield.core.nn.operations import Operations

    kit = kit_of(architecture)
    given, plugins = EngineConfig(model=str(folder), device="cpu", dtype="float32"), kit.plugins()
    config = resolve_config(given, plugins)
    config, model_config = resolve_runner(
        given, config, resolve_model_config(config, plugins), plugins
    )
    with torch.inference_mode():
        model: Any = build_model(plugins, config, model_config, torch.device("cpu"), Operations())
    processor = kit.registered().processor(kit.setup_of(model_config), "image")
    items = [processor.image(one) for one in PICTURES]
    outputs = kit.encode(model.media, *items)
    sizes = {
        name: torch.from_numpy(np.concatenate([item.tensors[name] for item in items]))
        for name in FIELDS[architecture]
    }
    return {"image_embeds": torch.cat(outputs), "counts": torch.tensor(list(map(len, outputs))),
            **sizes}  # fmt: skip


async def said(engine: AsyncEngine, written: str, images: Any) -> RequestOutput:
    prompt: Any = {
        "prompt": f"See {written} and {written}, please.", "multi_modal_data": {"image": images},
    }  # fmt: skip
    return [output async for output in engine.generate(prompt, PARAMS)][-1]


@pytest.mark.parametrize("architecture", FIELDS)
async def test_an_encoders_output_says_what_the_pixels_say(
    architecture: str, tmp_path: Path
) -> None:
    save(architecture, tmp_path)
    given = rows_of(architecture, tmp_path)
    counts = given.pop("counts").tolist()
    written = FAMILIES[architecture].written
    parts = given["image_embeds"].split(counts)
    async with AsyncEngine(config_of(tmp_path)) as engine:
        by_pixels = await said(engine, written, PICTURES)
        if FIELDS[architecture]:
            forms: list[Any] = [given, [
                {"image_embeds": part, FIELDS[architecture][0]: given[FIELDS[architecture][0]][n]}
                for n, part in enumerate(parts)
            ]]  # fmt: skip
        else:
            forms = [list(parts), torch.stack(parts)]
        for form in forms:
            output = await said(engine, written, form)
            assert output.prompt_token_ids == by_pixels.prompt_token_ids
            assert output.outputs[0].token_ids == by_pixels.outputs[0].token_ids
        count = len(output.prompt_token_ids or ())
        assert output.num_cached_tokens == (count - 1) // 4 * 4, "the same rows are found"
        other = [{**one, "image_embeds": one["image_embeds"] + 1} for one in form] if isinstance(
            form, list) else form + 1  # fmt: skip
        output = await said(engine, written, other)
        assert output.num_cached_tokens is not None and output.num_cached_tokens < 8
        assert output.outputs[0].token_ids != by_pixels.outputs[0].token_ids


# ---------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    save(QWEN, folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running(config_of(folder, limit_mm_per_prompt={"image": 2})) as server:
        yield server


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the first picture."""
    given = rows_of(QWEN, folder)
    count = int(given["counts"][0])
    return {
        "image_embeds": given["image_embeds"][:count], "image_grid_thw": given["image_grid_thw"][0],
    }  # fmt: skip


def by_torch(tensor: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def by_numpy(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    np.save(file, tensor.numpy())
    return file.getvalue()


def by_safetensors(tensor: torch.Tensor) -> bytes:
    return safetensors.torch.save({"tensor": tensor.contiguous()})


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def chat(server: Server, part: Any, route: str = "/v1/chat/completions") -> httpx.Response:
    content = [{"type": "text", "text": "What is "}, part, {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    return httpx.post(f"{server.url}{route}", json=body, timeout=60)


def test_chats_take_them_in_every_form(server: Server, rows: dict[str, torch.Tensor]) -> None:
    file = io.BytesIO()
    PICTURES[0].save(file, "PNG")
    url = f"data:image/png;base64,{text_of(file.getvalue())}"
    want = chat(server, {"type": "image_url", "image_url": {"url": url}}).json()
    for write in (by_torch, by_numpy, by_safetensors):
        value = {name: text_of(write(tensor)) for name, tensor in rows.items()}
        part = {"type": "image_embeds", "image_embeds": value}
        answer = chat(server, part).json()
        assert answer["choices"][0]["message"] == want["choices"][0]["message"]
        assert answer["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
        assert chat(server, part, "/tokenize").json()["count"] == want["usage"]["prompt_tokens"]


class Trap:
    """What a pickle may call."""

    def __reduce__(self) -> Any:
        return print, ("called",)


def lying_header() -> bytes:
    """A file of NumPy that says it has a terabyte."""
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 38,), }".replace(
        b"1 << 38", str(1 << 38).encode()
    )
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head


GRID = torch.tensor([1, 4, 6])
WIDTH = 192
"""Of a row with two levels."""
BAD: list[tuple[Any, Any, str, str]] = [
    (torch.zeros(6, WIDTH), None, "", "image_grid_thw is missing"),
    (None, GRID, ".image_embeds", "is missing"),
    (torch.zeros(6, 64), GRID, ".image_embeds", rf"\[num_tokens, {WIDTH}\]"),
    (torch.zeros(6, WIDTH).long(), GRID, ".image_embeds", "must be of one of the types"),
    (torch.zeros(6, WIDTH).index_fill(0, torch.tensor(4), torch.nan), GRID, ".image_embeds",
     "row 4 has numbers that are not finite"),
    (torch.zeros(6, WIDTH).fill_(torch.inf), GRID, ".image_embeds", "row 0"),
    (torch.zeros(7, WIDTH), GRID, "", "says 6 rows, and there are 7"),
    (torch.zeros(6, WIDTH), -GRID, "", "sizes begin with 1"),
    (torch.zeros(6, WIDTH), GRID * 1.0, "", "whole numbers"),
    (torch.zeros(6, WIDTH), GRID.expand(2, 3), "", "says 12 rows"),
    (torch.zeros(12, WIDTH), GRID.expand(2, 3), ".image_embeds", "is one item, not 2"),
    (torch.zeros(6, WIDTH), GRID * (1 << 40), "", "rows, and there are 6"),
    (torch.zeros(1, WIDTH).expand(1 << 30, WIDTH), GRID, ".image_embeds", "in the file"),
    (Trap(), GRID, ".image_embeds", "is no tensor that torch.save wrote"),
    (b"x", GRID, ".image_embeds", "is no tensor that torch.save, numpy.save or"),
    (lying_header(), GRID, ".image_embeds", "is no tensor that numpy.save wrote"),
    (b"\xff" * 8 + b"{}", GRID, ".image_embeds", "must be one tensor"),
    (safetensors.torch.save({"a": GRID, "b": -GRID}), GRID, ".image_embeds", "one tensor, not 2"),
    (torch.zeros(6, WIDTH), torch.ones(5000, 3).long(), ".image_grid_thw", "more than 3072"),
]  # fmt: skip


@pytest.mark.parametrize(("embeds", "grid", "field", "words"), BAD, ids=range(len(BAD)))
def test_what_is_no_item_is_refused_with_the_name_of_its_part(
    server: Server, embeds: Any, grid: Any, field: str, words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    value = {
        name: text_of(tensor if isinstance(tensor, bytes) else by_torch(tensor))
        for name, tensor in (("image_embeds", embeds), ("image_grid_thw", grid))
        if tensor is not None
    }
    response = chat(server, {"type": "image_embeds", "image_embeds": value})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == f"messages[0].content[1].image_embeds{field}"
    with pytest.raises(InvalidRequest, match=words):
        raise InvalidRequest(error["message"])
    assert "called" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, 3, [], "!", {"other": "x"}, {}])
def test_garbage_is_refused_by_name(server: Server, value: Any) -> None:
    response = chat(server, {"type": "image_embeds", "image_embeds": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages[0].content[1].image_embeds")


async def test_more_items_than_a_prompt_may_have(
    folder: Path, rows: dict[str, torch.Tensor]
) -> None:
    """Also of one tensor; and none where they are not enabled."""
    two = {
        "image_embeds": rows["image_embeds"].repeat(2, 1),
        "image_grid_thw": rows["image_grid_thw"].repeat(2, 1),
    }
    written = FAMILIES[QWEN].written
    async with AsyncEngine(config_of(folder, limit_mm_per_prompt={"image": 1})) as engine:
        with pytest.raises(InvalidRequest, match="at most 1 of image"):
            await said(engine, written, two)
    plain = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=50
    )
    async with AsyncEngine(plain) as engine:
        with pytest.raises(InvalidRequest, match="--enable-mm-embeds") as refused:
            await said(engine, written, two)
        assert refused.value.param == "multi_modal_data.image"
