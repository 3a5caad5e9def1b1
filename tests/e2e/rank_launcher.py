"""Launches generations of real ranks: the ranks' side of a re-plan, without a controller and an agent."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, ScheduleName, Stage, plan_to_json
from tests.loopback import find_free_port

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 120.0

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Training:
    """Files that all generations of one training share. Its ledger, and by default its checkpoints, are under `root`.

    Attributes:
        checkpoint_step: step of the last checkpoint that the training has reported.
    """

    root: Path
    model: str
    steps: int
    options: tuple[str, ...] = ()
    checkpoint_dir: Path | None = None
    checkpoint_step: int = 0

    def argv(self) -> list[str]:
        named = ["--model", self.model, "--ledger", str(self.root / "ledger"), "--ledger-digests"]
        return [sys.executable, "-m", "scheduler.trainer.train", *named, *self.options]

    @property
    def checkpoints(self) -> Path:
        return self.checkpoint_dir or self.root / "checkpoints"

    def lines(self, pattern: str) -> list[dict[str, Any]]:
        """Return the ledger's lines in the order of generations."""
        files = sorted((self.root / "ledger").glob(pattern), key=_generation)
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def first_steps(self) -> dict[int, int]:
        """Return the first step of each generation."""
        files = (self.root / "ledger").glob("losses-*")
        return {_generation(file): json.loads(file.read_text().partition("\n")[0])["step"] for file in files}

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines("losses-*")}

    def digests(self, event: str) -> dict[tuple[int, int], str]:
        """Return the digests of all "saved" or "loaded" states by generation and step."""
        digests = {}
        for file in (self.root / "ledger").glob("states-g*"):
            for line in map(json.loads, file.read_text().splitlines()):
                if line["event"] == event:
                    digests[_generation(file), line["step"]] = line["digest"]
        return digests


