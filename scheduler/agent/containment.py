"""Containers of runs: what processes of a job can see, change and become on a machine.

Bubblewrap gives each generation its own PID and IPC namespaces and a file system in which everything is read-only
except the folders of the job. The agent's state and the secrets of the control plane are covered by empty folders. When
the agent is root, ranks run as another user without privileges; else bubblewrap uses a user namespace, and ranks keep
the agent's user. The network is shared with the machine.

The level of containment is found by a real container at the agent's start, never assumed.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from scheduler.agent.control_groups import CONTROLLERS, ControlGroup, ControlGroups
from scheduler.agent.rank_environment import GpuVendor
from scheduler.agent.resource_limits import DEFAULT_MEMORY_POLICY, NO_MEMORY_BUDGET, MemoryBudget, MemoryPolicy
from scheduler.domain.run_document import ResourceLimits, RunDocument

DEFAULT_LIMITS = ResourceLimits(processes=16_384)
"""Limits of all jobs besides their memory. Without one on processes, a job could stop the whole machine."""

DEFAULT_USERS = ("ebbtide-jobs", "nobody")
"""Users of jobs without a configured one, the first that exists. Never the service's user: it owns the database."""
SERVICE_FOLDER = Path("/var/lib/ebbtide")
"""Folder with database, secrets and tokens of a service that its systemd unit runs."""
_KEPT_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_DAC_READ_SEARCH")
"""Capabilities of the supervisor: to become the ranks' user, to signal the ranks, and to load its own code."""
_TEMPORARY_FOLDERS = (Path("/tmp"), Path("/var/tmp"))
_SHARED_MEMORY = Path("/dev/shm")
_SYSTEM_FOLDERS = (Path("/"), Path("/usr"))
_USER_SERVICES = Path("/run/user")
_PROBE_TIMEOUT_S = 20.0
_PROBE = """
import json, os, sys
uid, gid = int(sys.argv[1]), int(sys.argv[2])
visible = [path for path in sys.argv[3:] if os.path.isdir(path) and os.listdir(path)]
if uid >= 0:
    os.setgroups([]); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
print(json.dumps({"pid": os.getpid(), "others": others, "uid": os.getuid(), "visible": visible,
                  "read_only": bool(os.statvfs("/").f_flag & os.ST_RDONLY)}))
"""
"""Program that looks at its container from within, with the ranks' user, and prints what it sees."""


class ContainmentError(ValueError):
    """The machine cannot contain a run as required, or a folder of a job must not be visible."""


@dataclass(frozen=True, slots=True)
class RankUser:
    """The user of a job's processes. `groups` are additional groups, of devices."""

    name: str
    uid: int
    gid: int
    home: Path
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainmentPolicy:
    """Settings of a machine for the containers of runs.

    Args:
        users: operating-system user by id or name of the owner of a job.
        default_user: user of all other owners. Empty chooses `ebbtide-jobs` if that user exists, else `nobody`.
        writable: folders that all jobs may write to, besides their own, for example shared caches.
        keeps_user: run all ranks as the agent's user, even if that is root.
        requires_full: refuse to run where the level is less than full.
        limits: limits of jobs that set none, besides their memory.
        memory: how the machine's memory is divided.
        ends_with_agent: whether runs end at once when the agent ends for any reason, as in a Slurm allocation.
    """

    users: Mapping[str, str] = field(default_factory=dict)
    default_user: str = ""
    writable: tuple[Path, ...] = ()
    keeps_user: bool = False
    requires_full: bool = False
    limits: ResourceLimits = DEFAULT_LIMITS
    memory: MemoryPolicy = DEFAULT_MEMORY_POLICY
    ends_with_agent: bool = False

    def find_user(self, owner_id: str, owner: str) -> RankUser | None:
        """Return the user of an owner's jobs. None: the agent's, because it is not root, or the policy says so.

        A user of the owner's id comes first, so that owners of one name can have users of their own.

        Raises:
            ContainmentError: the configured user does not exist.
        """
        if self.keeps_user or os.geteuid() != 0:
            return None
        mapped = next((name for name in (owner_id, owner) if self.users.get(name)), "")
        chosen = self.users[mapped] if mapped else self.default_user
        for name in (chosen,) if chosen else DEFAULT_USERS:
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            home = Path(entry.pw_dir)
            return RankUser(name, entry.pw_uid, entry.pw_gid, home if home.is_dir() else Path("/tmp"))
        users = chosen or " or ".join(DEFAULT_USERS)
        setting = f"--user {mapped}={chosen}" if mapped else f"--default-user {chosen}".rstrip()
        raise ContainmentError(
            f"{setting}: no user {users} exists on this machine. Create the user, or name another one with this option."
        )


