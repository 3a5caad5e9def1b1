"""`python -m scheduler.cli` is the same as `ebbtide`."""

from scheduler.cli import main

main()
