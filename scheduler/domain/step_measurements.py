"""Measured steps of jobs, kept in the snapshot, from which predictions of other plans learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log

ROWS_MAX = 12
"""Measured plans that are kept of a model on a GPU model."""
MODELS_MAX = 2048
"""Pairs of model and GPU model that a snapshot holds. The one that was longest without a change is dropped first."""
CHANGE_MIN = 0.02
"""A measured plan is replaced when its ratio of times or of memory changes by this share."""
_LOG_RATIO_MAX = log(1000.0)


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Measured over predicted step time of one job under one plan.

    `owner` is the owner key of the job. `terms` are those of the plan, and `layout` is that of `describe_layout`, both
    rounded. `log_ratio` is the logarithm of measured / predicted, limited to factors of 1,000. `memory` is measured
    over predicted peak memory, or 0 if unknown.
    """

    job: str
    owner: str
    terms: tuple[float, ...]
    layout: tuple[float, ...]
    log_ratio: float
    memory: float = 0.0
    _hash: int = field(init=False, compare=False, repr=False, default=0, metadata={"derived": True})

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._fields))

    def __hash__(self) -> int:
        """Return the stored hash, because summaries of rows are looked up by all rows of a GPU model."""
        return self._hash

    def __reduce__(self) -> tuple[type[StepMeasurement], tuple[object, ...]]:
        """Rebuild the hash in the receiving process, because string hashes differ between processes."""
        return StepMeasurement, self._fields

    @property
    def _fields(self) -> tuple[object, ...]:
        return self.job, self.owner, self.terms, self.layout, self.log_ratio, self.memory

    @classmethod
    def from_ratio(
        cls, job: str, owner: str, terms: tuple[float, ...], layout: tuple[float, ...], ratio: float
    ) -> StepMeasurement:
        """Return the measurement of a step that took `ratio` times as long as predicted."""
        limited = min(max(log(ratio), -_LOG_RATIO_MAX), _LOG_RATIO_MAX) if ratio > 0.0 else -_LOG_RATIO_MAX
        return cls(job, owner, _round(terms, 3), _round(layout, 2), round(limited, 3))

    def with_memory(self, ratio: float) -> StepMeasurement:
        """Return the measurement of a plan whose peak memory was `ratio` times the predicted one."""
        return replace(self, memory=round(ratio, 2))


@dataclass(frozen=True, slots=True)
class ModelMeasurements:
    """Measured plans of a model on a GPU model, the newest last, at most ROWS_MAX."""

    updated_at_s: float
    rows: tuple[StepMeasurement, ...] = ()

    def with_row(self, row: StepMeasurement, at_s: float) -> ModelMeasurements:
        """Return the measurements with `row`, which replaces that of the same job and plan.

        The same object is returned if the ratio has hardly changed. A row too many is the oldest of the owner with the
        most rows, so that no owner displaces the others.
        """
        rows = [known for known in self.rows if (known.job, known.layout) != (row.job, row.layout)]
        before = next((known for known in self.rows if (known.job, known.layout) == (row.job, row.layout)), None)
        if (
            before is not None
            and abs(before.log_ratio - row.log_ratio) < CHANGE_MIN
            and abs(before.memory - row.memory) < CHANGE_MIN
        ):
            return self
        if len(rows) >= ROWS_MAX:
            counts = Counter(known.owner for known in rows)
            most = max(counts.values())
            rows.remove(next(known for known in rows if counts[known.owner] == most))
        return ModelMeasurements(at_s, (*rows, row))


def build_measurements_key(gpu: str, model_key: str) -> str:
    """Return the key of a model's measurements on a GPU model. `model_key` is that of its CurveRequest."""
    return f"{gpu} {model_key}"


def get_gpu(key: str) -> str:
    """Return the GPU model of a key."""
    return key.partition(" ")[0]


def record_measurement(
    known: Mapping[str, ModelMeasurements], key: str, row: StepMeasurement, at_s: float
) -> Mapping[str, ModelMeasurements]:
    """Return the measurements of all models with `row`, or the same mapping if it says nothing new."""
    before = known.get(key, ModelMeasurements(at_s))
    after = before.with_row(row, at_s)
    if after is before:
        return known
    updated = {**known, key: after}
    if len(updated) > MODELS_MAX:
        del updated[min(updated, key=lambda each: (updated[each].updated_at_s, each))]
    return updated


def _round(values: tuple[float, ...], digits: int) -> tuple[float, ...]:
    return tuple(round(value, digits) for value in values)
