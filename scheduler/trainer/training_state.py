"""The state of a training as one dictionary, by the names of the plain model, however it is spread over ranks.

Ranks of a pipeline hold unlike parts; each gives what it has, and a checkpoint is all of them together.

Ledger: a record of what a training really did, for demonstrations and tests that check it afterwards.

JSON lines, flushed with each step: `samples-g<generation>-r<rank>.jsonl` holds {"step", "samples": [...]} of each rank,
`losses-g<generation>.jsonl` {"step", "loss"}, and `states-g<generation>.jsonl` {"step", "event": "saved" | "loaded",
"digest"}. A step that a later generation did again, because ranks died after their last checkpoint, stands in both:
the later generation counts.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# Optimizer entries by parameter name, not by number: names stay the same however parameters are grouped.
_SHARDED_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_FULL_OPTIONS = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True)
class TrainablePart:
    """A part of the model with the optimizers of its parameters."""

    module: nn.Module
    optimizers: Sequence[Optimizer]


def collect_state(parts: Sequence[TrainablePart]) -> dict[str, Any]:
    """What this rank holds: {"model", "optimizer", "random"}. Of model and optimizer these are the tensors themselves,
    as they are spread: whoever fills them changes the training."""
    model, optimizer = _get_state_dicts(parts, _SHARDED_OPTIONS)
    return {"model": model, "optimizer": optimizer, "random": _get_random_state()}


def collect_stored_state(parts: Sequence[TrainablePart]) -> dict[str, Any]:
    """The part of it that a checkpoint holds. Rates and betas of the optimizers are not in it: they follow from the
    settings and the position, and as a dozen entries a parameter they would take more time than the tensors do."""
    whole = collect_state(parts)
    return {**whole, "optimizer": {name: each for name, each in whole["optimizer"].items() if isinstance(each, Tensor)}}


def collect_checkpoint_share(parts: Sequence[TrainablePart]) -> dict[str, Any]:
    """What this rank gives to a checkpoint. Of what several ranks hold alike one gives it, each in its turn by the
    entry's name: the others need not even copy it. The little whose copies no mesh tells of (norms under tensor
    parallelism, steps, random state) all give, and torch stores it once."""
    whole = collect_stored_state(parts)
    is_plainly_replicated = all(isinstance(part.module, DistributedDataParallel) for part in parts)
    for kind in ("model", "optimizer"):
        entries = whole[kind].items()
        whole[kind] = {
            name: each for name, each in entries if _is_stored_by_this_rank(name, each, is_plainly_replicated)
        }
    return whole


def _is_stored_by_this_rank(name: str, entry: Tensor, is_plainly_replicated: bool) -> bool:
    """Copies lie along the axes of an entry's mesh on which it is replicated, of a plain one on all ranks."""
    number, count = (dist.get_rank(), dist.get_world_size()) if is_plainly_replicated else (0, 1)
    if isinstance(entry, DTensor):
        coordinate = entry.device_mesh.get_coordinate()
        assert coordinate is not None, f"{name} is of another rank's mesh"
        for axis, placement in enumerate(entry.placements):
            if placement.is_replicate():
                size = entry.device_mesh.size(axis)
                number, count = number * size + coordinate[axis], count * size
    return crc32(name.encode()) % count == number


def restore_state(parts: Sequence[TrainablePart], values: Mapping[str, Any]) -> None:
    """Copies what another build of the same model holds, as far as this one has it."""
    for part in parts:
        own_model, own_optimizer = _get_state_dicts([part], _SHARDED_OPTIONS)
        set_state_dict(
            part.module,
            part.optimizers,
            model_state_dict={name: values["model"][name] for name in own_model},
            optim_state_dict={name: values["optimizer"][name] for name in own_optimizer},
            options=_SHARDED_OPTIONS,
        )
    set_random_state(values["random"])


def compute_global_digest(parts: Sequence[TrainablePart]) -> str:
    """The digest of all model and optimizer entries, tensors whole, however they are spread: the same on every rank.
    Each entry is hashed by one of the ranks that hold it. Collective."""
    model, optimizer = _get_state_dicts(parts, _FULL_OPTIONS)
    here = model | optimizer
    held: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(held, list(here))
    holders: defaultdict[str, list[int]] = defaultdict(list)
    for rank, names in enumerate(held):
        for name in names:
            holders[name].append(rank)
    own = dist.get_rank()
    mine = [name for k, name in enumerate(sorted(holders)) if holders[name][k % len(holders[name])] == own]
    found: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, {name: compute_entry_digest(name, here[name]) for name in mine})
    return combine_digests({name: digest for each in found for name, digest in each.items()})


def _get_state_dicts(
    parts: Sequence[TrainablePart], options: StateDictOptions
) -> tuple[dict[str, Any], dict[str, Any]]:
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for part in parts:
        of_model, of_optimizer = get_state_dict(part.module, part.optimizers, options=options)
        model |= of_model
        optimizer |= of_optimizer
    return model, optimizer


def _get_random_state() -> dict[str, Tensor]:
    """One state for all ranks: training draws nothing per rank, or the layout would change what it draws."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


class Ledger:
    """Without a directory nothing is recorded."""

    def __init__(self, directory: Path | None, *, generation: int, rank: int) -> None:
        self._directory = directory
        self._generation = generation
        self._rank = rank
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    @property
    def is_enabled(self) -> bool:
        return self._directory is not None

    def record_step(self, step: int, *, samples: Iterable[int], loss: float) -> None:
        self._append(f"samples-g{self._generation}-r{self._rank}", {"step": step, "samples": list(samples)})
        if self._rank == 0:
            self._append(f"losses-g{self._generation}", {"step": step, "loss": loss})

    def record_state(self, step: int, event: str, *, digest: str) -> None:
        """Of all model and optimizer entries: equal digests are equal to the last bit."""
        if self._rank == 0:
            self._append(f"states-g{self._generation}", {"step": step, "event": event, "digest": digest})

    def _append(self, name: str, line: Mapping[str, object]) -> None:
        if self._directory is None:
            return
        with (self._directory / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def compute_state_digest(entries: Mapping[str, Any]) -> str:
    """SHA-256 over names, shapes, precisions and bytes of all entries, in the order of names."""
    return combine_digests({name: compute_entry_digest(name, value) for name, value in entries.items()})


def combine_digests(digests: Mapping[str, str]) -> str:
    """The digest of a state from those of its entries."""
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


def compute_entry_digest(name: str, value: object) -> str:
    digest = hashlib.sha256(name.encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())
    return digest.hexdigest()
