"""Loans of inference nodes to training, and the switches that stop lending."""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import Path, Query
from pydantic import Field
from typing_extensions import TypedDict

from api.http.dependencies import ContextDep, LimitParameter, create_router
from api.http.errors import problem_responses, raise_not_found
from api.http.paging import (
    TEXT_PATTERN,
    CursorParameter,
    PageOf,
    PoolParameter,
    StatesParameter,
    page_of_loans,
    parse_states,
)
from api.identity.authorization import ADMIN, VIEWER, requires
from api.identity.principals import Principal
from api.recalls import RecallReceiptView, TimeParameter, receipt_view
from scheduler.documents.document import Document
from scheduler.domain.commands import VETO_REASON_LENGTH_MAX, PauseLending, RecallAll, ResumeLending, VetoLoan
from scheduler.domain.fleet import LIVE_LOAN_STATES, Loan, LoanState, Node
from scheduler.domain.recall_receipts import RecallReceipt
from scheduler.domain.snapshot import Snapshot
from scheduler.store.api_protocol import LoanQuery


class LoanView(TypedDict):
    """The use of one inference node for training, from proposal or offer to return."""

    id: Annotated[str, Field(description="Unique id of this loan. A node that is lent again gets another one.")]
    node: Annotated[str, Field(description="Name of the lent host.")]
    pool: Annotated[str, Field(description="Inference pool that owns the node.")]
    state: Annotated[
        LoanState,
        Field(
            description="`proposed`, `offered`, `active` or `recalled` while live; `returned`, `lost` or `vetoed` "
            "afterwards."
        ),
    ]
    offered_at_s: Annotated[
        float,
        Field(description="Time of the offer, or at which the notice of a proposal ends, in seconds since 1970 (UTC)."),
    ]
    state_since_s: Annotated[
        float, Field(description="Time of the last change of `state`, in seconds since 1970 (UTC).")
    ]
    return_by_s: Annotated[
        float | None,
        Field(description="Deadline for training to leave, in seconds since 1970 (UTC). Null: not recalled."),
    ]
    lent_at_s: Annotated[
        float | None,
        Field(description="When training could first use the node, in seconds since 1970 (UTC). Null: not yet."),
    ]
    recalled_at_s: Annotated[
        float | None,
        Field(
            description=(
                "Start of the current recall, in seconds since 1970 (UTC). Null: none, or unknown in older records."
            )
        ),
    ]
    gpus: Annotated[int, Field(description="Number of GPUs that it takes. 0: unknown in older records.")]
    node_gpus: Annotated[
        int | None, Field(description="Number of GPUs that the host has. Null: the node is no longer in the fleet.")
    ]
    indices: Annotated[
        list[int], Field(description="GPU indices of a loan of a part of the node. Empty: it takes the whole node.")
    ]
    is_live: Annotated[bool, Field(description="Whether the node is still proposed, offered, lent or being returned.")]
    proposed_at_s: Annotated[
        float | None,
        Field(description="Time of the proposal, in seconds since 1970 (UTC). Null: the pool gave no notice."),
    ]
    receipt: Annotated[
        RecallReceiptView | None, Field(description="Record of its newest recall. Null: it was not recalled.")
    ]


class SwitchesView(TypedDict):
    """Fleet-wide switches that an administrator sets."""

    lending_paused: Annotated[bool, Field(description="Whether no new loans are offered. Existing ones continue.")]
    loans_recalled: Annotated[bool, Field(description="Whether all existing loans are recalled as well.")]
    resizes_frozen: Annotated[bool, Field(description="Whether optional changes to the GPUs of running jobs are off.")]
    live_loans: Annotated[int, Field(description="Number of nodes that are offered, lent or being returned.")]
    lending_set_by: Annotated[
        str, Field(description="Who last paused, recalled or resumed lending, as a display name. Empty: unknown.")
    ]
    lending_set_at_s: Annotated[
        float | None, Field(description="When that was, in seconds since 1970 (UTC). Null: never, or unknown.")
    ]


def loan_view(loan: Loan, node: Node | None, receipt: RecallReceipt | None, principal: Principal) -> LoanView:
    """Return the loan as the principal may see it. `receipt` is that of its newest recall."""
    gpus = loan.gpus if node is None or loan.gpus else loan.count_gpus(node)
    return {
        "id": loan.id,
        "node": loan.node,
        "pool": loan.pool,
        "state": loan.state,
        "offered_at_s": loan.offered_at_s,
        "state_since_s": loan.state_since_s,
        "return_by_s": loan.return_by_s,
        "lent_at_s": loan.lent_at_s,
        "recalled_at_s": loan.recalled_at_s,
        "gpus": gpus,
        "node_gpus": None if node is None else node.gpus,
        "indices": list(loan.indices),
        "is_live": loan.is_live,
        "proposed_at_s": loan.proposed_at_s,
        "receipt": None if receipt is None else receipt_view(receipt, principal),
    }


