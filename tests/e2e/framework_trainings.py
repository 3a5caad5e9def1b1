"""Trainings of example scripts over several generations, with the frameworks of `make frameworks`."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.loopback import find_free_port

REPOSITORY = Path(__file__).parents[2]
FRAMEWORKS = REPOSITORY / ".venv-frameworks"
"""The environment that `make frameworks` creates."""
PYTHON = FRAMEWORKS / "bin" / "python"
TIMEOUT_S = 240.0
_LOSS = re.compile(r"step (\d+) loss ([\d.]+)")


def has_frameworks() -> bool:
    """Return whether `make frameworks` has run."""
    return (FRAMEWORKS / "installed").exists()  # written last


class FrameworkRanks:
    """A process with the frameworks loaded, which forks the ranks of tests: loading them takes 15 s of CPU time."""

    def __init__(self, forker: subprocess.Popen[bytes]) -> None:
        self._forker = forker
        self._generation = 0

    def run(self, world_size: int, argv: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str]) -> list[int]:
        """Run one generation and return the exit codes of its ranks. Rank R logs to `log` with `-R` in its name."""
        self._generation += 1
        port = find_free_port()
        for rank in range(world_size):
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            group = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "job", "OMP_NUM_THREADS": 1}
            variables = {name: str(value) for name, value in {**rendezvous, **place, **group, **env}.items()}
            order = {"generation": self._generation, "rank": rank, "argv": [str(PYTHON), *argv], "env": variables}
            self._send({"start": {**order, "cwd": str(cwd), "log": str(log.with_name(f"{log.name}-{rank}"))}})
        return self._wait(world_size)

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._forker.stdin is not None
        self._forker.stdin.write(json.dumps(order).encode() + b"\n")
        self._forker.stdin.flush()

    def _wait(self, world_size: int) -> list[int]:
        assert self._forker.stdout is not None
        codes = dict[int, int]()
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(codes) < world_size:
            assert time.monotonic() < deadline_s, codes
            line = json.loads(self._forker.stdout.readline())
            if line.get("generation") == self._generation:
                codes[line["rank"]] = line["code"]
        return [codes[rank] for rank in range(world_size)]


@contextmanager
def launch_frameworks(*modules: str) -> Iterator[FrameworkRanks]:
    """Yield ranks with these modules loaded."""
    forker = subprocess.Popen(
        [str(PYTHON), "-m", "tests.e2e.rank_forker", "torch", "torch._dynamo", *modules],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with forker:  # it closes the pipes and waits
        yield FrameworkRanks(forker)


class ElasticTraining:
    """One training of an example script, whose generations have different numbers of ranks.

    Attributes:
        statuses: the last statuses of the ranks of each generation.
    """

    def __init__(self, ranks: FrameworkRanks, root: Path, script: Path, options: Sequence[str]) -> None:
        self.root = root
        self.statuses: list[list[dict[str, Any]]] = []
        self._ranks = ranks
        self._argv = [str(script), *options]

    def run(self, world_size: int, *, until: int = 0) -> None:
        """Run one generation, which leaves after step `until`; 0: it trains to the end."""
        number = len(self.statuses) + 1
        run_dir = self.root / f"run-{number}"
        run_dir.mkdir(parents=True)
        if until:
            notice = {"action": "leave", "step": until, "seconds_left": 60.0}
            (run_dir / "notice.json").write_text(json.dumps(notice))
        env = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.root),
            "EBBTIDE_JOB_ID": "job",
            "EBBTIDE_GENERATION": str(number),
            "EBBTIDE_RUN_DIR": str(run_dir),
            "EBBTIDE_CHECKPOINT_DIR": str(self.root / "checkpoints"),
        }
        codes = self._ranks.run(world_size, self._argv, cwd=run_dir, log=run_dir / "log", env=env)
        self.statuses.append([self._read_status(run_dir, rank) for rank in range(world_size)])
        assert codes == [0] * world_size, self.logs()

    @property
    def step(self) -> int:
        """The last step of the last generation."""
        return int(self.statuses[-1][0]["step"]) if self.statuses else 0

    def losses(self) -> dict[int, float]:
        """Return the mean loss of each step over all ranks and their micro-batches."""
        return mean_losses(path.read_text() for path in self.root.glob("run-*/log-*"))

    def logs(self) -> str:
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(self.root.glob("run-*/log-*")))

    def _read_status(self, run_dir: Path, rank: int) -> dict[str, Any]:
        path = run_dir / f"status-{rank}.json"
        document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"phase": "", "step": 0}
        return document


def mean_losses(logs: Iterable[str]) -> dict[int, float]:
    """Return the mean loss of each step in lines such as `step 3 loss 1.25`."""
    seen: dict[int, list[float]] = {}
    for log in logs:
        for step, loss in _LOSS.findall(log):
            seen.setdefault(int(step), []).append(float(loss))
    return {step: sum(values) / len(values) for step, values in seen.items()}


def read_history(folder: Path) -> dict[int, float]:
    """Return the loss of each step that the last checkpoint of a Trainer has recorded."""
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def count_added_lines(script: Path) -> int:
    """Return how many lines of an example are marked as Ebbtide's."""
    return sum(line.rstrip().endswith("# Ebbtide") for line in script.read_text().splitlines())
