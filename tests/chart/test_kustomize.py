"""deploy/kustomize contains the objects of the chart, and kubectl can build it."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.chart import manifests
from tests.kubernetes.control_plane import ASSETS

FOLDER = Path(__file__).parents[2] / "deploy" / "kustomize"
FILE = FOLDER / "ebbtide.yaml"
HELM_PREFIXES = ("helm.sh/", "app.kubernetes.io/managed-by")
kubectl = shutil.which("kubectl", path=str(ASSETS)) or shutil.which("kubectl")


def strip_helm_metadata(each: manifests.Manifest) -> manifests.Manifest:
    """Return the manifest without Helm's labels and annotations."""
    created = copy.deepcopy(each)
    template = created.get("spec", {}).get("template", {})
    for metadata in (created["metadata"], template.get("metadata", {})):
        for name in ("labels", "annotations"):
            metadata[name] = {
                key: value for key, value in metadata.get(name, {}).items() if not key.startswith(HELM_PREFIXES)
            }
            if not metadata[name]:
                del metadata[name]
    return created


def _runs_on_demand(each: manifests.Manifest) -> bool:
    """Return whether Helm creates the object for `helm test` or `helm uninstall` only."""
    return each["metadata"].get("annotations", {}).get("helm.sh/hook") in ("test", "pre-delete")


def test_objects_match_the_chart() -> None:
    created = [strip_helm_metadata(each) for each in manifests.read("postgresql") if not _runs_on_demand(each)]
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        FILE.write_text(yaml.safe_dump_all(created, sort_keys=False, width=120), encoding="utf-8")
    assert list(yaml.safe_load_all(FILE.read_text(encoding="utf-8"))) == created


@pytest.mark.skipif(kubectl is None, reason=f"no kubectl in {ASSETS} or on the path")
def test_kubectl_builds_valid_manifests() -> None:
    assert kubectl is not None
    built = subprocess.run([kubectl, "kustomize", str(FOLDER)], capture_output=True, text=True, check=True, timeout=60)
    created: list[dict[str, Any]] = list(yaml.safe_load_all(built.stdout))
    for each in created:
        if each["kind"] != manifests.DEFINITION:
            kubernetes_validate.validate(each, "1.33", strict=True)
    assert sum(each["kind"] == manifests.DEFINITION for each in created) == 5
    assert len(created) == 5 + len(list(yaml.safe_load_all(FILE.read_text(encoding="utf-8"))))
