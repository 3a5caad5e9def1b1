"""The file of measurements: one JSON line per finished task and round, so that an interrupted run can go on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from scheduler.profiling.tasks import Measurement, Task, measurement_from_json, measurement_to_json


class MeasurementLogError(ValueError):
    """A file of measurements that does not belong to this run. The message says what to do."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device and software that measurements belong to.

    Attributes:
        kind: `cpu`, `cuda`, `rocm` or `npu`.
        precision: of matrix products: `bf16`, `fp16` or `fp32`.
        context_bytes: device memory that a process takes before it has any tensor, communication included.
        ranks: processes that measured together, one per device.
    """

    kind: str
    name: str
    memory_bytes: int
    precision: str
    software: str
    ranks: int
    context_bytes: int = 0

    def differs_from(self, other: DeviceFacts) -> str:
        """Return the name of the first fact that differs, or an empty string. Contexts vary and are not compared."""
        own, others = asdict(self), asdict(other)
        return next((name for name in own if name != "context_bytes" and own[name] != others[name]), "")


class MeasurementLog:
    """Measurements of one device in a file. Every line is complete or, if it is the last one, ignored."""

    def __init__(self, path: Path) -> None:
        """Read the file if there is one.

        Raises:
            MeasurementLogError: it holds something else.
        """
        self.path = path
        self.device: DeviceFacts | None = None
        self.measurements: list[Measurement] = []
        self._cut_off_at: int | None = None
        if path.exists():
            self._read(path.read_text(encoding="utf-8"))

    def _read(self, text: str) -> None:
        complete = text[: text.rfind("\n") + 1]
        if complete != text:
            self._cut_off_at = len(complete.encode())
        try:
            for line in map(json.loads, complete.splitlines()):
                if "device" in line:
                    self.device = DeviceFacts(**line["device"])
                else:
                    self.measurements.append(measurement_from_json(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MeasurementLogError(
                f"{self.path} is no file of measurements ({error}). Remove it, or name another one."
            ) from None

    def begin(self, device: DeviceFacts) -> None:
        """Write the device, or check that it is the one that the file belongs to.

        Raises:
            MeasurementLogError: the file belongs to another device.
        """
        if self.device is None:
            self.device = device
            self._append({"device": asdict(device)})
        elif differing := device.differs_from(self.device):
            was, now = getattr(self.device, differing), getattr(device, differing)
            raise MeasurementLogError(
                f"{self.path} holds measurements with {differing} {was!r}, but this device has {now!r}. "
                "Remove the file to measure again, or name another one."
            )

    def add(self, measurement: Measurement) -> None:
        """Append a measurement, on disk before this returns."""
        self.measurements.append(measurement)
        self._append(measurement_to_json(measurement))

    def list_pending(self, tasks: Iterable[tuple[Task, int]]) -> list[tuple[Task, int]]:
        """Return the tasks and rounds that are not in the file."""
        done = {(each.task, each.round) for each in self.measurements}
        return [each for each in tasks if each not in done]

    def _append(self, line: Mapping[str, object]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            if self._cut_off_at is not None:
                file.truncate(self._cut_off_at)
                self._cut_off_at = None
            file.write(json.dumps(line) + "\n")


def merge_rounds(measurements: Sequence[Measurement]) -> dict[Task, Mapping[str, float]]:
    """Return the median of each figure over the rounds of a task, with the spread between rounds as `between`.

    Tasks that failed in every round are left out.
    """
    rounds: dict[Task, list[Mapping[str, float]]] = {}
    for each in measurements:
        if not each.failure:
            rounds.setdefault(each.task, []).append(each.figures)
    merged: dict[Task, Mapping[str, float]] = {}
    for task, figures in rounds.items():
        values = {name: [each[name] for each in figures if name in each] for name in figures[0]}
        middle = {name: median(found) for name, found in values.items()}
        spreads = [max(found) / min(found) - 1 for name, found in values.items() if name.endswith("_s") and min(found)]
        merged[task] = {**middle, "between": max(spreads, default=0.0)}
    return merged
