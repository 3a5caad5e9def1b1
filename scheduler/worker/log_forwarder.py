"""RankLogs: what ranks print, passed on line by line to the agent's own output, where people look (`kubectl logs`).

    rank 3 | step 100: loss 2.31

Ranks print into files, so that nobody who reads slowly holds them up, nor their agent: the thread here alone waits.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from scheduler.executors.log_files import find_data_start

logger = logging.getLogger(__name__)

_POLL_PERIOD_S = 0.2
_CHUNK_BYTES = 262_144
_LINE_BYTES_MAX = 16_384
_LINE_END = re.compile(rb"[\r\n]+")  # a progress bar ends its lines with \r


@dataclass
class _FollowedLog:
    """A file that grows, read up to `offset`; `part` of a line has not ended yet."""

    prefix: bytes
    path: Path
    offset: int = 0
    partial_line: bytes = b""


class LogForwarder:
    """What is printed goes to `out`, beside ranks' what their agent says in `agent_log`. Its thread ends with the
    process, or with its output."""

    def __init__(self, out: BinaryIO, *, agent_log: Path) -> None:
        self._out = out
        self._changed = threading.Condition()
        self._agent_log = _follow_log("agent", agent_log)
        self._logs: list[_FollowedLog] = []
        self._finished_logs: list[_FollowedLog] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="rank-logs", daemon=True)
        self._thread.start()

    def follow(self, paths: Mapping[int, Path]) -> None:
        """The files of these ranks from now on, instead of those before, which grow no more."""
        with self._changed:
            self._finished_logs += self._logs
            self._logs = [_follow_log(f"rank {rank}", path) for rank, path in paths.items()]

    def close(self, *, within_s: float) -> bool:
        """Pass on what is there, and end. Whether that was done in time."""
        with self._changed:
            self._is_closing = True
            self._finished_logs, self._logs = [*self._finished_logs, *self._logs, self._agent_log], []
            self._changed.notify_all()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    over, self._finished_logs = self._finished_logs, []
                    logs, is_closing = (self._agent_log, *self._logs), self._is_closing
                for log in over:
                    self._drain(log)
                if is_closing:
                    return
                may_be_more = [self._forward(log) for log in logs]
                if not any(may_be_more):
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closing, _POLL_PERIOD_S)
        except OSError as failure:
            logger.warning("what ranks print can be read in their files only: %s", failure)

    def _drain(self, log: _FollowedLog) -> None:
        while self._forward(log):
            pass
        if log.partial_line:
            self._out.write(log.prefix + log.partial_line + b"\n")
            self._out.flush()

    def _forward(self, log: _FollowedLog) -> bool:
        """The lines that have come, a part at a time; whether there may be more by now."""
        try:
            with log.path.open("rb") as file:
                kept = find_data_start(file.fileno(), log.offset)
                file.seek(kept)
                new = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return False
        if kept > log.offset:
            gap = f"... {kept - log.offset} bytes were printed too fast to be passed on\n"
            self._out.write(log.prefix + gap.encode())
            log.partial_line, log.offset = b"", kept
        log.offset += len(new)
        *lines, log.partial_line = _LINE_END.split(log.partial_line + new.replace(b"\0", b""))
        if len(log.partial_line) > _LINE_BYTES_MAX:
            lines, log.partial_line = [*lines, log.partial_line], b""
        text = b"".join(log.prefix + line + b"\n" for line in lines if line)
        if text:
            self._out.write(text)
            self._out.flush()
        return len(new) == _CHUNK_BYTES


def _follow_log(name: str, path: Path) -> _FollowedLog:
    return _FollowedLog(f"{name} | ".encode(), path)
