"""Library for training scripts that run under Ebbtide, and clients of its API.

A plain PyTorch loop needs `ebbtide.elastic` only:

    with ebbtide.elastic(model, optimizer, scheduler, dataloader) as run:
        for batch in run:
            ...

A loop that saves and loads its state itself uses a session:

    import ebbtide


    def main():
        with ebbtide.Session.from_environment() as session:
            session.init_process_group()
            model, optimizer, step = build_or_load(session.plan, session.checkpoint_dir)
            session.mark_resumed(step)
            while step < session.steps_total:
                if notice := session.poll_notice():  # returns the same notice on all ranks
                    with session.saving(step):
                        save(model, optimizer, step)
                    if notice.requires_exit:
                        session.leave()
                        return
                loss = train_one_step(model, optimizer)
                step += 1
                session.report(step=step, loss=loss)
            with session.saving(step):
                save(model, optimizer, step)
            session.succeed()

Without any EBBTIDE_* variable the same script runs alone or under torchrun and never receives a notice. The session
imports the standard library alone, and torch where a method needs it, so a notice that arrives while torch is loading
is not missed.

A script that freezes layers from the front during training (PipeTransformer, ICML'21) calls
`session.set_frozen_layers(layers)` on all ranks. It starts with `session.frozen_layers` layers frozen, because the
plan relies on that number.

`Client` and `AsyncClient` call the API of the service. Every name is imported when it is first used, so neither a
script that only trains nor the import of this package loads them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbtide import client as client
    from ebbtide.client import AsyncClient, Client
    from ebbtide.elastic_run import elastic
    from ebbtide.notice import Notice, NoticeAction
    from ebbtide.rank_status import LoadTraffic
    from ebbtide.session import Session

__all__ = ["AsyncClient", "Client", "LoadTraffic", "Notice", "NoticeAction", "Session", "elastic"]

_HOMES = {
    "AsyncClient": "ebbtide.client",
    "Client": "ebbtide.client",
    "LoadTraffic": "ebbtide.rank_status",
    "Notice": "ebbtide.notice",
    "NoticeAction": "ebbtide.notice",
    "Session": "ebbtide.session",
    "elastic": "ebbtide.elastic_run",
}
"""Module of each public name."""


_SUBMODULES = ("checkpoints", "client", "integrations")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
