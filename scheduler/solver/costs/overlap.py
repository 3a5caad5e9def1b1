"""Computing and communicating at once."""

from __future__ import annotations

import numpy as np

from scheduler.solver.instance import Floats


def overlapped_s(compute_s: Floats, communicate_s: Floats, coefficient: float) -> Floats:
    """Both at once, each slowed by the coefficient until the shorter one is done (Merak; Galvatron, VLDB'23,
    section 4)."""
    return np.asarray(np.maximum(compute_s, communicate_s) + (coefficient - 1) * np.minimum(compute_s, communicate_s))
