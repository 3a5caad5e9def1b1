"""The codec on every dataclass of the domain. New dataclasses are found automatically."""

from __future__ import annotations

import json
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from scheduler import domain
from scheduler.domain.checkpoints import CheckpointSpec, CheckpointVolume
from scheduler.domain.codec import CodecError, decode, decode_as, encode, encode_as
from scheduler.domain.commands import Command, CommandBody
from scheduler.domain.decisions import Decision, Reason, ReasonCode
from scheduler.domain.demand_source import (
    BURSTINESS_MAX,
    BURSTINESS_MIN,
    LENGTH_SERVERS,
    RATE_WINDOW_S_MAX,
    RATE_WINDOW_S_MIN,
    DemandQuery,
    DemandUnit,
    InferenceServer,
    ModelRequests,
    PrometheusDemand,
    RequestQueries,
    ServerLoad,
    ServerRequests,
)
from scheduler.domain.fleet import NETWORK_BYTES_PER_S_MAX, Forecast, Node, Pool, PoolNetwork
from scheduler.domain.gpu_sets import GpuGroup, GpuShape
from scheduler.domain.job import Job, Progress
from scheduler.domain.job_queue import JobQueue
from scheduler.domain.job_records import MemoryRecord
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.domain.known_events import FACTOR_MAX, KnownEvent
from scheduler.domain.lending_policy import PROFILE_HOURS, Blackout, LendingMode, LendingPolicy
from scheduler.domain.parallel_plan import LayerStrategy, ParallelPlan, Schedule, Stage
from scheduler.domain.plan_limits import DEGREES, PlanDimension, PlanLimits
from scheduler.domain.prefetch import PrefetchPolicy, WeightsTemplate
from scheduler.domain.program import Program
from scheduler.domain.run_document import LaunchMode
from scheduler.domain.scaling_curve import Curve, LinearCurve, ScalingCurve
from scheduler.domain.secret_reference import KubernetesSecretKey, SecretReference
from scheduler.domain.serving import SizingPolicy
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.standby import LEVELS, Standby, StandbyMode

_COUNT = st.integers(min_value=1, max_value=2**63)
_NAME = st.text(min_size=1, max_size=8)
_ZONE = "Europe/Berlin"
ENGINE_URL = "http://{node}:8000"
_POSITIVE_S = st.floats(min_value=1e-9, allow_infinity=False)


def _dataclasses() -> list[type]:
    modules = [import_module(f"scheduler.domain.{each.name}") for each in pkgutil.iter_modules(domain.__path__)]
    return [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
    ]


@st.composite
def _plans(draw: st.DrawFn) -> ParallelPlan:
    layers = draw(st.lists(st.builds(LayerStrategy, layers=_COUNT, tp=st.integers(1, 4)), min_size=1, max_size=2))
    stages = tuple(Stage(at, at, draw(st.text()), layer.gpus, (layer,)) for at, layer in enumerate(layers))
    step_s, samples_per_s = (draw(st.floats(allow_nan=False)) for _ in range(2))
    peaks = tuple(draw(st.lists(st.tuples(st.text(), _COUNT), max_size=2)))
    return ParallelPlan(
        draw(_values(Schedule)),
        draw(_COUNT),
        draw(_COUNT),
        step_s,
        samples_per_s,
        peak_bytes_per_gpu=0,
        stages=stages,
        peak_bytes_by_model=peaks,
    )


@st.composite
def _forecasts(draw: st.DrawFn) -> Forecast:
    levels = sorted(draw(st.lists(st.floats(0.1, 0.9), min_size=1, max_size=3)))
    gpus = tuple(draw(st.floats(allow_nan=False)) for _ in levels)
    return Forecast(draw(st.floats(allow_nan=False)), draw(_POSITIVE_S), tuple(levels), gpus, draw(st.text()))


def _prefetches() -> SearchStrategy[PrefetchPolicy]:
    weights = st.none() | st.builds(WeightsTemplate, namespace=_NAME, pod_template=_NAME)
    return st.builds(PrefetchPolicy, images=st.just(True), weights=weights, timeout_s=st.floats(10.0, 7200.0))


@st.composite
def _job_specs(draw: st.DrawFn) -> JobSpec:
    free = ("name", "queue", "gpu", "model", "priority", "command", "env", "checkpoint", "fungible", "program")
    hints = get_type_hints(JobSpec)
    low, high = sorted((draw(_COUNT), draw(_COUNT)))
    duration_s = draw(st.none() | _POSITIVE_S)
    values = {name: draw(_values(hints[name])) for name in free}
    labels = draw(st.dictionaries(st.sampled_from(["team", "example.com/tier"]), st.sampled_from(["", "a", "x.y-z"])))
    return JobSpec(min_gpus=low, max_gpus=high, global_batch=8, duration_estimate_s=duration_s, labels=labels, **values)


