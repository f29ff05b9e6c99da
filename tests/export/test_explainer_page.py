"""The page that `export --format explainer` writes, in a real browser: its numbers beside PyTorch's, and its use."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chromium import Browser, open_chromium
from letters import TOKENIZER, make_letters_model, train_on_letters
from node_packages import find_node_modules
from page_server import PageServer, serve
from watched_modules import watch

from vanilla_transformer.export import onnx as exporting
from vanilla_transformer.export.explainer import folder as explaining

pytest.importorskip("transformers", minversion=exporting.OLDEST_TRANSFORMERS)
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

FILES = Path(explaining.__file__).parent
WORD = "gabh"
TOLERANCE = 1e-4
KEYS = {"Enter": "\ue007", "Right": "\ue014", "Left": "\ue012", "Down": "\ue015", "Escape": "\ue00c"}
# Explains some numbers of every value, in the page itself.
EXPLAIN_SOME = """
const done = arguments[arguments.length - 1];
import(new URL("explainer.js", location.href)).then(({ notebook }) => {
  const found = [];
  for (const [name, { dims }] of Object.entries(notebook.values)) {
    for (let place = 0; place < 10; place++) {
      const index = dims.map((size, axis) => (place * (7 + 4 * axis) + place * place) % size);
      const { value, computed, terms, parts } = notebook.explain({ name, index });
      const factors = [...terms.flatMap((term) => term.factors), ...Object.values(parts)];
      found.push({ name, index, value, computed, factors: factors.filter((each) => each.cell || each.weight) });
    }
  }
  done(found);
});
"""
SET = """
const [id, value] = arguments, box = document.getElementById(id);
box.value = value;
for (const kind of ["input", "change"]) box.dispatchEvent(new Event(kind, { bubbles: true }));
"""
STATE = """
const done = arguments[arguments.length - 1];
import(new URL("explainer.js", location.href)).then(({ notebook: { read, written, temperature, values } }) =>
  done({ source: read.ids, allowed: read.allowed, target: written.ids, tokens: written.tokens, temperature,
    values: Object.fromEntries(Object.entries(values).map(([name, { dims, data }]) => [name, [dims, [...data]]])) }));
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with the paper's post-LN that reverses letters, more or less."""
    found = make_letters_model(normalize_before=False, langs=["en", "de"])
    train_on_letters(found, tmp_path_factory.mktemp("letters"), reverse=True)
    found.generation_config.update(num_beams=4, length_penalty=0.6, length_penalty_type="gnmt", max_new_tokens=8)
    return found.eval()


@pytest.fixture(scope="module")
def page(model: Any, tmp_path_factory: pytest.TempPathFactory, scripts_directory: Path) -> Path:
    """What the command made of it."""
    packages = find_node_modules("@huggingface/transformers")
    folder = tmp_path_factory.mktemp("explainer")
    model.save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    main = runpy.run_path(str(scripts_directory / "export_model.py"))["main"]
    options = {"model_name_or_path": folder / "model", "format": "explainer", "output_dir": folder / "page"}
    options |= {"node_modules": packages}
    main([*(f"--{name}={value}" for name, value in options.items()), "--examples", WORD, "<b>c d</b>"])
    return folder / "page"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield Browser(driver)


@pytest.fixture
def server(page: Path, chromium: Browser) -> Iterator[PageServer]:
    with serve({"/": page}) as server:
        chromium.driver.get(f"{server.url}/?lang=en")
        chromium.wait_for(lambda: chromium.find_all("#main:not([hidden]) figure canvas"))
        yield server


def run_async(chromium: Browser, script: str) -> Any:
    chromium.driver.set_script_timeout(100)
    return chromium.driver.execute_async_script(script)


def change(chromium: Browser, name: str, value: Any) -> dict[str, Any]:
    """Sets one of the controls, and returns what the page shows once the model has run."""
    chromium.run("document.getElementById('status').textContent = ''")
    chromium.run(SET, name, value)
    chromium.wait_for(lambda: chromium.find("#status").text)
    return read_state(chromium)


