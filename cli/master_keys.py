"""Master keys of stored secrets. They are in a file of their own, so that no backup holds secrets with their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cli.output import format_count

if TYPE_CHECKING:
    from scheduler.settings import Settings


def count_secrets_by_key(settings: Settings) -> Mapping[str, int]:
    """Return the number of stored secrets by the id of their master key.

    Raises:
        StoreError: the database cannot be used, or must be migrated.
        UnavailableError: it does not respond.
    """
    from scheduler.store.sql_store import SqlStore

    store = SqlStore(settings.database_url)
    try:
        return Counter(secret.master_key for secret in store.secrets.list_secrets(""))
    finally:
        store.close()


def describe_unusable_secrets(path: Path, used: Mapping[str, int]) -> str:
    """Return why stored secrets cannot be decrypted with the key file; empty if all can be.

    Args:
        used: number of secrets by the id of their master key.
    """
    from api.queue_secrets.vault import SecretKeyError, SecretVault

    if not used:
        return ""
    try:
        known = SecretVault(path, creates=False).read_keys().keys if path.exists() else {}
    except SecretKeyError as error:
        return str(error)
    missing = sorted(used.keys() - known.keys())
    if not missing:
        return ""
    count = format_count(sum(used[key_id] for key_id in missing), "secret")
    return f"{count} of queues cannot be decrypted: {path} does not have the master key {', '.join(missing)}"


RESTORE_KEYS = "restore the key file from where you keep it, or delete the secrets and set them again"
"""Advice for secrets that cannot be decrypted."""
