"""Machines in the database: joined machines, join tokens and estimated GPU profiles.

Credentials and tokens are stored as digests only. Bodies of machines are large and rarely change, so that a list reads
only the bodies that this process has not decoded yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    Engine,
    Named,
    Select,
    String,
    Table,
    TypedColumns,
    bindparam,
    delete,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from scheduler.domain.codec import decode_stored, encode
from scheduler.domain.machine import EstimatedGpu, JoinToken, Machine
from scheduler.store.api_protocol import AuditEntry, JoinTokenSpentError, MachineNameTakenError
from scheduler.store.database import (
    METADATA,
    AnyRow,
    build_insert,
    fetch_rows,
    make_autocommit_engine,
    transaction,
)
from scheduler.store.sql_api_tables import insert_audit_entries


class MachineColumns(TypedColumns):
    """`revision` counts the changes of `body`, which does not hold the values of the other columns."""

    name: Named[str] = Column(String, primary_key=True)
    digest: Named[str] = Column(String, unique=True, index=True)
    body: Named[Any] = Column(JSON, nullable=False)
    revision: Named[int] = Column(BigInteger)
    joined_at_s: Named[float] = Column(Double)
    seen_at_s: Named[float | None] = Column(Double)
    revoked_at_s: Named[float | None] = Column(Double)


class JoinTokenColumns(TypedColumns):
    id: Named[str] = Column(String, primary_key=True)
    digest: Named[str] = Column(String, unique=True, index=True)
    pool: Named[str] = Column(String)
    uses_left: Named[int] = Column(BigInteger)
    created_at_s: Named[float] = Column(Double)
    created_by: Named[str] = Column(String)
    expires_at_s: Named[float] = Column(Double)


class EstimatedGpuColumns(TypedColumns):
    name: Named[str] = Column(String, primary_key=True)
    profile_json: Named[str] = Column(String)
    machine: Named[str] = Column(String)
    created_at_s: Named[float] = Column(Double)


MACHINES = Table("machines", METADATA, MachineColumns)
JOIN_TOKENS = Table("join_tokens", METADATA, JoinTokenColumns)
ESTIMATED_GPUS = Table("estimated_gpus", METADATA, EstimatedGpuColumns)
_TOKEN_FIELDS = tuple(JoinToken.__dataclass_fields__)
_ESTIMATE_FIELDS = tuple(EstimatedGpu.__dataclass_fields__)
_SELECT_STATES = select(*(column for column in MACHINES.c if column.name != "body")).order_by(MACHINES.c.name)
_BODIES_READ_MAX = 500
"""Bodies read by one statement. Databases limit the number of parameters."""
_BODIES_CACHED_MAX = 10_000


class SqlMachines:
    """MachineStore in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)
        self._body_cache: dict[tuple[str, float, int], Machine] = {}

    def add_token(self, token: JoinToken, audit: AuditEntry) -> None:
        with transaction(self._engine) as connection:
            connection.execute(insert(JOIN_TOKENS), {name: getattr(token, name) for name in _TOKEN_FIELDS})
            insert_audit_entries(connection, [audit])

    def find_token(self, digest: str) -> JoinToken | None:
        return next(iter(self._fetch_tokens(select(JOIN_TOKENS).where(JOIN_TOKENS.c.digest == digest))), None)

    def get_token(self, token_id: str) -> JoinToken | None:
        return next(iter(self._fetch_tokens(select(JOIN_TOKENS).where(JOIN_TOKENS.c.id == token_id))), None)

    def list_tokens(self, *, after: str, limit: int) -> tuple[JoinToken, ...]:
        query = select(JOIN_TOKENS).where(JOIN_TOKENS.c.id > after).order_by(JOIN_TOKENS.c.id).limit(limit)
        return self._fetch_tokens(query)

    def delete_token(self, token_id: str, audit: AuditEntry) -> None:
        with transaction(self._engine) as connection:
            if connection.execute(delete(JOIN_TOKENS).where(JOIN_TOKENS.c.id == token_id)).rowcount:
                insert_audit_entries(connection, [audit])

    def join(self, machine: Machine, token_id: str, audit: AuditEntry, *, now_s: float) -> None:
        row, tokens = _encode_machine(machine) | {"revision": 0}, JOIN_TOKENS
        usable = (tokens.c.id == token_id) & (tokens.c.uses_left > 0) & (tokens.c.expires_at_s > now_s)
        try:
            with transaction(self._engine) as connection:
                used = connection.execute(update(tokens).where(usable).values(uses_left=tokens.c.uses_left - 1))
                if not used.rowcount:
                    raise JoinTokenSpentError(token_id)
                revoked = (MACHINES.c.name == machine.name) & MACHINES.c.revoked_at_s.is_not(None)
                connection.execute(delete(MACHINES).where(revoked))
                connection.execute(insert(MACHINES), row)
                insert_audit_entries(connection, [audit])
        except IntegrityError:  # of the name: digests are random
            raise MachineNameTakenError(machine.name) from None

    def register_service(self, machine: Machine) -> None:
        with transaction(self._engine) as connection:
            row = connection.execute(select(MACHINES).where(MACHINES.c.name == machine.name)).one_or_none()
            if row is not None and row.revoked_at_s is None and not decode_stored(Machine, row.body).is_service:
                raise MachineNameTakenError(machine.name)
            connection.execute(delete(MACHINES).where(MACHINES.c.name == machine.name))
            connection.execute(insert(MACHINES), _encode_machine(machine) | {"revision": 0})

    def get_machine(self, name: str) -> Machine | None:
        return next(iter(self._fetch_machines(_SELECT_STATES.where(MACHINES.c.name == name))), None)

    def find_machine(self, digest: str) -> Machine | None:
        return next(iter(self._fetch_machines(_SELECT_STATES.where(MACHINES.c.digest == digest))), None)

    def list_machines(self) -> tuple[Machine, ...]:
        return self._fetch_machines(_SELECT_STATES)

    def update_machine(self, machine: Machine, audit: AuditEntry | None = None) -> None:
        same = (MACHINES.c.name == machine.name) & (MACHINES.c.digest == machine.digest)
        values = {"body": _encode_machine(machine)["body"], "revision": MACHINES.c.revision + 1}
        with transaction(self._engine) as connection:
            is_found = connection.execute(update(MACHINES).where(same).values(values)).rowcount
            insert_audit_entries(connection, [audit] if audit and is_found else [])

    def revoke_machine(self, name: str, now_s: float, audit: AuditEntry) -> Machine | None:
        live = (MACHINES.c.name == name) & MACHINES.c.revoked_at_s.is_(None)
        with transaction(self._engine) as connection:
            if connection.execute(update(MACHINES).where(live).values(revoked_at_s=now_s)).rowcount:
                insert_audit_entries(connection, [audit])
        return self.get_machine(name)

    def record_seen(self, seen_at_s: Mapping[str, float]) -> None:
        if not seen_at_s:
            return
        known: Any = MACHINES.c.seen_at_s
        at_s: Any = bindparam("at_s", type_=Double())
        older = (MACHINES.c.name == bindparam("machine")) & or_(known.is_(None), known < at_s)
        # Sorted, so that two processes lock the rows in the same order.
        rows = [{"machine": name, "at_s": seconds} for name, seconds in sorted(seen_at_s.items())]
        with transaction(self._engine) as connection:
            connection.execute(update(MACHINES).where(older).values(seen_at_s=at_s), rows)

    def add_estimated_gpu(self, estimate: EstimatedGpu) -> None:
        values = {name: getattr(estimate, name) for name in _ESTIMATE_FIELDS}
        with transaction(self._engine) as connection:
            connection.execute(build_insert(connection, ESTIMATED_GPUS).values(values).on_conflict_do_nothing())

    def list_estimated_gpus(self) -> tuple[EstimatedGpu, ...]:
        rows = fetch_rows(self._read_engine, select(ESTIMATED_GPUS).order_by(ESTIMATED_GPUS.c.name))
        return tuple(EstimatedGpu(*(getattr(row, name) for name in _ESTIMATE_FIELDS)) for row in rows)

    def _fetch_tokens(self, query: Select[*tuple[Any, ...]]) -> tuple[JoinToken, ...]:
        rows = fetch_rows(self._read_engine, query)
        return tuple(JoinToken(**{name: getattr(row, name) for name in _TOKEN_FIELDS}) for row in rows)

    def _fetch_machines(self, query: Select[*tuple[Any, ...]]) -> tuple[Machine, ...]:
        rows, cache = fetch_rows(self._read_engine, query), self._body_cache
        missing = [row.name for row in rows if _body_key(row) not in cache]
        if missing:
            read = self._fetch_bodies(missing)
            rows = [read.get(row.name, row) for row in rows]  # the later read, which state and body have in common
            cache = cache | {_body_key(row): decode_stored(Machine, row.body) for row in read.values()}
            self._body_cache = cache if len(cache) < _BODIES_CACHED_MAX else {}
        found = ((row, cache.get(_body_key(row))) for row in rows)
        # A machine that was deleted between the two reads has no body.
        return tuple(
            replace(body, digest=row.digest, seen_at_s=row.seen_at_s, revoked_at_s=row.revoked_at_s)
            for row, body in found
            if body is not None
        )

    def _fetch_bodies(self, names: list[str]) -> dict[str, AnyRow]:
        found = dict[str, AnyRow]()
        for start in range(0, len(names), _BODIES_READ_MAX):
            part = names[start : start + _BODIES_READ_MAX]
            rows = fetch_rows(self._read_engine, select(MACHINES).where(MACHINES.c.name.in_(part)))
            found |= {row.name: row for row in rows}
        return found


def _encode_machine(machine: Machine) -> dict[str, Any]:
    """Return the row without its revision. The body holds nothing that has a column and can change."""
    body = encode(replace(machine, digest="", seen_at_s=None, revoked_at_s=None))
    columns = {"name": machine.name, "digest": machine.digest, "joined_at_s": machine.joined_at_s}
    return {**columns, "body": body, "seen_at_s": machine.seen_at_s, "revoked_at_s": machine.revoked_at_s}


def _body_key(row: AnyRow) -> tuple[str, float, int]:
    return row.name, row.joined_at_s, row.revision
