"""Working directories on a machine: prepared once, safely, completely or not at all."""

from __future__ import annotations

import errno
import gzip
import io
import os
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from scheduler.agent.working_directory import (
    UnpackLimits,
    UserIds,
    WorkingDirectories,
    WorkingDirectory,
    WorkingDirectoryError,
    unpack_archive,
)

SHELL = ("sh", "-c")


class Machine:
    """A machine whose working directories come from one archive. Counts downloads and setup commands."""

    def __init__(self, folder: Path, archive: bytes) -> None:
        self.root, self.archive = folder / "workdirs", archive
        self.directories = WorkingDirectories(self.root)
        self.digest = digest_of(archive)
        self.downloads, self.setups = 0, 0

    def prepare(self, script: str = "", *, digest: str = "", user: UserIds | None = None) -> WorkingDirectory:
        setup = (*SHELL, script) if script else ()
        return self.directories.prepare(digest or self.digest, self._fetch, run_setup=self._run, setup=setup, user=user)

    def _fetch(self, target: Path) -> None:
        self.downloads += 1
        target.write_bytes(self.archive)

    def _run(self, command: tuple[str, ...], folder: Path, log: Path) -> int:
        self.setups += 1
        with log.open("ab") as output:
            return subprocess.run(command, cwd=folder, stdout=output, stderr=output, check=False).returncode


def digest_of(archive: bytes) -> str:
    return f"sha256:{sha256(archive).hexdigest()}"


def make_archive(files: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(raw.getvalue(), mtime=0)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, make_archive({"train.py": b"print(1)", "pkg/__init__.py": b"", "run.sh": b"exit"}))


def prepared(machine: Machine) -> list[Path]:
    return [path for path in machine.root.iterdir() if path.suffix != ".lock"]


def test_an_archive_is_unpacked_and_set_up_once_per_machine(machine: Machine) -> None:
    first = machine.prepare("echo built > built.txt")
    assert (first.path / "train.py").read_text() == "print(1)"
    assert (first.path / "built.txt").read_text() == "built\n"
    assert first.unpacked == ("pkg", "run.sh", "train.py")
    again = WorkingDirectories(machine.root).prepare(  # another agent process
        machine.digest, machine._fetch, run_setup=machine._run, setup=(*SHELL, "echo built > built.txt")
    )
    assert (again, machine.downloads, machine.setups) == (first, 1, 1)


def test_another_setup_command_or_user_has_another_directory(machine: Machine) -> None:
    me = UserIds(os.getuid(), os.getgid())
    paths = {machine.prepare().path, machine.prepare("true").path, machine.prepare("true", user=me).path}
    assert len(paths) == 3


