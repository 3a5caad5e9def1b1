"""The API reference at /docs, in a browser that enforces its content security policy."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from api.web_console import load_console_files
from tests.console.conftest import Opener
from tests.console.console_site import ConsoleSite


@pytest.mark.skipif(not load_console_files().has_reference, reason="no node_modules: run `npm ci` in api/console")
def test_the_reference_lists_operations_and_opens_one(site: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{site.url}/docs")
    operations = page.locator(".opblock")
    expect(operations.first).to_be_visible()
    assert operations.count() > 80
    page.locator("#operations-jobs-submit_job button").first.click()
    expect(page.locator("#operations-jobs-submit_job .opblock-body")).to_contain_text("Idempotency-Key")
