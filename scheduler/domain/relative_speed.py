"""Relative speed of the GPU models for a job without a model: declared, measured or from GPU profiles.

A speed is relative to the job's reference model, whose speed is 1. One step of such a job is one GPU-second on a GPU of
the reference model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class SpeedSource(StrEnum):
    """Origin of a relative speed. `assumed` means that nothing is known: the GPU counts as fast as the reference."""

    DECLARED = "declared"
    MEASURED = "measured"
    PROFILE = "profile"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class RelativeSpeed:
    """Work that a GPU does in the time in which a GPU of the reference model does 1, and where the number is from."""

    value: float
    source: SpeedSource


def choose_reference_gpu(training_gpus: Mapping[str, int]) -> str:
    """Return the most common GPU model, the first by name of several, or empty if there are no GPUs.

    Args:
        training_gpus: number of GPUs in training pools by model, whether their nodes are up or not.
    """
    counted = ((-count, gpu) for gpu, count in training_gpus.items() if count)
    return min(counted, default=(0, ""))[1]


def resolve_prior_speeds(
    reference: str, declared: Mapping[str, float], throughputs: Mapping[str, float]
) -> Mapping[str, RelativeSpeed]:
    """Return the known speeds of GPU models before a job has run. A declared speed precedes that of the profiles.

    Declared speeds are relative to each other. If the reference model is not among them, they are scaled so that the
    first of them with a profile, by name, has the speed of its profile.

    Args:
        reference: GPU model whose speed is 1.
        declared: speeds from the job document, in any common unit.
        throughputs: work per second by GPU model, in any common unit, from GPU profiles.
    """
    base = throughputs.get(reference)
    profiled = {gpu: value / base for gpu, value in throughputs.items()} if base else {}
    speeds = {gpu: RelativeSpeed(value, SpeedSource.PROFILE) for gpu, value in profiled.items()}
    scale = _find_declared_scale(reference, declared, profiled)
    speeds |= {gpu: RelativeSpeed(value * scale, SpeedSource.DECLARED) for gpu, value in declared.items()}
    if speeds and reference and reference not in speeds:
        speeds[reference] = RelativeSpeed(1.0, SpeedSource.ASSUMED)
    return speeds


def _find_declared_scale(reference: str, declared: Mapping[str, float], profiled: Mapping[str, float]) -> float:
    if reference in declared:
        return 1.0 / declared[reference]
    anchor = min((gpu for gpu in declared if gpu in profiled), default=None)
    return profiled[anchor] / declared[anchor] if anchor is not None else 1.0
