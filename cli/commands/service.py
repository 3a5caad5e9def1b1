"""`serve` and `migrate`, and the processes that `serve` starts.

`export-trace`: the history of a live service as files that `simulate` reads.
"""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.inputs import CommandError, InputError, input_errors_from
from cli.output import OutputFormat, OutputOption, format_count, print_document, print_message, render_facts

if TYPE_CHECKING:
    from scheduler.settings import Settings


HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on; EBBTIDE_HOST.")]
PortOption = Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Port to listen on; EBBTIDE_PORT.")]
DatabaseOption = Annotated[
    str | None, typer.Option("--database-url", help="Where all state is kept (SQLAlchemy URL); EBBTIDE_DATABASE_URL.")
]

RestoredOption = Annotated[
    bool, typer.Option("--restored", help="It was restored from a back-up: fence whoever led after that was made.")
]


def serve(host: HostOption = None, port: PortOption = None, database_url: DatabaseOption = None) -> None:
    """Run the service here: the API and the controller, as processes of their own on one database."""
    from cli.supervisor import supervise

    given = {"EBBTIDE_HOST": host, "EBBTIDE_PORT": port, "EBBTIDE_DATABASE_URL": database_url}
    os.environ.update({name: str(value) for name, value in given.items() if value is not None})
    settings = read_settings()
    if "EBBTIDE_AUTH" not in os.environ and settings.is_loopback:
        os.environ["EBBTIDE_AUTH"] = "off"
        settings = read_settings()
    _check_auth(settings)
    # Chosen here where that is left to us, not by the API: the controller has to tell its workers the same port.
    os.environ["EBBTIDE_PORT"] = str(_choose_port(settings))
    settings = read_settings()
    _check_policy(settings)
    _check_tracing()
    _migrate_database(settings)
    print_message(
        f"Ebbtide serves {settings.worker_url} on {redact_database_url(settings.database_url)}; Ctrl-C stops it."
    )
    print_message(_describe_authentication(settings))
    child = [sys.executable, "-m", "cli"]
    with tempfile.TemporaryDirectory(prefix="ebbtide-metrics-") as metrics:
        # Both processes count into this folder, so that one scrape shows the counters of either.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics
        names = ["API"] if settings.api_processes == 1 else [f"API {at + 1}" for at in range(settings.api_processes)]
        apis = {name: [*child, "api"] for name in names}
        code, why = supervise({"controller": [*child, "controller"], **apis})
    if code:
        raise CommandError(why)
    print_message(f"Ebbtide {why}.")


