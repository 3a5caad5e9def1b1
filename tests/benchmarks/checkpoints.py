"""Bandwidth of saving and loading with checksums, as a share of torch's own checkpoints of the same data in one run.

One process writes 1 GB in 16 tensors, and 98 MB in 1500, to a folder of the temporary directory: from the host, and
from a GPU if there is one. The two take turns, and each begins every second pass; the medians of six passes count.
Loads find the files in the page cache.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ebbtide.checkpoints import load_newest_checkpoint, save_checkpoint

PASSES = 6
CASES = (("1 GB in 16 tensors", 16, 16_384), ("98 MB in 1500 tensors", 1_500, 16))


def rows() -> Iterator[tuple[str, str, str]]:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        for case, count, length in CASES:
            state = {f"tensor{number}": torch.randn(length, 1024, device=device) for number in range(count)}
            with tempfile.TemporaryDirectory() as folder:
                seconds = _measure(state, Path(folder))
            size_gb = sum(tensor.nbytes for tensor in state.values()) / 1e9
            label = case if device == "cpu" else f"{case} of a GPU"
            for kind in ("save", "load"):
                own, raw = (size_gb / median(seconds[kind, by]) for by in ("own", "torch"))
                yield f"{kind} {label}: share of torch's bandwidth", "at least 0.80", f"{own / raw:.2f}"
                yield f"{kind} {label}: bandwidth, torch's", "", f"{own:.2f} GB/s, {raw:.2f} GB/s"


def _measure(state: dict[str, Any], folder: Path) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each pass."""
    raw, own = folder / "raw", folder / "own"
    steps: dict[tuple[str, str], Callable[[], object]] = {
        ("save", "torch"): lambda: save(state, checkpoint_id=raw),
        ("save", "own"): lambda: save_checkpoint(state, own, step=1),
        ("load", "torch"): lambda: load(state, checkpoint_id=raw),
        ("load", "own"): lambda: load_newest_checkpoint(state, own),
    }
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for number in range(PASSES):
        for path in (raw, own):
            shutil.rmtree(path, ignore_errors=True)
        turns = ("torch", "own") if number % 2 else ("own", "torch")
        for key in [(kind, by) for kind in ("save", "load") for by in turns]:
            _synchronize()
            started_s = time.perf_counter()
            steps[key]()
            _synchronize()
            seconds[key].append(time.perf_counter() - started_s)
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    for what, bar, measured in rows():
        sys.stdout.write(f"{what}: {measured} {bar and f'({bar})'}\n")
