"""The report of a measurement as one page, readable alone: no network, no script.

Its plots are drawn by the templates over the geometry of `plot.py`. A plotting library would bring
its fonts, fixed colours (the page follows the reader's light or dark setting) or megabytes of
script, and a package that a deployed bundle doesn't need.
"""

from __future__ import annotations

import math
import unicodedata
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from forerun import __version__
from forerun.runtime.report_sections import SECTIONS, headline

TEMPLATE = "report.html.j2"
LAYOUT = frozenset("\n\t")
"""Control characters that stay."""
JOINERS = frozenset("\u200c\u200d")
"""Format characters that stay: emoji and several scripts are written with them."""


def render(report: dict[str, Any], command: str) -> str:
    """The page of what `forerun COMMAND` measured: a section for each thing that `report` holds."""
    shown = visible(report)
    sections = [
        {"name": name, "title": section.title, "view": section.build(shown)}
        for name, section in SECTIONS.items()
        if any(shown.get(key) for key in section.keys)
    ]
    page = _environment().get_template(TEMPLATE)
    return page.render(
        command=command, version=__version__, headline=headline(shown), sections=sections
    )


def visible(value: Any) -> Any:
    """`value` with what can't be seen in its texts, or would reorder the rest, spelt out.

    Control characters become their pictures (U+2400 on); bidirectional controls, line separators,
    and halves of surrogate pairs their code, as in ⟨U+202E⟩.
    """
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else "".join(map(_seen, value))
    if isinstance(value, dict):
        return {visible(key): visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [visible(item) for item in value]
    return value


def _seen(letter: str) -> str:
    code = ord(letter)
    if letter in LAYOUT or letter in JOINERS:
        return letter
    if code < 0x20 or code == 0x7F:
        return chr(0x2421 if code == 0x7F else 0x2400 + code)
    # Control, format, surrogate, line and paragraph ends.
    hidden = unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    is_tag = 0xE0020 <= code <= 0xE007F  # the flags of England, Scotland and Wales
    return f"⟨U+{code:04X}⟩" if hidden and not is_tag else letter


def fixed(value: float | None, digits: int = 2) -> str:
    """With so many decimals, and thousands apart; a dash for what is no finite number."""
    known = value is not None and math.isfinite(value)
    return f"{value:,.{digits}f}" if known else "–"


def times(value: float | None) -> str:
    """A ratio: 1.30×."""
    text = fixed(value)
    return text if text == "–" else f"{text}×"


def percent(value: float | None, digits: int = 0) -> str:
    """A share: 42%."""
    text = fixed(None if value is None else 100 * value, digits)
    return text if text == "–" else f"{text}%"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("forerun.templates", ""),
        autoescape=True,  # for every template, whatever its name
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"fixed": fixed, "times": times, "percent": percent}
    return environment
