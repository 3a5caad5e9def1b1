"""State of the running demo for the terminal, read from the service's API."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.demo.demand_trace import SECONDS_PER_DAY

if TYPE_CHECKING:
    from api.demo import DemoView
    from ebbtide.client.views import JobView, OverviewView, RecallReceiptView


@dataclass(frozen=True, slots=True)
class PoolLine:
    """An inference pool: its demand and capacity in GPUs, and its nodes by state."""

    name: str
    demand_gpus: float
    capacity_gpus: int
    nodes: int
    lent: int
    recalled: int
    training_gpus: int


@dataclass(frozen=True, slots=True)
class RecallSummary:
    """Recalls of the day. `margin_s` is the time between the closest return and its deadline, None without a return."""

    total: int = 0
    open: int = 0
    late: int = 0
    margin_s: float | None = None


@dataclass(frozen=True, slots=True)
class TrainingLine:
    """A real training."""

    name: str
    state: str
    gpus: int
    step: float
    steps: int
    loss: float | None
    resizes: int


@dataclass(frozen=True, slots=True)
class DayView:
    """The state of the demo at one time. `clock` is the time of the replayed day as text."""

    clock: str
    passed: float
    pools: tuple[PoolLine, ...]
    recalls: RecallSummary
    trainings: tuple[TrainingLine, ...]
    simulated_jobs: Mapping[str, int]
    surge_left_s: float


def build_day_view(
    day: DemoView,
    overview: OverviewView,
    receipts: Sequence[RecallReceiptView],
    trainings: Sequence[JobView],
) -> DayView:
    passed = 0.0 if day["started_at_s"] is None else (day["now_s"] - day["started_at_s"]) / day["day_s"]
    jobs = Counter(overview["jobs"])
    jobs.subtract(Counter(job["state"] for job in trainings))
    until_s = day["surge_until_s"]
    return DayView(
        clock=format_day_time(passed),
        passed=min(1.0, max(0.0, passed)),
        pools=tuple(_list_pool_lines(overview)),
        recalls=summarize_recalls(receipts),
        trainings=tuple(map(_build_training_line, trainings)),
        simulated_jobs=+jobs,
        surge_left_s=0.0 if until_s is None else max(0.0, until_s - day["now_s"]),
    )


def format_day_time(passed: float) -> str:
    """Return the time of the replayed day of which the share `passed` is over, such as 14:20."""
    minutes = int(min(1.0, max(0.0, passed)) * SECONDS_PER_DAY / 60)
    return f"{minutes // 60:02}:{minutes % 60:02}"


def summarize_recalls(receipts: Sequence[RecallReceiptView]) -> RecallSummary:
    margins_s = [
        receipt["return_by_s"] - receipt["returned_at_s"]
        for receipt in receipts
        if receipt["returned_at_s"] is not None and receipt["outcome"] in ("in_time", "late")
    ]
    return RecallSummary(
        total=len(receipts),
        open=sum(receipt["outcome"] is None for receipt in receipts),
        late=sum(receipt["outcome"] == "late" for receipt in receipts),
        margin_s=min(margins_s, default=None),
    )


def _list_pool_lines(overview: OverviewView) -> list[PoolLine]:
    lines = []
    for pool in overview["pools"]:
        if pool["kind"] != "inference":
            continue
        nodes = [node for node in overview["nodes"] if node["pool"] == pool["name"]]
        on_loan = [node for node in nodes if node["state"] in ("lent", "recalled")]
        demand = pool["demand"]
        lines.append(
            PoolLine(
                name=pool["name"],
                demand_gpus=0.0 if demand is None else demand["gpus"],
                capacity_gpus=pool["capacity_gpus"],
                nodes=len(nodes),
                lent=len(on_loan),
                recalled=sum(node["state"] == "recalled" for node in nodes),
                training_gpus=sum(node["held"] for node in on_loan),
            )
        )
    return lines


def _build_training_line(job: JobView) -> TrainingLine:
    progress = job["progress"]
    loss = progress["loss"]
    return TrainingLine(
        name=job["name"],
        state=job["state"],
        gpus=sum(map(len, job["nodes"].values())),
        step=progress["steps"] or 0.0,
        steps=progress["steps_total"] or 0,
        loss=None if loss is None or math.isnan(loss) else loss,
        resizes=job["account"]["resizes"],
    )
