"""Measurement tasks of a device and their results, and the JSON lines in which ranks and the command exchange them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from scheduler.domain.parallel_plan import ParallelPlan, plan_from_json, plan_to_json


@dataclass(frozen=True, slots=True)
class GptShape:
    """Dimensions of a GPT of the reference trainer."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int


@dataclass(frozen=True, slots=True)
class GemmTask:
    """Products of a linear layer: `m` rows, `k` inputs, `n` outputs; forward, and both of the backward pass."""

    kind: ClassVar[str] = "gemm"
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Operations of one product."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """Causal attention core, forward and backward."""

    kind: ClassVar[str] = "attention"
    samples: int
    heads: int
    tokens: int
    width: int

    @property
    def flops(self) -> float:
        """Operations of the forward pass without the masked pairs."""
        return 2.0 * self.samples * self.heads * self.tokens**2 * self.width


@dataclass(frozen=True, slots=True)
class BandwidthTask:
    """Sum of two arrays of `size_bytes` each into a third one."""

    kind: ClassVar[str] = "bandwidth"
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LaunchTask:
    """Passes of one layer over so few values that the host's work is all that takes time."""

    kind: ClassVar[str] = "launch"
    hidden: int = 64


@dataclass(frozen=True, slots=True)
class HostLinkTask:
    """Copy of `size_bytes` from the device to pinned memory of the host and back, and Adam on the host."""

    kind: ClassVar[str] = "host-link"
    size_bytes: int


@dataclass(frozen=True, slots=True)
class OptimizerTask:
    """AdamW step over `parameters` fp32 weights."""

    kind: ClassVar[str] = "optimizer"
    parameters: int


@dataclass(frozen=True, slots=True)
class CollectiveTask:
    """A collective in groups of `ranks`, alone and with matrix products beside it.

    All groups of this size work at the same time.

    Attributes:
        collective: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `send`.
        size_bytes: the whole message, as in `scheduler.solver.costs.collectives`.
    """

    kind: ClassVar[str] = "collective"
    collective: str
    ranks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StepTask:
    """Steps of the reference trainer with AdamW under `plan`.

    `purpose` is `probe` if the profile is fitted to the result, and `validation` if it is compared with a prediction.
    """

    kind: ClassVar[str] = "step"
    purpose: str
    shape: GptShape
    plan: ParallelPlan


Task = GemmTask | AttentionTask | BandwidthTask | LaunchTask | HostLinkTask | OptimizerTask | CollectiveTask | StepTask
_KINDS: Mapping[str, Any] = {
    each.kind: each
    for each in (
        GemmTask,
        AttentionTask,
        BandwidthTask,
        LaunchTask,
        HostLinkTask,
        OptimizerTask,
        CollectiveTask,
        StepTask,
    )
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of a task in one round.

    Attributes:
        figures: medians by name, in seconds (`*_s`), bytes (`*_bytes`) or as a share (`spread`).
        failure: why there are no figures; empty if there are.
    """

    task: Task
    round: int
    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


def task_to_json(task: Task) -> dict[str, Any]:
    """Return the task as a JSON object."""
    if isinstance(task, StepTask):
        plan = plan_to_json(task.plan)
        return {"kind": task.kind, "purpose": task.purpose, "shape": asdict(task.shape), "plan": plan}
    return {"kind": task.kind, **asdict(task)}


def task_from_json(document: Mapping[str, Any]) -> Task:
    """Return the task of a JSON object that `task_to_json` made."""
    values = {name: value for name, value in document.items() if name != "kind"}
    if document["kind"] == StepTask.kind:
        return StepTask(values["purpose"], GptShape(**values["shape"]), plan_from_json(values["plan"]))
    task: Task = _KINDS[document["kind"]](**values)
    return task


def measurement_to_json(measurement: Measurement) -> dict[str, Any]:
    """Return the measurement as a JSON object."""
    return {
        "task": task_to_json(measurement.task),
        "round": measurement.round,
        "figures": dict(measurement.figures),
        "failure": measurement.failure,
    }


def measurement_from_json(document: Mapping[str, Any]) -> Measurement:
    """Return the measurement of a JSON object that `measurement_to_json` made."""
    return Measurement(
        task_from_json(document["task"]), document["round"], document["figures"], document.get("failure", "")
    )
