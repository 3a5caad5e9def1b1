"""Fault campaigns: seeds without violations, and proof that broken code is found, shrunk and replayed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from scheduler.simulator.campaign.case import CaseEventKind, read_case, write_case
from scheduler.simulator.campaign.generation import draw_case
from scheduler.simulator.campaign.run import run_case
from tools import fault_campaign

SEEDS = range(10)
MORE_SEEDS = range(10, 60)


def run_seed(seed: int, request: pytest.FixtureRequest) -> None:
    result = run_case(draw_case(seed))
    request.node.user_properties.append(("faults", fault_campaign.describe_counts(result.counts)))
    assert not result.violations, fault_campaign.describe_violation(seed, result.violations[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_seed_violates_nothing(seed: int, request: pytest.FixtureRequest) -> None:
    run_seed(seed, request)


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


def test_every_kind_of_event_is_drawn() -> None:
    drawn = Counter(event.kind for seed in range(40) for event in draw_case(seed).events)
    assert drawn.keys() == set(CaseEventKind)
