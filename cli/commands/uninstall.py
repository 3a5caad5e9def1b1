"""The `prepare-uninstall` command, which the Helm chart runs before it is uninstalled."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.exit_codes import CommandError
from cli.inputs import input_errors_from
from cli.output import print_message
from cli.service_settings import read_settings

StopJobsOption = Annotated[
    bool,
    typer.Option(
        "--stop-jobs", help="Suspend all jobs, which save first, and return lent nodes. Default: fail if there are any."
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", min=0, help="With --stop-jobs: seconds after which pods that are left are deleted."),
]


def prepare_uninstall(stops_jobs: StopJobsOption = False, timeout_s: TimeoutOption = 240.0) -> None:
    """Release nodes and custom resources of a cluster before the operator is removed.

    Fails while a job has pods or a node is lent, unless --stop-jobs is set. Then it takes the operator's Lease, returns
    lent nodes, deletes Loans, and removes finalizers. Jobs, Pools and Queues stay for the next installation.
    """
    from cli.composition.kubernetes_operator import build_uninstallation
    from scheduler.kubernetes.api_error import ApiError
    from scheduler.kubernetes.uninstallation import UninstallationError
    from scheduler.telemetry.logs import configure_logging

    settings = read_settings()
    configure_logging(settings.log_level, settings.log_format)
    with input_errors_from("EBBTIDE_KUBECONFIG"):
        uninstallation = build_uninstallation(settings)
    try:
        uninstallation.prepare(stops_jobs=stops_jobs, timeout_s=timeout_s)
    except (UninstallationError, ApiError) as error:
        raise CommandError(str(error)) from error
    print_message("Nothing of Ebbtide holds the cluster. Uninstall it within a minute.")
