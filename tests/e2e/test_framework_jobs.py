"""Scripts of frameworks as jobs of a real service: two resizes and one recall lose no step."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from scheduler.domain.job_state import JobState
from tests.e2e.framework_probes import LONG_WITH_FRAMEWORKS
from tests.e2e.framework_trainings import FRAMEWORKS, REPOSITORY, mean_losses, read_history
from tests.e2e.paused_trainer import hold_at
from tests.e2e.service_harness import ServiceHarness
from tests.e2e.test_framework_resizes import LIGHTNING, TRAINER, Example

LENDING = {"quantile": 0.95, "headroom": 0.0, "return_deadline_s": 120.0, "cold_start_s": 3.0}
PAUSED = REPOSITORY / "tests" / "e2e" / "paused_example.py"

pytestmark = LONG_WITH_FRAMEWORKS


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceHarness]:
    harness = ServiceHarness(tmp_path)
    yield harness
    harness.close()


@pytest.fixture
def checkpoints() -> Iterator[Path]:
    """A folder for checkpoints. Unlike pytest's, every user may enter it, as the agent requires of a named folder."""
    with tempfile.TemporaryDirectory() as created:
        path = Path(created).resolve()
        path.chmod(0o1777)
        yield path


class FrameworkJob:
    """A job that runs an example, paused at the steps of a test."""

    def __init__(self, service: ServiceHarness, example: Example, checkpoints: Path) -> None:
        self.service = service
        self.hold = service.shared / "hold"
        self.checkpoints = checkpoints
        self._outputs = dict[Path, str]()
        hold_at(self.hold, 3)
        command = ["python", str(PAUSED), str(self.hold), str(example.script), *example.options]
        document = {"name": "train", "gpus": {"min": 1, "max": 1}, "command": command, "venv": str(FRAMEWORKS)}
        checkpoint = {"dir": str(self.checkpoints)}
        self.id = str(service.client.submit({**document, "checkpoint": checkpoint, "hangTimeout": "never"})["id"])

    def wait_for(self, gpus: int, *, step: int) -> None:
        """Wait until the newest generation runs on `gpus` GPUs and has completed `step` steps."""
        self.service.wait(lambda: self._has_reached(gpus, step))

    def wait_for_success(self) -> None:
        self.service.wait(lambda: self._state() in (JobState.SUCCEEDED, JobState.FAILED))
        assert self._state() is JobState.SUCCEEDED, self.logs()
        self._note_outputs()

    def read_printed_losses(self) -> dict[int, float]:
        return mean_losses(self._outputs.values())

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self._log_paths())

    def _has_reached(self, gpus: int, step: int) -> bool:
        self._note_outputs()
        job = self.service.job(self.id)
        if job is None:  # no tick has read the submission yet
            return False
        assert not job.is_ended, self.logs()
        generation = max(self.service.generations(self.id), default=0)
        has_stepped = bool(self.service.status(self.id, generation)["step"] >= step)
        return has_stepped and job.state is JobState.RUNNING and job.allocation.target_gpus == gpus

    def _state(self) -> JobState:
        job = self.service.job(self.id)
        assert job is not None
        return job.state

    def _note_outputs(self) -> None:
        """Keep the output of all generations: the agent deletes the folders of old ones."""
        for path in self._log_paths():
            with contextlib.suppress(FileNotFoundError):
                self._outputs[path] = path.read_text()

    def _log_paths(self) -> Sequence[Path]:
        paths = list[Path]()
        for folder in sorted(self.service.folders.job_folder(self.id).glob("gen-*@*")):
            with contextlib.suppress(FileNotFoundError):  # the agent has just deleted it
                paths += sorted(folder.glob("rank-*.log"))
        return paths


def _train_alone(example: Example, folder: Path) -> Mapping[int, float]:
    """Return the losses of the example without Ebbtide, on one rank."""
    folder.mkdir()
    command = [str(FRAMEWORKS / "bin" / "python"), str(example.script), *example.options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return read_history(folder / "out") if example is TRAINER else mean_losses([done.stdout])


def _add_inference_pool(service: ServiceHarness) -> None:
    """Add an idle pool that lends one of its two nodes."""
    service.client.create_pool({"name": "inference", "kind": "inference", "lending": LENDING})
    for node in ("i0", "i1"):
        service.client.add_node({"name": node, "pool": "inference", "gpu": "cpu", "gpus": 2})
    service.client.report_demand("inference", gpus=0.4)


@pytest.mark.parametrize("example", [TRAINER, LIGHTNING], ids=lambda example: example.name)
def test_job_of_a_framework_loses_no_step_in_two_resizes_and_a_recall(
    service: ServiceHarness, checkpoints: Path, tmp_path: Path, example: Example
) -> None:
    service.open(nodes=1, gpus=2)
    job = FrameworkJob(service, example, checkpoints)
    job.wait_for(1, step=3)
    hold_at(job.hold, 7)
    service.client.scale(job.id, min_gpus=2, max_gpus=2)
    job.wait_for(2, step=7)
    _add_inference_pool(service)
    hold_at(job.hold, 13)
    service.client.scale(job.id, min_gpus=2, max_gpus=4)
    job.wait_for(4, step=13)
    hold_at(job.hold, 17)
    service.client.recall_all()
    job.wait_for(2, step=17)
    job.hold.unlink()
    job.wait_for_success()
    seen = read_history(job.checkpoints / "out") if example is TRAINER else job.read_printed_losses()
    reference = _train_alone(example, tmp_path / "alone")
    assert sorted(seen) == list(range(1, example.steps + 1)) == sorted(reference)
    assert max(abs(seen[step] - reference[step]) for step in seen) <= 1e-4
    ended = service.job(job.id)
    assert ended is not None
    assert ended.account.lost_gpu_s == 0.0
