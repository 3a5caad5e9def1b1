"""Truth: in what the simulated world differs from what policies are told of it.

Three things are hidden. A job's model, where the trace names none, follows from its size. Its true step time is its
curve's times an error. Its true length is the trace's, and what its owner declared is off.

The declared length stands in the job's document, the true one in the executor alone, and progress is counted in
true steps. So a job ends when its own work is done, whatever was believed; one whose length was declared too low is
seen beyond it, and from then on has as much to go as `Job.remaining_steps` expects of such a job. The other way,
counting progress in believed steps, would tell policies the secret: the measured speed of a job would be off by just
the factor that its length is off by.

From submissions as they were told to those of a world that hides something (`Truth`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from random import Random
from typing import Any

from scheduler.documents.simulation import ClusterDocument
from scheduler.documents.trace_files import JobRow
from scheduler.domain.gpu_sets import GpuShape, canonical_gpu_counts
from scheduler.domain.job import JobSpec
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.simulator.workloads import Submission, build_submissions, count_gpu_models

MODEL_GPUS_MIN = 2
"""Jobs of fewer GPUs are given no model."""
_ALLOWED_TRUTH = "models, error=S and duration=S with commas between, S a share from 0 to below 1"


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """`models`: jobs of 2 GPUs and more have models by their size. `error`: standard deviation of the logarithm of a
    step's true time over the curve's, drawn for each job and GPU count, of mean 1. `duration`: a job's declared
    length lies within this share of the true one, evenly. Everything is drawn from `seed`; the default hides nothing.

    Raises:
        ValueError: a share is below 0, or 1 and above.
    """

    models: bool = False
    error: float = 0.0
    duration: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("error", "duration"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: got {getattr(self, name):g}; allowed: {_ALLOWED_TRUTH}")

    @property
    def matches_declaration(self) -> bool:
        """Speeds and lengths are as policies are told."""
        return self.error == self.duration == 0.0

    def draw_step_time_factor(self, job_id: str, gpus: int) -> float:
        """True step time over the curve's."""
        if self.error == 0.0:
            return 1.0
        spread = Random(f"error/{self.seed}/{job_id}/{gpus}").gauss(0.0, self.error)
        return math.exp(spread - self.error**2 / 2.0)

    def draw_declared_ratio(self, job_id: str) -> float:
        """Declared over true run time on the trace's GPUs."""
        if self.duration == 0.0:
            return 1.0
        return Random(f"duration/{self.seed}/{job_id}").uniform(1.0 - self.duration, 1.0 + self.duration)

    def draw_models(self, row: JobRow) -> Iterator[JobRow]:
        """The row with each model that jobs of its size have, in a seeded order by weight: one that has no plan on
        the cluster's GPUs leaves its place to the next."""
        if not self.models or row.model or row.gpus < MODEL_GPUS_MIN:
            return
        random = Random(f"model/{self.seed}/{row.job_id}")
        left = list(_load_models_for_size(row.gpus))
        while left:
            (chosen,) = random.choices(left, [entry["weight"] for entry in left])
            left.remove(chosen)
            names = ("model", "global_batch", "sequence_length")
            yield replace(row, **{name: chosen[name] for name in names})


NOTHING_HIDDEN = GroundTruth()


def parse_ground_truth(text: str) -> GroundTruth:
    """The truth that an option names, as `models,error=0.15,duration=0.5`; an empty text hides nothing.

    Raises:
        ValueError: a part is not known, stands there twice, or has a value that is not allowed.
    """
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name in given or (name, bool(value)) not in (("models", False), ("error", True), ("duration", True)):
            raise ValueError(f"got {part!r}; allowed: {_ALLOWED_TRUTH}, each once")
        try:
            given[name] = float(value) if value else True
        except ValueError:
            raise ValueError(f"{name}: got {value!r}; allowed: {_ALLOWED_TRUTH}") from None
    return GroundTruth(**given)


