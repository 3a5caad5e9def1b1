"""A training under a whole service freezes layers, is replanned for the rest, and has the losses of an uninterrupted
run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service_harness import run_service
from tests.e2e.training_harness import losses

pytestmark = pytest.mark.e2e

MODEL = ("--model", "wide-gpt", "--global-batch", "4")
# On two nodes with one slot each, the solver plans a pipeline for four blocks and data parallelism for the last one.
FREEZE = ("--freeze", "4:3")
STEPS_AFTER = 3


@pytest.mark.full
def test_training_that_freezes_layers_is_replanned_and_keeps_its_losses(tmp_path: Path) -> None:
    with run_service(tmp_path) as service:
        service.open(nodes=2, gpus=1)
        job = str(service.client.submit(_document(service.shared / "ledger"))["id"])
        service.wait(lambda: service.client.job(job)["state"] == "running")
        before = service.client.job_plan(job)
        first = int(service.client.job(job)["generation"])
        service.wait(lambda: bool(service.events(job, "JobRearranged")))
        after = service.client.job_plan(job)
        second = int(service.client.job(job)["generation"])
        service.wait(lambda: _steps(service.shared / "ledger", second) >= STEPS_AFTER)

        assert (len(before["stages"]) > 1, len(after["stages"])) == (True, 1)
        assert [strategy["dp"] for strategy in after["stages"][0]["strategies"]] == [2]
        assert service.client.progress(job)["frozen_layers"] == 3
        reports = [report for report in service.reports(job) if report["frozen_layers"] == 3]
        assert first in {report["generation"] for report in reports}, "the status file is not the only channel"
        (frozen,) = service.events(job, "JobFroze")
        assert "3 layers" in frozen["message"]
        (rearranged,) = service.events(job, "JobRearranged")
        assert "3 layers" in rearranged["message"]
        assert rearranged["numbers"]["saved_s"] > 0.0
        status = service.status(job, second)
        assert status["frozen_layers"] is None, "EBBTIDE_FROZEN_LAYERS is not reported back"

        service.client.cancel(job)
        service.wait(lambda: service.client.job(job)["state"] == "cancelled")
        assert service.client.job(job)["account"]["failures"] == 0
        service.end()
    seen = losses(service.shared / "ledger")
    command = ["-m", "scheduler.trainer.train", *MODEL, *FREEZE, "--steps", str(max(seen))]
    alone = [sys.executable, *command, "--ledger", str(tmp_path / "alone")]
    subprocess.run(alone, check=True, capture_output=True)
    expected = losses(tmp_path / "alone")
    assert sorted(seen) == sorted(expected) == list(range(1, max(seen) + 1))
    assert max(abs(seen[step] - expected[step]) for step in seen) <= 1e-5


def _document(ledger: Path) -> dict[str, object]:
    """Return a job that runs until the test cancels it."""
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
