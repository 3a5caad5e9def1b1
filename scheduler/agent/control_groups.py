"""Control groups of the machine: limits on all processes of a generation, counts of memory kills, and one kill for all.

Version 2 is used where the agent may create groups there. Controllers that are not available in it are used in version
1, so a machine with both gets all its limits. Groups are created below the agent's own, so its limits hold for them.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.domain.run_document import ResourceLimits

CONTROLLERS = ("memory", "pids", "cpu")
_UNIFIED = "unified"
_AGENT_LEAF = "agent"
_CPU_PERIOD_US = 100_000
_CPU_QUOTA_MIN_US = 1_000
_CPU_WEIGHTS = (("cpu", "cpu.shares", 1024, 262_144), (_UNIFIED, "cpu.weight", 100, 10_000))
"""Controller, file, default and maximum of the weight with which groups compete for cores, by version."""
_FULL_SHARE = 0.99
"""Share of a memory limit whose use counts as reaching it: the kernel charges memory in batches."""
_LIMIT_FILE_V1 = {"memory": "memory.limit_in_bytes", "pids": "pids.max", "cpu": "cpu.cfs_quota_us"}
_LIMIT_FILE_V2 = {"memory": "memory.max", "pids": "pids.max", "cpu": "cpu.max"}


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The groups of one generation: `unified` for version 2, and one per controller of version 1."""

    paths: Mapping[str, Path]

    @property
    def procs_files(self) -> tuple[Path, ...]:
        """Files that take the id of a process that shall join."""
        return tuple(path / "cgroup.procs" for path in dict.fromkeys(self.paths.values()))

    def limit(self, limits: ResourceLimits, *, gpus: int = 1) -> None:
        """Set the limits whose controllers are available.

        Args:
            gpus: GPUs that the generation holds. Where cores are short, it gets time in proportion to them.

        Raises:
            OSError: the kernel rejects a limit.
        """
        self._weigh_cpus(gpus)
        for controller, write in (("memory", _limit_memory), ("pids", _limit_processes), ("cpu", _limit_cpus)):
            if controller in self.paths:
                write(self.paths[controller], limits, is_v2=False)
            elif _UNIFIED in self.paths and (self.paths[_UNIFIED] / _LIMIT_FILE_V2[controller]).exists():
                write(self.paths[_UNIFIED], limits, is_v2=True)

    def kill(self) -> None:
        """Kill all processes in the groups, at once where the kernel offers it. Groups that are gone have none."""
        kill_file = self.paths.get(_UNIFIED, Path()) / "cgroup.kill"
        if _UNIFIED in self.paths and kill_file.exists():
            with suppress(FileNotFoundError):
                kill_file.write_text("1")
            return
        for pid in self.list_members():
            with suppress(ProcessLookupError):
                self._kill_member(pid)

    def list_members(self) -> set[int]:
        """Return the ids of the processes in the groups."""
        members = set[int]()
        for path in self.procs_files:
            with suppress(FileNotFoundError):
                members.update(map(int, path.read_text().split()))
        return members

    def read_oom_kills(self) -> int:
        """Return how many processes the kernel has killed for the memory limit; 0 if it does not count them."""
        for controller, name in (("memory", "memory.oom_control"), (_UNIFIED, "memory.events")):
            with suppress(OSError):
                lines = (self.paths[controller] / name).read_text().splitlines() if controller in self.paths else []
                counts = dict(line.split() for line in lines)
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
        return 0

    def read_exceeded_memory(self) -> int | None:
        """Return the memory limit in bytes at which the kernel has killed a process, None if it has not.

        A process that is killed because the whole machine is out of memory does not count.
        """
        if not self.read_oom_kills():
            return None
        if "memory" in self.paths:
            # Not memory.failcnt, which recent kernels leave at 0.
            limit, peak = (self._read("memory", f"memory.{name}_in_bytes") for name in ("limit", "max_usage"))
            is_hit = peak.isdigit() and limit.isdigit() and int(peak) >= _FULL_SHARE * int(limit)
        else:
            events = dict(line.split() for line in self._read(_UNIFIED, "memory.events").splitlines())
            limit, is_hit = self._read(_UNIFIED, "memory.max"), events.get("oom", "0") != "0"
        return int(limit) if limit.isdigit() and is_hit else None

    def remove(self) -> bool:
        """Remove the groups. Return False if processes are left in one."""
        is_removed = True
        for path in self.paths.values():
            try:
                path.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                is_removed = False
        return is_removed

    def _read(self, controller: str, name: str) -> str:
        with suppress(OSError):
            return (self.paths[controller] / name).read_text().strip()
        return ""

    def _weigh_cpus(self, gpus: int) -> None:
        for controller, name, default, maximum in _CPU_WEIGHTS:
            if controller in self.paths and (self.paths[controller] / name).exists():
                (self.paths[controller] / name).write_text(str(min(gpus * default, maximum)))

    def _kill_member(self, pid: int) -> None:
        # The descriptor keeps the id from being used again between the second check and the signal.
        descriptor = os.pidfd_open(pid)
        try:
            if pid in self.list_members():
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The places where the agent may create groups: `unified`, and controllers of version 1."""

    bases: Mapping[str, Path] = field(default_factory=dict)
    controllers: frozenset[str] = frozenset()

    @classmethod
    def detect(cls, process: Path = Path("/proc/self")) -> ControlGroups:
        """Find the usable groups of the machine by creating one in each, and removing it.

        Args:
            process: folder with `cgroup` and `mountinfo` of this process.
        """
        own, bases, controllers = _read_own_groups(process), dict[str, Path](), set[str]()
        for mount in _read_mounts(process):
            for name in mount.controllers:
                base = mount.locate(own.get("" if name == _UNIFIED else name, "/"))
                if name == _UNIFIED:
                    base = _delegate(base)
                    found = _probe(base, _LIMIT_FILE_V2)
                else:
                    found = _probe(base, {name: _LIMIT_FILE_V1[name]})
                if found is not None and (found or name == _UNIFIED):
                    bases[name] = base
                    controllers |= found
        return cls(bases, frozenset(controllers))

    def read_memory_bytes(self) -> int | None:
        """Return the memory limit of the groups that contain those of generations, None without one."""
        if "memory" in self.bases:
            lines = (self.bases["memory"] / "memory.stat").read_text().splitlines()
            return int(dict(line.split() for line in lines)["hierarchical_memory_limit"])
        folder, found = self.bases.get(_UNIFIED, Path()), list[int]()
        while (folder / "memory.max").exists():  # the root has none
            text = (folder / "memory.max").read_text().strip()
            found += [int(text)] if text.isdigit() else []
            folder = folder.parent
        return min(found, default=None)

    def create(self, name: str) -> ControlGroup:
        """Create the groups of a generation, or return those that exist.

        Args:
            name: distinguishes the generation from all others on the machine, for example the path of its folder.

        Raises:
            OSError: a group cannot be created.
        """
        leaf = f"ebbtide-{hashlib.sha256(name.encode()).hexdigest()[:24]}"
        paths = {controller: base / leaf for controller, base in self.bases.items()}
        for path in paths.values():
            path.mkdir(exist_ok=True)
        return ControlGroup(paths)


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy: the group at its root, and its controllers that are of use here."""

    path: Path
    root: str
    controllers: tuple[str, ...]

    def locate(self, group: str) -> Path:
        """Return the folder of a group, or the mount point if the group lies outside of the mount."""
        relative = os.path.relpath(group, self.root)
        folder = self.path / relative
        return folder if not relative.startswith("..") and folder.is_dir() else self.path


