"""Dominance: strategies that another one of the same layout beats in every layer are left out."""

from __future__ import annotations

import numpy as np

from scheduler.solver.instance import Ints, StageCosts


def undominated(costs: StageCosts, *, in_flight_max: float) -> Ints:
    """Numbers of the strategies that may be of use, ascending.

    Strategy a dominates b if both leave the same layout and, for every layer type, a takes no more time, no more at a
    border, no more buffer, and no more memory with 1 and with `in_flight_max` micro-batches in flight (memory is
    linear between the two). Replacing b by a in any plan then costs nothing. Of equal ones the first stays.
    """
    rows = np.concatenate(
        [
            costs.time_s,
            costs.border_s,
            costs.memory_bytes(1.0).astype(np.float64),
            costs.memory_bytes(in_flight_max).astype(np.float64),
            costs.working_bytes[None].astype(np.float64),
        ]
    )
    kept = []
    for layout in np.unique(costs.layouts).tolist():
        members = np.flatnonzero(costs.layouts == layout)
        columns = rows[:, members]
        no_worse = (columns[:, :, None] <= columns[:, None, :]).all(axis=0)
        # Among equals only the earlier one dominates.
        strictly = no_worse & (~no_worse.T | np.triu(np.ones_like(no_worse), k=1))
        kept.append(members[~strictly.any(axis=0)])
    return np.sort(np.concatenate(kept))
