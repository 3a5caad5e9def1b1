"""The owner by which a machine chooses the operating-system user of a job's ranks."""

from __future__ import annotations

from dataclasses import replace

from api.machine_reports import build_run_document
from tests.builders import a_fleet, a_job, a_snapshot


def test_a_machine_chooses_the_user_of_an_oidc_subject_by_its_id() -> None:
    job = replace(a_job("j", on={"t0": (0,)}), owner="anna", owner_id="oidc:https://idp.example#u-1")
    names = {
        build_run_document(each, a_snapshot(a_fleet(training=1, inference=0)), "t0", secret=b"s" * 32).owner
        for each in (job, replace(job, owner_id="token:tok-1"), replace(job, owner_id=""))
    }
    assert names == {"oidc:https://idp.example#u-1", "anna"}
