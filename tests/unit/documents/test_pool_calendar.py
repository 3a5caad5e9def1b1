"""Documents of time zones, blackouts, known events and demand profiles."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.documents.custom_resource import PoolSpec, pool_from_spec
from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.documents.fleet import LendingDocument, to_lending_policy
from scheduler.domain.codec import encode
from scheduler.domain.known_events import KnownEvent
from scheduler.domain.lending_policy import Blackout, LendingPolicy

BERLIN = "Europe/Berlin"
LAUNCH = {"name": "launch", "start_s": "2026-11-27T08:00:00+01:00", "duration_s": "3h", "gpus": 64.0}
LAUNCH_S = datetime.fromisoformat("2026-11-27T07:00Z").timestamp()


def parse(**lending: Any) -> LendingPolicy:
    return to_lending_policy(parse_document(LendingDocument, lending))


def refusal(**lending: Any) -> tuple[str, object]:
    with pytest.raises(InvalidDocumentError) as refused:
        parse(**lending)
    return refused.value.invalid_fields[0].field, refused.value.invalid_fields[0].value


def test_blackout_is_a_daily_window_or_begins_at_the_times_of_an_expression() -> None:
    windows = [
        {"start_s": "22h", "end_s": "6h", "time_zone": BERLIN},
        {"cron": "0 8 * * 1-5", "duration_s": "10h"},
        {"cron": "0 0 1 * *", "start_s": 60, "end_s": 120, "time_zone": "UTC"},
    ]
    assert parse(blackouts=windows).blackouts == (
        Blackout(79_200.0, 21_600.0, time_zone=BERLIN),
        Blackout(0.0, 36_000.0, "0 8 * * 1-5"),
        Blackout(60.0, 120.0, "0 0 1 * *", "UTC"),
    )


@pytest.mark.parametrize(
    ("window", "field", "value"),
    [
        ({"start_s": 0}, "end_s", None),
        ({"end_s": 0}, "start_s", None),
        ({"start_s": 0, "end_s": 60, "duration_s": 60}, "duration_s", 60.0),
        ({"cron": "0 8 * * 1-5"}, "duration_s", None),
        ({"cron": "0 8 * * 1-5", "duration_s": 60, "end_s": 60}, "duration_s", 60.0),
        ({"cron": "0 8 * * 1-5", "duration_s": "400d"}, "duration_s", 34_560_000.0),
        ({"cron": "0 8 * * 1-5", "start_s": 60, "end_s": 60}, "end_s", 60.0),
        ({"cron": "0 25 * * *", "duration_s": 60}, "cron", "0 25 * * *"),
        ({"cron": "every day", "duration_s": 60}, "cron", "every day"),
        ({"cron": "30 0 8 * * 1-5", "duration_s": 60}, "cron", "30 0 8 * * 1-5"),
        ({"cron": "0 0 31 2 *", "duration_s": 60}, "cron", "0 0 31 2 *"),
        ({"cron": "0 8 * * *", "duration_s": 60, "time_zone": "Berlin"}, "time_zone", "Berlin"),
    ],
)
def test_wrong_blackout_is_rejected_with_its_field(window: dict[str, Any], field: str, value: object) -> None:
    assert refusal(blackouts=[window]) == (f"blackouts.0.{field}", value)


def test_misspelt_zone_is_rejected_with_the_likely_one() -> None:
    with pytest.raises(InvalidDocumentError, match="'Europe/Berlin'"):
        parse(time_zone="Europe/Berln")
    for name in ("Europe", "", "/etc/localtime", "../UTC"):
        assert refusal(time_zone=name) == ("time_zone", name)
    with pytest.raises(ValueError, match="'Europe/Berlin'"):
        LendingPolicy(time_zone="Europe/Berln")


@pytest.mark.parametrize(
    ("start", "zone", "start_s"),
    [
        (LAUNCH["start_s"], "UTC", LAUNCH_S),
        ("2026-11-27T07:00:00Z", BERLIN, LAUNCH_S),
        ("2026-11-27T08:00", BERLIN, LAUNCH_S),
        (LAUNCH_S, BERLIN, LAUNCH_S),
        ("2026-10-25T02:30", BERLIN, datetime.fromisoformat("2026-10-25T00:30Z").timestamp()),
        ("2026-03-29T02:30", BERLIN, datetime.fromisoformat("2026-03-29T01:30Z").timestamp()),
    ],
    ids=["offset", "UTC", "local", "seconds", "first of two", "skipped"],
)
def test_event_begins_at_an_instant_or_at_a_local_time(start: Any, zone: str, start_s: float) -> None:
    policy = parse(time_zone=zone, known_events=[LAUNCH | {"start_s": start}])
    assert policy.known_events == (KnownEvent("launch", start_s, 10_800.0, gpus=64.0),)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"gpus": None}, "gpus", None),
        ({"factor": 2}, "gpus", 64.0),
        ({"gpus": None, "factor": 0.5}, "factor", 0.5),
        ({"start_s": "tomorrow"}, "start_s", "tomorrow"),
        ({"start_s": True}, "start_s", True),
        ({"duration_s": 0}, "duration_s", 0),
        ({"name": ""}, "name", ""),
    ],
)
def test_wrong_event_is_rejected_with_its_field(change: dict[str, Any], field: str, value: object) -> None:
    assert refusal(known_events=[LAUNCH | change]) == (f"known_events.0.{field}", value)


def test_numbers_of_events_and_hours_are_limited() -> None:
    assert len(parse(known_events=[LAUNCH] * 100).known_events) == 100
    assert refusal(known_events=[LAUNCH] * 101)[0] == "known_events"
    assert [len(parse(demand_profile=[1.0] * hours).demand_profile) for hours in (0, 24, 168)] == [0, 24, 168]
    assert refusal(demand_profile=[1.0] * 25)[0] == "demand_profile"
    assert refusal(demand_profile=[1.0] * 23 + [-1.0])[0] == "demand_profile.23"


def test_encoded_policy_is_a_valid_document() -> None:
    policy = parse(
        time_zone=BERLIN,
        blackouts=[{"start_s": "22h", "end_s": "6h"}, {"cron": "0 8 * * 1-5", "duration_s": "10h"}],
        known_events=[LAUNCH, {**LAUNCH, "gpus": None, "factor": 1.5}],
        demand_profile=list(range(24)),
    )
    assert parse(**encode(policy)) == policy


def test_examples_of_the_page_are_valid() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "describe-when-a-pool-is-busy.md").read_text("utf-8")
    examples = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    assert [sorted(each) for each in examples] == [["blackouts", "known_events", "time_zone"], ["demand_profile"]]
    assert all(parse(**each) != LendingPolicy() for each in examples)


def test_pool_resource_has_the_same_calendar() -> None:
    lending = {
        "timeZone": BERLIN,
        "blackouts": [{"start": "22h", "end": "6h"}, {"cron": "0 8 * * 1-5", "duration": "10h", "timeZone": "UTC"}],
        "knownEvents": [{"name": "launch", "start": "2026-11-27T08:00", "duration": "3h", "factor": 2}],
        "demandProfile": [4] * 24,
    }
    spec = {"kind": "inference", "nodeSelector": {"a": "b"}, "lending": lending}
    assert pool_from_spec("p", parse_document(PoolSpec, spec)).lending == LendingPolicy(
        time_zone=BERLIN,
        blackouts=(Blackout(79_200.0, 21_600.0), Blackout(0.0, 36_000.0, "0 8 * * 1-5", "UTC")),
        known_events=(KnownEvent("launch", LAUNCH_S, 10_800.0, factor=2.0),),
        demand_profile=(4.0,) * 24,
    )
