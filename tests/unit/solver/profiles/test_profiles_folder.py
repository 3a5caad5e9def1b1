"""Profiles in the folder that EBBTIDE_PROFILES_DIR names."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from scheduler.solver.curve import compute_solver_fingerprint
from scheduler.solver.profiles.catalog import (
    PROFILES_DIR,
    GpuSource,
    ProfileError,
    ProfilesFolder,
    find_gpu_source,
    list_gpu_names,
    list_model_names,
    load_gpu,
    load_model,
    read_gpu_json,
    read_profiles_folder,
)
from scheduler.solver.profiles.gpu_files import parse_profile_text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "gpus").mkdir()
    (tmp_path / "models").mkdir()
    monkeypatch.setenv(PROFILES_DIR, str(tmp_path))
    return tmp_path


def _write(folder: Path, kind: str, shipped: str, name: str, **changes: Any) -> None:
    """Write a copy of a shipped profile under a new name."""
    text = files("scheduler.solver.profiles").joinpath("data", kind, f"{shipped}.json").read_text(encoding="utf-8")
    document = {**json.loads(text), ("gpu" if kind == "gpus" else "name"): name, **changes}
    (folder / kind / f"{name}.json").write_text(json.dumps(document))


def test_profiles_in_the_folder_are_added_to_the_shipped_ones(folder: Path) -> None:
    _write(folder, "gpus", "h100-80g", "b400")
    _write(folder, "models", "gpt2", "my-gpt")
    assert {"b400", "h100-80g"} <= set(list_gpu_names())
    assert {"my-gpt", "gpt2"} <= set(list_model_names())
    assert load_gpu("b400").memory_bytes == load_gpu("h100-80g").memory_bytes
    assert load_model("my-gpt").layer_count == load_model("gpt2").layer_count
    assert read_profiles_folder(folder) == ProfilesFolder(("b400",), ("my-gpt",), ())


def test_a_profile_in_the_folder_replaces_the_shipped_one(folder: Path) -> None:
    _write(folder, "gpus", "h100-80g", "t4", memory_bytes=10**12)
    assert load_gpu("t4").memory_bytes == 10**12
    assert read_profiles_folder(folder).replaced == ("t4",)


def test_the_folder_can_be_an_argument(tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    _write(tmp_path, "gpus", "h100-80g", "b400")
    assert load_gpu("b400", tmp_path).gpu == "b400"
    assert "b400" in list_gpu_names(tmp_path)
    assert "b400" not in list_gpu_names()


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"efficiency": 2.0}, "efficiency"), ({"color": "red"}, "color")],
)
def test_an_invalid_profile_is_reported_with_file_and_field(folder: Path, changes: dict[str, Any], field: str) -> None:
    _write(folder, "gpus", "h100-80g", "b400", **changes)
    for read in (lambda: load_gpu("b400"), lambda: read_profiles_folder(folder)):
        with pytest.raises(ProfileError) as error:
            read()
        assert str(folder / "gpus" / "b400.json") in str(error.value)
        assert field in str(error.value)


def test_files_of_gpus_may_have_any_name_and_be_yaml(folder: Path) -> None:
    _write(folder, "gpus", "h100-80g", "x1")
    (folder / "gpus" / "x1.json").rename(folder / "gpus" / "mine.yaml")  # JSON is YAML
    (folder / "gpus" / "mine.jsonl").write_text("{}")
    assert read_profiles_folder(folder).gpus == ("x1",)
    assert find_gpu_source("x1") is GpuSource.FILE
    assert json.loads(read_gpu_json("x1"))["gpu"] == "x1"


def test_a_gpu_model_has_one_file(folder: Path) -> None:
    _write(folder, "gpus", "h100-80g", "x1")
    (folder / "gpus" / "a.json").write_text((folder / "gpus" / "x1.json").read_text())
    with pytest.raises(ProfileError, match=r"x1\.json: gpu is 'x1', as in a\.json; keep one of the two files"):
        list_gpu_names()


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "GPU profile: neither JSON nor YAML"), ("- a", "GPU profile is ['a']; it must be a JSON object")],
)
def test_a_wrong_file_is_reported_with_its_name(folder: Path, text: str, message: str) -> None:
    (folder / "gpus" / "wrong.json").write_text(text)
    with pytest.raises(ProfileError) as error:
        list_gpu_names()
    assert str(error.value).startswith(f"{folder / 'gpus' / 'wrong.json'}: {message}")


def test_numbers_of_yaml_are_those_of_json() -> None:
    written = parse_profile_text("a: 1e9\nb: 2.5e-6\nc: 4\nd: 1.5\ne: [data, 1e2]\nf: v1.0e3\n")
    assert written == {"a": 1e9, "b": 2.5e-6, "c": 4, "d": 1.5, "e": ["data", 100.0], "f": "v1.0e3"}
    assert isinstance(written["c"], int)


def test_an_invalid_model_is_reported_with_its_file(folder: Path) -> None:
    (folder / "models" / "broken.json").write_text("{")
    with pytest.raises(ProfileError, match=r"broken\.json: model profile: not JSON"):
        load_model("broken")


def test_a_missing_folder_is_reported_with_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROFILES_DIR, str(tmp_path / "absent"))
    with pytest.raises(ProfileError, match=f"{PROFILES_DIR} is .*absent"):
        list_gpu_names()


def test_curves_are_solved_again_when_a_profile_in_the_folder_changes(folder: Path) -> None:
    fingerprints = set()
    for memory in (None, 10**11, 10**12):
        if memory:
            _write(folder, "gpus", "h100-80g", "b400", memory_bytes=memory)
        fingerprints.add(compute_solver_fingerprint.__wrapped__())
    assert len(fingerprints) == 3
