"""Service commands: `serve`, its child processes, `operator`, `migrate` and `export-trace`."""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.exit_codes import CommandError, InputError
from cli.inputs import input_errors_from
from cli.output import OutputFormat, OutputOption, format_count, print_document, print_message, render_facts
from cli.service_settings import check_auth, check_other_users, database_errors, read_settings

if TYPE_CHECKING:
    from cli.composition.service import BuildController
    from scheduler.settings import Settings


_UMASK = 0o077
"""Database, logs and archives are for the user of the service alone."""
HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on. Overrides EBBTIDE_HOST.")]
PortOption = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="Port to listen on. Overrides EBBTIDE_PORT.")
]
DatabaseOption = Annotated[
    str | None, typer.Option("--database-url", help="SQLAlchemy URL of the database. Overrides EBBTIDE_DATABASE_URL.")
]

WithoutAgentOption = Annotated[
    bool, typer.Option("--no-agent", help="Run no jobs on this machine: do not start its node agent.")
]
NoAuthOption = Annotated[
    bool, typer.Option("--no-auth", help="Give every user of this machine full access, as EBBTIDE_AUTH=off does.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Turn authentication off although other users can log in to this machine.")
]
RestoredOption = Annotated[
    bool, typer.Option("--restored", help="The database was restored from a backup: fence controllers that led later.")
]


def serve(
    host: HostOption = None,
    port: PortOption = None,
    database_url: DatabaseOption = None,
    has_no_agent: WithoutAgentOption = False,
    *,
    has_no_auth: NoAuthOption = False,
    is_forced: ForceOption = False,
) -> None:
    """Run the API, the controller and a node agent on this machine.

    Your commands on this machine need no login. For the console, the service prints a URL that signs a browser in.

    API, controller and agent are separate processes, and each is started again if it ends. The agent hosts the nodes
    that are declared with `ebbtide nodes add`. Ctrl-C lets jobs save and exit. After SIGTERM they go on until the
    service runs again, at most for EBBTIDE_DISCONNECT_S.
    """
    overrides = {
        "EBBTIDE_HOST": host,
        "EBBTIDE_PORT": port,
        "EBBTIDE_DATABASE_URL": database_url,
        "EBBTIDE_AUTH": "off" if has_no_auth else None,
    }
    os.environ.update({name: str(value) for name, value in overrides.items() if value is not None})
    run_service(is_forced=is_forced, has_agent=not has_no_agent)


def run_service(*, process_group: Sequence[str] = (), is_forced: bool = False, has_agent: bool = True) -> None:
    """Run the processes of the service until Ctrl-C or SIGTERM.

    Args:
        process_group: the command whose subcommands `controller` and `api` are the processes; empty: `ebbtide` itself.

    Raises:
        CommandError: a process failed.
        InputError: a setting is not accepted.
    """
    from cli.supervisor import supervise

    os.umask(_UMASK)
    settings = read_settings()
    check_auth(settings)
    if not is_forced:
        check_other_users(settings)
    # Choose a free port here, not in the API process: the controller passes the same port to its workers.
    os.environ["EBBTIDE_PORT"] = str(_choose_port(settings))
    settings = read_settings()
    _check_api_processes(settings)
    _check_policy(settings)
    _announce_profiles(settings)
    _check_tracing()
    _warn_of_unknown_variables()
    _migrate_database(settings)
    print_message(
        f"Ebbtide serves {settings.worker_url} on {redact_database_url(settings.database_url)}; Ctrl-C stops it."
    )
    entry = _announce(settings)
    # With -P a `scheduler.py` or `api` in the working directory does not hide Ebbtide's packages.
    child = [sys.executable, "-P", "-m", "cli"]
    with tempfile.TemporaryDirectory(prefix="ebbtide-metrics-") as metrics:
        # All processes write their metrics to this folder, so that one scrape returns the sums.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics
        names = ["API"] if settings.api_processes == 1 else [f"API {at + 1}" for at in range(settings.api_processes)]
        apis = {name: [*child, *process_group, "api", *(["--force"] if is_forced else [])] for name in names}
        commands = {"controller": [*child, *process_group, "controller"], **apis}
        if has_agent:
            commands["agent"] = _prepare_agent(settings, child)
        exit_code, reason = supervise(commands)
    if entry is not None:
        entry.unlink(missing_ok=True)
    if exit_code:
        raise CommandError(reason)
    print_message(f"Ebbtide {reason}.")


