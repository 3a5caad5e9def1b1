"""`ebbtide replay`: a scheduling cycle on a saved snapshot, and malformed snapshots."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cli.commands.replay import find_violations
from scheduler.domain.codec import encode
from scheduler.domain.decisions import LendNode, Reason, ReasonCode, StartJob
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.scaling_curve import build_data_parallel_plan
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import Invariant, TickResult

Run = Callable[..., Result]
NOW_S = 1_790_000_000.0


def job(job_id: str, gpus: int, steps: int) -> Job:
    spec = JobSpec(name=job_id, min_gpus=gpus, max_gpus=gpus, steps=steps)
    return Job(job_id, spec, JobState.QUEUED, NOW_S - 60, NOW_S - 60, Progress(at_s=NOW_S))


def snapshot() -> Snapshot:
    """Four training GPUs, a job that needs three of them, and a job that needs four."""
    return Snapshot(
        generation=7,
        now_s=NOW_S,
        pools={"training": Pool("training", PoolKind.TRAINING)},
        nodes={"t0": Node("t0", "training", "a100-80g", 4, 80_000_000_000)},
        jobs={"small": job("small", 3, 100), "wide": job("wide", 4, 100_000)},
    )


@pytest.fixture
def document() -> Any:
    return encode(snapshot())


def test_replay_shows_decisions_and_pending_jobs(run: Run, tmp_path: Path, document: Any) -> None:
    path = tmp_path / "snapshot.json"
    path.write_text(json.dumps(document))
    told = json.loads(run("replay", str(path), "-o", "json").stdout)
    assert (told["generation"], told["policy"], told["violations"]) == (7, "ebbtide", [])
    [start] = told["decisions"]
    assert (start["kind"], start["job_id"], start["gpus"]) == ("StartJob", "small", {"t0": [0, 1, 2]})
    assert start["reason"]["detail"]
    assert list(told["waiting"]) == ["wide"]
    table = run("replay", str(path)).stdout
    assert "StartJob" in table
    assert "3 GPUs t0[0-2]" in table
    assert "InsufficientGpus" in table


def test_replay_reads_stdin_and_takes_a_policy(run: Run, document: Any) -> None:
    result = run("replay", "-", "--policy", "fifo", "-o", "json", stdin=json.dumps(document))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["policy"] == "fifo"


def test_each_decision_is_checked_after_the_legal_ones_before_it() -> None:
    because = Reason(ReasonCode.FIRST_IN_ORDER, "it is first")
    first = StartJob("small", {"t0": (0, 1, 2)}, build_data_parallel_plan("a100-80g", 3), because)
    overlapping = StartJob("wide", {"t0": (0, 1, 2, 3)}, build_data_parallel_plan("a100-80g", 4), because)
    violations = find_violations(snapshot(), TickResult((first, overlapping, LendNode("ghost", because))))
    assert [(violation.invariant, violation.subject) for violation in violations][-1] == (
        Invariant.UNKNOWN_SUBJECT,
        "ghost",
    )
    assert violations[0].invariant is Invariant.GPU_HELD_TWICE
    assert find_violations(snapshot(), TickResult((replace(overlapping, gpus={"t0": (0, 1, 2, 3)}),))) == ()


def broken(document: Any, *path: str, value: Any) -> Any:
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return document


MALFORMED: list[tuple[str, tuple[str, ...], Any, str]] = [
    ("a state that does not exist", ("jobs", "small", "state"), "asleep", "$.jobs.small.state: 'asleep'"),
    ("text for a number", ("now_s",), "noon", "$.now_s: expected float, got 'noon'"),
    ("an unknown field", ("color",), "red", "$: unknown field 'color'; allowed: generation"),
    ("no GPUs on a node", ("nodes", "t0", "gpus"), 0, "$.nodes.t0: node t0: gpus must be at least 1, got 0"),
    ("min above max", ("jobs", "small", "spec", "min_gpus"), 9, "gpus.max must be at least gpus.min (9), got 3"),
    ("a home that does not exist", ("nodes", "t0", "pool"), "mars", "$.nodes.t0.pool: 'mars'"),
    ("GPUs on no node", ("jobs", "small", "allocation", "target"), {"t9": [0]}, "target: 't9'"),
    ("GPUs beyond the node", ("jobs", "small", "allocation", "target"), {"t0": [4]}, "[4]"),
    ("a forecast for no pool", ("demand",), {"x": {"at_s": 0, "gpus": 0, "asked_gpus": 0}}, "$.demand: 'x'"),
    ("a list", (), [], "$: expected dict, got []"),
]


@pytest.mark.parametrize(("path", "value", "message"), [case[1:] for case in MALFORMED], ids=[c[0] for c in MALFORMED])
def test_malformed_snapshot_is_rejected_by_field(
    run: Run, document: Any, path: tuple[str, ...], value: Any, message: str
) -> None:
    given = broken(document, *path, value=value) if path else value
    result = run("replay", "-", stdin=json.dumps(given))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("Error: -: $")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ('{"now_s": ', "is not JSON"),
        ('{"now_s": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["empty", "cut off", "NaN", "deep"],
)
def test_snapshot_that_is_not_json_is_rejected(run: Run, text: str, message: str) -> None:
    result = run("replay", "-", stdin=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_missing_snapshot_file_is_rejected(run: Run, tmp_path: Path) -> None:
    result = run("replay", str(tmp_path / "none.json"))
    assert result.exit_code == 2
    assert "none.json: cannot be read: No such file or directory" in result.stderr


def test_unknown_policy_is_rejected(run: Run, document: Any) -> None:
    result = run("replay", "-", "--policy", "lifo", stdin=json.dumps(document))
    assert result.exit_code == 2
    assert "--policy: policy set 'lifo'" in result.stderr
