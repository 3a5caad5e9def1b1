"""A training on agents that only HTTP reaches learns as if it had never been moved, and what is killed is made up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.domain.job import JobSpec
from scheduler.domain.parallel_plan import LayerStrategy
from tests.e2e.forked_ranks import a_plan
from tests.e2e.pod_play import NODES, PodPlay
from tests.e2e.training_play import losses

pytestmark = pytest.mark.e2e

STEPS = 60
BATCH = 12
TWO_REPLICAS = a_plan((LayerStrategy(4, dp=2),), batch=BATCH)
ONE_SPLIT_IN_TWO = a_plan((LayerStrategy(4, tp=2),), batch=BATCH)
ALONE = a_plan((LayerStrategy(4),), batch=BATCH)


def trainer(ledger: Path, *more: str) -> tuple[str, ...]:
    size = ("--model", "tiny-gpt", "--steps", str(STEPS), "--global-batch", str(BATCH))
    return ("-m", "scheduler.trainer.train", *size, "--ledger", str(ledger), *more)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[PodPlay]:
    command = ("python", *trainer(tmp_path / "ledger", "--checkpoint-every", "10", "--step-delay-s", "0.1"))
    spec = JobSpec("train", 1, 2, global_batch=BATCH, steps=STEPS, command=command)
    made = PodPlay(tmp_path, spec)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same training, uninterrupted and alone."""
    ledger = tmp_path_factory.mktemp("reference")
    subprocess.run([sys.executable, *trainer(ledger)], check=True, timeout=240, capture_output=True)
    return losses(ledger)


def check_learning(play: PodPlay, reference: dict[int, float]) -> None:
    found = play.losses()
    assert sorted(found) == sorted(reference) == list(range(1, STEPS + 1))
    assert max(abs(found[step] - reference[step]) for step in found) <= 1e-5


def test_a_training_goes_from_plan_to_plan_and_from_two_agents_to_one(
    play: PodPlay, reference: dict[int, float]
) -> None:
    for node in NODES:
        play.start_agent(node)
    play.want(TWO_REPLICAS, *NODES)
    play.wait(lambda: play.has_reached(10))
    warm = play.inner_agents()
    assert set(warm) == set(NODES)

    play.want(ONE_SPLIT_IN_TWO, *NODES)
    play.wait(lambda: play.phase(1) == "left" and play.phase(2) == "running" and play.has_reached(25))
    assert play.inner_agents() == warm, "what they have loaded is used again"
    assert play.runs[1].phases_s.keys() >= {"save", "teardown"}

    play.kill_api()
    step = max(play.losses())
    play.wait(lambda: play.has_reached(step + 2))
    play.start_api()

    play.want(ALONE, "n0")
    play.delete_agent("n1")
    play.wait(lambda: play.phase(2) == "left")
    play.wait(lambda: play.agents["n1"].poll() is not None)
    assert play.agents["n1"].returncode == 0

    play.wait(lambda: play.phase(3) == "succeeded")
    assert play.runs[3].steps == play.runs[3].checkpoint_steps == float(STEPS)
    play.finish()
    play.wait(lambda: play.agents["n0"].poll() is not None)
    assert play.agents["n0"].returncode == 0
    play.assert_nothing_is_left()
    check_learning(play, reference)


def test_a_killed_agent_costs_the_work_since_the_last_checkpoint(play: PodPlay, reference: dict[int, float]) -> None:
    for node in NODES:
        play.start_agent(node)
    play.want(TWO_REPLICAS, *NODES)
    play.wait(lambda: play.has_reached(25))
    play.kill_agent("n1")
    play.wait(lambda: play.phase(1) == "lost")
    assert play.runs[1].reason == "the agent of node n1 is gone"
    assert play.runs[1].gpus == {}
    assert (play.runs[1].checkpoint_steps or 0.0) >= 20.0

    play.start_agent("n1")
    play.want(TWO_REPLICAS, *NODES)
    play.wait(lambda: play.phase(2) == "succeeded")
    assert not (play.run_dir("n1", 1)).exists(), "another pod starts nothing of a generation before its time"
    for node in NODES:
        play.delete_agent(node)
    play.wait(lambda: all(agent.poll() == 0 for agent in play.agents.values()))
    play.assert_nothing_is_left()
    check_learning(play, reference)
