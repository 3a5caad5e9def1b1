"""A rank that really takes more memory than its plan predicts: `python tests/e2e/memory_hungry_rank.py FACTOR`.

Memory is scaled down by `SCALE`. The rank limits its address space to a slot beyond its initial size (RLIMIT_AS) and
allocates `FACTOR` times the plan's predicted peak, or two slots without a prediction. If that succeeds, it reports
success.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from ebbtide.session import Session

SCALE = 20
SLOT_BYTES = 2_000_000_000


def main(factor: float) -> None:
    with Session.from_environment() as session:
        session.init_process_group()
        session.mark_resumed(0)
        assert session.plan is not None
        predicted = session.plan["peak_bytes_per_gpu"]
        needed_bytes = factor * predicted if predicted else 2 * SLOT_BYTES
        limit = _size_bytes() + SLOT_BYTES // SCALE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.ones(int(needed_bytes / SCALE), dtype=torch.uint8)
        session.report(step=session.steps_total, loss=1.0)
        session.succeed()


def _size_bytes() -> int:
    """Return the size of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(float(sys.argv[1]))
