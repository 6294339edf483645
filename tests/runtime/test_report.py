"""The page: the numbers it is given, nothing it isn't, and no text that reaches past itself."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from forerun.cli import main
from forerun.errors import ForerunError
from forerun.runtime.report import fixed, percent, render, times, visible
from forerun.runtime.report_sections import SECTIONS

VOID = frozenset(("meta", "link"))
"""Elements of the page without an end."""
NEEDED = {
    "waterfall": ["waterfall"],
    "cost": ["verify_curve", "verify_cost"],
    "depth": ["acceptance_by_depth"],
    "position": ["acceptance_by_position"],
    "tree": ["tree"],
    "tuning": ["plan", "tried"],
    "categories": ["categories"],
    "answers": ["answers"],
    "worst": ["worst"],
    "setup": ["bundle", "machine", "versions", "settings"],
}


class Page(HTMLParser):
    """The page's elements and texts; fails where tags don't close as they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[list[str], str]] = []
        """(classes and ids from the outermost element on, text)"""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, dict(attrs))
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        names = (
            str(value)
            for tag, attributes in self._open
            for value in (tag, attributes.get("id"), attributes.get("class"))
            if value
        )
        self.texts.append((list(names), data))

    def sections(self) -> list[str]:
        return [str(names["id"]) for tag, names in self.elements if tag == "section"]

    def text(self, within: str) -> str:
        """All texts inside the elements with this tag, id or class, a space between each two."""
        found = " ".join(data for names, data in self.texts if within in names)
        return " ".join(found.split())

    def styles(self, kind: str) -> list[dict[str, str | None]]:
        return [names for _, names in self.elements if names.get("class") == kind]


def test_all_sections_in_their_order(full_report: dict[str, Any]) -> None:
    page = Page(render(full_report, "tune"))
    assert page.sections() == list(SECTIONS) == list(NEEDED)


@pytest.mark.parametrize("section", list(NEEDED))
def test_a_section_goes_with_its_keys_and_stays_alone(
    full_report: dict[str, Any], section: str
) -> None:
    without = {key: item for key, item in full_report.items() if key not in NEEDED[section]}
    assert Page(render(without, "profile")).sections() == [
        name for name in NEEDED if name != section
    ]
    alone = {key: full_report[key] for key in NEEDED[section] if key in full_report}
    assert Page(render(alone, "profile")).sections() == [section]


def test_an_empty_report_is_a_page_still() -> None:
    page = Page(render({}, "profile"))
    assert page.sections() == [] and page.text("h1") == "Profile"


def test_the_headline(full_report: dict[str, Any]) -> None:
    page = Page(render(full_report, "bench"))
    assert page.text("h1") == "2.12× faster than plain decoding"
    assert "1.75 to 2.50×" in page.text("interval")
    assert page.text("facts") == (
        "Speculative 85.0 tokens/s Plain 40.0 tokens/s tau, tokens a step 2.75 "
        "Identical to plain 6 of 7 prompts"
    )
    assert page.text("overline") == "forerun bench · tiny · heads · tree of 4 nodes"
    assert page.text("title").startswith("forerun bench: 2.12×, tiny")


@pytest.mark.parametrize(
    ("speedup", "interval", "verdict"),
    [
        (0.8, [0.7, 0.9], "slower than plain decoding"),
        (1.1, [0.9, 1.3], "no clear difference from plain decoding"),
        (1.1, None, "faster than plain decoding"),
        (0.9, None, "slower than plain decoding"),
    ],
)
def test_verdicts(speedup: float, interval: list[float] | None, verdict: str) -> None:
    text = render({"speedup": speedup, "speedup_interval": interval}, "bench")
    assert Page(text).text("h1").endswith(verdict)


def test_the_waterfall_says_and_draws_its_stages(full_report: dict[str, Any]) -> None:
    page = Page(render(full_report, "profile"))
    text = page.text("waterfall")
    for row in ("ideal 9.00 2.78×", "drafter +2.00 11.00 2.27×", "host −0.50 10.50 2.38×"):
        assert row in text
    assert "plain decoding: 25.00 ms" in text
    bars = [page.styles(f"bar-{kind}") for kind in ("total", "more", "less")]
    widths = [[float(str(bar["width"]).rstrip("%")) for bar in kind] for kind in bars]
    scale = widths[0][0] / 9.0
    assert widths == [
        pytest.approx([9 * scale, 11.76 * scale], abs=0.02),
        pytest.approx([2 * scale], abs=0.02),
        pytest.approx([0.5 * scale], abs=0.02),
    ]


