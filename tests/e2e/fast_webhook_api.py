"""An API process with short webhook pauses and claims: `python -m tests.e2e.fast_webhook_api`.

It reads its settings from the environment and ends on SIGTERM.
"""

from __future__ import annotations

from functools import partial

from api.webhooks.deliverer import Backoff, DeliveryTimings
from cli.composition.service import build_webhook_deliverer, run_api
from scheduler.settings import Settings

CLAIM_S = 3.0
BACKOFF = Backoff(attempts=4, delay_s=0.1, factor=1.5, delay_s_max=0.3)
RHYTHM = DeliveryTimings(poll_s=0.05, claim_ttl_s=CLAIM_S, turn_s_max=1.0, page_size=7)

if __name__ == "__main__":
    run_api(Settings(), build_deliverer=partial(build_webhook_deliverer, backoff=BACKOFF, rhythm=RHYTHM))
