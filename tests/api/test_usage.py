"""GET /v1/usage: sums by every dimension, time ranges, and CSV without formulas."""

from __future__ import annotations

import csv
import io

import pytest

from api.usage import usage_csv, usage_rows, usage_sums
from scheduler.domain.job_queue import UsageEntry, UsageKey
from tests.api.conftest import NOW_S, ApiService, Problem
from tests.usage_check import check_usage

HOUR_S = 3600
THIS_HOUR_S = int(NOW_S // HOUR_S) * HOUR_S


def test_running_jobs_are_counted_up_to_now(fleet: ApiService) -> None:
    fleet.create_queues("vision")
    job = fleet.submit(gpus={"min": 2, "max": 2}, queue="vision")
    fleet.tick()
    begun_s = fleet.clock.now_s()
    fleet.clock.move_to(begun_s + 100.0)
    (row,) = fleet.get("/v1/usage")["items"]
    assert row == {"queue": "vision", "gpu_s": 200.0, "own_gpu_s": 200.0, "lent_gpu_s": 0.0, "lost_gpu_s": 0.0}
    fleet.tick(after_s=50.0)
    assert fleet.get("/v1/usage")["total"]["gpu_s"] == 300.0
    fleet.http.delete(f"/v1/jobs/{job}")
    fleet.tick(after_s=0.0)
    fleet.tick(after_s=0.0)
    fleet.clock.move_to(begun_s + 9000.0)
    assert fleet.get("/v1/usage")["total"]["gpu_s"] == 300.0
    assert sum(entry.gpu_s for entry in check_usage(fleet.store)) == 300.0


def test_lent_gpus_are_counted_separately(fleet: ApiService) -> None:
    fleet.lend_all()
    fleet.clock.move_to(fleet.clock.now_s() + 7200.0)
    report = fleet.get("/v1/usage", by="queue,owner,gpu")
    (row,) = report["items"]
    assert (row["queue"], row["owner"], row["owner_id"], row["gpu"]) == ("default", "anybody", "local", "cpu")
    assert row["own_gpu_s"] == row["lent_gpu_s"] > 2 * 7200.0
    by_hour = fleet.get("/v1/usage", by="hour")
    assert [item["hour"] for item in by_hour["items"]] == [THIS_HOUR_S + at * HOUR_S for at in range(3)]
    assert by_hour["items"][1]["gpu_s"] == 4 * 3600.0
    assert sum(item["gpu_s"] for item in by_hour["items"]) == pytest.approx(report["total"]["gpu_s"])
    assert by_hour["total"] == report["total"]


def test_usage_of_one_queue(fleet: ApiService) -> None:
    fleet.create_queues("vision", "speech")
    for queue in ("vision", "speech"):
        fleet.submit(gpus={"min": 1, "max": 1}, queue=queue)
    fleet.tick()
    fleet.clock.move_to(fleet.clock.now_s() + 100.0)
    report = fleet.get("/v1/usage", queue="vision", by="queue,day")
    assert [row["queue"] for row in report["items"]] == ["vision"]
    assert report["total"]["gpu_s"] == 100.0
    assert fleet.get("/v1/usage", queue="none")["items"] == []


def test_a_time_range_is_rounded_to_whole_hours(fleet: ApiService) -> None:
    fleet.submit(gpus={"min": 1, "max": 1})
    fleet.tick()
    fleet.clock.move_to(THIS_HOUR_S + 3 * HOUR_S + 60.0)
    report = fleet.http.get(f"/v1/usage?from={THIS_HOUR_S + HOUR_S + 7}&to=2025-10-09T10:00:01Z").json()
    assert (report["from_s"], report["to_s"]) == (THIS_HOUR_S + HOUR_S, THIS_HOUR_S + 3 * HOUR_S)
    assert report["total"]["gpu_s"] == 2 * 3600.0
    assert fleet.get("/v1/usage", to="2025-10-01")["items"] == []


@pytest.mark.parametrize(
    ("query", "field", "allowed"),
    [
        ("by=ownr", "by", "did you mean 'owner'?"),
        ("by=queue,queue", "by", "each once"),
        ("by=", "by", "one or more of day, hour, queue, owner, gpu"),
        ("from=yesterday", "from", "2026-11-22"),
        ("to=1e300", "to", "seconds since 1970"),
        ("from=nan", "from", "seconds since 1970"),
        ("from=-5", "from", "seconds since 1970"),
        ("to=10000-01-01", "to", "seconds since 1970"),
        ("from=2026-11-22&to=2026-11-20", "from", "at or before `to`"),
        ("from=2020-01-01&to=2026-01-01", "from", "at most 366 days"),
    ],
)
def test_an_invalid_query_names_its_field(query: str, field: str, allowed: str, fleet: ApiService) -> None:
    (error,) = fleet.refused("GET", f"/v1/usage?{query}")["errors"]
    assert error["field"] == field
    assert allowed in error["allowed"]


def test_csv_is_selected_by_accept_or_format(fleet: ApiService, problem: Problem) -> None:
    fleet.create_queues("vision")
    fleet.submit(gpus={"min": 2, "max": 2}, queue="vision")
    fleet.tick()
    fleet.clock.move_to(fleet.clock.now_s() + 1.5)
    by_format = fleet.http.get("/v1/usage?format=csv&by=day,queue")
    by_accept = fleet.http.get("/v1/usage?by=day,queue", headers={"Accept": "text/csv; charset=utf-8"})
    assert by_format.headers["content-type"].startswith("text/csv")
    assert by_format.text == by_accept.text
    head, row = csv.reader(io.StringIO(by_format.text))
    assert head == ["day", "queue", "gpu_s", "own_gpu_s", "lent_gpu_s", "lost_gpu_s"]
    assert row == ["2025-10-09T00:00:00Z", "vision", "3.000", "3.000", "0.000", "0.000"]
    plain = fleet.http.get("/v1/usage?format=json", headers={"Accept": "text/csv"})
    assert plain.headers["content-type"] == "application/json"
    problem(fleet.http.get("/v1/usage?format=xml"), 422)


@pytest.mark.parametrize("owner", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", '=HYPERLINK("http://evil","x")', "a,b"])
def test_csv_cells_are_not_formulas(owner: str) -> None:
    entries = [UsageEntry(UsageKey(0, "q", "token:1", "cpu", False), 1.0, owner=owner)]
    rows, sums = usage_rows(entries, ["owner"]), usage_sums(entries)
    text = usage_csv({"from_s": 0, "to_s": 3600, "as_of_s": 1.0, "by": ["owner"], "items": rows, "total": sums})
    head, (cell, owner_id, *_) = csv.reader(io.StringIO(text))
    assert (head[:2], owner_id) == (["owner", "owner_id"], "token:1")
    assert not cell.startswith(("=", "+", "-", "@", "\t"))
    assert cell.endswith(owner)
