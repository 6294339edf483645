"""The page in a real browser: what it asks for, whether anything overlaps, and its contrast."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.runtime.report import render

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDTHS = (1280, 800, 375)
SCHEMES = ("light", "dark")
LONG = "a_word_without_a_gap_" * 12

CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
function rgba(text) {  // any CSS colour, oklab() too
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = text;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
}
function luminance(colour) {
  const [r, g, b] = colour.map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = rgba(getComputedStyle(at).backgroundColor);
    if (colour[3] > 0.99) return colour;
  }
  throw new Error("no background");
}
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; (node = walker.nextNode());) {
  const element = node.parentElement;
  if (!node.data.trim() || element.tagName === "title") continue;
  const style = getComputedStyle(element);
  const colour = rgba(element instanceof SVGElement ? style.fill : style.color);
  const [a, b] = [luminance(colour), luminance(behind(element))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  found.push([contrast, node.data.trim().slice(0, 40)]);
}
return found;
"""
"""Contrast of every text with what lies behind it, as WCAG defines it."""

OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll("svg")) {
  const boxes = [...svg.querySelectorAll("text")]
    .filter(text => text.textContent.trim() && text.getClientRects().length)
    .map(text => [text.textContent, text.getBoundingClientRect()]);
  boxes.forEach(([name, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 2) found.push([name, other, across, down]);
  }));
}
return found;
"""
"""Pairs of labels in one plot that lie over each other."""

OUTSIDE = """
const width = document.documentElement.clientWidth;
return [...document.querySelectorAll("h1, h2, p, dd, svg text, summary")]
  .filter(element => !element.closest(".scroll") && element.getClientRects().length)
  .map(element => [element.textContent.slice(0, 40), element.getBoundingClientRect()])
  .filter(([_, box]) => box.left < -1 || box.right > width + 1)
  .map(([text, box]) => [text, box.left, box.right]);
"""
"""Texts that reach past the page's sides."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Debian's Chromium without a screen."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if BROWSER is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are needed: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(full_report: dict[str, Any], tmp_path: Path) -> Path:
    """A page with every section, as crowded as they come, and texts that mean harm."""
    bad = "<script>document.title = 'owned'</script><img src='http://example.org/x.png'>"
    full_report["verify_curve"] = {
        str(context): {str(n): 20 + n * (1 + context / 9000) for n in (1, 2, 4, 8, 12, 16, 64, 128)}
        for context in (64, 256, 1024, 2000)
    }
    full_report["acceptance_by_position"] = [
        {"from": start, "to": start + 32, "tau": 2 + start / 400} for start in range(0, 512, 32)
    ]
    full_report["acceptance_by_depth"] = [0.9**depth for depth in range(1, 13)]
    parents = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 8, 10, 12, 14]
    full_report["tree"] = {"parents": parents, "accepted": [1 / (i + 1) for i in range(16)]}
    full_report["answers"][0] |= {"prompt": bad + LONG}
    full_report["answers"][0]["tokens"][1]["text"] = LONG
    full_report["worst"][0] |= {"prompt": "\u202e" + LONG, "category": bad}
    full_report["categories"][bad] = full_report["categories"]["chat"]
    full_report["bundle"]["path"] = "/" + LONG
    path = tmp_path / "page.html"
    path.write_text(render(full_report, "tune"), encoding="utf-8")
    return path


def show(browser: Any, page: Path, width: int, scheme: str) -> None:
    """Opens the page as such a reader sees it."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overlaps_or_leaves_the_page(browser: Any, page: Path, width: int) -> None:
    show(browser, page, width, "light")
    assert browser.execute_script(OVERLAPS) == []
    assert browser.execute_script(OUTSIDE) == []
    size = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    scroll, client = browser.execute_script(size)
    assert scroll == client


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_text_has_contrast(browser: Any, page: Path, scheme: str) -> None:
    show(browser, page, 1280, scheme)
    found = browser.execute_script(CONTRAST)
    assert len(found) > 150
    assert [item for item in found if item[0] < 4.5] == []


def test_the_two_schemes_differ(browser: Any, page: Path) -> None:
    lights = []
    for scheme in SCHEMES:
        show(browser, page, 800, scheme)
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        lights.append(sum(int(part) for part in colour[4:-1].split(",")) / 3)
    assert lights[0] > 200 and lights[1] < 50


def test_it_asks_for_nothing_and_runs_nothing(browser: Any, page: Path) -> None:
    browser.get_log("browser"), browser.get_log("performance")  # what came before
    show(browser, page, 1280, "light")
    assert browser.title.startswith("forerun tune")
    sent = [
        message["params"]["request"]["url"]
        for entry in browser.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"]
        == "Network.requestWillBeSent"
    ]
    assert [url for url in sent if url != "data:,"] == [page.as_uri()]
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.images.length + document.scripts.length") == 0


def test_plots_are_drawn_to_scale(browser: Any, page: Path, full_report: dict[str, Any]) -> None:
    show(browser, page, 1280, "light")
    heights = browser.execute_script(
        "return [...document.querySelectorAll('#depth .column')]"
        ".map(bar => bar.getBoundingClientRect().height)"
    )
    shares = full_report["acceptance_by_depth"]
    assert [height / heights[0] for height in heights] == pytest.approx(
        [share / shares[0] for share in shares], abs=0.01
    )
    widths = browser.execute_script(
        "return [...document.querySelectorAll('#waterfall .bar-total')]"
        ".map(bar => bar.getBoundingClientRect().width)"
    )
    assert widths[1] / widths[0] == pytest.approx(11.76 / 9.0, abs=0.01)
    fills = browser.execute_script(
        "return [...document.querySelectorAll('#tree circle')]"
        ".map(node => getComputedStyle(node).fill)"
    )
    assert len(set(fills)) == len(full_report["tree"]["parents"])
