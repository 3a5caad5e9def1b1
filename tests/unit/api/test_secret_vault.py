"""Envelope encryption: what opens, what does not, and the rotation of the master key."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from api.queue_secrets.vault import SecretKeyError, SecretVault, write_key_file
from scheduler.store.sealed_secrets import SealedSecret

NEW = SealedSecret("research", "hf-token", 1, "", "", "", 1.0, 1.0, "ada")
VALUE = b"hf_abcdefgh"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "secrets.key"


def test_a_value_opens_in_its_own_row_only(path: Path) -> None:
    vault = SecretVault(path, creates=True)
    sealed = vault.seal(NEW, VALUE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SecretVault(path, creates=False).open(sealed) == VALUE
    assert "hf_" not in repr(sealed)
    for moved in (replace(sealed, name="other"), replace(sealed, queue="vision"), replace(sealed, sealed_value="AAAA")):
        with pytest.raises(SecretKeyError, match="cannot be decrypted"):
            vault.open(moved)


def test_equal_values_have_different_ciphertexts(path: Path) -> None:
    vault = SecretVault(path, creates=True)
    one, other = vault.seal(NEW, VALUE), vault.seal(NEW, VALUE)
    assert one.sealed_value != other.sealed_value
    assert one.wrapped_key != other.wrapped_key


def test_rotation_rewraps_data_keys_and_needs_no_restart(path: Path) -> None:
    vault = SecretVault(path, creates=True)
    sealed = vault.seal(NEW, VALUE)
    rotated = vault.read_keys().with_new_key()
    write_key_file(path, rotated, replaces=True)
    rewrapped = vault.rewrap(sealed)
    assert (rewrapped.master_key, rewrapped.sealed_value) == (rotated.current, sealed.sealed_value)
    write_key_file(path, rotated.only_current(), replaces=True)
    assert vault.open(rewrapped) == VALUE
    with pytest.raises(SecretKeyError, match=sealed.master_key):
        vault.open(sealed)


def test_the_first_of_concurrent_creators_wins(path: Path) -> None:
    first = SecretVault(path, creates=True).read_keys()
    write_key_file(path, first.with_new_key(), replaces=False)
    assert SecretVault(path, creates=True).read_keys() == first


@pytest.mark.parametrize("content", ["", "key-1:short\n", "no colon\n", "\xff"])
def test_a_malformed_key_file_is_refused(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(SecretKeyError, match=str(path)):
        SecretVault(path, creates=True).read_keys()


def test_a_key_file_that_others_can_read_is_refused(path: Path) -> None:
    SecretVault(path, creates=True).read_keys()
    path.chmod(0o640)
    with pytest.raises(SecretKeyError, match="0640"):
        SecretVault(path, creates=True).read_keys()


def test_a_configured_key_file_is_never_created(path: Path) -> None:
    with pytest.raises(SecretKeyError, match="does not exist"):
        SecretVault(path, creates=False).read_keys()
