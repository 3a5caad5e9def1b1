"""Runs `ebbtide` as `python -m cli`."""

from __future__ import annotations

from cli import main

main()
