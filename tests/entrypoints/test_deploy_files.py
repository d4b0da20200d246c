"""Files that deploy one server: they parse, their flags exist, and their ports, times and metrics
agree. They are not run here: no container, cluster or supervisor is."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from chart import render
from serving import running

from jackfield.core.config import EngineConfig
from jackfield.core.registry import load_plugins
from jackfield.entrypoints.flags.engine_flags import engine_config
from jackfield.entrypoints.server.serve_settings import make_parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
HELM = DEPLOY / "helm"
RECIPES = ROOT / "docs" / "how-to" / "recipes.md"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = f"registry.example.com/jackfield:{VERSION}"


def parsed(words: list[str]) -> tuple[Any, EngineConfig]:
    """Options and configuration of `jackfield serve …`; unknown flags end the test."""
    assert words[0] == "serve", words
    args = make_parser().parse_args(words[1:])
    return args, engine_config(args, args.model_flag or args.model, fetch=False)


# ---------------------------------------------------------------- image, compose, systemd, nginx


def test_compose_serves_what_the_image_has() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    for name, device in (("jackfield", "auto"), ("jackfield-cpu", "cpu")):
        service = services[name]
        args, config = parsed(service["command"])
        assert config.device == device and (args.host, args.port) == ("0.0.0.0", 8000)
        assert service["build"]["dockerfile"] == "examples/deploy/Dockerfile"
        context = (DEPLOY / service["build"]["context"]).resolve()
        assert (context / "pyproject.toml").is_file()
        grace = int(service["stop_grace_period"].removesuffix("s"))
        assert grace > args.shutdown_timeout
        assert service["volumes"] == ["models:/models"] and "models" in compose["volumes"]
    assert services["jackfield"]["image"] == IMAGE
    assert services["jackfield"]["deploy"]["resources"]["reservations"]["devices"]
    assert services["jackfield-cpu"]["deploy"] == {}
    mounted = services["nginx"]["volumes"][0].split(":")[0]
    assert (DEPLOY / mounted).is_file()


def test_the_image_has_what_it_installs_and_says() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    built = [
        re.search(r"^ARG EXTRAS=(\S+)", text, re.M)[1],  # type: ignore[index]
        compose["jackfield-cpu"]["build"]["args"]["EXTRAS"],
        *re.findall(r"extras=(\S+)", (DEPLOY / "build.sh").read_text()),
    ]
    assert len(built) == 4 and len(set(built)) == 2
    for extras in built:
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    command = json.loads(re.search(r"^CMD (\[.*\])", text, re.M)[1])  # type: ignore[index]
    args, _ = parsed(command)
    assert f"EXPOSE {args.port}" in text and f":{args.port}/health" in text


def test_the_script_builds_either_image(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    docker.chmod(0o755)
    for device in ("gpu", "cpu"):
        command = ["sh", str(DEPLOY / "build.sh"), device, "tag"]
        done = subprocess.run(
            command, env={"DOCKER": str(docker), "PATH": "/usr/bin:/bin"}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        words = done.stdout.splitlines()
        assert words[0] == "build" and f"DEVICE={device}" in words and words[-1] == str(ROOT)
        assert words[words.index("--file") + 1] == str(DEPLOY / "Dockerfile")
    failed = subprocess.run(["sh", str(DEPLOY / "build.sh"), "tpu", "tag"], capture_output=True)
    assert failed.returncode == 2


def test_systemd_ends_a_server_after_its_requests() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string((DEPLOY / "jackfield.service").read_text())
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    args, _ = parsed(words)
    assert Path(program).name == "jackfield"
    assert int(service["TimeoutStopSec"]) > args.shutdown_timeout
    assert service["RestartPreventExitStatus"] == "2"
    names = {each.partition("=")[0] for each in service["Environment"].split()}
    assert names == {"HF_HOME", "XDG_CACHE_HOME"}


def test_nginx_passes_streams_as_they_come() -> None:
    text = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text())
    assert text.count("{") == text.count("}")
    directives = dict(re.findall(r"^\s*([a-z_]+) ([^;{]+);", text, re.M))
    assert directives["proxy_buffering"] == "off" and directives["proxy_http_version"] == "1.1"
    most = int(directives["client_max_body_size"].removesuffix("m"))
    args = make_parser().parse_args([])
    assert most << 20 == args.max_body_bytes
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    [server] = re.findall(r"server (\S+):8000", text)
    assert server in compose["services"]


# ---------------------------------------------------------------- Kubernetes


def deployment(**changes: Any) -> dict[str, Any]:
    return render(HELM, "chat", **changes)["deployment.yaml"][0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"modelsClaim": "models", "args": ["--max-model-len", "8192"], "gpus": 2},
        {"resources": {"limits": {"cpu": "8"}}, "nodeSelector": {"gpu": "h100"}},
        {"tolerations": [{"key": "gpu", "operator": "Exists"}], "replicas": 3},
    ],
)
def test_the_chart_serves_what_its_values_say(changes: dict[str, Any]) -> None:
    spec = deployment(**changes)["spec"]
    assert spec["replicas"] == changes.get("replicas", 1)
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    args, config = parsed(container["args"])
    assert config.model == "Qwen/Qwen3-8B" and container["image"] == IMAGE
    assert config.max_model_len == (8192 if "args" in changes else None)
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > args.shutdown_timeout + pause
    [port] = container["ports"]
    assert port["containerPort"] == args.port
    limits = container["resources"]["limits"]
    expected = changes.get("resources", {"limits": {"nvidia.com/gpu": changes.get("gpus", 1)}})
    assert limits == expected["limits"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert ("persistentVolumeClaim" in volumes["models"]) == ("modelsClaim" in changes)
    assert pod.get("nodeSelector") == changes.get("nodeSelector")
    assert pod.get("tolerations") == changes.get("tolerations")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}


def test_the_parts_of_the_chart_agree() -> None:
    documents = render(HELM, "chat")
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    assert deployment()["spec"]["selector"]["matchLabels"] == labels
    service, budget = documents["service.yaml"]
    assert service["spec"]["selector"] == labels
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert documents["scaledobject.yaml"] == []
    chart = yaml.safe_load((HELM / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == VERSION


def test_the_chart_scales_on_a_metric_that_there_is() -> None:
    values = yaml.safe_load((HELM / "values.yaml").read_text())["autoscaling"]
    scaled = values | {"enabled": True}
    [target] = render(HELM, "chat", autoscaling=scaled)["scaledobject.yaml"]
    assert "replicas" not in deployment(autoscaling=scaled)["spec"]
    spec = target["spec"]
    assert spec["scaleTargetRef"]["name"] == deployment()["metadata"]["name"]
    [trigger] = spec["triggers"]
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    [metric] = re.findall(r"jackfield:\w+", trigger["metadata"]["query"])
    assert f"`{metric}`" in metrics
    assert all(isinstance(value, str) for value in trigger["metadata"].values())


def test_kserve_s_runtime_serves_what_it_was_given() -> None:
    runtime, service = yaml.safe_load_all((DEPLOY / "kserve.yaml").read_text())
    [container] = runtime["spec"]["containers"]
    args, config = parsed(container["args"])
    assert config.model == "/mnt/models" and config.served_names == ("{{.Name}}",)
    assert container["ports"][0]["containerPort"] == args.port
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": args.port}
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
    assert container["image"] == IMAGE


# ---------------------------------------------------------------- recipes


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", RECIPES.read_text(), re.M | re.S)


def test_every_recipe_of_a_model_is_a_command_of_this_server() -> None:
    plugins = load_plugins()
    models = []
    for line in "\n".join(blocks("sh")).replace("\\\n", " ").splitlines():
        if line.startswith("jackfield serve"):
            _, config = parsed(shlex.split(line)[1:])
            models.append(config.model)
            for kind, name in (
                ("reasoning_parser", config.reasoning_parser),
                ("tool_parser", config.tool_call_parser),
            ):
                assert name is None or name in plugins[kind], line
    assert len(set(models)) >= 10


def test_settings_of_clients_are_well_formed() -> None:
    for text in blocks("json"):
        json.loads(text)
    for text in blocks("yaml"):
        yaml.safe_load(text)
    for text in blocks("toml"):
        tomllib.loads(text)
    for text in blocks("python"):
        compile(text, "recipes.md", "exec")
    pages = [line for line in RECIPES.read_text().splitlines() if line.startswith("### ")]
    assert len(pages) >= 10
    routes = set(re.findall(r"http://127\.0\.0\.1:8000(/v1)?(?=[\"'\s/]|$)", RECIPES.read_text()))
    assert routes == {"", "/v1"}, "with and without /v1, as each client wants it"


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed here")
def test_a_stream_passes_nginx_while_it_goes_on(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", served_model_name=("tiny",), max_num_seqs=2)
    with running(config) as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        text = (DEPLOY / "nginx.conf").read_text()
        text = text.replace("server jackfield:8000", f"server {server.url.removeprefix('http://')}")
        text = text.replace("listen 80;", f"listen 127.0.0.1:{port};")
        main = tmp_path / "nginx.conf"
        main.write_text(
            f"daemon off; error_log stderr; pid {tmp_path}/pid; events {{}}\n"
            f"http {{ access_log off; client_body_temp_path {tmp_path}/body;\n"
            f"proxy_temp_path {tmp_path}/proxy; fastcgi_temp_path {tmp_path}/f;\n"
            f"uwsgi_temp_path {tmp_path}/u; scgi_temp_path {tmp_path}/s;\n{text} }}"
        )
        command = ["nginx", "-p", str(tmp_path), "-c", str(main)]
        checked = subprocess.run([*command, "-t"], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        proxy = subprocess.Popen(command)
        try:
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:
                assert client.get(f"{url}/health").status_code == 200
                assert client.get(f"{url}/metrics").status_code == 403
                body = {"prompt": "Once", "stream": True, "ignore_eos": True, "max_tokens": 1500}
                with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                    lines = response.iter_lines()
                    assert next(lines).startswith("data: ")
                    assert server.engine.core.requests.states, "the rest is still being computed"
            assert server.becomes(lambda engine: not engine.core.requests.states), "left: aborted"
        finally:
            proxy.terminate()
            proxy.wait(60)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_knows_every_word_of_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "jackfield.service"
    text = (DEPLOY / "jackfield.service").read_text()
    unit.write_text(text.replace("/opt/jackfield/bin/jackfield", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    complaints = [line for line in done.stderr.splitlines() if "jackfield.service" in line]
    assert not complaints, done.stderr
