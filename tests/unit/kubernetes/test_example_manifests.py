"""The manifests that people copy are accepted as they stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.documents.job import parse_job
from scheduler.kubernetes.resources.fleet import parse_pool, parse_queue
from scheduler.kubernetes.resources.gpu_profile import parse_gpu_profile

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "kubernetes"


def read_manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield path.name, manifest


@pytest.mark.parametrize(
    ("file", "manifest"),
    [pytest.param(*each, id=f"{each[0]}-{each[1]['metadata']['name']}") for each in read_manifests()],
)
def test_an_example_is_accepted(file: str, manifest: dict[str, Any]) -> None:
    resource = {**manifest, "metadata": {**manifest["metadata"], "uid": file}}
    match manifest["kind"]:
        case "Pool":
            assert parse_pool(resource).selector == manifest["spec"]["nodeSelector"]
        case "Queue":
            assert parse_queue(resource).name == manifest["metadata"]["name"]
        case "ElasticJob":
            spec = parse_job({"name": manifest["metadata"]["name"], **manifest["spec"]})
            assert spec.command == tuple(manifest["spec"]["command"])
        case "GpuProfile":
            assert json.loads(parse_gpu_profile(resource))["gpu"] == manifest["metadata"]["name"]
        case kind:
            pytest.fail(f"{file} has the unknown kind {kind}")


def test_every_example_is_listed() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"[{file}]({file})" in text for file, _ in read_manifests())
