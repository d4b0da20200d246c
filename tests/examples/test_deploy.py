"""Manifests and commands for several hosts: they parse, their flags exist, their parts agree."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jackfield.core.config import EngineConfig
from jackfield.entrypoints.flags.engine_flags import engine_config
from jackfield.entrypoints.server.serve_settings import make_parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
MANIFESTS = [DEPLOY / "kuberay.yaml", DEPLOY / "kubernetes.yaml"]
GUIDE = ROOT / "docs" / "how-to" / "several-hosts.md"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pods(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """How many there are of each template, and the template."""
    found = []
    for document in documents(path):
        spec = document["spec"]
        if document["kind"] == "RayCluster":
            found.append((1, spec["headGroupSpec"]["template"]))
            found += [(group["replicas"], group["template"]) for group in spec["workerGroupSpecs"]]
        elif "template" in spec:
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
            found.append((spec["replicas"], spec["template"]))
    return found


def containers(path: Path) -> list[dict[str, Any]]:
    each = [template["spec"]["containers"] for _, template in pods(path)]
    assert all(len(some) == 1 for some in each)
    return [container for [container] in each]


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The words after each call of a program, until the shell's next one."""
    for line in text.replace("\\\n", " ").splitlines():
        for call in re.findall(rf"(?:^|[;&\"]|exec |until ){program}((?: [^;&#]*)?)", line.strip()):
            yield shlex.split(call.strip().rstrip('"'))


def served(text: str) -> list[EngineConfig]:
    """What `jackfield serve` makes of its flags there: unknown ones end the test."""
    configs = []
    for argv in commands(text, "jackfield serve"):
        args = make_parser().parse_args(argv)
        configs.append(engine_config(args, args.model_flag or args.model))
    return configs


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_serves_on_all_of_its_gpus(path: Path) -> None:
    text = "\n".join(each["args"][0] for each in containers(path))
    [config] = served(text)
    assert config.executor == "ray"
    limits = [each["resources"]["limits"]["nvidia.com/gpu"] for each in containers(path)]
    total = sum(number * gpus for (number, _), gpus in zip(pods(path), limits, strict=True))
    assert config.num_ranks == total == 16
    assert config.tensor_parallel_size == limits[0], "GPUs of a host divide each layer"


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_parts_of_a_manifest_agree(path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {each["image"].rpartition(":")[2] for each in containers(path)} == {version}
    labels = [template["metadata"]["labels"] for _, template in pods(path)]
    for document in documents(path):
        spec = document["spec"]
        if document["kind"] == "Service":
            [labelled] = [
                container
                for container, own in zip(containers(path), labels, strict=True)
                if spec["selector"].items() <= own.items()
            ]
            ports = {port["name"]: port["containerPort"] for port in labelled["ports"]}
            for port in spec["ports"]:
                assert ports[port["targetPort"]] == port["port"]
        elif document["kind"] == "NetworkPolicy":
            selected = spec["podSelector"]["matchLabels"].items()
            assert all(selected <= own.items() for own in labels)
            [among, public] = spec["ingress"]
            assert "ports" not in among and [each["port"] for each in public["ports"]] == [8000]
    for _, template in pods(path):
        spec = template["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        [container] = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        names = [variable["name"] for variable in container["env"]]
        assert len(set(names)) == len(names)


def environment(path: Path) -> set[str]:
    return {each["name"] for container in containers(path) for each in container["env"]}


def test_variables_are_on_a_page() -> None:
    pages = GUIDE.read_text() + (ROOT / "docs" / "reference" / "cli.md").read_text()
    for path in MANIFESTS:
        for name in environment(path) - {"POD_IP"}:
            assert f"`{name}`" in pages, name


def test_services_that_commands_name_are_there() -> None:
    path = DEPLOY / "kubernetes.yaml"
    services = {each["metadata"]["name"] for each in documents(path) if each["kind"] == "Service"}
    text = "\n".join(each["args"][0] for each in containers(path))
    assert set(re.findall(r"--address=([\w-]+):6379", text)) == {"jackfield-ray"} <= services


def test_secrets_are_made_in_the_guide() -> None:
    made = set(re.findall(r"secret generic (\S+) --from-literal=(\w+)=", GUIDE.read_text()))
    used = set()
    for path in MANIFESTS:
        for container in containers(path):
            for variable in container["env"]:
                if (secret := variable.get("valueFrom", {}).get("secretKeyRef")) is not None:
                    used.add((secret["name"], secret["key"]))
    assert used == made


def blocks(page: Path) -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S))


def test_the_guide_serves_what_it_says() -> None:
    first, other, config = served(blocks(GUIDE))
    for host in (first, other):
        assert (host.nnodes, host.num_ranks, host.pipeline_parallel_size) == (2, 16, 2)
    assert (config.executor, config.num_ranks, config.pipeline_parallel_size) == ("ray", 16, 2)


@pytest.mark.parametrize("path", [GUIDE, *MANIFESTS], ids=lambda path: path.stem)
def test_rays_flags_exist(path: Path) -> None:
    scripts = pytest.importorskip(
        "ray.scripts.scripts", reason="needs the package ray, which the extra `test` has"
    )
    text = (
        blocks(path)
        if path == GUIDE
        else "\n".join(
            [each["args"][0] for each in containers(path)]
            + [
                each[probe]["exec"]["command"][-1]
                for each in containers(path)
                for probe in ("livenessProbe", "readinessProbe")
                if "exec" in each.get(probe, {})
            ]
        )
    )
    checked = 0
    for name, command in scripts.cli.commands.items():
        known = {option for param in command.params for option in param.opts}
        for argv in commands(text, f"ray {name}"):
            given = {word.partition("=")[0] for word in argv if word.startswith("--")}
            assert given <= known, (name, given - known)
            checked += 1
    assert checked >= 2
    for document in documents(path) if path != GUIDE else ():
        if document["kind"] == "RayCluster":
            spec = document["spec"]
            known = {option for param in scripts.start.params for option in param.opts}
            for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                assert {f"--{name}" for name in group["rayStartParams"]} <= known


def test_the_image_installs_what_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    [given] = re.findall(r"^ARG EXTRAS=(\S+)", text, re.M)
    assert {"gpu", "quantization", "ray", "structured"} <= set(given.split(",")) <= set(extras)
    [python] = re.findall(r"^FROM python:(\d+)\.(\d+)$", text, re.M)
    assert tuple(map(int, python)) >= (3, 11)
