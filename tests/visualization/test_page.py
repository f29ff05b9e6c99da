"""The page of attention: its data and colours, and itself in a real browser, by mouse and by keyboard."""

import base64
import importlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chromium import Browser, open_chromium
from test_heatmaps import AWKWARD, make_map

from vanilla_transformer.visualization.attention import KINDS, AttentionMap
from vanilla_transformer.visualization.figures import COLORS
from vanilla_transformer.visualization.page import attention_page, save_attention_page

Numbers = npt.NDArray[np.float64]
PAPERS = {"heads": "#ffffff", "heads_on_dark": "#111113"}
# What people see who lack the cones for long, middle or short waves: Machado, Oliveira and Fernandes (2009), table 1.
SIGHTS = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# From linear RGB to Oklab (Ottosson, 2020), in which distances are about as large as they look.
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


class Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(f"{tag}#{dict(attrs).get('id', '')}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().startswith(tag + "#")

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data

    def read(self) -> Any:
        return json.loads(self.texts["script#attention"])


def unpack(text: str) -> Numbers:
    low, high = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(2, -1).astype(float)
    return low + 256 * high


def test_the_page_has_exactly_the_weights_and_texts() -> None:
    attention = make_map(2, 9, source=AWKWARD)
    page = Page(attention_page(attention, title="a <b> & @DATA@"))
    assert not page.open
    assert page.texts["h1#"] == page.texts["title#"] == "a <b> & @DATA@"
    data = page.read()
    assert (data["source"], data["target"]) == (attention.source_text, attention.target_text)
    assert [kind["kind"] for kind in data["kinds"]] == list(KINDS)
    for kind in data["kinds"]:
        weights, rows, columns = attention.select(kind["kind"])
        found = unpack(kind["weights"]).reshape(kind["shape"]) / data["scale"]
        assert kind["shape"] == list(weights.shape)
        np.testing.assert_allclose(found, weights, atol=0.0005 + 1e-9)
        assert (kind["rows"], kind["columns"]) == (list(rows), list(columns))


def test_the_page_asks_for_nothing_from_elsewhere() -> None:
    text = attention_page(make_map())
    # The name of SVG is an address that nobody visits.
    assert set(re.findall(r"\w+://[^\"']*", text)) == {"http://www.w3.org/2000/svg"}
    page = Page(text)
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.attributes)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|innerHTML", text)
    (policy,) = [a["content"] for t, a in page.attributes if a.get("http-equiv") == "Content-Security-Policy"]
    assert str(policy).startswith("default-src 'none';")


def linear(color: Any) -> Numbers:
    """Of a color as "#rrggbb", or as numbers up to 255."""
    numbers = [int(color[start : start + 2], 16) for start in (1, 3, 5)] if isinstance(color, str) else color[:3]
    parts = np.array(numbers) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def light(color: Any) -> float:
    return float(linear(color) @ [0.2126, 0.7152, 0.0722])


def contrast(one: Any, other: Any) -> float:
    """As WCAG 2 defines it, from 1 to 21."""
    low, high = sorted(map(light, (one, other)))
    return (high + 0.05) / (low + 0.05)


def least_difference(colors: Any, sight: str) -> float:
    def place(color: str) -> Numbers:
        seen = np.clip(np.array(SIGHTS[sight]) @ linear(color), 0, 1)
        return np.asarray(np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ seen))

    return min(float(np.linalg.norm(place(one) - place(other))) for one, other in combinations(colors, 2))


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 12, 16, 32])
def test_every_head_has_a_color_that_can_be_seen(heads: int) -> None:
    data = Page(attention_page(make_map(1, heads))).read()
    for theme, paper in PAPERS.items():
        assert len(set(data[theme])) == heads
        assert min(contrast(color, paper) for color in data[theme]) >= 3


@pytest.mark.parametrize("sight", SIGHTS)
def test_colors_of_heads_are_told_apart_by_the_color_blind(sight: str) -> None:
    # The seven colours of the pictures, made for them.
    enough = min(least_difference(COLORS, each) for each in SIGHTS)
    for heads, least in ((8, enough), (16, 0.3 * enough)):
        data = Page(attention_page(make_map(1, heads))).read()
        for theme in PAPERS:
            assert least_difference(data[theme], sight) >= least, (heads, theme)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield Browser(driver)


def show(browser: Browser, attention: AttentionMap, folder: Path) -> None:
    save_attention_page(attention, folder / "attention.html", overwrite=True)
    browser.driver.get((folder / "attention.html").as_uri())
    browser.find("#rows button")


def point_at(browser: Browser, selector: str) -> None:
    actions = importlib.import_module("selenium.webdriver").ActionChains(browser.driver)
    actions.move_to_element(browser.find(selector)).perform()


def press(browser: Browser, *names: str) -> None:
    keys = importlib.import_module("selenium.webdriver").Keys
    for name in names:
        browser.driver.switch_to.active_element.send_keys(getattr(keys, name))


