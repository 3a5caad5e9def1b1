"""Secrets that live jobs name and that the service cannot give out: they were deleted, or cannot be decrypted.

The scheduler has no keys, so commands tell it: `DeleteSecret` lets the jobs wait, and `SetSecret` lets them start.
"""

from __future__ import annotations

import logging
import secrets
import threading

from api.http.dependencies import Service
from api.queue_secrets.vault import SecretKeyError
from scheduler.domain.commands import Command, DeleteSecret, SetSecret
from scheduler.domain.job import Job
from scheduler.store.protocol import UnavailableError

CHECK_PERIOD_S = 30.0

logger = logging.getLogger(__name__)


def is_affected(job: Job, change: SetSecret | DeleteSecret) -> bool:
    """Return whether the change decides if the job can start."""
    if job.is_ended or job.spec.queue != change.queue or change.name not in job.spec.program.secret_names:
        return False
    return (change.name in job.missing_secrets) is isinstance(change, SetSecret)


def report_missing_secret(service: Service, queue: str, name: str) -> None:
    """Let the jobs of the queue that name the secret wait. Does nothing if they wait already."""
    _send(service, DeleteSecret(queue, name))


def _send(service: Service, change: SetSecret | DeleteSecret) -> None:
    """Send the command unless no job depends on it. It is no change of a caller, so the audit log has no entry."""
    now_s = service.clock.now_s()
    if any(is_affected(job, change) for job in service.state_reader.read(now_s).snapshot.jobs.values()):
        service.store.send(Command(f"api-{secrets.token_hex(12)}", now_s, change))


class MissingSecretWatch:
    """Looks regularly for missing secrets that can be used again, because an admin has restored the master key.

    It also makes up for a change of a secret that no job heard of, because the process ended in between.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def run(self, stop: threading.Event) -> None:
        """Check until `stop` is set."""
        while not stop.wait(CHECK_PERIOD_S):
            try:
                self.check()
            except UnavailableError as error:
                logger.warning("missing secrets are not checked, because the database is unavailable: %s", error)
            except Exception:
                logger.exception("cannot check missing secrets")

    def check(self) -> None:
        """Let the jobs start whose secrets can be decrypted again."""
        service = self._service
        jobs = service.state_reader.read(service.clock.now_s()).snapshot.jobs.values()
        missing = {(job.spec.queue, name) for job in jobs if not job.is_ended for name in job.missing_secrets}
        for queue, name in sorted(missing):
            if self._is_usable(queue, name):
                _send(service, SetSecret(queue, name))

    def _is_usable(self, queue: str, name: str) -> bool:
        sealed = self._service.store.secrets.find(queue, name)
        if sealed is None:
            return False
        try:
            self._service.vault.open(sealed)
        except SecretKeyError:
            return False
        return True
