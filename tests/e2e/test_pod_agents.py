"""A training on pod agents, which are reachable over HTTP only, has the losses of an uninterrupted one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.domain.job_spec import JobSpec
from scheduler.domain.parallel_plan import LayerStrategy
from tests.e2e.pod_harness import NODES, PodHarness
from tests.e2e.rank_launcher import make_plan
from tests.e2e.training_harness import losses

pytestmark = pytest.mark.e2e

STEPS = 60
BATCH = 12
TWO_REPLICAS = make_plan((LayerStrategy(4, dp=2),), batch=BATCH)
ONE_SPLIT_IN_TWO = make_plan((LayerStrategy(4, tp=2),), batch=BATCH)
ALONE = make_plan((LayerStrategy(4),), batch=BATCH)


def trainer(ledger: Path, *more: str) -> tuple[str, ...]:
    size = ("--model", "tiny-gpt", "--steps", str(STEPS), "--global-batch", str(BATCH))
    return ("-m", "scheduler.trainer.train", *size, "--ledger", str(ledger), *more)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[PodHarness]:
    command = ("python", *trainer(tmp_path / "ledger", "--checkpoint-every", "10", "--step-delay-s", "0.1"))
    spec = JobSpec("train", 1, 2, global_batch=BATCH, steps=STEPS, command=command)
    harness = PodHarness(tmp_path, spec)
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same training on one rank without interruption."""
    ledger = tmp_path_factory.mktemp("reference")
    subprocess.run([sys.executable, *trainer(ledger)], check=True, timeout=240, capture_output=True)
    return losses(ledger)


def check_learning(harness: PodHarness, reference: dict[int, float]) -> None:
    losses = harness.losses()
    assert sorted(losses) == sorted(reference) == list(range(1, STEPS + 1))
    assert max(abs(losses[step] - reference[step]) for step in losses) <= 1e-5


@pytest.mark.full
def test_training_changes_plans_and_moves_from_two_agents_to_one(
    harness: PodHarness, reference: dict[int, float]
) -> None:
    for node in NODES:
        harness.start_agent(node)
    harness.want(TWO_REPLICAS, *NODES)
    harness.wait(lambda: harness.has_reached(10))

    harness.want(ONE_SPLIT_IN_TWO, *NODES)
    harness.wait(lambda: harness.phase(1) == "left" and harness.phase(2) == "running" and harness.has_reached(25))
    assert harness.runs[1].phases_s.keys() >= {"save", "teardown"}

    harness.kill_api()
    step = max(harness.losses())
    harness.wait(lambda: harness.has_reached(step + 2))
    harness.start_api()

    harness.want(ALONE, "n0")
    harness.delete_agent("n1")
    harness.wait(lambda: harness.phase(2) == "left")
    harness.wait(lambda: harness.agents["n1"].poll() is not None)
    assert harness.agents["n1"].returncode == 0

    harness.wait(lambda: harness.phase(3) == "succeeded")
    assert harness.runs[3].steps == harness.runs[3].checkpoint_steps == float(STEPS)
    harness.finish()
    harness.wait(lambda: harness.agents["n0"].poll() is not None)
    assert harness.agents["n0"].returncode == 0
    harness.check_no_process_is_left()
    check_learning(harness, reference)


@pytest.mark.full
def test_killed_agents_restart_no_rank(harness: PodHarness, reference: dict[int, float]) -> None:
    for node in NODES:
        harness.start_agent(node)
    harness.want(TWO_REPLICAS, *NODES)
    harness.wait(lambda: harness.has_reached(10))
    ranks = harness.rank_processes()
    for node in NODES:
        harness.kill_agent(node)
    harness.wait(lambda: harness.has_reached(30))
    assert harness.rank_processes() == ranks
    harness.wait(lambda: harness.phase(1) == "succeeded")
    harness.finish()
    harness.wait(lambda: all(agent.poll() == 0 for agent in harness.agents.values()))
    harness.check_no_process_is_left()
    check_learning(harness, reference)


@pytest.mark.full
def test_killed_pod_loses_only_the_work_since_the_last_checkpoint(
    harness: PodHarness, reference: dict[int, float]
) -> None:
    for node in NODES:
        harness.start_agent(node)
    harness.want(TWO_REPLICAS, *NODES)
    harness.wait(lambda: harness.has_reached(25))
    harness.kill_pod("n1")
    harness.wait(lambda: harness.phase(1) == "lost")
    assert "n1" in harness.runs[1].reason
    assert harness.runs[1].gpus == {}
    assert (harness.runs[1].checkpoint_steps or 0.0) >= 20.0

    harness.start_agent("n1")
    harness.want(TWO_REPLICAS, *NODES)
    harness.wait(lambda: harness.phase(2) == "succeeded")
    assert not (harness.run_dir("n1", 1)).exists(), "a new pod does not start earlier generations"
    for node in NODES:
        harness.delete_agent(node)
    harness.wait(lambda: all(agent.poll() == 0 for agent in harness.agents.values()))
    harness.check_no_process_is_left()
    check_learning(harness, reference)
