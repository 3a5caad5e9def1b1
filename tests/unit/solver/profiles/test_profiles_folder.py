"""Profiles in the folder that EBBTIDE_PROFILES_DIR names."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from scheduler.solver.curve import compute_source_fingerprint
from scheduler.solver.profiles.catalog import (
    PROFILES_DIR,
    ProfileError,
    ProfilesFolder,
    list_gpu_names,
    list_model_names,
    load_gpu,
    load_model,
    read_profiles_folder,
)


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
    [({"efficiency": 2.0}, "efficiency"), ({"gpu": "other"}, "gpu"), ({"color": "red"}, "color")],
)
def test_an_invalid_profile_is_reported_with_file_and_field(folder: Path, changes: dict[str, Any], field: str) -> None:
    _write(folder, "gpus", "h100-80g", "b400", **changes)
    for read in (lambda: load_gpu("b400"), lambda: read_profiles_folder(folder)):
        with pytest.raises(ProfileError) as error:
            read()
        assert str(folder / "gpus" / "b400.json") in str(error.value)
        assert field in str(error.value)


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
        fingerprints.add(compute_source_fingerprint.__wrapped__())
    assert len(fingerprints) == 3
