"""GpuProfiles: their figures reach the state, and their statuses say which are in effect."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from scheduler.domain.commands import Command, SetGpuProfile
from scheduler.domain.hardware import GpuProfile
from scheduler.kubernetes.api_objects import GPU_PROFILE, POOL
from scheduler.kubernetes.event_recorder import index_event_objects
from scheduler.kubernetes.resources.gpu_profile import build_gpu_profile
from scheduler.solver.profiles.catalog import read_gpu_json
from tests.builders import a_job
from tests.unit.kubernetes.operator_rig import NAMESPACE, NOW_S, OperatorRig

GPU = "a100-80g"
PROFILE: dict[str, Any] = json.loads(read_gpu_json(GPU))
SPEC = build_gpu_profile(GPU, PROFILE)["spec"]


def start(name: str = GPU, **changes: Any) -> OperatorRig:
    """Return a rig with a Pool of one node, and the GpuProfile."""
    rig = OperatorRig()
    rig.server.add(POOL, "training", {"kind": "training", "nodeSelector": {"role": "train"}})
    rig.add_node("t0", {"role": "train"})
    rig.run_until_stable()
    rig.server.add(GPU_PROFILE, name, {**SPEC, **changes})
    return rig


def status(rig: OperatorRig, name: str = GPU) -> dict[str, Any]:
    found: dict[str, Any] = rig.server.get(GPU_PROFILE, name)["status"]
    return found


def condition(rig: OperatorRig, name: str = GPU) -> tuple[str, str, str]:
    (found,) = status(rig, name)["conditions"]
    return found["status"], found["reason"], found["message"]


def stored(rig: OperatorRig, name: str = GPU) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(rig.snapshot.gpu_profiles[name].profile_json)
    return found


def test_profile_is_set_changed_and_deleted() -> None:
    rig = start()
    assert rig.run_round() == ["SetGpuProfile"]
    rig.run_until_stable()
    assert stored(rig) == PROFILE
    assert rig.snapshot.gpu_profiles[GPU].set_by == "kubernetes"
    assert condition(rig)[:2] == ("True", "Accepted")
    assert (status(rig)["version"], status(rig)["appliedGeneration"], status(rig)["nodes"]) == (1, 1, 1)
    rig.server.change(GPU_PROFILE, GPU, efficiency=0.5)
    assert rig.run_round() == ["SetGpuProfile"]
    rig.run_until_stable()
    assert stored(rig)["efficiency"] == 0.5
    assert (status(rig)["version"], status(rig)["appliedGeneration"]) == (2, 2)
    rig.server.delete(GPU_PROFILE, GPU)
    assert rig.run_round() == ["DeleteGpuProfile"]
    rig.write()
    assert (rig.snapshot.gpu_profiles, rig.server.resources().gpu_profiles) == ({}, ())


def test_order_of_fields_is_no_change() -> None:
    rig = start()
    rig.run_until_stable()
    resource = rig.server.get(GPU_PROFILE, GPU)
    resource["spec"] = dict(sorted(resource["spec"].items()))
    assert rig.run_round() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memoryBytes": -1}, "memoryBytes is -1"),
        ({"memoryBytes": None}, "memoryBytes is None"),
        ({"efficiency": {"value": 0.5, "unit": "flop/s"}}, "efficiency is in 'flop/s'"),
        ({"efficency": 0.5}, "did you mean 'efficiency'"),
        ({"collectives": "x" * 300_000}, "spec: got"),
        ({"gpu": "other"}, "gpu: there is no such field"),
    ],
)
def test_invalid_profile_keeps_the_one_before(changes: dict[str, Any], words: str) -> None:
    rig = start()
    rig.run_until_stable()
    resource = rig.server.get(GPU_PROFILE, GPU)
    resource["spec"] = {**SPEC, **changes}
    resource["metadata"]["generation"] = 2
    assert rig.run_round() == []
    holds, reason, message = condition(rig)
    assert (holds, reason, words in message) == ("False", "Refused", True), message
    assert (status(rig)["version"], status(rig)["appliedGeneration"]) == (1, 1)
    assert status(rig)["observedGeneration"] == 2


def test_missing_figure_is_named_as_in_the_spec() -> None:
    rig = OperatorRig()
    rig.server.add(GPU_PROFILE, "mine", {"precision": "bf16"})
    rig.run_until_stable()
    assert "'dimensions' is missing" in condition(rig, "mine")[2]
    assert (status(rig, "mine").get("version"), status(rig, "mine")["nodes"]) == (None, 0)


def test_resource_overrules_a_profile_that_was_set_over_http() -> None:
    rig = start()
    rig.run_until_stable()
    other = json.dumps({**PROFILE, "efficiency": 0.25})
    rig.send(Command("http-1", NOW_S, SetGpuProfile(GPU, other), actor="ada"))
    rig.apply_inbox()
    assert stored(rig)["efficiency"] == 0.25
    assert rig.run_round() == ["SetGpuProfile"]
    assert (stored(rig), rig.snapshot.gpu_profiles[GPU].version) == (PROFILE, 3)


def test_profile_without_a_resource_is_left_alone() -> None:
    rig = OperatorRig()
    profile = GpuProfile(GPU, json.dumps(PROFILE), 1, NOW_S)
    rig.snapshot = replace(rig.snapshot, gpu_profiles={GPU: profile})
    assert rig.run_round() == []


def test_deletion_waits_for_the_jobs_of_a_model_without_another_profile() -> None:
    rig = start("mine")
    rig.run_until_stable()
    job = a_job("a-1", 2, gpu="mine", now_s=NOW_S)
    rig.snapshot = replace(rig.snapshot, jobs={job.id: job})
    rig.server.delete(GPU_PROFILE, "mine")
    assert rig.run_round() == []
    holds, reason, message = condition(rig, "mine")
    assert (holds, reason, "1 job need" in message) == ("False", "Deleting", True)
    rig.snapshot = replace(rig.snapshot, jobs={})
    assert rig.run_round() == ["DeleteGpuProfile"]
    rig.write()
    assert rig.server.resources().gpu_profiles == ()


def test_events_are_about_the_resource() -> None:
    rig = start()
    rig.run_until_stable()
    known = index_event_objects(rig.server.resources(), rig.snapshot, job_namespace=NAMESPACE)
    assert known[GPU].kind == GPU_PROFILE
