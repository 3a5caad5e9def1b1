"""Documents of pools and nodes."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents import fleet
from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.documents.fleet import NodeDocument, PoolDocument, to_lending_document
from scheduler.domain.fleet import Node, Pool, PoolKind
from scheduler.domain.lending_policy import Blackout, LendingPolicy


def parse_pool(**fields: Any) -> Pool:
    return fleet.to_pool(parse_document(PoolDocument, {"name": "p", "kind": "inference", **fields}))


def test_pool_without_lending_policy_has_the_defaults() -> None:
    assert parse_pool() == Pool("p", PoolKind.INFERENCE, LendingPolicy())
    assert parse_pool(lending={}) == parse_pool()


def test_lending_policy_accepts_durations_as_text() -> None:
    lending = {"return_deadline_s": "2m", "cold_start_s": 30, "blackouts": [{"start_s": "22h", "end_s": "6h"}]}
    policy = parse_pool(lending=lending).lending
    assert (policy.return_deadline_s, policy.cold_start_s) == (120.0, 30.0)
    assert policy.blackouts == (Blackout(79_200.0, 21_600.0),)


def test_lending_policy_round_trips_through_its_document() -> None:
    policy = LendingPolicy(quantile=0.9, lent_nodes_max=3, blackouts=(Blackout(0.0, 60.0),))
    document = to_lending_document(policy) | {"blackouts": [{"start_s": 0.0, "end_s": 60.0}]}
    assert parse_pool(lending=document).lending == policy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantile", 0),
        ("quantile", 1.5),
        ("headroom", 1),
        ("enabled", "yes"),
        ("lent_nodes_max", -1),
        ("demand_stale_s", 0),
        ("cold_start_s", "soon"),
        ("loan_s_min", "25h"),
        ("return_deadline_s", 86_400.5),
        ("cold_start_s", "2d"),
    ],
)
def test_lending_field_out_of_range_is_rejected(field: str, value: object) -> None:
    with pytest.raises(InvalidDocumentError, match=rf"lending\.{field}: got"):
        parse_pool(lending={field: value})


def test_loan_span_is_at_most_the_forecast_horizon() -> None:
    with pytest.raises(InvalidDocumentError, match=r"loan_s_min: got 90000.0; allowed: at most 86400 s"):
        parse_pool(lending={"loan_s_min": "25h"})
    longest = {"loan_s_min": "24h", "return_deadline_s": "24h", "cold_start_s": "24h"}
    assert parse_pool(lending=longest).lending.horizon_s == 2 * 86_400.0


def test_lending_policy_without_lookahead_is_rejected() -> None:
    with pytest.raises(InvalidDocumentError, match=r"return_deadline_s: got 0.0; allowed: above 0 s"):
        parse_pool(lending={"return_deadline_s": 0, "cold_start_s": 0})
    assert parse_pool(lending={"return_deadline_s": 0}).lending.horizon_s == 300.0


def test_training_pool_has_no_lending_policy() -> None:
    with pytest.raises(InvalidDocumentError, match="lending: got"):
        parse_pool(kind="training", lending={"enabled": True})


def test_memory_of_a_node_overrides_that_of_its_model() -> None:
    document = {"name": "n0.rack-1", "pool": "p", "gpu": "a100-80g", "gpus": 8}
    assert fleet.to_node(parse_document(NodeDocument, document), gpu_memory_bytes=5) == Node(
        "n0.rack-1", "p", "a100-80g", 8, 5
    )
    own = fleet.to_node(parse_document(NodeDocument, document | {"memory": "1GiB"}), gpu_memory_bytes=5)
    assert own.gpu_memory_bytes == 2**30
