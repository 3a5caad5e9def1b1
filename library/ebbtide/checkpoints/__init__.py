"""Checkpoints of any training script, in the format of torch.distributed.checkpoint (DCP) with checksums.

    from ebbtide.checkpoints import load_newest_checkpoint, save_checkpoint

    step = load_newest_checkpoint(state, folder) or 0
    ...
    save_checkpoint(state, folder, step=step)

`state` is what `torch.distributed.checkpoint.save` takes. Each checkpoint is a directory `step-<N>` that every tool for
DCP reads. Beside torch's files it has `checksums.jsonl`, with which a load verifies every byte that it depends on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ebbtide.checkpoints.errors import CheckpointError, DamagedCheckpointError

if TYPE_CHECKING:
    from ebbtide.checkpoints.loading import load_newest_checkpoint
    from ebbtide.checkpoints.saving import save_checkpoint

__all__ = ["CheckpointError", "DamagedCheckpointError", "load_newest_checkpoint", "save_checkpoint"]


def __getattr__(name: str) -> Any:
    """Import the functions that need torch when they are first used."""
    if name == "load_newest_checkpoint":
        from ebbtide.checkpoints.loading import load_newest_checkpoint

        return load_newest_checkpoint
    if name == "save_checkpoint":
        from ebbtide.checkpoints.saving import save_checkpoint

        return save_checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
