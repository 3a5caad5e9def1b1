"""Documents of standby replicas: the REST API and the Pool resource give the same policy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from scheduler.documents.custom_resource import PoolSpec, pool_from_spec
from scheduler.documents.document import InvalidDocumentError, parse_document
from scheduler.documents.fleet import LendingDocument, PoolDocument, to_lending_document, to_lending_policy, to_pool
from scheduler.domain.prefetch import PrefetchPolicy, WeightsTemplate
from scheduler.domain.standby import Standby, StandbyMode

REQUIRED = {"namespace": "chat", "selector": {"app": "llm"}}
SPEC = {
    **REQUIRED,
    "mode": "warm",
    "port": 9000,
    "level": 2,
    "gpuMemory": "3GiB",
    "hostMemory": "1GiB",
    "wake": "15s",
    "timeout": "2m",
    "drain": "20s",
}
REST = {
    **REQUIRED,
    "mode": "warm",
    "port": 9000,
    "level": 2,
    "gpu_memory_bytes": 3 * 2**30,
    "host_memory_bytes": "1GiB",
    "wake_s": 15,
    "timeout_s": "2m",
    "drain_s": 20,
}
FULL = Standby(
    "chat", {"app": "llm"}, 9000, 2, 3 * 2**30, 2**30, 15.0, 120.0, mode=StandbyMode.WARM, gpus=(), drain_s=20.0
)
MACHINES = {"url": "http://{node}:8000", "gpus": [0, 2], "gpu_memory_bytes": "3GiB"}


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
    for standby in (REST, REQUIRED, MACHINES, None):
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
        {"drain_s": 3601},
        {"mode": "awake"},
        {"gpu_memory_bytes": 0},
        {"gpus": [0]},
        {"url": "http://10.0.0.1"},
    ],
    ids=str,
)
def test_invalid_value_is_refused_with_its_field(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocumentError) as raised:
        from_rest({**REST, **change})
    (field,) = change
    assert raised.value.invalid_fields[0].field.startswith(f"lending.standby.{field}")


@pytest.mark.parametrize(
    "change",
    [
        {"url": "ftp://{node}"},
        {"url": "http://user@{node}"},
        {"url": "http://{node}/?a=b"},
        {"url": "http://{node}\n"},
        {"url": "http://{node}:0"},
        {"url": "http://[::1"},
        {"gpus": [1, 0]},
        {"gpus": [-1]},
        {"gpus": [1, 1]},
        {"mode": "warm"},
    ],
    ids=str,
)
def test_invalid_value_of_a_machine_is_refused_with_its_field(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocumentError) as raised:
        from_rest({**MACHINES, **change})
    (field,) = change
    assert raised.value.invalid_fields[0].field.startswith(f"lending.standby.{field}")


def test_standby_of_machines() -> None:
    kept_bytes = 3 * 2**30
    standby = from_rest(MACHINES)
    assert standby == Standby(url="http://{node}:8000", gpus=(0, 2), gpu_memory_bytes=kept_bytes)
    assert (standby.count_kept_bytes([1, 3]), standby.count_kept_bytes([1, 2])) == (0, kept_bytes)
    assert standby.engine_url("gpu-1") == "http://gpu-1:8000"
    for url in ("https://{node}/v1/engine/", "http://[fd00::1]:8000", "http://10.0.0.1"):
        assert from_rest({"url": url}) == Standby(url=url)


def test_memory_that_replicas_keep_is_less_than_that_of_a_gpu() -> None:
    spec = {"kind": "inference", "nodeSelector": {"role": "chat"}, "gpuMemory": "80GiB"}
    parse_document(PoolSpec, {**spec, "lending": {"standby": {**REQUIRED, "gpuMemory": "79GiB"}}})
    with pytest.raises(InvalidDocumentError) as raised:
        parse_document(PoolSpec, {**spec, "lending": {"standby": {**REQUIRED, "gpuMemory": "80GiB"}}})
    assert raised.value.invalid_fields[0].field == "lending.standby.gpuMemory"


def test_warm_replica_drains_before_its_offer_ends() -> None:
    for deadline_s, is_valid in ((20, False), (21, True)):
        document = {"return_deadline_s": deadline_s, "cold_start_s": 60, "standby": REST}
        with nullcontext() if is_valid else pytest.raises(InvalidDocumentError, match="drain_s"):
            to_lending_policy(parse_document(LendingDocument, document))


WEIGHTS = {"namespace": "chat", "pod_template": "pull-weights"}


def test_both_forms_give_the_same_prefetch() -> None:
    def from_pool(prefetch: Any) -> PrefetchPolicy | None:
        spec = {"kind": "inference", "nodeSelector": {"role": "chat"}, "lending": {"prefetch": prefetch}}
        return pool_from_spec("chat", parse_document(PoolSpec, spec)).lending.prefetch

    full = PrefetchPolicy(False, WeightsTemplate("chat", "pull-weights"), 1200.0)
    spec = {"images": False, "weights": {"namespace": "chat", "podTemplate": "pull-weights"}, "timeout": "20m"}
    rest = {"images": False, "weights": WEIGHTS, "timeout_s": "20m"}
    for given in (rest, {}, None):
        policy = to_lending_policy(parse_document(LendingDocument, {"prefetch": given}))
        assert to_lending_policy(parse_document(LendingDocument, to_lending_document(policy))) == policy
    assert to_lending_policy(parse_document(LendingDocument, {"prefetch": rest})).prefetch == from_pool(spec) == full
    assert from_pool({}) == PrefetchPolicy()
    assert from_pool(None) is None


@pytest.mark.parametrize(
    ("prefetch", "field"),
    [
        ({"images": False}, "images"),
        ({"timeout_s": 9}, "timeout_s"),
        ({"timeout_s": "3h"}, "timeout_s"),
        ({"weights": {**WEIGHTS, "namespace": ""}}, "weights.namespace"),
        ({"weights": {"namespace": "chat"}}, "weights.pod_template"),
    ],
)
def test_invalid_prefetch_is_refused_with_its_field(prefetch: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDocumentError) as raised:
        parse_document(LendingDocument, {"prefetch": prefetch})
    assert raised.value.invalid_fields[0].field == f"prefetch.{field}"


@pytest.mark.parametrize(
    "build",
    [
        lambda: PrefetchPolicy(images=False),
        lambda: PrefetchPolicy(timeout_s=9.0),
        lambda: WeightsTemplate("", "pull-weights"),
        lambda: WeightsTemplate("chat", ""),
    ],
)
def test_domain_checks_prefetches(build: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"lending\.prefetch"):
        build()


def test_way_back_of_no_time_is_refused() -> None:
    document = {"return_deadline_s": 0, "cold_start_s": 300, "standby": {**REQUIRED, "wake_s": 0}}
    with pytest.raises(InvalidDocumentError, match="return_deadline_s"):
        parse_document(LendingDocument, document)


@pytest.mark.parametrize(
    "values",
    [
        {"namespace": ""},
        {"selector": {}},
        {"port": 0},
        {"level": 3},
        {"gpu_memory_bytes": -1},
        {"timeout_s": 0.0},
        {"drain_s": -1.0},
        {"gpus": (0,)},
        {"url": "http://{node}"},
        {"gpu_memory_bytes": 0, "mode": StandbyMode.WARM},
        {"url": "file:///etc", "namespace": "", "selector": {}},
        {"gpus": (1, 0), "url": "http://{node}", "namespace": "", "selector": {}},
        {"mode": StandbyMode.WARM, "url": "http://{node}", "namespace": "", "selector": {}},
    ],
    ids=str,
)
def test_domain_checks_its_values(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"lending\.standby\.{next(iter(values))}"):
        Standby(**{**REQUIRED, **values})