class LevelName(StrEnum):
    """How well runs are contained: by all means, by some, by the pod that they share with the agent, or not at all."""

    FULL = "full"
    PARTIAL = "partial"
    POD = "pod"
    NONE = "none"

    @property
    def has_namespaces(self) -> bool:
        """Whether each run has namespaces of its own, so that its processes end with its supervisor."""
        return self in (LevelName.FULL, LevelName.PARTIAL)


@dataclass(frozen=True, slots=True)
class ContainmentLevel:
    """Level of containment. `missing` names each gap and its cause. All jobs of a machine share its network.

    `memory` says how much a job gets that states no limit; empty where the agent sets none. `shared_user` is the user
    of all owners who have none of their own: the kernel does not keep the files of their jobs apart.
    """

    name: LevelName
    missing: tuple[str, ...] = ()
    network: str = "shared"
    memory: str = ""
    shared_user: str = ""

    def __str__(self) -> str:
        memory = f", memory: {self.memory}" if self.memory else ""
        user = f", user of unmapped owners: {self.shared_user}" if self.shared_user else ""
        missing = f", without {'; '.join(self.missing)}" if self.missing else ""
        return f"{self.name} (network: {self.network}{user}{memory}){missing}"


@dataclass(frozen=True, slots=True)
class ContainerFolders:
    """Folders and devices of one container, in addition to the read-only file system of the machine.

    Args:
        run: folder of the generation.
        working: working directory.
        checkpoints: checkpoint directory, None for checkpoints in an object store.
        temporary: folder that ranks see as /tmp.
        readable: folders that ranks must read although a parent is closed to their user, for example an interpreter.
        visible_files: files in hidden folders that stay visible, read-only.
        devices: device nodes of the job's GPUs.
    """

    run: Path
    working: Path
    checkpoints: Path | None
    temporary: Path
    readable: tuple[Path, ...] = ()
    visible_files: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Containment:
    """The containment of a machine.

    Args:
        hidden: folders that no rank may see: the agent's state, and the secrets of the control plane. None lies in
            another one. Name folders and not files, because a file that is replaced would be visible again.
        bwrap: path of bubblewrap, empty where it does not work.
        memory: memory of jobs.
    """

    policy: ContainmentPolicy
    hidden: tuple[Path, ...]
    groups: ControlGroups
    level: ContainmentLevel
    bwrap: str
    memory: MemoryBudget = NO_MEMORY_BUDGET

    @classmethod
    def detect(
        cls, policy: ContainmentPolicy, *, hidden: Sequence[Path], groups: ControlGroups | None = None
    ) -> Containment:
        """Find out what the machine enforces, by starting a container and trying to leave it.

        Raises:
            ContainmentError: the policy requires the full level, or names a user that does not exist.
            ValueError: the policy reserves all memory.
        """
        groups = ControlGroups.detect() if groups is None else groups
        resolved = _list_outermost(path.resolve() for path in hidden)
        bwrap = shutil.which("bwrap") or ""
        missing = _probe(cls(policy, resolved, groups, ContainmentLevel(LevelName.NONE), bwrap))
        missing += _find_service_owners(policy, resolved)
        shared = policy.find_user("", "")
        if shared is None:  # another user may not read them in any case
            missing += [
                f"a lasting cover of {path}: it is a file, and visible once replaced"
                for path in resolved
                if path.is_file()
            ]
        is_contained = not any(reason.startswith("namespaces") for reason in missing)
        missing += [f"a limit on {name}: no control group" for name in CONTROLLERS if name not in groups.controllers]
        name = LevelName.PARTIAL if missing else LevelName.FULL
        memory = _find_memory(policy, groups)
        described = str(memory) if memory.bytes else ""
        user = _find_own_name() if shared is None else shared.name
        level = ContainmentLevel(
            name if is_contained else LevelName.NONE, tuple(missing), memory=described, shared_user=user
        )
        if policy.requires_full and level.name is not LevelName.FULL:
            raise ContainmentError(
                f"--require-containment: the level of this machine is {level}. Provide what is missing, or start the "
                "agent without this option."
            )
        return cls(policy, resolved, groups, level, bwrap if is_contained else "", memory)

    @classmethod
    def of_pod(cls) -> Containment:
        """Return the containment inside a pod of one job: the pod is the container, and Kubernetes sets its limits."""
        level = ContainmentLevel(LevelName.POD, network="of the pod")
        return cls(ContainmentPolicy(keeps_user=True, limits=ResourceLimits()), (), ControlGroups(), level, "")

    def create_group(self, name: str, document: RunDocument, *, gpus: Collection[int]) -> ControlGroup:
        """Create the control groups of a run, with its limits.

        Args:
            gpus: indices of the machine's GPUs, empty for slots of processors.

        Raises:
            OSError: a group cannot be created, or the kernel rejects a limit.
        """
        group = self.groups.create(name)
        limits = self.memory.derive_limits(document, gpus).with_defaults(self.policy.limits)
        group.limit(limits, gpus=len(document.ranks))
        return group

    def check_visible(self, path: Path, *, name: str) -> Path:
        """Return a folder that a job names, resolved.

        Raises:
            ContainmentError: it lies in a hidden folder, or contains one.
        """
        resolved = path.resolve()
        for hidden in self.hidden:
            if resolved == hidden or hidden in resolved.parents or resolved in hidden.parents:
                raise ContainmentError(f"{name}: {path} is or contains a folder of the service. Use another folder.")
        return resolved

    def build_command(
        self,
        folders: ContainerFolders,
        command: Sequence[str],
        *,
        user: RankUser | None,
        options: Sequence[str] = (),
        directory: Path = Path("/"),
    ) -> tuple[str, ...]:
        """Return the command line that runs `command` as PID 1 of a container.

        The container has --die-with-parent only if runs must not outlive the agent. Later mounts cover earlier ones, so
        the order counts: what a job may write to comes last.

        Args:
            user: the user of the ranks, which `command` changes to by itself.
            options: further options of bubblewrap.
            directory: where `command` starts.
        """
        if not self.bwrap:
            return ("setpriv", "--pdeathsig", "KILL", "--", *command) if self.policy.ends_with_agent else tuple(command)
        words = [self.bwrap, "--unshare-pid", "--unshare-ipc", "--as-pid-1", "--new-session"]
        words += ["--chdir", str(directory), *options]
        if self.policy.ends_with_agent:
            words.append("--die-with-parent")
        if os.geteuid() == 0:
            words += ["--cap-drop", "ALL"]
            words += [word for name in _KEPT_CAPABILITIES for word in ("--cap-add", name)]
        else:
            words += ["--unshare-user"]
        words += ["--ro-bind", "/", "/", "--dev", "/dev", "--perms", "1777", "--tmpfs", str(_SHARED_MEMORY)]
        words += [word for device in folders.devices for word in ("--dev-bind-try", str(device), str(device))]
        words += ["--proc", "/proc"]
        for path in _TEMPORARY_FOLDERS:
            if path.is_dir() and not path.is_symlink():
                words += ["--bind", str(folders.temporary), str(path)]
        closed = [] if user is None else _list_closed_parents((*folders.readable, folders.working), user)
        words += [word for path in closed for word in ("--tmpfs", str(path))]
        binds = [("--ro-bind", path) for path in (*folders.readable, *folders.visible_files)]
        own = (*self.policy.writable, folders.working, folders.checkpoints, folders.run)
        binds += [("--bind", path) for path in dict.fromkeys(own) if path is not None]
        # A bind that contains a hidden folder is covered again. One inside of a hidden folder appears in the cover.
        is_inside = [any(hidden in path.parents for hidden in self.hidden) for _, path in binds]
        outside = (bind for bind, inside in zip(binds, is_inside, strict=True) if not inside)
        words += _list_words(outside, (*closed, *_TEMPORARY_FOLDERS, _SHARED_MEMORY))
        for path in (*self.hidden, _USER_SERVICES):
            words += _cover(path)
        words += _list_words((bind for bind, inside in zip(binds, is_inside, strict=True) if inside), self.hidden)
        return (*words, "--", *command)


