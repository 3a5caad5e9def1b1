"""GPUs that are left from now on, and what a job needs of them to meet its deadline: ElasticFlow's minimum share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.policies.contenders import Contender, Floats, Ints

ROUNDING = 1e-9
"""Steps below this share of a job's are taken for rounding."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """`free[i]` GPUs are left from `starts_s[i]` seconds from now until the next start, the last for ever."""

    starts_s: Floats
    free: Ints

    @classmethod
    def of(cls, gpus: int) -> Horizon:
        return cls(np.zeros(1), np.array([gpus]))

    def claim(self, one: Contender, deadline_s: float) -> tuple[Horizon, int] | None:
        """What is left once the job has its minimum satisfactory share, and what it gets of it now.

        The share is the smallest count with which the job is done `deadline_s` seconds from now if, whenever less is
        left, it takes the largest of its counts that fits (progressive filling: ElasticFlow, ASPLOS'23, section 4.1).
        None where even its largest count is too little. Larger counts must be faster.
        """
        within = int(self.starts_s.searchsorted(deadline_s))
        starts_s, spans_s = self.starts_s[:within], np.empty(within)
        np.subtract(starts_s[1:], starts_s[:-1], out=spans_s[:-1])
        spans_s[-1] = deadline_s - starts_s[-1]
        fitting, target = one.counts.searchsorted(self.free[:within], side="right") - 1, one.steps * (1.0 - ROUNDING)
        if spans_s @ one.speeds[fitting] < target:
            return None
        low, high = 1, len(one.counts) - 1
        while low < high:
            middle = (low + high) // 2
            if spans_s @ one.speeds[np.minimum(fitting, middle)] >= target:
                high = middle
            else:
                low = middle + 1
        taken = np.minimum(fitting, low)
        speeds = one.speeds[taken]
        done = (spans_s * speeds).cumsum()
        last = min(int(done.searchsorted(target)), within - 1)
        missing = one.steps - (done[last - 1] if last else 0.0)
        end_s = starts_s[last] + min(spans_s[last], missing / speeds[last])
        return self._without(one.counts[taken[: last + 1]], float(end_s)), int(one.counts[taken[0]])

    def _without(self, used: Ints, end_s: float) -> Horizon:
        """Less `used` GPUs in the first segments, the last of which is cut at `end_s`."""
        size, whole = len(used), len(self.starts_s)
        cut = size == whole or end_s < self.starts_s[size]
        starts_s, free = np.empty(whole + cut), np.empty(whole + cut, dtype=self.free.dtype)
        starts_s[:size], free[:size] = self.starts_s[:size], self.free[:size] - used
        if cut:
            starts_s[size], free[size] = end_s, self.free[size - 1]
        starts_s[size + cut :], free[size + cut :] = self.starts_s[size:], self.free[size:]
        return Horizon(starts_s, free)