def _standbys() -> SearchStrategy[Standby]:
    common: dict[str, SearchStrategy[Any]] = {
        "port": st.integers(1, 65_535),
        "level": st.sampled_from(LEVELS),
        "gpu_memory_bytes": _COUNT,
        "host_memory_bytes": _COUNT,
        "wake_s": st.none() | _POSITIVE_S,
        "timeout_s": st.floats(0.1, 3600.0),
        "drain_s": st.floats(0.0, 3600.0),
    }
    pods = {"namespace": _NAME, "selector": st.just({"app": "llm"}), "mode": st.sampled_from(StandbyMode)}
    gpus = st.sampled_from([(), (0,), (1, 3)])
    return st.builds(Standby, **pods, **common) | st.builds(Standby, url=st.just(ENGINE_URL), gpus=gpus, **common)


def _model_requests() -> SearchStrategy[ModelRequests]:
    queries = RequestQueries("sum(rate)"), ServerRequests(InferenceServer.VLLM, {"namespace": "chat"})
    return st.builds(
        ModelRequests,
        model=_NAME,
        queries=st.sampled_from(queries),
        correlation=st.floats(-1.0, 1.0),
        arrival_scv=st.floats(BURSTINESS_MIN, BURSTINESS_MAX),
        replicas=st.sampled_from(["", "sum(up)"]),
    )


_CONSTRAINED: dict[Any, SearchStrategy[Any]] = {
    ParallelPlan: _plans(),
    Forecast: _forecasts(),
    JobSpec: _job_specs(),
    GpuGroup: st.builds(GpuGroup, gpu=st.text(), nodes=_COUNT, gpus_per_node=_COUNT),
    Node: st.builds(Node, gpus=_COUNT, gpu_memory_bytes=_COUNT),
    JobQueue: st.builds(JobQueue, name=st.text(), limit_gpus=st.none() | _COUNT, weight=_POSITIVE_S),
    MemoryRecord: st.builds(MemoryRecord, percent=st.integers(70, 900), retry_at_s=st.none() | _POSITIVE_S),
    Program: st.builds(
        Program,
        archive=st.sampled_from([f"sha256:{'0' * 64}", f"sha256:{'f' * 64}"]),
        setup=st.lists(st.text(), min_size=1, max_size=2).map(tuple),
        venv=st.sampled_from(["", "/opt/venv", ".venv"]),
        launch=st.sampled_from(LaunchMode),
    ),
    CheckpointSpec: st.builds(
        CheckpointSpec,
        dir=st.text(),
        interval_s=_POSITIVE_S,
        keep=_COUNT,
        volume=st.none() | st.builds(CheckpointVolume),
    ),
    PlanLimits: st.builds(
        PlanLimits,
        excluded=st.lists(st.sampled_from(PlanDimension), max_size=3).map(tuple),
        degrees_max=st.lists(st.tuples(st.sampled_from(DEGREES), _COUNT), max_size=2).map(tuple),
        micro_batches_min=st.integers(1, 4),
        micro_batches_max=st.none() | st.integers(4, 8),
        replica_samples_max=st.none() | _COUNT,
    ),
    SecretReference: st.one_of(
        st.builds(SecretReference, name=_NAME, env=_NAME),
        st.builds(SecretReference, kubernetes=st.builds(KubernetesSecretKey, _NAME, _NAME), file=st.just("token.txt")),
    ),
    PoolNetwork: st.builds(
        PoolNetwork,
        bandwidth_bytes_per_s=st.floats(1e9, NETWORK_BYTES_PER_S_MAX),
        latency_s=st.floats(1e-6, 1e-3),
        nics_per_node=st.integers(1, 8),
    ),
    Blackout: st.builds(
        Blackout, start_s=_POSITIVE_S, end_s=_POSITIVE_S, cron=st.text(), time_zone=st.sampled_from(["", _ZONE])
    ),
    KnownEvent: st.one_of(
        st.builds(KnownEvent, duration_s=_POSITIVE_S, gpus=st.floats(0.0, 1e6)),
        st.builds(KnownEvent, duration_s=_POSITIVE_S, factor=st.floats(1.0, FACTOR_MAX)),
    ),
    SizingPolicy: st.builds(
        SizingPolicy,
        replicas_min=st.integers(0, 4),
        replicas_max=st.none() | st.integers(4, 8),
        start_s=_POSITIVE_S,
        stabilization_s=_POSITIVE_S,
    ),
    Standby: _standbys(),
    WeightsTemplate: st.builds(WeightsTemplate, namespace=_NAME, pod_template=_NAME),
    PrefetchPolicy: _prefetches(),
    LendingPolicy: st.builds(
        LendingPolicy,
        quantile=st.floats(0.01, 0.99),
        shortage_target=st.none(),
        headroom=st.floats(0.0, 0.99),
        return_deadline_s=st.floats(3601.0, allow_infinity=False) | st.just(math.inf),
        cold_start_s=_POSITIVE_S,
        lent_nodes_max=st.none() | _COUNT,
        demand_stale_s=st.none() | _POSITIVE_S,
        time_zone=st.sampled_from(["UTC", _ZONE]),
        demand_profile=st.sampled_from([(), (1.5,) * PROFILE_HOURS[0], (0.0,) * PROFILE_HOURS[1]]),
        demand_lost_s=st.none() | st.just(math.inf),
        mode=st.sampled_from(LendingMode),
        notice_s=_POSITIVE_S,
        veto_s=_POSITIVE_S,
        standby=st.none() | _standbys(),
        prefetch=st.none() | _prefetches(),
    ),
    DemandQuery: st.one_of(
        st.builds(DemandQuery, promql=st.just("sum(gpus)"), sums_series=st.booleans()),
        st.builds(DemandQuery, promql=st.just("nodes"), unit=st.just(DemandUnit.NODES), gpus_each=st.floats(0.5, 16.0)),
    ),
    ServerLoad: st.builds(
        ServerLoad,
        server=st.just(InferenceServer.VLLM),
        selector=st.just({"namespace": "chat"}),
        gpus_each=st.floats(0.5, 16.0),
        requests_each=st.floats(1.0, 512.0),
        replicas_min=st.integers(0, 4),
    ),
    RequestQueries: st.one_of(
        st.just(RequestQueries("sum(rate)")), st.just(RequestQueries("sum(rate)", "prompts", "outputs"))
    ),
    ServerRequests: st.builds(
        ServerRequests,
        server=st.sampled_from(LENGTH_SERVERS),
        selector=st.just({"namespace": "chat"}),
        window_s=st.floats(RATE_WINDOW_S_MIN, RATE_WINDOW_S_MAX),
    ),
    ModelRequests: _model_requests(),
    PrometheusDemand: st.one_of(
        st.builds(
            PrometheusDemand,
            terms=st.just((DemandQuery("sum(gpus)"), ServerLoad(InferenceServer.KSERVE))),
            stale_after_s=_POSITIVE_S,
        ),
        st.builds(PrometheusDemand, stale_after_s=_POSITIVE_S, requests=st.tuples(_model_requests())),
    ),
}
_PLAIN: dict[Any, SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    int: st.integers(),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    NoneType: st.none(),
}


