"""Simulations as they are handed in: what cannot be unpacked is named."""

from __future__ import annotations

import gzip
from base64 import b64encode

import pytest

from scheduler.documents import simulation
from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.simulation import SimulationDocument, to_simulation_files

FILE = gzip.compress(b"job_id,submit_time_s\n")


def unpacked(text: str) -> str:
    packed = {"gzip_base64": text}
    return to_simulation_files(SimulationDocument.model_validate({"jobs": packed, "cluster": "pools: []"})).jobs


def test_a_packed_file_is_its_text() -> None:
    assert unpacked(b64encode(FILE).decode()) == "job_id,submit_time_s\n"


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", "a whole file; this one ends early"),
        ("\u00ff", "gzipped UTF-8 text as base64"),
        ("not base64", "gzipped UTF-8 text as base64"),
        (b64encode(b"not gzip").decode(), "gzipped UTF-8 text as base64"),
        (b64encode(gzip.compress(b"\xff")).decode(), "gzipped UTF-8 text as base64"),
        (b64encode(FILE[:-4]).decode(), "a whole file; this one ends early"),
    ],
    ids=["nothing", "not-ascii", "not-base64", "not-gzip", "not-utf8", "cut-off"],
)
def test_what_is_no_packed_text_is_refused_by_its_field(text: str, allowed: str) -> None:
    with pytest.raises(InvalidDocumentError) as refused:
        unpacked(text)
    (told,) = refused.value.invalid_fields
    assert told.field == "jobs.gzip_base64"
    assert told.allowed.startswith(allowed)


def test_what_becomes_too_large_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "TEXT_BYTES_MAX", 1000)
    with pytest.raises(InvalidDocumentError, match="at most 1000 bytes, unpacked"):
        unpacked(b64encode(gzip.compress(b"a" * 1001)).decode())
