"""Framework: what a training framework can run, and how it is told a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute
from scheduler.domain.plan_limits import PlanLimits

PLAN_FILE = "{plan.file}"
"""Stands for the path of the exported file, in arguments."""


class PlanNotExpressibleError(ValueError):
    """A plan that a framework cannot express. The message names the framework and the reason."""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file for the framework; `name` has its suffix."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ExportedPlan:
    """A plan in a framework's words: command-line arguments, which may contain PLAN_FILE, and a file."""

    args: tuple[str, ...] = ()
    file: ExportedFile | None = None


@dataclass(frozen=True, slots=True)
class Framework:
    """A training framework.

    Args:
        name: the word that users write in `framework` and `--for`.
        title: the framework's own spelling of its name.
        module: the Python module that must be installed where ranks run.
        limits: the plans that it can run.
        write: returns a plan within the limits in the framework's words.
        has_args: whether the export has arguments, `{plan.args}`.
        has_file: whether the export has a file, `{plan.file}`.
    """

    name: str
    title: str
    module: str
    limits: PlanLimits
    write: Callable[[ParallelPlan], ExportedPlan]
    has_args: bool = False
    has_file: bool = False

    def find_problem(self, plan: ParallelPlan) -> str:
        """Return why the framework cannot express the plan, empty if it can."""
        if plan.is_mixed or plan.is_replicated_mix:
            models = ", ".join(sorted({stage.gpu for stage in plan.stages}))
            return f"the plan uses GPUs of several models ({models})"
        return self.limits.find_violation(plan)

    def export(self, plan: ParallelPlan) -> ExportedPlan:
        """Return the plan in the framework's words.

        Raises:
            PlanNotExpressibleError: the framework cannot run the plan.
        """
        if problem := self.find_problem(plan):
            raise PlanNotExpressibleError(f"{self.title} cannot express {plan.summarize()}: {problem}")
        return self.write(plan)

    def list_placeholders(self) -> tuple[str, ...]:
        """Return the names that `{plan.NAME}` may have in the command of a job of this framework."""
        uniform = UNIFORM_VALUES if self.limits.is_uniform else ()
        exported = [name for name, has_one in (("args", self.has_args), ("file", self.has_file)) if has_one]
        return (*exported, *SHARED_VALUES, *uniform)


def list_layer_strategies(plan: ParallelPlan) -> list[LayerStrategy]:
    """Return the strategy of each layer, in order."""
    return [replace(run, layers=1) for stage in plan.stages for run in stage.strategies for _ in range(run.layers)]


def list_stage_lengths(plan: ParallelPlan) -> list[int]:
    """Return the number of layers of each stage."""
    return [stage.last_layer - stage.first_layer + 1 for stage in plan.stages]


def get_uniform_strategy(plan: ParallelPlan) -> LayerStrategy:
    """Return the strategy of all layers of a uniform plan."""
    return plan.stages[0].strategies[0]


def count_samples_per_replica(plan: ParallelPlan) -> int:
    """Return the samples of one micro-batch in each data-parallel replica of a uniform plan."""
    return plan.micro_batch_size // get_uniform_strategy(plan).dp


def list_plan_values(plan: ParallelPlan) -> Mapping[str, str]:
    """Return the values of placeholders. Those of degrees exist only if all layers have one strategy."""
    values = {
        "pp": str(plan.pipeline_devices),
        "interleave": str(plan.schedule.interleave),
        "schedule": plan.schedule.name.value,
        "micro_batches": str(plan.micro_batches),
        "global_batch": str(plan.global_batch),
        "world_size": str(plan.world_size),
    }
    is_uniform = len(set(list_layer_strategies(plan))) == 1
    return {**values, **dict(_list_uniform_values(plan))} if is_uniform else values


def _list_uniform_values(plan: ParallelPlan) -> Iterator[tuple[str, str]]:
    strategy = get_uniform_strategy(plan)
    for name in ("tp", "dp", "ulysses", "ring", "ep", "zero"):
        yield name, str(getattr(strategy, name))
    yield "cp", str(strategy.ulysses * strategy.ring)
    yield "micro_batch_size", str(count_samples_per_replica(plan))
    yield "recompute", strategy.recompute.value
    yield "gradient_checkpointing", "false" if strategy.recompute is Recompute.NONE else "true"


SHARED_VALUES = ("pp", "interleave", "schedule", "micro_batches", "global_batch", "world_size")
UNIFORM_VALUES = (
    *("tp", "dp", "ulysses", "ring", "ep", "zero", "cp", "micro_batch_size", "recompute", "gradient_checkpointing"),
)
