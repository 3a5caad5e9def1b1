"""Folders of an agent: what it must know again after a restart, and what it exchanges with supervisors and ranks.

<state>/jobs/<job>/checkpoints/               default checkpoint directory
<state>/jobs/<job>/work-gen-<n>@<node>/       working directory of a generation, which its ranks may write to
<state>/jobs/<job>/gen-<n>@<node>/run.json    the RunDocument; the folder appears complete
                      plan.json               the ParallelPlan
                      deepspeed.json, ...     the plan in the words of the job's framework
                      supervisor.lock         locked while the supervisor or its container exists
                      supervisor.json         process, container and user, by the agent
                      supervisor.log          errors of the container and of the supervisor
                      prepared.json           by the supervisor: modules are loaded, the port is reserved
                      port                    the reserved MASTER_PORT, by the supervisor of node rank 0
                      start.json              the order to start: master address and processes, by the agent
                      started.json            process ids of the ranks in their namespace, by the supervisor
                      exit-<rank>.json        exit code and time, by the supervisor
                      failure.json            why a rank could not start, by the supervisor
                      loss.json               why the supervisor killed the ranks, by the supervisor
                      rank-<r>.log            output of a rank
                      shipping.json           how much of each log was sent (see log_shipper)
                      forwarded.json          how much of each log was forwarded, in pods (see log_forwarder)
                      status-<r>.json         status of a rank, written by the rank
                      notice.json             the notice to the ranks, by the agent
                      tmp/                    /tmp of the ranks
                      ended                   by the supervisor: no process is left
                      settled                 by the agent: the control plane knows the end

Ranks may create files in the folder of their generation. Its sticky bit keeps them from replacing those of others, and
the agent trusts a file of its own or the supervisor's only if it belongs to the agent's user.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import quote

from scheduler.agent.exported_plan import export_run_plan
from scheduler.agent.folder_removal import delete_folder
from scheduler.agent.secret_masking import SecretMask
from scheduler.agent.shared_files import open_regular_file, read_end, read_json, write_json, write_text
from scheduler.domain.job_account import PermanentFault
from scheduler.domain.observation import RankStatus
from scheduler.domain.parallel_plan import plan_to_json
from scheduler.domain.run_document import RunDocument
from scheduler.executors.rank_status import parse_rank_status, to_plain_text

STATUS_BYTES_MAX = 65_536
_TAIL_BYTES = 4096
_TAIL_LINES = 5
_FOLDER_MODE = 0o1770
_EXIT_CODE_MAX = 255
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one generation of a job on one node."""

    path: Path

    @property
    def lock_path(self) -> Path:
        return self.path / "supervisor.lock"

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def temporary_path(self) -> Path:
        return self.path / "tmp"

    @property
    def supervisor_log(self) -> Path:
        return self.path / "supervisor.log"

    @property
    def working_path(self) -> Path:
        """The writable working directory of the generation, next to its folder."""
        return self.path.with_name(f"work-{self.path.name}")

    @property
    def generation(self) -> int:
        return int(self.path.name.partition("@")[0].removeprefix("gen-"))

    @property
    def settled_at_s(self) -> float | None:
        """When the control plane knew the end of the generation, None before. A file of a rank does not count."""
        try:
            status = (self.path / "settled").lstat()
        except FileNotFoundError:
            return None
        return status.st_mtime if status.st_uid == os.geteuid() else None

    @property
    def is_settled(self) -> bool:
        return self.settled_at_s is not None

    @property
    def has_begun(self) -> bool:
        """Whether the ranks were ordered to start."""
        return (self.path / "start.json").exists()

    def log_path(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def create(self, document: RunDocument, *, gid: int = -1) -> None:
        """Create the folder with the run document, the plan and an empty `tmp`, atomically and durably.

        Args:
            gid: group of the ranks' user, which may then create files in the folder; -1 for the agent's own.

        Raises:
            FileExistsError: the generation has begun before.
            OSError: the disk is full or read-only.
            ValueError: the job's framework cannot express the plan.
        """
        exported = export_run_plan(document)
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists: this generation has begun before. Recover it instead.")
        make_private_folder(self.path.parent)
        part = self.path.with_name(f".{self.path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        try:
            write_json(part / "run.json", json.loads(document.to_json()), durable=True)
            if document.plan is not None:
                write_json(part / "plan.json", plan_to_json(document.plan), mode=0o640, gid=gid, durable=True)
            if exported is not None and exported.file is not None:
                write_text(part / exported.file.name, exported.file.text, mode=0o640, gid=gid, durable=True)
            temporary = part / "tmp"
            temporary.mkdir()
            temporary.chmod(0o1777)
            os.chown(part, -1, gid)
            part.chmod(_FOLDER_MODE)
            part.rename(self.path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def find_exported_plan(self, document: RunDocument) -> str:
        """Return the path of the plan in the words of the job's framework, empty if it has no file."""
        exported = export_run_plan(document)
        return str(self.path / exported.file.name) if exported is not None and exported.file is not None else ""

    def open_parents(self) -> None:
        """Let other users pass through the parents, without listing them. Only runs without a container need this."""
        for path in self.path.parents[:3]:
            path.chmod(0o711)

    def read_document(self) -> RunDocument:
        """Return the run document.

        Raises:
            ValueError: it is missing or malformed, or of another version.
        """
        return RunDocument.from_json(json.dumps(self._require("run.json")))

    def read_record(self, name: str) -> Any:
        """Return a JSON record of the agent or the supervisor, None without one.

        Its form is not checked: a rank with the agent's user can write it, too.

        Raises:
            ValueError: it is malformed or cannot be opened, or does not belong to the agent's user.
        """
        try:
            file = read_json(self.path / name, owner=os.geteuid())
        except PermissionError as error:  # the mode of a file is up to its owner
            raise ValueError(str(error)) from None
        return None if file is None else file.document

    def read_object(self, name: str) -> Mapping[str, Any]:
        """Return a record that is a JSON object, an empty one if it is missing or no object."""
        with suppress(ValueError):
            record = self.read_record(name)
            if isinstance(record, dict):
                return record
        return {}

    def has_record(self, name: str) -> bool:
        """Return whether the agent or the supervisor has written a record. One that a rank has created is ignored."""
        with suppress(ValueError):
            return self.read_record(name) is not None
        return False

    def write_record(self, name: str, document: object) -> None:
        """Write a record that only the agent and the supervisor can read, so that it survives a power failure."""
        write_json(self.path / name, document, durable=True)

    def read_exit_codes(self) -> dict[int, int]:
        """Return the recorded exit codes by rank: negative signal numbers for ranks that a signal ended."""
        codes = dict[int, int]()
        for path in self.path.glob("exit-*.json"):
            number = path.stem.removeprefix("exit-")
            code = self.read_object(path.name).get("code")
            if number.isdecimal() and _is_count(code, minimum=-_EXIT_CODE_MAX, maximum=_EXIT_CODE_MAX):
                codes[int(number)] = code
        return dict(sorted(codes.items()))

    def read_reason(self, name: str) -> str:
        """Return the reason in `failure.json` or `loss.json`, empty without one."""
        return to_plain_text(self.read_object(name).get("reason", ""))

    def read_permanent_fault(self) -> PermanentFault | None:
        """Return why a retry of a start that failed cannot succeed, None if it may."""
        fault = self.read_object("failure.json").get("permanent_fault")
        return PermanentFault(fault) if fault in list(PermanentFault) else None

    def read_port(self) -> int:
        """Return the reserved MASTER_PORT, 0 without one."""
        with suppress(ValueError):
            port = self.read_record("port")
            return port if _is_count(port, minimum=0, maximum=_PORT_MAX) else 0
        return 0

    def read_ranks(self) -> dict[int, int]:
        """Return the started ranks by the ids of their processes in their namespace, none before the start."""
        pids = self.read_object("started.json").get("pids")
        if not isinstance(pids, dict):
            return {}
        return {pid: int(rank) for rank, pid in pids.items() if rank.isdecimal() and _is_count(pid, minimum=1)}

    def read_status(self, rank: int) -> RankStatus | None:
        """Return the status that the rank wrote, None without one.

        Raises:
            ValueError: the file is not a status; the message names the field.
        """
        path = self.path / f"status-{rank}.json"
        try:
            file = read_json(path, bytes_max=STATUS_BYTES_MAX)
        except OSError as error:
            raise ValueError(f"{path}: {error}") from None
        if file is None:
            return None
        if not isinstance(file.document, dict):
            raise ValueError(f"{path}: got {type(file.document).__name__}; a JSON object is required")
        try:
            return parse_rank_status(file.document, file.written_at_ns)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def read_log_tail(self, rank: int, mask: SecretMask | None = None) -> str:
        """Return the last lines of a rank's output, joined into one, or an empty string."""
        if mask is None:
            return _join_last_lines(read_end(self.log_path(rank), _TAIL_BYTES))
        masked = mask.mask(read_end(self.log_path(rank), _TAIL_BYTES + mask.longest))
        return _join_last_lines(masked[-_TAIL_BYTES:])

    def read_supervisor_errors(self) -> str:
        """Return the last lines that the container or the supervisor printed, joined into one."""
        return _join_last_lines(read_end(self.supervisor_log, _TAIL_BYTES))

    def open_log(self, rank: int) -> int | None:
        """Open a rank's log for reading without following a link. None if it does not exist."""
        return open_regular_file(self.log_path(rank))

    def write_notice(
        self, action: str, *, seconds_left: float = math.inf, step: int | None = None, gid: int = -1
    ) -> None:
        """Write the notice that the ranks read at their step boundaries.

        Args:
            seconds_left: time until the deadline; infinite without one.
            step: act on the notice after this step, None for the next step boundary.
            gid: group of the ranks' user.
        """
        left = seconds_left if math.isfinite(seconds_left) else None
        notice = {"action": action, "step": step, "seconds_left": left}
        write_json(self.path / "notice.json", notice, mode=0o640, gid=gid)

    def settle(self) -> None:
        """Record that the control plane knows the end of the generation, and delete its temporary files.

        They are deleted first, because they may have filled the disk.
        """
        with suppress(OSError):  # the rest is deleted with the folder
            delete_folder(self.temporary_path)
        settled = self.path / "settled"
        if not self.is_settled:
            delete_folder(settled)  # created by a rank
        settled.touch(mode=0o600)

    def delete(self) -> None:
        """Delete the folder and the working directory. A deletion that was interrupted is continued by another one.

        Raises:
            OSError: something cannot be deleted.
        """
        delete_folder(self.working_path)
        for name in ("start.json", "run.json"):  # without them, the folder is no generation any more
            (self.path / name).unlink(missing_ok=True)
        delete_folder(self.path)

    def _require(self, name: str) -> Any:
        record = self.read_record(name)
        if record is None:
            raise ValueError(f"{self.path / name} is missing.")
        return record


class AgentFolders:
    """All folders of an agent below its state folder."""

    def __init__(self, state: Path) -> None:
        self.state = state.resolve()

    def folder(self, job_id: str, generation: int, node: str) -> RunFolder:
        """Return the folder of a generation on a node, which need not exist."""
        return RunFolder(self.job_folder(job_id) / f"gen-{generation}@{_quote(node)}")

    def checkpoint_dir(self, job_id: str) -> Path:
        """Return the checkpoint directory of jobs that set none."""
        return self.job_folder(job_id) / "checkpoints"

    def list_job_folders(self) -> list[Path]:
        """Return the folders of all jobs on this machine."""
        return sorted(self.state.glob("jobs/*"))

    def list_folders(self) -> Iterator[RunFolder]:
        """Yield the folders of all generations on this machine, settled or not."""
        for path in sorted(self.state.glob("jobs/*/gen-*@*")):
            if (path / "run.json").exists():
                yield RunFolder(path)

    def list_unsettled(self) -> Iterator[RunFolder]:
        """Yield folders of generations whose end the control plane does not know."""
        yield from (folder for folder in self.list_folders() if not folder.is_settled)

    def job_folder(self, job_id: str) -> Path:
        """Return the folder of everything that a job has on this machine."""
        return self.state / "jobs" / _quote(job_id)


def _quote(name: str) -> str:
    # Names can hold any character. File names must not contain a slash or be `.` or `..`.
    return quote(name, safe="").replace(".", "%2E")


def make_private_folder(path: Path) -> None:
    """Create a folder and its missing parents, which only the agent's user may enter, whatever the umask is."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def _is_count(value: object, *, minimum: int, maximum: int = 2**31 - 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _join_last_lines(data: bytes) -> str:
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if any(map(str.isalnum, line))]
    return " | ".join(lines[-_TAIL_LINES:])
