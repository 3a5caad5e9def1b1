"""Output of an agent's pod: its own log lines and those of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.agent_pod import OBEY, Pod, agent_pod

TALK = """
    import os, sys
    print("step 1", flush=True)
    print("a warning", file=sys.stderr, flush=True)
    print("10%\\r20%\\r30%", flush=True)
    print("the end without a newline", end="", flush=True)
"""


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with agent_pod(tmp_path) as created:
        yield created


def lines_of(pod: Pod, rank: int) -> list[str]:
    mark = f"rank {rank} | "
    return [line.removeprefix(mark) for line in pod.log().splitlines() if line.startswith(mark)]


def test_rank_lines_have_the_rank_number(pod: Pod) -> None:
    pod.order(TALK)
    reported = ["step 1", "a warning", "10%", "20%", "30%", "the end without a newline"]
    pod.wait(lambda: lines_of(pod, 0) == lines_of(pod, 1) == reported)


def test_rank_output_appears_while_it_runs_and_once_although_the_agent_was_killed(pod: Pod) -> None:
    pod.order(OBEY.replace('say("running", 1)', 'say("running", 1); print("hello", flush=True)'), ranks=1)
    pod.wait(lambda: lines_of(pod, 0) == ["hello"])
    assert pod.codes() == [None]
    pod.wait((pod.run_dir() / "forwarded.json").exists)
    pod.agent.kill()
    pod.wait(lambda: "The agent has ended with -9" in pod.log())
    pod.desk.notice = {"action": "leave", "step": None, "seconds_left": None}
    pod.wait(lambda: pod.codes() == [0])
    pod.desk.ending = {"done": True, "failed": False}
    pod.end(0)
    assert lines_of(pod, 0) == ["hello"]


def test_final_output_is_not_lost(pod: Pod) -> None:
    pod.order(OBEY.replace('say("left", 2)', 'say("left", 2); print("x" * 100_000); print("last")'))
    pod.wait_until_running()
    pod.process.terminate()
    pod.end(0)
    assert lines_of(pod, 0)[-1] == lines_of(pod, 1)[-1] == "last"
    assert sum(len(line) for line in lines_of(pod, 0)) == 100_004


def test_preload_failure_is_printed(pod: Pod) -> None:
    pod.process.terminate()
    pod.process.wait()
    pod.start("--preload", "no_such_module")
    pod.order("", ranks=1, command=("python", "-m", "scheduler.trainer.no_such_trainer"))
    pod.wait(lambda: "supervisor | ModuleNotFoundError: No module named 'no_such_module'" in pod.log())
