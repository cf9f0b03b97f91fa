# SPDX-License-Identifier: Apache-2.0
"""The manifest of docs/several-machines.md has the shape of a RayCluster; KubeRay's schema has 1 MB."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

PAGE = Path(__file__).parents[2] / "docs" / "several-machines.md"

#: Fields of RayCluster's specification and of a group of workers in ray.io/v1 that a manifest may have.
SPEC = {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "suspend"}
GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"}


@pytest.fixture
def manifest() -> dict[str, Any]:
    (text,) = re.findall(r"<!-- file: raycluster.yaml -->\n```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_the_fields_are_those_of_a_ray_cluster(manifest: dict[str, Any]) -> None:
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    spec = manifest["spec"]
    assert set(spec) <= SPEC
    assert set(spec["headGroupSpec"]) == {"rayStartParams", "template"}
    for group in spec["workerGroupSpecs"]:
        assert set(group) <= GROUP
        assert 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        # Kubernetes refuses numbers as parameters and as variables.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert all(isinstance(each["value"], str) for each in container.get("env", ()))
        volumes = {each["name"] for each in group["template"]["spec"].get("volumes", ())}
        assert {each["name"] for each in container.get("volumeMounts", ())} == volumes
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]


def test_its_version_of_ray_is_that_of_the_image(manifest: dict[str, Any]) -> None:
    assert f"FROM rayproject/ray:{manifest['spec']['rayVersion']}-" in PAGE.read_text()
