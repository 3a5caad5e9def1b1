"""SqlTokens: API tokens in the database of a SqlStore, as digests: who reads the database cannot ask with them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Column, Double, Engine, Named, Select, String, Table, TypedColumns, insert, select, update

from scheduler.store.engine import for_glancing, transaction
from scheduler.store.front import ApiToken, AuditEntry
from scheduler.store.history import AnyRow
from scheduler.store.sql_audit import log
from scheduler.store.tables import METADATA


class TokenColumns(TypedColumns):
    id: Named[str] = Column(String, primary_key=True)
    name: Named[str] = Column(String)
    prefix: Named[str] = Column(String)
    digest: Named[str] = Column(String, unique=True, index=True)
    grants: Named[Any] = Column(JSON, nullable=False)
    created_at_s: Named[float] = Column(Double)
    created_by: Named[str] = Column(String)
    expires_at_s: Named[float | None] = Column(Double)
    last_used_at_s: Named[float | None] = Column(Double)
    revoked_at_s: Named[float | None] = Column(Double)


API_TOKENS = Table("api_tokens", METADATA, TokenColumns)
_FIELDS = tuple(ApiToken.__dataclass_fields__)


class SqlTokens:
    """See Tokens. `engine` is a store's, whose database has been migrated."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = for_glancing(engine)

    def add(self, token: ApiToken, audit: AuditEntry) -> None:
        row = {name: getattr(token, name) for name in _FIELDS} | {"grants": list(token.grants)}
        with transaction(self._engine) as connection:
            connection.execute(insert(API_TOKENS), row)
            log(connection, [audit])

    def by_digest(self, digest: str) -> ApiToken | None:
        return next(iter(self._tokens(select(API_TOKENS).where(API_TOKENS.c.digest == digest))), None)

    def by_id(self, token_id: str) -> ApiToken | None:
        return next(iter(self._tokens(select(API_TOKENS).where(API_TOKENS.c.id == token_id))), None)

    def page(self, *, after: str, limit: int) -> tuple[ApiToken, ...]:
        return self._tokens(select(API_TOKENS).where(API_TOKENS.c.id > after).order_by(API_TOKENS.c.id).limit(limit))

    def revoke(self, token_id: str, now_s: float, audit: AuditEntry) -> ApiToken | None:
        live = (API_TOKENS.c.id == token_id) & API_TOKENS.c.revoked_at_s.is_(None)
        with transaction(self._engine) as connection:
            if connection.execute(update(API_TOKENS).where(live).values(revoked_at_s=now_s)).rowcount:
                log(connection, [audit])
        return self.by_id(token_id)

    def touch(self, token_id: str, now_s: float) -> None:
        with transaction(self._engine) as connection:
            connection.execute(update(API_TOKENS).where(API_TOKENS.c.id == token_id).values(last_used_at_s=now_s))

    def _tokens(self, query: Select[*tuple[Any, ...]]) -> tuple[ApiToken, ...]:
        with transaction(self._reading) as connection:
            return tuple(map(_token, connection.execute(query).all()))


def _token(row: AnyRow) -> ApiToken:
    values = {name: getattr(row, name) for name in _FIELDS}
    return ApiToken(**{**values, "grants": tuple(row.grants)})
