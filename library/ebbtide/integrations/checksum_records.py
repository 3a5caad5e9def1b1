"""Checksum records for checkpoints whose completeness the framework defines.

A checkpoint is a folder. Its record, a file in it, has the size and the checksums of every other file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from ebbtide.checkpoints.coordination import compute_on_rank_0
from ebbtide.checkpoints.errors import DamagedCheckpointError
from ebbtide.integrations.complete_checkpoints import RECORD_NAME, measure_files, rename_checkpoint
from ebbtide.integrations.file_checksums import compute_checksums, find_damaged_files
from ebbtide.integrations.framework_session import wait_for_all_ranks
from ebbtide.status_file import write_json_atomically

logger = logging.getLogger(__name__)


def record_checksums(path: Path) -> None:
    """Record the checksums of a checkpoint that every rank has written. Collective, if there is a process group.

    Raises:
        OSError: a file cannot be read, or the record cannot be written.
    """
    wait_for_all_ranks()
    sizes = compute_on_rank_0(partial(measure_files, path))
    record = {"files": sizes, "checksums": compute_checksums(path.parent, sizes)}
    compute_on_rank_0(partial(write_json_atomically, path / RECORD_NAME, record, durable=True))


def find_undamaged(paths: Iterable[Path]) -> Path | None:
    """Return the first undamaged checkpoint, None if there is none. Collective, if there is a process group.

    A checkpoint without a record cannot be verified and counts as undamaged. Damaged ones before the first undamaged
    one are renamed, to `damaged-` and what follows the first hyphen.

    Raises:
        DamagedCheckpointError: there are checkpoints, but all of them are damaged.
        OSError: a file cannot be read.
    """
    damaged: list[Path] = []
    found: list[Path] = compute_on_rank_0(lambda: list(paths))
    for path in found:
        if not (names := find_damage(path)):
            _rename_damaged(damaged)
            return path
        logger.error("The checkpoint %s is damaged: %s differ from their checksums.", path, ", ".join(names))
        damaged.append(path)
    if damaged:
        raise DamagedCheckpointError(
            f"All checkpoints in {damaged[0].parent} are damaged; see the log. Restore their files, or use another "
            "directory to start from step 0."
        )
    return None


def find_damage(path: Path) -> list[str]:
    """Return the names of the files of a checkpoint that are missing or differ. Collective, as `find_undamaged`."""
    record = compute_on_rank_0(partial(_read_record, path))
    if record is None:
        return []
    sizes, checksums = record
    return compute_on_rank_0(partial(_find_resized, path.parent, sizes)) or find_damaged_files(path.parent, checksums)


def _read_record(path: Path) -> tuple[dict[str, int], dict[str, list[int]]] | None:
    """Return sizes and checksums, None without a record. An unreadable record is damage of its own file."""
    place = path / RECORD_NAME
    try:
        document = json.loads(place.read_text(encoding="utf-8"))
        return dict(document["files"]), dict(document["checksums"])
    except FileNotFoundError:
        logger.warning("The checkpoint %s has no checksums, so it cannot be verified.", path)
        return None
    except (ValueError, TypeError, KeyError):
        return {str(place.relative_to(path.parent)): -1}, {}


def _find_resized(root: Path, sizes: Mapping[str, int]) -> list[str]:
    """Return the names of the files that are missing or have another size."""
    places = {name: root / name for name in sizes}
    return [name for name, place in places.items() if not place.is_file() or place.stat().st_size != sizes[name]]


def _rename_damaged(paths: Iterable[Path]) -> None:
    def rename() -> None:
        for path in paths:
            rename_checkpoint(path, path.with_name(f"damaged-{path.name.partition('-')[2]}"))

    compute_on_rank_0(rename)
