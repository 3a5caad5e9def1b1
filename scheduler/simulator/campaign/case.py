"""FaultCase: one world with its jobs, faults and owners' commands, complete. It replays exactly, also from JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from scheduler.domain.codec import decode, encode
from scheduler.domain.fleet import Node, Pool
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_spec import JobSpec
from scheduler.executors.simulated_run import Delays
from scheduler.scheduling.policies.settings import PolicySettings


class CaseEventKind(StrEnum):
    """What happens to the world, to a controller, to its store or to its executor, and what owners command."""

    NODE_LOSS = "node-loss"
    WORKER_CRASH = "worker-crash"
    OUT_OF_MEMORY = "out-of-memory"
    SLOW_CHECKPOINT = "slow-checkpoint"
    STALE_OBSERVATION = "stale-observation"
    LOST_REPORT = "lost-report"
    STALE_REPORT = "stale-report"
    DUPLICATE_REPORT = "duplicate-report"
    STALE_RUN = "stale-run"
    DUPLICATE_COMMAND = "duplicate-command"
    OBSERVE_ERROR = "observe-error"
    CONVERGE_ERROR = "converge-error"
    STORE_OUTAGE = "store-outage"
    COMMIT_CONFLICT = "commit-conflict"
    COMMIT_REFUSED = "commit-refused"
    COMMIT_UNANSWERED = "commit-unanswered"
    SLOW_COMMIT = "slow-commit"
    LEADER_CRASH = "leader-crash"
    LEADER_PAUSE = "leader-pause"
    PAUSE_BEFORE_COMMIT = "pause-before-commit"
    PAUSE_AFTER_COMMIT = "pause-after-commit"
    CLOCK_FORWARD = "clock-forward"
    CLOCK_BACK = "clock-back"
    CANCEL = "cancel"
    SCALE = "scale"
    SUSPEND = "suspend"
    CHANGE = "change"
    CHECKPOINT = "checkpoint"
    DRAIN = "drain"
    RECALL_ALL = "recall-all"
    FREEZE_RESIZES = "freeze-resizes"
    CHANGE_QUOTA = "change-quota"
    DELETE_QUEUE = "delete-queue"
    ADD_NODE = "add-node"
    REMOVE_NODE = "remove-node"


@dataclass(frozen=True, slots=True)
class CaseEvent:
    """An event at `at_s`.

    `pick` in [0, 1) chooses its subject from those that exist at that time, such as the running jobs by id. `amount`
    is its duration or extent, in the unit of its kind. `low` and `high` are the GPUs of a changed range or quota.
    """

    at_s: float
    kind: CaseEventKind
    pick: float = 0.0
    amount: float = 0.0
    low: int = 0
    high: int = 0


@dataclass(frozen=True, slots=True)
class CaseJob:
    """A job that `owner` submits at `at_s`. `true_steps` is its real length, which its spec may hide."""

    id: str
    at_s: float
    spec: JobSpec
    owner: str
    true_steps: float


@dataclass(frozen=True, slots=True)
class DemandLevel:
    """GPUs that inference of a pool needs from `at_s` on."""

    at_s: float
    pool: str
    gpus: float


@dataclass(frozen=True, slots=True)
class FaultCase:
    """All faults end by `faults_end_s`: nodes are back, suspended jobs resumed, drained nodes uncordoned.

    `spares` are nodes that exist in the world, and that an administrator adds during the case.
    """

    seed: int
    policy: str
    settings: PolicySettings
    pools: tuple[Pool, ...]
    nodes: tuple[Node, ...]
    queues: tuple[JobQueue, ...]
    jobs: tuple[CaseJob, ...]
    demand: tuple[DemandLevel, ...]
    events: tuple[CaseEvent, ...]
    delays: Delays
    faults_end_s: float
    uses_sql: bool = False
    spares: tuple[Node, ...] = ()


def write_case(path: Path, case: FaultCase) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(encode(case), indent=1) + "\n")


def read_case(path: Path) -> FaultCase:
    """Read a case that `write_case` wrote.

    Raises:
        CodecError: the file is not a case; the message names the field.
    """
    return decode(FaultCase, json.loads(path.read_text()))
