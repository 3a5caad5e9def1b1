"""Commands of Slurm: submit, list and cancel pilot jobs, and read the state of one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.slurm.pilot_script import JOB_NAME_PREFIX, TOKEN_VARIABLE, PilotJob, render_pilot

_TIMEOUT_S = 30.0
_UNKNOWN_JOB = "Invalid job id specified"
_COLUMNS = ("JobID", "Name", "State", "NumNodes", "EndTime", "ReasonList")
_WIDTH = 250


class SlurmError(Exception):
    """A command of Slurm failed, or is not installed. The message says which one and why."""


class UnknownJobError(SlurmError):
    """Slurm does not know the job, or does not know it any more."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job that has not ended.

    Args:
        state: in Slurm's words, such as "PENDING".
        end_s: end of its allocation in Unix seconds; None while it is pending or has no limit.
        place: its nodes, or in parentheses why it is pending.
    """

    id: str
    name: str
    state: str
    nodes: int
    end_s: float | None
    place: str

    @property
    def pool(self) -> str:
        return self.name.removeprefix(JOB_NAME_PREFIX)


def submit_pilot(pilot: PilotJob, token: str) -> str:
    """Submit a pilot with the secret of its join token and return its job id.

    Raises:
        SlurmError: sbatch is not installed, or refuses the job.
    """
    # The user's own token and settings are not for the nodes.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EBBTIDE_", "SBATCH_"))}
    answer = _run(
        ("sbatch", "--parsable", "--export=ALL"), env=env | {TOKEN_VARIABLE: token}, script=render_pilot(pilot)
    )
    return answer.strip().partition(";")[0]


def list_pilots(*, pool: str = "") -> list[SlurmJob]:
    """Return the user's pilot jobs that have not ended, of one pool or of all, by id.

    Raises:
        SlurmError: Slurm cannot be reached.
    """
    jobs = _list_jobs(("--me", *((f"--name={JOB_NAME_PREFIX}{pool}",) if pool else ())))
    return sorted((job for job in jobs if job.name.startswith(JOB_NAME_PREFIX)), key=lambda job: int(job.id))


def find_job(job_id: str, *, node: str = "") -> SlurmJob | None:
    """Return a job that has not ended, None if it has, or if `node` is not one of its nodes.

    Raises:
        SlurmError: Slurm cannot be reached.
    """
    try:
        return next(iter(_list_jobs((f"--jobs={job_id}", *((f"--nodelist={node}",) if node else ())))), None)
    except UnknownJobError:
        return None


def manages_gpus() -> bool:
    """Return whether Slurm allocates GPUs on this cluster.

    Raises:
        SlurmError: Slurm cannot be reached.
    """
    lines = (line.partition("=") for line in _run(("scontrol", "show", "config")).splitlines())
    types = next((value for name, _, value in lines if name.strip() == "GresTypes"), "")
    return "gpu" in (each.strip() for each in types.split(","))


def cancel_job(job_id: str) -> None:
    """Cancel a job. Its agents let their ranks save and exit.

    Raises:
        SlurmError: Slurm refuses.
    """
    _run(("scancel", job_id))


def _list_jobs(options: Sequence[str]) -> list[SlurmJob]:
    form = ",".join(f"{column}:{_WIDTH}" for column in _COLUMNS)
    answer = _run(("squeue", "--noheader", *options, "-O", form), env=os.environ | {"SLURM_TIME_FORMAT": "%s"})
    return [parse_job(line) for line in answer.splitlines() if line.strip()]


def parse_job(line: str) -> SlurmJob:
    """Parse a line of squeue, whose columns have a fixed width."""
    job_id, name, state, nodes, end, place = (
        line[start : start + _WIDTH].strip() for start in range(0, _WIDTH * len(_COLUMNS), _WIDTH)
    )
    return SlurmJob(job_id, name, state, int(nodes), float(end) if end.isdigit() else None, place)


def _run(command: Sequence[str], *, env: Mapping[str, str] | None = None, script: str = "") -> str:
    try:
        done = subprocess.run(
            command, input=script, capture_output=True, text=True, check=False, env=env, timeout=_TIMEOUT_S
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not installed. Run this command on a machine that submits Slurm jobs."
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        problem = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise (UnknownJobError if _UNKNOWN_JOB in problem else SlurmError)(f"{command[0]} failed: {problem}")
    return done.stdout
