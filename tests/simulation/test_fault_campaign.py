"""Fault campaigns: seeds without violations, and proof that broken code is found, shrunk and replayed."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scheduler.domain.job_state import Allocation
from scheduler.runtime import reconciler
from scheduler.scheduling import desired_state
from scheduler.simulator.campaign import checks
from scheduler.simulator.campaign.case import CaseEventKind, read_case, write_case
from scheduler.simulator.campaign.generation import draw_case
from scheduler.simulator.campaign.run import CaseResult, run_case
from scheduler.simulator.campaign.shrinking import CaseShrinker
from scheduler.store.memory_store import MemoryStore
from scheduler.store.protocol import Commit
from tools import fault_campaign

SEEDS = range(3, 13)
"""Two of them use SQL."""
VARIED_SEEDS = (4, 6, 8, 9)
"""They are tried first, because together they have all kinds of events."""
STALE_NODE_SEED = 3111
"""A controller takes a lent node to be down, because it sees what was so long ago."""
MORE_SEEDS = (*range(13, 63), STALE_NODE_SEED)


@cache
def run_once(seed: int) -> CaseResult:
    return run_case(draw_case(seed))


def run_seed(seed: int, request: pytest.FixtureRequest) -> None:
    result = run_once(seed)
    request.node.user_properties.append(("faults", fault_campaign.describe_counts(result.counts)))
    assert not result.violations, fault_campaign.describe_violation(seed, result.violations[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_seed_violates_nothing(seed: int, request: pytest.FixtureRequest) -> None:
    run_seed(seed, request)


def test_every_kind_of_event_has_an_effect_within_the_seeds() -> None:
    missing = set(CaseEventKind)
    for seed in sorted(SEEDS, key=lambda seed: seed not in VARIED_SEEDS):
        missing -= run_once(seed).counts.keys()
        if not missing:
            return
    pytest.fail(f"had no effect: {', '.join(sorted(missing))}")


def test_worlds_are_varied() -> None:
    cases = [draw_case(seed) for seed in SEEDS]
    assert any(len({node.gpu for node in case.nodes}) > 1 for case in cases)
    assert any(job.spec.gpu and job.spec.has_profile for case in cases for job in case.jobs)
    assert any(case.spares for case in cases)
    assert any(node.lendable_gpus for case in cases for node in case.nodes)
    assert any(case.uses_sql for case in cases)


@pytest.mark.full
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_more_seeds_violate_nothing(seed: int, request: pytest.FixtureRequest) -> None:
    run_seed(seed, request)


def test_case_replays_exactly_also_from_its_file(tmp_path: Path) -> None:
    case = draw_case(4)
    write_case(tmp_path / "case.json", case)
    again = read_case(tmp_path / "case.json")
    assert again == case
    first, second = run_case(case), run_case(again)
    assert (first.counts, first.ticks) == (second.counts, second.ticks)


def release_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the GPUs that a job gives up as free before its workers have left them."""
    retarget = desired_state.retarget

    def retarget_without_releasing(*arguments: Any, **more: Any) -> Allocation:
        return replace(retarget(*arguments, **more), releasing={})

    monkeypatch.setattr(desired_state, "retarget", retarget_without_releasing)


def accept_every_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a leader commit after another one has taken over."""

    def commit(store: MemoryStore, commit: Commit) -> None:
        store._snapshot = commit.snapshot
        for command_id in commit.consumed_command_ids:
            store._inbox.pop(command_id, None)
        store._append_history(commit)

    monkeypatch.setattr(MemoryStore, "commit", commit)


def record_no_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "compute_usage_delta", lambda before, after: ())


@pytest.mark.parametrize(
    ("break_code", "seed", "code"),
    [
        (release_at_once, 0, "gpu-used-twice"),
        (accept_every_commit, 2, "generation-repeated"),
        (record_no_usage, 4, "end-usage-differs"),
    ],
)
def test_campaign_finds_broken_code(
    break_code: Callable[[pytest.MonkeyPatch], None], seed: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_code(monkeypatch)
    assert [violation.code for violation in run_case(draw_case(seed)).violations] == [code]


def test_campaign_finds_jobs_that_are_preempted_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PREEMPTIONS_MAX", 0)
    assert [violation.code for violation in run_case(draw_case(3)).violations] == ["end-preempted-too-often"]


def test_failing_case_shrinks_to_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw_case(2)
    whole = replace(whole, jobs=whole.jobs[:2], demand=())
    with monkeypatch.context() as broken:
        accept_every_commit(broken)
        violation = run_case(whole).violations[0]
        small = CaseShrinker(lambda case: run_case(case).violations).shrink(whole, violation)
        assert [event.kind for event in small.events] == [CaseEventKind.PAUSE_BEFORE_COMMIT]
        assert (small.jobs, small.queues) == ((), ())
        assert run_case(small).violations[0].code == violation.code
    assert run_case(small).violations == ()


def test_campaign_resumes_and_reports_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--seeds", "4:5", "--results", str(tmp_path)]
    assert fault_campaign.main(arguments) == 0
    first = capsys.readouterr().out
    assert "1 seeds, " in first
    monkeypatch.setattr(fault_campaign, "draw_case", lambda seed: pytest.fail(f"seed {seed} is done"))
    assert fault_campaign.main(arguments) == 0
    assert capsys.readouterr().out == first

    case = draw_case(4)
    record_no_usage(monkeypatch)
    write_case(tmp_path / "case.json", replace(case, events=()))
    assert fault_campaign.main(["--case", str(tmp_path / "case.json")]) == 1
    assert "end-usage-differs" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "5", "7:3", "a:b", "-1:4"])
def test_wrong_ranges_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="A:B"):
        fault_campaign.parse_seeds(text)
