"""Where torch.save stored a tensor's bytes, for checkpoints of other tools, which do not record it."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import IO, Any

_LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True)
class _Layout:
    """The arguments with which the tensor is rebuilt from its storage."""

    storage_key: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def find_row_major_data(archive: IO[bytes], item_bytes: int) -> int | None:
    """Return the position of a tensor's row-major bytes in what torch.save wrote, or None for another layout.

    Args:
        archive: one piece, positioned anywhere.
        item_bytes: bytes per element.
    """
    try:
        with zipfile.ZipFile(archive) as entries:
            names: dict[str, zipfile.ZipInfo] = {
                name.partition("/")[2]: entries.getinfo(name) for name in entries.namelist()
            }
            # torch.save may leave the checksums of its archive out, and zipfile would refuse to read it then.
            names["data.pkl"].CRC = None  # type: ignore[assignment]
            with entries.open(names["data.pkl"]) as stream:
                layout = _LayoutUnpickler(stream).load()
            if not isinstance(layout, _Layout) or not _is_row_major(layout.size, layout.stride):
                return None
            entry = names[f"data/{layout.storage_key}"]
        if entry.compress_type != zipfile.ZIP_STORED:
            return None
        archive.seek(entry.header_offset)
        name_bytes, extra_bytes = struct.unpack("<HH", archive.read(_LOCAL_HEADER_BYTES)[26:30])
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, struct.error, EOFError):
        return None
    header_bytes: int = _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    return entry.header_offset + header_bytes + layout.offset * item_bytes


class _LayoutUnpickler(pickle.Unpickler):
    """Unpickler that rebuilds no tensor and imports nothing but the few names that a plain tensor needs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _describe_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a plain tensor")

    def persistent_load(self, identifier: Any) -> str:
        return str(identifier[2])


def _describe_tensor(storage_key: str, offset: int, size: Any, stride: Any, *_: object) -> _Layout:
    return _Layout(storage_key, offset, tuple(size), tuple(stride))


def _is_row_major(size: Sequence[int], stride: Sequence[int]) -> bool:
    expected = [prod(size[axis + 1 :]) for axis in range(len(size))]
    return all(length <= 1 or own == wanted for length, own, wanted in zip(size, stride, expected, strict=True))
