"""Numbers agree: over a scripted day, each number of a page equals the API's, and the metrics' in a real Prometheus.

The tables below list which figure of which page equals which field of the API and which query of Prometheus.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from playwright.sync_api import expect

from scheduler.domain.tick_report import TickReport
from scheduler.telemetry.tick_metrics import TickRecorder
from tests.console.console_site import ConsoleSite
from tests.console.fleets import create_fleet, small_site
from tests.contract.prometheus_site import PROGRAM, Prometheus

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.console.conftest import Opener

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROGRAM is None or PROMTOOL is None, reason="no Prometheus: Debian's package prometheus has it"
)
HOUR_S, STEP_S = 3600.0, 300.0
NOWHERE = "127.0.0.1:1"
TRAINED, LOSER, CANCELLED = "llama-pretrain", "reward-model", "speech-tune"
HUGE = {"name": "huge", "queue": "products", "gpus": {"min": 96, "max": 96}, "steps": 10, "command": ["true"]}
LATE = {**HUGE, "name": "late", "gpus": {"min": 8, "max": 64}, "steps": 10**7, "onResize": "checkpoint"}
"""A job that borrows, also on lent nodes, after shorter jobs have ended."""
PRICES = {"gpu_prices": {"a100-80g": 1.5}, "currency": "EUR", "metrics_by_job": True}


def write_figure(value: float) -> str:
    """Write a number as the pages do: three significant digits, and whole numbers from 1000 on. Halves go up."""
    digits = 3 if abs(value) < 1000.0 else len(str(int(abs(value))))
    return f"{Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal(repr(value)).normalize():,f}"


def write_hours(gpu_s: float) -> str:
    return write_figure(0.0 if abs(gpu_s) < 1.0 else gpu_s / HOUR_S)


def write_count(value: float) -> str:
    return f"{math.floor(value):,}"


def write_money(value: float) -> str:
    cents = Decimal(1) if abs(value) >= 100.0 else Decimal("0.01")
    return f"€{Decimal(repr(value)).quantize(cents, ROUND_HALF_UP):,f}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """A value of the API, the query of the metric that equals it, and the figure of a page that shows it.

    Args:
        path: path of the API. `{llama-pretrain}` and other names of jobs stand for their ids.
        value: takes the number from the response.
        query: PromQL; `{day}` stands for the length of the day. Empty: no metric has this number.
        page: address of the page. Empty: no page shows it.
        figure: name of the figure, or of the row of a table.
    """

    path: str
    value: Callable[[Any], float]
    query: str = ""
    page: str = ""
    figure: str = ""
    write: Callable[[float], str] = write_figure


def total(*names: str) -> Callable[[Any], float]:
    return lambda report: sum(float(report["total"][name]) for name in names)


def field(*names: str) -> Callable[[Any], float]:
    def read(document: Any) -> float:
        for name in names:
            document = document[name]
        return float(document)

    return read


def use_of_pools(*uses: str) -> Callable[[Any], float]:
    """Return the GPU-seconds of these uses over all bins of the history."""
    return lambda history: (
        sum(gpus or 0.0 for pool in history["pools"] for use in uses for gpus in pool["uses"][use]) * history["step_s"]
    )


def count_of_pools(name: str) -> Callable[[Any], float]:
    return lambda history: float(sum(sum(pool[name]) for pool in history["pools"]))


def item_count(page: Any) -> float:
    return float(len(page["items"]))


def overview_held(overview: Any) -> float:
    return float(sum(node["held"] for node in overview["nodes"]))


def overview_lent(overview: Any) -> float:
    return float(sum(node["state"] in ("lent", "recalled") for node in overview["nodes"]))


def overview_pending(overview: Any) -> float:
    return float(sum(queue["waiting_jobs"] for queue in overview["queues"]))


def overview_demand(overview: Any) -> float:
    return float(next(pool["demand"]["gpus"] for pool in overview["pools"] if pool["name"] == "inference"))


def of_day(counter: str) -> str:
    return f"sum(increase({counter}[{{day}}]))"


def of_capacity(uses: str) -> str:
    return of_day(f'ebbtide_capacity_gpu_seconds_total{{{{use=~"{uses}"}}}}')


HELD, LOST = of_day("ebbtide_gpu_seconds_total"), of_day("ebbtide_lost_gpu_seconds_total")
IDLE = of_day("ebbtide_idle_while_waiting_gpu_seconds_total")
JOB, JOB_PAGE, JOB_LABEL = "/v1/jobs/{llama-pretrain}", "jobs/{llama-pretrain}", '{{job="{llama-pretrain}"}}'
SAVINGS, USAGE = "/v1/savings", "/v1/usage"
SAVINGS_PAGE, QUEUE_PAGE = "savings?days=30&by=model", "queues/products"
AGREEMENTS = (
    # GPU time of the day
    Agreement(SAVINGS, total("gpu_s"), HELD, SAVINGS_PAGE, "Used in total", write_hours),
    Agreement(SAVINGS, total("lent_gpu_s"), of_capacity("lent_used"), SAVINGS_PAGE, "Recovered", write_hours),
    Agreement(
        SAVINGS, total("lent_gpu_s", "lent_idle_gpu_s"), of_capacity("lent_used|lent_idle"), SAVINGS_PAGE,
        "Lent to training", write_hours,
    ),
    Agreement(SAVINGS, total("lost_gpu_s"), LOST, SAVINGS_PAGE, "Work lost", write_hours),
    Agreement(SAVINGS, total("idle_waiting_gpu_s"), IDLE, SAVINGS_PAGE, "Idle while jobs waited", write_hours),
    Agreement(SAVINGS, total("own_gpu_s"), of_capacity("used")),
    Agreement(USAGE, total("gpu_s"), HELD),
    Agreement(USAGE, total("lent_gpu_s"), of_capacity("lent_used")),
    Agreement(USAGE, total("lost_gpu_s"), LOST),
    *(
        Agreement("{history}", use_of_pools(use), of_capacity(use))
        for use in ("inference", "used", "lent_used", "lent_idle", "free", "other", "down")
    ),
    # Lending of the day
    Agreement("{history}", count_of_pools("lends"), of_day('ebbtide_decisions_total{{kind="LendNode"}}')),
    Agreement("{history}", count_of_pools("recalls"), of_day('ebbtide_decisions_total{{kind="RecallNode"}}')),
    Agreement("{history}", count_of_pools("late_returns"), of_day('ebbtide_recalls_total{{outcome="late"}}')),
    Agreement("/v1/recalls?limit=1000", item_count, of_day("ebbtide_recalls_total")),
    Agreement("/v1/jobs?state=cancelled", item_count, of_day('ebbtide_jobs_ended_total{{outcome="cancelled"}}')),
    # The present
    Agreement("/v1/overview", overview_held, 'sum(ebbtide_gpus{{state="training"}})', "", "GPUs in training"),
    Agreement("/v1/overview", overview_held, "sum(ebbtide_queue_gpus)"),
    Agreement(
        "/v1/overview", overview_lent, 'sum(ebbtide_loans{{state=~"active|recalled"}})', "", "Lent to training"
    ),
    Agreement("/v1/overview", overview_pending, "sum(ebbtide_pending_jobs)", "", "Pending jobs"),
    Agreement("/v1/overview", overview_demand, "ebbtide_inference_demand_gpus", "", "Inference demand"),
    Agreement(
        "/v1/pools/inference", field("lent_nodes"), 'sum(ebbtide_nodes{{pool="inference",state=~"active|recalled"}})',
        "pools/inference", "Lent nodes",
    ),
    Agreement(
        "/v1/pools/inference", field("demand", "gpus"), "ebbtide_inference_demand_gpus", "pools/inference",
        "Inference demand",
    ),
    *(
        Agreement("/v1/queues/products", field(name), f'{metric}{{{{queue="products"}}}}', QUEUE_PAGE, figure)
        for name, metric, figure in (
            ("used_gpus", "ebbtide_queue_allocated_gpus", "GPUs in use"),
            ("guaranteed_gpus", "ebbtide_queue_guaranteed_gpus", "Guaranteed"),
            ("borrowed_gpus", "ebbtide_queue_borrowed_gpus", "Borrowed"),
            ("waiting_jobs", "ebbtide_pending_jobs", "Pending jobs"),
        )
    ),
    Agreement(
        "/v1/nodes/t0", lambda node: float(sum(map(len, node["jobs"].values()))), page="nodes/t0", figure="In training"
    ),
    Agreement(JOB, field("progress", "steps"), f"ebbtide_job_steps{JOB_LABEL}", JOB_PAGE, "Steps done", write_count),
    Agreement(
        JOB, field("progress", "samples_per_s"), f"ebbtide_job_samples_per_s{JOB_LABEL}", JOB_PAGE, "Throughput"
    ),
    Agreement(JOB, field("gpus", "target"), page=JOB_PAGE, figure="GPUs"),
    Agreement(f"{JOB}/cost", field("amounts", "used"), "", JOB_PAGE, "Cost so far", write_money),
)  # fmt: skip
"""GPU time, lending and the present. Times of the day count from the first scrape on, before which no GPU was held."""
COMPARED = {
    "GPU-hours": (field("held_gpu_s"), write_hours),
    "GPU-hours on own nodes": (field("own_gpu_s"), write_hours),
    "GPU-hours on loan": (field("lent_gpu_s"), write_hours),
    "Cost": (field("amounts", "used"), write_money),
    "Cost of GPU time on loan": (field("amounts", "on_loan"), write_money),
}
"""Rows of the page that compares jobs, and the fields of `/v1/jobs/{job}/cost` that they show."""


class ScriptedDay:
    """A site that was simulated for some hours, and a Prometheus with its metrics as of each tick."""

    def __init__(self, site: ConsoleSite, folder: Path, *, hours: int) -> None:
        self.site, self.length_s = site, hours * HOUR_S
        self._recorder, self._tick = TickRecorder(), site.tick
        self._samples: list[str] = []
        self._folder = folder
        self.begin_s = site.clock.now_s() + 120.0
        self.prometheus = Prometheus(folder, NOWHERE, every="1m", data=folder / "data")

    def tick(self, *, after_s: float = 1.0) -> TickReport:
        report = self._tick(after_s=after_s)
        self._recorder.record(report)
        return report

    def run(self) -> None:
        """Lend and recall, lose work, cancel a job and let one wait, from one whole hour to another."""
        self._create_pools()
        self.tick(after_s=self.begin_s - self.site.clock.now_s())
        self._scrape()
        self.site.jobs = create_fleet(self.site)
        with self.site.client() as client:
            client.submit(HUGE)
        ticks = round(self.length_s / STEP_S)
        for number in range(ticks - 1):
            self.site.demand("inference", 40.0 + 30.0 * math.sin(2.0 * math.pi * number / ticks + 4.2))
            if number == ticks // 3:
                self.site.executor.crash_job(self.site.jobs[LOSER])
            if number == ticks // 2:
                self._cancel(CANCELLED)
                with self.site.client() as client:
                    client.submit(LATE)
            self.site.solve_requested_points(self.tick(after_s=STEP_S))
            self._scrape()
        done = int(self.site.store.load().snapshot.jobs[self.site.jobs[TRAINED]].progress.steps)
        self.site.train(self.site.jobs[TRAINED], range(done + 10, done + 60, 10))
        self._cancel("huge-2")  # the last tick has to commit
        end_s = self.begin_s + self.length_s
        self.tick(after_s=end_s - self.site.clock.now_s())
        self._scrape()

    def start_prometheus(self) -> None:
        samples = self._folder / "samples.txt"
        samples.write_text("".join([*self._samples, "# EOF\n"]), encoding="utf-8")
        command = [str(PROMTOOL), "tsdb", "create-blocks-from", "openmetrics", str(samples), str(self._folder / "data")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.prometheus.start()

    def read(self, path: str) -> Any:
        # The history rounds mean GPUs to two digits, so the bins are the shortest ones.
        history = f"/v1/history?from_s={self.begin_s}&to_s={self.begin_s + self.length_s}&step_s=60"
        answer = httpx.get(self.site.url + path.format(history=history, **self.site.jobs), timeout=60.0)
        return answer.raise_for_status().json()

    def query(self, query: str) -> float:
        """Return the sum of the query's series at the end of the day."""
        text = query.format(day=f"{self.length_s + 1:.0f}s", **self.site.jobs)
        answer = self.prometheus.ask("query", query=text, time=self.begin_s + self.length_s)
        return sum(float(series["value"][1]) for series in answer["result"])

    def _create_pools(self) -> None:
        """Create the pools of `create_fleet` first: a scrape must have their counters before jobs use GPUs."""
        with self.site.client() as client:
            client.create_pool({"name": "training", "kind": "training"})
            lending = {"headroom": 0.0, "return_deadline_s": 300}
            client.create_pool({"name": "inference", "kind": "inference", "lending": lending})
        for _ in range(2):
            self.tick()

    def _cancel(self, name: str) -> None:
        with self.site.client() as client:
            if name not in self.site.jobs:
                self.site.jobs[name] = str(client.submit({**HUGE, "name": name})["id"])
            client.cancel(self.site.jobs[name])

    def _scrape(self) -> None:
        now_s = self.site.clock.now_s()
        for line in httpx.get(f"{self.site.url}/metrics").raise_for_status().text.splitlines():
            if not line.startswith("#") and "_created" not in line:
                self._samples.append(f"{line} {now_s:.3f}\n")


