"""The allocation of a pilot's node, as its agent sees it: name, GPUs, and when the agent must leave."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scheduler.agent.departure import DepartureNotice
from scheduler.slurm.slurm_client import SlurmError, SlurmJob, find_job, manages_gpus

logger = logging.getLogger(__name__)

_ENDING_STATES = ("COMPLETING", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "COMPLETED", "DEADLINE")
_CONFIRMATIONS = 2
"""Looks at the job in a row that must find no allocation, because a restarted slurmctld may answer before it is
complete."""
_REPORT_MARGIN_S = 15.0
"""Time before the end of the allocation in which the agent reports the end of its ranks."""
_WITHIN_S_MIN = 1.0
LEAVE_WITHIN_S = 20.0
"""Default time that ranks have to save and exit: Slurm kills tasks 30 s after their SIGTERM by default (KillWait)."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The part of an allocation on this node.

    Args:
        node: name of the node in Slurm.
        gpus: driver indices of the granted GPUs; None if Slurm granted none.
    """

    job_id: str
    node: str
    gpus: tuple[int, ...] | None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Allocation:
        """Read the environment of a task.

        Raises:
            ValueError: it is not that of a task of Slurm.
        """
        job_id, node = environment.get("SLURM_JOB_ID", ""), environment.get("SLURMD_NODENAME", "")
        if not job_id or not node:
            raise ValueError(
                "--slurm: SLURM_JOB_ID or SLURMD_NODENAME is not set, so this is no task of a Slurm job. "
                "Use `ebbtide slurm submit`, or start the agent with srun."
            )
        granted = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS") or ""
        return cls(job_id, node, tuple(map(int, granted.split(","))) if granted else None)

    def check_grant(self, *, stated_gpus: int, manages_gpus: Callable[[], bool] = manages_gpus) -> None:
        """Check that the agent knows which GPUs it may offer. Those that Slurm did not grant may be another user's.

        Args:
            stated_gpus: GPUs of the node that the operator states; 0 for none.

        Raises:
            ValueError: the operator states more GPUs than Slurm granted, Slurm manages GPUs and granted none, or it
                manages none and the operator states none.
            SlurmError: Slurm cannot be reached.
        """
        if self.gpus is not None:
            if stated_gpus > len(self.gpus):
                raise ValueError(
                    f"--gpus: got {stated_gpus}, but Slurm granted {len(self.gpus)} of node {self.node} to job "
                    f"{self.job_id}. Leave --gpus out, or submit the pilot with --gpus-per-node {stated_gpus}."
                )
            return
        if manages_gpus():
            raise ValueError(
                f"--slurm: Slurm granted no GPU of node {self.node} to job {self.job_id}. Submit the pilot with "
                "--gpus-per-node N."
            )
        if not stated_gpus:
            raise ValueError(
                f"--slurm: Slurm does not manage GPUs here, so those of job {self.job_id} are unknown. State the GPUs "
                "of each node with `ebbtide slurm submit --node-gpus N`."
            )

    @property
    def machine_name(self) -> str:
        """A name that no other allocation has, in the form of host names."""
        return f"slurm-{self.job_id}-{re.sub('[^a-z0-9.-]', '-', self.node.lower()).strip('-.')}"


@dataclass(frozen=True, slots=True)
class DepartureTimes:
    """When a pilot leaves, in seconds.

    Args:
        leave_within_s: time that ranks have to save and exit once Slurm ends the allocation.
        leave_before_s: time before the end of the allocation at which ranks are asked to save and exit.
        idle_s: time without ranks after which the node is given back; infinite to keep it.
        check_s: time between two looks at the job's state.
    """

    leave_within_s: float
    leave_before_s: float
    idle_s: float
    check_s: float


class AllocationWatch:
    """Departure of an agent in an allocation.

    Slurm signals the agent at most tasks' ends, but not when slurmd is dead or a node is taken from a job. So a thread
    looks at the job. While slurmctld does not answer, the last known end counts.

    Args:
        find: returns this node's job, None once the node is not one of its nodes.
        parent_pid: the process of Slurm that started the agent.
    """

    def __init__(
        self,
        allocation: Allocation,
        times: DepartureTimes,
        *,
        find: Callable[[str, str], SlurmJob | None] = lambda job_id, node: find_job(job_id, node=node),
        parent_pid: int,
    ) -> None:
        self._allocation = allocation
        self._times = times
        self._find = find
        self._parent_pid = parent_pid
        self._job: SlurmJob | None = None
        self._ended = ""
        self._misses = 0
        self._is_reachable = True
        self._busy_at_s = time.monotonic()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="allocation-watch", daemon=True).start()

    def find_notice(self, *, has_ranks: bool) -> DepartureNotice | None:
        """Return the request to leave, None while the allocation lives and the node is in use."""
        now_s, times = time.monotonic(), self._times
        if has_ranks:
            self._busy_at_s = now_s
        if os.getppid() != self._parent_pid:
            return DepartureNotice("the Slurm step is gone", times.leave_within_s)
        if self._ended:
            return DepartureNotice(self._ended, times.leave_within_s)
        left_s = float("inf") if self._job is None or self._job.end_s is None else self._job.end_s - time.time()
        if left_s <= times.leave_before_s:
            within_s = max(_WITHIN_S_MIN, left_s - _REPORT_MARGIN_S, min(times.leave_within_s, left_s))
            return DepartureNotice("the time limit of the Slurm job is near", within_s)
        if now_s - self._busy_at_s >= times.idle_s:
            return DepartureNotice(f"no rank has run for {times.idle_s:.0f} s", times.leave_within_s)
        return None

    def check(self) -> None:
        """Look at the job once."""
        allocation = self._allocation
        try:
            job = self._find(allocation.job_id, allocation.node)
        except SlurmError as error:
            if self._is_reachable:
                logger.warning("the state of Slurm job %s is unknown: %s", allocation.job_id, error)
            self._is_reachable = False
            return
        self._is_reachable = True
        if job is not None and job.state not in _ENDING_STATES:
            self._job, self._misses = job, 0
            return
        self._misses += 1
        if self._misses >= _CONFIRMATIONS:
            state = f"no longer has node {allocation.node}" if job is None else f"is {job.state.lower()}"
            self._ended = f"Slurm job {allocation.job_id} {state}"

    def _watch(self) -> None:
        while not self._ended:
            self.check()
            time.sleep(self._times.check_s)
