"""Tokens and audit log of a MemoryStore."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import islice

from scheduler.store.front import ApiToken, AuditEntry, AuditFilter, StoredEntry
from scheduler.store.protocol import Page


class MemoryAudit:
    """See AuditLog."""

    def __init__(self) -> None:
        self._entries: list[StoredEntry] = []
        self._lock = threading.Lock()

    def append(self, entry: AuditEntry) -> None:
        with self._lock:
            self._entries.append(StoredEntry(len(self._entries) + 1, entry))

    def page(self, page: Page, wanted: AuditFilter) -> tuple[StoredEntry, ...]:
        with self._lock:
            after = self._entries[page.after :]
        return tuple(islice((each for each in after if wanted.takes(each.entry)), page.limit))


class MemoryTokens:
    """See Tokens."""

    def __init__(self, audit_log: MemoryAudit) -> None:
        self._tokens: dict[str, ApiToken] = {}
        self._audit_log = audit_log
        self._lock = threading.Lock()

    def add(self, token: ApiToken, audit: AuditEntry) -> None:
        with self._lock:
            self._tokens[token.id] = token
            self._audit_log.append(audit)

    def by_digest(self, digest: str) -> ApiToken | None:
        with self._lock:
            return next((token for token in self._tokens.values() if token.digest == digest), None)

    def by_id(self, token_id: str) -> ApiToken | None:
        with self._lock:
            return self._tokens.get(token_id)

    def page(self, *, after: str, limit: int) -> tuple[ApiToken, ...]:
        with self._lock:
            return tuple(self._tokens[each] for each in sorted(self._tokens) if each > after)[:limit]

    def revoke(self, token_id: str, now_s: float, audit: AuditEntry) -> ApiToken | None:
        with self._lock:
            token = self._tokens.get(token_id)
            if token is not None and token.revoked_at_s is None:
                token = self._tokens[token_id] = replace(token, revoked_at_s=now_s)
                self._audit_log.append(audit)
            return token

    def touch(self, token_id: str, now_s: float) -> None:
        with self._lock:
            self._tokens[token_id] = replace(self._tokens[token_id], last_used_at_s=now_s)
