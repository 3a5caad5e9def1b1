"""Wheels of both distributions, built from copies of the sources, and environments to install them into."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
FOLDERS = ("api", "baselines", "cli", "deploy", "docs", "helm", "library", "scheduler")
OWN_PREFIXES = ("ebbtide", "__editable__")
"""Beginnings of the names under which an installation of the checkout is in an environment."""


def build_wheels(folder: Path) -> Path:
    """Build both wheels and return their folder. Builds write next to their sources, so they run on a copy."""
    sources, wheels = copy_sources(folder / "sources"), folder / "wheels"
    run(*list_build_words(wheels), str(sources / "library"), str(sources))
    return wheels


def copy_sources(sources: Path, *ignored: str) -> Path:
    """Copy what the wheels are built from, except entries of the `ignored` names, and return the folder."""
    sources.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, sources)
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", *ignored)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, sources / name, symlinks=True, ignore=skipped)
    return sources


def list_build_words(wheels: Path) -> list[str]:
    """Return the command line that builds wheels into the folder, without the sources."""
    pip = (sys.executable, "-P", "-m", "pip", "--quiet", "--disable-pip-version-check")
    return [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(wheels)]


def create_environment(folder: Path, *, has_packages: bool) -> Path:
    """Create a virtual environment without pip, and return its interpreter.

    With `has_packages`, it contains links to the third-party packages of this one, but no link to the checkout.
    """
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    if has_packages:
        target = next((folder / "lib").glob("python3.*")) / "site-packages"
        for entry in _list_packages():
            (target / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def _list_packages() -> list[Path]:
    """Return the entries of the folder that third-party packages are installed in."""
    import fastapi

    folders = {Path(sysconfig.get_path("purelib")), Path(fastapi.__file__).parents[1]}
    entries = {entry.name: entry for folder in folders for entry in folder.iterdir() if entry.suffix != ".pth"}
    return [entry for name, entry in entries.items() if not name.startswith(OWN_PREFIXES)]


def install(python: Path, wheels: Path, requirement: str, *options: str) -> Mapping[str, str]:
    """Install from the folder of wheels alone. Return the versions that pip installed, by name.

    torch is pinned by a constraints file, because another version brings gigabytes.
    """
    constraints, report = wheels / "constraints.txt", python.parent / "report.json"
    constraints.write_text("torch==2.13.0\n", encoding="utf-8")
    pip = (sys.executable, "-P", "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python))
    chosen = ("--no-index", "--find-links", str(wheels), "--constraint", str(constraints), "--report", str(report))
    run(*pip, "install", *chosen, *options, requirement)
    installed: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in installed}


def resolve(wheels: Path, python_version: str, pins: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return the versions that pip would install for the package into an empty environment of another interpreter.

    Return None if the package index cannot be reached.
    """
    report, constraints = wheels / "resolved.json", wheels / "pins.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
    place = ("--python-version", python_version, "--only-binary", ":all:", "--target", str(wheels / "target"))
    command = [
        *(sys.executable, "-P", "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--dry-run"),
        *("--ignore-installed", *place, "--find-links", str(wheels), "--report", str(report)),
        *("--constraint", str(constraints), "ebbtide"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "(from versions: none)" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr
    resolved: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in resolved}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