def read_state(chromium: Browser) -> dict[str, Any]:
    state: dict[str, Any] = run_async(chromium, STATE)
    values = state["values"].items()
    state["values"] = {name: np.array(data, dtype=np.float32).reshape(dims) for name, (dims, data) in values}
    return state


def click_cell(chromium: Browser, name: str, across: float = 0.5, down: float = 0.5) -> None:
    canvas = chromium.find(f"figure[data-value='{name}'] canvas")
    chromium.run(
        "const [canvas, across, down] = arguments, box = canvas.getBoundingClientRect();"
        "canvas.dispatchEvent(new MouseEvent('click', { bubbles: true,"
        " clientX: box.left + across * box.width, clientY: box.top + down * box.height }))",
        canvas,
        across,
        down,
    )


def read_number(text: str) -> float:
    return float(text.replace("−", "-"))  # noqa: RUF001


def expect(model: Any, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What PyTorch has for what the page shows."""
    inputs = {"input_ids": state["source"], "attention_mask": state["allowed"], "decoder_input_ids": state["target"]}
    return watch(model, **{name: torch.tensor([ids]).long() for name, ids in inputs.items()})


def test_every_number_and_what_it_was_computed_from_is_pytorchs(
    model: Any, chromium: Browser, server: PageServer
) -> None:
    state = read_state(chromium)
    assert state["source"] == TOKENIZER(WORD).input_ids
    expected = expect(model, state)
    assert expected.keys() == state["values"].keys()
    for name, value in state["values"].items():
        np.testing.assert_allclose(value, expected[name][0].numpy(), atol=TOLERANCE, err_msg=name)
    weights = model.state_dict()
    explained = run_async(chromium, EXPLAIN_SOME)
    assert {each["name"] for each in explained} == expected.keys()
    for each in explained:
        exact = float(expected[each["name"]][0][tuple(each["index"])])
        assert each["value"] == pytest.approx(exact, abs=TOLERANCE), each
        assert each["computed"] == pytest.approx(exact, abs=TOLERANCE), each
        assert each["factors"] or each["name"].endswith(".positions")
        for factor in each["factors"]:
            if "weight" in factor:
                name, _, places = factor["weight"].rstrip("]").partition("[")
                original = float(weights[name][tuple(int(place) for place in places.split(","))])
            else:
                original = float(expected[factor["cell"]["name"]][0][tuple(factor["cell"]["index"])])
            assert factor["value"] == pytest.approx(original, abs=TOLERANCE)


def test_clicks_lead_from_number_to_number(model: Any, chromium: Browser, server: PageServer) -> None:
    chromium.run("for (const each of document.querySelectorAll('details')) each.open = true")
    expected = expect(model, read_state(chromium))
    figures = chromium.read_all("figure", "dataset.value")
    assert len(figures) == len(set(figures)) > 20
    assert {name.split(".")[-1] for name in figures} >= {"positions", "scores", "weights", "norm", "hidden"}
    for name in figures:
        click_cell(chromium, name, 0.4, 0.3)
        shown, computed = (
            float(chromium.find(f"#panel-body {each}").get_attribute("data-value")) for each in (".result", ".computed")
        )
        assert shown == pytest.approx(computed, abs=TOLERANCE)
        distance = (expected[name][0] - shown).abs().min()
        assert float(distance) < TOLERANCE, name
        texts = [read_number(text) for text in chromium.read_all("#panel-body .result", "textContent")]
        assert texts == pytest.approx([shown], abs=TOLERANCE)
    # What entered a hidden unit, and how a query and a key agree, stand below.
    for name, below in (
        ("encoder.0.ffn.hidden", "encoder.0.ffn.inner"),
        ("decoder.0.cross.weights", "decoder.0.cross.scores"),
    ):
        click_cell(chromium, name)
        origin = float(chromium.find("#panel-body h3 ~ .equation .computed").get_attribute("data-value"))
        assert float((expected[below][0] - origin).abs().min()) < TOLERANCE
        assert chromium.find_all("#panel-body h3 ~ .terms td")
    # From an attention weight to its score, from there to a query, and so on to the table of embeddings.
    click_cell(chromium, "encoder.0.self.weights")
    way = []
    for _ in range(5):
        way.append(chromium.find("#panel-body .of").text.split("›")[-1].strip())  # noqa: RUF001
        buttons = chromium.find_all("#panel-body button.number")
        if not buttons:
            break
        wanted = read_number(buttons[0].text)
        chromium.run("arguments[0].click()", buttons[0])
        assert read_number(chromium.find("#panel-body .result").text) == wanted
    assert way == ["Weights softmax(QKᵀ/√d_k)", "Scores QKᵀ/√d_k", "Queries Q", "Sum", "Embedding × √d_model"]  # noqa: RUF001
    chromium.find("#back").click()
    assert "Sum" in chromium.find("#panel-body .of").text


def test_the_tree_and_the_translations_are_those_of_the_search(
    model: Any, chromium: Browser, server: PageServer
) -> None:
    for beams in (4, 2, 1):
        change(chromium, "beams", beams)
        inputs = TOKENIZER(WORD, return_tensors="pt")
        options = {"num_beams": beams, "num_return_sequences": beams, "return_dict_in_generate": True}
        found = model.generate(**inputs, **options, output_scores=True)
        texts = TOKENIZER.batch_decode(found.sequences, skip_special_tokens=True)
        assert chromium.read_all("#beam-body .found button", "textContent") == texts
        assert chromium.find("#target").text == texts[0]
        if beams > 1:
            scores = [read_number(text) for text in chromium.read_all("#beam-body .found .quiet", "textContent")]
            assert scores == pytest.approx(found.sequences_scores.tolist(), abs=TOLERANCE)
        nodes = chromium.read_all("#beam-body .node.best", "textContent")
        assert len(nodes) == len(TOKENIZER(text_target=texts[0]).input_ids)
    assert not chromium.find_all("#beam-body .node.dropped")
    change(chromium, "beams", 4)
    chromium.find("#grow").click()
    assert chromium.find_all("#beam-body .node.later")
    assert not [step for step in chromium.read_all("#beam-body .node:not(.later)", "dataset.step") if int(step) > 1]
    chromium.wait_for(lambda: not chromium.find_all("#beam-body .later"))
    dropped = chromium.find_all("#beam-body .node.dropped")[-1]
    place = dropped.get_attribute("data-node")
    chromium.run("arguments[0].dispatchEvent(new MouseEvent('click', { bubbles: true }))", dropped)
    chromium.wait_for(lambda: chromium.find_all(f"#beam-body .node.followed[data-node='{place}']"))
    state = read_state(chromium)
    logits = expect(model, state)["logits"][0].log_softmax(dim=-1)
    score = sum(float(logits[step, token]) for step, token in enumerate(state["tokens"]))
    assert float(chromium.find("#panel-body .result").get_attribute("data-value")) == pytest.approx(
        score, abs=TOLERANCE
    )


def test_temperature_heads_layers_and_hidden_tokens_change_it(
    model: Any, chromium: Browser, server: PageServer
) -> None:
    state = read_state(chromium)
    chromium.find("#steps .chip").click()
    logits = expect(model, state)["logits"][0, 0]
    for temperature in ("1", "2.5", "0.4"):
        state = change(chromium, "temperature", temperature)
        bars = [read_number(text) for text in chromium.read_all("#softmax-body button.number", "textContent")]
        expected = (logits / float(temperature)).softmax(dim=-1).sort(descending=True).values
        assert bars == pytest.approx(expected[: len(bars)].tolist(), abs=TOLERANCE)
        assert state["temperature"] == float(temperature)
    change(chromium, "temperature", "1")
    # The first token of the search has the probability of the temperature.
    before = chromium.read_all("#beam-body .node title", "textContent")
    change(chromium, "temperature", "3")
    assert chromium.read_all("#beam-body .node title", "textContent") != before
    change(chromium, "temperature", "1")
    canvas = "figure[data-value='encoder.0.self.weights'] canvas"
    assert chromium.find(canvas).get_attribute("aria-label").endswith("Head 1")
    chromium.run("document.querySelectorAll('#encoder .head')[1].click()")
    assert chromium.find(canvas).get_attribute("aria-label").endswith("Head 2")
    chromium.run("document.querySelectorAll('#decoder-body > .group button')[1].click()")
    assert chromium.find_all("figure[data-value='decoder.1.cross.weights']")
    chromium.run("document.querySelectorAll('#tokens .chip')[1].click()")
    chromium.wait_for(lambda: chromium.read_all("#tokens .chip", "ariaPressed").count("true") == 1)
    state = read_state(chromium)
    assert state["allowed"] == [True, False, *[True] * (len(state["source"]) - 2)]
    assert not state["values"]["encoder.0.self.weights"][..., 1].any()
    expected_values = expect(model, state)
    for name, value in state["values"].items():
        np.testing.assert_allclose(value, expected_values[name][0].numpy(), atol=TOLERANCE, err_msg=name)
    state = change(chromium, "source", "f")
    assert all(state["allowed"])
    change(chromium, "source", " ")
    assert chromium.find_all("#main[hidden]")
    state = change(chromium, "source", "a" * 50)
    assert len(state["source"]) == 32
    assert "only its beginning" in chromium.find("#status").text


def test_it_is_used_by_keyboard(chromium: Browser, server: PageServer) -> None:
    canvas = chromium.find("figure[data-value='encoder.0.self.weights'] canvas")
    chromium.run("arguments[0].focus()", canvas)
    canvas.send_keys(KEYS["Right"], KEYS["Down"], KEYS["Down"])
    cell = chromium.find(f"#{canvas.get_attribute('aria-activedescendant')}")
    assert [cell.get_attribute(f"aria-{name}index") for name in ("row", "col")] == ["3", "2"]
    canvas.send_keys(KEYS["Enter"])
    tokens = chromium.read_all("#tokens .chip b", "textContent")
    where = f"Head 1: “{tokens[2]}” looks at “{tokens[1]}”"
    assert chromium.find("#panel-body h2").text == where
    assert where in chromium.find("#told").get_attribute("textContent")
    number = chromium.find("#panel-body button.number")
    number.send_keys(KEYS["Enter"])
    assert chromium.driver.switch_to.active_element.get_attribute("id") == "panel-title"
    chromium.driver.switch_to.active_element.send_keys(KEYS["Escape"])
    assert not chromium.find_all("#panel-body .result")
    node = chromium.find("#beam-body .node[tabindex='0']")
    chromium.run("arguments[0].focus()", node)
    step = int(node.get_attribute("aria-label").split()[1].rstrip(":"))
    node.send_keys(KEYS["Left"])
    moved = chromium.driver.switch_to.active_element
    assert int(moved.get_attribute("aria-label").split()[1].rstrip(":")) == step - 1
    moved.send_keys(KEYS["Enter"])
    chromium.wait_for(lambda: chromium.find_all("#panel-body .result"))
    chip = chromium.find("#steps .chip")
    chip.send_keys(KEYS["Enter"])
    assert chromium.driver.switch_to.active_element.get_attribute("aria-pressed") == "true"


def test_all_that_can_be_used_has_a_name(chromium: Browser, server: PageServer) -> None:
    chromium.run("for (const each of document.querySelectorAll('details')) each.open = true")
    click_cell(chromium, "encoder.0.ffn.norm")
    tree = chromium.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"button", "grid", "link", "textbox", "combobox", "slider", "region", "navigation", "complementary"}
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert roles - {"region"} <= {role for role, _ in named}
    assert [role for role, name in named if not name.strip()] == []


def read_texts(language: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((FILES / f"texts.{language}.json").read_text(encoding="utf-8"))
    return found


def test_both_languages_say_everything(chromium: Browser, server: PageServer) -> None:
    english, chinese = read_texts("en"), read_texts("zh")
    assert list(english) == list(chinese)
    for key, text in english.items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", chinese[key])), key
        assert text.count("|") == chinese[key].count("|")
    assert not {key for key, text in chinese.items() if text == english[key]} - {"value.logits", "columns.norm"}
    chromium.run("for (const each of document.querySelectorAll('details')) each.open = true")
    click_cell(chromium, "decoder.0.cross.weights")
    chromium.run("document.querySelector('[data-language=zh]').click()")
    chromium.wait_for(lambda: chromium.find("h1").text == chinese["title"])
    assert chromium.run("return document.documentElement.lang") == "zh-Hans"
    chromium.wait_for(lambda: chinese["operation.softmax"] in chromium.find("#panel-body").text)
    shown = chromium.find("body").text
    assert [text for text in english.values() if len(text) > 20 and "{" not in text and text in shown] == []
    chromium.run("document.querySelector('[data-language=en]').click()")
    chromium.wait_for(lambda: chromium.find("h1").text == english["title"])


def test_nothing_is_fetched_from_elsewhere(page: Path, chromium: Browser, server: PageServer) -> None:
    change(chromium, "source", "cab")
    names = chromium.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert names
    assert all(name.startswith(server.url) for name in names)
    policy = chromium.run("return document.querySelector('meta[http-equiv]').content")
    assert "default-src 'none'" in policy and "http" not in policy  # noqa: PT018
    assert not [entry for entry in chromium.driver.get_log("browser") if entry["level"] == "SEVERE"]
    worker = (page / "service-worker.js").read_text()
    assert all(f'"{name}"' in worker for name in explaining.OWN_FILES)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_can_be_read_in_both_themes(chromium: Browser, server: PageServer, theme: str) -> None:
    chromium.run("for (const each of document.querySelectorAll('details')) each.open = true")
    click_cell(chromium, "encoder.0.self.query")
    ratios, paper = chromium.read_contrasts(theme)
    assert len(ratios) > 100
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
    assert (int(paper.split("(")[1].split(",")[0]) < 128) == (theme == "dark")


def luminance(color: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-relative-luminance."""
    digits = color * 2 if len(color) == 3 else color
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_of_pictures_can_be_told_apart() -> None:
    style = (FILES / "explainer.css").read_text(encoding="utf-8")
    found = {name: pair for name, *pair in re.findall(r"--(\w+): light-dark\(#(\w+), #(\w+)\);", style)}
    assert len(found) == 12
    for theme in (0, 1):
        light = {name: luminance(pair[theme]) for name, pair in found.items()}

        def contrast(a: str, b: str, light: dict[str, float] = light) -> float:
            return (max(light[a], light[b]) + 0.05) / (min(light[a], light[b]) + 0.05)

        # Texts: 4.5; what pictures are understood by: 3 (WCAG 2.1, AA, 1.4.3 and 1.4.11).
        for background in ("panel", "paper", "chosen"):
            assert min(contrast(text, background) for text in ("ink", "quiet", "strong")) >= 4.5
        assert contrast("wrong", "panel") >= 4.5
        for line in ("positive", "negative", "mark", "best", "strong"):
            assert contrast(line, "panel") >= 3, (line, theme)


@pytest.mark.parametrize(("width", "height"), [(360, 740), (820, 1100), (1400, 900)])
def test_it_fits_the_screen(chromium: Browser, server: PageServer, width: int, height: int) -> None:
    with chromium.screen(width, height, mobile=width < 500):
        change(chromium, "source", "abcdefghabcdefghabc")
        chromium.run("for (const each of document.querySelectorAll('details')) each.open = true")
        wide = chromium.run(
            "return [...document.querySelectorAll('figure, section > p')].filter((each) =>"
            " each.getBoundingClientRect().right > each.closest('section').getBoundingClientRect().right)"
            ".map((each) => each.outerHTML.slice(0, 90))"
        )
        assert wide == []
        assert chromium.run("return document.documentElement.scrollWidth") <= width
        if width < 900:
            assert not chromium.find("#panel").is_displayed()
            click_cell(chromium, "encoder.0.self.weights")
            assert chromium.find("#panel").is_displayed()
            chromium.find("#close").click()
            assert not chromium.find("#panel").is_displayed()
