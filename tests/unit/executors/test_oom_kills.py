"""OOM kill counts of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.executors.run_outcome import read_oom_kills

V2 = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"


@pytest.mark.parametrize(
    ("text", "kills"), [(V2, 2), (V1, 7), ("low 0\n", None), ("oom_kill many\n", None), ("", None)]
)
def test_count_is_read_for_both_cgroup_versions(tmp_path: Path, text: str, kills: int | None) -> None:
    path = tmp_path / "memory.events"
    path.write_text(text)
    assert read_oom_kills(str(path), root=tmp_path) == kills


def test_other_files_are_not_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "cgroup", tmp_path / "secret"
    inside.mkdir()
    outside.write_text(V1)
    assert read_oom_kills(str(outside), root=inside) is None
    assert read_oom_kills(str(inside / "../secret"), root=inside) is None
    assert read_oom_kills(str(inside / "gone"), root=inside) is None
    assert read_oom_kills("", root=inside) is None