@cache  # Hypothesis validates each strategy once
def _values(hint: Any) -> SearchStrategy[Any]:
    """Values of a type, including infinite floats. `_CONSTRAINED` lists the types that reject some values."""
    if (known := _CONSTRAINED.get(hint, _PLAIN.get(hint))) is not None:
        return known
    arguments = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return st.one_of([_values(member) for member in arguments])
    if get_origin(hint) is tuple:
        items = [_values(each) for each in arguments if each is not Ellipsis]
        return st.lists(items[0], max_size=2).map(tuple) if Ellipsis in arguments else st.tuples(*items)
    if isinstance(origin := get_origin(hint), type) and issubclass(origin, Mapping):
        return st.dictionaries(_values(arguments[0]), _values(arguments[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    hints = get_type_hints(hint)
    encoded = [field.name for field in fields(hint) if not field.metadata.get("derived")]
    return st.builds(hint, **{name: _values(hints[name]) for name in encoded})


@pytest.mark.parametrize("kind", _dataclasses(), ids=lambda kind: kind.__name__)
def test_every_dataclass_round_trips_through_json(kind: type) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(_values(kind))
    def round_trips(value: object) -> None:
        assert decode(kind, json.loads(json.dumps(encode(value), allow_nan=False))) == value

    round_trips()


@pytest.mark.parametrize("union", [CommandBody, Decision, Curve], ids=["CommandBody", "Decision", "Curve"])
def test_every_member_of_a_union_round_trips(union: Any) -> None:
    members = get_args(union)

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.tuples(*map(_values, members)))
    def round_trip(values: tuple[object, ...]) -> None:
        for member, value in zip(members, values, strict=True):
            document = encode_as(union, value)
            assert document["kind"] == member.__name__
            assert decode_as(union, document) == value

    round_trip()


def test_infinities_are_written_as_strings() -> None:
    document = encode(Snapshot(now_s=math.inf))
    assert (document["now_s"], document["full_pass_at_s"]) == ("inf", "-inf")
    assert decode(Snapshot, document).full_pass_at_s == -math.inf


def test_not_a_number_round_trips() -> None:
    assert math.isnan(decode(Progress, encode(Progress(at_s=math.nan))).at_s)


def test_integer_is_accepted_as_a_float() -> None:
    at_s = decode(Progress, {"at_s": 3}).at_s
    assert at_s == 3.0
    assert isinstance(at_s, float)


def test_missing_fields_get_their_default() -> None:
    assert decode(Pool, {"name": "train", "kind": "training"}) == decode(Pool, encode(decode(Pool, _POOL)))


def test_value_without_a_json_form_is_rejected() -> None:
    with pytest.raises(TypeError, match="cannot encode complex"):
        encode_as(Progress, Progress(at_s=1j))  # type: ignore[arg-type]  # the mistake under test


_POOL = {"name": "train", "kind": "training"}
_JOB = encode(Job("j", JobSpec("j", 1, 2), JobState.QUEUED, 0.0, 0.0, Progress(0.0)))
_SHAPE = encode(GpuShape.packed("a100-80g", 8, 8))
_START = encode_as(
    Decision,
    decode_as(
        Decision,
        {
            "kind": "LendNode",
            "node": "i0",
            "reason": encode(Reason(ReasonCode.GAIN_EXCEEDS_COST, "worth it")),
        },
    ),
)


def _changed(document: Any, **fields: Any) -> Any:
    return {**document, **fields}


@pytest.mark.parametrize(
    ("hint", "document", "message"),
    [
        (Pool, [], r"\$: expected dict, got \[\]"),
        (Pool, {"name": "train"}, r"\$: field 'kind' is missing"),
        (Pool, _changed(_POOL, color="red"), r"\$: unknown field 'color'; allowed: name, kind, lending"),
        (Pool, _changed(_POOL, kind="lake"), r"\$\.kind: 'lake' is not one of training, inference"),
        (Pool, _changed(_POOL, kind=[]), r"\$\.kind: \[\] is not one of training, inference"),
        (Pool, _changed(_POOL, name=7), r"\$\.name: expected str, got 7"),
        (Pool, _changed(_POOL, lending={"headroom": "2%"}), r"\$\.lending\.headroom: expected float, got '2%'"),
        (Pool, _changed(_POOL, lending={"headroom": True}), r"\$\.lending\.headroom: expected float, got True"),
        (Pool, _changed(_POOL, lending={"headroom": 10**400}), r"\$\.lending\.headroom: the number is too large"),
        (Pool, _changed(_POOL, lending={"enabled": 1}), r"\$\.lending\.enabled: expected bool, got 1"),
        (Pool, _changed(_POOL, lending={"lent_nodes_max": 1.5}), r"\$\.lending\.lent_nodes_max: expected int, got 1.5"),
        (Pool, _changed(_POOL, lending={"blackouts": [{}]}), r"\$\.lending\.blackouts\[0\]: field 'start_s'"),
        (Pool, _changed(_POOL, lending={"headroom": 2}), r"\$\.lending: lending\.headroom must be at least 0"),
        (Job, _changed(_JOB, state="asleep"), r"\$\.state: 'asleep' is not one of submitted, "),
        (Job, _changed(_JOB, allocation={"target": {"t0": [0, "1"]}}), r"\$\.allocation\.target\.t0\[1\]: expected"),
        (Job, _changed(_JOB, allocation={"target": [["t0", [0]]]}), r"\$\.allocation\.target: expected dict"),
        (Job, _changed(_JOB, spec=None), r"\$\.spec: expected dict, got None"),
        (ScalingCurve, {"plans": {}}, r"\$\.plans: expected list"),
        (ScalingCurve, {"infeasible": [[_SHAPE]]}, r"\$\.infeasible: expected a list of pairs"),
        (ScalingCurve, {"infeasible": [[_SHAPE, 7]]}, r"\$\.infeasible\[1x8 a100-80g\]: expected str, got 7"),
        (ScalingCurve, {"infeasible": [[{}, ""]]}, r"\$\.infeasible\.key: field 'groups' is missing"),
        (ScalingCurve, {"infeasible": [[_SHAPE, ""], [_SHAPE, "x"]]}, r"\$\.infeasible: duplicate key"),
        (Decision, _changed(_START, kind="SinkNode"), r"\$\.kind: 'SinkNode' is not one of CancelRecall, LendNode"),
        (Decision, _changed(_START, kind=["LendNode"]), r"\$\.kind: \['LendNode'\] is not one of"),
        (Decision, None, r"\$: expected dict, got None"),
        (Command, {"id": "c", "at_s": 0, "body": {"kind": "RemoveNode"}}, r"\$\.body: field 'name' is missing"),
        (tuple[str, int], ["a"], r"\$: expected 2 items, got 1"),
        (LinearCurve, "linear", r"\$: expected dict, got 'linear'"),
    ],
)  # fmt: skip
def test_malformed_document_is_rejected_with_the_path_of_its_field(hint: Any, document: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode_as(hint, document)
