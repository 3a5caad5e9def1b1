"""The place of a run on its machine: folders, devices and facts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scheduler.agent.containment import Containment, find_interpreter_folders
from scheduler.agent.rank_environment import MachineFacts


@dataclass(frozen=True, slots=True)
class RunSite:
    """Folders, devices and facts of the machine for one run.

    Args:
        working_dir: working directory of the ranks.
        default_checkpoint_dir: checkpoint directory of a job that names none.
        machine: cores and GPU identifiers, for the ranks' environment.
        devices: device nodes of the job's GPUs (`list_gpu_devices`).
        gpus: indices of the machine's GPUs, among which its memory is divided; empty for slots of processors.
        readable: further folders that ranks must read.
        lease: file with the time until which ranks may run; None for no limit.
    """

    working_dir: Path
    default_checkpoint_dir: Path
    machine: MachineFacts
    devices: tuple[Path, ...] = ()
    gpus: tuple[int, ...] = ()
    readable: tuple[Path, ...] = ()
    lease: Path | None = None

    def find_venv_folders(self, venv: Path, containment: Containment) -> list[Path]:
        """Return the folders that the ranks need for a virtual environment: of their own project, or anywhere visible.

        Raises:
            ContainmentError: it is not a virtual environment, or is in a folder of the service.
        """
        own = (self.working_dir, *self.readable)
        return [
            path
            if any(folder in (path, *path.parents) for folder in own)
            else containment.check_visible(path, name="venv")
            for path in find_interpreter_folders(venv)
        ]
