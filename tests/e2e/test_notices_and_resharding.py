"""One training over five generations with different layouts, compared with an uninterrupted run.

1 rank, then 2 ranks DDP -> 3 ranks FSDP -> 4 ranks hybrid FSDP -> 2 ranks with mixed layers -> 1 rank. Each change
is requested through another channel. The ledgers of all generations together must equal those of one training.
"""

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Recompute, Schedule, Stage, plan_to_json
from tests.e2e.rank_launcher import RankLauncher
from tests.http_server import LoopbackServer, QuietHandler
from tests.loopback import find_free_port

pytestmark = pytest.mark.e2e

STEPS = 40
BATCH = 12


class Generation:
    """The ranks of one generation. On exit the remaining ones are killed."""

    def __init__(self, ranks: RankLauncher, root: Path, number: int, plan: ParallelPlan, **options: Any) -> None:
        self.run_dir = root / f"run-{number}"
        self.run_dir.mkdir(parents=True)
        (self.run_dir / "plan.json").write_text(json.dumps(plan_to_json(plan)))
        self._ranks = ranks
        self._root = root
        self._number = number
        self._world_size = plan.world_size
        self._url: str = options.get("url", "")
        self._step_delay_s: float = options.get("step_delay_s", 0.0)
        self._frozen_layers: int = options.get("frozen_layers", 0)
        self._port = find_free_port()
        self._words: tuple[str, ...] = options.get("words", ())

    def __enter__(self) -> "Generation":
        for rank in range(self._world_size):
            log = self.run_dir / "log"
            self._ranks.start(self._number, rank, self._argv(), self._environment(rank), log)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks.living(self._number):
            self.send_signal(rank, signal.SIGKILL)
        self._ranks.wait(self._number)

    def send_signal(self, rank: int, number: int) -> None:
        self._ranks.signal(self._number, rank, number)

    def status(self, rank: int = 0) -> dict[str, Any]:
        path = self.run_dir / f"status-{rank}.json"
        document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"phase": "", "step": 0}
        return document

    def give_notice(self, document: dict[str, Any]) -> None:
        part = self.run_dir / "notice.part"
        part.write_text(json.dumps(document))
        part.replace(self.run_dir / "notice.json")

    def wait_for_step(self, step: int) -> None:
        eventually(lambda: self.status()["step"] >= step or 0 not in self._ranks.living(self._number))

    def wait_for_end(self) -> list[dict[str, Any]]:
        """Return the last status of every rank after all have exited."""
        self._ranks.wait(self._number)
        return [self.status(rank) for rank in range(self._world_size)]

    def _argv(self) -> list[str]:
        options = {"--model": "nano-gpt", "--global-batch": BATCH, "--seed": 3, "--ledger": self._root / "ledger"}
        options |= {"--step-delay-s": self._step_delay_s, "--learning-rate": 0.003, "--checkpoint-every": 15}
        words = ["--ledger-digests", *(str(word) for option in options.items() for word in option), *self._words]
        return [sys.executable, "-m", "scheduler.trainer.train", *words]

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "EBBTIDE_JOB_ID": f"{self._root.parent.name}-{self._root.name}",
            "EBBTIDE_GENERATION": str(self._number),
            "EBBTIDE_URL": self._url,
            "EBBTIDE_TOKEN": "token",
            "EBBTIDE_PLAN": str(self.run_dir / "plan.json"),
            "EBBTIDE_CHECKPOINT_DIR": str(self._root / "checkpoints"),
            "EBBTIDE_RUN_DIR": str(self.run_dir),
            "EBBTIDE_STEPS": str(STEPS),
            "EBBTIDE_FROZEN_LAYERS": str(self._frozen_layers),
        }


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("condition not met within 60 s")


def plan(*strategies: LayerStrategy, micro_batches: int = 1) -> ParallelPlan:
    layers = sum(strategy.layers for strategy in strategies)
    return ParallelPlan(
        schedule=Schedule(),
        micro_batches=micro_batches,
        micro_batch_size=BATCH // micro_batches,
        iteration_time_s=1.0,
        samples_per_s=1.0,
        peak_bytes_per_gpu=1,
        stages=(Stage(0, layers - 1, "cpu", strategies[0].gpus, strategies),),
    )


