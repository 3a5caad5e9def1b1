"""Checks of the database and of clocks: its file, its version, and whether its times have passed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import psutil
from sqlalchemy import make_url, text
from sqlalchemy.exc import ArgumentError

from cli.doctor.local_checks import Check, check_private_file, failed, passed, warned
from cli.master_keys import RESTORE_KEYS, count_secrets_by_key, describe_unusable_secrets
from cli.output import format_count
from scheduler.settings import Settings
from scheduler.store.clock_reset import CLOCK_LEAD_S_MAX, find_clock_lead
from scheduler.store.database import StoreError, open_engine, transaction
from scheduler.store.protocol import UnavailableError
from scheduler.store.schema_migration import find_newest_revision, read_revision, require_current_revision

CLOCK_DIFFERENCE_S_MAX = 5.0
"""Leases and contacts of several machines are compared, so their clocks must agree about this well."""
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "fuse.sshfs", "fuse.s3fs", "9p"})
"""File systems on which SQLite's locks and shared memory do not work between machines."""


def check_database(settings: Settings) -> Iterator[Check]:
    """Check that the database can be opened and has the version of this program, and the safety of its file."""
    try:
        url = make_url(settings.database_url)
    except ArgumentError as error:
        yield failed("database", f"EBBTIDE_DATABASE_URL: {error}", "correct EBBTIDE_DATABASE_URL")
        return
    if url.get_backend_name() == "sqlite" and url.database:
        yield from check_sqlite_file(Path(url.database), api_processes=settings.api_processes)
        if not Path(url.database).exists():
            return
    try:
        engine = open_engine(settings.database_url)
        try:
            revision, newest = read_revision(engine), find_newest_revision()
            require_current_revision(engine)
        finally:
            engine.dispose()
    except (StoreError, UnavailableError) as error:
        yield failed("database", str(error), "run `ebbtide migrate` if the schema is older, else make it reachable")
        return
    if revision > newest:
        message = f"revision {revision} is newer than this program ({newest}), which can still use it"
        yield warned("database", message, "finish the upgrade of all processes")
    else:
        yield passed("database", f"revision {revision}, as this program needs")


def check_master_keys(settings: Settings) -> Iterator[Check]:
    """Check that the file of master keys can decrypt all stored secrets."""
    try:
        used = count_secrets_by_key(settings)
    except (StoreError, UnavailableError):
        return  # the check of the database has the reason
    if unusable := describe_unusable_secrets(settings.secrets_key_path, used):
        yield failed("secrets", unusable, RESTORE_KEYS)
    else:
        yield passed("secrets", f"the master keys of {format_count(sum(used.values()), 'secret')} are there")


def check_sqlite_file(path: Path, *, api_processes: int) -> Iterator[Check]:
    if api_processes > 1:
        message = f"EBBTIDE_API_PROCESSES is {api_processes}, but SQLite serves one API process"
        yield failed("database file", message, "set it to 1, or EBBTIDE_DATABASE_URL to a PostgreSQL database")
    if not path.exists():
        yield warned("database file", f"{path} does not exist", "run `ebbtide migrate`, or start `ebbtide serve`")
        return
    kind = find_file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        message = f"{path} is on a network file system ({kind}), where SQLite loses data"
        yield failed("database file", message, "move it to a local disk, or use PostgreSQL")
    for each in (path, path.with_name(f"{path.name}-wal")):
        if each.exists():
            yield check_private_file("database file", each)


def find_file_system(path: Path) -> str:
    """Return the type of the file system that holds a path, empty if it is unknown."""
    mounts = [
        (Path(each.mountpoint), each.fstype)
        for each in psutil.disk_partitions(all=True)
        if path.resolve().is_relative_to(each.mountpoint)
    ]
    return max(mounts, key=lambda mount: len(mount[0].parts), default=(Path(), ""))[1]


def check_clock(settings: Settings) -> Iterator[Check]:
    """Compare this machine's clock with the latest times in the database, and with other machines' clocks."""
    now_s = time.time()
    try:
        lead_s = find_clock_lead(settings.database_url, now_s=now_s)
        server_s = _read_server_clock(settings.database_url)
    except (StoreError, UnavailableError):
        return  # the check of the database has the reason
    if lead_s > CLOCK_LEAD_S_MAX:
        message = f"the database has times {lead_s:,.0f} s in the future: a clock was wrong, or this machine's is"
        remedy = "check this machine's clock; if it is right, stop the service and run `ebbtide reset-clock`"
        yield failed("clock", message, remedy)
    else:
        yield passed("clock", "no recorded time is in the future")
    for name, other_s in (("database server", server_s), ("API", _read_api_clock(settings))):
        if other_s is None:
            continue
        difference_s = abs(time.time() - other_s)
        if difference_s > CLOCK_DIFFERENCE_S_MAX:
            message = f"this machine's clock and that of the {name} differ by {difference_s:.0f} s"
            yield failed("clock", message, "synchronise both with NTP")
        else:
            yield passed("clock", f"agrees with the {name}")


def _read_server_clock(url: str) -> float | None:
    """Return the clock of a PostgreSQL server; None for SQLite, which has none."""
    engine = open_engine(url)
    try:
        if engine.dialect.name == "sqlite":
            return None
        with transaction(engine) as connection:
            return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    finally:
        engine.dispose()


def _read_api_clock(settings: Settings) -> float | None:
    """Return the time at which a running API answered, None without one. The header has a resolution of 1 s."""
    import httpx

    try:
        header = httpx.get(f"{settings.worker_url}/healthz", timeout=2.0, trust_env=False).headers.get("date")
        return None if header is None else parsedate_to_datetime(header).timestamp()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