def list_gpu_devices(
    vendor: GpuVendor, minors: Sequence[int], *, capability_minors: Sequence[int] = (), dev: Path = Path("/dev")
) -> tuple[Path, ...]:
    """Return the device nodes that a job needs for its GPUs, as far as the machine has them.

    Args:
        minors: numbers of the GPUs' own nodes: of `nvidia<n>`, `renderD<n>` or `davinci<n>`.
        capability_minors: numbers of `nvidia-caps/nvidia-cap<n>`, for MIG instances.
    """
    shared, own = {
        GpuVendor.NVIDIA: (("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"), "nvidia{}"),
        GpuVendor.AMD: (("kfd",), "dri/renderD{}"),
        GpuVendor.ASCEND: (("davinci_manager", "devmm_svm", "hisi_hdc"), "davinci{}"),
    }[vendor]
    names = [*shared, "infiniband", *(own.format(minor) for minor in dict.fromkeys(minors))]
    names += [f"nvidia-caps/nvidia-cap{minor}" for minor in capability_minors]
    return tuple(dev / name for name in names if (dev / name).exists())


def find_device_groups(devices: Sequence[Path]) -> tuple[int, ...]:
    """Return the groups that may use the devices, except root's. ROCm's nodes are open to a group only."""
    groups = {path.stat().st_gid for path in devices if path.exists()}
    return tuple(sorted(group for group in groups if group != 0 and _is_group(group)))