@contextmanager
def serve_notice(notice: dict[str, Any]) -> Iterator[str]:
    """Serve progress reports with this notice in the reply."""

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer = json.dumps({"notice": notice}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    with LoopbackServer(Handler) as server:
        yield server.url


@dataclass(frozen=True, slots=True)
class Trainings:
    """The results of both trainings. `ends` are the last statuses of each generation."""

    plain: Path
    elastic: Path
    ends: list[list[dict[str, Any]]]


def lines(root: Path, pattern: str) -> list[dict[str, Any]]:
    files = sorted((root / "ledger").glob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _elastic(ranks: RankLauncher, root: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the last statuses of each generation in turn."""
    with Generation(ranks, root, 1, plan(LayerStrategy(2, dp=2), micro_batches=2)) as two:
        two.give_notice({"action": "leave", "step": 8, "seconds_left": 60.0})
        yield two.wait_for_end()
    sharded = plan(LayerStrategy(2, dp=3, zero=3, shard_group=3, recompute=Recompute.FULL))
    with Generation(ranks, root, 2, sharded, step_delay_s=0.05) as three:
        three.give_notice({"action": "checkpoint", "step": 10, "seconds_left": None})
        three.wait_for_step(12)
        three.send_signal(2, signal.SIGTERM)
        yield three.wait_for_end()
    hybrid = plan(LayerStrategy(2, dp=4, zero=3, shard_group=2))
    with (
        serve_notice({"action": "replan", "step": None, "seconds_left": 9}) as url,
        Generation(ranks, root, 3, hybrid, url=url, step_delay_s=0.1) as four,
    ):
        yield four.wait_for_end()
    mixed = plan(LayerStrategy(1, dp=2, zero=3, shard_group=2), LayerStrategy(1, dp=2), micro_batches=3)
    with Generation(ranks, root, 4, mixed) as two:
        two.give_notice({"action": "leave", "step": 36, "seconds_left": 60.0})
        yield two.wait_for_end()
    with Generation(ranks, root, 5, plan(LayerStrategy(2, dp=1), micro_batches=4)) as one:
        yield one.wait_for_end()


def test_training_over_five_layouts_equals_the_uninterrupted_one(ranks: RankLauncher, tmp_path: Path) -> None:
    # The uninterrupted run and the first generation run in parallel.
    with Generation(ranks, tmp_path / "plain", 0, plan(LayerStrategy(2, dp=1))) as plain:
        ends = list(_elastic(ranks, tmp_path / "elastic"))
        ends.insert(0, plain.wait_for_end())
    trainings = Trainings(tmp_path / "plain", tmp_path / "elastic", ends)
    _check_phases(trainings)
    _check_losses(trainings)
    _check_samples(trainings)
    _check_loaded_states(trainings)
    _check_checkpoint_request(trainings)


def _check_phases(trainings: Trainings) -> None:
    phases = [{status["phase"] for status in generation} for generation in trainings.ends]
    assert phases == [{"succeeded"}, {"left"}, {"left"}, {"left"}, {"left"}, {"succeeded"}], trainings.ends
    assert all(len({status["step"] for status in generation}) == 1 for generation in trainings.ends)
    assert all(status["checkpoint_step"] == status["step"] for generation in trainings.ends for status in generation)
    assert (trainings.ends[1][0]["step"], trainings.ends[5][0]["step"]) == (8, STEPS)


def _check_losses(trainings: Trainings) -> None:
    plain = {line["step"]: line["loss"] for line in lines(trainings.plain, "losses-*")}
    elastic = {line["step"]: line["loss"] for line in lines(trainings.elastic, "losses-*")}
    assert sorted(plain) == sorted(elastic) == list(range(1, STEPS + 1))
    assert max(abs(plain[step] - elastic[step]) for step in plain) < 1e-5
    assert plain[STEPS] < 0.7 * plain[1]


def _check_samples(trainings: Trainings) -> None:
    for root in (trainings.plain, trainings.elastic):
        seen = Counter(sample for line in lines(root, "samples-*") for sample in line["samples"])
        assert seen == Counter(range(STEPS * BATCH))


def _check_loaded_states(trainings: Trainings) -> None:
    states = lines(trainings.elastic, "states-*")
    saved = {line["step"]: line["digest"] for line in states if line["event"] == "saved"}
    loaded = [(line["step"], line["digest"]) for line in states if line["event"] == "loaded"]
    assert len(loaded) == 4
    assert all(saved[step] == digest for step, digest in loaded)


def _check_checkpoint_request(trainings: Trainings) -> None:
    saved = [line["step"] for line in lines(trainings.elastic, "states-g2*") if line["event"] == "saved"]
    assert saved[0] == 10
    assert saved[-1] == trainings.ends[2][0]["step"] > 10


def test_ranks_do_not_hang_when_one_is_killed(ranks: RankLauncher, tmp_path: Path) -> None:
    with Generation(ranks, tmp_path, 1, plan(LayerStrategy(2, dp=2)), step_delay_s=0.05) as two:
        two.wait_for_step(3)
        two.send_signal(1, signal.SIGKILL)
        first, _ = two.wait_for_end()
    assert first["phase"] == "failed"
    assert first["reason"] != ""
