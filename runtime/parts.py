"""The parts of a step, and how the names of its nodes say which one they belong to."""

from __future__ import annotations

VERIFY, ACCEPT, COMMIT, DRAFT = "verify", "accept", "commit", "draft"
PARTS = (DRAFT, VERIFY, ACCEPT, COMMIT)
"""accept: the choice of tokens and the walk down the tree; commit: the target's caches written, and
the accepted path's rows selected for the next step to write."""
OTHER = "unattributed"
"""What a profiler reports under no name that we know."""
MARK = "/"


def named(part: str, name: str) -> str:
    """A node's name that says its part."""
    return f"{part}{MARK}{name}"


def part_of(name: str) -> str:
    """The part that a node of this name, or one fused from it, belongs to.

    Engines join the names of what they fuse and put their own words around them, so the first part
    that is named counts.
    """
    places = {part: name.find(part + MARK) for part in PARTS}
    found = {part: place for part, place in places.items() if place >= 0}
    return min(found, key=lambda part: found[part]) if found else OTHER
