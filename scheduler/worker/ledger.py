"""Ledger: a record of what a training really did, for demonstrations and tests that check it afterwards.

JSON lines, flushed with each step: `samples-g<generation>-r<rank>.jsonl` holds {"step", "samples": [...]} of each rank,
`losses-g<generation>.jsonl` {"step", "loss"}, and `states-g<generation>.jsonl` {"step", "event": "saved" | "loaded",
"digest"}. A step that a later generation did again, because ranks died after their last checkpoint, stands in both:
the later generation counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


class Ledger:
    """Without a directory nothing is recorded."""

    def __init__(self, directory: Path | None, *, generation: int, rank: int) -> None:
        self._directory = directory
        self._generation = generation
        self._rank = rank
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    @property
    def is_kept(self) -> bool:
        return self._directory is not None

    def step(self, step: int, *, samples: Iterable[int], loss: float) -> None:
        self._append(f"samples-g{self._generation}-r{self._rank}", {"step": step, "samples": list(samples)})
        if self._rank == 0:
            self._append(f"losses-g{self._generation}", {"step": step, "loss": loss})

    def state(self, step: int, event: str, *, digest: str) -> None:
        """Of all model and optimizer entries: equal digests are equal to the last bit."""
        if self._rank == 0:
            self._append(f"states-g{self._generation}", {"step": step, "event": event, "digest": digest})

    def _append(self, name: str, line: Mapping[str, object]) -> None:
        if self._directory is None:
            return
        with (self._directory / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def state_digest(entries: Mapping[str, Any]) -> str:
    """SHA-256 over names, shapes, precisions and bytes of all entries, in the order of names."""
    return combined_digest({name: entry_digest(name, value) for name, value in entries.items()})


def combined_digest(digests: Mapping[str, str]) -> str:
    """The digest of a state from those of its entries."""
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


def entry_digest(name: str, value: object) -> str:
    digest = hashlib.sha256(name.encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())
    return digest.hexdigest()
