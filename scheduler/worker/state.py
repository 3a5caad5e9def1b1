"""The state of a training as one dictionary, by the names of the plain model, however it is spread over ranks.

Ranks of a pipeline hold unlike parts; each gives what it has, and a checkpoint is all of them together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from scheduler.worker.ledger import combined_digest, entry_digest

# Optimizer entries by parameter name, not by number: names stay the same however parameters are grouped.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_WHOLE = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True)
class Trained:
    """A part of the model with the optimizers of its parameters."""

    module: nn.Module
    optimizers: Sequence[Optimizer]


def state(parts: Sequence[Trained]) -> dict[str, Any]:
    """What this rank holds: {"model", "optimizer", "random"}. Of model and optimizer these are the tensors themselves,
    as they are spread: whoever fills them changes the training."""
    model, optimizer = _gathered(parts, _OPTIONS)
    return {"model": model, "optimizer": optimizer, "random": _random_state()}


def stored_state(parts: Sequence[Trained]) -> dict[str, Any]:
    """The part of it that a checkpoint holds. Rates and betas of the optimizers are not in it: they follow from the
    settings and the position, and as a dozen entries a parameter they would take more time than the tensors do."""
    whole = state(parts)
    return {**whole, "optimizer": {name: each for name, each in whole["optimizer"].items() if isinstance(each, Tensor)}}


def share_to_store(parts: Sequence[Trained]) -> dict[str, Any]:
    """What this rank gives to a checkpoint. Of what several ranks hold alike one gives it, each in its turn by the
    entry's name: the others need not even copy it. The little whose copies no mesh tells of (norms under tensor
    parallelism, steps, random state) all give, and torch stores it once."""
    whole = stored_state(parts)
    is_plainly_replicated = all(isinstance(part.module, DistributedDataParallel) for part in parts)
    for kind in ("model", "optimizer"):
        entries = whole[kind].items()
        whole[kind] = {name: each for name, each in entries if _is_its_turn(name, each, is_plainly_replicated)}
    return whole


def _is_its_turn(name: str, entry: Tensor, is_plainly_replicated: bool) -> bool:
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


def set_state(parts: Sequence[Trained], values: Mapping[str, Any]) -> None:
    """Copies what another build of the same model holds, as far as this one has it."""
    for part in parts:
        own_model, own_optimizer = _gathered([part], _OPTIONS)
        set_state_dict(
            part.module,
            part.optimizers,
            model_state_dict={name: values["model"][name] for name in own_model},
            optim_state_dict={name: values["optimizer"][name] for name in own_optimizer},
            options=_OPTIONS,
        )
    set_random_state(values["random"])


def whole_state_digest(parts: Sequence[Trained]) -> str:
    """The digest of all model and optimizer entries, tensors whole, however they are spread: the same on every rank.
    Each entry is hashed by one of the ranks that hold it. Collective."""
    model, optimizer = _gathered(parts, _WHOLE)
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
    dist.all_gather_object(found, {name: entry_digest(name, here[name]) for name in mine})
    return combined_digest({name: digest for each in found for name, digest in each.items()})


def _gathered(parts: Sequence[Trained], options: StateDictOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for part in parts:
        of_model, of_optimizer = get_state_dict(part.module, part.optimizers, options=options)
        model |= of_model
        optimizer |= of_optimizer
    return model, optimizer


def _random_state() -> dict[str, Tensor]:
    """One state for all ranks: training draws nothing per rank, or the layout would change what it draws."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
