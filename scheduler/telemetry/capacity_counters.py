"""GPU-seconds of each pool by use, counted from the bins that commits store."""

from __future__ import annotations

from scheduler.domain.capacity_history import GPU_USES
from scheduler.domain.fleet import PoolKind
from scheduler.domain.tick_report import TickReport
from scheduler.scheduling.capacity_use import integrate_capacity
from scheduler.telemetry.metrics import CAPACITY_GPU_SECONDS, IDLE_GPU_SECONDS, LENT, OWN


def record_capacity(report: TickReport) -> None:
    """Count the use since the previous commit. Call it for committed ticks only, which store the same bins."""
    pools = report.before.pools
    for name, pool in pools.items():
        for use in GPU_USES:
            CAPACITY_GPU_SECONDS.labels(name, use)  # exports 0 before the first
        IDLE_GPU_SECONDS.labels(name, OWN if pool.kind is PoolKind.TRAINING else LENT)
    for each in integrate_capacity(report.before, report.after.now_s):
        for use, gpu_s in each.uses_gpu_s.items():
            CAPACITY_GPU_SECONDS.labels(each.pool, use).inc(gpu_s)
        if pools[each.pool].kind is PoolKind.TRAINING:
            IDLE_GPU_SECONDS.labels(each.pool, OWN).inc(each.free_waited_gpu_s)
        else:
            IDLE_GPU_SECONDS.labels(each.pool, LENT).inc(each.lent_idle_waited_gpu_s)
