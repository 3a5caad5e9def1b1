"""The limits of runs on machines of all sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.agent.resource_limits import MemoryBudget, MemoryLimit, MemoryPolicy
from scheduler.domain.run_document import RankSeat, ResourceLimits, RunDocument
from tests.agent.runs import python_job

GIB = 2**30


def hold(*gpus: int, memory_bytes: int | None = None, has_devices: bool = True) -> RunDocument:
    seats = tuple(RankSeat(rank, rank, gpu) for rank, gpu in enumerate(gpus))
    limits = ResourceLimits(memory_bytes)
    return replace(python_job("pass"), ranks=seats, limits=limits, has_devices=has_devices)


@pytest.mark.parametrize(
    ("machine_gib", "jobs_gib"), [(2, 1.5), (4, 3), (16, 15), (64, 60.8), (128, 121.6), (2048, 2040)]
)
def test_reserve_of_machines(machine_gib: int, jobs_gib: float) -> None:
    assert MemoryBudget.create(MemoryPolicy(), machine_gib * GIB).bytes / GIB == pytest.approx(jobs_gib)


def test_memory_is_divided_by_gpus() -> None:
    budget = MemoryBudget(80 * GIB, MemoryLimit.SHARE)
    for document, expected_gib in (
        (hold(3), 10),
        (hold(0, 1, 2), 30),
        (hold(*range(8)), 80),
        (hold(0, memory_bytes=40 * GIB), 40),
        (hold(0, memory_bytes=400 * GIB), 80),
    ):
        assert budget.derive_limits(document, range(8)).memory_bytes == expected_gib * GIB


def test_slots_of_processors_are_no_share_of_the_memory() -> None:
    """A laptop may declare 64 slots. None of its jobs could import torch with a 64th of the memory."""
    budget = MemoryBudget(15 * GIB, MemoryLimit.SHARE)
    assert budget.derive_limits(hold(0, has_devices=False), range(64)).memory_bytes == 15 * GIB
    assert budget.derive_limits(hold(0), ()).memory_bytes == 15 * GIB


def test_operator_can_change_what_jobs_get() -> None:
    machine, none = (MemoryBudget(80 * GIB, limit) for limit in (MemoryLimit.MACHINE, MemoryLimit.NONE))
    assert machine.derive_limits(hold(0), range(8)).memory_bytes == 80 * GIB
    assert none.derive_limits(hold(0), range(8)).memory_bytes is None
    assert none.derive_limits(hold(0, memory_bytes=400 * GIB), range(8)).memory_bytes == 400 * GIB
    assert MemoryBudget.create(MemoryPolicy(reserve_bytes=3 * GIB), 16 * GIB).bytes == 13 * GIB
    with pytest.raises(ValueError, match="--reserve-memory"):
        MemoryBudget.create(MemoryPolicy(reserve_bytes=16 * GIB), 16 * GIB)
