"""Pod templates of jobs: validation, and rendering of every valid template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.job import parse_job, to_job_document
from scheduler.documents.job_secrets import find_credential_warnings
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.agent_injection import AgentImage
from scheduler.kubernetes.manifests import ManifestContext, build_agent_pod
from scheduler.kubernetes.pod_changes import plan_pod_changes
from tests.builders import a_job
from tests.pod_rule_cases import ACCEPTED, REJECTED, affinity
from tools.pod_template_schema import TARGET, build_schema

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "harbour"}},
    "spec": {"containers": [{"name": "train", "image": "tide:1", "command": ["python"], "args": ["train.py", "--x"]}]},
}


def job(template: object, **more: object) -> dict[str, object]:
    return {"name": "a", "gpus": {"min": 1, "max": 2}, "template": template, **more}


def test_first_container_sets_command_and_image() -> None:
    spec = parse_job(job(TEMPLATE))
    assert spec.command == ("python", "train.py", "--x")
    assert spec.image == "tide:1"
    assert parse_job(to_job_document(spec)) == spec


def test_command_and_image_of_the_job_take_precedence() -> None:
    spec = parse_job(job(TEMPLATE, command=["bash", "run.sh"], image="other:2"))
    assert (spec.command, spec.image) == (("bash", "run.sh"), "other:2")


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({}, "spec: got nothing"),
        ({"spec": {"containers": []}}, "spec.containers"),
        ({"spec": {"containers": ["train"]}}, r"spec.containers\[0\]"),
        ({"spec": {"containers": [{"command": "python"}]}}, r"spec.containers\[0\].command"),
        ({"spec": {"containers": [{}], "schedulerName": "default-scheduler"}}, "spec.schedulerName"),
        ({"spec": {"containers": [{}], "nodeName": "n7"}}, "spec.nodeName"),
        ({"kind": "Pod", "spec": {"containers": [{}]}}, "kind"),
        ({"spec": {"containers": [{}], "volumes": "data"}}, "spec.volumes: got"),
        ({"spec": {"containers": [{}], "tolerations": ["all"]}}, r"spec.tolerations\[0\]"),
        ({"spec": {"containers": [{"env": {"A": "1"}}]}}, r"spec.containers\[0\].env: got"),
        ({"spec": {"containers": [{"env": [{"name": ["A"]}]}]}}, r"spec.containers\[0\].env\[0\].name"),
        ({"spec": {"containers": [{"resources": "many"}]}}, r"spec.containers\[0\].resources"),
        ({"spec": {"containers": [{}], "affinity": {"nodeAffinity": 3}}}, "spec.affinity.nodeAffinity: got 3"),
        ({"metadata": {"labels": {"team": 7}}, "spec": {"containers": [{}]}}, r"metadata.labels\[team\]: got 7"),
        (
            {"spec": {"containers": [{"volumeMounts": [{"name": "a", "mountPath": "/etc/ebbtide/"}]}]}},
            r"spec.containers\[0\].volumeMounts: got \"/etc/ebbtide\"",
        ),
        ({"spec": {"containers": [{}], "volumes": [{"name": "ebbtide-run", "emptyDir": {}}]}}, "spec.volumes"),
        (
            {"spec": {"containers": [{"imagePulPolicy": "Always"}]}},
            r"spec.containers\[0\].imagePulPolicy.*imagePullPolicy",
        ),
        (
            {"spec": {"containers": [{}], "terminationGracePeriodSeconds": -1}},
            "spec.terminationGracePeriodSeconds: got -1",
        ),
        ({"spec": {"containers": [{}], **affinity("Gt", "many")}}, r"spec.affinity.*values: got \"many\""),
        ({"spec": {"containers": [{"env": [{"name": "RANK", "value": "0"}]}]}}, r"spec.containers\[0\].env\[0\].name"),
        ({"spec": {"containers": [{}], "nodeSelecter": {"zone": "a"}}}, "spec.nodeSelecter.*nodeSelector"),
        ({"spec": {"containers": [{"stdin": "yes"}]}}, r"spec.containers\[0\].stdin: got \"yes\""),
        ({"spec": {"containers": [{}], "terminationGracePeriodSeconds": "30"}}, "spec.terminationGracePeriodSeconds"),
        ({"spec": {"containers": [{}], "nodeSelector": {"zone": 3}}}, r"spec.nodeSelector\[zone\]: got 3"),
    ],
)
def test_missing_or_reserved_field_is_named(template: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDocumentError, match=f"template.{field}"):
        parse_job(job(template))


@pytest.mark.parametrize(("spec", "field"), REJECTED)
def test_pod_that_the_api_server_would_reject_is_refused(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidDocumentError, match=f"template.spec.{field}"):
        parse_job(job({"spec": spec}, command=["python"]))


@pytest.mark.parametrize("spec", ACCEPTED)
def test_pod_that_the_api_server_accepts_is_accepted(spec: dict[str, Any]) -> None:
    assert parse_job(job({"spec": spec}, command=["python"])).template_json


def test_sidecar_may_mount_the_volumes_of_ebbtide() -> None:
    sidecar = {"name": "sync", "image": "x", "volumeMounts": [{"name": "ebbtide-checkpoints", "mountPath": "/c"}]}
    assert parse_job(job({"spec": {"containers": [{}, sidecar]}}, command=["python"])).command


def test_quantities_and_ports_may_be_numbers() -> None:
    container = {"resources": {"limits": {"cpu": 4, "memory": "8Gi"}}, "livenessProbe": {"httpGet": {"port": 80}}}
    volumes = [{"name": "scratch", "emptyDir": {"sizeLimit": 2**30}}]
    assert parse_job(job({"spec": {"containers": [container], "volumes": volumes}}, command=["python"])).command


def test_the_known_fields_are_those_of_the_installed_kubernetes_client() -> None:
    assert TARGET.read_text(encoding="utf-8") == build_schema()


def test_null_fields_count_as_absent_when_render() -> None:
    """As in the API server: an empty `volumes:` is common in YAML."""
    container = {"command": None, "image": None, "env": None, "volumeMounts": None, "resources": None}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": None}}}
    spec = {"containers": [container], "volumes": None, "tolerations": None, "affinity": affinity}
    template = {"metadata": {"labels": None, "annotations": {"note": None}}, "spec": spec}
    read = parse_job(job(template, command=["python"]))
    assert read.command == ("python",)
    made = render(read)
    assert made["spec"]["containers"][0]["image"] == "worker"
    assert "note" not in made["metadata"]["annotations"]


def render(spec: JobSpec) -> dict[str, Any]:
    """Render the agent pod of a job with this specification."""
    running = replace(a_job("a", 1, 2, state=JobState.STARTING, on={"t0": (0,)}), spec=spec)
    (new,) = plan_pod_changes(running, [], 0.0).create
    return build_agent_pod(running, new, ManifestContext("harbour", 1, "http://api", "worker", AgentImage("agent")))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "a", "main"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "requests", "limits", "matchFields", "a"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def _object(*names: str, **known: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={**dict.fromkeys(names, _JSON), **known})


_CONTAINER = _object("command", "args", "image", "name", "env", "volumeMounts", "resources")
_TERMS = st.lists(_JSON | _object("matchFields", "matchExpressions"), max_size=2)
_REQUIRED = _object(requiredDuringSchedulingIgnoredDuringExecution=_JSON | _object(nodeSelectorTerms=_JSON | _TERMS))
_SPEC = _object(
    "volumes",
    "tolerations",
    "initContainers",
    containers=st.lists(_CONTAINER, min_size=1, max_size=2),
    affinity=_JSON | _object(nodeAffinity=_JSON | _REQUIRED),
)
_TEMPLATE = _object(metadata=_JSON | _object("labels", "annotations"), spec=_SPEC)


@given(_TEMPLATE)
def test_valid_template_can_be_rendered(template: dict[str, Any]) -> None:
    """A template that fails to render would stop the operator for all jobs."""
    try:
        spec = parse_job(job(template, command=["python"]))
    except InvalidDocumentError:
        return
    assert render(spec)["spec"]["schedulerName"] == "ebbtide"


@pytest.mark.parametrize("kind", ["requests", "limits"])
@pytest.mark.parametrize("group", ["containers", "initContainers"])
@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"])
def test_gpu_request_in_a_template_is_rejected(kind: str, group: str, resource: str) -> None:
    container = {"name": "train", "resources": {kind: {resource: 8}}}
    spec = {"containers": [{}], group: [container]}
    with pytest.raises(InvalidDocumentError, match=rf"{group}.*resources.*got 8"):
        parse_job(job({"spec": spec}))


def test_null_fields_are_equal_to_absent_fields() -> None:
    container = {"command": ["x"], "args": None, "env": None, "resources": {"limits": None}}
    spec = {"containers": [container], "volumes": None, "schedulerName": None, "affinity": {"nodeAffinity": None}}
    plain = {"spec": {"containers": [{"command": ["x"], "resources": {}}], "affinity": {}}}
    assert parse_job(job({"metadata": None, "spec": spec})) == parse_job(job(plain))


@pytest.mark.parametrize("field", ["containers", "initContainers"])
def test_credentials_in_variables_of_any_container_are_warned_about(field: str) -> None:
    container = {"name": "fetch", "image": "tide:1", "env": [{"name": "HF_TOKEN", "value": "hf_" + "a" * 24}]}
    spec = parse_job(job({"spec": {**TEMPLATE["spec"], field: [container]}}, command=["python"]))
    [warning] = find_credential_warnings(spec)
    assert f"`template.spec.{field}[0].env[HF_TOKEN]`" in warning
