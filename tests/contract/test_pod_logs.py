"""Output of an agent's pod: its own log lines and those of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.agent_pod import NOTHING, OBEY, Pod, agent_pod

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
    assert "rank 0 exit code 0, rank 1 exit code 0" in pod.log()


def test_rank_output_appears_while_it_runs(pod: Pod) -> None:
    pod.order(OBEY.replace('say("running", 1)', 'say("running", 1); print("hello", flush=True)'), ranks=1)
    pod.wait(lambda: lines_of(pod, 0) == ["hello"])
    assert pod.codes() == [None]


def test_final_output_is_not_lost(pod: Pod) -> None:
    script = OBEY.replace('say("left", 2)', 'say("left", 2); print("x" * 100_000); print("last")')
    pod.order(script)
    pod.wait(lambda: pod.phases() == ["running", "running"])
    pod.desk.reply = {**NOTHING, "done": True}
    pod.end(0)
    assert lines_of(pod, 0)[-1] == lines_of(pod, 1)[-1] == "last"
    assert sum(len(line) for line in lines_of(pod, 0)) == 100_004


def test_preload_failure_is_printed(pod: Pod) -> None:
    pod.process.kill()
    pod.process.wait()
    pod.start(preload="no_such_module")
    pod.wait(lambda: "agent | ModuleNotFoundError: No module named 'no_such_module'" in pod.log())
