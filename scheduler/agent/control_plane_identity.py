"""What an agent is to the control plane: where it reports and fetches, and with which token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from scheduler.agent.run_folder import RunFolder
from scheduler.domain.run_document import RunDocument


class ControlPlaneIdentity(Protocol):
    """The identity of an agent: of a machine with many jobs, or of a pod with one."""

    @property
    def url(self) -> str:
        """URL of the control plane, without a trailing slash."""

    @property
    def report_path(self) -> str:
        """Path to which the agent posts its reports."""

    def archive_path(self, digest: str, job_id: str) -> str:
        """Return the path of the archive of a job."""

    def read_token(self) -> str:
        """Return the token of the next connection. Raises OSError if it cannot be read."""

    def describe_agent(self) -> Mapping[str, Any]:
        """Return the fields of a report that describe the agent itself."""


class RankOutput(Protocol):
    """Where the output of ranks goes besides their files."""

    def follow(self, folder: RunFolder, document: RunDocument, *, has_ended: bool) -> None:
        """Take the output of a run, from its begin on. Once it `has_ended`, the rest is taken at once."""

    def has_sent(self, folder: RunFolder) -> bool:
        """Return whether all output of an ended run was taken, so that its files can be deleted."""

    def close(self, *, within_s: float) -> object:
        """Stop. The next agent takes what is left."""
