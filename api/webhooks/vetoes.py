"""Vetoes of proposed loans by the response of a webhook's receiver.

A receiver vetoes the loan of a `LoanProposed` message with status 200 and `{"veto": true, "reason": "..."}`. Any other
accepting response is consent, and so is no response at all.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from api.http.errors import ProblemError
from api.identity.principals import Grant, Principal, Role
from api.state import StateReader, load_request_context
from api.webhooks.sender import RESPONSE_BYTES_MAX, DeliveryOutcome
from scheduler.domain.commands import VETO_REASON_LENGTH_MAX, VetoLoan
from scheduler.domain.events import Delivery, EventCode, Webhook
from scheduler.store.api_protocol import ApiStore

ANSWER_FORM = '{"veto": true, "reason": "..."} or {"veto": false}'


def read_veto(delivery: Delivery, outcome: DeliveryOutcome) -> VetoLoan | str:
    """Return the veto in the response, an error, or an empty string for consent.

    A JSON object with a wrong `veto` or `reason`, or one that is cut off, is an error: the receiver meant to answer,
    and gets another attempt. Text that is no JSON object is consent, because many receivers respond "ok".
    """
    is_proposal = delivery.code == EventCode.LOAN_PROPOSED.value and outcome.status == HTTPStatus.OK
    text = outcome.response_start.decode("utf-8", "replace").strip()
    if not is_proposal or not text.startswith("{"):
        return ""
    if len(outcome.response_start) >= RESPONSE_BYTES_MAX:
        return f"the answer to a proposed loan has {RESPONSE_BYTES_MAX} bytes or more. Shorten it"
    try:
        answer = json.loads(text)
    except ValueError:
        return f"the answer to a proposed loan is not JSON; accepted: {ANSWER_FORM}"
    veto, reason = answer.get("veto", False), answer.get("reason", "")
    if not isinstance(veto, bool) or (veto and not (isinstance(reason, str) and reason.strip())):
        return f"the answer to a proposed loan has a wrong veto or reason; accepted: {ANSWER_FORM}"
    return VetoLoan(delivery.subject, reason[:VETO_REASON_LENGTH_MAX], delivery.webhook_id) if veto else ""


class VetoSender:
    """Sends the commands of vetoes in the name of the admin who created the webhook."""

    def __init__(self, store: ApiStore) -> None:
        self._store = store
        self._state_reader = StateReader(store)

    def send(self, webhook: Webhook, delivery: Delivery, veto: VetoLoan, *, now_s: float) -> str:
        """Send the veto once per delivery. Return why it has no effect, or an empty string.

        Raises:
            UnavailableError: the database does not respond; the delivery is attempted again.
        """
        if not webhook.may_veto:
            return "the veto was ignored: only admins may create and change a webhook that can veto"
        command_id = f"veto-{delivery.id}"
        if self._store.get_command(command_id) is not None:
            return ""  # the attempt that sent it was not recorded
        principal = Principal(webhook.owner, (Grant(Role.ADMIN),), subject=webhook.owner_id)
        context = load_request_context(self._state_reader, self._store, now_s, principal)
        try:
            context.send_once(veto, command_id)
        except ProblemError as problem:
            return f"the veto came too late: {problem.detail}"
        return ""
