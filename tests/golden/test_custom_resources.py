"""Custom resources of a job, its loan, its pool and its queue. EBBTIDE_GOLDEN=write rewrites the files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from scheduler.domain.checkpoints import CheckpointSpec, CheckpointVolume
from scheduler.domain.fleet import DemandReading
from scheduler.domain.job import Progress
from scheduler.domain.job_state import JobState
from scheduler.kubernetes.api_objects import ELASTIC_JOB, GPU_PROFILE, LOAN, POOL, QUEUE, ResourceKind
from scheduler.kubernetes.resources.gpu_profile import build_gpu_profile
from scheduler.solver.profiles.catalog import read_gpu_json
from tests.builders import a_job, a_loan
from tests.unit.kubernetes.operator_rig import NAMESPACE, NOW_S, OperatorRig

FOLDER = Path(__file__).parent / "custom_resources"
TOLD = {
    "elastic_job": (ELASTIC_JOB, "llama-abc123", NAMESPACE),
    "loan": (LOAN, "s0-1", ""),
    "pool": (POOL, "serving", ""),
    "queue": (QUEUE, "research", ""),
    "gpu_profile": (GPU_PROFILE, "t4", ""),
}


@pytest.fixture
def rig() -> OperatorRig:
    """A job from HTTP on a node of training's and one that `serving` lends, beside a node without a known GPU."""
    rig = OperatorRig()
    rig.server.add(POOL, "training", {"kind": "training", "nodeSelector": {"role": "train"}})
    rig.server.add(POOL, "serving", {"kind": "inference", "nodeSelector": {"role": "serve"}})
    rig.server.add(QUEUE, "research", {"guaranteed": 4, "limit": 16, "userLimit": 8})
    rig.server.add(GPU_PROFILE, "t4", build_gpu_profile("t4", json.loads(read_gpu_json("t4")))["spec"])
    for name, role in (("t0", "train"), ("s0", "serve")):
        rig.add_node(name, {"role": role})
    rig.add_node("s1", {"role": "serve"}, product="NVIDIA-GH200-480GB")
    rig.run_until_stable()
    job = a_job(
        "llama-abc123",
        2,
        8,
        state=JobState.RUNNING,
        on={"t0": (0, 1), "s0": (0, 1, 2, 3)},
        now_s=NOW_S,
        queue="research",
        deadline_s=5400.5,
        command=("python", "train.py"),
        checkpoint=CheckpointSpec("/checkpoints", 300.0, volume=CheckpointVolume("shared", "llama")),
        template_json='{"spec":{"containers":[{"image":"trainer","name":"main"}]}}',
    )
    job = replace(job, progress=Progress(at_s=NOW_S, steps=900.0, loss=2.5, samples_per_s=640.0))
    loan = replace(a_loan("s0"), pool="serving", offered_at_s=NOW_S - 60.0, state_since_s=NOW_S - 30.0)
    demand = {"serving": DemandReading(NOW_S, 3.5, 3.5)}
    rig.snapshot = replace(rig.snapshot, jobs={job.id: job}, loans={"s0": loan}, demand=demand)
    rig.advance(60.0)
    rig.run_until_stable()
    return rig


@pytest.mark.parametrize("name", list(TOLD))
def test_what_the_cluster_is_told(rig: OperatorRig, name: str) -> None:
    kind, *place = TOLD[name]
    assert isinstance(kind, ResourceKind)
    resource = rig.server.get(kind, *place)
    for field in ("uid", "resourceVersion"):
        del resource["metadata"][field]
    told = yaml.safe_dump(resource, sort_keys=False, width=120)
    path = FOLDER / f"{name}.yaml"
    if os.environ.get("EBBTIDE_GOLDEN") == "write":
        path.write_text(told, encoding="utf-8")
    assert told == path.read_text(encoding="utf-8")
