"""Published resources cause no commands when read back, and no content of a resource stops the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from scheduler.domain.checkpoints import CheckpointSpec
from scheduler.domain.job import Intent, Job
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.api_objects import ELASTIC_JOB, GPU_PROFILE, LOAN, NODE, POOL, QUEUE
from scheduler.kubernetes.resources.elastic_job import build_elastic_job_spec, find_immutable_changes, parse_elastic_job
from tests.builders import a_fleet, a_job, a_loan, a_snapshot
from tests.unit.kubernetes.operator_rig import NOW_S, OperatorRig

_S = st.one_of(st.integers(1, 10**9).map(float), st.floats(1e-6, 1e9, allow_nan=False))
_WORD = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
_LABEL = st.from_regex(r"[a-z]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
_MODEL = st.sampled_from([("", 0, 0), ("gpt2", 8, 0), ("llama-2-7b", 64, 2048)])


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    low = draw(st.integers(1, 64))
    model, batch, length = draw(_MODEL)
    template = draw(st.sampled_from(["", '{"spec":{"containers":[{"command":["x"],"name":"main"}]}}']))
    return JobSpec(
        name=draw(_LABEL),
        min_gpus=low,
        max_gpus=low + draw(st.integers(0, 64)),
        queue=draw(_LABEL),
        priority=draw(st.integers(-1000, 1000)),
        gpu=draw(st.sampled_from(["", "a100-80g"])),
        model=model,
        global_batch=batch,
        sequence_length=length,
        steps=draw(st.integers(0, 10**15)),
        duration_estimate_s=draw(st.none() | _S),
        deadline_s=draw(st.none() | _S),
        run_time_s_max=draw(st.none() | _S),
        retries=draw(st.integers(0, 1000)),
        command=tuple(draw(st.lists(_WORD, min_size=1 if template else 0, max_size=3))),
        image=draw(_WORD),
        env=draw(st.dictionaries(st.sampled_from(["A", "b_2"]), _WORD)),
        checkpoint=CheckpointSpec(draw(_WORD), draw(_S), draw(st.integers(1, 1000))),
        fungible=draw(st.booleans()),
        template_json=template,
    )


@st.composite
def jobs(draw: st.DrawFn, job_id: str) -> Job:
    state = draw(st.sampled_from([JobState.QUEUED, JobState.RUNNING, JobState.SUSPENDED]))
    on = {"t0": (0, 1)} if state is JobState.RUNNING else None
    job = a_job(job_id, 2, 4, state=state, on=on, now_s=NOW_S)
    return replace(job, spec=draw(specs()), intent=draw(st.sampled_from([Intent.RUN, Intent.SUSPEND])))


@given(jobs("a-1"))
def test_job_round_trips_through_its_resource(job: Job) -> None:
    metadata = {"name": job.id, "namespace": "x", "uid": "u", "annotations": {"ebbtide.dev/origin": "api"}}
    read = parse_elastic_job({"metadata": metadata, "spec": build_elastic_job_spec(job)})
    assert read.suspend is (job.intent is Intent.SUSPEND)
    assert (read.spec.min_gpus, read.spec.max_gpus) == (job.spec.min_gpus, job.spec.max_gpus)
    assert find_immutable_changes(read.spec, job) == ()


@given(jobs("a-1"), jobs("b-2"), st.booleans())
@settings(max_examples=50, deadline=None)
def test_published_resources_cause_no_commands_and_no_writes(first: Job, second: Job, is_lent: bool) -> None:
    loans = [a_loan("i0")] if is_lent else []
    rig = OperatorRig(snapshot=a_snapshot(a_fleet(training=1, inference=1), [first, second], loans, now_s=NOW_S))
    rig.write()
    assert rig.compute_commands().commands == ()
    assert rig.compute_writes() == ()
    grown = replace(second, spec=replace(second.spec, max_gpus=second.spec.max_gpus + 1))
    rig.snapshot = replace(rig.snapshot, jobs={first.id: first, second.id: grown})
    rig.write()
    assert rig.compute_commands().commands == ()
    assert rig.compute_writes() == ()


_JSON: SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = (
    *("name", "namespace", "gpus", "suspend", "managedBy", "model", "profile", "globalBatch", "template", "env"),
    *("checkpoint", "command", "deadline", "kind", "nodeSelector", "lending", "demand", "gpu", "gpuMemory"),
    *("guaranteed", "limit", "weight", "phase", "jobId", "conditions", "observedGeneration", "asOf", "endedAt"),
    *("cordonedNodes", "state", "stateSince", "allocatable", "unschedulable", "progress", "allocation", "plan"),
)
_VALID_PARTS = st.sampled_from(
    [{"min": 1, "max": 2}, "inference", {"role": "x"}, "5m", {"source": "push"}, ["x"], {"spec": {"containers": [{}]}}]
)
_PART = _JSON | st.dictionaries(st.sampled_from(_FIELDS), _JSON | _VALID_PARTS, max_size=6)


@given(st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
def test_any_json_in_spec_and_status_is_handled(data: st.DataObject) -> None:
    rig = OperatorRig(snapshot=a_snapshot(a_fleet(training=1, inference=1), [a_job("a-1", 2)], now_s=NOW_S))
    rig.write()
    for kind in (ELASTIC_JOB, POOL, QUEUE, GPU_PROFILE, LOAN, NODE):
        for name in ("x", "training"):
            resource = rig.server.add(kind, name, data.draw(_PART), namespace="jobs" if kind.is_namespaced else "")
            resource["status"] = data.draw(_PART)
            resource["metadata"]["labels"] = {"role": "x"}
    own = rig.server.get(ELASTIC_JOB, "a-1", "jobs")
    own["spec"], own["status"] = data.draw(_PART), data.draw(_PART)
    rig.run_until_stable()
