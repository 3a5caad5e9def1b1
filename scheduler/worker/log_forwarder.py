"""Forward the output of ranks line by line to the agent's own output, where `kubectl logs` shows it.

    rank 3 | step 100: loss 2.31

Ranks print to files, so a slow reader blocks only the thread in this module, never a rank or the agent.
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
    """A growing file, read up to `offset`. `partial_line` has not ended yet."""

    prefix: bytes
    path: Path
    offset: int = 0
    partial_line: bytes = b""


class LogForwarder:
    """Forward the log files of ranks, and the agent's own `agent_log`, to `out`.

    The thread ends with the process, or when writing to `out` fails.
    """

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
        """Follow the files of these ranks. Files followed before are forwarded to their end."""
        with self._changed:
            self._finished_logs += self._logs
            self._logs = [_follow_log(f"rank {rank}", path) for rank, path in paths.items()]

    def close(self, *, within_s: float) -> bool:
        """Forward the remaining output and stop. Return whether that was done in time."""
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
                    finished, self._finished_logs = self._finished_logs, []
                    logs, is_closing = (self._agent_log, *self._logs), self._is_closing
                for log in finished:
                    self._drain(log)
                if is_closing:
                    return
                may_be_more = [self._forward(log) for log in logs]
                if not any(may_be_more):
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closing, _POLL_PERIOD_S)
        except OSError as error:
            logger.warning("Cannot forward the output of ranks; it is still in their log files: %s", error)

    def _drain(self, log: _FollowedLog) -> None:
        while self._forward(log):
            pass
        if log.partial_line:
            self._out.write(log.prefix + log.partial_line + b"\n")
            self._out.flush()

    def _forward(self, log: _FollowedLog) -> bool:
        """Forward new lines, one chunk at a time. Return whether there may be more."""
        try:
            with log.path.open("rb") as file:
                start = find_data_start(file.fileno(), log.offset)
                file.seek(start)
                new = file.read(_CHUNK_BYTES)
        except FileNotFoundError:
            return False
        if start > log.offset:
            gap = f"... {start - log.offset} bytes lost: printed faster than they were forwarded\n"
            self._out.write(log.prefix + gap.encode())
            log.partial_line, log.offset = b"", start
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
