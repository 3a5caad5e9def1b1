"""The documents of pools and nodes."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents import fleet
from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.documents.fleet import NodeDocument, PoolDocument, to_lending_document
from scheduler.domain.fleet import Blackout, LendingPolicy, Node, Pool, PoolKind


def pool_of(**fields: Any) -> Pool:
    return fleet.to_pool(parse_document(PoolDocument, {"name": "p", "kind": "inference", **fields}))


def test_a_pool_without_lending_rules_has_the_defaults() -> None:
    assert pool_of() == Pool("p", PoolKind.INFERENCE, LendingPolicy())
    assert pool_of(lending={}) == pool_of()


def test_lending_rules_take_durations_as_text() -> None:
    lending = {"return_deadline_s": "2m", "cold_start_s": 30, "blackouts": [{"start_s": "22h", "end_s": "6h"}]}
    policy = pool_of(lending=lending).lending
    assert (policy.return_deadline_s, policy.cold_start_s) == (120.0, 30.0)
    assert policy.blackouts == (Blackout(79_200.0, 21_600.0),)


def test_lending_rules_write_a_document_that_reads_the_same() -> None:
    policy = LendingPolicy(quantile=0.9, lent_nodes_max=3, blackouts=(Blackout(0.0, 60.0),))
    document = to_lending_document(policy) | {"blackouts": [{"start_s": 0.0, "end_s": 60.0}]}
    assert pool_of(lending=document).lending == policy


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
def test_a_lending_rule_outside_its_bounds_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidDocumentError, match=rf"lending\.{field}: got"):
        pool_of(lending={field: value})


def test_lending_rules_reach_no_further_ahead_than_demand_is_forecast() -> None:
    with pytest.raises(
        InvalidDocumentError, match=r"loan_s_min: got 90000.0; allowed: at most 86400 s, which is a day"
    ):
        pool_of(lending={"loan_s_min": "25h"})
    longest = {"loan_s_min": "24h", "return_deadline_s": "24h", "cold_start_s": "24h"}
    assert pool_of(lending=longest).lending.horizon_s == 2 * 86_400.0


def test_lending_rules_that_need_no_forecast_are_refused() -> None:
    with pytest.raises(
        InvalidDocumentError, match=r"return_deadline_s: got 0.0; allowed: above 0 s, where cold_start_s is 0"
    ):
        pool_of(lending={"return_deadline_s": 0, "cold_start_s": 0})
    assert pool_of(lending={"return_deadline_s": 0}).lending.horizon_s == 300.0


def test_a_training_pool_has_nothing_to_lend() -> None:
    with pytest.raises(InvalidDocumentError, match="only a pool of kind inference lends"):
        pool_of(kind="training", lending={"enabled": True})


def test_a_node_takes_its_own_memory_before_that_of_its_model() -> None:
    document = {"name": "n0.rack-1", "pool": "p", "gpu": "a100-80g", "gpus": 8}
    assert fleet.to_node(parse_document(NodeDocument, document), gpu_memory_bytes=5) == Node(
        "n0.rack-1", "p", "a100-80g", 8, 5
    )
    own = fleet.to_node(parse_document(NodeDocument, document | {"memory": "1GiB"}), gpu_memory_bytes=5)
    assert own.gpu_memory_bytes == 2**30
