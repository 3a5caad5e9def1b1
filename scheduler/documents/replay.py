"""The document that asks for a replay: what this service recorded, with changes, as a simulation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scheduler.documents.document import Document
from scheduler.documents.simulation import Policies
from scheduler.documents.units import Duration

DAYS_MAX = 31.0
NODES_MAX = 10_000


class LendingChange(Document):
    """New lending limits of all inference pools. Omitted limits stay as each pool has them."""

    enabled: Annotated[bool, Field(strict=True)] | None = Field(
        default=None, description="Whether the pools lend nodes. Null: as now."
    )
    headroom: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = Field(
        default=None, description="Fraction of a pool's GPUs to keep free in addition to the forecast. Null: as now."
    )
    kept_nodes_min: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        default=None, description="Number of nodes of each pool that are never lent. Null: as now."
    )
    lent_nodes_max: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        default=None, description="Maximum number of nodes of each pool on loan at the same time. Null: as now."
    )
    return_deadline_s: Duration | None = Field(
        default=None, description="Seconds within which a recalled node is returned. Null: as now."
    )


class ReplayDocument(Document):
    """A simulation of the jobs and the demand that this service recorded up to now."""

    days: Annotated[float, Field(gt=0, le=DAYS_MAX)] = Field(
        default=7.0, description=f"Length of the replayed time in days, at most {DAYS_MAX:g}. It ends now."
    )
    policies: Policies = Field(
        default=["ebbtide"], description="Names of the policy sets to compare, at most 20, each once."
    )
    nodes: Annotated[
        dict[str, Annotated[int, Field(strict=True, ge=-NODES_MAX, le=NODES_MAX)]], Field(max_length=100)
    ] = Field(default={}, description="Nodes to add to pools, by the pool's name. A negative number removes nodes.")
    lending: LendingChange = Field(default=LendingChange(), description="New lending limits of all inference pools.")
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = Field(
        default=0, description="Start value of the random numbers. The same one gives the same report."
    )
