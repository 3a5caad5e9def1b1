"""Both wheels: what they contain, what they require, and that installing them moves nothing."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.distribution.wheels import (
    ROOT,
    build_wheels,
    copy_sources,
    create_environment,
    install,
    list_build_words,
    resolve,
)

SERVER_PACKAGES = ("api", "baselines", "cli", "scheduler")
NOT_INSTALLED = {"package.json", "package-lock.json", "tsconfig.json"}
"""Files that only the build of the console reads. So does the folder `types`, for its type check."""
CHARTS = ROOT / "api" / "console" / "node_modules" / "uplot"
OLDEST = {"anyio": "3.6.2", "httpx": "0.23.3", "httpx-sse": "0.3.1", "tenacity": "8.2.0"}
"""The lower ends of the ranges. An environment with them must keep them."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not CHARTS.exists():
        pytest.skip("npm has not installed the console's libraries")
    return build_wheels(tmp_path_factory.mktemp("wheels"))


def list_files(wheels: Path, name: str) -> set[str]:
    with ZipFile(next(wheels.glob(f"{name}-*.whl"))) as wheel:
        return {item for item in wheel.namelist() if ".dist-info/" not in item}


def read_metadata(wheels: Path, name: str) -> Message:
    with ZipFile(next(wheels.glob(f"{name}-*.whl"))) as wheel:
        found = next(item for item in wheel.namelist() if item.endswith(".dist-info/METADATA"))
        return Parser().parsestr(wheel.read(found).decode())


def list_sources(folder: Path) -> Iterator[str]:
    """Yield the files of a package. Links to folders are followed, so exported assets are among them."""
    for path in folder.iterdir():
        if path.is_dir() and path.name not in ("__pycache__", "node_modules", "types"):
            yield from list_sources(path)
        elif path.is_file() and path.name not in NOT_INSTALLED:
            yield str(path.relative_to(ROOT))


def test_the_servers_wheel_has_every_file_of_its_packages(wheels: Path) -> None:
    files = list_files(wheels, "ebbtide_server")
    assert {name for package in SERVER_PACKAGES for name in list_sources(ROOT / package)} - files == set()
    assert {name.partition("/")[0] for name in files} == set(SERVER_PACKAGES)
    assert "cli/assets/crds/elasticjobs.yaml" in files
    assert "cli/assets/alerts/rules.yaml" in files


def test_the_servers_wheel_has_the_consoles_libraries(wheels: Path) -> None:
    files = list_files(wheels, "ebbtide_server")
    modules = "api/console/node_modules"
    libraries = {f"{modules}/uplot/dist/uPlot.iife.min.js", f"{modules}/swagger-ui-dist/swagger-ui-bundle.js"}
    assert libraries <= files
    assert len([name for name in files if name.startswith(modules)]) < 10


def test_a_build_without_the_consoles_libraries_fails(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources", "node_modules")
    command = [*list_build_words(tmp_path / "wheels"), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "make console" in done.stdout + done.stderr
    subprocess.run(command, env={**os.environ, "EBBTIDE_BUILD_WITHOUT_CONSOLE": "1"}, check=True)
    assert not any("node_modules" in name for name in list_files(tmp_path / "wheels", "ebbtide_server"))


def test_the_users_wheel_has_the_users_package_alone(wheels: Path) -> None:
    files = list_files(wheels, "ebbtide")
    own = {name.removeprefix("library/") for name in list_sources(ROOT / "library" / "ebbtide")}
    assert files == own
    assert {"ebbtide/py.typed", "ebbtide/client/views/jobs.py"} <= files


def test_the_users_package_requires_ranges_and_the_server_at_its_own_version(wheels: Path) -> None:
    metadata, server = (read_metadata(wheels, name) for name in ("ebbtide", "ebbtide_server"))
    requirements = metadata.get_all("Requires-Dist") or []
    base = [line for line in requirements if "extra ==" not in line]
    assert {re.split(r"[<>=~!]", line)[0] for line in base} == OLDEST.keys()
    assert all(">=" in line and "<" in line and "==" not in line for line in base)
    assert metadata["Requires-Python"] == ">=3.10"
    assert [line for line in requirements if line not in base] == [
        f'ebbtide-server=={metadata["Version"]}; extra == "server"'
    ]
    assert f"ebbtide=={server['Version']}" in (server.get_all("Requires-Dist") or [])


def test_both_distributions_have_one_version() -> None:
    files = (ROOT / "pyproject.toml", ROOT / "library" / "pyproject.toml")
    assert len({tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"] for file in files}) == 1


def test_an_installation_moves_no_version_of_an_environment_with_the_oldest_packages(
    wheels: Path, tmp_path: Path
) -> None:
    python = create_environment(tmp_path / "venv", has_packages=False)
    site = next((tmp_path / "venv" / "lib").glob("python3.*")) / "site-packages"
    for name, version in {**OLDEST, "torch": "2.1.0", "numpy": "1.24.0"}.items():
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    assert install(python, wheels, "ebbtide", "--dry-run").keys() == {"ebbtide"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("python_version", "pins"), [("3.10", OLDEST), ("3.10", {}), ("3.11", {}), ("3.12", {}), ("3.13", {})]
)
def test_both_ends_of_the_ranges_resolve(wheels: Path, python_version: str, pins: dict[str, str]) -> None:
    found = resolve(wheels, python_version, pins)
    if found is None:
        pytest.skip("the package index cannot be reached")
    assert {*OLDEST, "ebbtide"} <= found.keys()
    assert {name: found[name] for name in pins} == pins
    assert not {"torch", "numpy", "ebbtide-server"} & found.keys()