def wait_for_chosen(browser: Browser, *expected: str) -> None:
    browser.wait_for(lambda: browser.read_all("li .chosen", "textContent") == list(expected))
    browser.wait_for(lambda: browser.read_all("#details strong", "textContent") == list(expected))


def test_a_browser_draws_the_page(browser: Browser, tmp_path: Path) -> None:
    attention = make_map(2, 3, source=AWKWARD)
    show(browser, attention, tmp_path)
    assert browser.read_all("li", "textContent") == [*attention.target, *attention.source]
    # At first it shows all heads of the last layer: a line for each weight that can be seen.
    strengths = np.array(browser.read_all("#lines line", "getAttribute('stroke-opacity')"), dtype=float)
    rounded = np.rint(attention.cross[-1] * 1000) / 1000
    np.testing.assert_allclose(strengths, rounded[rounded >= 0.02], atol=1e-9)
    browser.find_all("#rows li")[1].click()
    wait_for_chosen(browser, attention.target[1])
    strengths = np.array(browser.read_all("#chosen-lines line", "getAttribute('stroke-opacity')"), dtype=float)
    np.testing.assert_allclose(strengths, rounded[:, 1][rounded[:, 1] >= 0.005], atol=1e-9)
    assert not [entry for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]


# The colours of each text that is shown and of all that is behind it, those of the swatches, and the page's own.
COLORS_SHOWN = """
const parse = (text) => [...text.matchAll(/rgba?\\(([^)]*)\\)|color\\(srgb ([^)]*)\\)/g)].map(([, rgb, srgb]) => {
  const [r, g, b, alpha = 1] = (rgb ?? srgb).split(/[, /]+/).map(Number);
  return [...[r, g, b].map((part) => rgb ? part : 255 * part), alpha];
});
const over = ([r, g, b, alpha = 1], below) => [r, g, b].map((part, k) => part * alpha + below[k] * (1 - alpha));
let striped = 0;
const behind = (element) => {
  if (!element) return [[255, 255, 255]];
  const style = getComputedStyle(element), [color] = parse(style.backgroundColor);
  const plain = behind(element.parentElement).map((below) => over(color, below));
  const stripes = parse(style.backgroundImage).flatMap((stripe) => plain.map((below) => over(stripe, below)));
  striped += stripes.length;
  return [...plain, ...stripes];
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
  if (!text || !element.checkVisibility() || element.matches(".space")) continue;
  const [color] = parse(getComputedStyle(element).color);
  for (const below of behind(element)) found.push([over(color, below), below, text]);
}
const paper = parse(getComputedStyle(document.body).backgroundColor)[0];
const swatches = [...document.querySelectorAll("input:checked + .head .swatch")].map((swatch) =>
  parse(getComputedStyle(swatch).backgroundColor)[0]);
return [found, swatches, paper, striped];
"""


def make_sharp_map(heads: int) -> AttentionMap:
    """Every head looks at one token, as strongly as can be."""
    weights = np.broadcast_to(np.eye(3, dtype=np.float32), (1, heads, 3, 3))
    tokens = ("▁one", "two", "three")
    return replace(make_map(1, heads, tokens, tokens), encoder=weights, decoder=weights, cross=weights)


