"""The axes of a step's inputs, by the names that the contract gives them (docs/contract.md)."""

from __future__ import annotations

INPUT_AXES: dict[str, tuple[str | int, ...]] = {
    "tokens": ("batch", "nodes"),
    "length": ("batch",),
    "pending_count": ("batch",),
    "pending": ("batch", "cached_heads", "pending_in", "head_dim"),
    "depth": ("batch", "nodes"),
    "ancestors": ("batch", "nodes", "nodes"),
    "verify": ("verified",),
    "parents": ("batch", "verified"),
    "slots": ("next_nodes",),
    "forced": ("batch",),
    "remembering": (),
    "drafting": (),
    "uniforms": ("batch", "tables", "uniform_positions"),
    "temperature": ("batch",),
    "top_k": ("batch",),
    "top_p": ("batch",),
    "limit": ("batch",),
}
"""Each input's axes: symbols, facts of the target, or plain numbers."""
