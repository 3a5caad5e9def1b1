"""Limits of a run on a machine: memory by the GPUs that the job holds, and cores by weight.

A job that states no limits gets the memory of its GPUs: their share of the machine, less a reserve for the system. So a
job that holds all GPUs can use what a machine of its own would give it, and no job can take memory from another. Slots
of processors are no such share, because a machine may have any number of them: each job on slots gets all memory but
the reserve.

Cores are divided by weight, not by quota: idle cores are free for all, such as for the data loaders of one job.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from scheduler.domain.run_document import ResourceLimits, RunDocument

_RESERVE_SHARE = 0.05
_RESERVE_BYTES_MIN, _RESERVE_BYTES_MAX = 2**30, 8 * 2**30
_RESERVE_SHARE_MAX = 0.25
"""Largest share of a small machine's memory that is reserved by default."""


class MemoryLimit(StrEnum):
    """Memory of jobs that state none: the share of their GPUs, all but the reserve, or as much as there is."""

    SHARE = "share"
    MACHINE = "machine"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """How the machine's memory is divided. `reserve_bytes` is left to the system; None: 5%, from 1 to 8 GiB."""

    limit: MemoryLimit = MemoryLimit.SHARE
    reserve_bytes: int | None = None


DEFAULT_MEMORY_POLICY = MemoryPolicy()


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory that all jobs of a machine may use together, and how it is divided. 0 bytes: no limit can be set."""

    bytes: int = 0
    limit: MemoryLimit = MemoryLimit.NONE

    @classmethod
    def create(cls, policy: MemoryPolicy, machine_bytes: int) -> MemoryBudget:
        """Return the budget of a machine whose jobs can be limited.

        Raises:
            ValueError: the reserve leaves no memory to jobs.
        """
        reserve_bytes = policy.reserve_bytes
        if reserve_bytes is None:
            bounded = min(max(_RESERVE_SHARE * machine_bytes, _RESERVE_BYTES_MIN), _RESERVE_BYTES_MAX)
            reserve_bytes = int(min(bounded, _RESERVE_SHARE_MAX * machine_bytes))
        if reserve_bytes >= machine_bytes:
            raise ValueError(
                f"--reserve-memory: got {_format(reserve_bytes)}, but the machine has {_format(machine_bytes)}. "
                "Reserve less."
            )
        return cls(machine_bytes - reserve_bytes, policy.limit)

    def __str__(self) -> str:
        match self.limit:
            case MemoryLimit.NONE:
                return "as jobs state"
            case MemoryLimit.MACHINE:
                return f"{_format(self.bytes)} for each job"
        return f"by GPUs, from {_format(self.bytes)}"

    def derive_limits(self, document: RunDocument, gpus: Collection[int]) -> ResourceLimits:
        """Return the limits that the job states, and this machine's for what it does not state.

        A stated amount counts up to what all jobs may use, unless memory has no limit here.

        Args:
            gpus: indices of the machine's GPUs, empty for slots of processors.
        """
        stated = document.limits
        if self.limit is MemoryLimit.NONE or not self.bytes:
            return stated
        memory_bytes = self.bytes
        if stated.memory_bytes is not None:
            memory_bytes = min(stated.memory_bytes, self.bytes)
        elif self.limit is MemoryLimit.SHARE and document.has_devices and gpus:
            held = len({seat.gpu for seat in document.ranks}.intersection(gpus))
            memory_bytes = self.bytes * max(1, held) // len(gpus)
        return ResourceLimits(memory_bytes, stated.processes, stated.cpus)


NO_MEMORY_BUDGET = MemoryBudget()


def _format(amount: int) -> str:
    return f"{amount / 2**30:.1f} GiB"
