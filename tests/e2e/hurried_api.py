"""An API process that delivers to webhooks in a hurry: pauses are fractions of a second, claims end after a few.

`python -m tests.e2e.hurried_api`, by the settings of the environment, to its end by SIGTERM.
"""

from __future__ import annotations

from functools import partial

from api.webhooks.courier import Rhythm
from api.webhooks.retrying import Backoff
from scheduler.settings import Settings
from scheduler.wiring import build_courier, run_api

CLAIM_S = 3.0
BACKOFF = Backoff(attempts=4, pause_s=0.1, factor=1.5, pause_s_max=0.3)
RHYTHM = Rhythm(look_s=0.05, claim_s=CLAIM_S, turn_s=1.0, page=7)

if __name__ == "__main__":
    run_api(Settings(), courier=partial(build_courier, backoff=BACKOFF, rhythm=RHYTHM))
