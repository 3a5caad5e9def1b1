"""`ebbtide demo`: a recorded day of inference demand in minutes, with real trainings and a simulated fleet.

The scenario reports demand to a real service, submits jobs, shows what happens, and checks the result.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import tempfile
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cli.commands.console import format_login_url
from cli.demo.checks import (
    CheckResult,
    TrainingRun,
    build_summary,
    check_events,
    check_leftover_processes,
    check_recalls,
    check_surge,
    check_training,
    check_usage,
)
from cli.demo.day_view import DayView, build_day_view
from cli.demo.demand_trace import DemandTrace, load_demand_trace
from cli.demo.demo_routes import DemoRoutes
from cli.demo.keyboard import read_keys, single_keys
from cli.demo.real_trainings import NODES, POOL, TRAININGS, ReferenceRuns, create_real_fleet, submit_training
from cli.demo.screen import LineScreen, LiveScreen, Screen, render_day, render_results
from cli.demo.service_process import DemoError, DemoService
from cli.demo.simulated_fleet import INFERENCE_POOL, create_simulated_fleet, list_submissions
from ebbtide.client import Client

if TYPE_CHECKING:
    from ebbtide.client.views import EventView

PEAK_GPUS = {POOL: 1.4, INFERENCE_POOL: 88.0}
"""Demand at the highest load of the eight days, by inference pool."""
SETTINGS = {
    "EBBTIDE_FULL_PASS_PERIOD_S": "2",
    "EBBTIDE_RECONFIGURATION_S": "3",
    "EBBTIDE_RESIZE_PAUSE_S": "10",
    "EBBTIDE_LEAVE_GRACE_S": "20",
    "EBBTIDE_TICK_S_MAX": "0.5",
    "EBBTIDE_LOG_LEVEL": "WARNING",
}
HISTORY_LEAD_S = 6.0
JOBS_TIMEOUT_S = 300.0
REFRESH_S = 0.5
PLAIN_WIDTH = 130
_SURGE_KEY = "s"
# rich references a web font in the SVG. Removing it keeps the picture free of external requests.
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo. `picture` is an SVG file to save the last screen in."""

    day_s: float
    opens_browser: bool = False
    picture: Path | None = None


