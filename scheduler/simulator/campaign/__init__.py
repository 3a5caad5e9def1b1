"""Fault campaigns: seeded worlds under faults and owners' commands, with invariants, replay and shrinking."""
