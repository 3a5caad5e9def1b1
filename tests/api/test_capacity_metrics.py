"""GPU-seconds in the metrics equal those of the history that the API serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scheduler.telemetry.tick_metrics import TickRecorder
from tests.metric_samples import list_changed_samples, read_samples

if TYPE_CHECKING:
    from tests.api.conftest import ApiService

COUNTER, BIN_S = "ebbtide_capacity_gpu_seconds_total", 60.0


def test_counted_gpu_seconds_equal_the_history(fleet: ApiService) -> None:
    """Ten whole bins, in which jobs start on own and on lent nodes. Submissions make the first and last tick commit."""
    fleet.lend_all()
    fleet.submit()
    assert fleet.tick(after_s=BIN_S - fleet.clock.now_s() % BIN_S).committed
    begun_s, before, recorder = fleet.clock.now_s(), read_samples(), TickRecorder()
    for number in range(20):
        if number in (3, 8, 19):
            fleet.submit()
        report = fleet.tick(after_s=BIN_S / 2.0)
        recorder.record(report)
    assert report.committed
    history = fleet.get("/v1/history", from_s=begun_s, to_s=fleet.clock.now_s(), step_s=BIN_S)
    served = {
        f'{COUNTER}{{pool="{pool["name"]}",use="{use}"}}': sum(gpus) * BIN_S
        for pool in history["pools"]
        for use, gpus in pool["uses"].items()
    }
    counted = {key: value for key, value in list_changed_samples(before).items() if key.startswith(COUNTER)}
    assert counted == pytest.approx({key: value for key, value in served.items() if value})
    assert sum(counted.values()) == pytest.approx(10 * BIN_S * sum(n.gpus for n in report.after.nodes.values()))
