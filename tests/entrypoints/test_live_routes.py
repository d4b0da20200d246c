"""Pauses and weight updates over HTTP, as clients of vLLM and SGLang ask for them."""

from __future__ import annotations

import dataclasses
import json
import pickle
import socket
import sys
import threading
import types
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from serving import Server, engine_config, running, save_random

from jackfield.core.live.worker_jobs import SharedTensor
from jackfield.core.parallel.broadcast import BroadcastGroup
from jackfield.core.worker import shared_tensors
from jackfield.entrypoints.http.auth.api_keys import PREFIX, digest_of
from jackfield.entrypoints.http.options import ServerOptions

COMPLETION = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
POSTS = (
    "/pause", "/resume", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine",
    "/start_weight_update", "/update_weights", "/finish_weight_update", "/abort_weight_update",
    "/update_weight_version", "/pause_generation", "/continue_generation", "/flush_cache",
    "/collective_rpc", "/sleep", "/wake_up", "/release_memory_occupation",
    "/resume_memory_occupation",
    "/begin_weight_update", "/end_weight_update", "/update_weights_from_disk",
    "/init_weights_update_group", "/destroy_weights_update_group",
    "/update_weights_from_distributed", "/update_weights_from_tensor",
)  # fmt: skip
GETS = ("/is_paused", "/weight_info", "/get_world_size", "/is_sleeping", "/memory_report")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and other weights of the same model."""
    root = tmp_path_factory.mktemp("models")
    old, new = save_random(root / "old"), save_random(root / "new")
    torch.manual_seed(1)
    tensors = load_file(old / "model.safetensors")
    changed = {name: t + 0.05 * torch.randn_like(t) for name, t in tensors.items()}
    save_file(changed, new / "model.safetensors", metadata={"format": "pt"})
    return old, new


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[Server]:
    config = engine_config(folders[0], device="cpu", max_model_len=256, num_gpu_blocks_override=100)
    with running(config, ServerOptions(enable_admin=True)) as started:
        yield started


def post(server: Server, path: str, body: Any = None, **more: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=120, **more)
    assert response.status_code == 200, response.text
    return response.json()


def get(server: Server, path: str) -> Any:
    return httpx.get(server.url + path, timeout=60).json()


def said(server: Server) -> str:
    return str(post(server, "/v1/completions", COMPLETION)["choices"][0]["text"])


@pytest.fixture
def texts(server: Server, folders: tuple[Path, Path]) -> Iterator[tuple[str, str]]:
    """What both weights say; the old ones serve, before and afterwards."""
    old = said(server)
    post(server, "/update_weights_from_disk", {"model_path": str(folders[1])})
    new = said(server)
    post(server, "/update_weights_from_disk", {"model_path": str(folders[0])})
    assert said(server) == old != new
    yield old, new
    post(server, "/resume")
    post(server, "/update_weights_from_disk", {"model_path": str(folders[0])})


def test_tensors_are_posted_between_start_and_finish(
    server: Server, folders: tuple[Path, Path], texts: tuple[str, str]
) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    names = sorted(tensors)
    buckets = [names[::2], names[1::2]]
    post(server, "/start_weight_update")
    for bucket in buckets:
        body = save({name: tensors[name] for name in bucket})
        headers = {"Content-Type": "application/octet-stream"}
        response = httpx.post(server.url + "/update_weights", content=body, headers=headers)
        assert response.status_code == 200, response.text
        assert said(server) == texts[0], "the old weights serve until the end"
    answer = post(server, "/finish_weight_update", {"weight_version": "step-1"})
    assert answer["weights_version"] == "step-1" and answer["num_tensors"] == len(names)
    assert get(server, "/weight_info") == {"weight_version": "step-1"}
    assert said(server) == texts[1]
    assert post(server, "/update_weight_version", {"new_version": "x"})["success"]
    assert get(server, "/weight_info") == {"weight_version": "x"}


def test_trl_generates_and_updates(
    server: Server, folders: tuple[Path, Path], texts: tuple[str, str]
) -> None:
    """What TRL 1.16's `VLLMClient` sends, recorded; tests/entrypoints/test_trl.py runs itself."""
    [card] = get(server, "/v1/models")["data"]
    assert get(server, "/server_info?config_format=json")["vllm_config"]["weight_transfer_config"]
    old, tensors = (load_file(folder / "model.safetensors") for folder in folders)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    info = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "packed": True,
        "world_size": get(server, "/get_world_size")["world_size"] + 1,
    }  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(post, server, "/init_weight_transfer_engine", {"init_info": info})
        group = BroadcastGroup("127.0.0.1", port, 0, 2, torch.device("cpu"), packed_bytes=1 << 30)
        joined.result()
        post(server, "/start_weight_update", {})
        announced = {
            "names": list(tensors), "shapes": [list(t.shape) for t in tensors.values()],
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        }  # fmt: skip
        received = pool.submit(post, server, "/update_weights", {"update_info": announced})
        group.send(tensors.items())
        received.result()
    post(server, "/finish_weight_update", {})
    assert post(server, "/reset_prefix_cache") == {"success": True}
    assert said(server) == texts[1]
    # vLLM's own trainer says what it sends the first time alone.
    with ThreadPoolExecutor(1) as pool:
        post(server, "/start_weight_update", {})
        received = pool.submit(post, server, "/update_weights", {"update_info": {}})
        group.send((name, old[name]) for name in tensors)
        received.result()
    post(server, "/finish_weight_update", {})
    assert said(server) == texts[0]
    body = {
        "model": card["id"], "prompt": [[5, 6, 7], [8, 9]], "return_token_ids": True,
        "return_tokens_as_token_ids": True, "n": 2, "repetition_penalty": 1.0, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 6, "logprobs": 0,
    }  # fmt: skip
    choices = post(server, "/v1/completions", body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6, 7]] * 2 + [[8, 9]] * 2
    for choice in choices:
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert len(choice["logprobs"]["token_logprobs"]) == len(names)
    group.close()
    post(server, "/shutdown_weight_transfer_engine")


