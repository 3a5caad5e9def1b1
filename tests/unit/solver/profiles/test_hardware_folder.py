"""GPU profiles in the folder that EBBTIDE_HARDWARE_DIR names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.solver.curve import compute_source_fingerprint
from scheduler.solver.profiles.catalog import (
    GpuSource,
    ProfileError,
    check_hardware_folder,
    find_gpu_source,
    list_gpu_names,
    load_gpu,
    read_gpu_json,
)
from scheduler.solver.profiles.hardware_folder import HARDWARE_DIR, parse_profile_text, read_hardware_folder

SHIPPED = json.loads(read_gpu_json("h100-80g"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HARDWARE_DIR, str(tmp_path))
    return tmp_path


def profile(name: str, **changes: Any) -> str:
    return json.dumps({**SHIPPED, "gpu": name, **changes})


def test_files_of_any_name_add_and_replace_profiles(folder: Path) -> None:
    text = profile("t4")
    (folder / "mine.json").write_text(profile("x1-80g"))
    (folder / "other.yaml").write_text(text)  # JSON is YAML
    (folder / "mine.jsonl").write_text("{}")
    assert check_hardware_folder(folder, None) == ("x1-80g", "t4")
    assert "x1-80g" in list_gpu_names()
    assert load_gpu("t4").memory_bytes == load_gpu("x1-80g").memory_bytes
    assert (find_gpu_source("t4"), json.loads(read_gpu_json("t4"))) == (GpuSource.FILE, json.loads(text))


def test_the_folder_is_part_of_the_fingerprint(folder: Path) -> None:
    (folder / "mine.json").write_text(profile("x1-80g"))
    with_folder = compute_source_fingerprint.__wrapped__()
    assert with_folder != compute_source_fingerprint()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (profile("x1", efficiency=1.2), "GPU 'x1': efficiency is 1.2; it must be at most 1"),
        ("{", "GPU profile: neither JSON nor YAML"),
        ("- a", "GPU profile is ['a']; it must be a JSON object"),
    ],
)
def test_a_wrong_file_is_reported_with_its_name(folder: Path, text: str, message: str) -> None:
    (folder / "wrong.json").write_text(text)
    with pytest.raises(ProfileError) as error:
        read_hardware_folder(folder)
    assert str(error.value).startswith(f"{folder / 'wrong.json'}: {message}")


def test_a_gpu_model_has_one_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    profiles = tmp_path_factory.mktemp("profiles")
    (profiles / "gpus").mkdir()
    for path in (folder / "a.json", profiles / "gpus" / "x1.json"):
        path.write_text(profile("x1"))
    with pytest.raises(ProfileError, match=r"a\.json: gpu is 'x1', as in EBBTIDE_PROFILES_DIR; keep one"):
        check_hardware_folder(folder, profiles)
    (folder / "b.json").write_text(profile("x1"))
    read_hardware_folder.cache_clear()
    with pytest.raises(ProfileError, match=r"b\.json: gpu is 'x1', as in a\.json; keep one of the two files"):
        read_hardware_folder(folder)


def test_a_missing_folder_is_reported_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"EBBTIDE_HARDWARE_DIR is '.*none': No such file or directory; it must be"):
        read_hardware_folder(tmp_path / "none")


def test_numbers_of_yaml_are_those_of_json() -> None:
    written = parse_profile_text("a: 1e9\nb: 2.5e-6\nc: 4\nd: 1.5\ne: [data, 1e2]\nf: v1.0e3\n")
    assert written == {"a": 1e9, "b": 2.5e-6, "c": 4, "d": 1.5, "e": ["data", 100.0], "f": "v1.0e3"}
    assert isinstance(written["c"], int)
