"""Composition root of the service: builds controller, API and background workers from settings."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

from scheduler.demand.reports import PoolDemandReader
from scheduler.domain.capacity_history import CHECKPOINT_DAYS, MINUTES, TEN_MINUTES
from scheduler.domain.snapshot import Snapshot
from scheduler.domain.tick_report import TickReport
from scheduler.executors.agent_executor import AgentExecutor
from scheduler.executors.executor import Executor
from scheduler.executors.run_ledger import RunLedger
from scheduler.executors.standby_replicas import StandbyReplicas
from scheduler.executors.stored_logs import LogRoot
from scheduler.forecast.forecaster import HISTORY_SEASONS, PoolForecaster
from scheduler.runtime.background import run_in_background
from scheduler.runtime.clock import Clock, RealClock
from scheduler.runtime.controller import Controller, ControllerConfig
from scheduler.runtime.curve_builder import CurveBuilder
from scheduler.runtime.demand_forecasts import DemandForecaster
from scheduler.runtime.departed_machines import DepartedMachines
from scheduler.runtime.fleet_hardware import FleetHardwareLoader
from scheduler.runtime.fleet_history import FleetHistory
from scheduler.runtime.problem_recorder import ProblemRecorder
from scheduler.runtime.process_pool import ProcessPool
from scheduler.runtime.reconciler import StageHook, ignore_stage
from scheduler.runtime.retention import DAY_S, Retention, RetentionPeriods
from scheduler.runtime.stop_signal import install_stop_signal
from scheduler.scheduling.policies.settings import PolicySettings
from scheduler.scheduling.policy_sets import PolicySet, load_policy_set
from scheduler.settings import Settings
from scheduler.simulator.daily_comparison import ComparisonPreparation, DailyComparisons
from scheduler.simulator.simulation_runner import RunnerLimits, SimulationRunner
from scheduler.store.api_protocol import HistoryLog
from scheduler.store.archives import ArchiveFolder
from scheduler.store.clock_reset import CLOCK_LEAD_S_MAX
from scheduler.store.sql_store import SqlStore
from scheduler.telemetry.logs import configure_logging
from scheduler.telemetry.metrics import record_history_deletion, record_savings_comparison, record_solve
from scheduler.telemetry.tick_metrics import TickRecorder
from scheduler.telemetry.traces import TickTracer
from scheduler.token_secret import load_token_secret

if TYPE_CHECKING:
    from api.demo import DemoDay
    from api.queue_secrets.missing_secrets import MissingSecretWatch
    from api.webhooks.deliverer import Backoff, DeliveryTimings, WebhookDeliverer


log = logging.getLogger(__name__)


def build_policies(settings: Settings) -> PolicySet:
    """Load the policy set that the settings name. Every field of PolicySettings is a setting of the same name."""
    values = {field.name: getattr(settings, field.name) for field in fields(PolicySettings)}
    return load_policy_set(settings.policy, PolicySettings(**values))


def build_controller(
    settings: Settings, store: SqlStore, *, clock: Clock | None = None, at: StageHook = ignore_stage
) -> Controller:
    """Build a controller whose jobs run on machines with node agents, without starting it.

    Args:
        clock: the real clock by default.
    """
    clock = clock or start_clock(store)
    ledger = RunLedger(store.run_log, epoch=lambda: controller.epoch)
    executor = AgentExecutor(
        ledger,
        store.machines,
        now=clock.now_s,
        disconnect_s=settings.disconnect_s,
        standby=StandbyReplicas(may_act=lambda: controller.is_leader),
    )
    controller = assemble_controller(
        settings, store, executor, clock, holder=make_holder_id(), has_news=executor.has_pending_changes, at=at
    )
    return controller


def start_clock(store: SqlStore) -> RealClock:
    """Return a clock that is not behind the store. Logs an error if the store has times in the future."""
    latest_s = store.load().snapshot.now_s
    if (lead_s := latest_s - RealClock().now_s()) > CLOCK_LEAD_S_MAX:
        log.error(
            "the database was written %.0f s in the future: a clock was wrong, or this machine's is. Machines count as "
            "lost meanwhile. If this machine's clock is right, stop the service and run `ebbtide reset-clock`",
            lead_s,
        )
    return RealClock(latest_s)


def assemble_controller(
    settings: Settings,
    store: SqlStore,
    executor: Executor,
    clock: Clock,
    *,
    holder: str,
    has_news: Callable[[], bool],
    may_lead: Callable[[], bool] = lambda: True,
    load_hardware: Callable[[Snapshot], None] | None = None,
    at: StageHook = ignore_stage,
) -> Controller:
    """Build a controller on an executor, without starting it.

    `load_hardware` makes the hardware of a snapshot known to this process. None: the controller has its own.
    """
    forecaster, recorder = partial(PoolForecaster, season_s=settings.season_s), TickRecorder()
    return Controller(
        holder=holder,
        store=store,
        executor=executor,
        clock=clock,
        policies=build_policies(settings),
        curves=CurveBuilder(
            ProcessPool(settings.solver_processes),
            in_flight_max=4 * settings.solver_processes,
            on_solved=record_solve,
            load_hardware=load_hardware or FleetHardwareLoader(store).load_for,
        ),
        demand=DemandForecaster(
            store,
            forecaster,
            history_s=HISTORY_SEASONS * settings.season_s,
            fits=ThreadPoolExecutor(1, thread_name_prefix="forecast-fit"),
            period_s=settings.full_pass_period_s,
        ),
        on_report=_record_with_trace(recorder, TickTracer()),
        on_leadership_lost=recorder.reset,
        has_changes=has_news,
        may_lead=may_lead,
        sources=PoolDemandReader(settings.prometheus_url),
        config=ControllerConfig(tick_s_max=settings.tick_s_max, lease_s=settings.lease_s),
        stage_hook=at,
    )


def _record_with_trace(recorder: TickRecorder, tracer: TickTracer) -> Callable[[TickReport], None]:
    def record(report: TickReport) -> None:
        recorder.record(report, tracer.record(report))

    return record


def build_retention(
    settings: Settings, store: SqlStore, *, epoch: Callable[[], int], root: LogRoot | None = None
) -> Retention:
    """Build the retention worker, which deletes old history while this process leads, without starting it.

    `root` is the run directory that holds job logs, or None if logs are stored elsewhere.
    """
    days = {
        HistoryLog.EVENTS: settings.events_kept_days,
        HistoryLog.DECISIONS: settings.events_kept_days,
        HistoryLog.ALLOCATIONS: settings.events_kept_days,
        HistoryLog.PROBLEMS: settings.events_kept_days,
        HistoryLog.AUDIT: settings.audit_kept_days,
        HistoryLog.COMMANDS: settings.commands_kept_days,
        HistoryLog.DELIVERIES: settings.deliveries_kept_days,
        HistoryLog.ENDED_JOBS: settings.jobs_kept_days,
        HistoryLog.ENDED_LOANS: settings.jobs_kept_days,
        HistoryLog.RECALL_RECEIPTS: settings.jobs_kept_days,
        HistoryLog.READINGS: settings.readings_kept_days,
        HistoryLog.USAGE: settings.usage_kept_days,
        HistoryLog.COMPARISONS: settings.usage_kept_days,
        HistoryLog.CAPACITY_MINUTES: MINUTES.days,
        HistoryLog.CAPACITY_TEN_MINUTES: TEN_MINUTES.days,
        HistoryLog.CAPACITY_HOURS: settings.capacity_kept_days,
        HistoryLog.CHECKPOINTS: CHECKPOINT_DAYS,
        HistoryLog.HOURLY_CHECKPOINTS: settings.checkpoints_kept_days,
        HistoryLog.FLEET_CHANGES: settings.checkpoints_kept_days,
    }
    rows_s = {log: DAY_S * kept_days for log, kept_days in days.items() if kept_days}
    if HistoryLog.READINGS in rows_s:
        rows_s[HistoryLog.READINGS] = max(rows_s[HistoryLog.READINGS], HISTORY_SEASONS * settings.season_s)
    kept = RetentionPeriods(
        rows_s,
        DAY_S * settings.logs_kept_days if settings.logs_kept_days else None,
        DAY_S * settings.archives_kept_days if settings.archives_kept_days else None,
    )
    return Retention(
        store,
        kept,
        clock=RealClock(),
        epoch=epoch,
        run_root=root,
        archives=ArchiveFolder(settings.archive_path),
        on_deleted=record_history_deletion,
    )


def make_holder_id() -> str:
    """Return a unique name of this process."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


