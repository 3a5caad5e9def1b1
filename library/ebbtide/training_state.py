"""The state of a training for torch.distributed.checkpoint: model, optimizer, position and random state."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from ebbtide.random_state import encode_random_state, restore_random_state, seed_random_state

_PICKLED = "pickled"


@dataclass
class Position:
    """How far a training is, in terms that do not depend on the number of ranks.

    Attributes:
        step: completed steps.
        epoch, samples: epoch, and samples of it that were used on all ranks together.
        draws: batches that were drawn by the function of `run.reproducible` on all ranks together.
        global_batch: samples of one batch on all ranks together; 0 without a loader.
        seed: seed of the order of samples.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    draws: int = 0
    global_batch: int = 0
    seed: int = 0


class ModelState:
    """Parameters and buffers under the names of the unwrapped model, whatever DDP, FSDP2 or torch.compile add."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return dict(get_model_state_dict(self._model))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_model_state_dict(self._model, dict(state))


class OptimizerState:
    """State of the optimizers under the names of the model's parameters."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)

    def state_dict(self) -> dict[str, Any]:
        return dict(get_optimizer_state_dict(self._model, self._optimizers))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Parameters without a gradient so far have no state, and get none.
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(self._model, self._optimizers, dict(state), options=options)


class ObjectState:
    """State of any object with `state_dict` and `load_state_dict`, such as a scheduler or averaged weights.

    Tensors keep their names. Everything else is stored as pickled bytes, because DCP makes strings of keys such as the
    milestones of MultiStepLR.
    """

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def state_dict(self) -> dict[str, Any]:
        state = self._entry.state_dict()
        return _encode(state) if _holds_tensor(state) else {_PICKLED: pickle.dumps(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self._entry.state_dict()
        loaded = _decode(own, state) if _holds_tensor(own) else pickle.loads(state[_PICKLED])
        self._entry.load_state_dict(loaded)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(each) for each in value)
    return isinstance(value, torch.Tensor)


def _encode(value: Any) -> Any:
    """Return a value in dictionaries with string keys, lists, tensors and bytes."""
    if isinstance(value, torch.Tensor):
        return value
    if not _holds_tensor(value):
        return pickle.dumps(value)
    if isinstance(value, Mapping):
        return {str(key): _encode(each) for key, each in value.items()}
    return [_encode(each) for each in value]


def _decode(own: Any, encoded: Any) -> Any:
    """Return the value that `_encode` got. The present value of the object has its structure."""
    if isinstance(encoded, bytes):
        return pickle.loads(encoded)
    if isinstance(own, Mapping):
        return {key: _decode(each, encoded[str(key)]) for key, each in own.items()}
    if isinstance(own, (list, tuple)):
        return [_decode(*pair) for pair in zip(own, encoded, strict=True)]
    return encoded


class PositionState:
    """The position, and the random state of every rank. A rank that is new starts from a seed of its own."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._random: list[bytes] = []

    def collect(self) -> None:
        """Gather the random states of all ranks. Collective."""
        own = encode_random_state()
        self._random = [own]
        if dist.is_available() and dist.is_initialized():
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, own)
            self._random = gathered

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self._position), "random": pickle.dumps(self._random)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for field in fields(Position):
            setattr(self._position, field.name, state[field.name])
        self._random = pickle.loads(state["random"])

    def restore_random_state(self, rank: int, fresh_seed: int) -> None:
        """Restore this rank's random state, or seed it if there were fewer ranks at the save."""
        if rank < len(self._random):
            restore_random_state(self._random[rank])
        else:
            seed_random_state(fresh_seed)
