"""Documents of standby replicas: the REST API and the Pool resource give the same policy."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents.custom_resource import PoolSpec, pool_from_spec
from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.documents.fleet import LendingDocument, PoolDocument, to_lending_document, to_lending_policy, to_pool
from scheduler.domain.standby import Standby

REQUIRED = {"namespace": "chat", "selector": {"app": "llm"}}
SPEC = {**REQUIRED, "port": 9000, "level": 2, "gpuMemory": "3GiB", "hostMemory": "1GiB", "wake": "15s", "timeout": "2m"}
REST = {
    **REQUIRED,
    "port": 9000,
    "level": 2,
    "gpu_memory_bytes": 3 * 2**30,
    "host_memory_bytes": "1GiB",
    "wake_s": 15,
    "timeout_s": "2m",
}
FULL = Standby("chat", {"app": "llm"}, 9000, 2, 3 * 2**30, 2**30, 15.0, 120.0)


def from_spec(standby: Any) -> Standby | None:
    spec = {"kind": "inference", "nodeSelector": {"role": "chat"}, "lending": {"standby": standby}}
    return pool_from_spec("chat", parse_document(PoolSpec, spec)).lending.standby


def from_rest(standby: Any) -> Standby | None:
    document = {"name": "chat", "kind": "inference", "lending": {"standby": standby}}
    return to_pool(parse_document(PoolDocument, document)).lending.standby


def test_both_forms_give_the_same_standby() -> None:
    assert from_spec(SPEC) == from_rest(REST) == FULL
    assert from_spec(REQUIRED) == from_rest(REQUIRED) == Standby("chat", {"app": "llm"})
    assert from_spec(None) is from_rest(None) is None


def test_policy_survives_its_document() -> None:
    for standby in (REST, REQUIRED, None):
        policy = to_lending_policy(parse_document(LendingDocument, {"standby": standby}))
        assert to_lending_policy(parse_document(LendingDocument, to_lending_document(policy))) == policy


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": ""},
        {"selector": {}},
        {"port": 0},
        {"port": 65_536},
        {"port": "http"},
        {"level": 0},
        {"level": 3},
        {"gpu_memory_bytes": -1},
        {"host_memory_bytes": "many"},
        {"wake_s": -1},
        {"timeout_s": 0},
        {"timeout_s": 3601},
        {"url": "http://10.0.0.1"},
    ],
    ids=str,
)
def test_invalid_value_is_refused_with_its_field(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocumentError) as raised:
        from_rest({**REST, **change})
    (field,) = change
    assert raised.value.invalid_fields[0].field.startswith(f"lending.standby.{field}")


def test_way_back_of_no_time_is_refused() -> None:
    document = {"return_deadline_s": 0, "cold_start_s": 300, "standby": {**REQUIRED, "wake_s": 0}}
    with pytest.raises(InvalidDocumentError, match="return_deadline_s"):
        parse_document(LendingDocument, document)


@pytest.mark.parametrize(
    "values",
    [{"namespace": ""}, {"selector": {}}, {"port": 0}, {"level": 3}, {"gpu_memory_bytes": -1}, {"timeout_s": 0.0}],
    ids=str,
)
def test_domain_checks_its_values(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"lending\.standby\.{next(iter(values))}"):
        Standby(**{**REQUIRED, **values})