def test_the_cost_of_verifying(full_report: dict[str, Any]) -> None:
    text = Page(render(full_report, "profile")).text("cost")
    assert "Drafting adds 4.5 ms" in text
    assert "context 64: 4 in 25.0 ms" in text and "context 512: 4 in 33.0 ms" in text
    assert "4 25.0 1.25× 33.0 1.50×" in text
    del full_report["verify_curve"]
    text = Page(render(full_report, "bench")).text("cost")
    assert "context short: 4 in 30.0 ms" in text and "4 30.0 1.20×" in text


def test_acceptance(full_report: dict[str, Any]) -> None:
    page = Page(render(full_report, "profile"))
    assert [share in page.text("depth") for share in ("80%", "55%", "40%")] == [True] * 3
    assert "tokens of the answer 32–64: 3.25" in page.text("position")
    tree = page.text("tree")
    assert "node 3, depth 2: accepted in 37.0% of steps" in tree and "61%" in tree
    circles = [
        names["style"] for tag, names in page.elements if tag == "circle" and "style" in names
    ]
    assert circles == [f"--share: {share}%" for share in (100.0, 61.0, 19.0, 37.0)]
    del full_report["tree"]["accepted"]
    tree = Page(render(full_report, "profile")).text("tree")
    assert "was not recorded" in tree and "depth 2: accepted in 55.0%" in tree


def test_tuning(full_report: dict[str, Any]) -> None:
    text = Page(render(full_report, "tune")).text("tuning")
    assert "nodes speculate 512 4 yes 2048 1 no" in text
    assert "4 512 2.50 31.25 2.05× 2.01× 8 512 2.50 31.25 1.61× –" in text
    assert "context 512, 8 nodes: 1.61×" in text and "Rings are measured" in text
    del full_report["tried"]
    assert "2048" in Page(render(full_report, "tune")).text("tuning")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            [{"batch": 1, "nodes": 6}, {"batch": 4, "why": [1, 2]}],
            "batch nodes why 1 6 – 4 – [1, 2]",
        ),
        ({"nodes": 6, "gain": 1.23456}, "nodes 6 gain 1.235"),
        ("don't speculate", "don't speculate"),
    ],
)
def test_a_plan_of_any_form(plan: Any, words: str) -> None:
    assert words in Page(render({"plan": plan}, "tune")).text("tuning")


def test_many_settings_are_folded(full_report: dict[str, Any]) -> None:
    full_report["tried"] *= 10
    page = Page(render(full_report, "tune"))
    assert "8 more" in page.text("tuning")


def test_categories_and_the_worst(full_report: dict[str, Any]) -> None:
    page = Page(render(full_report, "bench"))
    row = "chat 1.38×, 1.75 to 2.50 1.38× 2.75 40.0 85.0 6 of 7"
    assert row in page.text("categories")
    assert "Why? chat 0.88× 1.25 48" in page.text("worst")


def test_answers_are_groups_of_steps(full_report: dict[str, Any]) -> None:
    page = Page(render(full_report, "bench"))
    assert len(page.styles("step")) == 3
    counts = [len(page.styles(state)) for state in ("plain", "drafted", "corrected")]
    assert counts == [1 + 1, 3 + 1, 1 + 1]  # and the legend's
    assert page.text("tokens") == "Two is more .↵ Yes"
    line = page.text("facts-line")
    assert line == "2.50× · tau 3.00 · 5 tokens, 60% drafted"


def test_the_setup(full_report: dict[str, Any]) -> None:
    text = Page(render(full_report, "bench")).text("setup")
    for part in ("ab" * 32, "A quiet one", "numpy 2.9.9", "temperature 0.7", "threads –", "long 3"):
        assert part in text


HOSTILE = [
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "</style></title></span>{{ 7 * 7 }}{% raw %}&amp;&#60;",
    "nul \x00 bell \x07 escape \x1b[31m del \x7f nel \x85",
    "family \U0001f468‍\U0001f469‍\U0001f467 flag \U0001f1e8\U0001f1ed",
    "right to left: \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "override \u202egnp.exe\u202c isolate \u2067 line \u2028 half \ud800",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_text(full_report: dict[str, Any], text: str) -> None:
    calm = Page(render(full_report, "bench"))
    full_report["answers"][0]["prompt"] = text
    full_report["answers"][0]["tokens"][1]["text"] = text
    full_report["worst"][0] |= {"prompt": text, "category": text}
    full_report["categories"] = {text: full_report["categories"]["chat"], "one": calm_category()}
    full_report["bundle"] |= {"path": text, "target": text}
    full_report["machine"]["cpu"] = full_report["machine"][text] = text
    full_report["plan"] = {text: {text: text}, "2048": {"nodes": 1, "speculate": text}}
    full_report["waterfall"][0]["name"] = text
    rendered = render(full_report, "bench")
    rendered.encode("utf-8")
    page = Page(rendered)
    # As many scripts, images and handlers as before: none.
    assert [tag for tag, _ in page.elements if tag in ("script", "img", "iframe", "object")] == []
    assert not any(name.startswith("on") for _, names in page.elements for name in names)
    assert page.sections() == calm.sections()
    assert page.text("asked") == " ".join(visible(text).split())
    for section in ("answers", "worst", "categories", "setup", "tuning", "waterfall"):
        assert " ".join(visible(text).split()) in page.text(section)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028]", rendered)