def migrate(
    database_url: DatabaseOption = None, is_restored: RestoredOption = False, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Bring the database to the newest form. Does nothing where it has that already."""
    if database_url is not None:
        os.environ["EBBTIDE_DATABASE_URL"] = database_url
    settings = read_settings()
    _migrate_database(settings, is_restored=is_restored)
    document = {"database_url": redact_database_url(settings.database_url), "revision": "head"}
    print_document(
        document, output, lambda: render_facts({"database": document["database_url"], "is at": "the newest revision"})
    )


def controller() -> None:
    """The process that decides (started by `serve`)."""
    from cli.composition.service import run_controller
    from cli.supervisor import exit_with_parent

    exit_with_parent()
    _start_tracing("ebbtide-controller")
    run_controller(read_settings())


def api() -> None:
    """The process that answers HTTP (started by `serve`)."""
    from cli.composition.service import run_api
    from cli.supervisor import exit_with_parent

    settings = read_settings()
    _check_auth(settings)
    exit_with_parent()
    _start_tracing("ebbtide-api")
    run_api(settings)


def operator() -> None:
    """Run jobs on Kubernetes: custom resources in and out, decisions from the same database as the API's."""
    from cli.composition.kubernetes_operator import run_operator
    from scheduler.telemetry.probes import ProbeServer

    settings = read_settings()
    _check_policy(settings)
    _start_tracing("ebbtide-operator")
    with input_errors_from("EBBTIDE_HOST, EBBTIDE_PROBE_PORT"):
        probes = ProbeServer(settings.host, settings.probe_port)
    with probes, input_errors_from("EBBTIDE_KUBECONFIG"):
        run_operator(settings, probes)


def read_settings() -> Settings:
    """The settings of the environment. Raises BadInput naming the variable that is wrong."""
    from pydantic import ValidationError

    from scheduler.settings import Settings

    try:
        return Settings()
    except ValidationError as wrong:
        first = wrong.errors()[0]
        name = "EBBTIDE_" + "_".join(str(part) for part in first["loc"]).upper()
        raise InputError(f"{name}: {first['input']!r} is wrong: {first['msg']}") from wrong


def _choose_port(settings: Settings) -> int:
    """The port asked for, or a free one. Raises BadInput where it cannot be had: processes that share a port would not
    be told that somebody else has it."""
    import errno
    import socket

    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as probe:
            found: int = probe.getsockname()[1]
            return found
    except OSError as wrong:
        why = os.strerror(wrong.errno) if wrong.errno else str(wrong)
        if wrong.errno in (errno.EADDRINUSE, errno.EACCES):
            raise InputError(
                f"EBBTIDE_PORT: cannot listen on {host}, port {port}: {why}; 0 takes a free one"
            ) from wrong
        raise InputError(f"EBBTIDE_HOST: cannot listen on {host!r}: {why}") from wrong


def _check_auth(settings: Settings) -> None:
    if settings.auth == "off" and not settings.is_loopback:
        raise InputError(
            f"EBBTIDE_AUTH: got off with EBBTIDE_HOST {settings.host}, which others reach; allowed: on (make a token "
            "with `ebbtide token create`), off with a loopback address, or off-everywhere"
        )


def _describe_authentication(settings: Settings) -> str:
    if settings.auth == "on":
        return "Who asks needs a token: `ebbtide token create --name NAME --grant admin` makes the first one here."
    whom = "everybody on this machine" if settings.is_loopback else f"everybody who reaches {settings.host}"
    return f"Authentication is off: {whom} may do everything; EBBTIDE_AUTH=on asks for tokens."


def _check_policy(settings: Settings) -> None:
    from scheduler.scheduling.policies.policy_set import load_policy_set

    with input_errors_from("EBBTIDE_POLICY"):
        load_policy_set(settings.policy)


def _check_tracing() -> None:
    from scheduler.telemetry.traces import is_tracing_enabled

    with input_errors_from(""):
        is_tracing_enabled(os.environ)


def _start_tracing(service: str) -> None:
    from scheduler.telemetry.traces import start_tracing

    with input_errors_from(""):
        start_tracing(service, os.environ)


def _migrate_database(settings: Settings, *, is_restored: bool = False) -> None:
    from scheduler.store.schema_migration import adopt_restored_database
    from scheduler.store.schema_migration import migrate as to_newest

    with input_errors_from("EBBTIDE_DATABASE_URL"):
        (adopt_restored_database if is_restored else to_newest)(settings.database_url)


def redact_database_url(database_url: str) -> str:
    """A database's URL without the password that it may hold, wherever: read as who connects reads it."""
    from sqlalchemy import make_url

    return make_url(database_url).difference_update_query(("password", "sslpassword")).render_as_string()


JobsFileOption = Annotated[Path, typer.Option("--jobs", metavar="JOBS.csv[.gz]", help="Where to write the jobs.")]
DemandFileOption = Annotated[
    Path, typer.Option("--demand", metavar="DEMAND.csv[.gz]", help="Where to write the demand.")
]
_JOBS_MAX = 10**12


def export_trace(
    jobs: JobsFileOption = Path("jobs.csv"),
    demand: DemandFileOption = Path("demand.csv"),
    database_url: DatabaseOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Write the jobs and the demand that a service's database remembers, for `ebbtide simulate`."""
    from scheduler.documents.trace_files import export_trace as trace_of
    from scheduler.documents.trace_files import format_demand_csv, format_jobs_csv
    from scheduler.store.sql_store import SqlStore

    with input_errors_from("--database-url"):
        store = SqlStore(database_url or read_settings().database_url)
    try:
        snapshot = store.load().snapshot
        known = {job.id: job for job in (*store.list_ended_jobs(limit=_JOBS_MAX), *snapshot.jobs.values())}
        readings = {pool: store.list_readings(pool, since_s=0.0) for pool in snapshot.pools}
    finally:
        store.close()
    trace = trace_of(known.values(), readings, snapshot.now_s)
    if not trace.jobs:
        raise CommandError("jobs: there is nothing to export: no job has run or is known to run for some time")
    _write_trace(jobs, format_jobs_csv(trace.jobs))
    document = {"jobs": len(trace.jobs), "demand": len(trace.demand), "skipped": list(trace.skipped)}
    told = {"jobs": f"{format_count(len(trace.jobs), 'job')} in {jobs}"}
    if trace.demand:
        _write_trace(demand, format_demand_csv(trace.demand))
        told["demand"] = f"{format_count(len(trace.demand), 'reading')} in {demand}"
    if trace.skipped:
        told["left out"] = f"{', '.join(trace.skipped)}: nothing is known of their length"
    print_document(document, output, lambda: render_facts(told))


def _write_trace(path: Path, text: str) -> None:
    content = text.encode()
    try:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    except OSError as wrong:
        raise CommandError(f"{path}: cannot be written: {wrong.strerror or wrong}") from wrong
