"""The example scripts with a plain loop are resized and recalled by real agents, and train as if they were not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scheduler.domain.commands import (
    AddNode,
    CommandBody,
    CreatePool,
    RecallAll,
    ReportDemand,
    ScaleJob,
    SubmitJob,
)
from scheduler.domain.fleet import Pool, PoolKind
from scheduler.domain.job_account import OnResize
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.lending_policy import LendingPolicy
from scheduler.domain.program import Program
from tests.builders import a_node
from tests.e2e.example_scripts import (
    ACCELERATED,
    MINGPT,
    NANOGPT,
    STEPS_PER_EPOCH,
    UNMODIFIED,
    Example,
    prepare_data,
)
from tests.e2e.framework_trainings import has_frameworks
from tests.e2e.service_harness import ServiceHarness, run_service

JOB = "train"
PAUSE_S = 0.1


@dataclass
class Training:
    """An example under way on a service with its own two GPUs and two that inference lends.

    Attributes:
        losses, worlds: losses and number of ranks of each generation, noted before the agent deletes its folder.
    """

    site: ServiceHarness
    example: Example
    losses: dict[int, list[float]] = field(default_factory=dict)
    worlds: dict[int, int] = field(default_factory=dict)

    def open(self, steps: int, data: Path, *, gpus: int = 1, node_gpus: int = 2) -> None:
        self._send(CreatePool(Pool("training", PoolKind.TRAINING)))
        lending = LendingPolicy(quantile=0.5, headroom=0.0, return_deadline_s=120.0)
        self._send(CreatePool(Pool("inference", PoolKind.INFERENCE, lending)))
        self._send(AddNode(a_node("t0", gpus=node_gpus, gpu="cpu")))
        self._send(AddNode(a_node("i0", gpus=2, gpu="cpu", pool="inference")))
        command = self.example.command(data, steps, pause_s=PAUSE_S)
        venv = "" if self.example.venv is None else str(self.example.venv)
        program = Program(launch=self.example.launch, venv=venv)
        checkpoint = self.example.checkpoint
        spec = JobSpec(
            JOB,
            gpus,
            gpus,
            steps=steps,
            command=command,
            program=program,
            on_resize=OnResize.CHECKPOINT,
            checkpoint=checkpoint,
        )
        self._send(SubmitJob(JOB, spec))
        self.site.wait(lambda: self.site.job(JOB) is not None)

    def resize(self, gpus: int, *, steps: int) -> None:
        """Resize the job after its present generation has made `steps` steps, and wait for the new one to train."""
        self._wait_for_steps(steps)
        self._send(ScaleJob(JOB, gpus, gpus))
        self._wait_for_world(gpus)

    def lend(self, *, steps: int) -> None:
        self._wait_for_steps(steps)
        self._send(ReportDemand("inference", 0.0))
        self._send(ScaleJob(JOB, 1, 4))
        self._wait_for_world(4)

    def recall(self, *, steps: int) -> None:
        self._wait_for_steps(steps)
        self._send(RecallAll())
        self._wait_for_world(2)

    def finish(self) -> list[float]:
        """Wait for the end and return the losses of all generations."""
        self.site.wait(self._has_ended)
        assert self._state() is JobState.SUCCEEDED, self.site.log()
        self._note_generations()
        return [loss for _, losses in sorted(self.losses.items()) for loss in losses]

    def list_worlds(self) -> list[int]:
        """Return the number of ranks of each generation that has trained."""
        return [self.worlds[generation] for generation, losses in sorted(self.losses.items()) if losses]

    def _note_generations(self) -> None:
        for generation in self.site.generations(JOB):
            self.losses[generation] = self._read_losses(generation)
            self.worlds[generation] = self._world(generation)

    def lost_gpu_s(self) -> float:
        job = self.site.job(JOB)
        assert job is not None
        return job.account.lost_gpu_s

    def _send(self, body: CommandBody) -> None:
        self.site.send(body)

    def _state(self) -> JobState:
        job = self.site.job(JOB)
        assert job is not None
        return job.state

    def _generation(self) -> int:
        return max(self.site.generations(JOB), default=0)

    def _world(self, generation: int) -> int:
        folders = self.site.run_dirs(JOB, generation)
        return max((json.loads((path / "run.json").read_text())["world_size"] for path in folders), default=0)

    def _wait_for_steps(self, steps: int) -> None:
        self._wait(lambda: self._count_steps(self._generation()) >= steps)

    def _wait_for_world(self, gpus: int) -> None:
        self._wait(lambda: self._trains_on(gpus))
        self._note_generations()

    def _wait(self, reached: Callable[[], bool]) -> None:
        self.site.wait(lambda: reached() or self._has_ended())
        assert not self._has_ended(), self.site.log()

    def _trains_on(self, gpus: int) -> bool:
        generation = self._generation()
        return self._world(generation) == gpus and self._count_steps(generation) > 0

    def _has_ended(self) -> bool:
        return self._state() in (JobState.SUCCEEDED, JobState.FAILED)

    def _count_steps(self, generation: int) -> int:
        return len(self._read_losses(generation))

    def _read_losses(self, generation: int) -> list[float]:
        folders = self.site.run_dirs(JOB, generation)
        logs = [path for folder in folders for path in sorted(folder.glob("rank-*.log"))]
        lines = [line for path in logs for line in path.read_text().splitlines()]
        return self.example.read_losses(lines)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ServiceHarness]:
    (tmp_path / "site").mkdir()
    with run_service(tmp_path / "site") as opened:
        yield opened


@pytest.fixture
def data(site: ServiceHarness) -> Path:
    return prepare_data(site.shared)


def test_losses_of_ranks_that_share_a_line_are_read() -> None:
    shared = "[RANK1] epoch 9 | batch 4 | loss 0.700000[RANK0] epoch 9 | batch 4 | loss 0.900000"
    lines = [shared, "", "[RANK0] epoch 9 | batch 5 | loss 0.500000", "[RANK1] epoch 9 | batch 5 | loss 0.700000"]
    assert MINGPT.read_losses(lines) == pytest.approx([0.8, 0.6])


@pytest.mark.e2e
def test_loop_with_five_added_lines_survives_a_resize(data: Path, site: ServiceHarness, tmp_path: Path) -> None:
    steps = 30
    training = Training(site, NANOGPT)
    training.open(steps, data)
    training.resize(2, steps=3)
    losses = training.finish()
    assert training.list_worlds() == [1, 2]
    assert training.lost_gpu_s() == 0.0
    expected = NANOGPT.run_alone(data, steps, tmp_path)
    assert losses == pytest.approx(expected, abs=1e-4)


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.parametrize("example", [NANOGPT, MINGPT, UNMODIFIED], ids=lambda example: example.name)
def test_resizes_and_a_recall_change_no_loss(
    example: Example, data: Path, site: ServiceHarness, tmp_path: Path
) -> None:
    steps = 20 * STEPS_PER_EPOCH
    training = Training(site, example)
    training.open(steps, data)
    training.resize(2, steps=7)
    training.lend(steps=7)
    training.recall(steps=7)
    training.resize(1, steps=7)
    losses = training.finish()
    assert training.list_worlds() == [1, 2, 4, 2, 1]
    assert training.lost_gpu_s() == pytest.approx(0.0, abs=1.0)
    expected = example.run_alone(data, steps, tmp_path)
    assert len(losses) == len(expected) == steps
    assert losses == pytest.approx(expected, abs=1e-4)
    assert losses[-1] <= 0.7 * losses[0]


@pytest.mark.e2e
@pytest.mark.full
@pytest.mark.skipif(not has_frameworks(), reason="no training frameworks: run `make frameworks`")
def test_unmodified_script_under_accelerate_launch_is_resized(data: Path, site: ServiceHarness, tmp_path: Path) -> None:
    steps = 60
    training = Training(site, ACCELERATED)
    training.open(steps, data, gpus=2, node_gpus=4)
    training.resize(4, steps=7)
    training.resize(2, steps=7)
    losses = training.finish()
    assert training.list_worlds() == [2, 4, 2]
    assert training.lost_gpu_s() == pytest.approx(0.0, abs=1.0)
    assert losses == pytest.approx(UNMODIFIED.run_alone(data, steps, tmp_path), abs=1e-4)
