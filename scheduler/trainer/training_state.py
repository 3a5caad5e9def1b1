"""The state of a training: collect and restore it across ranks, compute its digest, and record a ledger.

State dicts use the parameter names of the unsharded model. Ranks of a pipeline hold different parts of it; a
checkpoint is all parts together.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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

# Flattened optimizer entries have parameter names, which do not depend on how parameters are grouped.
_SHARDED_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_FULL_OPTIONS = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True)
class TrainablePart:
    """A part of the model with the optimizers of its parameters.

    Attributes:
        scalars: tensors of the training as a whole that a checkpoint holds, the same on all ranks.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]
    scalars: Mapping[str, Tensor] = field(default_factory=dict)


def collect_state(parts: Sequence[TrainablePart]) -> dict[str, Any]:
    """Return this rank's state: {"model", "optimizer", "random"}.

    The entries of model and optimizer are the training's own tensors, sharded as they are: writing to them changes
    the training.
    """
    model, optimizer = _get_state_dicts(parts, _SHARDED_OPTIONS)
    return {"model": model, "optimizer": optimizer, "random": _get_random_state()}


def collect_stored_state(parts: Sequence[TrainablePart]) -> dict[str, Any]:
    """Return the part of this rank's state that a checkpoint holds: everything but the optimizers' scalar options.

    Learning rates and betas follow from the settings and the position. As a dozen entries per parameter they would
    take more time than the tensors.
    """
    state = collect_state(parts)
    tensors = {name: entry for name, entry in state["optimizer"].items() if isinstance(entry, Tensor)}
    scalars = {name: scalar for part in parts for name, scalar in part.scalars.items()}
    return {**state, "optimizer": tensors | scalars}


def collect_checkpoint_share(parts: Sequence[TrainablePart]) -> dict[str, Any]:
    """Return the entries that this rank writes to a checkpoint.

    Of several copies of an entry, one rank writes one, chosen by the entry's name; the others need not even copy it
    to the host. All ranks include the few small entries whose copies no mesh describes (norms under tensor
    parallelism, steps, random state); torch stores them once.
    """
    state = collect_stored_state(parts)
    uses_ddp = all(isinstance(part.module, DistributedDataParallel) for part in parts)
    for kind in ("model", "optimizer"):
        entries = state[kind].items()
        state[kind] = {name: entry for name, entry in entries if _is_stored_by_this_rank(name, entry, uses_ddp)}
    return state


def _is_stored_by_this_rank(name: str, entry: Tensor, uses_ddp: bool) -> bool:
    """Copies are along the mesh dimensions on which the entry is replicated; under DDP, on all ranks."""
    number, count = (dist.get_rank(), dist.get_world_size()) if uses_ddp else (0, 1)
    if isinstance(entry, DTensor):
        coordinate = entry.device_mesh.get_coordinate()
        assert coordinate is not None, f"this rank is not in the mesh of {name}"
        for axis, placement in enumerate(entry.placements):
            if placement.is_replicate():
                size = entry.device_mesh.size(axis)
                number, count = number * size + coordinate[axis], count * size
    return crc32(name.encode()) % count == number


def restore_state(parts: Sequence[TrainablePart], values: Mapping[str, Any]) -> None:
    """Copy the state of another build of the same model, as far as this build has it."""
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
    """Return the digest of all model and optimizer entries as whole tensors, the same on every rank. Collective.

    Each entry is hashed by one of the ranks that hold it.
    """
    model, optimizer = _get_state_dicts(parts, _FULL_OPTIONS)
    entries = model | optimizer
    names_by_rank: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names_by_rank, list(entries))
    holders: defaultdict[str, list[int]] = defaultdict(list)
    for rank, names in enumerate(names_by_rank):
        for name in names:
            holders[name].append(rank)
    own_rank = dist.get_rank()
    assigned = [name for k, name in enumerate(sorted(holders)) if holders[name][k % len(holders[name])] == own_rank]
    digests_by_rank: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(digests_by_rank, {name: compute_entry_digest(name, entries[name]) for name in assigned})
    return combine_digests({name: digest for digests in digests_by_rank for name, digest in digests.items()})


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
    """Return one state for all ranks, so that random numbers do not depend on the layout."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


class Ledger:
    """A ledger of a training's steps, for demos and tests. Without a directory nothing is recorded.

    The files contain JSON lines, flushed after each step:

    - `samples-g<generation>-r<rank>.jsonl`: {"step", "samples": [...]} of each rank
    - `losses-g<generation>.jsonl`: {"step", "loss"}
    - `states-g<generation>.jsonl`: {"step", "event": "saved" | "loaded", "digest"}
    - `evaluations-g<generation>.jsonl`: {"step", "loss"}

    A step that a later generation repeats, because ranks died after their last checkpoint, is in the files of both;
    the later generation counts.
    """

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

    def record_evaluation(self, step: int, *, loss: float) -> None:
        if self._rank == 0:
            self._append(f"evaluations-g{self._generation}", {"step": step, "loss": loss})

    def record_state(self, step: int, event: str, *, digest: str) -> None:
        """Record the digest of all model and optimizer entries. Equal digests mean bitwise equal states."""
        if self._rank == 0:
            self._append(f"states-g{self._generation}", {"step": step, "event": event, "digest": digest})

    def _append(self, name: str, line: Mapping[str, object]) -> None:
        if self._directory is None:
            return
        with (self._directory / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def compute_state_digest(entries: Mapping[str, Any]) -> str:
    """Return the SHA-256 over names, shapes, dtypes and bytes of all entries, in the order of names."""
    return combine_digests({name: compute_entry_digest(name, value) for name, value in entries.items()})


def combine_digests(digests: Mapping[str, str]) -> str:
    """Return the digest of a state from those of its entries."""
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


def compute_entry_digest(name: str, value: object) -> str:
    digest = hashlib.sha256(name.encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(repr(value).encode())
    return digest.hexdigest()
