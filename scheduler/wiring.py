"""The composition root: settings in, running parts out. The only place where everything meets."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from scheduler.domain.tick_report import TickReport
from scheduler.executors.local import LocalExecutor
from scheduler.executors.local_records import RunRoot
from scheduler.executors.local_run import Patience
from scheduler.executors.log_file import LogLimits
from scheduler.executors.protocol import Executor
from scheduler.forecast.forecaster import SeasonalForecaster
from scheduler.policies.policy_set import PolicySet, policy_set
from scheduler.policies.settings import PolicySettings
from scheduler.runtime.clock import Clock, RealClock
from scheduler.runtime.controller import Controller, Pace
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.demand_watch import DemandWatch
from scheduler.runtime.process_pool import ProcessPool
from scheduler.runtime.reconciler import Hook, no_hook
from scheduler.runtime.retention import DAY_S, Kept, Retention
from scheduler.settings import Settings, token_secret
from scheduler.simulator.task_runner import TaskRunner, Terms
from scheduler.store.front import HistoryLog
from scheduler.store.sql import SqlStore
from scheduler.telemetry.logs import configure_logs
from scheduler.telemetry.metrics import record_solve, record_swept
from scheduler.telemetry.tick_recorder import TickRecorder
from scheduler.telemetry.traces import TickTracer

if TYPE_CHECKING:
    from api.webhooks.courier import Courier, Rhythm
    from api.webhooks.retrying import Backoff

HISTORY_SEASONS = 14


def policies_of(settings: Settings) -> PolicySet:
    return policy_set(
        settings.policy,
        PolicySettings(
            full_pass_period_s=settings.full_pass_period_s,
            reconfiguration_s=settings.reconfiguration_s,
            leave_grace_s=settings.leave_grace_s,
            resize_pause_s=settings.resize_pause_s,
            run_time_min_s=settings.run_time_min_s,
        ),
    )


def build_controller(
    settings: Settings, store: SqlStore, *, clock: Clock | None = None, at: Hook = no_hook
) -> Controller:
    """A controller with its executor, curve builder and forecasters, not yet running. It lives by real time unless
    another clock is given."""
    clock = clock or RealClock(store.load().snapshot.now_s)
    secret = token_secret(settings.secret_path)
    patience = Patience(close_s=settings.leave_grace_s)
    executor = LocalExecutor(
        settings.run_dir,
        now=clock.now_s,
        url=settings.worker_url,
        secret=secret,
        patience=patience,
        logs=LogLimits(settings.log_bytes, settings.log_generations),
        at=at,
    )
    return controller_of(
        settings,
        store,
        executor,
        clock,
        holder=new_holder(),
        has_news=executor.has_news,
        may_lead=executor.may_lead,
        at=at,
    )


def controller_of(
    settings: Settings,
    store: SqlStore,
    executor: Executor,
    clock: Clock,
    *,
    holder: str,
    has_news: Callable[[], bool],
    may_lead: Callable[[], bool] = lambda: True,
    at: Hook = no_hook,
) -> Controller:
    """A controller on this executor, not yet running."""
    forecaster, recorder = partial(SeasonalForecaster, season_s=settings.season_s), TickRecorder()
    return Controller(
        holder=holder,
        store=store,
        executor=executor,
        clock=clock,
        policies=policies_of(settings),
        curves=CurveBuilder(
            ProcessPool(settings.solver_processes),
            most_in_flight=4 * settings.solver_processes,
            on_solved=record_solve,
        ),
        demand=DemandWatch(store, forecaster, memory_s=HISTORY_SEASONS * settings.season_s),
        on_report=_all_of(recorder.record, TickTracer().record),
        on_rest=recorder.rest,
        has_news=has_news,
        may_lead=may_lead,
        pace=Pace(tick_s_max=settings.tick_s_max, lease_s=settings.lease_s),
        at=at,
    )


def _all_of(*told: Callable[[TickReport], None]) -> Callable[[TickReport], None]:
    def tell(report: TickReport) -> None:
        for each in told:
            each(report)

    return tell


def retention(
    settings: Settings, store: SqlStore, *, epoch: Callable[[], int], root: RunRoot | None = None
) -> Retention:
    """What removes old history while this process leads, not yet running; `root`: where logs of jobs lie."""
    days = {
        HistoryLog.EVENTS: settings.events_kept_days,
        HistoryLog.DECISIONS: settings.events_kept_days,
        HistoryLog.AUDIT: settings.audit_kept_days,
        HistoryLog.COMMANDS: settings.commands_kept_days,
        HistoryLog.DELIVERIES: settings.deliveries_kept_days,
    }
    kept = Kept(
        {log: DAY_S * kept_days for log, kept_days in days.items() if kept_days},
        DAY_S * settings.logs_kept_days if settings.logs_kept_days else None,
    )
    return Retention(store, kept, clock=RealClock(), epoch=epoch, root=root, note=record_swept)


def new_holder() -> str:
    """A name for this process that none has had."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def stop_signal() -> threading.Event:
    """Set by SIGTERM and SIGINT from now on."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def run_controller(settings: Settings) -> None:
    """Decide until SIGTERM or SIGINT; every local worker has ended when this returns."""
    configure_logs(settings.log_level, settings.log_format)
    store = SqlStore(settings.database_url)
    try:
        controller, stop = build_controller(settings, store), stop_signal()
        root = RunRoot(settings.run_dir)
        with retention(settings, store, epoch=lambda: controller.epoch, root=root).beside(stop):
            controller.run(stop)
    finally:
        store.close()


def run_api(settings: Settings, *, courier: Callable[[Settings, SqlStore, Clock], Courier] | None = None) -> None:
    """Answer HTTP, and do beside it what is asked for over HTTP, until SIGTERM or SIGINT."""
    from api.app import create_app
    from api.server import serve

    configure_logs(settings.log_level, settings.log_format)
    store = SqlStore(settings.database_url)
    clock, stop = RealClock(), stop_signal()  # uvicorn hands these signals on to us once it has stopped
    try:
        app = create_app(
            store,
            settings,
            clock=clock,
            policies=policies_of(settings),
            lease=store.lease,
            token_secret=token_secret(settings.secret_path),
            run_log=store.run_log,
        )
        with _beside((courier or build_courier)(settings, store, clock), task_runner(settings, store, clock), stop):
            serve(app, host=settings.host, port=settings.port, is_shared=settings.api_processes > 1)
    finally:
        store.close()


def build_courier(
    settings: Settings, store: SqlStore, clock: Clock, *, backoff: Backoff | None = None, rhythm: Rhythm | None = None
) -> Courier:
    """What delivers to webhooks, not yet running."""
    from api.webhooks.addresses import allowed_hosts
    from api.webhooks.courier import Courier
    from api.webhooks.sender import Sender, trusting

    hosts, trust = allowed_hosts(settings.webhook_hosts), trusting(settings.webhook_ca_file)
    return Courier(
        store,
        Sender(hosts, now=clock.now_s, trust=trust),
        secret=token_secret(settings.secret_path),
        holder=new_holder(),
        clock=clock,
        draw=secrets.SystemRandom().random,
        backoff=backoff,
        rhythm=rhythm,
    )


def task_runner(settings: Settings, store: SqlStore, clock: Clock) -> TaskRunner:
    """What plays simulations that are handed in, not yet running."""
    terms = Terms(
        at_once=settings.simulations_at_once,
        memory_bytes=settings.simulation_memory_bytes,
        cpu_s=settings.simulation_cpu_s,
        kept_s=settings.simulation_kept_s,
    )
    return TaskRunner(store.simulations, terms, holder=new_holder(), clock=clock)


@contextmanager
def _beside(courier: Courier, runner: TaskRunner, stop: threading.Event) -> Iterator[None]:
    """Within it, webhooks are delivered to and simulations played; `stop` is set at its end."""
    work = {"courier": lambda: asyncio.run(courier.run(stop)), "simulations": lambda: runner.run(stop)}
    threads = [threading.Thread(target=each, name=name) for name, each in work.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