def run_demo(options: DemoOptions) -> int:
    """Run the demo. Return 0 if every claim holds, else 1."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    folder = Path(tempfile.mkdtemp(prefix="ebbtide-demo-"))
    console.print(
        f"[bold]Ebbtide demo[/bold]: a recorded day of inference demand in {options.day_s:.0f} s. Files: {folder}",
        soft_wrap=True,
    )
    # Turn SIGTERM into SystemExit, so that `finally` stops the service and its workers.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    service = DemoService(folder, {**SETTINGS, "EBBTIDE_SEASON_S": str(options.day_s)})
    try:
        view, results, summary = _run_scenario(console, service, options)
        if os.environ.get("DEMO_KEEP") == "1":
            console.print(render_results(results), f"[bold]{summary}[/bold]")
            _keep_service(console, service)
    except DemoError as error:
        console.print(f"[bold red]The demo failed:[/bold red] {error}")
        return 1
    except KeyboardInterrupt:
        console.print("Stopping.")
        return 130
    finally:
        service.stop()
    results = [*results, check_leftover_processes(service.find_leftover_processes())]
    console.print(render_results(results), f"[bold]{summary}[/bold]")
    if options.picture is not None:
        _save_picture(options.picture, view, results, summary)
    return 0 if all(result.passed for result in results) else 1


def _save_picture(path: Path, view: DayView, results: Sequence[CheckResult], summary: str) -> None:
    """Save the last screen as an SVG picture."""
    console = Console(file=io.StringIO(), record=True, width=PLAIN_WIDTH, force_terminal=True)
    console.print(render_day(view, (), hint=""), render_results(results), f"[bold]{summary}[/bold]", highlight=False)
    path.write_text(_WEB_FONTS.sub("", console.export_svg(title="ebbtide demo")))


def _run_scenario(
    console: Console, service: DemoService, options: DemoOptions
) -> tuple[DayView, list[CheckResult], str]:
    """Return the state after the day, the results and the last line."""
    client = service.wait_until_ready()
    with client, DemoRoutes(service.url, service.token) as routes:
        create_real_fleet(client)
        create_simulated_fleet(client, service.url)
        trace = load_demand_trace(day_s=options.day_s)
        started_at_s = _report_history(client, trace)
        routes.begin_day(started_at_s=started_at_s, day_s=trace.day_s)
        _announce_console(console, service, client, opens_browser=options.opens_browser)
        day = DemoDayRun(client, routes, service, trace, started_at_s)
        with ReferenceRuns(service, trace.day_s) as references:
            with single_keys() as has_keys, _create_screen(console, service, has_keys=has_keys) as screen:
                view = day.run(screen, has_keys=has_keys)
            console.print("The day is over. The same trainings without interruption end next, for comparison.")
            return view, *_check_day(day, references.collect())


def _check_day(day: DemoDayRun, trainings: Sequence[TrainingRun]) -> tuple[list[CheckResult], str]:
    total, receipts = day.client.usage()["total"], list(day.client.recalls())
    losses = [result for training in trainings for result in check_training(training)]
    surge = check_surge(receipts, day.routes.get_day())
    results = [
        check_usage(total),
        check_recalls(receipts),
        *([] if surge is None else [surge]),
        *losses,
        *check_events(day.events, subjects={*NODES, *day.trainings.values()}),
    ]
    return results, build_summary(total, receipts, losses)


def _report_history(client: Client, trace: DemandTrace) -> float:
    """Report the seven days of history and return the Unix time at which the replayed day starts."""
    started_at_s = time.time() + HISTORY_LEAD_S
    for pool, peak in PEAK_GPUS.items():
        past = [sample for sample in trace.history if started_at_s + sample.at_s < time.time()]
        client.push_demand(pool, [(started_at_s + sample.at_s, peak * sample.share) for sample in past])
    return started_at_s


def _announce_console(console: Console, service: DemoService, client: Client, *, opens_browser: bool) -> None:
    """Print how to open the console. A login URL is printed on a terminal only, because other output may be a log."""
    console.print("2 trainings run on this machine. 24 nodes are simulated; their names begin with sim-.")
    if not console.is_terminal:
        console.print(f"`ebbtide console --url {service.url}` prints a URL that opens the console.", soft_wrap=True)
        if not opens_browser:
            return
    login_url = format_login_url(service.url, client.create_login_code()["code"])
    if console.is_terminal:
        console.print(f"Console, signed in once: {login_url}", soft_wrap=True)
    if opens_browser and not webbrowser.open(login_url):
        console.print("No browser was found. Open the URL yourself.")


def _create_screen(console: Console, service: DemoService, *, has_keys: bool) -> Screen:
    if not console.is_terminal:
        return LineScreen(console)
    command = f"ebbtide demo surge --url {service.url}"
    return LiveScreen(console, hint="press s for a surge of demand" if has_keys else f"surge: {command}")


class DemoDayRun:
    """The replayed day: reports demand, submits jobs, and shows what happens. `trainings` are job ids by name."""

    def __init__(
        self, client: Client, routes: DemoRoutes, service: DemoService, trace: DemandTrace, started_at_s: float
    ) -> None:
        self.events: list[EventView] = []
        self.trainings: dict[str, str] = {}
        self.client = client
        self.routes = routes
        self._service = service
        self._trace = trace
        self._started_at_s = started_at_s
        self._submissions = list_submissions()
        self._reported: dict[str, float] = {}
        self._has_ended_lending = False

    def run(self, screen: Screen, *, has_keys: bool) -> DayView:
        """Replay the day, recall every lent node, wait for the trainings, and return the state after that.

        Raises:
            DemoError: a training failed, or did not end in time.
        """
        _sleep_until(self._started_at_s)
        for name in TRAININGS:
            self.trainings[name] = submit_training(self.client, self._service, name, self._trace.day_s)
        while not self._is_over():
            began_s = time.time()
            if has_keys and _SURGE_KEY in read_keys():
                self.routes.surge()
            self._report_demand()
            self._submit_simulated_jobs()
            self._show(screen)
            _sleep_until(began_s + REFRESH_S)
        return self._show(screen)

    @property
    def _passed_s(self) -> float:
        return time.time() - self._started_at_s

    def _is_over(self) -> bool:
        if self._passed_s < self._trace.day_s:
            return False
        if not self._has_ended_lending:
            self.client.recall_all()
            self._has_ended_lending = True
        states = {name: self.client.job(job_id)["state"] for name, job_id in self.trainings.items()}
        if all(state == "succeeded" for state in states.values()):
            return True
        if "failed" in states.values() or self._passed_s > self._trace.day_s + JOBS_TIMEOUT_S:
            raise DemoError(f"not every training succeeded: {states}")
        return False

    def _report_demand(self) -> None:
        """Report the demand of the trace, or that of a surge if it is higher, where it has changed."""
        day = self.routes.get_day()
        is_surging = day["surge_until_s"] is not None and day["now_s"] < day["surge_until_s"]
        share = self._trace.get_share(self._passed_s)
        for pool, peak in PEAK_GPUS.items():
            gpus = max(peak * share, day["surge_gpus"][pool] if is_surging else 0.0)
            if self._reported.get(pool) != gpus:
                self.client.report_demand(pool, gpus=gpus)
                self._reported[pool] = gpus

    def _submit_simulated_jobs(self) -> None:
        while self._submissions and self._submissions[0][0] * self._trace.day_s <= self._passed_s:
            self.client.submit(self._submissions.pop(0)[1])

    def _show(self, screen: Screen) -> DayView:
        after = self.events[-1]["number"] if self.events else 0
        new_events = list(self.client.events(after=after, limit=1000))
        self.events.extend(new_events)
        view = build_day_view(
            self.routes.get_day(),
            self.client.overview(),
            list(self.client.recalls()),
            [self.client.job(job_id) for job_id in self.trainings.values()],
        )
        screen.show(view, [((event["at_s"] - self._started_at_s) / self._trace.day_s, event) for event in new_events])
        return view


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.time()))


def _keep_service(console: Console, service: DemoService) -> None:
    with service.wait_until_ready() as client:
        login_url = format_login_url(service.url, client.create_login_code()["code"])
    console.print(f"DEMO_KEEP=1: the service keeps running until Ctrl-C. This URL opens its console: {login_url}")
    try:
        while True:
            time.sleep(1.0)
    except KeyboardInterrupt:
        console.print("Stopping.")
