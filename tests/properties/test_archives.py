"""Archives: what is packed is unpacked, and no archive writes anything outside its folder."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.working_directory import pack_directory
from scheduler.agent.working_directory import UnpackLimits, WorkingDirectoryError, unpack_archive

LIMITS = UnpackLimits(bytes_max=1 << 20, entries_max=50)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)

NOT_PACKED = (".", "..", ".ebbtideignore", ".git", ".venv", "__pycache__", "node_modules")
file_names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
contents = st.one_of(st.binary(max_size=200), st.sampled_from([b"\0" * 600, b"x" * 512]))
trees = st.recursive(
    st.one_of(contents, st.just("link")),
    lambda child: st.dictionaries(file_names.filter(lambda name: name not in NOT_PACKED), child, max_size=4),
    max_leaves=12,
).map(lambda tree: tree if isinstance(tree, dict) else {"only": tree})

NAMES = ("a", "b", "a/b", "a/b/c", "../a", "a/../../b", "/abs", "a/..", "./a", "..", ".", "a//b")
TARGETS = ("..", "../..", "a/..", "a", "b", "/", "/etc", ".", "a/b/../../..", "../a/../..", "b/c")
KINDS = (
    *(tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE),
    *(tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE),
)
hostile_entries = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(KINDS), st.sampled_from(TARGETS)), max_size=6
)


@contextmanager
def place() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "inner").mkdir()
        yield Path(folder)


def write_tree(folder: Path, tree: dict[str, object]) -> None:
    folder.mkdir()
    for name, child in tree.items():
        if isinstance(child, dict):
            write_tree(folder / name, child)
        elif isinstance(child, bytes):
            (folder / name).write_bytes(child)
        else:
            (folder / name).symlink_to("missing")


def read_tree(folder: Path) -> dict[str, object]:
    return {path.name: read_entry(path) for path in folder.iterdir()}


def read_entry(path: Path) -> object:
    if path.is_symlink():
        return str(path.readlink())
    return read_tree(path) if path.is_dir() else (path.read_bytes(), bool(path.stat().st_mode & 0o100))


def write_archive(file: Path, entries: Sequence[tuple[str, bytes, str]]) -> None:
    with gzip.open(file, "wb") as packed, tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind, target in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname, entry.size = kind, target, 3 if kind == tarfile.REGTYPE else 0
            tar.addfile(entry, io.BytesIO(b"bad"))


@FEW
@given(trees)
def test_a_packed_folder_is_unpacked_equal(tree: dict[str, object]) -> None:
    with place() as folder:
        write_tree(folder / "source", tree)
        packed = pack_directory(folder / "source", folder / "archive")
        unpack_archive(folder / "archive", folder / "inner", LIMITS)
        assert read_tree(folder / "inner") == read_tree(folder / "source")
        assert pack_directory(folder / "inner", folder / "again").digest == packed.digest


@settings(FEW, max_examples=200)
@given(hostile_entries)
def test_no_archive_writes_or_links_outside_its_folder(entries: list[tuple[str, bytes, str]]) -> None:
    with place() as folder:
        write_archive(folder / "archive", entries)
        with suppress(WorkingDirectoryError, OSError):
            unpack_archive(folder / "archive", folder / "inner", LIMITS)
        assert sorted(path.name for path in folder.iterdir()) == ["archive", "inner"]
        root = (folder / "inner").resolve()
        for path in (folder / "inner").rglob("*"):
            assert path.is_symlink() or path.is_file() or path.is_dir()
            assert Path(os.path.realpath(path)).is_relative_to(root), path  # Path.resolve refuses loops of links
            assert path.is_dir() or path.is_symlink() or path.stat().st_nlink == 1


@FEW
@given(st.binary(max_size=3000), st.booleans())
def test_any_other_bytes_are_refused_with_one_error(data: bytes, is_compressed: bool) -> None:
    with place() as folder:
        (folder / "archive").write_bytes(gzip.compress(data) if is_compressed else data)
        try:
            unpack_archive(folder / "archive", folder / "inner", LIMITS)
        except WorkingDirectoryError:
            pass
        else:
            assert not any(data[:512]), "only an empty archive is valid"
