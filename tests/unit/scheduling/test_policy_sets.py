"""Policy sets by name: the built-in ones, and sets from entry points."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint

import pytest

from scheduler.scheduling import policy_sets as module
from scheduler.scheduling.policies.job_order import shortest_job_first
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import ENTRY_POINTS, PolicySet, list_policy_sets, load_policy_set

LENDING = {"opportunistic", "afs", "lyra", "ebbtide-loaning", "ebbtide"}
SCALING = {"edf", "elastic-deadline", "afs", "lyra", "ebbtide-scaling", "ebbtide"}


def mine(settings: PolicySettings) -> PolicySet:
    return PolicySet("whatever", "shortest job first", "none", order=shortest_job_first, settings=settings)


def fails(settings: PolicySettings) -> PolicySet:
    raise KeyError("a table of mine")


def returns_a_word(settings: PolicySettings) -> str:
    return "a policy"


def add(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    found = [EntryPoint(name, f"{__name__}:{attribute}", ENTRY_POINTS) for name, attribute in points]
    monkeypatch.setattr(module, "entry_points", lambda *, group: found if group == ENTRY_POINTS else [])
    monkeypatch.setattr(module, "find_entry_points", module.find_entry_points.__wrapped__)


@pytest.mark.parametrize("name", list_policy_sets())
def test_sets_have_name_summary_paper_and_settings(name: str) -> None:
    settings = PolicySettings(reconfiguration_s=7.0)
    found = load_policy_set(name, settings)
    assert (found.name, found.settings) == (name, settings)
    assert min(len(found.summary), len(found.paper)) > 3
    assert "\n" not in found.summary + found.paper
    assert (found.lends, found.scales) == (name in LENDING, name in SCALING)


def test_unknown_set_is_rejected_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="policy set 'yarn' is not known; allowed: fifo, sjf, srtf, srsf, las, "):
        load_policy_set("yarn")


def test_entry_point_adds_a_set_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, ("mine", "mine"))
    assert list_policy_sets()[-1] == "mine"
    found = load_policy_set("mine", PolicySettings(ageing_s=5.0))
    assert (found.name, found.order, found.settings.ageing_s) == ("mine", shortest_job_first, 5.0)


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("nowhere", "AttributeError: "),
        ("fails", "KeyError: 'a table of mine'"),
        ("returns_a_word", "returned str; allowed: a PolicySet"),
    ],
)
def test_failing_entry_point_is_reported_by_name(monkeypatch: pytest.MonkeyPatch, attribute: str, said: str) -> None:
    add(monkeypatch, ("bad", attribute))
    whole = f"policy 'bad' of entry point '{__name__}:{attribute}' ({ENTRY_POINTS}): {said}"
    with pytest.raises(ValueError, match=re.escape(whole)):
        load_policy_set("bad")
    assert load_policy_set("ebbtide").name == "ebbtide", "other sets are unaffected"


@pytest.mark.parametrize("points", [[("fifo", "mine")], [("mine", "mine"), ("mine", "fails")]])
def test_duplicate_name_is_rejected(monkeypatch: pytest.MonkeyPatch, points: list[tuple[str, str]]) -> None:
    add(monkeypatch, *points)
    with pytest.raises(ValueError, match="the name is taken"):
        load_policy_set(points[0][0])
    assert load_policy_set("ebbtide").name == "ebbtide"
