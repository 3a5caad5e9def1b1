"""Tables of console sessions and login codes. Digests in them do not authenticate a reader of the database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Column, Double, Engine, Named, String, Table, TypedColumns, delete, insert, select

from scheduler.store.api_protocol import AuditEntry
from scheduler.store.database import METADATA, AnyRow, fetch_rows, make_autocommit_engine, transaction
from scheduler.store.sessions import ConsoleSession, LoginCode, SignedInUser
from scheduler.store.sql_api_tables import insert_audit_entries


class LoginCodeColumns(TypedColumns):
    digest: Named[str] = Column(String, primary_key=True)
    token_id: Named[str] = Column(String)
    principal: Named[Any] = Column(JSON, nullable=False)
    user_expires_at_s: Named[float | None] = Column(Double)
    browser: Named[str] = Column(String)
    expires_at_s: Named[float] = Column(Double, index=True)


class ConsoleSessionColumns(TypedColumns):
    id: Named[str] = Column(String, primary_key=True)
    digest: Named[str] = Column(String, unique=True, index=True)
    token_id: Named[str] = Column(String)
    principal: Named[Any] = Column(JSON, nullable=False)
    user_expires_at_s: Named[float | None] = Column(Double)
    created_at_s: Named[float] = Column(Double)
    expires_at_s: Named[float] = Column(Double, index=True)


LOGIN_CODES = Table("login_codes", METADATA, LoginCodeColumns)
CONSOLE_SESSIONS = Table("console_sessions", METADATA, ConsoleSessionColumns)


class SqlSessionStore:
    """SessionStore in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def add_code(self, code: LoginCode, *, now_s: float, audit: AuditEntry | None = None) -> None:
        row = {"digest": code.digest, "browser": code.browser, "expires_at_s": code.expires_at_s}
        with transaction(self._engine) as connection:
            connection.execute(delete(LOGIN_CODES).where(LOGIN_CODES.c.expires_at_s <= now_s))
            connection.execute(insert(LOGIN_CODES), row | _encode_user(code.user))
            insert_audit_entries(connection, [] if audit is None else [audit])

    def take_code(self, digest: str, *, browser: str, now_s: float) -> LoginCode | None:
        codes = LOGIN_CODES.c
        wanted = (codes.digest == digest) & codes.browser.in_(("", browser)) & (codes.expires_at_s > now_s)
        with transaction(self._engine) as connection:
            row = connection.execute(delete(LOGIN_CODES).where(wanted).returning(*codes)).one_or_none()
        return None if row is None else LoginCode(row.digest, _decode_user(row), row.browser, row.expires_at_s)

    def add(self, session: ConsoleSession, audit: AuditEntry) -> None:
        row = {name: getattr(session, name) for name in ("id", "digest", "created_at_s", "expires_at_s")}
        with transaction(self._engine) as connection:
            connection.execute(delete(CONSOLE_SESSIONS).where(CONSOLE_SESSIONS.c.expires_at_s <= session.created_at_s))
            connection.execute(insert(CONSOLE_SESSIONS), row | _encode_user(session.user))
            insert_audit_entries(connection, [audit])

    def find(self, digest: str) -> ConsoleSession | None:
        rows = fetch_rows(self._read_engine, select(CONSOLE_SESSIONS).where(CONSOLE_SESSIONS.c.digest == digest))
        found = (
            ConsoleSession(row.id, row.digest, _decode_user(row), row.created_at_s, row.expires_at_s) for row in rows
        )
        return next(found, None)

    def delete(self, session_id: str, audit: AuditEntry) -> None:
        with transaction(self._engine) as connection:
            if connection.execute(delete(CONSOLE_SESSIONS).where(CONSOLE_SESSIONS.c.id == session_id)).rowcount:
                insert_audit_entries(connection, [audit])


def _encode_user(user: SignedInUser) -> dict[str, Any]:
    return {"token_id": user.token_id, "principal": dict(user.principal), "user_expires_at_s": user.expires_at_s}


def _decode_user(row: AnyRow) -> SignedInUser:
    return SignedInUser(row.token_id, row.principal, row.user_expires_at_s)
