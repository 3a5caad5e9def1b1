"""Preparing runs on this machine: working directory, folder, container and supervisor."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from scheduler.agent.agent_state import AgentState
from scheduler.agent.containment import Containment, RankUser
from scheduler.agent.control_plane_identity import ControlPlaneIdentity
from scheduler.agent.folder_removal import delete_folder
from scheduler.agent.gpu_selection import MachineGpus
from scheduler.agent.rank_environment import GpuVendor, MachineFacts
from scheduler.agent.run_folder import AgentFolders
from scheduler.agent.run_secrets import SecretsFolder, fetch_secrets
from scheduler.agent.run_site import RunSite
from scheduler.agent.setup_command import run_setup_command
from scheduler.agent.supervised_run import SupervisedRun
from scheduler.agent.working_directory import (
    UnpackLimits,
    UserIds,
    WorkingDirectories,
    WorkingDirectory,
    WorkingDirectoryError,
)
from scheduler.domain.machine import MachineInventory
from scheduler.domain.run_document import RunDocument

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT_S = 30.0
_DIRECTORY_KEPT_S = 30 * 86_400.0


class RunLauncher:
    """Prepares runs on one machine. Thread-safe: several runs may be prepared at once.

    Args:
        preload: modules that supervisors load for jobs of the reference trainer.
        default_directory: working directory of jobs without an archive. None: an empty one for each generation.
        checkpoint_dir: checkpoint directory of jobs that name none. Empty: one in the state folder.
    """

    def __init__(
        self,
        state: AgentState,
        identity: ControlPlaneIdentity,
        containment: Containment,
        inventory: MachineInventory,
        *,
        preload: Sequence[str],
        default_directory: Path | None = None,
        checkpoint_dir: str = "",
    ) -> None:
        self._state = state
        self._identity = identity
        self._folders = AgentFolders(state.root)
        self._directories = WorkingDirectories(state.root / "directories")
        self._containment = containment
        self._preload = tuple(preload)
        self._default_directory = default_directory
        self._checkpoint_dir = checkpoint_dir
        self._gpus = MachineGpus(inventory.gpus)
        self._gpu_indices = tuple(gpu.index for gpu in inventory.gpus)
        self._cores = inventory.cpus or os.cpu_count() or 1

    def prepare(self, document: RunDocument, cancelled: threading.Event) -> SupervisedRun:
        """Start the supervisor of a generation. A run that cannot be prepared has ended, with the reason.

        Its setup command is ended once `cancelled` is set.
        """
        folder = self._folders.folder(document.job_id, document.generation, document.node)
        document = replace(document, checkpoint_dir=document.checkpoint_dir or self._checkpoint_dir)
        try:
            user = self._containment.policy.find_user(document.owner_id, document.owner)
            shared = self._prepare_directory(document, user, cancelled)
            working_dir = folder.working_path
            if folder.is_settled and not (folder.has_begun or folder.has_record("failure.json")):
                delete_folder(folder.path)  # it was prepared and discarded, and is wanted after all
            if not folder.path.exists():
                delete_folder(working_dir)  # left by an agent that ended before the run was prepared
            if shared is not None:
                shared.copy_to(working_dir, _to_ids(user))
                if document.venv and not document.venv.startswith("/"):
                    document = replace(document, venv=str(shared.path / document.venv))
            elif self._default_directory is not None:
                working_dir = self._default_directory
            else:
                _create_empty(working_dir, user)
            site = self._build_site(document, working_dir, shared)
            if document.secrets:
                SecretsFolder.of(folder).write(document.secrets, fetch_secrets(self._identity, document), user)
            return SupervisedRun.prepare(document, folder, self._containment, site, preload=self._preload)
        except Exception as error:  # whatever it is, it must end this run only, and not the agent
            logger.exception("cannot prepare generation %d of %s", document.generation, document.job_id)
            if document.secrets:
                SecretsFolder.of(folder).delete()
            is_expected = isinstance(error, (OSError, ValueError, WorkingDirectoryError))
            cause = error if is_expected else f"{type(error).__name__}: {error}"
            fault = error.permanent_fault if isinstance(error, WorkingDirectoryError) else None
            reason = f"node {document.node} cannot start it: {cause}"
            return SupervisedRun.record_failure(document, folder, reason, permanent_fault=fault)

    def recover_runs(self) -> list[SupervisedRun]:
        """Return the runs of earlier agents whose end the control plane does not know."""
        runs = []
        for folder in self._folders.list_unsettled():
            try:
                runs.append(SupervisedRun.recover(folder))
            except (ValueError, OSError):
                logger.exception("cannot recover the run in %s", folder.path)
        return runs

    def delete_unused_directories(self) -> None:
        """Delete unpacked working directories that no run has asked for in a month and no live run uses."""
        in_use = set(self._list_used_directories())
        deleted = self._directories.delete_unused(time.time() - _DIRECTORY_KEPT_S, in_use=in_use)
        if deleted:
            logger.info("deleted %d working directories that were not used for a month", deleted)

    def _list_used_directories(self) -> Iterator[Path]:
        for folder in self._folders.list_unsettled():
            with suppress(ValueError):  # written by another version
                document = folder.read_document()
                if document.archive:
                    user = _to_ids(self._containment.policy.find_user(document.owner_id, document.owner))
                    yield self._directories.find(document.archive, document.setup, user)

    def _build_site(self, document: RunDocument, working_dir: Path, shared: WorkingDirectory | None) -> RunSite:
        return RunSite(
            working_dir=working_dir,
            default_checkpoint_dir=self._folders.checkpoint_dir(document.job_id),
            machine=MachineFacts(self._cores, self._gpus.ids, self._gpus.vendor or GpuVendor.NVIDIA),
            devices=self._gpus.list_devices({seat.gpu for seat in document.ranks}) if document.has_devices else (),
            gpus=self._gpu_indices,
            readable=() if shared is None else (shared.path,),
            lease=self._state.lease_path,
        )

    def _prepare_directory(
        self, document: RunDocument, user: RankUser | None, cancelled: threading.Event
    ) -> WorkingDirectory | None:
        if not document.archive:
            return None

        def run_setup(command: tuple[str, ...], directory: Path, log: Path) -> int:
            return run_setup_command(
                command,
                document,
                self._containment,
                user,
                gpus=self._gpu_indices,
                directory=directory,
                log=log,
                cancelled=cancelled,
            )

        return self._directories.prepare(
            document.archive,
            partial(self._fetch, self._identity.archive_path(document.archive, document.job_id)),
            run_setup=run_setup,
            setup=document.setup,
            user=_to_ids(user),
            limits=UnpackLimits.for_archives(document.archive_bytes_max),
            cancelled=cancelled,
        )

    def _fetch(self, path: str, target: Path) -> None:
        request = urllib.request.Request(
            f"{self._identity.url}{path}", headers={"Authorization": f"Bearer {self._identity.read_token()}"}
        )
        with urllib.request.urlopen(request, timeout=_FETCH_TIMEOUT_S) as reply, target.open("wb") as file:
            shutil.copyfileobj(reply, file)


def _create_empty(folder: Path, user: RankUser | None) -> None:
    """Create the working directory of a job without an archive."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if user is not None:
        os.chown(folder, user.uid, user.gid)


def _to_ids(user: RankUser | None) -> UserIds | None:
    return None if user is None else UserIds(user.uid, user.gid)
