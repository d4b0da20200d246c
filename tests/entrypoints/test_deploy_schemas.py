"""The chart by Helm itself, and manifests by Kubernetes' own schemas (both come as packages)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import render

pytestmark = pytest.mark.slow
DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
HELM = DEPLOY / "helm"
VALUES: list[dict[str, Any]] = [
    {},
    {"modelsClaim": "models", "args": ["--max-model-len", "8192"], "gpus": 2},
    {"resources": {"limits": {"cpu": "8"}}, "nodeSelector": {"gpu": "h100"}},
    {"tolerations": [{"key": "gpu", "operator": "Exists"}], "replicas": 3},
    {"autoscaling": yaml.safe_load((HELM / "values.yaml").read_text())["autoscaling"]
                    | {"enabled": True}},
]  # fmt: skip


@pytest.mark.parametrize("values", VALUES)
def test_helm_lints_the_chart_and_renders_it_as_the_other_tests_do(values: dict[str, Any]) -> None:
    helm = pytest.importorskip("helm_python")
    assert helm.lint(HELM, values, strict=True)["errors"] == []
    with helm.Chart.load(HELM) as chart:
        rendered = chart.render(values, name="chat", namespace="models")
    documents = {
        Path(name).name: [each for each in yaml.safe_load_all(text) if each is not None]
        for name, text in rendered.items()
    }
    assert documents == render(HELM, "chat", **values)


def manifests() -> Iterator[dict[str, Any]]:
    for values in VALUES:
        for documents in render(HELM, "chat", **values).values():
            yield from documents
    for name in ("kubernetes.yaml", "kserve.yaml", "kuberay.yaml"):
        yield from yaml.safe_load_all((DEPLOY / name).read_text())


def pods_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yield what has containers, wherever a resource of an operator has it."""
    if isinstance(value, dict):
        if "containers" in value:
            names = ("containers", "volumes", "nodeSelector", "tolerations", "serviceAccountName")
            yield {name: value[name] for name in names if name in value}
        for part in value.values():
            yield from pods_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from pods_of(part)


def test_manifests_follow_the_schemas_of_kubernetes() -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    version, kinds = schemas.latest_version(), set()
    for document in manifests():
        kinds.add(document["kind"])
        try:
            schemas.validate(document, version, strict=True)
        except schemas.SchemaNotFoundError:
            for pod in pods_of(document["spec"]):
                kinds.add("a pod of an operator's")
                body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
                schemas.validate(body, version, strict=True)
    assert {
        "Deployment", "Service", "StatefulSet", "NetworkPolicy", "PodDisruptionBudget",
        "ScaledObject", "RayCluster", "ServingRuntime", "a pod of an operator's",
    } <= kinds  # fmt: skip
