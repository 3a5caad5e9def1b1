"""Whether GPUs compute, as NVML reports it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cache

logger = logging.getLogger(__name__)


def read_busy_share(ids: Collection[str]) -> float:
    """Return the share of the last moments in which the busiest of these GPUs computed, 0 to 1.

    A GPU whose use cannot be read, such as a MIG instance or one of another maker, counts as busy: its job must not be
    taken for idle.

    Args:
        ids: identifiers of the GPUs. 0 without any.
    """
    return max(map(_read_share, ids), default=0.0)


def _read_share(identifier: str) -> float:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(identifier)
            return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100.0
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        _warn_once(identifier, str(error))
        return 1.0


@cache
def _warn_once(identifier: str, problem: str) -> None:
    logger.warning("the use of GPU %s is unknown, so jobs on it never count as idle: %s", identifier, problem)
