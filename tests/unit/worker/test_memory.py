"""What a rank knows of its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scheduler.worker.status import OomKillCounter, is_out_of_memory, measure_peak_bytes


def wrapped(error: BaseException) -> BaseException:
    try:
        raise ValueError("the step failed") from error
    except ValueError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (wrapped(MemoryError()), True),
        (RuntimeError("no memory of that"), False),
        (wrapped(OSError("disk full")), False),
        (KeyboardInterrupt(), False),
        (None, False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error: BaseException | None, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it


def test_what_was_had_once_stays_the_peak() -> None:
    before = measure_peak_bytes()
    block = bytearray(b"x") * 40_000_000
    held = measure_peak_bytes()
    del block
    assert before <= held == measure_peak_bytes()
    assert held >= 40_000_000


@pytest.mark.parametrize(
    ("groups", "file", "text", "kills"),
    [
        ("0::/job/worker\n", "job/worker/memory.events.local", "oom 1\noom_kill 2\n", 2),
        ("0::/job/worker\n", "job/worker/memory.events", "oom 1\noom_kill 3\n", 3),
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control", "under_oom 0\noom_kill 5\n", 5),
        ("4:memory:/job\n", "memory/job/memory.oom_control", "under_oom 0\n", None),
    ],
)
def test_the_kernels_count_is_found_for_the_own_control_group(
    tmp_path: Path, groups: str, file: str, text: str, kills: int | None
) -> None:
    own, path = tmp_path / "cgroup", tmp_path / "root" / file
    own.write_text(groups)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = OomKillCounter.for_this_process(cgroup_file=own, cgroup_root=tmp_path / "root")
    assert found == OomKillCounter(path)
    assert found is not None
    assert found.read() == kills
    path.unlink()
    assert found.read() is None


def test_without_control_groups_nobody_counts(tmp_path: Path) -> None:
    assert OomKillCounter.for_this_process(cgroup_file=tmp_path / "none", cgroup_root=tmp_path) is None
    (tmp_path / "cgroup").write_text("0::/\n")
    assert OomKillCounter.for_this_process(cgroup_file=tmp_path / "cgroup", cgroup_root=tmp_path) is None