BuildController = Callable[[Settings, SqlStore], Controller]


def run_controller(settings: Settings, build: BuildController = build_controller) -> None:
    """Run the controller until SIGTERM or SIGINT. Ranks go on."""
    configure_logging(settings.log_level, settings.log_format)
    store = SqlStore(settings.database_url, chains_audit=settings.audit_chain)
    try:
        controller, stop = build(settings, store), install_stop_signal()
        root = LogRoot(settings.run_dir)
        retention = build_retention(settings, store, epoch=lambda: controller.epoch, root=root)
        departed = DepartedMachines(
            store, clock=RealClock(), epoch=lambda: controller.epoch, silence_s=settings.temporary_machine_s
        )
        history = FleetHistory(store, clock=RealClock(), epoch=lambda: controller.epoch, season_s=settings.season_s)
        problems = ProblemRecorder(
            store, clock=RealClock(), epoch=lambda: controller.epoch, policies=build_policies(settings)
        )
        daily = build_daily_comparisons(settings, store, epoch=lambda: controller.epoch)
        with (
            run_in_background(retention.run, stop, name="retention"),
            run_in_background(history.run, stop, name="fleet-history"),
            run_in_background(problems.run, stop, name="problem-recorder"),
            run_in_background(departed.run, stop, name="departed-machines"),
            run_in_background(daily.run, stop, name="daily-comparison"),
        ):
            controller.run(stop)
    finally:
        store.close()


