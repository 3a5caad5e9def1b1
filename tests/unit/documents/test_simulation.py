"""Simulation documents: unpacking of input files."""

from __future__ import annotations

import gzip
from base64 import b64encode

import pytest

from scheduler.documents import simulation
from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.simulation import SimulationDocument, to_simulation_files

FILE = gzip.compress(b"job_id,submit_time_s\n")


def unpack(text: str) -> str:
    packed = {"gzip_base64": text}
    return to_simulation_files(SimulationDocument.model_validate({"jobs": packed, "cluster": "pools: []"})).jobs


def test_packed_file_becomes_text() -> None:
    assert unpack(b64encode(FILE).decode()) == "job_id,submit_time_s\n"


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", "a complete gzip file"),
        ("\u00ff", "base64-encoded gzip"),
        ("not base64", "base64-encoded gzip"),
        (b64encode(b"not gzip").decode(), "base64-encoded gzip"),
        (b64encode(gzip.compress(b"\xff")).decode(), "base64-encoded gzip"),
        (b64encode(FILE[:-4]).decode(), "a complete gzip file"),
    ],
    ids=["empty", "not-ascii", "not-base64", "not-gzip", "not-utf8", "truncated"],
)
def test_invalid_packed_text_is_rejected_by_field(text: str, allowed: str) -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        unpack(text)
    (invalid,) = caught.value.invalid_fields
    assert invalid.field == "jobs.gzip_base64"
    assert invalid.allowed.startswith(allowed)


def test_text_that_is_too_large_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "TEXT_BYTES_MAX", 1000)
    with pytest.raises(InvalidDocumentError, match="at most 1000 bytes"):
        unpack(b64encode(gzip.compress(b"a" * 1001)).decode())
