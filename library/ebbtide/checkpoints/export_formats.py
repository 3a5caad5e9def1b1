"""The formats that a checkpoint is exported to."""

from __future__ import annotations

from enum import Enum


class ExportFormat(str, Enum):
    """Formats: the weights in one file, the whole state for `torch.load`, or a folder as of `save_pretrained`."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    HF = "hf"

    __str__ = str.__str__
