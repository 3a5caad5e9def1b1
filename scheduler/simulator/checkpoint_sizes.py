"""Bytes of the checkpoints of simulated jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from scheduler.domain.scaling_curve import CurveRequest
from scheduler.simulator.workloads import Submission
from scheduler.solver.profiles.catalog import list_gpu_names, list_model_names, load_gpu
from scheduler.solver.profiles.job_model import load_job_model

CHECKPOINT_SHARE = 0.06
"""Checkpoint of a job without a model, as a share of the memory of its GPUs in the trace.

The mean over the 406 jobs of Rubick's workload (MLSys'25) is 5.4%: seven models from ViT (86M weights) to LLaMA-30B, at
12 bytes per weight, on the A800 with 80 GB that each job requests."""


def compute_checkpoint_bytes(submissions: Iterable[Submission], reference_gpu: str) -> Mapping[str, float]:
    """Return the bytes of each job's checkpoint, by job.

    A model that the solver knows has its weights and its optimizer's state. The checkpoint of any other job is
    `CHECKPOINT_SHARE` of the memory of its GPUs in the trace, on the GPU model that it requests, or else on
    `reference_gpu`. GPU models without a profile have no memory size, so that such jobs have checkpoints of 0 bytes.
    """
    names = frozenset(list_model_names())
    return {each.job_id: _compute_bytes(each, reference_gpu, names) for each in submissions}


def _compute_bytes(submission: Submission, reference_gpu: str, names: frozenset[str]) -> float:
    spec = submission.spec
    if spec.model in names and (request := spec.curve_request) is not None:
        return _compute_model_bytes(request)
    return CHECKPOINT_SHARE * submission.trace_gpus * _get_memory_bytes(spec.gpu or reference_gpu)


@cache
def _compute_model_bytes(request: CurveRequest) -> float:
    return load_job_model(request).checkpoint_bytes


@cache
def _get_memory_bytes(gpu: str) -> int:
    return load_gpu(gpu).memory_bytes if gpu in list_gpu_names() else 0
