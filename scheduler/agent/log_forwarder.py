"""Forward the output of ranks line by line to the agent's own output, where `kubectl logs` shows it.

    rank 3 | step 100: loss 2.31

Ranks print to files, so a slow reader blocks only the thread in this module, never a rank or the agent.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from scheduler.agent.rank_environment import list_processes
from scheduler.agent.run_folder import RunFolder
from scheduler.agent.run_secrets import find_mask
from scheduler.agent.secret_masking import SecretMask
from scheduler.agent.shared_files import open_regular_file, write_json
from scheduler.domain.run_document import RunDocument
from scheduler.executors.log_files import find_data_start

logger = logging.getLogger(__name__)

_RECORD = "forwarded.json"
_POLL_PERIOD_S = 0.2
_CHUNK_BYTES = 262_144
_LINE_BYTES_MAX = 16_384
_LINE_END = re.compile(rb"[\r\n]+")  # a progress bar ends its lines with \r


@dataclass
class _FollowedLog:
    """A growing file of a run, read up to `offset`. `partial_line` has not ended yet."""

    name: str
    path: Path
    offset: int = 0
    partial_line: bytes = b""
    mask: SecretMask | None = None

    @property
    def prefix(self) -> bytes:
        return f"{self.name} | ".encode()

    @property
    def written(self) -> int:
        """Offset up to which lines were written. A restarted agent continues there."""
        return self.offset - len(self.partial_line)


@dataclass
class _FollowedRun:
    """The logs of a run: of its ranks and of its supervisor."""

    folder: RunFolder
    logs: list[_FollowedLog]
    has_ended: bool = False


class LogForwarder:
    """Forward the output of runs and the errors of their supervisors to `out`.

    The thread ends with the process, or when writing to `out` fails.

    Args:
        earlier: folders of earlier agents, of which ended runs may have output that was not forwarded.
    """

    def __init__(self, out: BinaryIO, earlier: Iterable[RunFolder] = ()) -> None:
        self._out = out
        self._changed = threading.Condition()
        self._runs: dict[Path, _FollowedRun] = {}
        self._complete: set[Path] = set()
        self._unreadable: set[Path] = set()
        self._is_closing = False
        for folder in earlier:
            if folder.has_begun and folder.is_settled:
                with suppress(ValueError, OSError):  # written by another version
                    self.follow(folder, folder.read_document(), has_ended=True)
        self._thread = threading.Thread(target=self._run, name="log-forwarder", daemon=True)
        self._thread.start()

    def follow(self, folder: RunFolder, document: RunDocument, *, has_ended: bool) -> None:
        """Forward the logs of a run, from its begin on. Once it `has_ended`, they are forwarded to their end."""
        with self._changed:
            if folder.path in self._complete:
                return
            run = self._runs.get(folder.path)
            if run is None:
                run = self._runs[folder.path] = _FollowedRun(folder, _find_logs(folder, document))
            if has_ended and not run.has_ended:
                run.has_ended = True
                self._changed.notify_all()

    def has_sent(self, folder: RunFolder) -> bool:
        """Return whether all output of an ended run was forwarded."""
        with self._changed:
            return folder.path not in self._runs

    def close(self, *, within_s: float) -> bool:
        """Forward the remaining output and stop. Return whether that was done in time."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    is_closing = self._is_closing
                    runs = [(run, run.has_ended or is_closing) for run in self._runs.values()]
                may_be_more = [self._forward_run(run, is_last=is_last) for run, is_last in runs]
                if is_closing:
                    return
                if not any(may_be_more):
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closing, _POLL_PERIOD_S)
        except OSError as error:
            logger.warning("Cannot forward the output of ranks; it is still in their log files: %s", error)

    def _forward_run(self, run: _FollowedRun, *, is_last: bool) -> bool:
        """Forward new lines of a run, to the end of its files if it has ended. Return whether there may be more."""
        before = [log.written for log in run.logs]
        may_be_more = self._forward_chunks(run)
        while is_last and may_be_more:
            may_be_more = self._forward_chunks(run)
        if is_last:
            for log in run.logs:
                self._end_line(log)
            with self._changed:
                self._complete.add(run.folder.path)
                del self._runs[run.folder.path]
        if is_last or before != [log.written for log in run.logs]:
            _write_record(run)
        return may_be_more

    def _forward_chunks(self, run: _FollowedRun) -> bool:
        may_be_more = [self._forward(log) for log in run.logs]
        return any(may_be_more)

    def _end_line(self, log: _FollowedLog) -> None:
        if log.partial_line:
            line = log.partial_line if log.mask is None else log.mask.mask(log.partial_line)
            self._out.write(log.prefix + line + b"\n")
            self._out.flush()
            log.partial_line = b""

    def _forward(self, log: _FollowedLog) -> bool:
        """Forward new lines, one chunk at a time. Return whether there may be more."""
        try:
            descriptor = open_regular_file(log.path)
        except (OSError, ValueError) as error:
            self._report_unreadable(log, error)
            return False
        if descriptor is None:
            return False
        with os.fdopen(descriptor, "rb") as file:
            start = find_data_start(descriptor, log.offset)
            file.seek(start)
            new = file.read(_CHUNK_BYTES)
        if start > log.offset:
            gap = f"... {start - log.offset} bytes lost: printed faster than they were forwarded\n"
            self._out.write(log.prefix + gap.encode())
            log.partial_line, log.offset = b"", start
        log.offset += len(new)
        lines = _take_lines(log, new)
        text = b"".join(log.prefix + line + b"\n" for line in lines if line)
        if text:
            self._out.write(text)
            self._out.flush()
        return len(new) == _CHUNK_BYTES

    def _report_unreadable(self, log: _FollowedLog, error: Exception) -> None:
        if log.path not in self._unreadable:
            self._unreadable.add(log.path)
            logger.warning("cannot read output of %s: %s", log.name, error)


def _take_lines(log: _FollowedLog, new: bytes) -> list[bytes]:
    """Return the lines that `new` completes, masked. A line that is too long is cut where no secret may begin."""
    text = log.partial_line + new.replace(b"\0", b"")
    masked = text if log.mask is None else log.mask.mask(text)
    partial = len(_LINE_END.split(text)[-1])
    if partial > _LINE_BYTES_MAX:
        partial = 0 if log.mask is None else log.mask.count_open_bytes(text[-partial:])
    end = len(text) - partial
    log.partial_line = text[end:]
    return _LINE_END.split(masked[:end])


def _find_logs(folder: RunFolder, document: RunDocument) -> list[_FollowedLog]:
    """Return the logs of a run, from where an earlier agent has forwarded them."""
    logs = [_FollowedLog("supervisor", folder.supervisor_log)]
    logs += [_FollowedLog(f"rank {seat.rank}", folder.log_path(seat.rank)) for seat in list_processes(document)]
    mask = find_mask(folder, document)
    for log in logs:
        log.mask = mask
    with suppress(OSError):
        record = folder.read_object(_RECORD)
        for log in logs:
            offset = record.get(log.name)
            log.offset = offset if isinstance(offset, int) else 0
    return logs


def _write_record(run: _FollowedRun) -> None:
    """Record what was forwarded. Without a record, the next agent forwards it once more."""
    try:
        write_json(run.folder.path / _RECORD, {log.name: log.written for log in run.logs})
    except OSError as error:
        logger.warning("cannot record which output was forwarded: %s", error)
