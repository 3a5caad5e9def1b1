"""Secrets of a run on a machine: where the values are, who may read them, and that they are gone after it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from scheduler.agent import run_secrets
from scheduler.agent.run_folder import AgentFolders, RunFolder
from scheduler.agent.run_secrets import SecretsError, SecretsFolder, discard_secrets, find_mask
from scheduler.domain.run_document import RankSeat, RunDocument
from scheduler.domain.secret_reference import KubernetesSecretKey, SecretReference

REFERENCES = (SecretReference("token", env="HF_TOKEN"), SecretReference("key", file="id_ed25519"))
VALUES = {"token": b"hf_abcdefgh", "key": b"\x00\xffprivate"}
DOCUMENT = RunDocument("job-1", "ada", "n0", 1, ("python",), 1, 0, 1, (RankSeat(0, 0, 0),), secrets=REFERENCES)


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(
        run_secrets, "MEMORY", Path("/dev/shm") if request.param == "memory" else tmp_path / "no-memory"
    )
    made = AgentFolders(tmp_path / "state").folder("job-1", 1, "n0")
    made.create(DOCUMENT)
    return made


def test_values_are_private_and_disappear_with_the_run(folder: RunFolder) -> None:
    secrets = SecretsFolder.of(folder)
    secrets.write(REFERENCES, VALUES, None)
    try:
        assert json.loads(secrets.environment_path.read_bytes()) == {"HF_TOKEN": "hf_abcdefgh"}
        file = secrets.files_path / "id_ed25519"
        assert file.read_bytes() == VALUES["key"]
        assert {stat.S_IMODE(path.stat().st_mode) for path in (file, secrets.environment_path)} == {0o400}
        folder.log_path(0).write_bytes(b"token hf_abcdefgh\n")
        assert folder.read_log_tail(0, find_mask(folder, DOCUMENT)) == "token ***********"
    finally:
        discard_secrets(folder, DOCUMENT)
    assert not secrets.path.exists()
    assert folder.log_path(0).read_bytes() == b"token ***********\n"
    assert b"hf_abcdefgh" not in b"".join(path.read_bytes() for path in folder.path.parent.rglob("*") if path.is_file())


def test_without_the_values_nothing_of_the_output_is_shown(folder: RunFolder) -> None:
    folder.log_path(0).write_bytes(b"token hf_abcdefgh\n")
    mask = find_mask(folder, DOCUMENT)
    assert mask is not None
    assert mask.mask(b"any\n") == b"***\n"


@dataclass(frozen=True)
class User:
    uid: int = 65534
    gid: int = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_files_belong_to_the_user_of_the_ranks(folder: RunFolder) -> None:
    secrets = SecretsFolder.of(folder)
    secrets.write(REFERENCES, VALUES, User())
    try:
        owners = {path: path.stat().st_uid for path in (secrets.files_path, secrets.files_path / "id_ed25519")}
        assert set(owners.values()) == {65534}
        assert secrets.environment_path.stat().st_uid == 0
    finally:
        secrets.delete()


def test_missing_and_unusable_values_are_named(folder: RunFolder) -> None:
    secrets = SecretsFolder.of(folder)
    in_pods = SecretReference(kubernetes=KubernetesSecretKey("wandb", "key"), env="WANDB_API_KEY")
    for references, values, word in (
        (REFERENCES, {"token": b"hf_abcdefgh"}, "secret key"),
        ((SecretReference("key", env="KEY"),), VALUES, "no text"),
        ((in_pods,), {}, "wandb/key"),
    ):
        with pytest.raises(SecretsError, match=word):
            secrets.write(references, values, None)
        secrets.delete()
