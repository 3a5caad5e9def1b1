"""The user's code in job documents: archive, setup, virtual environment and launch mode."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.documents.document import InvalidDocumentError
from scheduler.documents.job import parse_job, require_command, to_job_document
from scheduler.domain.codec import decode, encode
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.program import DEFAULT_PROGRAM, Program, find_link_problem
from scheduler.domain.run_document import LaunchMode

DIGEST = f"sha256:{'a' * 64}"
JOB: dict[str, Any] = {"name": "a", "gpus": {"min": 1, "max": 1}, "command": ["python", "train.py"]}
PROGRAM = {"workdir": {"archive": DIGEST}, "setup": ["sh", "-c", "make"], "venv": ".venv", "launch": "node"}


def test_the_document_and_the_specification_convert_into_each_other() -> None:
    spec = parse_job({**JOB, **PROGRAM})
    assert spec.program == Program(DIGEST, ("sh", "-c", "make"), ".venv", LaunchMode.NODE)
    document = to_job_document(spec)
    assert {name: document[name] for name in PROGRAM} == PROGRAM
    assert parse_job(document) == spec
    assert not PROGRAM.keys() & to_job_document(parse_job(JOB)).keys()


def test_specifications_stored_before_have_the_default_program() -> None:
    document = encode(parse_job({**JOB, **PROGRAM}))
    assert decode(JobSpec, document).program.archive == DIGEST
    del document["program"]
    assert decode(JobSpec, document).program == DEFAULT_PROGRAM


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"archive": "sha256:1"}, "workdir.archive"),
        ({"archive": "../../etc/passwd"}, "workdir.archive"),
        ({"setup": ("make",)}, "setup"),
        ({"venv": "venv"}, "venv"),
        ({"venv": "/a/../b"}, "venv"),
        ({"archive": DIGEST, "setup": ("make",), "venv": "../venv"}, "venv"),
    ],
)
def test_invalid_programs_are_refused_by_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is "):
        Program(**values)


def test_a_job_that_runs_needs_a_command_an_image_or_a_template() -> None:
    for document in (JOB, {**JOB, "command": [], "image": "trainer"}):
        require_command(parse_job(document))
    with pytest.raises(InvalidDocumentError) as refused:
        require_command(parse_job({**JOB, "command": []}))
    assert [field.field for field in refused.value.invalid_fields] == ["command"]


@pytest.mark.parametrize(
    ("name", "target", "is_safe"),
    [
        ("l", "a/b", True),
        ("d/l", "../a", True),
        ("d/e/l", "../../a", True),
        ("l", "..", False),
        ("d/l", "../..", False),
        ("l", "/etc", False),
        ("l", "", False),
        ("d/l", "l/..", False),
    ],
)
def test_links_stay_in_the_folder_whatever_they_pass(name: str, target: str, is_safe: bool) -> None:
    assert (find_link_problem(name, target) is None) == is_safe
