"""Sends the output of ranks to the control plane, in a thread of its own, so that users can read it there.

<state>/jobs/<job>/gen-<n>@<node>/shipping.json    how much of each log was sent
"""

from __future__ import annotations

import http.client
import logging
import os
import random
import threading
import time
import urllib.parse
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from scheduler.agent.agent_state import AgentIdentity
from scheduler.agent.rank_environment import list_processes
from scheduler.agent.run_folder import RunFolder
from scheduler.agent.run_secrets import find_mask
from scheduler.agent.secret_masking import SecretMask, mask_chunk
from scheduler.agent.shared_files import write_json
from scheduler.domain.run_document import RunDocument
from scheduler.executors.log_files import find_data_start

logger = logging.getLogger(__name__)

_RECORD = "shipping.json"
_OFFSET_HEADER = "Upload-Offset"
_CHUNK_BYTES_MAX, _CHUNK_BYTES_MIN = 262_144, 512
_NOTICE_BYTES_MAX = 64
_PERIOD_S = 0.5
"""Time between two chunks of the log of a live rank."""
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 10.0
_TIMEOUT_S = 10.0
_REFUSALS_MAX = 6
_NOT_CONNECTED = (OSError, http.client.HTTPException)


class _Chunk(NamedTuple):
    """Bytes of a log, the position after them, and the size of the file."""

    data: bytes
    position: int
    size: int

    @property
    def is_end(self) -> bool:
        return self.position >= self.size


class _Answer(NamedTuple):
    status: int
    offset: int
    retry_after_s: float
    detail: str


@dataclass(slots=True)
class _RankLog:
    """Progress of sending one log.

    `position` is the offset in the file. `sent` is the number of bytes that the service received, which differs from it
    once a part was dropped or the rank has truncated the file.
    """

    rank: int
    position: int = 0
    sent: int = 0
    is_complete: bool = False
    is_open: bool = False
    due_s: float = 0.0
    refusals: int = 0


@dataclass(slots=True)
class _RunLogs:
    """The logs of a run. `mask` hides the values of its secrets."""

    folder: RunFolder
    document: RunDocument
    logs: list[_RankLog]
    mask: SecretMask | None = None
    has_ended: bool = False
    logged_errors: set[str] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return all(log.is_complete for log in self.logs)

    def read_chunk(self, log: _RankLog, bytes_max: int, *, has_ended: bool) -> _Chunk:
        """Return the next bytes of a log; none if it cannot be read, which is logged once."""
        try:
            return self._read(log, bytes_max, has_ended=has_ended)
        except (OSError, ValueError) as error:
            if str(error) not in self.logged_errors:
                self.logged_errors.add(str(error))
                logger.warning("cannot read output of rank %d in %s: %s", log.rank, self.folder.path, error)
            return _Chunk(b"", log.position, 0)

    def _read(self, log: _RankLog, bytes_max: int, *, has_ended: bool) -> _Chunk:
        """Read from the position of the log on, or from the front of a log that was truncated."""
        around = 0 if self.mask is None else self.mask.longest
        descriptor = self.folder.open_log(log.rank)
        if descriptor is None:
            return _Chunk(b"", log.position, 0)
        try:
            size = os.fstat(descriptor).st_size
            position = log.position if log.position <= size else 0
            start = min(find_data_start(descriptor, position), size)
            notice = b"\n... %d bytes were dropped\n" % (start - position) if start > position else b""
            before = os.pread(descriptor, min(around, start), start - min(around, start))
            data_max = bytes_max - _NOTICE_BYTES_MAX
            data = os.pread(descriptor, data_max + around, start)
        finally:
            os.close(descriptor)
        may_grow = not has_ended and start + len(data) >= size
        data = mask_chunk(self.mask, before, data, size_max=data_max, may_grow=may_grow)
        return _Chunk(notice + data, start + len(data), size)

    def write_record(self) -> None:
        """Record what was sent. Without a record, an agent starts at the front and skips what the service has."""
        document = {str(log.rank): [log.position, log.sent, log.is_complete] for log in self.logs}
        try:
            write_json(self.folder.path / _RECORD, document)
        except OSError as error:
            logger.warning("cannot record which output was sent: %s", error)


