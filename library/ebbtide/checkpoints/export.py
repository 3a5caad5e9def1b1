"""Export of a checkpoint to formats that other tools read, with verification of its checksums."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ebbtide.checkpoints import checkpoint_folders
from ebbtide.checkpoints.errors import CheckpointError
from ebbtide.checkpoints.export_formats import ExportFormat
from ebbtide.checkpoints.loading import convert_load_error
from ebbtide.checkpoints.piece_reader import PieceReader

SHARD_BYTES_MAX = 5 * 10**9  # as in transformers
_CONFIG_NAME = "config.json"
_MODEL_PREFIX = "model."
_FILE_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Export:
    """An export that was written.

    Attributes:
        source: the checkpoint.
        target: the file, or the folder for HF.
        tensors: number of tensors; of the whole state for TORCH.
        size_bytes: their size.
        is_verified: whether the checkpoint has checksums.
        has_config: whether a folder for HF has the model's configuration.
    """

    source: Path
    target: Path
    tensors: int
    size_bytes: int
    is_verified: bool
    has_config: bool = False


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at `path`, which may also be a folder of checkpoints: then its newest one.

    Raises:
        CheckpointError: there is none.
    """
    if (path / checkpoint_folders.METADATA_NAME).exists():
        return path
    newest = checkpoint_folders.find_newest(path)
    if newest is None:
        raise CheckpointError(
            f"{path} is no checkpoint and holds none. "
            "Name a directory with a `.metadata` file, or a folder of such directories."
        )
    return newest


def export_checkpoint(
    source: Path, target: Path, export_format: ExportFormat, *, prefix: str | None = None, config: Path | None = None
) -> Export:
    """Write a checkpoint to `target`, which must not exist. No process group is needed.

    Args:
        source: a checkpoint, or a folder of checkpoints.
        prefix: for SAFETENSORS and HF, export the tensors whose names begin with it, without it. Default: `model.` if
            there are such tensors, otherwise all tensors.
        config: for HF, the model's config.json. Default: the one beside the checkpoint or in its folder, if any.

    Raises:
        DamagedCheckpointError: a checksum differs.
        CheckpointError: there is no checkpoint, nothing to export, or `target` exists or cannot be written.
        ModuleNotFoundError: the package safetensors is missing.
    """
    source = find_checkpoint(source)
    if target.exists():
        raise CheckpointError(f"{target} exists. Name a new one, or delete it first.")
    reader = PieceReader(source, node="")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    has_config = False
    try:
        tensors = _list_tensors(reader)
        if export_format is ExportFormat.TORCH:
            _write_torch(reader, partial)
            written = list(tensors.values())
        else:
            weights = _select_weights(source, tensors, prefix)
            written = [weight.entry for weight in weights]
            if export_format is ExportFormat.HF:
                _write_hf(reader, partial, weights)
                has_config = _copy_config(source, partial, config)
            else:
                _write_safetensors(reader, partial, weights)
        partial.rename(target)
    except (OSError, CheckpointException) as error:
        raise convert_load_error(source, error) from error
    finally:
        _remove(partial)
    size_bytes = sum(map(_compute_size, written))
    return Export(source, target, len(written), size_bytes, reader.checksums is not None, has_config)


def _list_tensors(reader: PieceReader) -> dict[str, TensorStorageMetadata]:
    entries = reader.read_metadata().state_dict_metadata
    return {name: entry for name, entry in sorted(entries.items()) if isinstance(entry, TensorStorageMetadata)}


@dataclass(frozen=True)
class _Weight:
    """A tensor to export, under its name without the prefix."""

    name: str
    stored_name: str
    entry: TensorStorageMetadata


def _select_weights(
    source: Path, tensors: Mapping[str, TensorStorageMetadata], prefix: str | None
) -> tuple[_Weight, ...]:
    if prefix is None:
        prefix = _MODEL_PREFIX if any(name.startswith(_MODEL_PREFIX) for name in tensors) else ""
    weights = tuple(
        _Weight(name[len(prefix) :], name, entry) for name, entry in tensors.items() if name.startswith(prefix)
    )
    if not weights:
        names = ", ".join(sorted({name.partition(".")[0] for name in tensors})) or "none"
        raise CheckpointError(
            f"{source} has no tensor whose name begins with {prefix!r}. Its names begin with: {names}."
        )
    return weights


def _write_torch(reader: PieceReader, target: Path) -> None:
    """Write the whole state, with all values that are no tensors."""
    state: dict[str, Any] = {}
    # The call of dcp_to_torch_save, with a reader that verifies.
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    torch.save(state, target)


def _write_safetensors(reader: PieceReader, target: Path, weights: Sequence[_Weight]) -> None:
    from safetensors.torch import save_file

    save_file(_read_weights(reader, weights), target, metadata=_FILE_METADATA)


def _write_hf(reader: PieceReader, target: Path, weights: Sequence[_Weight]) -> None:
    """Write one file, or shards with an index if there are more bytes than one file usually has."""
    target.mkdir()
    shards = list(_divide(weights))
    if len(shards) == 1:
        _write_safetensors(reader, target / "model.safetensors", weights)
        return
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(reader, target / name, shard)
        files |= {weight.name: name for weight in shard}
    total = sum(_compute_size(weight.entry) for weight in weights)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _divide(weights: Sequence[_Weight]) -> Iterator[Sequence[_Weight]]:
    """Yield consecutive weights of at most `SHARD_BYTES_MAX`, or single ones that are larger."""
    shard: list[_Weight] = []
    filled = 0
    for weight in weights:
        size = _compute_size(weight.entry)
        if shard and filled + size > SHARD_BYTES_MAX:
            yield shard
            shard, filled = [], 0
        shard.append(weight)
        filled += size
    yield shard


def _read_weights(reader: PieceReader, weights: Sequence[_Weight]) -> dict[str, Tensor]:
    tensors = {
        weight.stored_name: torch.empty(weight.entry.size, dtype=weight.entry.properties.dtype) for weight in weights
    }
    _load_state_dict(tensors, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    return {weight.name: tensors[weight.stored_name] for weight in weights}


def _copy_config(source: Path, target: Path, config: Path | None) -> bool:
    candidates = [config] if config is not None else [source / _CONFIG_NAME, source.parent / _CONFIG_NAME]
    for candidate in candidates:
        if config is not None or candidate.exists():
            shutil.copyfile(candidate, target / _CONFIG_NAME)
            return True
    return False


def _compute_size(entry: TensorStorageMetadata) -> int:
    return prod(entry.size) * entry.properties.dtype.itemsize


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
