"""How long things take in the simulated world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SAVE_SHARE = 1.0 / 3.0
"""Part of a reconfiguration that saving takes; the rest starts the new workers. Times measured on warm workers
(save and leave 0.6 to 1.0 s of 1.6 to 2.9 s) are near it."""


@dataclass(frozen=True, slots=True)
class Delays:
    """How long things take. `start_s` is a job's first start; a later one pays its share of the reconfiguration,
    which is from the last step of the old workers to the first of the new. `drain_s`: inference leaving a node."""

    start_s: float = 30.0
    reconfiguration_s: float = 30.0
    reconfiguration_s_by_model: Mapping[str, float] = field(default_factory=dict)
    drain_s: float = 60.0

    def save_s(self, model: str) -> float:
        return SAVE_SHARE * self.reconfiguration_s_by_model.get(model, self.reconfiguration_s)

    def restart_s(self, model: str) -> float:
        return (1.0 - SAVE_SHARE) * self.reconfiguration_s_by_model.get(model, self.reconfiguration_s)