@pytest.fixture(params=[3, pytest.param(24, marks=pytest.mark.full)], ids=lambda hours: f"{hours}h")
def day(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedDay]:
    hours: int = request.param
    age_s = time.time() % HOUR_S + hours * HOUR_S + 121.0
    site = small_site(tmp_path, hours=age_s / HOUR_S, settings=PRICES)
    made = ScriptedDay(site, tmp_path, hours=hours)
    made.begin_s = round(made.begin_s / HOUR_S) * HOUR_S
    monkeypatch.setattr(site, "tick", made.tick)
    try:
        made.run()
        made.start_prometheus()
        yield made
    finally:
        made.prometheus.kill()
        site.close()


def test_pages_api_and_metrics_agree(day: ScriptedDay, opened: Opener) -> None:
    documents = {path: day.read(path) for path in {each.path for each in AGREEMENTS}}
    values = [(each, each.value(documents[each.path])) for each in AGREEMENTS]
    shown = {each.figure for each, value in values if value}
    assert {"Used in total", "Work lost", "Idle while jobs waited", "Lent nodes", "Borrowed", "Cost so far"} <= shown
    different = {
        (each.path, each.query): (value, counted)
        for each, value in values
        if each.query and (counted := day.query(each.query)) != pytest.approx(value, rel=1e-4, abs=1e-2)
    }
    assert different == {}, "API, then metric"
    page = opened(day.site.url)
    for address in dict.fromkeys(each.page for each in AGREEMENTS if each.figure):
        page.goto(f"{day.site.url}/#/{address.format(**day.site.jobs)}")
        for each, value in values:
            if each.figure and each.page == address:
                cell = page.locator(".figure", has=page.get_by_text(each.figure, exact=True)).locator("dd").first
                expect(cell).to_have_text(read_pattern(each.write(value)))
    check_savings_rows(day, page)
    check_compared_jobs(day, page)