def _read_mounts(process: Path) -> Iterator[_Mount]:
    for line in (process / "mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split()[:3]
        root, path = fields.split()[3:5]
        if kind == "cgroup2":
            yield _Mount(Path(path), root, (_UNIFIED,))
        elif kind == "cgroup":
            yield _Mount(Path(path), root, tuple(name for name in CONTROLLERS if name in options.split(",")))


def _read_own_groups(process: Path) -> dict[str, str]:
    """Return the group of this process by controller; by the empty string for version 2."""
    groups = dict[str, str]()
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), group)
    return groups


def _delegate(base: Path) -> Path:
    """Enable the controllers for groups below the agent's own group of version 2, and return that group.

    The kernel requires that a group with enabled controllers has no process, so the agent moves into a leaf. An agent
    that starts in that leaf was restarted. Without permission nothing changes.
    """
    if base.name == _AGENT_LEAF:
        base = base.parent
    with suppress(OSError):
        offered = set((base / "cgroup.controllers").read_text().split()) & set(CONTROLLERS)
        if not offered:
            return base
        if (base / "cgroup.type").exists():  # the root has no such file and may hold processes
            leaf = base / _AGENT_LEAF
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text(str(os.getpid()))
        (base / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(offered)))
    return base


def _probe(base: Path, limit_files: Mapping[str, str]) -> set[str] | None:
    """Return the controllers whose limit a new group below `base` can set, None if no group can be created."""
    group = base / f"ebbtide-probe-{os.getpid()}"
    try:
        group.mkdir(exist_ok=True)
    except OSError:
        return None
    try:
        return {name for name, file in limit_files.items() if os.access(group / file, os.W_OK)}
    finally:
        with suppress(OSError):
            group.rmdir()


def _limit_memory(path: Path, limits: ResourceLimits, *, is_v2: bool) -> None:
    """Limit memory, and keep the group from evading the limit by swapping."""
    if limits.memory_bytes is None:
        return
    (path / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limits.memory_bytes))
    # Swap is limited alone in version 2, and together with memory in version 1. Kernels without swap have neither file.
    name, value = ("memory.swap.max", 0) if is_v2 else ("memory.memsw.limit_in_bytes", limits.memory_bytes)
    if (path / name).exists():
        (path / name).write_text(str(value))
    elif not is_v2 and (path / "memory.swappiness").exists():
        (path / "memory.swappiness").write_text("0")


def _limit_processes(path: Path, limits: ResourceLimits, *, is_v2: bool) -> None:
    del is_v2  # both versions have the same file
    if limits.processes is not None:
        (path / "pids.max").write_text(str(limits.processes))


def _limit_cpus(path: Path, limits: ResourceLimits, *, is_v2: bool) -> None:
    if limits.cpus is None:
        return
    quota_us = max(_CPU_QUOTA_MIN_US, round(limits.cpus * _CPU_PERIOD_US))
    if is_v2:
        (path / "cpu.max").write_text(f"{quota_us} {_CPU_PERIOD_US}")
    else:
        (path / "cpu.cfs_period_us").write_text(str(_CPU_PERIOD_US))
        (path / "cpu.cfs_quota_us").write_text(str(quota_us))
