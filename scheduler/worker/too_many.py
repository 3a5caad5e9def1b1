"""An answer 429: the control plane asks to be asked less often."""

from __future__ import annotations

STATUS = 429
_LONGEST_S = 10.0


class TooManyError(ValueError):
    """`after_s`: how long it asks to be left alone."""

    def __init__(self, retry_after: str | None) -> None:
        self.after_s = min(float(retry_after), _LONGEST_S) if retry_after and retry_after.isdigit() else 1.0
        super().__init__(f"{STATUS}: too many reports, {self.after_s:g} s are waited")
