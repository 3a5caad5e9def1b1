"""Control groups on trees of plain files, laid out as version 1 and version 2 of the kernel."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from scheduler.agent.control_groups import ControlGroup, ControlGroups
from scheduler.domain.run_document import ResourceLimits

LIMITS = ResourceLimits(memory_bytes=1 << 30, processes=100, cpus=1.5)


def _create_files(folder: Path, *names: str, text: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(text)
    return folder


def test_limits_of_version_1_include_swap(tmp_path: Path) -> None:
    memory = _create_files(tmp_path / "memory", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    pids, cpu = _create_files(tmp_path / "pids", "pids.max"), _create_files(tmp_path / "cpu", "cpu.cfs_quota_us")
    ControlGroup({"memory": memory, "pids": pids, "cpu": cpu}).limit(LIMITS)
    read = {path.name: path.read_text() for folder in (memory, pids, cpu) for path in folder.iterdir()}
    assert read == {
        "memory.limit_in_bytes": "1073741824",
        "memory.memsw.limit_in_bytes": "1073741824",
        "pids.max": "100",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
    }


def test_group_without_accounting_of_swap_is_kept_from_swapping(tmp_path: Path) -> None:
    memory = _create_files(tmp_path, "memory.limit_in_bytes", "memory.swappiness", text="60")
    ControlGroup({"memory": memory}).limit(LIMITS)
    assert (memory / "memory.swappiness").read_text() == "0"


def test_limits_of_version_2(tmp_path: Path) -> None:
    unified = _create_files(tmp_path, "memory.max", "memory.swap.max", "pids.max", "cpu.max")
    ControlGroup({"unified": unified}).limit(LIMITS)
    read = {path.name: path.read_text() for path in unified.iterdir()}
    assert read == {
        "memory.max": "1073741824", "memory.swap.max": "0", "pids.max": "100", "cpu.max": "150000 100000",
    }  # fmt: skip


def test_job_without_limits_changes_nothing(tmp_path: Path) -> None:
    unified = _create_files(tmp_path, "memory.max", "pids.max", "cpu.max", text="max")
    ControlGroup({"unified": unified}).limit(ResourceLimits())
    assert {path.read_text() for path in unified.iterdir()} == {"max"}


def test_cores_are_weighed_by_gpus(tmp_path: Path) -> None:
    cpu, unified = _create_files(tmp_path / "1", "cpu.shares"), _create_files(tmp_path / "2", "cpu.weight")
    ControlGroup({"cpu": cpu, "unified": unified}).limit(ResourceLimits(), gpus=8)
    assert ((cpu / "cpu.shares").read_text(), (unified / "cpu.weight").read_text()) == ("8192", "800")
    ControlGroup({"unified": unified}).limit(ResourceLimits(), gpus=1000)
    assert (unified / "cpu.weight").read_text() == "10000"


def test_exceeded_limit_is_known_from_a_kill_and_a_hit(tmp_path: Path) -> None:
    second = _create_files(tmp_path / "2", "memory.max", text="4096\n")
    for text, expected in (("oom 1\noom_kill 0\n", None), ("oom 0\noom_kill 1\n", None), ("oom 1\noom_kill 1\n", 4096)):
        (second / "memory.events").write_text(text)
        assert ControlGroup({"unified": second}).read_exceeded_memory() == expected
    first = _create_files(tmp_path / "1", "memory.oom_control", text="oom_kill 1\n")
    _create_files(first, "memory.limit_in_bytes", text="8192\n")
    for peak, expected in ((8192, 8192), (4096, None)):
        (first / "memory.max_usage_in_bytes").write_text(f"{peak}\n")
        assert ControlGroup({"memory": first}).read_exceeded_memory() == expected


def test_memory_of_all_groups_is_the_least_around_them(tmp_path: Path) -> None:
    base = tmp_path / "slurm" / "job"
    _create_files(base, "memory.max", text="max\n")
    _create_files(base.parent, "memory.max", text="4096\n")
    assert ControlGroups({"unified": base}).read_memory_bytes() == 4096
    first = _create_files(tmp_path / "1", "memory.stat", text="cache 1\nhierarchical_memory_limit 8192\n")
    assert ControlGroups({"memory": first}).read_memory_bytes() == 8192
    assert ControlGroups({}).read_memory_bytes() is None


def test_memory_kills_are_read_from_either_version(tmp_path: Path) -> None:
    first = _create_files(tmp_path / "1", "memory.oom_control", text="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    second = _create_files(tmp_path / "2", "memory.events", text="low 0\noom 1\noom_kill 2\n")
    assert ControlGroup({"memory": first}).read_oom_kills() == 3
    assert ControlGroup({"unified": second}).read_oom_kills() == 2
    assert ControlGroup({"unified": tmp_path / "gone"}).read_oom_kills() == 0
    assert ControlGroup({}).read_oom_kills() == 0


def test_members_are_killed_at_once_or_one_by_one(tmp_path: Path) -> None:
    unified = _create_files(tmp_path / "unified", "cgroup.kill")
    ControlGroup({"unified": unified}).kill()
    assert (unified / "cgroup.kill").read_text() == "1"
    with subprocess.Popen(["sleep", "60"]) as member:
        pids = _create_files(tmp_path / "pids", "cgroup.procs", text=f"{member.pid}\n")
        group = ControlGroup({"pids": pids})
        assert group.list_members() == {member.pid}
        group.kill()
        assert member.wait(10) == -9
    ControlGroup({"unified": tmp_path / "gone"}).kill()


def test_groups_with_processes_are_removed_later(tmp_path: Path) -> None:
    busy, empty = _create_files(tmp_path / "busy", "file"), _create_files(tmp_path / "empty")
    assert not ControlGroup({"pids": busy, "cpu": empty}).remove()
    assert not empty.exists()
    assert ControlGroup({"pids": tmp_path / "gone"}).remove()


class _Tree:
    """A tree of version 2 in plain files. The kernel creates files in new groups; here there are none."""

    def __init__(self, root: Path) -> None:
        self.mount = root / "cgroup"
        self.process = root / "process"
        self.process.mkdir(parents=True)

    def write(self, *, own: str, mounts: str) -> ControlGroups:
        (self.process / "cgroup").write_text(own)
        (self.process / "mountinfo").write_text(mounts)
        return ControlGroups.detect(self.process)


def test_delegated_group_moves_the_agent_into_a_leaf(tmp_path: Path) -> None:
    tree = _Tree(tmp_path)
    base = tree.mount / "system.slice" / "ebbtide-agent.service"
    _create_files(base, "cgroup.controllers", text="cpu io memory pids")
    _create_files(base, "cgroup.type", "cgroup.subtree_control")
    mounts = f"35 24 0:30 / {tree.mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    groups = tree.write(own="0::/system.slice/ebbtide-agent.service\n", mounts=mounts)
    assert groups.bases == {"unified": base}
    assert (base / "agent" / "cgroup.procs").read_text() == str(os.getpid())
    assert (base / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    restarted = tree.write(own="0::/system.slice/ebbtide-agent.service/agent\n", mounts=mounts)
    assert restarted.bases == {"unified": base}
    assert not list(base.glob("ebbtide-*"))


def test_group_outside_of_the_mount_falls_back_to_the_mount_point(tmp_path: Path) -> None:
    tree = _Tree(tmp_path)
    tree.mount.mkdir()
    groups = tree.write(own="0::/elsewhere\n", mounts=f"35 24 0:30 /pod {tree.mount} rw - cgroup2 cgroup2 rw\n")
    assert groups.bases == {"unified": tree.mount}
    assert groups.controllers == frozenset()


def test_machine_without_control_groups_has_no_controllers(tmp_path: Path) -> None:
    groups = _Tree(tmp_path).write(own="", mounts="22 1 254:0 / / rw - ext4 /dev/vda rw\n")
    assert groups == ControlGroups()
    assert groups.create("run").procs_files == ()


def test_names_of_runs_are_distinct_and_stable(tmp_path: Path) -> None:
    groups = ControlGroups({"pids": tmp_path}, frozenset({"pids"}))
    first, again, second = groups.create("a"), groups.create("a"), groups.create("b")
    assert first.paths == again.paths != second.paths
    assert [path.is_dir() for path in (*first.paths.values(), *second.paths.values())] == [True, True]