def calm_category() -> dict[str, Any]:
    """A category whose prompts never took a step, for the least that one may hold."""
    nothing = {"tokens_per_s": 0.0}
    counts = {"prompts": 1, "identical": 1, "speedup": 0.0, "tau": 0.0}
    return {**counts, "plain": nothing, "speculative": nothing, "speedup_interval": None}


def test_what_stays_and_what_is_spelt_out() -> None:
    kept = "plain\ttext\nété 世界 \U0001f468‍\U0001f469 שלום 🏴\U000e0067\U000e007f"
    assert visible(kept) == kept
    assert visible("\x00\x1b\x7f") == "␀␛␡"
    assert visible("\u202ea\u2028\ud800\ufeff") == "⟨U+202E⟩a⟨U+2028⟩⟨U+D800⟩⟨U+FEFF⟩"
    assert visible({"\x00": ["\x07", 1.5, None, True]}) == {"␀": ["␇", 1.5, None, True]}


def test_nothing_is_loaded_and_nothing_runs(full_report: dict[str, Any]) -> None:
    text = render(full_report, "bench")
    page = Page(text)
    links = [
        names.get(key) for _, names in page.elements for key in ("src", "href") if key in names
    ]
    assert links == ["data:,"]
    assert "http" not in text.replace("http-equiv", "") and "url(" not in text
    assert "default-src 'none'" in text and "<script" not in text


def test_numbers_that_are_none() -> None:
    assert [fixed(value) for value in (None, float("nan"), float("inf"))] == ["–"] * 3
    assert (fixed(12345.678, 1), times(1.3), percent(0.425, 1)) == ("12,345.7", "1.30×", "42.5%")
    assert (times(None), percent(None)) == ("–", "–")
    page = Page(render({"speedup": 1.5, "speedup_interval": None, "tau": None}, "bench"))
    assert "interval over prompts" not in page.text("interval")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_bench_writes_the_page(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "IJKLMNOPQRIJKLMNOPQR"}, {"prompt": "<b>hello</b>", "category": "b"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, output = tmp_path / "out.html", tmp_path / "out.json"
    common = ("bench", tiny_bundle, "--prompts", prompts, "--max-new-tokens", 12, "--threads", 1)
    result = run(*common, "--report", page, "--json", output)
    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    parsed = Page(page.read_text(encoding="utf-8"))
    sections = ["cost", "depth", "tree", "categories", "answers", "worst", "setup"]
    assert parsed.sections() == sections
    assert parsed.text("h1").startswith(f"{report['speedup']:.2f}×")
    assert "<b>hello</b>" in parsed.text("answers")
    assert sorted(item["prompt"] for item in report["answers"]) == sorted(
        line["prompt"] for line in lines
    )
    # Without the page nobody asks for whole answers.
    assert run(*common, "--json", output).exit_code == 0
    assert "answers" not in json.loads(output.read_text())


@pytest.mark.parametrize("option", ["--report", "--json"])
def test_an_unwritable_file_is_said_before_anything_is_measured(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured first")

    monkeypatch.setattr("forerun.runtime.bench.bench", measured)
    result = run("bench", tiny_bundle, option, tmp_path / "missing" / "out")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "can't write the result" in result.stderr


def test_the_measurement_survives_a_page_that_cannot_be_drawn(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise ForerunError("no page today")

    monkeypatch.setattr("forerun.runtime.report.render", broken)
    output, page = tmp_path / "out.json", tmp_path / "out.html"
    few = ("--limit", 1, "--max-new-tokens", 4, "--threads", 1)
    result = run("bench", tiny_bundle, *few, "--json", output, "--report", page)
    assert result.exit_code == 1 and "no page today" in result.stderr
    assert json.loads(output.read_text())["prompts"] == 1 and not page.exists()
