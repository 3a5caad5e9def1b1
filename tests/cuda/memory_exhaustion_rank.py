"""A rank that fills its GPU and then needs a little more: for a cuBLAS handle, NCCL, or a tensor.

`python -m tests.cuda.memory_exhaustion_rank cublas|nccl|tensor` prints a JSON object with the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from ebbtide.environment import RankEnvironment
from ebbtide.session import Session
from ebbtide.status_file import is_out_of_memory, measure_peak_bytes

CHUNKS_BYTES = (1 << 30, 64 << 20, 4 << 20, 512 << 10)


def fill_memory() -> list[torch.Tensor]:
    """Return tensors that take all memory that the driver still gives."""
    held = []
    for size in CHUNKS_BYTES:
        while True:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    return held


def _multiply(matrix: torch.Tensor) -> None:
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()


def main(kind: str) -> None:
    matrix = torch.ones(64, 64, device="cuda")
    torch.cuda.synchronize()
    held = fill_memory()
    attempts: dict[str, Callable[[], object]] = {
        "cublas": lambda: _multiply(matrix),
        "nccl": Session(RankEnvironment()).init_process_group,
        "tensor": lambda: torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
    }
    error: BaseException | None = None
    try:
        attempts[kind]()
    except Exception as raised:
        error = raised
    peak, allocated = measure_peak_bytes(), torch.cuda.max_memory_allocated()
    found = {
        "error": "" if error is None else f"{type(error).__name__}: {error}"[:2000],
        "recognised": is_out_of_memory(error),
        "chunks": len(held),
        "peak_bytes": peak,
        "allocated_bytes": allocated,
        "total_bytes": torch.cuda.get_device_properties(0).total_memory,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
