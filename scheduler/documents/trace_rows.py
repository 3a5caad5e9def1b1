"""What the rows of a trace say, whatever its columns are called."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job of a trace: it ran `duration_s` seconds on `gpus` GPUs and did `iterations` steps (0: not recorded).

    `model` names a preset of the solver or a measured model; `application` is the name that a trace of somebody else's
    gives, which has a curve only where a measured profile knows it. `duration_s` is 0 in a trace that gives
    iterations alone. `line` is where the row stands in `path`, `deadline_s` a time of the trace, `user` the
    job's owner.
    """

    line: int
    job_id: str
    submit_time_s: float
    duration_s: float
    gpus: int
    min_gpus: int | None = None
    max_gpus: int | None = None
    model: str = ""
    global_batch: int = 0
    priority: int = 0
    queue: str = "default"
    deadline_s: float | None = None
    gpu: str = ""
    iterations: int = 0
    application: str = ""
    sequence_length: int = 0
    user: str = ""
    path: str = field(default="jobs", compare=False)


@dataclass(frozen=True, slots=True)
class DemandRow:
    """From `time_s` on the pool needs `amount`: GPUs where `is_load` is false, else any unit of load.

    `pool` is a pool's name, or a series that the cluster file gives to one. A `shared` row is of a file with many
    series: nobody has to take it, and its zeros are quiet times, not gaps in the recording.
    """

    line: int
    time_s: float
    pool: str
    amount: float
    is_load: bool
    shared: bool = False
    path: str = field(default="demand", compare=False)