def build_daily_comparisons(settings: Settings, store: SqlStore, *, epoch: Callable[[], int]) -> DailyComparisons:
    """Build the worker that compares savings once a day while this process leads, without starting it."""
    return DailyComparisons(
        store,
        ComparisonPreparation(settings.database_url),
        clock=RealClock(),
        epoch=epoch,
        policy=settings.policy,
        on_ended=record_savings_comparison,
        begins=settings.daily_comparison,
    )


def run_api(
    settings: Settings,
    *,
    build_deliverer: Callable[[Settings, SqlStore, Clock], WebhookDeliverer] | None = None,
    demo: DemoDay | None = None,
) -> None:
    """Serve HTTP and run the background work of the API until SIGTERM or SIGINT. `demo` adds the demo's routes."""
    from api.app import create_app, serve
    from api.queue_secrets.missing_secrets import MissingSecretWatch

    configure_logging(settings.log_level, settings.log_format)
    store = SqlStore(settings.database_url, chains_audit=settings.audit_chain)
    clock, stop = RealClock(), install_stop_signal()  # uvicorn re-raises these signals once it has stopped
    try:
        app = create_app(
            store,
            settings,
            clock=clock,
            policies=build_policies(settings),
            lease=store.get_lease,
            token_secret=load_token_secret(settings.token_secret_path),
            run_log=store.run_log,
            demo=demo,
        )
        with _background_work(
            (build_deliverer or build_webhook_deliverer)(settings, store, clock),
            build_task_runner(settings, store, clock),
            MissingSecretWatch(app.state.service),
            partial(app.state.pending_reasons.run, lambda: store.load().snapshot),
            stop,
        ):
            serve(app, settings)
    finally:
        store.close()


def build_webhook_deliverer(
    settings: Settings,
    store: SqlStore,
    clock: Clock,
    *,
    backoff: Backoff | None = None,
    rhythm: DeliveryTimings | None = None,
) -> WebhookDeliverer:
    """Build the webhook deliverer, without starting it."""
    from api.webhooks.deliverer import WebhookDeliverer
    from api.webhooks.sender import WebhookSender, create_ssl_context, parse_allowed_hosts

    hosts, trust = parse_allowed_hosts(settings.webhook_hosts), create_ssl_context(settings.webhook_ca_file)
    return WebhookDeliverer(
        store,
        WebhookSender(hosts, now_s=clock.now_s, ssl_context=trust),
        secret=load_token_secret(settings.token_secret_path),
        holder=make_holder_id(),
        clock=clock,
        draw_fraction=secrets.SystemRandom().random,
        backoff=backoff,
        timings=rhythm,
    )


def build_task_runner(settings: Settings, store: SqlStore, clock: Clock) -> SimulationRunner:
    """Build the runner of submitted simulations, without starting it."""
    terms = RunnerLimits(
        concurrent_max=settings.simulations_at_once,
        memory_bytes=settings.simulation_memory_bytes,
        cpu_s=settings.simulation_cpu_s,
        retention_s=settings.simulation_kept_s,
    )
    return SimulationRunner(store.simulations, terms, holder=make_holder_id(), clock=clock)


@contextmanager
def _background_work(
    deliverer: WebhookDeliverer,
    runner: SimulationRunner,
    secret_watch: MissingSecretWatch,
    keep_reasons: Callable[[threading.Event], None],
    stop: threading.Event,
) -> Iterator[None]:
    """Deliver webhooks, run simulations, watch secrets and keep the reasons of pending jobs during the block.

    At its end, set `stop` and join.
    """
    work = {
        "courier": lambda: asyncio.run(deliverer.run(stop)),
        "simulations": lambda: runner.run(stop),
        "secrets": lambda: secret_watch.run(stop),
        "reasons": lambda: keep_reasons(stop),
    }
    threads = [threading.Thread(target=each, name=name) for name, each in work.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
