"""Checks of `ebbtide doctor`. Each returns what it found and what to do, and changes nothing."""