@pytest.mark.parametrize(
    ("info", "field"),
    [
        ({"master_address": "127.0.0.1", "world_size": 2}, "master_address"),
        ({"master_address": "127.0.0.1", "master_port": 1}, "world_size"),
        ({"nccl_unique_id_b64": "AAAA", "world_size": 2}, "nccl_unique_id_b64"),
        ({"nccl_unique_id_b64": "A", "master_port": 1, "world_size": 2}, "nccl_unique_id_b64"),
        # A number of NCCL's, where there is none.
        ({"nccl_unique_id_b64": b64encode(bytes(128)).decode(), "world_size": 2}, "gloo"),
    ],
)  # fmt: skip
def test_groups_that_make_no_sense_are_refused(
    info: dict[str, Any], field: str, server: Server
) -> None:
    body = {"init_info": info}
    refused = httpx.post(server.url + "/init_weight_transfer_engine", json=body, timeout=60)
    assert refused.status_code == 400 and field in refused.text


# ---------------------------------------------------------------- handles of device memory


@pytest.fixture
def device_memory(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, torch.Tensor]:
    """What handles refer to, in place of a GPU's memory: bytes."""
    memory: dict[bytes, torch.Tensor] = {}

    def open_tensor(place: SharedTensor, device: torch.device) -> torch.Tensor:
        dtype = getattr(torch, place.dtype)
        return memory[place.handle].view(dtype).as_strided(
            place.shape, place.strides, place.offset
        )  # fmt: skip

    monkeypatch.setattr(shared_tensors, "open_tensor", open_tensor)
    return memory


def handle_of(tensor: torch.Tensor, memory: dict[bytes, torch.Tensor]) -> tuple[Any, ...]:
    """What `reduce_tensor` of torch returns for a CUDA tensor, without its function."""
    handle = b"\x01" + len(memory).to_bytes(63, "little")
    memory[handle] = tensor.reshape(-1).view(torch.uint8)
    storage = tensor.untyped_storage()
    return (
        torch.Tensor, tensor.shape, tensor.stride(), 0, type(storage), tensor.dtype, 3, handle,
        storage.nbytes(), 0, False, b"/counter", 0, b"\x02" * 64, True,
    )  # fmt: skip


def encoded(content: Any) -> str:
    return b64encode(pickle.dumps(content)).decode()


