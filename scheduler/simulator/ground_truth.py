"""Ground truth of a simulation: true step times and job lengths, which policies do not see.

A job without a model in the trace may get one by its size. Its true step time is that of its curve times a random
error. Its true length is that of the trace, and the declared length differs from it.

The job document has the declared length; only the executor knows the true one. Progress is counted in true steps, so
that a job ends when its work is done. A job whose declared length is too short runs beyond it;
`Job.remaining_steps` then estimates the rest. Progress in declared steps would reveal the error to policies, because
the measured speed would be wrong by the same factor as the length.
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
from scheduler.domain.job_spec import JobSpec
from scheduler.simulator.throughput_curves import CurveCache
from scheduler.simulator.workloads import Submission, build_submissions, compute_fastest_speed, count_gpu_models

MODEL_GPUS_MIN = 2
"""Jobs with fewer GPUs get no model."""
_ALLOWED_TRUTH = (
    "models, error=S, duration=S, compute=R, network=R and slow-node=R, separated by commas, "
    "with S at least 0 and below 1, and R above 0 and at most 10"
)
_RATE_MAX = 10.0


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """Random differences between the simulated cluster and the policies' view of it. The default has none.

    Args:
        models: whether jobs with 2 or more GPUs get models by their size.
        error: standard deviation of the logarithm of true step time over curve step time, drawn with mean 1 for each
            job and GPU count.
        duration: the declared length is uniform within this fraction of the true one.
        compute, network: true rates of the GPUs and of the network between nodes, relative to the GPU profiles.
        slow_node: rate of the last node by name, relative to the others. A job with ranks on it is as slow as it.
        seed: seed of all draws.

    Raises:
        ValueError: `error` or `duration` is negative, or 1 or more, or a rate is 0 or below, or above 10.
    """

    models: bool = False
    error: float = 0.0
    duration: float = 0.0
    compute: float = 1.0
    network: float = 1.0
    slow_node: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("error", "duration"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: got {getattr(self, name):g}; allowed: {_ALLOWED_TRUTH}")
        for name in ("compute", "network", "slow_node"):
            if not 0.0 < getattr(self, name) <= _RATE_MAX:
                raise ValueError(f"{name.replace('_', '-')}: got {getattr(self, name):g}; allowed: {_ALLOWED_TRUTH}")

    @property
    def hides_hardware(self) -> bool:
        """Whether GPUs or the network are not as fast as their profiles say."""
        return not self.compute == self.network == 1.0

    @property
    def matches_declaration(self) -> bool:
        """Whether speeds and lengths are as policies see them."""
        return self.error == self.duration == 0.0

    def draw_step_time_factor(self, job_id: str, gpus: int) -> float:
        """Return true step time divided by the step time of the curve."""
        if self.error == 0.0:
            return 1.0
        spread = Random(f"error/{self.seed}/{job_id}/{gpus}").gauss(0.0, self.error)
        return math.exp(spread - self.error**2 / 2.0)

    def draw_declared_ratio(self, job_id: str) -> float:
        """Return declared divided by true run time on the GPUs of the trace."""
        if self.duration == 0.0:
            return 1.0
        return Random(f"duration/{self.seed}/{job_id}").uniform(1.0 - self.duration, 1.0 + self.duration)

    def draw_models(self, row: JobRow) -> Iterator[JobRow]:
        """Yield the row with each model for jobs of its size, in weighted random order.

        The caller takes the first that has a plan on the GPUs of the cluster.
        """
        if not self.models or row.model or row.gpus < MODEL_GPUS_MIN:
            return
        random = Random(f"model/{self.seed}/{row.job_id}")
        remaining = list(_load_models_for_size(row.gpus))
        while remaining:
            (chosen,) = random.choices(remaining, [entry["weight"] for entry in remaining])
            remaining.remove(chosen)
            names = ("model", "global_batch", "sequence_length")
            yield replace(row, **{name: chosen[name] for name in names})


NOTHING_HIDDEN = GroundTruth()


_TRUTHS = frozenset({"models", "error", "duration", "compute", "network", "slow_node"})


def parse_ground_truth(text: str) -> GroundTruth:
    """Parse an option like `models,error=0.15,duration=0.5`. The empty text is the default.

    Raises:
        ValueError: a part is unknown or repeated, or its value is not accepted.
    """
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        name = name.replace("-", "_")
        if name in given or name not in _TRUTHS or bool(value) is (name == "models"):
            raise ValueError(f"got {part!r}; allowed: {_ALLOWED_TRUTH}, each once")
        try:
            given[name] = float(value) if value else True
        except ValueError:
            raise ValueError(f"{name}: got {value!r}; allowed: {_ALLOWED_TRUTH}") from None
    return GroundTruth(**given)


@cache
def _load_models_for_size(gpus: int) -> tuple[dict[str, Any], ...]:
    """Return the entries of the largest size that is at most `gpus`."""
    document = json.loads(files("scheduler.simulator").joinpath("data/models_by_size.json").read_text())
    fitting = [size for size in document["sizes"] if size["gpus_min"] <= gpus]
    return tuple(max(fitting, key=lambda size: int(size["gpus_min"]))["models"])


def build_true_submissions(
    rows: Iterable[JobRow], cluster: ClusterDocument, curves: CurveCache, truth: GroundTruth, *, elastic: bool
) -> tuple[Submission, ...]:
    """Return the submissions of `build_submissions` with models by size, and true and declared lengths.

    On packed GPUs of the trace's number, the true run time of a job is that of the trace. `run_time_s_min` is the
    shortest true run time on any canonical GPU count in the job's range.

    Raises:
        WorkloadError: as `build_submissions`.
    """
    step_times = _StepTimeModel(cluster, curves)
    modelled = [step_times.assign_model(row, truth) for row in rows]
    declared = build_submissions(modelled, cluster, curves, elastic=elastic)
    if truth.matches_declaration:
        return declared
    widest = declared if elastic else build_submissions(modelled, cluster, curves, elastic=True)
    return tuple(_apply_truth(each, wide.spec, step_times, truth) for each, wide in zip(declared, widest, strict=True))


class _StepTimeModel:
    """Step times on packed GPUs of the requested model, or else of the most common one in training pools."""

    def __init__(self, cluster: ClusterDocument, curves: CurveCache) -> None:
        self._models = count_gpu_models(cluster)
        self._curves = curves

    def assign_model(self, row: JobRow, truth: GroundTruth) -> JobRow:
        """Return the row with the first drawn model that can run on its GPUs, or unchanged if none can."""
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

    def compute_fastest_speed(self, spec: JobSpec) -> float:
        """Return the relative speed of the fastest GPU for a job without a model. A curve already contains speeds."""
        return 1.0 if spec.has_profile else compute_fastest_speed(spec, self._models)

    def compute_canonical_step_times(self, spec: JobSpec) -> Mapping[int, float]:
        per_node = self._models.per_node[spec.gpu or self._models.most_common]
        return self.compute_step_times(spec, canonical_gpu_counts(spec.min_gpus, spec.max_gpus, per_node))

    def compute_step_times(self, spec: JobSpec, counts: Sequence[int]) -> Mapping[int, float]:
        """Return step times by GPU count. Counts without a plan are omitted."""
        if not spec.has_profile:
            return {count: 1.0 / count for count in counts}
        gpu = spec.gpu or self._models.most_common
        shapes = {count: GpuShape.packed(gpu, count, self._models.per_node[gpu]) for count in counts}
        points = {count: self._curves.get_job_point(spec, shape) for count, shape in shapes.items()}
        return {count: point.plan.iteration_time_s for count, point in points.items() if point.plan}


def _apply_truth(submission: Submission, widest: JobSpec, step_times: _StepTimeModel, truth: GroundTruth) -> Submission:
    spec, job_id = submission.spec, submission.job_id
    steps_true = max(1, round(spec.steps / truth.draw_step_time_factor(job_id, submission.trace_gpus)))
    declared_ratio = truth.draw_declared_ratio(job_id)
    estimate_s = None if spec.duration_estimate_s is None else spec.duration_estimate_s * declared_ratio
    declared = replace(spec, steps=max(1, round(spec.steps * declared_ratio)), duration_estimate_s=estimate_s)
    times_s = step_times.compute_canonical_step_times(widest).items()
    fastest_s = min(step_s * truth.draw_step_time_factor(job_id, count) for count, step_s in times_s)
    fastest_s /= step_times.compute_fastest_speed(spec)
    return replace(submission, spec=declared, steps_true=float(steps_true), run_time_s_min=steps_true * fastest_s)
