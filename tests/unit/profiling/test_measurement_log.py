"""The file of measurements: what was measured is not measured again, and a cut-off line is ignored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.profiling.measurement_log import DeviceFacts, MeasurementLog, MeasurementLogError, merge_rounds
from scheduler.profiling.task_lists import TINY, list_collective_tasks, list_kernel_tasks, list_probe_tasks
from scheduler.profiling.tasks import GemmTask, Measurement, task_from_json, task_to_json

DEVICE = DeviceFacts("cpu", "Some CPU", 8_000_000_000, "fp32", "torch 0", 4)
TASKS = [
    *list_kernel_tasks(TINY, has_host_link=True), *list_collective_tasks(TINY, 4), *list_probe_tasks(TINY, 4)
]  # fmt: skip


def test_tasks_survive_their_json_form() -> None:
    assert [task_from_json(task_to_json(task)) for task in TASKS] == TASKS
    assert len(set(TASKS)) == len(TASKS)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "log.jsonl"
    wanted = [(task, number) for number in range(2) for task in TASKS]
    log = MeasurementLog(file)
    log.begin(DEVICE)
    for task, number in wanted[:5]:
        log.add(Measurement(task, number, {"time_s": 1.0}))
    with file.open("a") as lines:
        lines.write('{"task": {"kind": "ge')  # killed while it wrote
    again = MeasurementLog(file)
    again.begin(replace(DEVICE, context_bytes=5))
    assert again.list_pending(wanted) == wanted[5:]
    again.add(Measurement(*wanted[5], {"time_s": 2.0}))
    assert MeasurementLog(file).list_pending(wanted) == wanted[6:]
    assert MeasurementLog(file).device == DEVICE


@pytest.mark.parametrize(
    ("name", "value"), [("ranks", 2), ("name", "Other"), ("software", "torch 1"), ("precision", "bf16")]
)
def test_measurements_of_another_device_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    file = tmp_path / "log.jsonl"
    MeasurementLog(file).begin(DEVICE)
    with pytest.raises(MeasurementLogError, match=name):
        MeasurementLog(file).begin(replace(DEVICE, **{name: value}))


@pytest.mark.parametrize("text", ["no json\n", '{"task": {}}\n', '{"device": {"kind": "cpu"}}\n', "[]\n"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(text)
    with pytest.raises(MeasurementLogError, match=r"log\.jsonl"):
        MeasurementLog(file)


def test_rounds_are_merged_to_medians() -> None:
    task, other = GemmTask(1, 2, 3), GemmTask(4, 5, 6)
    times = [1.0, 5.0, 2.0]
    rounds = [Measurement(task, number, {"forward_s": time_s}) for number, time_s in enumerate(times)]
    merged = merge_rounds([*rounds, Measurement(other, 0, failure="out of memory")])
    assert merged == {task: {"forward_s": 2.0, "between": 4.0}}
