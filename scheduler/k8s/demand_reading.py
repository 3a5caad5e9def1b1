"""What is known of a pool's demand: a number with its time, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Gap(StrEnum):
    """Why nobody can say how many GPUs inference needs."""

    NO_DEPLOYMENT_MATCHES = "NoDeploymentMatches"
    NO_SERIES = "NoSeries"
    MANY_SERIES = "ManySeries"
    NOT_A_NUMBER = "NotANumber"
    STALE = "Stale"
    UNREACHABLE = "Unreachable"
    BAD_QUERY = "BadQuery"
    NOT_ASKED_YET = "NotAskedYet"
    NOT_PUSHED_YET = "NotPushedYet"


@dataclass(frozen=True, slots=True)
class Demand:
    """`gpus` were needed at `at_s`."""

    gpus: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing new can be told. `message` stays the same while what is wrong does."""

    gap: Gap
    message: str


Known = Demand | Unknown
