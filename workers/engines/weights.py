"""What engines take of a memory that they share, in words."""

from __future__ import annotations

from collections.abc import Mapping


def largest_first(taken: Mapping[str, int]) -> str:
    """Return what each of several engines takes, beginning with the one that takes most."""
    largest, *others = sorted(taken, key=lambda name: (-taken[name], name))
    rest = "".join(f", {name} {taken[name]}" for name in others)
    return f"most of it {largest} with {taken[largest]}{rest}"
