"""`ebbtide hardware` against the real API, and the folder of profiles of a service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from scheduler.kubernetes.resources.gpu_profile import parse_gpu_profile
from scheduler.solver.profiles.catalog import PROFILES_DIR, load_gpu, read_gpu_json

Ask = Callable[..., Any]
Run = Callable[..., Result]
GPU = "a100-80g"
PROFILE: dict[str, Any] = json.loads(read_gpu_json(GPU))


def write(folder: Path, name: str, **changes: Any) -> str:
    path, document = folder / name, {**PROFILE, **changes}
    path.write_text(json.dumps(document) if name.endswith("json") else yaml.safe_dump(document))
    return str(path)


@pytest.mark.parametrize("name", ["mine.json", "mine.yaml"])
def test_profiles_are_set_shown_listed_and_deleted(ask: Ask, run: Run, fleet: Any, tmp_path: Path, name: str) -> None:
    made = ask("hardware", "set", GPU, write(tmp_path, name, efficiency=0.5, launch_s=1e-05))
    assert (made["version"], made["nodes"], made["profile"]["launch_s"]) == (1, 3, 1e-05)
    fleet.tick()
    assert {each["name"]: each["source"] for each in ask("hardware")}[GPU] == "set"
    shown, listed = run("hardware", "show", GPU).stdout, run("hardware", "list").stdout
    assert "set, version 1" in shown
    assert "NVIDIA A100" in shown
    assert "50.0%" in listed
    deleted = run("hardware", "delete", GPU)
    assert deleted.stdout.split() == ["GPU", "version", "1", "of", GPU, "deleted"]
    assert ask("hardware", "show", GPU)["source"] == "shipped"


def test_a_manifest_is_the_profile_as_a_custom_resource(run: Run, tmp_path: Path) -> None:
    made = yaml.safe_load(run("hardware", "manifest", write(tmp_path, "mine.json", launch_s=1e-05)).stdout)
    assert (made["kind"], made["metadata"]) == ("GpuProfile", {"name": GPU})
    assert json.loads(parse_gpu_profile(made)) == {**PROFILE, "launch_s": 1e-05}
    refused = run("hardware", "manifest", write(tmp_path, "wrong.json", efficiency=2))
    assert (refused.exit_code, "efficiency is 2" in refused.stderr) == (2, True)


def test_networks_of_pools_are_set_and_deleted(ask: Ask, run: Run, fleet: Any) -> None:
    ask("hardware", "set-network", "training", "--bandwidth", "5GB", "--latency", "2e-5", "--nics", "2")
    network = ask("hardware", "show", GPU)["network"]
    assert (network["bandwidth_bytes_per_s"], network["gpus_per_nic"], network["of_profile"]) == (5e9, 2.0, False)
    assert "set for a pool" in run("hardware", "show", GPU).stdout
    refused = run("hardware", "set-network", "training", "--bandwidth", "fast", "--latency", "1")
    assert (refused.exit_code, "--bandwidth: 'fast' is not a size above 0" in refused.stderr) == (2, True)
    assert ask("hardware", "delete-network", "training")["network"] is None
    assert "that of the GPU profiles" in run("hardware", "delete-network", "training").stdout


def test_files_that_are_no_profile_are_refused(run: Run, fleet: Any, tmp_path: Path) -> None:
    for text, message in (("[1, 2]", "must contain one object"), ("a: [", "neither JSON nor YAML")):
        file = tmp_path / "wrong.json"
        file.write_text(text)
        result = run("hardware", "set", GPU, str(file))
        assert (result.exit_code, message in result.stderr) == (2, True), result.output
    result = run("hardware", "set", GPU, write(tmp_path, "mine.json", efficiency=2))
    assert result.exit_code != 0
    assert "efficiency is 2; it must be at most 1" in " ".join(result.stderr.split())


def test_a_wrong_file_in_the_folder_stops_the_service(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpus").mkdir()
    path = write(tmp_path / "gpus", "mine.yaml", memory_bytes=0)
    monkeypatch.setenv(PROFILES_DIR, str(tmp_path))
    for command in ("serve", "api", "controller"):
        result = run(command)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert f"{path}: GPU '{GPU}': memory_bytes is 0; it must be a finite number above 0" in result.stderr


def test_profiles_of_the_folder_are_used(
    ask: Ask, service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus").mkdir()
    write(tmp_path / "gpus", "mine.yaml", efficiency=0.5)
    monkeypatch.setenv(PROFILES_DIR, str(tmp_path))
    shown = ask("hardware", "show", GPU)
    assert (shown["source"], shown["efficiency"], load_gpu(GPU).efficiency) == ("file", 0.5, 0.5)
