"""The lease in the database. Each change is one guarded UPDATE, so two processes never both get it."""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from scheduler.store.protocol import FencedError, Lease
from scheduler.store.tables import LEASE


def acquire_lease(connection: Connection, holder: str, *, now_s: float, expires_at_s: float) -> Lease | None:
    """Renew the lease of `holder`, or take it if it is free or has expired; None otherwise."""
    renewed = connection.execute(update(LEASE).where(LEASE.c.holder == holder).values(expires_at_s=expires_at_s))
    if renewed.rowcount == 0:
        free = (LEASE.c.holder == "") | (LEASE.c.expires_at_s <= now_s)
        taken = {"holder": holder, "epoch": LEASE.c.epoch + 1, "expires_at_s": expires_at_s}
        if connection.execute(update(LEASE).where(free).values(taken)).rowcount == 0:
            return None
    epoch = connection.execute(select(LEASE.c.epoch)).scalar_one()
    return Lease(holder, epoch, expires_at_s)


def read_lease(connection: Connection) -> Lease | None:
    held = connection.execute(select(LEASE.c.holder, LEASE.c.epoch, LEASE.c.expires_at_s)).one()
    return Lease(held.holder, held.epoch, held.expires_at_s) if held.holder else None


def release_lease(connection: Connection, holder: str) -> None:
    """Leave the lease without a holder, which is a change of holder too: the old epoch commits nothing more."""
    connection.execute(update(LEASE).where(LEASE.c.holder == holder).values(holder="", epoch=LEASE.c.epoch + 1))


def fence(connection: Connection, epoch: int) -> None:
    """Keep the lease as it is until the transaction ends.

    Raises:
        FencedError: it has another epoch.
    """
    if connection.execute(update(LEASE).where(LEASE.c.epoch == epoch).values(epoch=epoch)).rowcount == 0:
        raise FencedError(f"epoch {epoch} no longer leads; nothing was written")