def find_interpreter_folders(venv: Path) -> tuple[Path, ...]:
    """Return the folders of a virtual environment and of the Python installation that it was made from.

    A folder that only claims to be an installation is left out: its owner may not have opened it to others.

    Raises:
        ContainmentError: the folder is not a virtual environment.
    """
    try:
        lines = (venv / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise ContainmentError(
            f"venv: {venv} has no readable pyvenv.cfg. Use the folder of a virtual environment on this machine."
        ) from None
    settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    binaries = (Path(settings.get("home", "")) / "python3", venv / "bin" / "python3")
    bases = [binary.resolve().parent.parent for binary in binaries if binary.is_file()]
    installed = [base for base in bases if base not in _SYSTEM_FOLDERS and any(base.glob("lib/python3.*/os.py"))]
    return tuple(dict.fromkeys((venv.resolve(), *installed)))


def find_own_folders() -> tuple[Path, ...]:
    """Return the folders of the agent's interpreter and packages. They hold no secret."""
    folders = (Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2])
    return tuple(dict.fromkeys(path.resolve() for path in folders if path.resolve() not in _SYSTEM_FOLDERS))


def _find_memory(policy: ContainmentPolicy, groups: ControlGroups) -> MemoryBudget:
    """Return the memory of all jobs: of the machine, or of the groups that contain the agent, such as a Slurm job's."""
    if "memory" not in groups.controllers:
        return NO_MEMORY_BUDGET
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MemoryBudget.create(policy.memory, min(machine_bytes, groups.read_memory_bytes() or machine_bytes))