def find_open_receipt(loan: Loan, snapshot: Snapshot) -> RecallReceipt | None:
    """Return the open receipt of the loan's recall, if there is one."""
    receipt = snapshot.recalls.get(loan.node)
    return receipt if receipt is not None and receipt.loan_id == loan.id else None


def switches_view(snapshot: Snapshot) -> SwitchesView:
    switches = snapshot.switches
    return {
        "lending_paused": switches.lending_paused,
        "loans_recalled": switches.loans_recalled,
        "resizes_frozen": switches.resizes_frozen,
        "live_loans": sum(loan.is_in_effect for loan in snapshot.loans.values()),
        "lending_set_by": snapshot.lending_set_by,
        "lending_set_at_s": snapshot.lending_set_at_s,
    }


router = create_router("lending")

_TIME = "In seconds since 1970 (UTC)."

LoanIdPath = Annotated[
    str, Path(description="Unique id of the loan, which the event `LoanProposed` has as its subject.")
]


@router.get("/loans")
@requires(VIEWER)
def list_loans(
    context: ContextDep,
    *,
    state: StatesParameter = "",
    pool: PoolParameter = "",
    node: Annotated[
        str, Query(max_length=300, pattern=TEXT_PATTERN, description="Only loans of this host. Empty: all.")
    ] = "",
    since_s: Annotated[TimeParameter, Query(description=f"Only loans that ended later, or are live. {_TIME}")] = None,
    until_s: Annotated[TimeParameter, Query(description=f"Only loans that were created before. {_TIME}")] = None,
    limit: LimitParameter = 100,
    cursor: CursorParameter = "",
) -> PageOf[LoanView]:
    """List loans, including ended ones, newest offer first."""
    states = parse_states(state, LoanState, live=LIVE_LOAN_STATES)
    start_s, end_s = -math.inf if since_s is None else since_s, math.inf if until_s is None else until_s
    query = LoanQuery(states, pool, node, start_s, end_s)
    page = page_of_loans(context.snapshot.loans.values(), context.store, query, cursor=cursor, limit=limit)
    complete = context.store.lending.find_loan_receipts([loan.id for loan in page["items"]])
    receipts = [find_open_receipt(loan, context.snapshot) or complete.get(loan.id) for loan in page["items"]]
    nodes, principal = context.snapshot.nodes, context.principal
    found = zip(page["items"], receipts, strict=True)
    views = [loan_view(loan, nodes.get(loan.node), receipt, principal) for loan, receipt in found]
    return {"items": views, "next": page["next"]}


class LoanVeto(Document):
    """Rejection of a proposed loan."""

    reason: Annotated[str, Field(min_length=1, max_length=VETO_REASON_LENGTH_MAX)] = Field(
        description="Why the node must not be lent now, for the event and the audit log."
    )


@router.post("/loans/{loan_id}:veto", status_code=202, responses=problem_responses(409))
@requires(ADMIN)
def veto_loan(loan_id: LoanIdPath, veto: LoanVeto, context: ContextDep) -> LoanView:
    """Reject a proposed loan. Its node is not proposed again for the pool's `veto_s`."""
    loan = next((loan for loan in context.snapshot.loans.values() if loan.id == loan_id), None)
    if loan is None:
        raise_not_found("loan", loan_id)
    after = context.send(VetoLoan(loan_id, veto.reason))
    loan, node = after.snapshot.loans[loan.node], after.snapshot.nodes[loan.node]
    return loan_view(loan, node, None, context.principal)


@router.post("/lending:pause", status_code=202)
@requires(ADMIN)
def pause_lending(context: ContextDep) -> SwitchesView:
    """Offer no new loans. Active loans continue."""
    return switches_view(context.send(PauseLending()).snapshot)


@router.post("/lending:resume", status_code=202)
@requires(ADMIN)
def resume_lending(context: ContextDep) -> SwitchesView:
    """Offer new loans again, and end a recall of all loans."""
    return switches_view(context.send(ResumeLending()).snapshot)


@router.post("/lending:recall-all", status_code=202)
@requires(ADMIN)
def recall_all_loans(context: ContextDep) -> SwitchesView:
    """Recall every lent node by its deadline, and lend nothing until lending is resumed."""
    return switches_view(context.send(RecallAll()).snapshot)
