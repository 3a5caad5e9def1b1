"""Composition root of the Kubernetes operator. Separate because the Kubernetes client is slow to import."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from cli.composition.service import (
    assemble_controller,
    build_daily_comparisons,
    build_policies,
    build_retention,
    make_holder_id,
    start_clock,
)
from scheduler.domain.worker_token import issue_agent_token
from scheduler.executors.standby_replicas import StandbyReplicas
from scheduler.kubernetes.agent_injection import AgentDelivery, AgentImage
from scheduler.kubernetes.api_actions import ActionPool
from scheduler.kubernetes.client import KubernetesClient, connect
from scheduler.kubernetes.cluster_cache import ClusterCache
from scheduler.kubernetes.demand_sources import DemandSources
from scheduler.kubernetes.event_recorder import EventRecorder
from scheduler.kubernetes.executor import KubernetesExecutor
from scheduler.kubernetes.flow_control import ClientLimits, RequestRecord
from scheduler.kubernetes.job_objects import JobDefaults, JobObjectActions
from scheduler.kubernetes.leader_election import ELECTION_LIMITS, OPERATOR_LEASE, LeaderElector
from scheduler.kubernetes.node_lending import NodeLending
from scheduler.kubernetes.operator_loop import LoopIteration, Operator, OperatorState
from scheduler.kubernetes.prefetching import Prefetches
from scheduler.kubernetes.replica_scaling import ReplicaScaler
from scheduler.kubernetes.resource_publisher import ResourcePublisher
from scheduler.kubernetes.resource_writer import ResourceWriter
from scheduler.kubernetes.uninstallation import Uninstallation
from scheduler.kubernetes.warm_replicas import WarmControl
from scheduler.runtime.background import run_in_background
from scheduler.runtime.clock import RealClock
from scheduler.runtime.controller import open_when_available
from scheduler.runtime.estimated_gpus import load_estimated_gpus, save_estimated_gpus
from scheduler.runtime.fleet_hardware import FleetHardwareLoader
from scheduler.runtime.fleet_history import FleetHistory
from scheduler.runtime.problem_recorder import ProblemRecorder
from scheduler.runtime.stop_signal import install_stop_signal
from scheduler.settings import Settings
from scheduler.store.sql_store import SqlStore
from scheduler.telemetry.logs import configure_logging
from scheduler.telemetry.metrics import record_kubernetes_request, record_operator_status
from scheduler.telemetry.probes import ProbeServer
from scheduler.token_secret import load_token_secret

log = logging.getLogger(__name__)


def build_operator(settings: Settings, store: SqlStore) -> Operator:
    """Build an operator with its controller, resource caches and leader election, without starting it.

    Raises:
        NoClusterError: no Kubernetes API server is configured.
    """
    kubeconfig, clock = settings.kubeconfig or "", start_clock(store)
    load_estimated_gpus(store.machines)
    load_hardware = FleetHardwareLoader(store).load_for
    identity = make_holder_id()
    votes = connect(kubeconfig, limits=ELECTION_LIMITS, on_request=_record_request)
    election = LeaderElector(votes, name=OPERATOR_LEASE, namespace=settings.lease_namespace, identity=identity)
    limits = ClientLimits(qps=settings.kubernetes_qps, burst=settings.kubernetes_burst)
    cluster = connect(kubeconfig, limits=limits, on_request=_record_request, may_write=lambda: election.is_leading)
    mirrors = ClusterCache(cluster)
    objects = _build_job_objects(settings, cluster, mirrors, lambda: controller.epoch)
    executor = KubernetesExecutor(
        objects,
        NodeLending(cluster, mirrors, epoch=lambda: controller.epoch),
        view=mirrors.get_view,
        run_log=store.run_log,
        now=clock.now_s,
        epoch=lambda: controller.epoch,
        actions=ActionPool(available_requests=cluster.count_available_requests),
        prefetches=Prefetches(cluster, mirrors, list_job_images=objects.list_images),
        standby=StandbyReplicas(warm=WarmControl(cluster), may_act=lambda: election.is_leading),
        start_timeout_s=settings.pod_start_timeout_s,
    )
    controller = assemble_controller(
        settings,
        store,
        executor,
        clock,
        holder=identity,
        has_news=lambda: mirrors.has_pending_changes() or executor.has_news(),
        may_lead=lambda: operator.may_lead,
        load_hardware=load_hardware,
    )
    operator = Operator(
        cache=mirrors,
        election=election,
        controller=controller,
        store=store,
        clock=clock,
        demand=DemandSources(cluster, prometheus_url=settings.prometheus_url),
        scaler=ReplicaScaler(cluster),
        publisher=_build_publisher(cluster, mirrors, EventRecorder(store, reporting_instance=identity)),
        job_namespace=settings.job_namespace,
        allows_undeclared_queues=settings.undeclared_queues == "allow",
        save_estimates=lambda profiles: save_estimated_gpus(
            store.machines, profiles, origin="labels", now_s=clock.now_s()
        ),
        load_hardware=load_hardware,
        on_iteration=_record_round,
    )
    return operator


def _build_publisher(cluster: KubernetesClient, mirrors: ClusterCache, events: EventRecorder) -> ResourcePublisher:
    actions = ActionPool(available_requests=cluster.count_available_requests)
    return ResourcePublisher(ResourceWriter(cluster, mirrors), events, actions)


def _build_job_objects(
    settings: Settings, cluster: KubernetesClient, mirrors: ClusterCache, epoch: Callable[[], int]
) -> JobObjectActions:
    agent = AgentImage(settings.agent_image, AgentDelivery(settings.agent_delivery))
    secrets = tuple(filter(None, settings.image_pull_secrets.split(",")))
    defaults = JobDefaults(settings.job_namespace, settings.worker_url, settings.worker_image, agent, secrets)
    agent_token = partial(issue_agent_token, load_token_secret(settings.token_secret_path))
    return JobObjectActions(cluster, mirrors, defaults, epoch=epoch, agent_token=agent_token)


def build_uninstallation(settings: Settings) -> Uninstallation:
    """Build the preparation of an uninstallation.

    Raises:
        NoClusterError: no Kubernetes API server is configured.
    """
    return Uninstallation(
        connect(settings.kubeconfig or ""), lease_namespace=settings.lease_namespace, identity=make_holder_id()
    )


def _record_request(request: RequestRecord) -> None:
    record_kubernetes_request(
        verb=request.verb, resource=request.resource, status=request.status, seconds=request.duration_s
    )


def _record_round(done: LoopIteration) -> None:
    among = [standing.value for standing in OperatorState]
    record_operator_status(
        status=done.state.value, statuses=among, silence_s=done.seconds_since_contact, now_s=time.time()
    )


def run_operator(settings: Settings, probes: ProbeServer) -> None:
    """Run the operator until SIGTERM or SIGINT. Waits for an unavailable database; jobs run on without a leader.

    Raises:
        NoClusterError: no Kubernetes API server is configured.
        StoreError: the database is unusable, for example because its schema is newer.
    """
    configure_logging(settings.log_level, settings.log_format)
    stop = install_stop_signal()
    log.info("health probes listen on %s:%d", settings.host, probes.port)
    store = open_when_available(
        lambda: SqlStore(settings.database_url, chains_audit=settings.audit_chain), stop, time.monotonic
    )
    if store is None:
        return
    try:
        operator = build_operator(settings, store)
        probes.liveness_error, probes.readiness_error = operator.liveness_error, operator.readiness_error
        retention = build_retention(settings, store, epoch=lambda: operator.epoch)
        history = FleetHistory(store, clock=RealClock(), epoch=lambda: operator.epoch, season_s=settings.season_s)
        problems = ProblemRecorder(
            store, clock=RealClock(), epoch=lambda: operator.epoch, policies=build_policies(settings)
        )
        daily = build_daily_comparisons(settings, store, epoch=lambda: operator.epoch)
        with (
            run_in_background(retention.run, stop, name="retention"),
            run_in_background(daily.run, stop, name="daily-comparison"),
            run_in_background(history.run, stop, name="fleet-history"),
            run_in_background(problems.run, stop, name="problem-recorder"),
        ):
            operator.run(stop)
    finally:
        store.close()
