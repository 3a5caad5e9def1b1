"""Truth: in what the simulated world differs from what policies are told of it.

Three things are hidden. A job's model, where the trace names none, follows from its size. Its true step time is its
curve's times an error. Its true length is the trace's, and what its owner declared is off.

The declared length stands in the job's document, the true one in the executor alone, and progress is counted in
true steps. So a job ends when its own work is done, whatever was believed; one whose length was declared too low is
seen beyond it, and from then on has as much to go as `Job.remaining_steps` expects of such a job. The other way,
counting progress in believed steps, would tell policies the secret: the measured speed of a job would be off by just
the factor that its length is off by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from random import Random
from typing import Any

from scheduler.documents.trace import JobRow

GPUS_MIN = 2
"""Jobs of fewer GPUs are given no model."""
_ALLOWED = "models, error=S and duration=S with commas between, S a share from 0 to below 1"


@dataclass(frozen=True, slots=True)
class Truth:
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
                raise ValueError(f"{name}: got {getattr(self, name):g}; allowed: {_ALLOWED}")

    @property
    def is_as_told(self) -> bool:
        """Speeds and lengths are as policies are told."""
        return self.error == self.duration == 0.0

    def step_time_factor(self, job_id: str, gpus: int) -> float:
        """True step time over the curve's."""
        if self.error == 0.0:
            return 1.0
        spread = Random(f"error/{self.seed}/{job_id}/{gpus}").gauss(0.0, self.error)
        return math.exp(spread - self.error**2 / 2.0)

    def believed_ratio(self, job_id: str) -> float:
        """Declared over true run time on the trace's GPUs."""
        if self.duration == 0.0:
            return 1.0
        return Random(f"duration/{self.seed}/{job_id}").uniform(1.0 - self.duration, 1.0 + self.duration)

    def with_models(self, row: JobRow) -> Iterator[JobRow]:
        """The row with each model that jobs of its size have, in a seeded order by weight: one that has no plan on
        the cluster's GPUs leaves its place to the next."""
        if not self.models or row.model or row.gpus < GPUS_MIN:
            return
        random = Random(f"model/{self.seed}/{row.job_id}")
        left = list(_models_of(row.gpus))
        while left:
            (chosen,) = random.choices(left, [entry["weight"] for entry in left])
            left.remove(chosen)
            names = ("model", "global_batch", "sequence_length")
            yield replace(row, **{name: chosen[name] for name in names})


AS_TOLD = Truth()


def parse_truth(text: str) -> Truth:
    """The truth that an option names, as `models,error=0.15,duration=0.5`; an empty text hides nothing.

    Raises:
        ValueError: a part is not known, stands there twice, or has a value that is not allowed.
    """
    given: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name in given or (name, bool(value)) not in (("models", False), ("error", True), ("duration", True)):
            raise ValueError(f"got {part!r}; allowed: {_ALLOWED}, each once")
        try:
            given[name] = float(value) if value else True
        except ValueError:
            raise ValueError(f"{name}: got {value!r}; allowed: {_ALLOWED}") from None
    return Truth(**given)


@cache
def _models_of(gpus: int) -> tuple[dict[str, Any], ...]:
    """The entries of the largest size that is not above `gpus`."""
    document = json.loads(files("scheduler.simulator").joinpath("data/models_by_size.json").read_text())
    fitting = [size for size in document["sizes"] if size["gpus_min"] <= gpus]
    return tuple(max(fitting, key=lambda size: int(size["gpus_min"]))["models"])
