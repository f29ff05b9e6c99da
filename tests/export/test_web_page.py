"""The page that `export --format web` writes, in a real browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, open_chromium
from letters import TOKENIZER, make_letters_model, train_on_letters
from node_packages import find_node_modules
from page_server import PageServer, serve

from vanilla_transformer.export import onnx as exporting
from vanilla_transformer.export.web import export_web

pytest.importorskip("transformers", minversion=exporting.OLDEST_TRANSFORMERS)
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

WORDS = ["abc", "hgfe", "d"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that reverses letters."""
    found = make_letters_model(langs=["en", "de"])
    train_on_letters(found, tmp_path_factory.mktemp("letters"), reverse=True)
    found.generation_config.update(num_beams=4, length_penalty=0.6, length_penalty_type="gnmt", max_new_tokens=8)
    return found


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield Browser(driver)


@pytest.fixture(scope="module")
def page(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages = find_node_modules("@huggingface/transformers")
    folder = tmp_path_factory.mktemp("web") / "page"
    return export_web(model, folder, tokenizer=TOKENIZER, node_modules=packages, examples=["cab", "<b>gh</b>"])


@pytest.fixture
def server(page: Path, chromium: Browser) -> Iterator[PageServer]:
    with serve({"/": page}) as server:
        chromium.driver.get(f"{server.url}/")
        chromium.wait_for(lambda: "Ready" in chromium.find("#status").text)
        yield server


def write(chromium: Browser, text: str) -> list[str]:
    """Types a text, and returns the lines of its translation."""
    chromium.find("#source").clear()
    chromium.find("#source").send_keys(text)
    count = len([line for line in text.splitlines() if line.strip()])
    chromium.wait_for(
        lambda: (
            len([line for line in chromium.read_all("#target .line", "textContent") if line]) == count
            and not chromium.find_all("#target.stale")
        )
    )
    return chromium.read_all("#target .line", "textContent")


def test_it_translates_what_is_typed(chromium: Browser, server: PageServer) -> None:
    assert chromium.find("#title").text == "English→German"
    assert chromium.find("#source").get_attribute("lang") == "en"
    assert chromium.find("#target").get_attribute("lang") == "de"
    assert write(chromium, "abc\n\nhgfe") == ["cba", "", "efgh"]
    assert "of line 3" in chromium.find("#others").text
    others = chromium.read_all("#n-best bdi", "textContent")
    assert len(others) == len({*others, "efgh"}) - 1 == 3
    shares = [int(text.rstrip("%")) for text in chromium.read_all("#n-best .score", "textContent")]
    assert shares == sorted(shares, reverse=True)
    assert write(chromium, "abc\n\nhgf") == ["cba", "", "fgh"]
    chromium.run("const box = document.getElementById('beams'); box.value = 1; box.dispatchEvent(new Event('change'))")
    chromium.wait_for(lambda: chromium.find_all("#others[hidden]") and not chromium.find_all("#target.stale"))
    assert chromium.read_all("#target .line", "textContent") == ["cba", "", "fgh"]
    chromium.find("#clear").click()
    assert chromium.read_all("#target .line", "textContent") == [""]


def test_examples_are_texts_and_work_by_keyboard(chromium: Browser, server: PageServer) -> None:
    assert chromium.read_all("#examples button", "textContent") == ["cab", "<b>gh</b>"]
    chromium.run("document.querySelector('#examples button').focus()")
    chromium.driver.switch_to.active_element.send_keys("\ue007")  # Enter
    chromium.wait_for(lambda: chromium.read_all("#target .line", "textContent") == ["bac"])
    assert chromium.driver.switch_to.active_element.get_attribute("id") == "source"


def test_nothing_is_fetched_from_elsewhere(chromium: Browser, server: PageServer) -> None:
    write(chromium, "abc")
    names = chromium.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert names
    assert all(name.startswith(server.url) for name in names)
    policy = chromium.run("return document.querySelector('meta[http-equiv]').content")
    assert "default-src 'none'" in policy and "http" not in policy  # noqa: PT018
    problems = [entry for entry in chromium.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert not problems


def test_it_works_without_a_network_after_the_first_visit(chromium: Browser, page: Path) -> None:
    with serve({"/": page}) as server:
        chromium.driver.get(f"{server.url}/")
        chromium.wait_for(lambda: "Ready" in chromium.find("#status").text)
        assert server.asked.count("/runtime/ort-wasm-simd-threaded.wasm") == 1
    chromium.driver.get(f"{server.url}/")
    chromium.wait_for(lambda: "Ready" in chromium.find("#status").text)
    assert chromium.run("return crossOriginIsolated")
    assert write(chromium, "abc") == ["cba"]


def test_a_file_that_was_cut_off_is_named(chromium: Browser, page: Path, tmp_path: Path) -> None:
    shutil.copytree(page, tmp_path / "page")
    decoder = tmp_path / "page" / "model" / "decoder.onnx"
    decoder.write_bytes(decoder.read_bytes()[:-100])
    with serve({"/": tmp_path / "page"}) as server:
        chromium.driver.get(f"{server.url}/")
        chromium.wait_for(lambda: chromium.find_all("#status.wrong"))
        assert chromium.find("#status").text == "model/decoder.onnx is not whole: load the page again."
        decoder.write_bytes((page / "model" / "decoder.onnx").read_bytes())
        chromium.driver.get(f"{server.url}/")
        chromium.wait_for(lambda: "Ready" in chromium.find("#status").text)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_told_from_their_background(chromium: Browser, server: PageServer, theme: str) -> None:
    write(chromium, "abc\nhgfe")
    ratios, paper = chromium.read_contrasts(theme)
    assert len(ratios) > 10
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
    assert (int(paper.split("(")[1].split(",")[0]) < 128) == (theme == "dark")


def test_it_fits_a_phone(chromium: Browser, server: PageServer) -> None:
    write(chromium, "abc\nhgfe")
    with chromium.screen(360, 740, mobile=True):
        width, shown = chromium.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert width <= shown == 360
        source, target = (chromium.find(f"#{name}").rect for name in ("source", "target"))
        assert target["y"] > source["y"] + source["height"]
