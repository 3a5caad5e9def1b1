"""A training under a whole service freezes layers: it says so over HTTP, is planned anew for what is left to train, and
learns on as if it had never been touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service_play import service_play
from tests.e2e.training_play import losses

pytestmark = pytest.mark.e2e

MODEL = ("--model", "wide-gpt", "--global-batch", "4")
FREEZE = ("--freeze", "4:3")
"""On two nodes of one slot the solver plans a pipeline for all four blocks, data parallelism for the last of them."""
STEPS_AFTER = 3


def test_a_training_that_freezes_layers_is_planned_anew_and_learns_as_if_it_never_was(tmp_path: Path) -> None:
    with service_play(tmp_path) as play:
        play.open(nodes=2, gpus=1)
        job = str(play.client.submit(_document(tmp_path / "ledger"))["id"])
        play.wait(lambda: play.client.job(job)["state"] == "running")
        before = play.client.job_plan(job)
        first = int(play.client.job(job)["generation"])
        play.wait(lambda: bool(play.events(job, "JobRearranged")))
        after = play.client.job_plan(job)
        second = int(play.client.job(job)["generation"])
        play.wait(lambda: _steps(tmp_path / "ledger", second) >= STEPS_AFTER)

        assert (len(before["stages"]) > 1, len(after["stages"])) == (True, 1)
        assert [strategy["dp"] for strategy in after["stages"][0]["strategies"]] == [2]
        assert play.client.progress(job)["frozen_layers"] == 3
        told = [report for report in play.reports(job) if report["frozen_layers"] == 3]
        assert first in {report["generation"] for report in told}, "it came over HTTP too, not by its file alone"
        (froze,) = play.events(job, "JobFroze")
        assert froze["message"] == "3 layers are frozen, 0 before"
        (rearranged,) = play.events(job, "JobRearranged")
        assert "3 layers are frozen: " in rearranged["message"]
        assert rearranged["numbers"]["saved_s"] > 0.0
        status = json.loads((play.run_dir(job, second) / "status-0.json").read_text())
        assert status["frozen_layers"] is None, "EBBTIDE_FROZEN_LAYERS told it, so it had nothing new to say"

        play.client.cancel(job)
        play.wait(lambda: play.client.job(job)["state"] == "cancelled")
        assert play.client.job(job)["account"]["failures"] == 0
        play.end()
    seen = losses(tmp_path / "ledger")
    command = ["-m", "scheduler.trainer.train", *MODEL, *FREEZE, "--steps", str(max(seen))]
    alone = [sys.executable, *command, "--ledger", str(tmp_path / "alone")]
    subprocess.run(alone, check=True, capture_output=True)
    expected = losses(tmp_path / "alone")
    assert sorted(seen) == sorted(expected) == list(range(1, max(seen) + 1))
    assert max(abs(seen[step] - expected[step]) for step in seen) <= 1e-5


def _document(ledger: Path) -> dict[str, object]:
    """Longer than the test: it is cancelled once it was seen to go on."""
    trainer = ["python", "-m", "scheduler.trainer.train", *MODEL, *FREEZE, "--ledger", str(ledger)]
    return {
        "name": "train",
        "gpus": {"min": 2, "max": 2},
        "model": "wide-gpt",
        "globalBatch": 4,
        "steps": 100_000,
        "command": [*trainer, "--step-delay-s", "0.3"],
    }


def _steps(ledger: Path, generation: int) -> int:
    path = ledger / f"losses-g{generation}.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
