"""The frameworks that plans are exported for, by name."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.domain.suggestions import suggest
from scheduler.plan_export import (
    accelerate,
    colossalai,
    deepspeed,
    galvatron,
    llama_factory,
    megatron_lm,
    torchtitan,
)
from scheduler.plan_export.framework import Framework

FRAMEWORKS: Mapping[str, Framework] = {
    framework.name: framework
    for framework in (
        megatron_lm.FRAMEWORK,
        deepspeed.FRAMEWORK,
        torchtitan.FRAMEWORK,
        accelerate.FRAMEWORK,
        galvatron.FRAMEWORK,
        colossalai.FRAMEWORK,
        llama_factory.FRAMEWORK,
    )
}


def find_framework(name: str) -> Framework:
    """Return the framework of this name.

    Raises:
        ValueError: there is none. The message says what is accepted.
    """
    if name not in FRAMEWORKS:
        known = ", ".join(FRAMEWORKS)
        raise ValueError(f"{name!r} is no known framework; accepted: {known}{suggest(name, FRAMEWORKS)}")
    return FRAMEWORKS[name]
