"""Receipts of recalls and the safety report over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from api.identity.authorization import HIDDEN_JOB
from api.identity.principals import Grant, Principal, Role
from api.recalls import receipt_view
from scheduler.domain.decisions import ReasonCode
from scheduler.domain.recall_receipts import SERVING_WAIT_S, LeavingJob, RecallReceipt
from tests.api.conftest import ApiService, Problem


@pytest.fixture
def recalled(fleet: ApiService) -> ApiService:
    """A service on which both loans were recalled and returned."""
    fleet.lend_all()
    fleet.made("/v1/pools/inference/demand", {"gpus": 2})
    for _ in range(3):
        fleet.tick()
    return fleet


def list_recalls(service: ApiService, **query: Any) -> list[dict[str, Any]]:
    return list(service.get("/v1/recalls", **query)["items"])


def test_receipts_are_listed_newest_first_and_filtered(recalled: ApiService) -> None:
    receipts = list_recalls(recalled)
    assert [receipt["node"] for receipt in receipts] == ["i1", "i0"]
    asked_s = receipts[0]["asked_at_s"]
    assert all(receipt["pool"] == "inference" and receipt["code"] == "InferenceNeedsNode" for receipt in receipts)
    assert list_recalls(recalled, pool="training") == []
    assert len(list_recalls(recalled, since_s=asked_s, until_s=asked_s + 1)) == 2
    assert list_recalls(recalled, since_s=asked_s + 1) == list_recalls(recalled, until_s=asked_s) == []


def test_pages_follow_one_another(recalled: ApiService) -> None:
    first = recalled.get("/v1/recalls", limit=1)
    second = recalled.get("/v1/recalls", limit=1, cursor=first["next"])
    assert [first["items"][0]["node"], second["items"][0]["node"], second["next"]] == ["i1", "i0", None]


def test_receipt_has_its_jobs_and_the_reason_of_the_choice(recalled: ApiService) -> None:
    receipt = list_recalls(recalled)[0]
    (job,) = receipt["jobs"]
    assert (job["gpus"], job["exit"], job["owner"]) == (1, "preempted", "anybody")
    assert receipt["outcome"] == "in_time"
    assert receipt["choice"]["alternatives"] == 0
    assert receipt["asked_at_s"] <= job["left_at_s"] <= receipt["freed_at_s"] <= receipt["returned_at_s"]
    assert receipt["returned_at_s"] <= receipt["return_by_s"]


def test_loan_has_the_receipt_of_its_recall(recalled: ApiService) -> None:
    by_loan = {receipt["loan_id"]: receipt for receipt in list_recalls(recalled)}
    loans = recalled.get("/v1/loans")["items"]
    assert [loan["receipt"] for loan in loans] == [by_loan[loan["id"]] for loan in loans]


def test_node_shows_the_receipt_of_the_current_recall(fleet: ApiService) -> None:
    fleet.lend_all()
    assert fleet.get("/v1/nodes/i0")["loan"]["receipt"] is None
    fleet.made("/v1/lending:recall-all")
    fleet.tick()
    assert fleet.get("/v1/nodes/i0")["loan"]["receipt"] == list_recalls(fleet)[1]


def test_jobs_of_other_queues_are_hidden() -> None:
    jobs = (LeavingJob("a-1", "ada", "id-ada", "web", 2), LeavingJob("b-2", "bob", "id-bob", "lab", 1))
    code = ReasonCode.INFERENCE_NEEDS_NODE
    receipt = RecallReceipt("r", "l", "i0", "inference", 4, code, "needed", 1.0, 301.0, jobs)
    viewer = Principal("ada", (Grant(Role.VIEWER, "web"),), subject="id-ada")
    shown = receipt_view(receipt, viewer)["jobs"]
    assert [(job["job_id"], job["owner"], job["queue"], job["gpus"]) for job in shown] == [
        ("a-1", "ada", "web", 2),
        (HIDDEN_JOB, None, None, 1),
    ]


def test_report_of_the_month_counts_what_was_recorded(recalled: ApiService) -> None:
    report = recalled.get("/v1/pools/inference/safety-report")
    assert (report["month"], report["verdict"], report["is_complete"]) == ("2025-10", "kept", False)
    assert (report["loans"], report["recalls"], report["open_recalls"]) == (2, 2, 0)
    assert report["outcomes"] == {"in_time": 2, "late": 0, "cancelled": 0, "lost": 0}
    assert report["longest"] in list_recalls(recalled)
    assert report["lent_gpu_hours"] > 0
    assert report == recalled.get("/v1/pools/inference/safety-report", month="2025-10")
    assert recalled.get("/v1/pools/inference/safety-report", month="2025-09")["verdict"] == "no_data"


def test_report_needs_an_inference_pool_and_a_month(fleet: ApiService, problem: Problem) -> None:
    problem(fleet.http.get("/v1/pools/training/safety-report"), 409)
    problem(fleet.http.get("/v1/pools/nowhere/safety-report"), 404)
    body = problem(fleet.http.get("/v1/pools/inference/safety-report", params={"month": "2025-13"}), 422)
    assert body["errors"][0]["field"] == "month"


def test_complete_receipt_is_an_event(recalled: ApiService) -> None:
    recalled.tick(after_s=SERVING_WAIT_S + 1.0)
    events = [event for event in recalled.get("/v1/events")["items"] if event["code"] == "RecallReceipt"]
    assert [(event["subject"], event["cause"]) for event in events] == [("i0", "in_time"), ("i1", "in_time")]
    assert all(event["numbers"]["gpus"] == 1 and event["numbers"]["return_s"] >= 0 for event in events)
    closed_s = {receipt["closed_at_s"] for receipt in list_recalls(recalled)}
    assert closed_s == {recalled.clock.now_s()}
