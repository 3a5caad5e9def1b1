"""API tokens and service accounts in the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Double,
    Engine,
    Named,
    Select,
    String,
    Table,
    TypedColumns,
    delete,
    insert,
    or_,
    select,
    update,
)

from scheduler.store.api_protocol import AccountNameTakenError, AuditEntry, IdempotencyKey
from scheduler.store.credentials import ApiToken, ServiceAccount
from scheduler.store.database import METADATA, AnyRow, build_insert, fetch_rows, make_autocommit_engine, transaction
from scheduler.store.sql_api_tables import insert_audit_entries, insert_idempotency_key


class TokenColumns(TypedColumns):
    """`owner_id` is empty unless the token is older than ids of owners."""

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
    owner_id: Named[str] = Column(String, server_default="")
    account_id: Named[str] = Column(String, server_default="", index=True)


class AccountColumns(TypedColumns):
    id: Named[str] = Column(String, primary_key=True)
    name: Named[str] = Column(String, unique=True, index=True)
    grants: Named[Any] = Column(JSON, nullable=False)
    created_at_s: Named[float] = Column(Double)
    created_by: Named[str] = Column(String)
    expires_at_s: Named[float | None] = Column(Double)
    disabled_at_s: Named[float | None] = Column(Double)


API_TOKENS = Table("api_tokens", METADATA, TokenColumns)
SERVICE_ACCOUNTS = Table("service_accounts", METADATA, AccountColumns)
_ACCOUNT_FIELDS = tuple(ServiceAccount.__dataclass_fields__)
_TOKEN_FIELDS = tuple(name for name in ApiToken.__dataclass_fields__ if name not in ("stored_owner_id", "account"))
_LIVE_TOKEN = API_TOKENS.c.revoked_at_s.is_(None)
_ACCOUNT = {name: SERVICE_ACCOUNTS.c[name].label(f"account_{name}") for name in _ACCOUNT_FIELDS if name != "id"}
_SELECT_TOKENS = select(API_TOKENS, SERVICE_ACCOUNTS.c.id.label("found_account_id"), *_ACCOUNT.values()).select_from(
    API_TOKENS.outerjoin(SERVICE_ACCOUNTS, SERVICE_ACCOUNTS.c.id == API_TOKENS.c.account_id)
)


class SqlTokenStore:
    """TokenStore in SQL. Only digests are stored: they do not authenticate a reader of the database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def add(self, token: ApiToken, audit: AuditEntry, key: IdempotencyKey | None = None) -> None:
        with transaction(self._engine) as connection:
            if key is not None:
                insert_idempotency_key(connection, key, token.id)
            connection.execute(insert(API_TOKENS), _encode_token_row(token))
            insert_audit_entries(connection, [audit])

    def find_by_digest(self, digest: str) -> ApiToken | None:
        return next(iter(self._fetch_tokens(_SELECT_TOKENS.where(API_TOKENS.c.digest == digest))), None)

    def find_by_id(self, token_id: str) -> ApiToken | None:
        return next(iter(self._fetch_tokens(_SELECT_TOKENS.where(API_TOKENS.c.id == token_id))), None)

    def list_tokens(self, *, after: str, limit: int) -> tuple[ApiToken, ...]:
        return self._fetch_tokens(_SELECT_TOKENS.where(API_TOKENS.c.id > after).order_by(API_TOKENS.c.id).limit(limit))

    def revoke(self, token_id: str, now_s: float, audit: AuditEntry) -> ApiToken | None:
        live = (API_TOKENS.c.id == token_id) & _LIVE_TOKEN
        with transaction(self._engine) as connection:
            if connection.execute(update(API_TOKENS).where(live).values(revoked_at_s=now_s)).rowcount:
                insert_audit_entries(connection, [audit])
        return self.find_by_id(token_id)

    def record_use(self, token_id: str, now_s: float) -> None:
        with transaction(self._engine) as connection:
            connection.execute(update(API_TOKENS).where(API_TOKENS.c.id == token_id).values(last_used_at_s=now_s))

    def _fetch_tokens(self, query: Select[*tuple[Any, ...]]) -> tuple[ApiToken, ...]:
        return tuple(map(_decode_token_row, fetch_rows(self._read_engine, query)))


def _encode_token_row(token: ApiToken) -> dict[str, Any]:
    row = {name: getattr(token, name) for name in _TOKEN_FIELDS}
    return row | {"grants": list(token.grants), "owner_id": token.stored_owner_id}


def _decode_token_row(row: AnyRow) -> ApiToken:
    values = {name: getattr(row, name) for name in _TOKEN_FIELDS}
    token = ApiToken(**{**values, "grants": tuple(row.grants), "stored_owner_id": row.owner_id})
    if row.found_account_id is None:
        return token
    account = {name: getattr(row, f"account_{name}") for name in _ACCOUNT}
    return replace(
        token, account=ServiceAccount(**{**account, "id": token.account_id, "grants": tuple(account["grants"])})
    )