def read_pattern(text: str) -> Any:
    """Match a number at the begin of a cell, before its unit."""
    return re.compile(rf"^{re.escape(text)}(?![\d.,])")


def check_savings_rows(day: ScriptedDay, page: Page) -> None:
    """Each row of the savings page has the GPU-hours and amounts of the API, by every dimension."""
    page.goto(f"{day.site.url}/#/savings?days=30&by=queue")
    for by in ("queue", "gpu", "model", "owner"):
        report = day.read(f"{SAVINGS}?by={by}")
        page.locator("#by").select_option(by)
        for row in report["items"]:
            expected = [
                *(write_hours(row[name]) for name in ("gpu_s", "own_gpu_s", "lent_gpu_s", "lost_gpu_s")),
                *(write_money(row["amounts"][name]) for name in ("used", "on_loan")),
            ]
            name = row[by] or {"model": "not stated"}.get(by, "–")
            line = page.locator("tbody tr", has=page.get_by_role("rowheader", name=name, exact=True))
            expect(line.locator("td")).to_have_text(expected)


def check_compared_jobs(day: ScriptedDay, page: Page) -> None:
    names = (TRAINED, LOSER)
    ids = [day.site.jobs[name] for name in names]
    page.goto(f"{day.site.url}/#/compare?jobs={','.join(ids)}")
    costs = [day.read(f"/v1/jobs/{job_id}/cost") for job_id in ids]
    table = page.get_by_role("region", name="Jobs side by side").first
    for row, (value, write) in COMPARED.items():
        line = table.locator("tr", has=page.get_by_role("rowheader", name=row, exact=True))
        expect(line.locator("td")).to_have_text([write(value(cost)) for cost in costs])