@pytest.mark.parametrize("heads", [8, 16])
def test_attention_can_be_read_in_every_theme(browser: Browser, tmp_path: Path, heads: int) -> None:
    brightness = {}
    show(browser, make_sharp_map(heads), tmp_path)
    browser.find("#rows li").click()
    browser.find("#heads label").click()
    for mean, theme in ((False, "light"), (False, "dark"), (True, "dark"), (True, "light")):
        browser.send("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        if mean != browser.find("[name=mean]").is_selected():
            browser.find("label:has([name=mean])").click()
        wait_for_chosen(browser, "▁one")
        drawn = 1 if mean else heads - 1
        browser.wait_for(partial(lambda drawn: len(browser.find_all("#details tr")) == drawn, drawn))
        texts, swatches, paper, striped = browser.run(COLORS_SHOWN)
        brightness[theme] = light(paper)
        assert [text for color, behind, text in texts if contrast(color, behind) < 4.5] == [], theme
        assert len(swatches) == heads - 1
        assert min(contrast(swatch, paper) for swatch in swatches) >= 3, theme
        assert striped >= drawn
    browser.send("setEmulatedMedia", features=[])
    assert brightness["dark"] < 0.05 < 0.9 < brightness["light"]


LONG = ("▁die", "▁Donaudampfschifffahrtsgesellschaftskapitän", "Rindfleischetikettierungsüberwachung" * 3, "</s>")


@pytest.mark.parametrize("width", [360, 1100])
def test_long_tokens_leave_room(browser: Browser, tmp_path: Path, width: int) -> None:
    with browser.screen(width, 900):
        show(browser, make_map(1, 8, source=LONG, target=LONG), tmp_path)
        point_at(browser, "#rows li:nth-child(3)")
        wait_for_chosen(browser, LONG[2])
        boxes = browser.run(
            """return ["#rows", "#columns", "#details", ".map", "#chosen-lines"].map((selector) => {
                const { left, right, top } = document.querySelector(selector).getBoundingClientRect();
                return [left, right, top];
            })"""
        )
        for left, right, _ in boxes:
            assert 0 <= left < right <= width
        rows, columns, details, whole, lines = boxes
        assert 40 <= columns[0] - rows[1] <= 260
        assert [lines[0], lines[1]] == pytest.approx([rows[1], columns[0]], abs=2)
        assert (details[2] == whole[2]) == (width == 1100)
        sizes = "return [document.documentElement, ...arguments].map((box) => box.scrollWidth - box.clientWidth)"
        assert browser.run(sizes, browser.find(".map"), browser.find("#details"), browser.find("#source")) == [0] * 4
        assert browser.find_all("#rows button")[2].get_attribute("title") == LONG[2]
        point_at(browser, "#rows li:nth-child(1)")
        wait_for_chosen(browser, LONG[0])
        assert not browser.find_all("#rows button")[0].get_attribute("title")


def test_lines_are_drawn_once_for_all_that_happens_between_two_frames(browser: Browser, tmp_path: Path) -> None:
    show(browser, make_map(1, 2), tmp_path)
    drawn, same = browser.driver.execute_async_script(
        """const [done] = arguments, drawAll = draw, before = [...document.querySelectorAll("#all-lines line")];
        let drawn = 0;
        window.draw = () => { drawn += 1; drawAll(); };
        const list = document.getElementById("rows");
        for (const item of [...list.children, ...list.children])
          item.firstChild.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
        list.dispatchEvent(new PointerEvent("pointerleave"));
        const later = (rest) => rest ? requestAnimationFrame(() => later(rest - 1)) : done([
          drawn, before.every((line, k) => line === document.querySelectorAll("#all-lines line")[k])]);
        later(3);"""
    )
    assert drawn == 1
    assert same


def test_it_works_without_a_mouse(browser: Browser, tmp_path: Path) -> None:
    show(browser, make_map(1, 3, source=("a", "b", "c", "</s>")), tmp_path)
    point_at(browser, "h1")
    browser.run("document.querySelector('#heads button:last-child').focus()")
    press(browser, "TAB")
    wait_for_chosen(browser, "x")
    press(browser, "TAB")
    wait_for_chosen(browser, "a")
    press(browser, "ARROW_DOWN", "ARROW_DOWN")
    wait_for_chosen(browser, "c")
    press(browser, "END")
    wait_for_chosen(browser, "</s>")
    # These keys do not scroll; others are left to the browser.
    prevented = """return [...arguments].map((key) => !document.activeElement.dispatchEvent(
        new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true })))"""
    assert browser.run(prevented, "End", "ArrowDown", "PageDown") == [True, True, False]
    # A mouse that passes by shows something else only while it is there.
    point_at(browser, "#rows li")
    wait_for_chosen(browser, "x")
    point_at(browser, "h1")
    wait_for_chosen(browser, "</s>")
    with browser.screen(800, 300):
        press(browser, "HOME")
        before = browser.run("return [scrollY, document.documentElement.scrollHeight > innerHeight + scrollY]")
        press(browser, "SPACE")
        browser.wait_for(lambda: browser.read_all("[aria-pressed=true]", "textContent") == ["a"])
        assert browser.run("return [scrollY, true]") == before
    browser.run("document.activeElement.blur()")
    wait_for_chosen(browser, "a")
    browser.find("#columns button").click()
    point_at(browser, "h1")
    wait_for_chosen(browser)


def test_heads_are_chosen_without_a_mouse(browser: Browser, tmp_path: Path) -> None:
    show(browser, make_map(1, 3), tmp_path)

    def check(*expected: int) -> None:
        browser.wait_for(lambda: browser.run(f"return {groups}.length") == len(expected))
        assert browser.run("return [...document.querySelectorAll('[name=head]')].map((box) => box.checked)") == [
            head in expected for head in range(3)
        ]
        strokes = browser.run(f"return {groups}.map((group) => group.style.stroke)")
        assert strokes == [f"var(--head-{head})" for head in expected]

    groups = "[...document.querySelectorAll('#all-lines g')]"
    address = browser.driver.current_url
    browser.run("document.querySelectorAll('[name=head]')[1].focus()")
    press(browser, "ENTER")
    check(1)
    press(browser, "ENTER")
    check(0, 1, 2)
    press(browser, "TAB", "TAB", "TAB", "TAB", "SPACE")
    check()
    browser.run("document.querySelectorAll('[name=head]')[2].focus()")
    press(browser, "SPACE")
    check(2)
    press(browser, "TAB", "TAB", "ENTER")
    check(0, 1, 2)
    assert browser.driver.current_url == address
