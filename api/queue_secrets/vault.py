"""Envelope encryption of secrets: each value has a data key of its own, which a master key wraps.

Master keys are in a file outside of the database, one per line as `<id>:<base64>`; the first one encrypts, all decrypt.
Both ciphers are AES-256-GCM. Their associated data binds queue and name, so that a ciphertext that was copied to
another row does not open.
"""

from __future__ import annotations

import base64
import os
import secrets
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from scheduler.store.sealed_secrets import SealedSecret

KEY_BYTES = 32
_NONCE_BYTES = 12


class SecretKeyError(Exception):
    """The master keys cannot be used; the message names the file and the remedy, and never a key."""


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Master keys by id. `current` encrypts."""

    current: str
    keys: Mapping[str, bytes]

    def with_new_key(self) -> KeyRing:
        """Return the keys with a new current one."""
        key_id = f"key-{secrets.token_hex(4)}"
        return KeyRing(key_id, {key_id: secrets.token_bytes(KEY_BYTES), **self.keys})

    def only_current(self) -> KeyRing:
        return KeyRing(self.current, {self.current: self.keys[self.current]})


class SecretVault:
    """Encrypts and decrypts with the keys of a file. Thread-safe.

    The file is created on first use if `creates` is set. It is read again when it changes, so that a rotation needs no
    restart.
    """

    def __init__(self, path: Path, *, creates: bool) -> None:
        self._path = path
        self._creates = creates
        self._lock = threading.Lock()
        self._read_at: tuple[int, int] | None = None
        self._ring: KeyRing | None = None

    def seal(self, secret: SealedSecret, value: bytes) -> SealedSecret:
        """Return the secret with the encrypted value.

        Raises:
            SecretKeyError: the master keys cannot be read.
        """
        ring, data_key = self.read_keys(), secrets.token_bytes(KEY_BYTES)
        return replace(
            secret,
            master_key=ring.current,
            wrapped_key=_encrypt(ring.keys[ring.current], data_key, _bind(secret, "key")),
            sealed_value=_encrypt(data_key, value, _bind(secret, "value")),
        )

    def open(self, secret: SealedSecret) -> bytes:
        """Return the value.

        Raises:
            SecretKeyError: its master key is missing, or the row was changed or copied from another secret.
        """
        return _decrypt(self._unwrap(secret), secret.sealed_value, _bind(secret, "value"), secret)

    def rewrap(self, secret: SealedSecret) -> SealedSecret:
        """Return the secret with its data key wrapped by the current master key. Raises as `open`."""
        ring, data_key = self.read_keys(), self._unwrap(secret)
        wrapped = _encrypt(ring.keys[ring.current], data_key, _bind(secret, "key"))
        return replace(secret, master_key=ring.current, wrapped_key=wrapped)

    def read_keys(self) -> KeyRing:
        """Return the master keys, after creating the file if it does not exist.

        Raises:
            SecretKeyError: the file is malformed, or other users can read it.
        """
        with self._lock:
            try:
                if not self._path.exists() and self._creates:
                    write_key_file(self._path, KeyRing("", {}).with_new_key(), replaces=False)
                status = self._path.stat()
                read_at = (status.st_mtime_ns, status.st_ino)
                if self._ring is None or read_at != self._read_at:
                    self._ring, self._read_at = _parse_key_file(self._path, status.st_mode), read_at
            except FileNotFoundError:
                raise SecretKeyError(
                    f"the key file {self._path} does not exist. Create it with one line `<id>:<base64 of 32 random "
                    "bytes>` and mode 0600, the same for all API processes"
                ) from None
            except OSError as error:
                raise SecretKeyError(f"the key file {self._path} cannot be used: {error.strerror}") from error
            return self._ring

    def _unwrap(self, secret: SealedSecret) -> bytes:
        master_key = self.read_keys().keys.get(secret.master_key)
        if master_key is None:
            raise SecretKeyError(
                f"secret {secret.name} of queue {secret.queue} is encrypted with master key {secret.master_key}, which "
                f"{self._path} does not have. Restore the key, or set the secret again"
            )
        return _decrypt(master_key, secret.wrapped_key, _bind(secret, "key"), secret)


def write_key_file(path: Path, ring: KeyRing, *, replaces: bool) -> None:
    """Write the file at once with mode 0600. Without `replaces`, the file of a concurrent process stays.

    Raises:
        OSError: the folder is read-only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mkstemp creates with mode 0600
    lines = [f"{key_id}:{base64.b64encode(key).decode()}\n" for key_id, key in ring.keys.items()]
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            Path(temporary).replace(path)
            return
        path.hardlink_to(temporary)
    except FileExistsError:
        pass  # another process created the file first
    finally:
        Path(temporary).unlink(missing_ok=True)


def _parse_key_file(path: Path, mode: int) -> KeyRing:
    if mode & 0o077:
        raise SecretKeyError(
            f"the key file {path} has mode {mode & 0o777:04o}; other users must not read it. Run: chmod 0600 {path}"
        )
    keys = dict[str, bytes]()
    for number, line in enumerate(path.read_text(encoding="ascii", errors="replace").splitlines(), 1):
        key_id, _, encoded = line.strip().partition(":")
        try:
            key = base64.b64decode(encoded, validate=True)
        except ValueError:
            key = b""
        if not key_id or len(key) != KEY_BYTES:
            raise SecretKeyError(f"line {number} of the key file {path} is not `<id>:<base64 of {KEY_BYTES} bytes>`")
        keys[key_id] = key
    if not keys:
        raise SecretKeyError(f"the key file {path} has no key. Restore it; without it, no secret can be decrypted")
    return KeyRing(next(iter(keys)), keys)


def _bind(secret: SealedSecret, part: str) -> bytes:
    return "\0".join(("ebbtide-secret", part, secret.queue, secret.name)).encode()


def _encrypt(key: bytes, data: bytes, bound_to: bytes) -> str:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return base64.b64encode(nonce + AESGCM(key).encrypt(nonce, data, bound_to)).decode()


def _decrypt(key: bytes, text: str, bound_to: bytes, secret: SealedSecret) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
        return AESGCM(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], bound_to)
    except (InvalidTag, ValueError):
        raise SecretKeyError(
            f"secret {secret.name} of queue {secret.queue} cannot be decrypted: its row or its master key was changed. "
            "Set it again"
        ) from None