class RankLauncher:
    """A process with torch loaded that forks ranks. `port` is that of the newest generation's store."""

    def __init__(self, forker: subprocess.Popen[bytes]) -> None:
        self.port = 0
        self._forker = forker
        self._generation = 0
        self._living = set[tuple[int, int]]()

    @property
    def generation(self) -> int:
        return self._generation

    def new_generation(self) -> int:
        self._generation += 1
        self.port = find_free_port()
        return self._generation

    def run(self, training: Training, plan: ParallelPlan, *, until: int = 0) -> list[Status]:
        """Run one generation to step `until` (0: the last step) and return the last statuses of its ranks."""
        run_dir = self._begin(training, plan, until)
        self.wait(self._generation)
        statuses = [json.loads((run_dir / f"status-{rank}.json").read_text()) for rank in range(plan.world_size)]
        assert {status["phase"] for status in statuses} <= {"left", "succeeded"}, _logs(run_dir)
        return statuses

    def kill_one(
        self, training: Training, plan: ParallelPlan, rank: int, *, when: Callable[[], bool], until: int = 0
    ) -> set[int]:
        """Run one generation and kill a rank with SIGKILL when `when()` becomes true.

        Returns:
            The ranks that were still alive after `TIMEOUT_S`. They are killed.
        """
        run_dir = self._begin(training, plan, until)
        deadline_s = time.monotonic() + TIMEOUT_S
        while not when():
            assert time.monotonic() < deadline_s, _logs(run_dir)
            time.sleep(0.001)
        self.signal(self._generation, rank, signal.SIGKILL)
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s and self.living(self._generation):
            self._read_report(within_s=1.0)
        survivors = self.living(self._generation)
        for survivor in survivors:
            self.signal(self._generation, survivor, signal.SIGKILL)
        self.wait(self._generation)
        return survivors

    def fail(self, training: Training, plan: ParallelPlan, *, ranks: int = 0) -> str:
        """Run one generation that must fail, and return the reason of rank 0.

        Args:
            ranks: number of ranks, if it differs from the plan's.
        """
        run_dir = self._begin(training, plan, until=0, ranks=ranks)
        self.wait(self._generation)
        status = json.loads((run_dir / "status-0.json").read_text())
        assert status["phase"] == "failed"
        return str(status["reason"])

    def start(self, generation: int, rank: int, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Fork a rank with these environment variables and those that describe the machine."""
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        identity = {"generation": generation, "rank": rank}
        self._living.add((generation, rank))
        self._send({"start": {**identity, "argv": argv, "env": {**inherited, **env}, "log": str(log)}})

    def signal(self, generation: int, rank: int, number: int) -> None:
        """Signal a rank. Ignored if it has ended."""
        self._send({"signal": {"generation": generation, "rank": rank, "number": int(number)}})

    def living(self, generation: int) -> set[int]:
        """Return the ranks of a generation that have not ended."""
        while self._read_report(within_s=0.0):
            pass
        return {rank for of, rank in self._living if of == generation}

    def wait(self, generation: int) -> None:
        """Wait until all ranks of a generation have ended."""
        while self.living(generation):
            self._read_report()

    def _begin(self, training: Training, plan: ParallelPlan, until: int, ranks: int = 0) -> Path:
        run_dir = training.root / f"run-{self.new_generation()}"
        run_dir.mkdir(parents=True)
        (run_dir / "plan.json").write_text(json.dumps(plan_to_json(plan)))
        if until:
            (run_dir / "notice.json").write_text(json.dumps({"action": "leave", "step": until, "seconds_left": 60.0}))
        world_size = ranks or plan.world_size
        for rank in range(world_size):
            self._start_training(training, run_dir, rank, world_size)
        return run_dir

    def _start_training(self, training: Training, run_dir: Path, rank: int, world_size: int) -> None:
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "EBBTIDE_JOB_ID": training.root.name,
            "EBBTIDE_GENERATION": str(self._generation),
            "EBBTIDE_PLAN": str(run_dir / "plan.json"),
            "EBBTIDE_CHECKPOINT_DIR": str(training.checkpoints),
            "EBBTIDE_CHECKPOINT_STEP": str(training.checkpoint_step),
            "EBBTIDE_RUN_DIR": str(run_dir),
            "EBBTIDE_STEPS": str(training.steps),
        }
        self.start(self._generation, rank, training.argv(), env, run_dir / f"rank-{rank}.log")

    def _send(self, order: dict[str, Any]) -> None:
        assert self._forker.stdin is not None
        self._forker.stdin.write(json.dumps(order).encode() + b"\n")
        self._forker.stdin.flush()

    def _read_report(self, *, within_s: float | None = None) -> bool:
        """Process one report. Return whether one arrived in time."""
        assert self._forker.stdout is not None
        if within_s is not None and not select.select([self._forker.stdout], [], [], within_s)[0]:
            return False
        report: dict[str, Any] = json.loads(self._forker.stdout.readline())
        self._living.discard((report["generation"], report["rank"]))
        return True


@contextmanager
def launch_ranks(folder: Path) -> Iterator[RankLauncher]:
    """Start the process that forks ranks. Its log is in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("ab") as log:
        # Unbuffered, because `select` asks the pipe whether there is a report.
        forker = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.rank_forker"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
        )
    assert forker.stdin is not None
    assert forker.stdout is not None
    try:
        assert forker.stdout.readline(), (folder / "log").read_text()
        yield RankLauncher(forker)
    finally:
        forker.stdin.close()
        forker.wait(timeout=30)
        forker.stdout.close()


def make_plan(
    *stages: tuple[LayerStrategy, ...], batch: int, micro_batches: int = 1, interleave: int = 1
) -> ParallelPlan:
    """Return a plan with these stages: interleaved 1F1B if `interleave` is above 1, otherwise 1F1B."""
    built, first = list[Stage](), 0
    for strategies in stages:
        layers = sum(strategy.layers for strategy in strategies)
        built.append(Stage(first, first + layers - 1, "cpu", strategies[0].gpus, strategies))
        first += layers
    name = ScheduleName.INTERLEAVED if interleave > 1 else ScheduleName.ONE_F_ONE_B
    schedule = Schedule(name, interleave)
    return ParallelPlan(schedule, micro_batches, batch // micro_batches, 1.0, 1.0, 1, tuple(built))


def _generation(ledger_file: Path) -> int:
    return int(ledger_file.stem.partition("-g")[2].partition("-")[0])


def _logs(run_dir: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(run_dir.glob("rank-*.log")))