def announced_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors), "shapes": [list(t.shape) for t in tensors.values()],
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
    }  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_vllms_handles_are_opened(
    packed: bool, server: Server, folders: tuple[Path, Path], texts: tuple[str, str],
    device_memory: dict[bytes, torch.Tensor],
) -> None:  # fmt: skip
    """In two calls, as its trainer engine for `ipc` makes them."""
    tensors = load_file(folders[1] / "model.safetensors")
    names = list(tensors)
    post(server, "/init_weight_transfer_engine", {"init_info": {"packed": packed}})
    post(server, "/start_weight_update")
    for some in (names[:3], names[3:]):
        chunk = {name: tensors[name] for name in some}
        info = announced_of(chunk)
        if packed:
            flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in chunk.values()])
            # The buffer is longer than what is in it.
            handles: Any = {"cpu": handle_of(torch.cat([flat, flat[:100]]), device_memory)}
            info["tensor_sizes"] = [t.nbytes for t in chunk.values()]
        else:
            handles = [{"cpu": handle_of(t, device_memory)} for t in chunk.values()]
        info["ipc_handles_pickled"] = encoded(handles)
        post(server, "/update_weights", {"update_info": info})
        assert said(server) == texts[0]
    post(server, "/finish_weight_update")
    assert said(server) == texts[1]


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_sglangs_handles_are_opened(
    load_format: str | None, server: Server, folders: tuple[Path, Path], texts: tuple[str, str],
    device_memory: dict[bytes, torch.Tensor], sglang_metadata: Any,
) -> None:  # fmt: skip
    tensors = load_file(folders[1] / "model.safetensors")
    if load_format is None:
        content: Any = [(name, handle_of(t, device_memory)) for name, t in tensors.items()]
    else:
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors.values()])
        metadata, end = [], 0
        for name, tensor in tensors.items():
            metadata.append(
                sglang_metadata(name, tensor.shape, tensor.dtype, end, end + tensor.nbytes)
            )
            end += tensor.nbytes
        content = {"flattened_tensor": handle_of(flat, device_memory), "metadata": metadata}
    body = {"serialized_named_tensors": [encoded(content)], "load_format": load_format}
    refused = httpx.post(server.url + "/update_weights_from_tensor", json=body)
    assert refused.status_code == 400 and "begin another one" in refused.json()["message"]
    post(server, "/begin_weight_update")
    assert post(server, "/update_weights_from_tensor", body)["success"]
    assert said(server) == texts[0]
    assert post(server, "/end_weight_update", {"weight_version": "9"})["weight_version"] == "9"
    assert said(server) == texts[1]


@pytest.fixture
def sglang_metadata(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's class of a tensor in a bucket, where it has it."""
    module: Any = types.ModuleType("sglang.srt.weight_sync.tensor_bucket")

    @dataclasses.dataclass
    class FlattenedTensorMetadata:
        name: str
        shape: torch.Size
        dtype: torch.dtype
        start_idx: int
        end_idx: int

    FlattenedTensorMetadata.__module__ = module.__name__
    FlattenedTensorMetadata.__qualname__ = "FlattenedTensorMetadata"
    module.FlattenedTensorMetadata = FlattenedTensorMetadata
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return FlattenedTensorMetadata


def test_handles_that_do_not_fit_leave_the_old_weights(
    server: Server, folders: tuple[Path, Path], texts: tuple[str, str],
    device_memory: dict[bytes, torch.Tensor],
) -> None:  # fmt: skip
    tensors = load_file(folders[1] / "model.safetensors")
    name, tensor = next(iter(tensors.items()))
    info = announced_of({name: tensor})
    good, small = handle_of(tensor, device_memory), handle_of(tensor[:1], device_memory)
    half = handle_of(tensor[:2].reshape(-1).view(torch.uint8), device_memory)
    for changes, said_of_it in (
        ({"ipc_handles_pickled": encoded([{"cpu": small}])}, "its handle is one of"),
        ({"ipc_handles_pickled": encoded([{"GPU-1": good}])}, "no handle for rank 0"),
        ({"ipc_handles_pickled": encoded({"cpu": half}), "tensor_sizes": [tensor.nbytes]},
         "its tensors have"),
        ({"ipc_handles_pickled": encoded([])}, "no list of 1 tensors' handles"),
        ({"ipc_handles_pickled": encoded([{"cpu": good[:-1]}])}, "does not have 15 values"),
        ({"ipc_handles_pickled": "@"}, "no base64"),
        ({"ipc_handles_pickled": encoded([print])}, "it names builtins.print"),
    ):  # fmt: skip
        post(server, "/start_weight_update")
        body = {"update_info": {**info, **changes}}
        refused = httpx.post(server.url + "/update_weights", json=body)
        assert refused.status_code == 400 and said_of_it in refused.text, refused.text
        httpx.post(server.url + "/abort_weight_update")  # Given up already, if ranks refused it.
        assert said(server) == texts[0]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_tensors_come_from_a_group(
    dialect: str, server: Server, folders: tuple[Path, Path], texts: tuple[str, str]
) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    names, shapes = list(tensors), [list(t.shape) for t in tensors.values()]
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors.values()]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    done = threading.Event()

    def train() -> None:
        group = BroadcastGroup("127.0.0.1", port, 0, 2, torch.device("cpu"))
        group.send(tensors.items())
        done.wait(60)
        group.close()

    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
    assert get(server, "/get_world_size") == {"world_size": 1}
    with ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(train)
        if dialect == "vllm":
            info = {**address, "world_size": 2}
            post(server, "/init_weight_transfer_engine", {"init_info": info})
            assert post(server, "/pause", params={"mode": "keep"})["status"] == "paused"
            post(server, "/start_weight_update")
            update = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            post(server, "/update_weights", {"update_info": update})
            post(server, "/finish_weight_update")
            assert post(server, "/resume")["status"] == "resumed"
            post(server, "/shutdown_weight_transfer_engine")
        else:
            group = {**address, "world_size": 2, "group_name": "weights", "backend": "gloo"}
            assert post(server, "/init_weights_update_group", group)["success"]
            assert post(server, "/pause_generation", {"mode": "retract"})["is_paused"]
            assert post(server, "/begin_weight_update")["success"]
            update = {"names": names, "dtypes": dtypes, "shapes": shapes}
            assert post(server, "/update_weights_from_distributed", update)["success"]
            end = {"weight_version": "7", "abort_all_requests": True}
            assert post(server, "/end_weight_update", end)["weight_version"] == "7"
            assert post(server, "/continue_generation")["status"] == "ok"
            assert post(server, "/destroy_weights_update_group", {})["success"]
        done.set()
        trainer.result(60)
    assert said(server) == texts[1]


