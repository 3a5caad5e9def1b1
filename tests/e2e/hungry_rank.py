"""A rank that really takes memory, more than its plan predicts: `python tests/e2e/hungry_rank.py TRUTH`.

It may take as much beyond what it has at its start as a slot has, at a scale of 1 to `SCALE` (RLIMIT_AS), and fills
`TRUTH` times what its plan predicts, at the same scale. Without a predicted peak it fills twice what a slot has. What
it could fill it gives back, and succeeds.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from scheduler.worker.session import Session

SCALE = 20
SLOT_BYTES = 2_000_000_000


def main(truth: float) -> None:
    with Session.from_environment() as session:
        session.init_process_group()
        session.mark_resumed(0)
        assert session.plan is not None
        predicted = session.plan.peak_bytes_per_gpu
        wanted = truth * predicted if predicted else 2 * SLOT_BYTES
        limit = _size_bytes() + SLOT_BYTES // SCALE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.ones(int(wanted / SCALE), dtype=torch.uint8)
        session.report(step=session.steps_total, loss=1.0)
        session.succeed()


def _size_bytes() -> int:
    """Of this process' address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(float(sys.argv[1]))
