"""The setup command of a job: run once in a new working directory, contained as ranks are, and ended when unwanted."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from scheduler.agent.container_process import build_entering_command
from scheduler.agent.containment import ContainerFolders, Containment, RankUser
from scheduler.agent.control_groups import ControlGroup
from scheduler.agent.rank_environment import select_inherited
from scheduler.agent.working_directory import WorkingDirectoryError
from scheduler.domain.program import SETUP_TIMEOUT_S
from scheduler.domain.run_document import RunDocument

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_END_TIMEOUT_S = 10.0


def run_setup_command(
    command: Sequence[str],
    document: RunDocument,
    containment: Containment,
    user: RankUser | None,
    *,
    gpus: Collection[int],
    directory: Path,
    log: Path,
    cancelled: threading.Event,
) -> int:
    """Run the setup command of a job as the user of its ranks and within their limits, and return its exit code.

    It ends with the agent, where runs have namespaces.

    Args:
        gpus: indices of the machine's GPUs, among which its memory is divided.
        directory: the working directory, in which the command runs and to which it may write.
        log: file to which its output is appended.
        cancelled: set once no node wants the run.

    Raises:
        WorkingDirectoryError: it was cancelled, or takes too long. None of its processes is left.
        OSError: it cannot be started.
    """
    group = containment.create_group(f"{directory}: setup", document, gpus=gpus)
    _end(group)  # what an agent without namespaces has left
    words = _build_container(command, containment, user, directory)
    environment = select_inherited(os.environ) | {"HOME": str(directory)}
    try:
        with (
            log.open("ab") as output,
            subprocess.Popen(
                build_entering_command(words, group.procs_files),
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ) as process,
        ):
            try:
                return _wait(process, cancelled)
            finally:
                process.kill()
                _end(group)
    finally:
        group.remove()


def _build_container(
    command: Sequence[str], containment: Containment, user: RankUser | None, directory: Path
) -> tuple[str, ...]:
    temporary = directory.with_name("tmp")
    temporary.mkdir(exist_ok=True)
    temporary.chmod(0o1777)
    if user is not None:
        # PID 1 stays root's: bubblewrap, which has no capabilities then, could not end another user's at its own end.
        command = (
            *("/bin/sh", "-c", '"$@"; exit $?', "sh"),
            *("setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--clear-groups", "--no-new-privs"),
            *("--inh-caps=-all", "--", *command),
        )
    folders = ContainerFolders(run=directory, working=directory, checkpoints=directory, temporary=temporary)
    return containment.build_command(folders, command, user=user, options=("--die-with-parent",), directory=directory)


def _wait(process: subprocess.Popen[bytes], cancelled: threading.Event) -> int:
    """Return the exit code, unless the command is cancelled or takes too long."""
    deadline_s = time.monotonic() + SETUP_TIMEOUT_S
    while (code := process.poll()) is None:
        if time.monotonic() >= deadline_s:
            raise WorkingDirectoryError(f"the setup command takes longer than {SETUP_TIMEOUT_S:.0f} s and was ended")
        if cancelled.wait(_POLL_S):
            raise WorkingDirectoryError("the setup command was ended, because its run is not wanted any more")
    return code


def _end(group: ControlGroup) -> None:
    """Kill what is left in the groups of the command, and wait until it is gone."""
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    while group.list_members():
        group.kill()
        if time.monotonic() >= deadline_s:
            logger.warning("processes of a setup command cannot be killed: %s", group.list_members())
            return
        time.sleep(_POLL_S)
