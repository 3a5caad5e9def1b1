"""Arbitrary JSON as a pod template is rejected, or yields valid pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.job import parse_job
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.agent_injection import AgentImage
from scheduler.kubernetes.manifests import ManifestContext, build_agent_pod
from scheduler.kubernetes.pod_changes import PodToCreate
from scheduler.kubernetes.resources.elastic_job_status import build_checkpoints_condition
from tests.builders import a_job

SITE = ManifestContext("harbour", 7, "http://ebbtide:8787", "ebbtide/worker:1", AgentImage("ebbtide/agent:1"))
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def mostly(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Generate a valid value nine times out of ten."""
    return st.integers(0, 9).flatmap(lambda drawn: inner if drawn else ODD)


def some(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Generate objects with any of the fields, each valid or odd."""
    return st.fixed_dictionaries({}, optional={name: mostly(inner) for name, inner in fields.items()})


def many(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(mostly(inner), max_size=2)


AMOUNTS = st.dictionaries(st.sampled_from(["cpu", "memory", "hugepages", "nvidia.com/gpu"]), ODD, max_size=1)
MOUNT = some(name=st.just("kept"), mountPath=st.sampled_from(["/checkpoints", "/dev/shm", "/etc/ebbtide"]))
CONTAINER = some(
    env=many(some(name=st.text(max_size=3))),
    volumeMounts=many(MOUNT),
    resources=some(requests=AMOUNTS, limits=AMOUNTS),
    command=many(st.text(max_size=3)),
    args=many(st.text(max_size=3)),
    image=st.text(max_size=3),
)
TERMS = many(some(matchFields=many(some(key=st.just("a"))), matchExpressions=ODD))
REQUIRED = some(requiredDuringSchedulingIgnoredDuringExecution=some(nodeSelectorTerms=TERMS))
SPEC = st.fixed_dictionaries(
    {"containers": mostly(st.lists(CONTAINER, min_size=1, max_size=2))},
    optional={
        "initContainers": mostly(many(CONTAINER)),
        "volumes": mostly(many(some(name=st.just("kept"), emptyDir=ODD, nfs=ODD))),
        "tolerations": mostly(many(some(key=ODD))),
        "affinity": mostly(some(nodeAffinity=REQUIRED)),
    },
)
METADATA = some(labels=st.just({"a": "b"}), annotations=st.just({}))
TEMPLATE = st.fixed_dictionaries({"spec": mostly(SPEC)}, optional={"metadata": mostly(METADATA)})


@given(TEMPLATE, st.booleans())
def test_template_is_rejected_or_yields_pods(template: dict[str, Any], has_volume: bool) -> None:
    volume = {"volume": {"persistentVolumeClaim": {"claimName": "shared"}}} if has_volume else {}
    document = {"name": "a", "gpus": {"min": 1, "max": 1}, "template": template, "checkpoint": volume}
    try:
        spec = parse_job(document)
    except InvalidDocumentError:
        return
    job = a_job("a", 1, state=JobState.STARTING, on={"t0": (0,)})
    pod = build_agent_pod(replace(job, spec=spec), PodToCreate("a", "a-g1-0", "t0", 1), SITE)
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert build_checkpoints_condition(spec).reason


@pytest.mark.parametrize("name", ["volumes", "tolerations", "initContainers"])
def test_accepted_template_is_well_formed(name: str) -> None:
    document = {"name": "a", "gpus": {"min": 1, "max": 1}, "template": {"spec": {"containers": [{}], name: 7}}}
    with pytest.raises(InvalidDocumentError, match=rf"template\.spec\.{name}: got 7; allowed: a list"):
        parse_job(document)
