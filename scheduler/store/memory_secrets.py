"""Encrypted secrets of queues in memory."""

from __future__ import annotations

import threading
from dataclasses import replace

from scheduler.store.api_protocol import AuditEntry, AuditLog
from scheduler.store.sealed_secrets import SealedSecret


class MemorySecrets:
    """SecretStore in memory."""

    def __init__(self, audit_log: AuditLog) -> None:
        self._audit_log = audit_log
        self._secrets: dict[tuple[str, str], SealedSecret] = {}
        self._lock = threading.Lock()

    def put(self, secret: SealedSecret, audit: AuditEntry) -> SealedSecret:
        with self._lock:
            before = self._secrets.get((secret.queue, secret.name))
            if before is not None:
                secret = replace(secret, version=before.version + 1, created_at_s=before.created_at_s)
            self._secrets[secret.queue, secret.name] = secret
            self._audit_log.append(audit)
        return secret

    def find(self, queue: str, name: str) -> SealedSecret | None:
        return self._secrets.get((queue, name))

    def list_secrets(self, queue: str) -> tuple[SealedSecret, ...]:
        with self._lock:
            return tuple(each for key, each in sorted(self._secrets.items()) if queue in ("", key[0]))

    def rewrap(self, secret: SealedSecret, audit: AuditEntry | None = None) -> bool:
        with self._lock:
            before = self._secrets.get((secret.queue, secret.name))
            if before is None or before.sealed_value != secret.sealed_value:
                return False
            self._secrets[secret.queue, secret.name] = secret
            if audit is not None:
                self._audit_log.append(audit)
        return True

    def remove(self, queue: str, name: str, audit: AuditEntry) -> bool:
        with self._lock:
            if self._secrets.pop((queue, name), None) is None:
                return False
            self._audit_log.append(audit)
        return True