def test_answers_say_which_weights_sampled_them(server: Server) -> None:
    post(server, "/update_weight_version", {"new_version": "first"})
    asked = {"return_weight_versions": True}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "ignore_eos": True}
    want = [{"version": "first", "start": 0, "end": 6}]
    [choice] = post(server, "/v1/chat/completions", {**chat, **asked})["choices"]
    assert choice["weight_versions"] == want
    [choice] = post(server, "/v1/chat/completions", chat)["choices"]
    assert "weight_versions" not in choice
    completion = {**COMPLETION, "max_tokens": 6}
    [choice] = post(server, "/v1/completions", {**completion, **asked})["choices"]
    assert choice["weight_versions"] == want
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
        body = {**body, **asked, "stream": True, "max_tokens": 150}
        with httpx.stream("POST", server.url + path, json=body, timeout=60) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
            for _ in range(3):
                next(lines)
            post(server, "/update_weight_version", {"new_version": "second"})
            choices = [json.loads(line[6:])["choices"][0] for line in lines]
        *others, last = choices
        assert not any("weight_versions" in choice for choice in others)
        first, second = last["weight_versions"]
        assert (first["version"], second["version"]) == ("first", "second")
        assert first["start"] == 0 < first["end"] == second["start"] < second["end"] == 150
        post(server, "/update_weight_version", {"new_version": "first"})


def test_a_refused_update_says_so(server: Server, tmp_path: Path, texts: tuple[str, str]) -> None:
    body = {"model_path": str(tmp_path / "nowhere")}
    response = httpx.post(server.url + "/update_weights_from_disk", json=body)
    assert response.status_code == 400
    assert not response.json()["success"] and "no folder" in response.json()["message"]
    for path in ("x" * 5000, "~nobody-here/x"):
        response = httpx.post(server.url + "/update_weights_from_disk", json={"model_path": path})
        assert response.status_code == 400 and "no folder" in response.json()["message"]
    post(server, "/start_weight_update")
    assert httpx.post(server.url + "/start_weight_update").status_code == 409
    headers = {"Content-Type": "application/octet-stream"}
    for content, reason in (
        (b"\xff" * 20, "ends within its header"),
        (b"\x02" + bytes(7) + b"{}..", "0 bytes of tensors, and there are 2"),
        (save({"nothing": torch.zeros(2)}), "unexpected tensor 'nothing'"),
    ):
        response = httpx.post(server.url + "/update_weights", content=content, headers=headers)
        assert response.status_code == 400 and reason in response.json()["error"]["message"]
    assert httpx.post(server.url + "/finish_weight_update").status_code == 404
    post(server, "/start_weight_update")
    post(server, "/abort_weight_update")
    update = {"names": ["a"], "dtype_names": [], "shapes": [[1]]}
    response = httpx.post(server.url + "/update_weights", json={"update_info": update})
    assert response.status_code == 400 and response.json()["error"]["param"] == "names"
    assert said(server) == texts[0]


