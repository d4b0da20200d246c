"""`jackfield pull`, `list`, `rm`, `alias`, against a hub and an object store on this machine that
break off and lie."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
from model_servers import COMMIT, OTHER, REPO, S3, Hub, ModelScope, Stored, served

from jackfield import LLM, SamplingParams
from jackfield.core.errors import CheckpointNotFound, ConfigError, LoadError
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.models import object_store
from jackfield.entrypoints.models.names import find_model

URL = "s3://bucket/models/tiny"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return EMBEDDED_MODEL


# ---------------------------------------------------------------- the hub


class Commands:
    """Runs commands with a cache of their own, in a process each: huggingface_hub, which no fork
    server has imported, reads its variables then."""

    def __init__(self, folder: Path, hub: Stored) -> None:
        self.folder = folder
        self.hub = hub

    def run(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": self.hub.url,
            "HF_HUB_CACHE": str(self.folder / "hub"), "XDG_CONFIG_HOME": str(self.folder),
            "HF_HUB_DOWNLOAD_TIMEOUT": "5", **variables,
        }  # fmt: skip
        environment.pop("HF_TOKEN", None)
        return forked.run(
            [sys.executable, "-m", "jackfield.entrypoints.cli.main", *argv],
            env=environment,
            capture_output=True,
            text=True,
        )

    def pulled(self, *argv: str, **variables: str) -> Path:
        completed = self.run("pull", *argv, **variables)
        assert completed.returncode == 0, completed.stderr
        return Path(completed.stdout.strip())


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Stored]:
    with served(Hub, checkpoint) as stored:
        yield stored


@pytest.fixture
def commands(tmp_path: Path, hub: Stored) -> Commands:
    return Commands(tmp_path, hub)


def is_whole(folder: Path, stored: Stored) -> bool:
    """Whether a folder has the files of a checkpoint, and no code."""
    files = {name: data for name, data in stored.files.items() if not name.endswith(".py")}
    assert len(files) < len(stored.files) and not list(folder.glob("*.py"))
    return all((folder / name).read_bytes() == data for name, data in files.items())


def test_a_model_is_pulled_listed_named_and_removed(commands: Commands, hub: Stored) -> None:
    hub.token = "hf_secret"
    refused = commands.run("pull", REPO)
    assert refused.returncode == 2 and f"pull: '{REPO}' cannot be fetched" in refused.stderr
    folder = commands.pulled(REPO, "--hf-token", "hf_secret", "--alias", "mine:small")
    assert is_whole(folder, hub) and folder.name == COMMIT
    other = commands.pulled(
        f"{REPO}@v2", "--revision", "v2", "--alias", "second", "--hf-token", "hf_secret"
    )
    assert other.name == OTHER and len(hub.fetched(WEIGHTS)) == 1, "the same content is there"
    hub.requests.clear()
    assert commands.pulled(REPO, HF_HUB_OFFLINE="1") == folder
    assert hub.requests == []
    listed = json.loads(commands.run("list", "--json").stdout)
    facts = [(each["name"], each["revision"], each["refs"]) for each in listed["models"]]
    assert facts == [(REPO, COMMIT, ["main"]), (REPO, OTHER, ["v2"])]
    assert listed["models"][0]["num_bytes"] == sum(
        len(data) for name, data in hub.files.items() if not name.endswith(".py")
    )
    assert listed["aliases"] == {"mine:small": REPO, "second": f"{REPO}@v2"}
    assert listed["models"][1]["aliases"] == ["second"]
    assert listed["models"][0]["aliases"] == ["mine:small"]
    code = (
        "import sys\nfrom jackfield.entrypoints.server.serve_settings import settings\n"
        "from jackfield.core.loading.model_config import resolve_model_config\n"
        "config = settings(sys.argv[1:]).config\n"
        "print(resolve_model_config(config).path, *config.served_names)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder.parents[2]),
                   "XDG_CONFIG_HOME": str(commands.folder)}  # fmt: skip
    resolved = forked.run(
        [sys.executable, "-c", code, "mine:small", "--port", "0"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert resolved.stdout.split() == [str(folder), "mine:small"], resolved.stderr
    text = commands.run("list").stdout
    assert "main, 123456789012" in text and "mine:small" in text
    assert commands.run("rm", f"{REPO}@v2").stdout.startswith(f"removed {REPO}@v2: ")
    assert not other.exists() and is_whole(folder, hub)
    assert "its model stays" in commands.run("rm", "mine:small").stdout
    assert commands.run("rm", REPO).returncode == 0 and not folder.exists()
    again = commands.run("rm", REPO)
    assert again.returncode == 2 and f"there is no '{REPO}' here" in again.stderr


def test_a_download_that_breaks_off_goes_on(commands: Commands, hub: Stored) -> None:
    size = len(hub.files[WEIGHTS])
    hub.break_after[WEIGHTS] = [size // 2]
    elsewhere = commands.folder / "elsewhere"
    folder = commands.pulled(REPO, "--download-dir", str(elsewhere))
    assert is_whole(folder, hub) and elsewhere in folder.parents
    first, *others = hub.fetched(WEIGHTS)
    assert first == "" and others, "asked again"


def test_a_wrong_digest_is_fetched_again_and_never_stays(commands: Commands, hub: Stored) -> None:
    hub.lies[WEIGHTS] = 99
    failed = commands.run("pull", REPO)
    assert failed.returncode == 1 and "has another digest than the hub says" in failed.stderr
    digest = hashlib.sha256(hub.files[WEIGHTS]).hexdigest()
    blobs = commands.folder / "hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
    assert not (blobs / digest).exists() and len(hub.fetched(WEIGHTS)) == 2
    hub.lies[WEIGHTS] = 1
    assert is_whole(commands.pulled(REPO), hub)
    # Rotten on this disk: found and mended by the next pull.
    (blobs / digest).write_bytes(bytes(len(hub.files[WEIGHTS])))
    assert is_whole(commands.pulled(REPO), hub)


def test_what_is_not_there_is_said_in_a_line(commands: Commands) -> None:
    for argv, says in (
        (("pull", "owner/none"), "pull: 'owner/none' cannot be fetched (RepositoryNotFoundError"),
        (("pull", f"{REPO}@v9"), "cannot be fetched (RevisionNotFoundError"),
        (("pull", "./folder"), "pull: './folder' is no name on a hub (owner/name)"),
        (("pull", f"{REPO}@v2", "--revision", "main"), "--revision: 'owner/name@v2' names another"),
    ):
        completed = commands.run(*argv)
        assert completed.returncode == 2 and says in completed.stderr, completed.stderr


# ---------------------------------------------------------------- object stores


@pytest.fixture
def store(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stored]:
    s3fs = pytest.importorskip("s3fs")
    from huggingface_hub import constants

    with served(S3, checkpoint) as stored:
        for name, value in (
            ("AWS_ENDPOINT_URL", stored.url), ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_MAX_ATTEMPTS", "1"),
            ("XDG_CACHE_HOME", str(tmp_path / "cache")), ("XDG_CONFIG_HOME", str(tmp_path)),
        ):  # fmt: skip
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(object_store, "CHUNK", 1 << 20)
        s3fs.S3FileSystem.clear_instance_cache()
        yield stored
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_copy_is_made_once(store: Stored) -> None:
    folder = object_store.fetch(URL)
    assert is_whole(folder, store) and folder == object_store.copy_folder(URL)
    store.requests.clear()
    assert object_store.fetch(URL + "/") == folder
    assert [path for _, path, _ in store.requests] == ["/bucket"]
    old = store.files["config.json"]
    store.files["config.json"] = old.replace(b" ", b"  ", 1)
    del store.files["chat_template.jinja"]
    object_store.fetch(URL)
    assert is_whole(folder, store) and not (folder / "chat_template.jinja").exists()
    assert store.fetched(WEIGHTS) == []


def test_a_broken_connection_costs_a_chunk(store: Stored) -> None:
    store.break_after[WEIGHTS] = [1000]
    folder = object_store.fetch(URL)
    assert is_whole(folder, store)
    chunks = -(-len(store.files[WEIGHTS]) // (1 << 20))
    assert chunks > 4 and len(set(store.fetched(WEIGHTS))) == chunks
    assert len(store.fetched(WEIGHTS)) > chunks


def test_a_copy_that_failed_goes_on(store: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)  # It waits longer each time.
    store.break_after[WEIGHTS] = [1 << 20, *[0] * 99]
    with pytest.raises(LoadError, match="fetching broke off"):
        object_store.fetch(URL)
    manifest = object_store.read_manifest(object_store.copy_folder(URL))
    assert manifest is not None and not manifest.complete
    from huggingface_hub import constants

    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(CheckpointNotFound, match="has not been fetched"):
            object_store.fetch(URL)
    store.break_after.clear()
    store.requests.clear()
    folder = object_store.fetch(URL)
    assert is_whole(folder, store)
    assert store.fetched(WEIGHTS)[0].startswith(f"bytes={1 << 20}-")
    store.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert object_store.fetch(URL) == folder and store.requests == []


def test_a_wrong_copy_never_stays(store: Stored) -> None:
    chunks = -(-len(store.files[WEIGHTS]) // (1 << 20))
    store.lies[WEIGHTS] = 2 * chunks
    with pytest.raises(LoadError, match="another digest than the store says, twice"):
        object_store.fetch(URL)
    folder = object_store.copy_folder(URL)
    assert not list(folder.glob(f"{WEIGHTS}*"))
    store.lies[WEIGHTS] = 1
    assert is_whole(object_store.fetch(URL), store)


def test_what_no_store_has_is_refused_by_name(store: Stored) -> None:
    for url, kind, says in (
        ("s3://bucket/none", CheckpointNotFound, "there is no checkpoint at"),
        ("gs://bucket/x", ConfigError, "pip install gcsfs"),
        ("nope://bucket/x", ConfigError, "Protocol not known: nope"),
    ):
        if url == "s3://bucket/none":
            store.files = {}
        with pytest.raises(kind, match=says):
            object_store.fetch(url)


def test_a_key_cannot_leave_the_copy(store: Stored) -> None:
    store.files["../../stolen.json"] = b"{}"
    with pytest.raises(LoadError, match="outside of its copy"):
        object_store.fetch(URL)


def test_a_model_in_a_store_is_run_by_its_url_or_alias(
    store: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["alias", "small", URL]) == 0
    assert main(["alias", "small"]) == 0 and capsys.readouterr().out.strip() == URL
    assert find_model(URL).name == "tiny" and find_model("small").name == "small"
    params = SamplingParams(max_tokens=8, temperature=0)
    texts = []
    for model in ("small", ""):
        with LLM(model, device="cpu", max_model_len=128) as llm:
            texts.append(llm.generate("Once upon", params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1] != ""
    assert main(["list"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if URL in line]
    assert line.endswith("small")
    assert main(["rm", URL]) == 0 and not object_store.copy_folder(URL).exists()
    assert main(["alias", "small", "--remove"]) == 0
    assert find_model("small") == ("small", None)


def test_aliases_are_plain_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("a/b", "../x", "", "-x", "a b", "s3://x"):
        assert main(["alias", "--", name, "owner/name"]) == 2
    (tmp_path / "jackfield").mkdir(exist_ok=True)
    (tmp_path / "jackfield" / "aliases.json").write_text("[]")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_model("x")


def test_values(tmp_path: Path) -> None:
    for version, right in (
        (hashlib.md5(b"x").hexdigest(), True),
        (hashlib.md5(b"y").hexdigest(), False),
        ("nWW1tSPVoHpRYgYtbMPsqA==", False),
        ("0123456789abcdef0123456789abcdef-7", True),  # Of parts: only the size is known.
    ):
        path = tmp_path / "file"
        path.write_bytes(b"x")
        assert object_store._is_right(path, version) == right


# ---------------------------------------------------------------- ModelScope, by a package

PACKAGE = Path(EMBEDDED_MODEL).parents[2] / "examples" / "modelscope"


@pytest.fixture
def modelscope(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stored]:
    """Its file system is registered as fsspec does it with the package's entry point."""
    fsspec = pytest.importorskip("fsspec")
    from huggingface_hub import constants

    about = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    [(scheme, place)] = about["entry-points"]["fsspec.specs"].items()
    monkeypatch.syspath_prepend(str(PACKAGE / "src"))
    fsspec.register_implementation(scheme, place.replace(":", "."), clobber=True)
    with served(ModelScope, checkpoint) as stored:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", stored.url)
        monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(object_store, "CHUNK", 1 << 20)
        yield stored


def test_a_model_comes_from_modelscope(
    modelscope: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    modelscope.break_after[WEIGHTS] = [1000]
    assert main(["pull", f"modelscope://{REPO}", "--alias", "scoped"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert is_whole(folder, modelscope) and len(modelscope.fetched("/repo")) > 1
    modelscope.requests.clear()
    assert find_model("scoped").model == str(folder)
    assert [path for _, path, _ in modelscope.requests] == [f"/api/v1/models/{REPO}/repo/files"]
    with LLM(str(folder), device="cpu", max_model_len=128) as llm:
        assert llm.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)
    assert is_whole(object_store.fetch(f"modelscope://{REPO}@v2"), modelscope)


def test_what_modelscope_gives_is_checked(
    modelscope: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    modelscope.token = "secret"
    with pytest.raises(CheckpointNotFound, match="no checkpoint at"):
        object_store.fetch(f"modelscope://{REPO}")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "secret")
    modelscope.lies[WEIGHTS] = 99
    with pytest.raises(LoadError, match="another digest than the store says"):
        object_store.fetch(f"modelscope://{REPO}")
    modelscope.lies.clear()
    assert is_whole(object_store.fetch(f"modelscope://{REPO}"), modelscope)