def migrate(
    database_url: DatabaseOption = None, is_restored: RestoredOption = False, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Upgrade the database schema. Does nothing if the schema is current."""
    os.umask(_UMASK)
    if database_url is not None:
        os.environ["EBBTIDE_DATABASE_URL"] = database_url
    settings = read_settings()
    _migrate_database(settings, is_restored=is_restored)
    document = {"database_url": redact_database_url(settings.database_url), "revision": "head"}
    print_document(document, output, lambda: render_facts({"database": document["database_url"], "schema": "current"}))


def controller() -> None:
    """Run the controller. `ebbtide serve` starts it."""
    from cli.composition.service import build_controller

    run_controller_process(build_controller)


def run_controller_process(build: BuildController) -> None:
    """Run the controller that `build` returns as a child of `run_service`."""
    from cli.composition.service import run_controller
    from cli.supervisor import exit_with_parent

    os.umask(_UMASK)
    settings = read_settings()
    _check_profiles(settings)
    exit_with_parent()
    _start_tracing("ebbtide-controller")
    run_controller(settings, build)


def api(*, is_forced: ForceOption = False) -> None:
    """Run the API server. `ebbtide serve` starts it."""
    from cli.composition.service import run_api

    run_api_process(run_api, is_forced=is_forced)


def run_api_process(run: Callable[[Settings], None], *, is_forced: bool = False) -> None:
    """Run the API with `run` as a child of `run_service`."""
    from cli.supervisor import exit_with_parent
    from scheduler.store.sqlite_lock import hold_api_lock

    os.umask(_UMASK)
    settings = read_settings()
    check_auth(settings)
    if not is_forced:
        check_other_users(settings)
    _check_api_processes(settings)
    _check_profiles(settings)
    with ExitStack() as held:
        with database_errors():
            held.enter_context(hold_api_lock(settings.database_url))
        exit_with_parent()
        _start_tracing("ebbtide-api")
        run(settings)


def operator() -> None:
    """Run the Kubernetes operator. It reconciles Ebbtide's custom resources and shares the API's database."""
    from cli.composition.kubernetes_operator import run_operator
    from scheduler.telemetry.probes import ProbeServer

    settings = read_settings()
    _check_policy(settings)
    _announce_profiles(settings)
    _start_tracing("ebbtide-operator")
    with input_errors_from("EBBTIDE_HOST, EBBTIDE_PROBE_PORT"):
        probes = ProbeServer(settings.host, settings.probe_port)
    with probes, input_errors_from("EBBTIDE_KUBECONFIG"):
        run_operator(settings, probes)


def _prepare_agent(settings: Settings, command: list[str]) -> list[str]:
    """Register this machine, and return the command line of its agent."""
    from cli.composition.service_machine import build_agent_command, register_service_machine

    with input_errors_from("EBBTIDE_RUN_DIR"):
        register_service_machine(settings)
    return build_agent_command(settings, command)


def _choose_port(settings: Settings) -> int:
    """Return the configured port, or a free one if it is 0.

    API processes share the port, which hides a conflict with another program, so this checks before they start.

    Raises:
        InputError: the address or the port cannot be bound.
    """
    import errno
    import socket

    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as probe:
            result: int = probe.getsockname()[1]
            return result
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise InputError(
                f"EBBTIDE_PORT: cannot listen on {host}, port {port}: {why}. Use 0 for a free port."
            ) from error
        raise InputError(f"EBBTIDE_HOST: cannot listen on {host!r}: {why}") from error


def _check_api_processes(settings: Settings) -> None:
    if settings.api_processes > 1 and settings.database_url.startswith("sqlite"):
        raise InputError(
            f"EBBTIDE_API_PROCESSES is {settings.api_processes}, but SQLite serves one API process. Set it to 1, or "
            "set EBBTIDE_DATABASE_URL to a PostgreSQL database."
        )


def _warn_of_unknown_variables() -> None:
    from cli.doctor.local_checks import find_unknown_variables

    for name in find_unknown_variables(os.environ):
        print_message(f"{name} is not a setting and has no effect. `ebbtide doctor` lists all such variables.")


def _announce(settings: Settings) -> Path | None:
    """Print how to sign in, and let commands of this user find the service.

    The secrets are printed on a terminal only, because other output may end in a log. Return the file that names the
    service to commands of this user; None if there is none.
    """
    if settings.auth != "on":
        callers = "every user of this machine" if settings.is_loopback else f"every client that reaches {settings.host}"
        print_message(f"Authentication is off: {callers} has full access.")
        return None
    from cli.commands.console import format_login_url
    from cli.composition.local_token import prepare_local_login
    from cli.local_service import announce_service
    from scheduler.network_addresses import to_local_authority

    is_terminal = sys.stderr.isatty()
    with input_errors_from("EBBTIDE_RUN_DIR"):
        login = prepare_local_login(settings, with_code=is_terminal)
    if is_terminal:
        print_message(
            "Open the console with this URL. It works once, within 15 minutes; `ebbtide console` prints another:"
        )
        print_message(f"    {format_login_url(settings.browser_url, login.login_code)}")
        print_message(f"Your token, which your `ebbtide` commands find in {login.token_file}:\n    {login.token}")
    else:
        print_message(f"Your token is in {login.token_file}. `ebbtide console` prints a URL that signs a browser in.")
    try:
        return announce_service(f"http://{to_local_authority(settings.host, settings.port)}", login.token_file)
    except OSError as error:
        why = error.strerror or error
        print_message(f"Your commands need `ebbtide login`: {error.filename} cannot be written ({why}).")
        return None


def _check_policy(settings: Settings) -> None:
    from scheduler.scheduling.policy_sets import load_policy_set

    with input_errors_from("EBBTIDE_POLICY"):
        load_policy_set(settings.policy)


def _announce_profiles(settings: Settings) -> None:
    for sentence in _check_profiles(settings):
        print_message(sentence)


def _check_profiles(settings: Settings) -> list[str]:
    """Check every profile in the folder of the settings, and return a sentence about it."""
    from scheduler.solver.profiles.catalog import read_profiles_folder

    found = []
    with input_errors_from(""):
        if settings.profiles_dir is not None:
            read = read_profiles_folder(settings.profiles_dir)
            replaced = f"; they replace the shipped {', '.join(read.replaced)}" if read.replaced else ""
            found.append(f"{len(read.gpus) + len(read.models)} profiles from {settings.profiles_dir}{replaced}.")
    return found


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

    with database_errors():
        if is_restored:
            adopt_restored_database(settings.database_url, now_s=time.time())
        else:
            to_newest(settings.database_url)


def redact_database_url(database_url: str) -> str:
    """Return the URL without passwords, in its user part and in its query."""
    from sqlalchemy import make_url

    return make_url(database_url).difference_update_query(("password", "sslpassword")).render_as_string()


JobsFileOption = Annotated[Path, typer.Option("--jobs", metavar="JOBS.csv[.gz]", help="CSV file to write the jobs to.")]
DemandFileOption = Annotated[
    Path, typer.Option("--demand", metavar="DEMAND.csv[.gz]", help="CSV file to write the demand to.")
]
_JOBS_MAX = 10**12


def export_trace(
    jobs: JobsFileOption = Path("jobs.csv"),
    demand: DemandFileOption = Path("demand.csv"),
    database_url: DatabaseOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Export job history and demand as a trace. `ebbtide simulate` reads the files."""
    from scheduler.documents.trace_files import export_trace as trace_of
    from scheduler.documents.trace_files import format_demand_csv, format_jobs_csv
    from scheduler.store.sql_store import SqlStore

    with database_errors("--database-url"):
        store = SqlStore(database_url or read_settings().database_url)
    try:
        snapshot = store.load().snapshot
        known = {job.id: job for job in (*store.list_ended_jobs(limit=_JOBS_MAX), *snapshot.jobs.values())}
        readings = {pool: store.list_readings(pool, since_s=0.0) for pool in snapshot.pools}
    finally:
        store.close()
    trace = trace_of(known.values(), readings, snapshot.now_s)
    if not trace.jobs:
        raise CommandError("jobs: nothing to export. No job has a known duration yet.")
    _write_trace(jobs, format_jobs_csv(trace.jobs))
    document = {"jobs": len(trace.jobs), "demand": len(trace.demand), "skipped": list(trace.skipped)}
    facts = {"jobs": f"{format_count(len(trace.jobs), 'job')} in {jobs}"}
    if trace.demand:
        _write_trace(demand, format_demand_csv(trace.demand))
        facts["demand"] = f"{format_count(len(trace.demand), 'reading')} in {demand}"
    if trace.skipped:
        facts["skipped"] = f"{', '.join(trace.skipped)} (duration unknown)"
    print_document(document, output, lambda: render_facts(facts))


def _write_trace(path: Path, text: str) -> None:
    content = text.encode()
    try:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror or error}") from error