class LogShipper:
    """Sends the logs of runs on one machine, until all of them have ended and were sent.

    Args:
        earlier: folders of earlier agents, of which settled ones may have output that was not sent.
    """

    def __init__(self, identity: AgentIdentity, earlier: Iterable[RunFolder] = ()) -> None:
        parts = urllib.parse.urlsplit(identity.url)
        self._url = identity.url
        self._path = f"{parts.path.rstrip('/')}/v1/machines/{urllib.parse.quote(identity.machine, safe='')}/logs"
        self._headers = {"Authorization": f"Bearer {identity.credential}", "Content-Type": "application/octet-stream"}
        self._connection: http.client.HTTPConnection | None = None
        self._changed = threading.Condition()
        self._runs: dict[Path, _RunLogs] = {}
        self._complete: set[Path] = set()
        self._is_closed = False
        self._failures, self._retry_at_s = 0, 0.0
        self._chunk_bytes = _CHUNK_BYTES_MAX
        self._thread = threading.Thread(target=self._run, args=(tuple(earlier),), name="log-shipper", daemon=True)
        self._thread.start()

    def follow(self, folder: RunFolder, document: RunDocument, *, has_ended: bool) -> None:
        """Send the logs of a run, from its begin on. Once it `has_ended`, the rest is sent at once."""
        with self._changed:
            if folder.path in self._complete:
                return
            run = self._runs.get(folder.path)
            if run is None:
                logs, mask = _read_logs(folder, document), find_mask(folder, document)
                run = self._runs[folder.path] = _RunLogs(folder, document, logs, mask)
            elif run.has_ended or not has_ended:
                return
            run.has_ended = has_ended
            for log in run.logs:
                log.due_s = 0.0
            self._changed.notify_all()

    def has_sent(self, folder: RunFolder) -> bool:
        """Return whether all output of an ended run was sent, or was refused for good."""
        with self._changed:
            if folder.path in self._complete or folder.path in self._runs:
                return folder.path in self._complete
        try:
            return all(log.is_complete for log in _read_logs(folder, folder.read_document()))
        except ValueError:  # written by another version, so that this agent cannot send it
            return True

    def close(self, *, within_s: float) -> None:
        """Stop. The next agent sends what is left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(within_s)

    def _run(self, earlier: Iterable[RunFolder]) -> None:
        for folder in earlier:
            self._follow_settled(folder)
        while self._wait():
            for run in tuple(self._runs.values()):
                for log in run.logs:
                    if not self._is_closed and not log.is_complete and time.monotonic() >= self._due_s(log):
                        self._ship(run, log)
                if run.is_complete:
                    with self._changed:
                        self._complete.add(run.folder.path)
                        del self._runs[run.folder.path]
        self._disconnect()

    def _follow_settled(self, folder: RunFolder) -> None:
        if folder.is_settled and (folder.path / "start.json").exists():
            try:
                self.follow(folder, folder.read_document(), has_ended=True)
            except (ValueError, OSError) as error:
                logger.warning("cannot send the output in %s: %s", folder.path, error)

    def _wait(self) -> bool:
        """Wait until a log is due. Return False once the shipper is closed."""
        with self._changed:
            while not self._is_closed:
                due_s = [self._due_s(log) for run in self._runs.values() for log in run.logs if not log.is_complete]
                pause_s = min(due_s) - time.monotonic() if due_s else None
                if pause_s is not None and pause_s <= 0.0:
                    return True
                if pause_s is None and any(run.is_complete for run in self._runs.values()):
                    return True
                self._changed.wait(pause_s)
            return False

    def _due_s(self, log: _RankLog) -> float:
        return max(log.due_s, self._retry_at_s)

    def _ship(self, run: _RunLogs, log: _RankLog) -> None:
        """Send the next chunk of a log, if it has one. The first one may be empty, and claims the log."""
        has_ended = run.has_ended  # before the file is read, so that the last bytes are not missed
        chunk = run.read_chunk(log, self._chunk_bytes, has_ended=has_ended)
        is_last = has_ended and chunk.is_end
        log.due_s = 0.0 if has_ended else time.monotonic() + _PERIOD_S
        if not chunk.data and not is_last and log.is_open:
            return
        try:
            answer = self._put(run.document, log, chunk.data, is_last=is_last)
        except _NOT_CONNECTED as error:
            self._disconnect()
            self._back_off(str(error))
            return
        if self._accept(run, log, chunk, answer, is_last=is_last):
            if self._failures:
                logger.info("output is sent to %s again", self._url)
            self._failures = 0

    def _accept(self, run: _RunLogs, log: _RankLog, chunk: _Chunk, answer: _Answer, *, is_last: bool) -> bool:
        """Act on an answer. Return whether the service works."""
        match answer.status:
            case http.client.NO_CONTENT:
                # An earlier agent may have sent more than its record says.
                more = max(0, answer.offset - log.sent - len(chunk.data))
                log.position = max(chunk.position, min(chunk.position + more, chunk.size))
                log.sent += len(chunk.data) + more
                log.is_open, log.is_complete, log.refusals = True, is_last, 0
                run.write_record()
            case http.client.CONFLICT:
                # The service has lost output. Send again what the file still has of it.
                log.position = max(0, log.position - max(0, log.sent - answer.offset))
                log.sent, log.due_s = answer.offset, time.monotonic() + _PERIOD_S
            case http.client.REQUEST_ENTITY_TOO_LARGE if self._chunk_bytes > _CHUNK_BYTES_MIN:
                self._chunk_bytes //= 2
            case http.client.FORBIDDEN | http.client.NOT_FOUND | http.client.UNPROCESSABLE_ENTITY:
                self._record_refusal(run, log, answer)
            case _:
                self._back_off(f"{answer.status} {answer.detail}", at_least_s=answer.retry_after_s)
                return False
        return True

    def _record_refusal(self, run: _RunLogs, log: _RankLog, answer: _Answer) -> None:
        """Try again later: another process of the service may not know the run yet. Give up after a few times."""
        log.refusals += 1
        log.due_s = time.monotonic() + min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2.0 ** (log.refusals - 1))
        if log.refusals >= _REFUSALS_MAX:
            logger.warning("output of rank %d in %s is not sent: %s", log.rank, run.folder.path, answer.detail)
            log.is_complete = True
            run.write_record()

    def _back_off(self, reason: str, *, at_least_s: float = 0.0) -> None:
        if not self._failures:
            logger.warning("cannot send output to %s; ranks continue: %s", self._url, reason)
        self._failures += 1
        backoff_s = min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2.0 ** min(self._failures - 1, 10)) * random.uniform(0.5, 1.0)
        self._retry_at_s = time.monotonic() + max(at_least_s, backoff_s)

    def _put(self, document: RunDocument, log: _RankLog, data: bytes, *, is_last: bool) -> _Answer:
        """Send a chunk, reconnecting once if the server had closed an idle connection."""
        job = urllib.parse.quote(document.job_id, safe="")
        query = f"offset={log.sent}" + ("&complete=true" if is_last else "")
        path = f"{self._path}/{job}/{document.generation}/{log.rank}?{query}"
        was_open = self._connection is not None
        try:
            return self._request(path, data)
        except (http.client.RemoteDisconnected, ConnectionError):
            if not was_open:
                raise
            self._disconnect()
            return self._request(path, data)

    def _request(self, path: str, data: bytes) -> _Answer:
        if self._connection is None:
            parts = urllib.parse.urlsplit(self._url)
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        self._connection.request("PUT", path, data, self._headers)
        answer = self._connection.getresponse()
        detail = answer.read().decode("utf-8", "replace")[:500]
        return _Answer(
            answer.status,
            _parse_number(answer.headers[_OFFSET_HEADER]),
            _parse_number(answer.headers["Retry-After"]),
            detail,
        )

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _read_logs(folder: RunFolder, document: RunDocument) -> list[_RankLog]:
    """Return the logs of a run, with what an earlier agent has recorded as sent."""
    logs = [_RankLog(seat.rank) for seat in list_processes(document)]
    with suppress(OSError):
        record = folder.read_object(_RECORD)
        for log in logs:
            match record.get(str(log.rank)):
                case [int(position), int(sent), bool(is_complete)]:
                    log.position, log.sent, log.is_complete, log.is_open = position, sent, is_complete, True
    return logs


def _parse_number(text: str | None) -> int:
    """Return the number in a header; 0 if it is missing or something else."""
    return int(text) if text is not None and text.isdecimal() else 0
