"""What a pod agent is told by its variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.worker.environment import read_pod_environment

FULL = {
    "EBBTIDE_JOB_ID": "train-abc", "EBBTIDE_NODE": "n0", "EBBTIDE_URL": "http://api:8787/",
    "EBBTIDE_TOKEN": "eba_x", "EBBTIDE_RUN_ROOT": "/run/ebbtide",
}  # fmt: skip


def test_what_may_be_left_out_has_a_default() -> None:
    read = read_pod_environment(FULL)
    assert (read.url, read.read_token(), read.checkpoint_dir, read.grace_s) == ("http://api:8787", "eba_x", "", 30.0)
    assert read.pod
    assert read.pod != read_pod_environment(FULL).pod
    assert read_pod_environment({**FULL, "EBBTIDE_POD": "uid-7", "EBBTIDE_GRACE_S": "5"}).pod == "uid-7"


def test_a_tokens_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "token"
    read = read_pod_environment({**FULL, "EBBTIDE_TOKEN": "", "EBBTIDE_TOKEN_FILE": str(path)})
    for token in ("eba_1", "eba_2"):
        path.write_text(f"{token}\n")
        assert read.read_token() == token


@pytest.mark.parametrize("name", sorted(FULL))
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is missing"):
        read_pod_environment({key: value for key, value in FULL.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [("EBBTIDE_URL", "api:8787"), ("EBBTIDE_GRACE_S", "soon"), ("EBBTIDE_GRACE_S", "-1"), ("EBBTIDE_GRACE_S", "inf")],
)
def test_what_is_wrong_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is '{value}'"):
        read_pod_environment({**FULL, name: value})
