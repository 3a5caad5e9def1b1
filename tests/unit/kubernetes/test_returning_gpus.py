"""Status of a Pool and its Event about GPUs that come back to inference."""

from __future__ import annotations

from dataclasses import replace

from scheduler.domain.decisions import Reason, ReasonCode, RecallNode
from scheduler.domain.events import EventCode
from scheduler.domain.fleet import DemandReading, Loan, LoanState
from scheduler.domain.snapshot import Snapshot
from scheduler.kubernetes.resources.fleet import build_pool_status
from scheduler.scheduling.event_messages import unmet_demand_events
from tests.builders import a_fleet, a_snapshot

NOW_S = 1_800_000_000.0


def lend(*states: LoanState) -> Snapshot:
    """Return a fleet of three inference nodes of 8 GPUs; the first ones are lent."""
    loans = {
        f"i{at}": Loan(f"l{at}", f"i{at}", "inference", state, NOW_S, NOW_S, NOW_S + 300.0 * at or None)
        for at, state in enumerate(states, start=1)
    }
    snapshot: Snapshot = a_snapshot(a_fleet(training=1, inference=4))
    return replace(snapshot, now_s=NOW_S, loans=loans)


def test_status_has_the_recalled_gpus_and_their_last_deadline() -> None:
    status = build_pool_status(
        "inference", lend(LoanState.RECALLED, LoanState.RECALLED, LoanState.ACTIVE), conditions=(), cordoned=()
    )
    assert (status["returningGpus"], status["returnBy"]) == (16, "2027-01-15T08:10:00Z")


def test_status_without_a_recall_names_no_gpus() -> None:
    status = build_pool_status("inference", lend(LoanState.ACTIVE), conditions=(), cordoned=())
    assert not {"returningGpus", "returnBy"} & status.keys()


def test_replicas_that_do_not_fit_get_an_event_with_the_gpus_that_come_back() -> None:
    reading = DemandReading(NOW_S, 20.0, 20.0)
    snapshot = replace(lend(LoanState.ACTIVE, LoanState.ACTIVE), demand={"inference": reading})
    recalls = [RecallNode(node, NOW_S + 300.0, Reason(ReasonCode.INFERENCE_NEEDS_NODE, "")) for node in ("i1", "i2")]
    (event,) = unmet_demand_events(snapshot, recalls)
    assert (event.code, event.subject) == (EventCode.DEMAND_UNMET, "inference")
    expected = {"needed_gpus": 20.0, "kept_gpus": 16.0, "returning_gpus": 16.0, "return_by_s": NOW_S + 300.0}
    assert event.numbers == expected
    fits = replace(snapshot, demand={"inference": DemandReading(NOW_S, 16.0, 16.0)})
    assert list(unmet_demand_events(fits, recalls)) == []