def test_new_requests_are_told_when_to_come_again(server: Server) -> None:
    assert get(server, "/is_paused") == {"is_paused": False}
    state = post(server, "/pause", params={"mode": "abort", "lease": 20})
    assert state["mode"] == "abort" and state["lease"] <= 20
    assert get(server, "/is_paused") == {"is_paused": True}
    refused = httpx.post(server.url + "/v1/completions", json=COMPLETION)
    assert refused.status_code == 503 and 0 < int(refused.headers["Retry-After"]) <= 20
    post(server, "/resume")
    assert post(server, "/pause", params={"lease": "none"})["lease"] is None
    post(server, "/continue_generation")
    said(server)
    for query, field in (("mode=soft", "mode"), ("lease=x", "lease"), ("clear_cache=y", "clear")):
        refused = httpx.post(f"{server.url}/pause?{query}")
        assert refused.status_code == 400 and field in refused.json()["error"]["message"]


def test_a_server_sleeps_and_wakes(server: Server) -> None:
    want = said(server)
    answer = post(server, "/sleep", params={"level": 2})
    assert answer["status"] == "sleeping" and answer["freed_bytes"] > 0
    assert get(server, "/is_sleeping") == {"is_sleeping": True}
    refused = httpx.post(server.url + "/v1/completions", json=COMPLETION)
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
    assert httpx.post(server.url + "/resume").status_code == 409
    assert post(server, "/wake_up", params={"tags": "weights"})["status"] == "sleeping"
    assert post(server, "/wake_up", params={"tags": ["kv_cache"]})["status"] == "awake"
    assert said(server) == want
    assert post(server, "/release_memory_occupation", {"tags": ["kv_cache"]})["is_sleeping"]
    assert not post(server, "/resume_memory_occupation", {})["is_sleeping"]
    assert said(server) == want
    assert {each["owner"] for each in get(server, "/memory_report")["memory"]} >= {"weights"}
    refused = httpx.post(server.url + "/collective_rpc", json={"method": "stop"})
    assert refused.status_code == 400 and "no part offers 'stop'" in refused.text
    for query in ("level=3", "tags=graphs", "level=1&tags=weights"):
        assert httpx.post(f"{server.url}/sleep?{query}").status_code == 400, query


