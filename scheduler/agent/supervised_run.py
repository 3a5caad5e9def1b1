"""The agent's handle on one generation of a job on one node: prepare, start, observe and end it, or find it again.

The handle keeps no state that a restarted agent would miss: `SupervisedRun.recover` reads all of it from the folder.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from scheduler.agent.checkpoint_folder import open_checkpoint_folder
from scheduler.agent.container_process import STATUS_FD, ContainerProcess
from scheduler.agent.containment import (
    ContainerFolders,
    Containment,
    LevelName,
    RankUser,
    find_device_groups,
    find_own_folders,
)
from scheduler.agent.control_groups import ControlGroup
from scheduler.agent.rank_environment import (
    GpuVendor,
    MachineFacts,
    RunPaths,
    build_argv,
    build_environment,
    is_reference_trainer,
    list_processes,
    select_inherited,
    select_pod_variables,
)
from scheduler.agent.run_folder import RunFolder
from scheduler.agent.run_secrets import SecretsFolder, discard_secrets, find_mask
from scheduler.agent.run_site import RunSite
from scheduler.agent.start_variables import read_start_variables
from scheduler.agent.stray_processes import RUN_DIR_VARIABLE, kill_processes
from scheduler.agent.supervisor_command import build_supervisor_command, find_trainer_interpreter
from scheduler.domain.codec import decode, encode
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.observation import RankStatus
from scheduler.domain.run_document import MasterAddress, RunDocument
from scheduler.executors.run_outcome import read_oom_kills

logger = logging.getLogger(__name__)

_REMOVAL_TIMEOUT_S = 1.0
_POLL_S = 0.005
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables of the supervisor. It can fork ranks only if the modules that it loads start no threads."""