class SqlAccountStore:
    """AccountStore in SQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read_engine = make_autocommit_engine(engine)

    def create(
        self, account: ServiceAccount, token: ApiToken, audit: AuditEntry, key: IdempotencyKey | None = None
    ) -> None:
        row = {name: getattr(account, name) for name in _ACCOUNT_FIELDS} | {"grants": list(account.grants)}
        with transaction(self._engine) as connection:
            if key is not None:
                insert_idempotency_key(connection, key, token.id)
            insert_if_new = build_insert(connection, SERVICE_ACCOUNTS).values(row).on_conflict_do_nothing()
            if connection.execute(insert_if_new.returning(SERVICE_ACCOUNTS.c.id)).one_or_none() is None:
                raise AccountNameTakenError(account.name)
            connection.execute(insert(API_TOKENS), _encode_token_row(token))
            insert_audit_entries(connection, [audit])

    def get_account(self, name: str) -> ServiceAccount | None:
        return self._fetch_account(select(SERVICE_ACCOUNTS).where(SERVICE_ACCOUNTS.c.name == name))

    def _get_account_by_id(self, account_id: str) -> ServiceAccount | None:
        return self._fetch_account(select(SERVICE_ACCOUNTS).where(SERVICE_ACCOUNTS.c.id == account_id))

    def list_accounts(self, *, after: str, limit: int) -> tuple[ServiceAccount, ...]:
        query = select(SERVICE_ACCOUNTS).where(SERVICE_ACCOUNTS.c.name > after).order_by(SERVICE_ACCOUNTS.c.name)
        return tuple(map(_decode_account_row, fetch_rows(self._read_engine, query.limit(limit))))

    def list_account_tokens(self, account_id: str) -> tuple[ApiToken, ...]:
        query = _SELECT_TOKENS.where(API_TOKENS.c.account_id == account_id)
        rows = fetch_rows(self._read_engine, query.order_by(API_TOKENS.c.created_at_s, API_TOKENS.c.id))
        return tuple(map(_decode_token_row, rows))

    def rotate(
        self, token: ApiToken, *, overlap_until_s: float, audit: AuditEntry, key: IdempotencyKey | None = None
    ) -> bool:
        mine = API_TOKENS.c.account_id == token.account_id
        later = or_(API_TOKENS.c.expires_at_s.is_(None), API_TOKENS.c.expires_at_s > overlap_until_s)
        with transaction(self._engine) as connection:
            if not _lock_account(connection, token.account_id):
                return False
            if key is not None:
                insert_idempotency_key(connection, key, token.id)
            connection.execute(update(API_TOKENS).where(mine, _LIVE_TOKEN, later).values(expires_at_s=overlap_until_s))
            connection.execute(insert(API_TOKENS), _encode_token_row(token))
            insert_audit_entries(connection, [audit])
        return True

    def update_account(self, account_id: str, changes: Mapping[str, Any], audit: AuditEntry) -> ServiceAccount | None:
        own = SERVICE_ACCOUNTS.c.id == account_id
        with transaction(self._engine) as connection:
            if connection.execute(update(SERVICE_ACCOUNTS).where(own).values(dict(changes))).rowcount:
                insert_audit_entries(connection, [audit])
        return self._get_account_by_id(account_id)

    def delete(self, account_id: str, now_s: float, audit: AuditEntry) -> bool:
        with transaction(self._engine) as connection:
            deleted = delete(SERVICE_ACCOUNTS).where(SERVICE_ACCOUNTS.c.id == account_id)
            if not connection.execute(deleted).rowcount:
                return False
            mine = API_TOKENS.c.account_id == account_id
            connection.execute(update(API_TOKENS).where(mine, _LIVE_TOKEN).values(revoked_at_s=now_s))
            insert_audit_entries(connection, [audit])
        return True

    def _fetch_account(self, query: Select[*tuple[Any, ...]]) -> ServiceAccount | None:
        return next(map(_decode_account_row, fetch_rows(self._read_engine, query)), None)


def _lock_account(connection: Connection, account_id: str) -> bool:
    """Write the account's row, so that rotations run one after another. Return whether the account exists."""
    own = SERVICE_ACCOUNTS.c.id == account_id
    return connection.execute(update(SERVICE_ACCOUNTS).where(own).values(id=account_id)).rowcount == 1


def _decode_account_row(row: AnyRow) -> ServiceAccount:
    values = {name: getattr(row, name) for name in _ACCOUNT_FIELDS}
    return ServiceAccount(**{**values, "grants": tuple(row.grants)})
