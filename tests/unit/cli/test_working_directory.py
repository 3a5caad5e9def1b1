"""Packing of working directories: equal content gives equal archives, and nothing unsafe or too large is packed."""

from __future__ import annotations

import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.exit_codes import InputError
from cli.working_directory import pack_directory
from scheduler.agent.working_directory import UnpackLimits, unpack_archive


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").write_text("print(1)\n")
    return made


def names(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return tar.getnames()


def test_digest_depends_on_content_alone(folder: Path, tmp_path: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "b.txt").write_text("b")
    first = pack_directory(folder, tmp_path / "first")
    copied = tmp_path / "elsewhere"
    (copied / "a").mkdir(parents=True)
    (copied / "a" / "b.txt").write_text("b")
    (copied / "train.py").write_text("print(1)\n")
    os.utime(copied / "train.py", (1, 1))
    (copied / "train.py").chmod(0o600)
    second = pack_directory(copied, tmp_path / "second")
    assert (second.digest, second.bytes, second.entries) == (first.digest, first.bytes, 3)
    (copied / "train.py").chmod(0o700)  # executable or not is content
    assert pack_directory(copied, tmp_path / "third").digest != first.digest


def test_archive_contains_neither_owners_nor_times(folder: Path, tmp_path: Path) -> None:
    pack_directory(folder, tmp_path / "archive")
    with tarfile.open(tmp_path / "archive") as tar:
        [entry] = tar.getmembers()
    assert (entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) == (0, 0, "", "", 315_619_200)


def test_ignore_file_adds_to_the_default_patterns(folder: Path, tmp_path: Path) -> None:
    for name in (".git/HEAD", "__pycache__/a.pyc", "sub/__pycache__/a.pyc", ".venv/bin/python", "node_modules/x/i.js"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    for name in ("data/big.bin", "data/small.txt", "logs/a.log", "keep.log"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    (folder / ".ebbtideignore").write_text("# results\n/logs/\n*.bin\n*.log\n!keep.log\n!node_modules\n")
    pack_directory(folder, tmp_path / "archive")
    assert names(tmp_path / "archive") == [
        *(".ebbtideignore", "data", "data/small.txt", "keep.log", "node_modules", "node_modules/x"),
        *("node_modules/x/i.js", "sub", "train.py"),
    ]


def link(folder: Path, target: str) -> Path:
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "link").symlink_to(target)
    return folder / "sub" / "link"


def make_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def make_socket(folder: Path) -> Path:
    os.chdir(folder)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    return folder / "socket"


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: link(folder, "/etc/passwd"),
        lambda folder: link(folder, "../../outside"),
        make_fifo,
        make_socket,
    ],
    ids=["absolute link", "link out", "fifo", "socket"],
)
def test_only_entries_that_stay_in_the_folder_are_packed(
    folder: Path, tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = make(folder)
    with pytest.raises(InputError) as refused:
        pack_directory(folder, tmp_path / "archive")
    assert str(path) in refused.value.message
    (folder / ".ebbtideignore").write_text(f"{path.name}\n")  # the remedy that the message names
    pack_directory(folder, tmp_path / "archive")


@pytest.mark.parametrize("target", ["..", "../train.py", ".", "missing"])
def test_links_within_the_folder_are_packed(folder: Path, tmp_path: Path, target: str) -> None:
    link(folder, target)
    assert pack_directory(folder, tmp_path / "archive").entries == 3


@pytest.mark.parametrize(("packed", "zeros", "words"), [(2000, 0, "archive"), (2000, 9000, "bytes of files")])
def test_limits_are_those_of_the_packed_and_the_unpacked_size(
    folder: Path, tmp_path: Path, packed: int, zeros: int, words: str
) -> None:
    (folder / "noise").write_bytes(os.urandom(packed) if not zeros else bytes(zeros))
    assert pack_directory(folder, tmp_path / "archive", bytes_max=4000).entries == 2
    with pytest.raises(InputError) as refused:
        pack_directory(folder, tmp_path / "archive", bytes_max=1500)
    assert "1500" in refused.value.message if not zeros else "6000" in refused.value.message
    assert words in refused.value.message


def test_missing_and_unreadable_folders_are_refused_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="nowhere"):
        pack_directory(tmp_path / "nowhere", tmp_path / "archive")

    def deny(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", deny)
    with pytest.raises(InputError, match="project: Permission denied"):
        pack_directory(folder, tmp_path / "archive")


def test_hard_links_are_packed_as_separate_files(folder: Path, tmp_path: Path) -> None:
    (folder / "again.py").hardlink_to(folder / "train.py")
    pack_directory(folder, tmp_path / "archive")
    (tmp_path / "unpacked").mkdir()
    unpack_archive(tmp_path / "archive", tmp_path / "unpacked", UnpackLimits())
    assert (tmp_path / "unpacked" / "again.py").read_text() == "print(1)\n"
    assert (tmp_path / "unpacked" / "again.py").stat().st_nlink == 1
