"""Labels of jobs in the console: search in the address, chips, editing, submission, comparison and CSV."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.console.test_accessibility import find_serious_violations

if TYPE_CHECKING:
    from tests.console.conftest import Opener
    from tests.console.console_site import ConsoleSite

LABELS = {
    "llama-pretrain": {"team": "language", "stage": "pretrain", "example.com/cost-center": "4711"},
    "speech-tune": {"team": "speech", "stage": "tune"},
    "vision-sweep": {"team": "vision", "stage": "tune"},
}


@pytest.fixture
def labelled(fleet: ConsoleSite) -> ConsoleSite:
    """A fleet with labels on three of its jobs."""
    with fleet.client() as client:
        for name, labels in LABELS.items():
            client.change_job(fleet.jobs[name], {"labels": labels})
    fleet.tick()
    return fleet


def test_list_is_searched_by_labels_in_its_address(labelled: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{labelled.url}/#/jobs", expects=("422",))
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(5)
    page.get_by_role("textbox", name="Labels").fill("stage=tune, team!=vision")
    page.get_by_role("button", name="Filter").click()
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("speech-tune")
    page.goto(f"{labelled.url}/#/jobs?selector=stage")
    expect(rows).to_have_count(3)
    expect(page.get_by_role("textbox", name="Labels")).to_have_value("stage")
    page.get_by_role("link", name="stage=tune").first.click()
    expect(rows).to_have_count(2)
    assert re.search(r"#/jobs\?selector=stage%2Cstage%3Dtune$", page.url)
    page.goto(f"{labelled.url}/#/jobs?selector=stage+in+tune")
    expect(page.get_by_role("alert")).to_contain_text("selector")


def test_owner_edits_labels_on_the_page_of_the_job(labelled: ConsoleSite, opened: Opener) -> None:
    job_id = labelled.jobs["speech-tune"]
    page = opened(f"{labelled.url}/#/jobs/{job_id}", expects=("422",))
    details = page.get_by_role("region", name="Details")
    expect(details.get_by_role("link", name="team=speech")).to_be_visible()
    page.get_by_role("button", name="Labels").click()
    dialog = page.get_by_role("dialog")
    area = dialog.get_by_role("textbox", name="Labels")
    expect(area).to_have_value("stage=tune\nteam=speech")
    for text in ("team", "team=-x"):  # the first is no label, and the API refuses the second
        area.fill(text)
        dialog.get_by_role("button", name="Save labels").click()
        expect(area).to_have_attribute("aria-invalid", "true")
        expect(area).to_have_value(text)
    area.fill("team=voice\nowner=ada")
    dialog.get_by_role("button", name="Save labels").click()
    expect(dialog).to_have_count(0)
    labelled.tick()
    expect(details.get_by_role("link", name="team=voice")).to_be_visible()
    assert labelled.store.load().snapshot.jobs[job_id].spec.labels == {"owner": "ada", "team": "voice"}


def test_job_is_submitted_with_labels(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/#/submit", expects=("422",))
    page.get_by_label("Name", exact=True).fill("labelled")
    page.get_by_label("Command").fill("python train.py")
    labels = page.get_by_role("textbox", name="Labels")
    for text in ("team", "te am=vision"):
        labels.fill(text)
        page.get_by_role("button", name="Dry run").click()
        expect(labels).to_have_attribute("aria-invalid", "true")
    labels.fill("team=vision, stage=tune")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Submit job").click()
    expect(page.get_by_role("heading", name="labelled")).to_be_visible()
    fleet.tick()
    (job,) = [job for job in fleet.store.load().snapshot.jobs.values() if job.spec.name == "labelled"]
    assert job.spec.labels == {"stage": "tune", "team": "vision"}


def test_labels_are_compared_and_exported(labelled: ConsoleSite, opened: Opener, tmp_path: Path) -> None:
    ids = ",".join(labelled.jobs[name] for name in ("speech-tune", "embedder"))
    page = opened(f"{labelled.url}/#/compare?jobs={ids}")
    row = page.get_by_role("row", name="Labels")
    expect(row.get_by_role("link", name="team=speech")).to_be_visible()
    expect(row).to_contain_text("none")
    page.goto(f"{labelled.url}/#/jobs?selector=team")
    expect(page.locator("tbody tr")).to_have_count(3)
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Download CSV").click()
    path = tmp_path / "jobs.csv"
    downloading.value.save_as(path)
    with path.open(newline="") as file:
        rows = {row["name"]: row["labels"] for row in csv.DictReader(file)}
    assert rows["speech-tune"] == "stage=tune, team=speech"
    assert set(rows) == set(LABELS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_have_no_serious_accessibility_violation(labelled: ConsoleSite, opened: Opener, scheme: str) -> None:
    for width in (390, 1440):
        page = opened(f"{labelled.url}/#/jobs", scheme=scheme, width=width)
        expect(page.locator("tbody tr")).to_have_count(5)
        chips = page.locator("tbody").get_by_role("link", name="team=vision")
        expect(chips).to_be_visible() if width > 600 else expect(chips).to_be_hidden()
        assert find_serious_violations(page) == []
        page.goto(f"{labelled.url}/#/jobs/{labelled.jobs['llama-pretrain']}")
        page.get_by_role("button", name="Labels").click()
        expect(page.get_by_role("dialog")).to_be_visible()
        assert find_serious_violations(page) == []
