"""Events as somebody may see them who does not see everything."""

from __future__ import annotations

from collections.abc import Sequence

from api.answers.record import event_view
from api.identity.principal import Principal
from api.identity.sight import Sight
from api.streams.event_stream import frame
from api.streams.event_tail import Told
from scheduler.store.protocol import Store


def told_to(principal: Principal, store: Store, found: Sequence[Told]) -> list[Told]:
    """Those of the events that `principal` may see, without names that it may not. Reads the store."""
    sight = Sight(principal, store.load().snapshot, store.ended_job)
    return [
        Told(each.stored, frame(sight.redacted(event_view(each.stored)), number=each.number))
        for each in found
        if sight.subject(each.stored.event.subject)
    ]
