"""Folders of an agent, and files in them that ranks may have tampered with."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from scheduler.agent.run_folder import STATUS_BYTES_MAX, AgentFolders, RunFolder
from scheduler.agent.shared_files import open_regular_file, read_end, read_json, write_json
from scheduler.domain.run_document import RankSeat, RunDocument
from scheduler.executors.run_outcome import read_oom_kills
from tests.agent.runs import python_job


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_folder_appears_complete_and_private(tmp_path: Path) -> None:
    folders = AgentFolders(tmp_path / "state")
    document = python_job("pass", job_id="../a b/.", node="node/1")
    folder = folders.folder(document.job_id, document.generation, document.node)
    previous = os.umask(0)
    try:
        folder.create(document)
    finally:
        os.umask(previous)
    assert folder.path.relative_to(folders.state).parts == ("jobs", "%2E%2E%2Fa%20b%2F%2E", "gen-1@node%2F1")
    assert stat.S_IMODE((folder.path / "run.json").stat().st_mode) == 0o600
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.path.parents[:3]] == [0o700] * 3
    assert folder.read_document() == document
    assert list(folders.list_unsettled()) == [folder]
    folder.settle()
    assert list(folders.list_unsettled()) == []
    assert list(folders.list_folders()) == [folder]


def test_generation_that_has_begun_is_not_created_again(tmp_path: Path) -> None:
    folder = AgentFolders(tmp_path).folder("job", 1, "node")
    folder.create(python_job("pass"))
    with pytest.raises(FileExistsError):
        folder.create(python_job("exit(1)"))
    assert folder.read_document() == python_job("pass")


def test_folder_without_a_document_says_so(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match=r"run\.json"):
        folder.read_document()


def test_notice_has_the_format_that_ranks_read(folder: RunFolder) -> None:
    folder.write_notice("leave", seconds_left=3.5)
    assert json.loads((folder.path / "notice.json").read_text()) == {
        "action": "leave", "step": None, "seconds_left": 3.5,
    }  # fmt: skip
    folder.write_notice("checkpoint", step=4)
    notice = json.loads((folder.path / "notice.json").read_text())
    assert notice == {"action": "checkpoint", "step": 4, "seconds_left": None}


def test_exit_codes_are_read_by_rank(folder: RunFolder) -> None:
    for rank, code in ((10, 0), (2, -9)):
        folder.write_record(f"exit-{rank}.json", {"code": code, "at": 0.0})
    (folder.path / "exit-x.json").write_text("{}")
    (folder.path / "exit-3.json").mkdir()
    (folder.path / "exit-4.json").write_text("no json")
    assert folder.read_exit_codes() == {2: -9, 10: 0}


@pytest.mark.parametrize(
    "text", ["[]", "{}", "[1]", "3", "null", '"x"', '{"code": 1e999, "pids": {"0": []}}', "[" * 9999]
)
def test_records_of_another_form_are_ignored(folder: RunFolder, text: str) -> None:
    """A rank that runs as the agent's user can write them."""
    for name in ("exit-7.json", "failure.json", "started.json"):
        (folder.path / name).write_text(text)
    (folder.path / "port").write_text(text.replace("3", "65536"))
    assert folder.read_exit_codes() == {}
    assert (folder.read_reason("failure.json"), folder.read_port(), folder.read_ranks()) == ("", 0, {})


def test_record_that_cannot_be_opened_is_ignored(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    folder.write_record("exit-0.json", {"code": 1})
    monkeypatch.setattr(os, "open", refuse)  # root may read files of mode 0, other agents may not
    assert folder.read_exit_codes() == {}
    assert not folder.has_record("ended")


def test_status_has_no_time_or_text_that_the_api_rejects(folder: RunFolder) -> None:
    path = folder.path / "status-0.json"
    path.write_text('{"phase": "failed", "reason": "a\\ud800\\u0000", "memory_events": "/sys/fs/cgroup/\\u0000"}')
    os.utime(path, ns=(-(10**9), -(10**9)))
    status = folder.read_status(0)
    assert status is not None
    assert (status.written_at_ns, status.reason) == (0, "a?\ufffd")
    assert read_oom_kills(status.memory_events) is None
    link = folder.path / "loop"
    link.symlink_to(link)
    assert read_oom_kills(str(link)) is None


def test_status_is_parsed_and_errors_name_the_file(folder: RunFolder) -> None:
    path = folder.path / "status-0.json"
    assert folder.read_status(0) is None
    path.write_text('{"phase": "running", "step": 3}')
    status = folder.read_status(0)
    assert status is not None
    assert (status.step, status.written_at_ns) == (3, path.stat().st_mtime_ns)
    for text in ("[]", '{"phase": "flying"}', "[" * STATUS_BYTES_MAX, " " * (STATUS_BYTES_MAX + 1), "\x00"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"status-0\.json"):
            folder.read_status(0)


def test_log_tail_leaves_out_lines_that_say_nothing(folder: RunFolder) -> None:
    """torchrun ends its report of a failure with a rule."""
    folder.path.joinpath("rank-0.log").write_text("ValueError: no data\n=====\n\n-- --\n")
    assert folder.read_log_tail(0) == "ValueError: no data"


def test_log_tail_has_the_last_lines(folder: RunFolder) -> None:
    assert folder.read_log_tail(0) == ""
    assert folder.open_log(0) is None
    folder.log_path(0).write_text("".join(f"line {number}\n\n" for number in range(2000)))
    assert folder.read_log_tail(0) == "line 1995 | line 1996 | line 1997 | line 1998 | line 1999"


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text('{"phase": "running"}')
    link, pipe, subfolder = tmp_path / "link", tmp_path / "pipe", tmp_path / "folder"
    link.symlink_to(target)
    os.mkfifo(pipe)
    subfolder.mkdir()
    for path in (link, pipe, subfolder):
        with pytest.raises(ValueError, match=path.name):
            open_regular_file(path)
        assert read_end(path, 10) == b""


def test_file_of_another_owner_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"code": 0})
    file = read_json(path, owner=os.geteuid())
    assert file is not None
    assert file.document == {"code": 0}
    with pytest.raises(ValueError, match="belongs to"):
        read_json(path, owner=os.geteuid() + 1)


def test_write_replaces_links_and_folders_and_leaves_no_part(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link.json"
    target.write_text("precious")
    link.symlink_to(target)
    write_json(link, [1])
    assert (link.read_text(), link.is_symlink(), target.read_text()) == ("[1]", False, "precious")
    squatted = tmp_path / "squatted.json"
    (squatted / "deep").mkdir(parents=True)
    write_json(squatted, [2])
    assert squatted.read_text() == "[2]"
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "nan.json", float("nan"))
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "missing" / "file", 1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "link.json",
        "squatted.json",
        "target",
    ]


def test_document_of_a_node_keeps_its_seats(tmp_path: Path) -> None:
    document = RunDocument("j", "o", "n", 2, ("a",), 1, 0, 2, (RankSeat(0, 0, 3), RankSeat(1, 1, 1)))
    folder = RunFolder(tmp_path / "gen")
    folder.create(document)
    assert folder.read_document().ranks == document.ranks
