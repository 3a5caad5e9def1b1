"""Trainings of scripts on one GPU, over several generations of one rank. No service is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.loopback import find_free_port

REPOSITORY = Path(__file__).parents[2]
SEEDED = Path(__file__).with_name("seeded_script.py")
TIMEOUT_S = 150.0
_LOG_CHARACTERS = 6000


@dataclass
class GpuTraining:
    """One training of a script.

    Attributes:
        argv: words after the interpreter.
        variables: further environment variables of the rank.
        statuses: the last status of each generation that a notice ended, or that trained to the end.
    """

    root: Path
    argv: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    statuses: list[dict[str, Any]] = field(default_factory=list)
    _count: int = 0

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def run(self, *, until: int = 0) -> None:
        """Run one generation, which leaves after step `until`; 0: it trains to the end."""
        with self._start(until=until) as rank:
            code = rank.wait(TIMEOUT_S)
        assert code == 0, self.logs()
        path = self.run_dir / "status-0.json"
        self.statuses.append(json.loads(path.read_text()) if path.exists() else {"phase": "", "step": 0})

    def interrupt(self, number: signal.Signals, *, lines: int, mark: str) -> None:
        """Run one generation, and signal it once `mark` is `lines` times in its log. It must end without an error."""
        with self._start() as rank:
            deadline_s = time.monotonic() + TIMEOUT_S
            while self._log.read_text().count(mark) < lines:
                assert rank.poll() is None, self.logs()
                assert time.monotonic() < deadline_s, self.logs()
                time.sleep(0.02)
            rank.send_signal(number)
            code = rank.wait(TIMEOUT_S)
        assert code == 0, self.logs()

    @property
    def run_dir(self) -> Path:
        """Folder of the last generation."""
        return self.root / f"run-{self._count}"

    def read_lines(self) -> list[str]:
        """Return what all generations have printed, in their order."""
        texts = [self._log_of(number).read_text() for number in range(1, self._count + 1)]
        return [line for text in texts for line in text.splitlines()]

    def logs(self) -> str:
        """Return the ends of all logs, for messages of failed assertions."""
        numbers = range(1, self._count + 1)
        return "\n".join(f"== run {n}\n{self._log_of(n).read_text()[-_LOG_CHARACTERS:]}" for n in numbers)

    @contextmanager
    def _start(self, *, until: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        self._count += 1
        self.run_dir.mkdir(parents=True)
        if until:
            notice = {"action": "leave", "step": until, "seconds_left": 60.0}
            (self.run_dir / "notice.json").write_text(json.dumps(notice))
        command = [sys.executable, *self.argv]
        with self._log.open("wb") as log:
            rank = subprocess.Popen(
                command, cwd=self.run_dir, env=self._environment(), stdout=log, stderr=subprocess.STDOUT
            )
        try:
            yield rank
        except subprocess.TimeoutExpired:
            raise AssertionError(f"The rank did not end within {TIMEOUT_S:g} s.\n{self.logs()}") from None
        finally:
            rank.kill()
            rank.wait()

    def _environment(self) -> dict[str, str]:
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "NODE_RANK": "0"}
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        group = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "job", "OMP_NUM_THREADS": "2"}
        ebbtide = {
            "EBBTIDE_JOB_ID": "job",
            "EBBTIDE_GENERATION": str(self._count),
            "EBBTIDE_RUN_DIR": str(self.run_dir),
            "EBBTIDE_CHECKPOINT_DIR": str(self.checkpoints),
        }
        # Compiled kernels are shared between generations, so that only the first one compiles.
        caches = {name: str(self.root / name) for name in ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        determinism = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        return {**os.environ, **rendezvous, **place, **group, **ebbtide, **caches, **determinism, **self.variables}

    @property
    def _log(self) -> Path:
        return self._log_of(self._count)

    def _log_of(self, number: int) -> Path:
        return self.root / f"run-{number}" / "log"


def assert_same_losses(seen: Mapping[int, float], reference: Mapping[int, float], *, tolerance: float) -> None:
    """Check that each step was trained once and has the loss of the reference."""
    assert sorted(seen) == sorted(reference), (sorted(seen), sorted(reference))
    differences = {step: abs(seen[step] - reference[step]) for step in seen}
    worst = max(differences, key=lambda step: differences[step])
    assert differences[worst] <= tolerance, (worst, seen[worst], reference[worst], differences)


def check_statuses(training: GpuTraining, *, steps: int, leaves: Sequence[int]) -> None:
    """Check that each generation left after its step with a checkpoint of it, and that the last one succeeded."""
    seen = [(status["phase"], status["step"]) for status in training.statuses]
    expected = [*(("left", step) for step in leaves), ("succeeded", steps)]
    assert seen == expected, training.logs()
    saved = [status["checkpoint_step"] for status in training.statuses[:-1]]
    assert saved == list(leaves), training.logs()
