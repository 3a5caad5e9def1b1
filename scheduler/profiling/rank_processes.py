"""The ranks of a measurement as processes of this machine. They are started by name, so this module needs no torch."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scheduler.profiling.measurement_log import DeviceFacts, MeasurementLog
from scheduler.profiling.tasks import Measurement, Task, measurement_from_json, task_to_json

_MODULE = "scheduler.profiling.ranks.measure"
_EXIT_TIMEOUT_S = 30.0
_REASON_LINES = 3
_POLL_S = 0.5
_CHUNK_BYTES = 1 << 16


class RanksFailedError(RuntimeError):
    """The ranks ended before they had measured everything. The message is the end of their output."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How many ranks to start, and on which kind of device: `cpu`, `cuda`, `rocm` or `npu`."""

    ranks: int
    device: str


class RankProcesses:
    """A group of ranks. Leaving the context ends all of them."""

    def __init__(self, options: RankOptions) -> None:
        self._options = options
        self._received = b""

    def __enter__(self) -> RankProcesses:
        self._folder = TemporaryDirectory(prefix="ebbtide-profile-")
        root = Path(self._folder.name)
        self._errors = [(root / f"rank-{rank}.err").open("w+", encoding="utf-8") for rank in range(self._options.ranks)]
        argv = [sys.executable, "-P", "-m", _MODULE, "--store", str(root / "store"), "--device", self._options.device]
        self._processes = [
            subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=self._errors[rank],
                env=self._build_environment(rank),
            )
            for rank in range(self._options.ranks)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait(_EXIT_TIMEOUT_S)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        for file in self._errors:
            file.close()
        self._folder.cleanup()

    def _build_environment(self, rank: int) -> dict[str, str]:
        ranks = self._options.ranks
        threads = 1 if self._options.device == "cpu" else max(1, len(os.sched_getaffinity(0)) // ranks)
        named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "OMP_NUM_THREADS": threads}
        return os.environ | {name: str(value) for name, value in named.items()}

    def read_device(self) -> DeviceFacts:
        """Return the facts of the first rank's device, once all ranks have met.

        Raises:
            RanksFailedError: they did not.
        """
        return DeviceFacts(**self._read()["device"])

    def measure(self, pending: Sequence[tuple[Task, int]]) -> Iterator[Measurement]:
        """Have the ranks measure these tasks and rounds, and yield the measurements in this order.

        Raises:
            RanksFailedError: a rank failed. Earlier measurements are valid.
        """
        channel = self._processes[0].stdin
        assert channel is not None, "rank 0 reads its tasks"
        tasks = json.dumps([[task_to_json(task), number] for task, number in pending])
        channel.write(tasks.encode() + b"\n")
        channel.flush()
        for _ in pending:
            yield measurement_from_json(self._read())
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # leaving the context ends it
                process.wait(_EXIT_TIMEOUT_S)

    def _read(self) -> dict[str, Any]:
        """Return the next line of rank 0. If any rank fails, the others would wait for it, so that ends all."""
        stream = self._processes[0].stdout
        assert stream is not None, "rank 0 writes measurements"
        while b"\n" not in self._received:
            if select.select([stream], [], [], _POLL_S)[0]:
                chunk = os.read(stream.fileno(), _CHUNK_BYTES)
                if not chunk:
                    raise RanksFailedError(self._describe_failure())
                self._received += chunk
            elif any(process.poll() for process in self._processes):
                raise RanksFailedError(self._describe_failure())
        line, _, self._received = self._received.partition(b"\n")
        document: dict[str, Any] = json.loads(line)
        return document

    def _describe_failure(self) -> str:
        for file in self._errors:
            file.seek(0)
            lines = [line.strip() for line in file.read().splitlines() if line.strip()]
            if reasons := [line for line in lines if "Error" in line]:
                return reasons[-1]
            if lines:
                return " ".join(lines[-_REASON_LINES:])
        return "the ranks ended without a message"


def measure_all(
    options: RankOptions, log: MeasurementLog, tasks: Sequence[tuple[Task, int]]
) -> Iterator[tuple[Measurement, int]]:
    """Measure what is not in `log` yet, and yield each measurement with the number of tasks that are left.

    A task that makes the ranks fail is recorded with the reason, and new ranks go on with the next one.

    Raises:
        MeasurementLogError: the log belongs to another device.
        RanksFailedError: the ranks do not meet.
    """
    while pending := log.list_pending(tasks):
        with RankProcesses(options) as ranks:
            log.begin(ranks.read_device())
            left = len(pending)
            try:
                for measurement in ranks.measure(pending):
                    log.add(measurement)
                    left -= 1
                    yield measurement, left
            except RanksFailedError as error:
                task, number = log.list_pending(tasks)[0]
                failed = Measurement(task, number, failure=str(error))
                log.add(failed)
                yield failed, left - 1
