"""The operator's part of the composition root: apart, because what speaks to Kubernetes takes as long to import as half
of all else, and only an operator needs it."""

from __future__ import annotations

import logging
import time
from functools import partial

from scheduler.domain.worker_token import issue_agent_token
from scheduler.k8s.asking import Asked
from scheduler.k8s.client import connect
from scheduler.k8s.cluster_mirrors import ClusterMirrors
from scheduler.k8s.demand import DemandSources
from scheduler.k8s.effects import Effects
from scheduler.k8s.election import LIMITS, Election
from scheduler.k8s.executor import KubernetesExecutor
from scheduler.k8s.job_objects import JobObjects, SiteRules
from scheduler.k8s.node_lending import NodeLending
from scheduler.k8s.operating import Round, Standing
from scheduler.k8s.operator import Operator
from scheduler.k8s.story import Story
from scheduler.k8s.writer import Writer
from scheduler.runtime.clock import RealClock
from scheduler.runtime.outage import wait_for
from scheduler.settings import Settings, token_secret
from scheduler.store.sql import SqlStore
from scheduler.telemetry.logs import configure_logs
from scheduler.telemetry.metrics import record_asked, record_round
from scheduler.telemetry.probes import Probes
from scheduler.wiring import controller_of, new_holder, retention, stop_signal

log = logging.getLogger(__name__)


def build_operator(settings: Settings, store: SqlStore) -> Operator:
    """An operator with its controller, mirrors and election, not yet running.

    Raises:
        NoClusterError: no API server of Kubernetes is named anywhere.
    """
    kubeconfig, clock = settings.kubeconfig or "", RealClock(store.load().snapshot.now_s)
    identity = new_holder()
    votes = connect(kubeconfig, limits=LIMITS, on_asked=_record_asked)
    election = Election(votes, name="ebbtide-operator", namespace=settings.lease_namespace, identity=identity)
    cluster = connect(kubeconfig, on_asked=_record_asked, may_write=lambda: election.is_leading)
    effects, secret = Effects(), token_secret(settings.secret_path)
    mirrors = ClusterMirrors(cluster)
    executor = KubernetesExecutor(
        JobObjects(
            cluster,
            mirrors,
            SiteRules(settings.job_namespace, settings.worker_url, settings.worker_image),
            epoch=lambda: controller.epoch,
            agent_token=partial(issue_agent_token, secret),
        ),
        NodeLending(cluster, mirrors, epoch=lambda: controller.epoch),
        view=mirrors.view,
        run_log=store.run_log,
        now=clock.now_s,
        epoch=lambda: controller.epoch,
        effects=effects,
    )
    controller = controller_of(
        settings, store, executor, clock, holder=identity, has_news=mirrors.has_news, may_lead=lambda: operator.may_lead
    )
    operator = Operator(
        mirrors=mirrors,
        election=election,
        controller=controller,
        store=store,
        clock=clock,
        demand=DemandSources(cluster, prometheus_url=settings.prometheus_url),
        writer=Writer(cluster, mirrors),
        story=Story(store, reporter=identity),
        effects=effects,
        job_namespace=settings.job_namespace,
        on_round=_record_round,
    )
    return operator


def _record_asked(asked: Asked) -> None:
    record_asked(verb=asked.verb, resource=asked.resource, status=asked.status, took_s=asked.took_s)


def _record_round(done: Round) -> None:
    among = [standing.value for standing in Standing]
    record_round(standing=done.standing.value, among=among, silent_s=done.silent_s, now_s=time.time())


def run_operator(settings: Settings, probes: Probes) -> None:
    """Lead while elected, until SIGTERM or SIGINT. Jobs go on while nobody leads. A database that does not answer is
    waited for.

    Raises:
        NoClusterError: no API server of Kubernetes is named anywhere.
        StoreError: the database cannot be used as it is.
    """
    configure_logs(settings.log_level, settings.log_format)
    stop = stop_signal()
    log.info("probes are answered on %s:%d", settings.host, probes.port)
    store = wait_for(lambda: SqlStore(settings.database_url), stop, time.monotonic)
    if store is None:
        return
    try:
        operator = build_operator(settings, store)
        probes.unlive, probes.unready = operator.unlive, operator.unready
        with retention(settings, store, epoch=lambda: operator.epoch).beside(stop):
            operator.run(stop)
    finally:
        store.close()
