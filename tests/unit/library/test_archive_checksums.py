"""Tensors are saved without the checksums of torch's archives, which take as long as writing them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from ebbtide.checkpoints import save_checkpoint
from ebbtide.checkpoints.archive_layout import find_row_major_data
from ebbtide.checkpoints.checksums import Checksums, read_checksums

SMALL, LARGE = torch.arange(100.0), torch.arange(500_000.0)


def _read_pieces(path: Path) -> list[bytes]:
    """Return the content of each piece, the smallest first."""
    checksums = read_checksums(path)
    assert isinstance(checksums, Checksums)
    contents = [
        (path / piece.file).read_bytes()[piece.offset : piece.offset + piece.length]
        for piece in checksums.pieces.values()
        if piece.data_offset is not None
    ]
    return sorted(contents, key=len)


@pytest.mark.parametrize("setting", [True, False])
def test_archives_have_no_checksums_and_the_setting_of_torch_stays(tmp_path: Path, setting: bool) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(setting)
    try:
        path = save_checkpoint({"small": SMALL, "large": LARGE}, tmp_path, step=1)
        assert torch.serialization.get_crc32_options() is setting
    finally:
        torch.serialization.set_crc32_options(before)
    for content, tensor in zip(_read_pieces(path), (SMALL, LARGE), strict=True):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert {entry.CRC for entry in archive.infolist()} == {0}
        assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), tensor)


def test_data_of_an_archive_without_checksums_is_found(tmp_path: Path) -> None:
    path = save_checkpoint({"large": LARGE}, tmp_path, step=1)
    (content,) = _read_pieces(path)
    offset = find_row_major_data(io.BytesIO(content), LARGE.itemsize)
    assert offset is not None
    assert torch.equal(
        torch.frombuffer(bytearray(content), dtype=LARGE.dtype, count=LARGE.numel(), offset=offset), LARGE
    )
