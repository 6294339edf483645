"""Bundle -> tokens: engines, the loop, sampling parameters, measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.runtime.model import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """Imports `load` when it is asked for: importing the package alone stays cheap."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forerun.runtime.model import load

    return load
