"""Command lines of containers, and the choice of users and devices. No container is started."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.agent.containment import (
    ContainerFolders,
    Containment,
    ContainmentError,
    ContainmentLevel,
    ContainmentPolicy,
    LevelName,
    RankUser,
    find_device_groups,
    find_interpreter_folders,
    list_gpu_devices,
)
from scheduler.agent.control_groups import ControlGroups
from scheduler.agent.rank_environment import GpuVendor

USER = RankUser("ada", 1234567, 1234567, Path("/home/ada"))


@pytest.fixture
def machine(tmp_path: Path) -> Containment:
    (tmp_path / "state" / "jobs").mkdir(parents=True)
    level = ContainmentLevel(LevelName.FULL)
    return Containment(ContainmentPolicy(), (tmp_path / "state",), ControlGroups(), level, "/usr/bin/bwrap")


def _folders(tmp_path: Path, **more: tuple[Path, ...]) -> ContainerFolders:
    run = tmp_path / "state" / "jobs" / "job" / "gen-1@n"
    return ContainerFolders(run=run, working=tmp_path / "work", checkpoints=tmp_path, temporary=run / "tmp", **more)


def _find(words: Sequence[str], *sequence: object) -> int:
    """Return the position of a sequence of words, -1 without it."""
    wanted = [str(word) for word in sequence]
    return next((at for at in range(len(words)) if list(words[at : at + len(wanted)]) == wanted), -1)


def test_container_outlives_its_parent_and_has_its_own_processes(machine: Containment, tmp_path: Path) -> None:
    words = machine.build_command(_folders(tmp_path), ["program", "-x"], user=None)
    assert words[-3:] == ("--", "program", "-x")
    assert {"--unshare-pid", "--unshare-ipc", "--as-pid-1"} <= set(words)
    assert "--die-with-parent" not in words
    assert "--unshare-net" not in words


def test_hidden_folders_are_covered_after_what_contains_them(machine: Containment, tmp_path: Path) -> None:
    folders = _folders(tmp_path)
    words = machine.build_command(folders, ["program"], user=None)
    state = tmp_path / "state"
    positions = [
        _find(words, "--ro-bind", "/", "/"),
        _find(words, "--bind", folders.temporary, "/tmp"),
        _find(words, "--bind", tmp_path, tmp_path),
        _find(words, "--tmpfs", state),
        _find(words, "--dir", state / "jobs"),
        _find(words, "--bind", folders.run, folders.run),
    ]
    assert positions == sorted(positions)
    assert positions[0] > 0


def test_only_devices_of_the_job_are_added(machine: Containment, tmp_path: Path) -> None:
    words = machine.build_command(_folders(tmp_path, devices=(Path("/dev/nvidia3"),)), ["program"], user=None)
    assert [words[at + 1] for at, word in enumerate(words) if word == "--dev-bind-try"] == ["/dev/nvidia3"]
    assert _find(words, "--dev", "/dev") > 0


def test_interpreter_in_a_closed_home_is_the_only_thing_visible_there(machine: Containment, tmp_path: Path) -> None:
    home = tmp_path / "home"
    venv = home / "project" / "venv"
    venv.mkdir(parents=True)
    home.chmod(0o700)
    words = machine.build_command(_folders(tmp_path, readable=(venv,)), ["program"], user=USER)
    closed = next(parent for parent in reversed(venv.parents) if not parent.stat().st_mode & 0o001)
    assert 0 < _find(words, "--tmpfs", closed) < _find(words, "--ro-bind", venv, venv)


def test_without_bubblewrap_the_command_is_not_changed(tmp_path: Path) -> None:
    machine = Containment(ContainmentPolicy(), (), ControlGroups(), ContainmentLevel(LevelName.NONE), "")
    assert machine.build_command(_folders(tmp_path), ["program"], user=None) == ("program",)


@pytest.mark.parametrize("relative", ["state", "state/jobs/other", ".", "state/../state"])
def test_folders_of_the_service_are_not_given_to_a_job(machine: Containment, tmp_path: Path, relative: str) -> None:
    with pytest.raises(ContainmentError, match="checkpointDir"):
        machine.check_visible(tmp_path / relative, name="checkpointDir")


def test_link_to_a_folder_of_the_service_is_not_given_to_a_job(machine: Containment, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "state" / "jobs")
    with pytest.raises(ContainmentError):
        machine.check_visible(tmp_path / "link" / "other", name="checkpointDir")
    assert machine.check_visible(tmp_path / "mine", name="checkpointDir") == tmp_path / "mine"


def test_owner_is_mapped_to_a_user_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    names = {"ada": 1001, "ann": 1002, "nobody": 65534}

    def find(name: str) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", names[name], names[name], "", "/nonexistent", ""))

    monkeypatch.setattr(pwd, "getpwnam", find)
    policy = ContainmentPolicy(users={"ada": "ada", "token:tok-2": "ann", "eve": "missing"})
    owners = (("token:tok-1", "ada"), ("token:tok-2", "ada"), ("oidc:https://idp.example#ada", "oidc:ada"), ("", "bob"))
    found = [policy.find_user(*owner) or USER for owner in owners]
    assert [(user.uid, user.home) for user in found] == [(uid, Path("/tmp")) for uid in (1001, 1002, 65534, 65534)]
    with pytest.raises(ContainmentError, match="--user eve=missing: "):
        policy.find_user("token:tok-3", "eve")
    with pytest.raises(ContainmentError, match="--default-user gone: "):
        replace(policy, default_user="gone").find_user("token:tok-4", "bob")
    names |= {"ebbtide": 998, "ebbtide-jobs": 999}
    assert (policy.find_user("token:tok-4", "bob") or USER).uid == 999
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    assert policy.find_user("token:tok-3", "eve") is None


def test_machine_without_bubblewrap_says_so_and_can_be_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Containment.detect(ContainmentPolicy(), hidden=[], groups=ControlGroups())
    assert found.level.name is LevelName.NONE
    assert "bwrap" in found.level.missing[0]
    assert sum("no control group" in reason for reason in found.level.missing) == 3
    with pytest.raises(ContainmentError, match=r"bwrap.*memory.*pids.*cpu"):
        Containment.detect(ContainmentPolicy(requires_full=True), hidden=[], groups=ControlGroups())


def test_hidden_file_is_named_as_a_gap_where_ranks_have_the_users_rights(tmp_path: Path) -> None:
    """SQLite replaces its write-ahead log, and a restored database is another file."""
    database = tmp_path / "ebbtide.sqlite"
    database.touch()
    gaps = [
        Containment.detect(ContainmentPolicy(keeps_user=True), hidden=[hidden], groups=ControlGroups()).level.missing
        for hidden in (database, tmp_path)
    ]
    assert [any(str(database) in reason for reason in missing) for missing in gaps] == [True, False]


def test_device_nodes_are_those_of_the_jobs_gpus(tmp_path: Path) -> None:
    (tmp_path / "dri").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "kfd", "dri/renderD128", "davinci2", "sda"):
        (tmp_path / name).touch()

    def names(vendor: GpuVendor, minor: int) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in list_gpu_devices(vendor, [minor], dev=tmp_path)]

    assert names(GpuVendor.NVIDIA, 1) == ["nvidiactl", "nvidia-uvm", "nvidia1"]
    assert names(GpuVendor.AMD, 128) == ["kfd", "dri/renderD128"]
    assert names(GpuVendor.ASCEND, 2) == ["davinci2"]
    assert 0 not in find_device_groups([tmp_path / "nvidia0"])


def test_interpreter_folders_are_real_installations_only(tmp_path: Path) -> None:
    venv, base, fake = tmp_path / "venv", tmp_path / "python", tmp_path / "alice"
    for path in (venv / "bin", base / "bin", base / "lib" / "python3.11", fake / "bin"):
        path.mkdir(parents=True)
    for path in (base / "bin" / "python3", base / "lib" / "python3.11" / "os.py", fake / "bin" / "python3"):
        path.touch()
    with pytest.raises(ContainmentError, match=r"pyvenv\.cfg"):
        find_interpreter_folders(venv)
    (venv / "bin" / "python3").symlink_to(base / "bin" / "python3")
    (venv / "pyvenv.cfg").write_text(f"home = {fake / 'bin'}\nversion = 3.11.7\n")
    assert find_interpreter_folders(venv) == (venv, base)
