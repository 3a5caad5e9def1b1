"""Controls of the demo: the clock of its day, and a surge that recalls lent nodes before their deadline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from api.demo import DemoDay
from tests.console.conftest import AXE, Opener
from tests.console.console_site import ConsoleSite
from tests.console.fleets import create_fleet, small_site
from tests.console.test_access import create_token


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[ConsoleSite]:
    """A demo in the afternoon of its day, with lent nodes."""
    made = small_site(tmp_path, hours=0.1, demo=DemoDay())
    made.jobs = create_fleet(made)
    made.demand("inference", 20.0)
    for _ in range(4):
        made.solve_requested_points(made.tick(after_s=5.0))
    made.ticks(4, every_s=100.0)
    made.app.state.demo.begin(made.clock.now_s() - 90.0, 180.0)
    yield made
    made.close()


def count_loans(site: ConsoleSite) -> int:
    return sum(loan.is_in_effect for loan in site.store.load().snapshot.loans.values())


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_surge_recalls_lent_nodes_before_their_deadline(
    demo: ConsoleSite, opened: Opener, picture: Callable[[Page, str], None], scheme: str, width: int
) -> None:
    lent = count_loans(demo)
    assert lent
    page = opened(f"{demo.url}/", scheme=scheme, width=width)
    controls = page.get_by_role("complementary", name="Demo")
    expect(controls).to_contain_text("12:00")
    expect(controls).to_contain_text("simulated")
    picture(page, f"demo-{scheme}")
    controls.get_by_role("button", name="Surge now").click()
    expect(controls.get_by_role("status")).to_contain_text("Demand has risen")
    assert demo.store.load().inbox, "the surge reports demand itself"
    demo.ticks(30, every_s=5.0)
    expect(controls.get_by_role("status")).to_contain_text("0 late")
    receipts = demo.store.load().snapshot.recalls
    assert len(receipts) == lent
    assert all(each.returned_at_s and each.returned_at_s < each.return_by_s for each in receipts.values())
    picture(page, f"demo-surge-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.evaluate(AXE.read_text())
    assert (
        page.evaluate("axe.run(document.querySelector('.demo')).then((found) => found.violations.map((v) => v.id))")
        == []
    )


def test_a_login_url_signs_in_before_the_controls_send_a_request(tmp_path: Path, opened: Opener) -> None:
    site = small_site(tmp_path, auth="on", hours=0.1, demo=DemoDay())
    try:
        with site.client(create_token(site, "root", "admin")) as client:
            code = client.create_login_code()["code"]
        page = opened(f"{site.url}/#/login?code={code}")
        expect(page.get_by_role("complementary", name="Demo")).to_contain_text("00:00")
        expect(page.locator("#user .name")).to_have_text("root")
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        page.close()  # before the service, which a file that still loads would miss
    finally:
        site.close()


def test_a_service_that_is_no_demo_has_no_controls(fleet: ConsoleSite, opened: Opener) -> None:
    page = opened(f"{fleet.url}/")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.get_by_role("complementary", name="Demo")).to_have_count(0)
