"""The owner by which a machine chooses the operating-system user of a job's ranks."""

from __future__ import annotations

from dataclasses import replace

from api.machine_reports import build_run_document
from tests.builders import a_fleet, a_job, a_snapshot


def test_a_machine_knows_the_owner_by_id_and_never_by_the_name_of_an_oidc_subject() -> None:
    job = replace(a_job("j", on={"t0": (0,)}), owner="anna", owner_id="oidc:https://idp.example#u-1")
    documents = [
        build_run_document(each, a_snapshot(a_fleet(training=1, inference=0)), "t0", secret=b"s" * 32)
        for each in (job, replace(job, owner_id="token:tok-1"), replace(job, owner_id=""))
    ]
    assert [(document.owner_id, document.owner) for document in documents] == [
        ("oidc:https://idp.example#u-1", "oidc:https://idp.example#u-1"),
        ("token:tok-1", "anna"),
        ("name:anna", "anna"),
    ]