def test_threads_wait_for_the_one_that_prepares(machine: Machine) -> None:
    found: list[WorkingDirectory] = []
    threads = [threading.Thread(target=lambda: found.append(machine.prepare("sleep 0.1"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found)), machine.setups) == (4, 1, 1)


def test_a_failed_setup_leaves_nothing_and_reports_its_last_lines(machine: Machine) -> None:
    with pytest.raises(WorkingDirectoryError) as failed:
        machine.prepare("for i in $(seq 30); do echo line $i; done; echo no such package >&2; exit 3")
    message = str(failed.value)
    assert "exited with code 3" in message
    assert "line 30\nno such package" in message
    assert "line 10\n" not in message
    assert prepared(machine) == []


@pytest.mark.parametrize("cut", [0, 20, -1])
def test_a_truncated_archive_is_refused_and_leaves_nothing(machine: Machine, cut: int) -> None:
    machine.archive = machine.archive[:cut]
    with pytest.raises(WorkingDirectoryError, match="truncated or altered"):
        machine.prepare()
    assert prepared(machine) == []


def test_a_directory_whose_preparation_was_killed_is_prepared_again(machine: Machine) -> None:
    path = machine.prepare().path
    (path.parent / "ready.json").unlink()
    (path / "train.py").write_text("half")
    assert (machine.prepare().path / "train.py").read_text() == "print(1)"
    assert machine.downloads == 2


def test_an_interrupted_download_leaves_nothing(machine: Machine) -> None:
    def vanish(target: Path) -> None:
        target.write_bytes(b"half")
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    with pytest.raises(WorkingDirectoryError, match="Connection reset"):
        machine.directories.prepare(machine.digest, vanish, run_setup=machine._run)
    assert prepared(machine) == []


def test_each_generation_gets_its_own_files_and_links_to_what_setup_added(machine: Machine, tmp_path: Path) -> None:
    directory = machine.prepare("mkdir -p .venv/bin && echo python > .venv/bin/python && ln -s train.py main.py")
    for generation in ("gen-1", "gen-2"):
        directory.copy_to(tmp_path / generation)
    (tmp_path / "gen-1" / "train.py").write_text("changed")
    (tmp_path / "gen-1" / "pkg" / "out.txt").write_text("result")
    assert (tmp_path / "gen-2" / "train.py").read_text() == (directory.path / "train.py").read_text() == "print(1)"
    assert not (tmp_path / "gen-2" / "pkg" / "out.txt").exists()
    assert (tmp_path / "gen-1" / ".venv").readlink() == directory.path / ".venv"
    assert (tmp_path / "gen-1" / ".venv" / "bin" / "python").read_text() == "python\n"


def test_a_copy_that_does_not_fit_leaves_nothing(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = machine.prepare()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copy2", full)
    with pytest.raises(WorkingDirectoryError, match="No space left"):
        directory.copy_to(tmp_path / "gen-1")
    assert list(tmp_path.glob("*gen-1*")) == []


def test_unused_directories_are_deleted_unless_they_are_in_use(machine: Machine) -> None:
    old, used, new = machine.prepare(), machine.prepare("true"), machine.prepare("echo new")
    for directory in (old, used):
        os.utime(directory.path.parent / "ready.json", (1, 1))
    assert machine.directories.delete_unused(time.time() - 60, in_use={used.path}) == 1
    assert (old.path.exists(), used.path.exists(), new.path.exists()) == (False, True, True)
    machine.prepare()
    assert old.path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_files_belong_to_the_user(machine: Machine, tmp_path: Path) -> None:
    nobody = UserIds(65534, 65534)
    directory = machine.prepare("ln -s /etc/passwd link", user=nobody)
    assert (directory.path / "pkg" / "__init__.py").stat().st_uid == 65534
    directory.copy_to(tmp_path / "gen-1", nobody)
    assert (tmp_path / "gen-1" / "train.py").stat().st_uid == 65534
    assert Path("/etc/passwd").stat().st_uid == 0


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, target, size
    return made


def pack_entries(*entries: tarfile.TarInfo) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for each in entries:
            tar.addfile(each, io.BytesIO(bytes(each.size)))
    return gzip.compress(raw.getvalue())


def pax_bomb() -> bytes:
    made = entry("x")
    made.pax_headers = {"comment": "x" * (3 << 20)}
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(made)
    return gzip.compress(raw.getvalue())


LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pack_entries(entry("../up")), "'..'"),
        (lambda: pack_entries(entry("a/../../up")), "'..'"),
        (lambda: pack_entries(entry("/etc/cron.d/job")), "absolute"),
        (lambda: pack_entries(entry("l", LINK, "/etc")), "absolute path"),
        (lambda: pack_entries(entry("a/l", LINK, "../../x")), "leads out"),
        (lambda: pack_entries(entry("p/l", LINK, ".."), entry("p/r", LINK, "l/..")), "'..' after a name"),
        (lambda: pack_entries(entry("d", tarfile.DIRTYPE), entry("l", LINK, "d"), entry("l/f")), "below the symbolic"),
        (lambda: pack_entries(entry("l", LINK, "f"), entry("l")), "twice"),
        (lambda: pack_entries(entry("l", LINK, "d"), entry("l", tarfile.DIRTYPE)), "twice"),
        (lambda: pack_entries(entry("a"), entry("h", HARD, "a")), "neither a file"),
        (lambda: pack_entries(entry("null", tarfile.CHRTYPE)), "neither a file"),
        (lambda: pack_entries(entry("pipe", tarfile.FIFOTYPE)), "neither a file"),
        (lambda: pack_entries(*(entry(f"z{at}", size=400_000) for at in range(3))), "more than 1000000 bytes"),
        (lambda: pack_entries(*(entry(f"f{at}") for at in range(12))), "more than 10 entries"),
        (pax_bomb, "a header of an entry"),
        (lambda: gzip.compress(b"not a tar file" * 100), "damaged"),
        (lambda: b"\x1f\x8b broken", "damaged"),
    ],
    ids=[
        *("up", "up through a folder", "absolute", "absolute link", "link out", "chain of links", "below a link"),
        *("file over a link", "folder over a link", "hard link", "device", "fifo", "size bomb", "entry bomb"),
        *("header bomb", "no tar", "no gzip"),
    ],
)
def test_an_unsafe_archive_is_refused(tmp_path: Path, make: Callable[[], bytes], words: str) -> None:
    (tmp_path / "archive").write_bytes(make())
    (tmp_path / "target").mkdir()
    with pytest.raises(WorkingDirectoryError) as refused:
        unpack_archive(tmp_path / "archive", tmp_path / "target", UnpackLimits(1_000_000, 10))
    assert words in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "target"]


def test_archives_of_the_tar_command_are_accepted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg" / "a.py").write_text("a")
    (source / "link").symlink_to("pkg/a.py")
    subprocess.run(["tar", "-C", str(source), "-czf", str(tmp_path / "archive"), "."], check=True)
    (tmp_path / "target").mkdir()
    unpack_archive(tmp_path / "archive", tmp_path / "target", UnpackLimits())
    assert (tmp_path / "target" / "link").read_text() == "a"