class SupervisedPhase(StrEnum):
    """Phases of a run, in order."""

    PREPARING = "preparing"
    PREPARED = "prepared"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run as its agent observes it.

    Args:
        port: the reserved MASTER_PORT on the machine of rank 0, else 0.
        exit_codes: by rank, negative signal numbers for ranks that a signal ended. Ranks that the end of the container
            killed have none.
        statuses: last valid status by rank.
        failure: why a rank could not be started, or the container; else empty.
        permanent_fault: why another start cannot succeed either, None if it may.
        loss: why the supervisor ended its ranks, or that it was killed itself; else empty.
        oom_kills: processes that the kernel has killed for lack of memory. None: unknown.
        exceeded_memory: memory limit of the run in bytes, if the kernel has killed a process for it.
        tails: last lines of output of ranks that failed.
    """

    phase: SupervisedPhase
    port: int = 0
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)
    failure: str = ""
    permanent_fault: PermanentFault | None = None
    loss: str = ""
    oom_kills: int | None = None
    exceeded_memory: int | None = None
    tails: Mapping[int, str] = field(default_factory=dict)

    @property
    def is_prepared(self) -> bool:
        return self.phase is SupervisedPhase.PREPARED

    @property
    def has_ended(self) -> bool:
        """Whether no process of the run is left."""
        return self.phase is SupervisedPhase.ENDED


@dataclass(frozen=True, slots=True)
class _Record:
    """`supervisor.json`: what is not in the document. `pid` is 0 until the container exists.

    `interpreter` runs the supervisor, which forks its ranks; empty if ranks are programs of their own.
    """

    level: LevelName
    working_dir: str
    checkpoint_dir: str
    home: str
    cores: int
    vendor: GpuVendor
    gpu_ids: Mapping[int, str]
    user: str | None
    uid: int
    gid: int
    group_ids: tuple[int, ...]
    control_groups: Mapping[str, str]
    interpreter: str = ""
    pid: int = 0
    start_ticks: int = 0


class SupervisedRun:
    """One generation of a job on one node of this machine."""

    def __init__(self, folder: RunFolder, document: RunDocument, record: _Record | None) -> None:
        self.folder = folder
        self.document = document
        self._record = record
        self._unrecorded_failure = ""
        self._unrecorded_fault: PermanentFault | None = None
        self._statuses: dict[int, RankStatus] = {}
        self._logged_errors: set[str] = set()
        self._has_no_strays = False
        self._process = ContainerProcess(folder)
        if record is not None:
            self._process = ContainerProcess(folder, pid=record.pid, start_ticks=record.start_ticks)

    @classmethod
    def prepare(
        cls,
        document: RunDocument,
        folder: RunFolder,
        containment: Containment,
        site: RunSite,
        *,
        preload: Sequence[str] = (),
    ) -> SupervisedRun:
        """Create the folder and start the supervisor in its container. Ranks start with `start`.

        Args:
            preload: modules that the supervisor loads for a job of the reference trainer.

        Raises:
            ValueError: the job cannot run on this machine, for example because its user cannot write checkpoints.
            OSError: the folder, a control group or the container cannot be created.
        """
        user = containment.policy.find_user(document.owner_id, document.owner)
        if user is not None:
            user = replace(user, groups=find_device_groups(site.devices))
        checkpoints = open_checkpoint_folder(document.checkpoint_dir, containment, site.default_checkpoint_dir, user)
        location = document.checkpoint_dir if checkpoints is None else str(checkpoints)
        # The machine's `python` is often the agent's, and its folders may be closed to other users.
        secrets = [SecretsFolder.of(folder).path] if document.secrets else []
        readable = [*site.readable, *find_own_folders(), *secrets]
        if document.venv:
            readable += site.find_venv_folders(Path(document.venv), containment)
        inherited = _select_inherited(containment.level.name)
        interpreter = find_trainer_interpreter(inherited) if is_reference_trainer(document.command) else ""
        folder.create(document, gid=-1 if user is None else user.gid)
        is_contained = containment.level.name.has_namespaces
        if user is not None and not is_contained:
            folder.open_parents()
        group = containment.create_group(str(folder.path), document, gpus=site.gpus)
        record = _build_record(containment, site, user, location, group)
        run = cls(folder, document, replace(record, interpreter=interpreter))
        folder.write_record("supervisor.json", encode(run._record))
        folders = ContainerFolders(
            run=folder.path,
            working=site.working_dir,
            checkpoints=checkpoints,
            temporary=folder.temporary_path,
            readable=tuple(dict.fromkeys(readable)),
            visible_files=() if site.lease is None else (site.lease,),
            devices=site.devices,
        )
        options = ("--json-status-fd", str(STATUS_FD))
        command = build_supervisor_command(
            document, folder, site.lease, preload=preload if interpreter else (), interpreter=interpreter
        )
        run._process.launch(
            containment.build_command(folders, command, user=user, options=options),
            env=inherited | _ONE_THREAD | {RUN_DIR_VARIABLE: str(folder.path)},
            procs_files=group.procs_files,
            is_contained=is_contained,
        )
        run._record_process()
        return run

    @classmethod
    def recover(cls, folder: RunFolder) -> SupervisedRun:
        """Return the handle on a run that an earlier agent has prepared.

        Raises:
            ValueError: the run document is missing or malformed, or of another version.
        """
        record = folder.read_record("supervisor.json")
        run = cls(folder, folder.read_document(), None if record is None else decode(_Record, record))
        if run._record is not None and run._record.pid == 0:
            run._record_process()
        return run

    @classmethod
    def record_failure(
        cls, document: RunDocument, folder: RunFolder, reason: str, *, permanent_fault: PermanentFault | None = None
    ) -> SupervisedRun:
        """Return a run that has ended because it could not be prepared.

        If the disk is full or read-only, a restarted agent does not find the run again.
        """
        try:
            if not folder.path.exists():
                folder.create(replace(document, framework=""))  # its export may be what failed
            folder.write_record("failure.json", {"reason": reason, "permanent_fault": permanent_fault})
            folder.write_record("ended", {"at": time.time()})
        except (OSError, ValueError) as error:
            logger.warning("the failure of %s cannot be recorded: %s", folder.path, error)
            run = cls(folder, document, None)
            run._unrecorded_failure, run._unrecorded_fault = reason, permanent_fault
            return run
        return cls.recover(folder)

    def __str__(self) -> str:
        return f"{self.document.job_id} generation {self.document.generation} on {self.document.node}"

    @property
    def has_begun(self) -> bool:
        """Whether the ranks were ordered to start."""
        return (self.folder.path / "start.json").exists()

    @property
    def supervisor_pid(self) -> int:
        """Id of the supervisor's process on the machine, 0 while it is unknown."""
        return self._process.pid

    @property
    def checkpoint_dir(self) -> str:
        """Directory or URL of the job's checkpoints; empty for a run that was never prepared."""
        return "" if self._record is None else self._record.checkpoint_dir

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """Identifiers of the run's GPUs; empty without real GPUs."""
        ids = {} if self._record is None else self._record.gpu_ids
        return tuple(ids[seat.gpu] for seat in self.document.ranks if seat.gpu in ids)

    def start(self, master: MasterAddress) -> None:
        """Order the supervisor to start the ranks, once.

        Raises:
            ValueError: the job has no command, or the machine lacks one of its GPUs.
            OSError: the order cannot be written.
        """
        record = self._require_record()
        plan_file = self.folder.find_exported_plan(self.document)
        argv = build_argv(self.document, master, checkpoint_dir=record.checkpoint_dir, plan_file=plan_file)
        if record.interpreter:
            argv = (record.interpreter, "-P", *argv[1:])
        paths = RunPaths(
            run_dir=self.folder.path,
            checkpoint_dir=record.checkpoint_dir,
            home=Path(record.home),
            plan=None if self.document.plan is None else self.folder.plan_path,
            secrets=SecretsFolder.of(self.folder).files_path if self.document.secrets else None,
        )
        machine = MachineFacts(record.cores, record.gpu_ids, record.vendor)
        inherited = _select_inherited(record.level)
        processes = [
            {
                "rank": seat.rank,
                "argv": argv,
                "env": build_environment(
                    self.document, seat, master, paths=paths, machine=machine, inherited=inherited
                ),
            }
            for seat in list_processes(self.document)
        ]
        user = None if record.user is None else {"uid": record.uid, "gid": record.gid, "groups": record.group_ids}
        order = {
            "host": master.host,
            "port": master.port,
            "user": user,
            "directory": record.working_dir,
            "is_reference_trainer": bool(record.interpreter),
            "secrets": str(SecretsFolder.of(self.folder).environment_path) if self.document.secrets else "",
            "processes": processes,
        }
        self.folder.write_record("start.json", order)
        if self.folder.has_record("prepared.json"):
            self._process.send_signal(signal.SIGUSR1)

    def poll(self) -> RunState:
        """Return the state of the run, and record the supervisor's process if that is still open."""
        # Looked at before the files: a supervisor that ends in between has written all of them.
        is_alive = self._is_alive()
        if is_alive and self._process.pid == 0:
            self._record_process()
        codes = self.folder.read_exit_codes()
        self._refresh_statuses()
        failure = self._unrecorded_failure or self.folder.read_reason("failure.json")
        loss = self.folder.read_reason("loss.json")
        if not is_alive and not self.folder.has_record("ended") and not failure:
            failure, loss = self._explain_lost_supervisor(loss)
        return RunState(
            phase=self._find_phase(is_alive=is_alive),
            port=self.folder.read_port(),
            exit_codes=codes,
            statuses=dict(self._statuses),
            failure=failure,
            permanent_fault=self._unrecorded_fault or self.folder.read_permanent_fault(),
            loss=loss,
            oom_kills=self._read_oom_kills(),
            exceeded_memory=self._group().read_exceeded_memory(),
            tails={rank: self._read_tail(rank) for rank, code in codes.items() if code != 0},
        )

    def write_notice(self, action: str, *, seconds_left: float = math.inf, step: int | None = None) -> None:
        """Write the notice for the ranks. Raises OSError."""
        gid = -1 if self._record is None or self._record.user is None else self._record.gid
        self.folder.write_notice(action, seconds_left=seconds_left, step=step, gid=gid)

    def terminate(self) -> None:
        """Send SIGTERM to the ranks' process groups. A run that has not begun has none and is killed."""
        if self.has_begun:
            self._process.send_signal(signal.SIGTERM)
        else:
            self.kill()

    def kill(self) -> None:
        """Kill every process of the run. `poll` shows when the last one is gone."""
        self._process.send_signal(signal.SIGKILL)
        self._group().kill()

    def settle(self) -> None:
        """Remove what only a live run needs, once the control plane knows the end. The records and logs stay.

        If the disk is full or read-only, a restarted agent reports the end once more.
        """
        deadline_s = time.monotonic() + _REMOVAL_TIMEOUT_S
        # A process gives up its lock a moment before it leaves its control groups.
        while not self._group().remove():
            if time.monotonic() > deadline_s:
                logger.warning("The control groups of %s cannot be removed: a process is left in them", self)
                break
            time.sleep(_POLL_S)
        try:
            discard_secrets(self.folder, self.document)
            self.folder.settle()
        except OSError as error:
            logger.warning("the end of %s cannot be recorded: %s", self, error)

    def _read_tail(self, rank: int) -> str:
        """Return the last lines of a rank's output, without secrets."""
        return self.folder.read_log_tail(rank, find_mask(self.folder, self.document))

    def _is_alive(self) -> bool:
        """Return whether a process of the run is left.

        Without namespaces, ranks can outlive their supervisor. They are killed then, as a container would do it.
        """
        if self._process.is_alive():
            return True
        if self._record is None or self._record.level.has_namespaces or self._has_no_strays:
            return False
        has_members = bool(self._group().list_members())
        self._group().kill()
        self._has_no_strays = not kill_processes(self.folder.path) and not has_members
        return not self._has_no_strays

    def _record_process(self) -> None:
        """Record the supervisor's process, if it exists."""
        if self._process.find():
            pid, start_ticks = self._process.pid, self._process.start_ticks
            self._record = replace(self._require_record(), pid=pid, start_ticks=start_ticks)
            self.folder.write_record("supervisor.json", encode(self._record))

    def _require_record(self) -> _Record:
        if self._record is None:
            raise ValueError(f"{self.folder.path / 'supervisor.json'} is missing: the run was never prepared.")
        return self._record

    def _group(self) -> ControlGroup:
        paths = {} if self._record is None else self._record.control_groups
        return ControlGroup({name: Path(path) for name, path in paths.items()})

    def _read_oom_kills(self) -> int | None:
        """Return the kernel's count: of the run's own groups, or of the group that a rank of it has named."""
        if self._record is None or self._record.control_groups:
            return self._group().read_oom_kills()
        counts = [read_oom_kills(status.memory_events) for status in self._statuses.values()]
        return max((count for count in counts if count is not None), default=None)

    def _refresh_statuses(self) -> None:
        """Read the statuses again. An invalid one is logged once, and the last valid one stays."""
        for seat in self.document.ranks:
            try:
                status = self.folder.read_status(seat.rank)
            except ValueError as error:
                if str(error) not in self._logged_errors:
                    self._logged_errors.add(str(error))
                    logger.warning("invalid rank status: %s", error)
                continue
            if status is not None:
                self._statuses[seat.rank] = status

    def _find_phase(self, *, is_alive: bool) -> SupervisedPhase:
        if not is_alive:
            return SupervisedPhase.ENDED
        if self.folder.has_record("started.json"):
            return SupervisedPhase.RUNNING
        return SupervisedPhase.PREPARED if self.folder.has_record("prepared.json") else SupervisedPhase.PREPARING

    def _explain_lost_supervisor(self, loss: str) -> tuple[str, str]:
        """Return failure and loss of a run whose supervisor did not record the end."""
        errors = self.folder.read_supervisor_errors()
        if errors and not self.folder.has_record("prepared.json"):
            return f"the container could not start: {errors}", loss
        return "", loss or "the supervisor was killed"


def _select_inherited(level: LevelName) -> dict[str, str]:
    return select_pod_variables(read_start_variables()) if level is LevelName.POD else select_inherited(os.environ)


def _build_record(
    containment: Containment, site: RunSite, user: RankUser | None, checkpoint_dir: str, group: ControlGroup
) -> _Record:
    return _Record(
        level=containment.level.name,
        working_dir=str(site.working_dir),
        checkpoint_dir=checkpoint_dir,
        home=str(Path.home() if user is None else user.home),
        cores=site.machine.cores,
        vendor=site.machine.vendor,
        gpu_ids=site.machine.gpu_ids,
        user=None if user is None else user.name,
        uid=0 if user is None else user.uid,
        gid=0 if user is None else user.gid,
        group_ids=() if user is None else user.groups,
        control_groups={name: str(path) for name, path in group.paths.items()},
    )