@cache
def _load_models_for_size(gpus: int) -> tuple[dict[str, Any], ...]:
    """The entries of the largest size that is not above `gpus`."""
    document = json.loads(files("scheduler.simulator").joinpath("data/models_by_size.json").read_text())
    fitting = [size for size in document["sizes"] if size["gpus_min"] <= gpus]
    return tuple(max(fitting, key=lambda size: int(size["gpus_min"]))["models"])


def build_true_submissions(
    rows: Iterable[JobRow], cluster: ClusterDocument, curves: CurveCache, truth: GroundTruth, *, elastic: bool
) -> tuple[Submission, ...]:
    """The trace's jobs as `submissions` makes them, with what `truth` hides: models by size, true and declared lengths.

    On the trace's GPUs, packed, a job truly runs as long as in the trace. `run_time_s_min` is the shortest true run
    time on any canonical count of the job's range.

    Raises:
        WorkloadError: as `submissions`.
    """
    hardware = _StepTimeModel(cluster, curves)
    modelled = [hardware.assign_model(row, truth) for row in rows]
    told = build_submissions(modelled, cluster, curves, elastic=elastic)
    if truth.matches_declaration:
        return told
    widest = told if elastic else build_submissions(modelled, cluster, curves, elastic=True)
    return tuple(_apply_truth(one, wide.spec, hardware, truth) for one, wide in zip(told, widest, strict=True))


class _StepTimeModel:
    """Step times of jobs on packed GPUs of the model that they ask for, else of the one that training has most of."""

    def __init__(self, cluster: ClusterDocument, curves: CurveCache) -> None:
        self._models = count_gpu_models(cluster)
        self._curves = curves

    def assign_model(self, row: JobRow, truth: GroundTruth) -> JobRow:
        """The row with the first of its size's models that can run on the trace's GPUs; as it is where none can."""
        for candidate in truth.draw_models(row):
            spec = JobSpec(
                row.job_id,
                row.gpus,
                row.gpus,
                gpu=row.gpu,
                model=candidate.model,
                global_batch=candidate.global_batch,
                sequence_length=candidate.sequence_length,
            )
            if self.compute_step_times(spec, (row.gpus,)):
                return candidate
        return row

    def compute_canonical_step_times(self, spec: JobSpec) -> Mapping[int, float]:
        per_node = self._models.per_node[spec.gpu or self._models.most_common]
        return self.compute_step_times(spec, canonical_gpu_counts(spec.min_gpus, spec.max_gpus, per_node))

    def compute_step_times(self, spec: JobSpec, counts: Sequence[int]) -> Mapping[int, float]:
        """By GPU count; without those that have no plan."""
        if not spec.has_profile:
            return {count: 1.0 / count for count in counts}
        gpu = spec.gpu or self._models.most_common
        shapes = {count: GpuShape.packed(gpu, count, self._models.per_node[gpu]) for count in counts}
        points = {count: self._curves.get_job_point(spec, shape) for count, shape in shapes.items()}
        return {count: point.plan.iteration_time_s for count, point in points.items() if point.plan}


def _apply_truth(submission: Submission, widest: JobSpec, step_times: _StepTimeModel, truth: GroundTruth) -> Submission:
    spec, job_id = submission.spec, submission.job_id
    steps_true = max(1, round(spec.steps / truth.draw_step_time_factor(job_id, submission.trace_gpus)))
    believed_ratio = truth.draw_declared_ratio(job_id)
    estimate_s = None if spec.duration_estimate_s is None else spec.duration_estimate_s * believed_ratio
    declared = replace(spec, steps=max(1, round(spec.steps * believed_ratio)), duration_estimate_s=estimate_s)
    times_s = step_times.compute_canonical_step_times(widest).items()
    fastest_s = min(step_s * truth.draw_step_time_factor(job_id, count) for count, step_s in times_s)
    return replace(submission, spec=declared, steps_true=float(steps_true), run_time_s_min=steps_true * fastest_s)
