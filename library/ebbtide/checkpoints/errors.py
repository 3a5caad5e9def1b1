"""Errors of checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read, or belongs to another training."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, or differs from what was written."""


def describe_os_error(error: OSError) -> str:
    """Describe the error without its errno."""
    if not error.strerror:
        return str(error)
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
