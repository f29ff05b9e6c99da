"""A real browser for tests of pages: Chromium without a window, kept from looking for anything outside."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 120  # seconds, on a busy machine
# As root, Chromium must do without its sandbox; the others keep it from looking for anything outside.
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1400,1000"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

# What each text has to be told from its background by: https://www.w3.org/TR/WCAG21/#contrast-minimum.
_CONTRAST = """
const luminance = (color) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  const linear = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const background = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if (color !== "rgba(0, 0, 0, 0)") return color;
  }
};
return Object.fromEntries([...document.querySelectorAll("body *")]
  .filter((element) => element.checkVisibility() && (element.matches("textarea")
    || [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())))
  .map((element) => {
    const [a, b] = [getComputedStyle(element).color, background(element)].map(luminance);
    return [element.outerHTML.slice(0, 80), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  }));
"""


class Browser:
    """Chromium, with what tests do to any page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def find_all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def find(self, selector: str) -> Any:
        self.wait_for(lambda: self.find_all(selector))
        return self.find_all(selector)[0]

    def wait_for(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, self.driver.find_element("css selector", "body").text
            time.sleep(0.01)

    def read_all(self, selector: str, what: str) -> list[str]:
        # All at once, since the page may change between one look and the next.
        script = f"return [...document.querySelectorAll({selector!r})].map((element) => element.{what})"
        found: list[str] = self.driver.execute_script(script)
        return found

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def send(self, command: str, **parameters: Any) -> None:
        self.driver.execute_cdp_cmd(f"Emulation.{command}", parameters)

    def read_contrasts(self, theme: str) -> tuple[dict[str, float], str]:
        """How far texts stand out from their backgrounds in a theme, and the page's own background."""
        self.send("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        try:
            return self.run(_CONTRAST), self.run("return getComputedStyle(document.body).backgroundColor")
        finally:
            self.send("setEmulatedMedia", features=[])

    @contextmanager
    def screen(self, width: int, height: int, *, mobile: bool = False) -> Iterator[None]:
        self.send("setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        try:
            yield
        finally:
            self.send("clearDeviceMetricsOverride")


@contextmanager
def open_chromium(profile: Path) -> Iterator[Any]:
    """Starts Chromium with a folder of its own, for selenium to drive; skips the test where either is missing."""
    selenium = pytest.importorskip("selenium.webdriver", reason="a page in a browser needs selenium: the extra [test]")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("a page in a browser needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for option in (*_OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        yield started
    finally:
        started.quit()