def test_the_cache_is_flushed_unless_in_use(server: Server) -> None:
    body = {**COMPLETION, "max_tokens": 200, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert httpx.post(server.url + "/flush_cache").status_code == 400
        again = "/reset_prefix_cache?reset_running_requests=true"
        assert httpx.post(server.url + again).status_code == 200
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert httpx.post(server.url + "/flush_cache").text == "Cache flushed.\n"


def test_state_is_changed_by_posts_of_those_who_may(
    folders: tuple[Path, Path], server: Server, tmp_path: Path
) -> None:
    for path in POSTS:
        assert httpx.get(server.url + path).status_code == 405, path
    keys = tmp_path / "keys.jsonl"
    rights: dict[str, dict[str, Any]] = {"ann": {}, "bob": {"manages_engine": True}}
    keys.write_text("\n".join(key_line(name, **given) for name, given in rights.items()))
    options = ServerOptions(enable_admin=True, api_key_files=(keys,), api_keys=("plain",))
    with running(engine_config(folders[0], device="cpu"), options) as guarded:

        def status(method: str, path: str, key: str, body: Any = None) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            response = httpx.request(method, guarded.url + path, headers=headers, json=body)
            return response.status_code

        for method, path in (*(("POST", path) for path in POSTS), *(("GET", p) for p in GETS)):
            assert status(method, path, "") == 401, path
            assert status(method, path, "ann") == 403, path
        for key in ("bob", "plain"):
            assert status("GET", "/is_paused", key) == 200
            assert status("POST", "/pause", key) == status("POST", "/resume", key) == 200
        again = {"reset_running_requests": True}
        assert status("POST", "/reset_prefix_cache", "ann", again) == 403
        assert status("POST", "/reset_prefix_cache", "ann") == 200
        assert status("POST", "/reset_prefix_cache", "bob", again) == 200


def key_line(name: str, **rights: Any) -> str:
    return json.dumps({"name": name, "digest": PREFIX + digest_of(name).hex(), **rights})


# ---------------------------------------------------------------- options in the body


def test_options_are_taken_from_the_query_or_the_body(server: Server) -> None:
    for more in (
        {"json": {"mode": "keep", "clear_cache": False, "lease": 90}},
        {"params": {"mode": "keep", "clear_cache": "false", "lease": "90"}},
        {"params": {"mode": "keep"}, "json": {"lease": 90}},
    ):
        answer = httpx.post(server.url + "/pause", timeout=60, **more).json()
        assert answer["mode"] == "keep" and answer["lease"] <= 90.0  # What is left of it.
    assert post(server, "/pause", {"lease": "none"})["lease"] is None
    assert post(server, "/pause_generation", {"lease": "none"})["lease"] is None
    post(server, "/resume", {})
    answer = post(server, "/sleep", {"level": 2.0, "mode": "wait", "tags": ["kv_cache"]})
    assert answer["level"] == 2 and answer["asleep"] == ["kv_cache"] and answer["mode"] == "wait"
    assert post(server, "/wake_up", {"tags": ["kv_cache"]})["tags"] == ["kv_cache"]
    post(server, "/continue_generation", {"torch_empty_cache": True})
    post(server, "/start_weight_update", {"lease": 90, "is_checkpoint_format": True})
    post(server, "/abort_weight_update", {})
    post(server, "/begin_weight_update", {"selector": "target"})
    post(server, "/abort_weight_update", {})
    assert post(server, "/reset_prefix_cache", {"reset_running_requests": True})["success"]
    assert not get(server, "/is_paused")["is_paused"]


WITH_OPTIONS = (
    "/pause", "/resume", "/sleep", "/wake_up", "/continue_generation", "/flush_cache",
    "/start_weight_update", "/begin_weight_update", "/abort_weight_update",
    "/shutdown_weight_transfer_engine", "/reset_prefix_cache", "/compact_kv_cache",
)  # fmt: skip


@pytest.mark.parametrize("path", WITH_OPTIONS)
def test_a_body_is_never_ignored(server: Server, path: str) -> None:
    refused = httpx.post(server.url + path, json={"modes": "keep"})
    assert refused.status_code == 400 and "modes: is no option of this route" in refused.text
    refused = httpx.post(server.url + path, content=b"mode=keep")
    assert refused.status_code in (400, 415) and "Content-Type" in refused.text
    refused = httpx.post(server.url + path, json=["keep"])
    assert refused.status_code == 400 and "must be a JSON object" in refused.text
    assert not get(server, "/is_paused")["is_paused"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/pause", {"mode": "now"}, "mode"),
        ("/pause", {"mode": 1}, "mode"),
        ("/pause", {"clear_cache": "no"}, "clear_cache"),
        ("/pause", {"lease": "soon"}, "lease"),
        ("/pause", {"lease": -1}, "lease"),
        ("/pause?mode=keep", {"mode": "keep"}, "mode"),
        ("/pause?lease=nan", None, "lease"),
        ("/pause?lease=1e999", None, "lease"),
        ("/pause_generation", {"lease": "soon"}, "lease"),
        ("/sleep", {"level": 3}, "level"),
        ("/sleep", {"level": True}, "level"),
        ("/sleep", {"tags": "weights"}, "tags"),
        ("/sleep", {"tags": ["all"]}, "tags"),
        ("/wake_up", {"tags": []}, "tags"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/begin_weight_update", {"selector": "draft"}, "selector"),
        ("/reset_prefix_cache", {"reset_running_requests": "yes"}, "reset_running_requests"),
        ("/reset_prefix_cache?reset_running_requests=yes", None, "reset_running_requests"),
        ("/start_profile", {"num_steps": 5}, "num_steps"),
        ("/collective_rpc", {"method": "x", "timeout": 0}, "timeout"),
        ("/collective_rpc", {"method": "x", "timeout": -1.5}, "timeout"),
        ("/update_weight_version", {"new_version": ""}, "new_version"),
        ("/update_weights_from_disk", {"model_path": ""}, "model_path"),
        (
            "/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "\n"},
            "weight_version",
        ),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_by_name(
    server: Server, path: str, body: dict[str, Any] | None, field: str
) -> None:
    refused = httpx.post(server.url + path, json=body, timeout=60)
    assert refused.status_code == 400
    answer = refused.json()  # SGLang's have no `param`.
    assert answer["error"]["param"] == field if "error" in answer else field in answer["message"]
    assert not get(server, "/is_paused")["is_paused"]
