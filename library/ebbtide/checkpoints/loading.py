"""Loading of the newest usable checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from ebbtide.checkpoints import checkpoint_folders, nonfinite_losses
from ebbtide.checkpoints.coordination import compute_on_all_ranks, compute_on_rank_0, is_distributed
from ebbtide.checkpoints.errors import CheckpointError, DamagedCheckpointError
from ebbtide.checkpoints.piece_reader import PieceReader
from ebbtide.checkpoints.saving import describe_failure, get_node
from ebbtide.rank_status import LoadTraffic

logger = logging.getLogger(__name__)

_MODEL = "model."
_OPTIMIZER_PATH_LENGTH = 4  # such as ("optimizer", "state", "layer.weight", "exp_avg")


def load_newest_checkpoint(state: Mapping[str, Any], folder: Path) -> int | None:
    """Load the newest checkpoint of a folder in place and return its step. Collective, if there is a process group.

    A damaged checkpoint, and one right after which the loss became non-finite twice, is set aside under another name,
    and the previous one is loaded.

    Args:
        state: what `torch.distributed.checkpoint.load` takes. Tensors must have their final shapes, so an optimizer
            needs its state: `torch.distributed.checkpoint.state_dict.get_state_dict` creates it.

    Returns:
        None if the folder holds no checkpoint.

    Raises:
        CheckpointError: the checkpoint is of another model or version (nothing was changed), all checkpoints are
            damaged, or a file cannot be read.
    """
    folder = Path(folder)
    unusable: tuple[int, ...] = ()
    compute_on_rank_0(lambda: nonfinite_losses.reject_checkpoint(folder))
    while True:
        step = compute_on_rank_0(partial(_find_newest, folder, unusable))
        if step is None:
            return None
        path = checkpoint_folders.checkpoint_path(folder, step)
        try:
            traffic = load_checkpoint(state, path)
        except DamagedCheckpointError as error:
            unusable = (*unusable, step)
            compute_on_rank_0(partial(_fall_back, folder, path, unusable, error))
        else:
            logger.info("Loaded %s: %s", path, traffic)
            return step


def load_checkpoint(state: Mapping[str, Any], path: Path) -> LoadTraffic:
    """Load one checkpoint in place and return what this rank has read. Collective, if there is a process group.

    Raises:
        DamagedCheckpointError: a file is missing or damaged. The state may be overwritten in part.
        CheckpointError: the checkpoint is of another model or version (nothing was changed), or cannot be read.
    """
    reader = PieceReader(path, node=get_node())
    try:
        compute_on_all_ranks(reader.read_metadata)
        if reader.checksums is None:
            logger.warning("%s has no checksums, so damage to it cannot be noticed.", path)
        read_state(state, reader, StrictLoadPlanner(path))
    except (OSError, CheckpointException) as error:
        raise convert_load_error(path, error) from error
    return reader.traffic


def read_state(state: Mapping[str, Any], reader: PieceReader, planner: DefaultLoadPlanner) -> None:
    with warnings.catch_warnings():
        # torch warns that a process without a group loads alone, which is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        load_state(state, storage_reader=reader, planner=planner, no_dist=not is_distributed())


def convert_load_error(path: Path, error: OSError | CheckpointException) -> CheckpointError:
    """Return the checkpoint's own error if a rank raised one, else one that names the checkpoint."""
    if isinstance(error, CheckpointException):
        for _, (cause, _) in sorted(error.failures.items()):
            if isinstance(cause, CheckpointError):
                return cause
    return CheckpointError(f"Cannot load the checkpoint {path}: {describe_failure(error)}.")


class StrictLoadPlanner(DefaultLoadPlanner):
    """Planner that names the first tensor in which the checkpoint differs from the state, before anything is read.

    An optimizer has no state for parameters that never had a gradient. Where the checkpoint has none either, it is
    left out of the loaded state.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        self._leave_out_absent_optimizer_state()
        stored = self.metadata.state_dict_metadata
        for name, value in sorted(self.state_dict.items()):
            entry = stored.get(name)
            own_shape = tuple(value.shape) if isinstance(value, Tensor) else None
            stored_shape = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            if entry is None or stored_shape != own_shape:
                found = "absent" if entry is None else _describe_shape(stored_shape)
                raise CheckpointError(
                    f"The checkpoint {self._path} is of another model: its {name} is {found}, but this state's is "
                    f"{_describe_shape(own_shape)}. Use the model that saved it, or an empty folder."
                )
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check that no tensor of the stored model is left over. Ranks may have different parts of the model."""
        assert self.metadata is not None
        loaded = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        entries = self.metadata.state_dict_metadata.items()
        stored = {name for name, entry in entries if name.startswith(_MODEL) and not _is_empty(entry)}
        if (surplus := stored - loaded) and stored & loaded:
            raise CheckpointError(
                f"The checkpoint {self._path} is of another model: it has {min(surplus)}, which this model lacks. "
                "Use the model that saved it, or an empty folder."
            )
        return super().create_global_plan(global_plan)

    def _leave_out_absent_optimizer_state(self) -> None:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        absent = defaultdict[tuple[Any, ...], list[str]](list)
        for name, path in self.mappings.items():
            if len(path) == _OPTIMIZER_PATH_LENGTH and path[1] == "state":
                absent[path[:3]].append(name)
        for (key, state, parameter), names in absent.items():
            if f"{_MODEL}{parameter}" in stored and not any(name in stored for name in names):
                self.original_state_dict[key][state].pop(parameter)
                for name in names:
                    del self.state_dict[name], self.mappings[name]


def _is_empty(entry: Any) -> bool:
    """Return whether an entry is a tensor without elements, of which nothing is read."""
    return isinstance(entry, TensorStorageMetadata) and 0 in entry.size


def _describe_shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "no tensor"
    return f"a tensor of shape {'x'.join(map(str, shape)) or 'scalar'}"


def _fall_back(folder: Path, path: Path, unusable: tuple[int, ...], error: DamagedCheckpointError) -> None:
    """Set a damaged checkpoint aside. The only one stays: it may be readable again, and a new start would lose it."""
    if all(step in unusable for step in checkpoint_folders.list_steps(folder)):
        raise error
    logger.error("%s Falling back to the previous checkpoint.", error)
    checkpoint_folders.try_set_aside(path, "damaged")


def _find_newest(folder: Path, unusable: tuple[int, ...]) -> int | None:
    """Return the newest step that is not known to be unusable, or None in a folder without checkpoints."""
    return next((step for step in checkpoint_folders.list_steps(folder) if step not in unusable), None)
