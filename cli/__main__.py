"""`python -m cli` is the same as `ebbtide`."""

from __future__ import annotations

from cli import main

main()