def _find_own_name() -> str:
    """Return the name of the agent's user, or its number where it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _probe(containment: Containment) -> list[str]:
    """Start a container, try to leave it, and return what it does not enforce."""
    user = containment.policy.find_user("", "")
    if not containment.bwrap:
        return ["namespaces: bubblewrap (bwrap) is not installed"]
    with tempfile.TemporaryDirectory(prefix="ebbtide-probe-") as created:
        own = Path(created).resolve()
        identity = ("-1", "-1") if user is None else (str(user.uid), str(user.gid))
        command = (sys.executable, "-I", "-S", "-c", _PROBE, *identity, *map(str, containment.hidden))
        folders = ContainerFolders(own, own, own, own, readable=find_own_folders())
        argv = containment.build_command(folders, command, user=user)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    if done.returncode != 0:
        return [f"namespaces: {done.stderr.strip()[-300:] or f'bubblewrap ended with {done.returncode}'}"]
    return list(_find_missing(json.loads(done.stdout), user))


def _find_service_owners(policy: ContainmentPolicy, hidden: Sequence[Path]) -> Iterator[str]:
    """Yield why users of jobs are not separate from the service on this machine: they own what it keeps secret."""
    if not SERVICE_FOLDER.exists() or any(path == SERVICE_FOLDER or path in SERVICE_FOLDER.parents for path in hidden):
        return
    owner = SERVICE_FOLDER.stat().st_uid
    users = set[RankUser | None]()
    for name in ("", *policy.users):
        with suppress(ContainmentError):  # a user that does not exist owns nothing
            users.add(policy.find_user(name, name))
    for user in users:
        if user is not None and user.uid == owner:
            yield f"a separate user: {user.name} owns {SERVICE_FOLDER}, which --hide does not name"


def _find_missing(seen: Mapping[str, Any], user: RankUser | None) -> Iterator[str]:
    if seen["pid"] != 1 or seen["others"]:
        yield "namespaces: processes of the machine are visible"
    if seen["visible"]:
        yield f"namespaces: hidden folders are visible: {', '.join(seen['visible'])}"
    if not seen["read_only"]:
        yield "a read-only file system"
    if user is None:
        yield "a separate user: the agent is not root"
    elif seen["uid"] == 0:
        yield "a separate user: ranks run as root"


def _list_outermost(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the paths that lie in no other one. The cover of a folder would show the covers of paths in it."""
    every = dict.fromkeys(paths)
    return tuple(path for path in every if every.keys().isdisjoint(path.parents))


def _list_words(binds: Iterable[tuple[str, Path]], covers: Sequence[Path]) -> list[str]:
    """Return the options of binds. Parents in a cover are created first: bubblewrap would close them to other users."""
    words = list[str]()
    for option, path in binds:
        parents = [parent for parent in _list_parents(path) if any(cover in parent.parents for cover in covers)]
        words += [word for parent in parents for word in ("--dir", str(parent))]
        words += [option, str(path), str(path)]
    return words


def _cover(path: Path) -> list[str]:
    """Return options that hide a folder behind an empty one, or a file behind an empty device."""
    if path.is_dir():
        return ["--tmpfs", str(path)]
    return ["--ro-bind", "/dev/null", str(path)] if path.exists() else []


def _list_closed_parents(paths: Sequence[Path], user: RankUser) -> list[Path]:
    """Return the parents that the user may not enter. An empty folder replaces each, in which only `paths` appear."""
    closed = [next((parent for parent in _list_parents(path) if not _may_enter(parent, user)), None) for path in paths]
    return list(dict.fromkeys(parent for parent in closed if parent is not None))


def _list_parents(path: Path) -> list[Path]:
    return [parent for parent in reversed(path.parents) if parent != Path("/")]


def _may_enter(path: Path, user: RankUser) -> bool:
    status = path.stat()
    if status.st_uid == user.uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid in (user.gid, *user.groups):
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


def _is_group(gid: int) -> bool:
    try:
        grp.getgrgid(gid)
    except KeyError:
        return False
    return True
