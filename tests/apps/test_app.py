"""The page: its arguments, its process, as a Space has it, its API, and itself in a real browser."""

import importlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import chromium
import pytest
from chromium import PATIENCE
from letters import TOKENIZER, make_letters_model, train_on_letters

from vanilla_transformer.apps.answers import DemoError, DemoModel, Settings, translate_text
from vanilla_transformer.apps.page import build_page, for_people, import_gradio
from vanilla_transformer.apps.shelf import ModelShelf
from vanilla_transformer.apps.spaces import save_space
from vanilla_transformer.tasks import TASKS, record_task

# Goes before the guard that keeps tests off the network, and so hears of what that forbids, too.
LISTENER = """
import runpy, sys
hosts = open({hosts!r}, "a", buffering=1)
sys.addaudithook(lambda event, arguments: event == "socket.getaddrinfo" and print(arguments[0], file=hosts))
runpy.run_path({guard!r})
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Saved models: one has learnt to write letters backwards, another is untrained, and a third is for summaries."""
    root = tmp_path_factory.mktemp("models")
    models = {name: make_letters_model() for name in ("backwards", "untrained", "summaries")}
    record_task(models["summaries"].config, TASKS["summarization"], prefix="a")
    train_on_letters(models["backwards"], root / "training", reverse=True)
    for name, model in models.items():
        model.save_pretrained(root / name)
        TOKENIZER.save_pretrained(root / name)
    return {name: str(root / name) for name in models}


class TestArguments:
    @pytest.fixture
    def app(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        for name in ("MODEL_NAME_OR_PATH", "SPACE_ID", "GRADIO_SERVER_NAME"):
            monkeypatch.delenv(name, raising=False)
        return importlib.import_module("vanilla_transformer.commands.app")

    def test_let_others_load_models_only_where_that_is_wanted(self, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        assert app.AppArguments().others == "any"
        assert app.AppArguments("m", server_name="localhost").others == "any"
        assert app.AppArguments("m", server_name="0.0.0.0").others == "none"
        assert app.AppArguments("m", server_name="0.0.0.0", other_models="hub").others == "hub"
        assert app.AppArguments("m", share=True).others == "none"
        monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
        assert app.AppArguments("m").others == "none"
        with pytest.raises(ValueError, match="no model to show"):
            app.AppArguments()
        monkeypatch.delenv("GRADIO_SERVER_NAME")
        monkeypatch.setenv("SPACE_ID", "someone/space")
        monkeypatch.setenv("MODEL_NAME_OR_PATH", "someone/model")
        arguments = app.AppArguments()
        assert (arguments.model_name_or_path, arguments.others) == ("someone/model", "none")

    def test_that_are_wrong_are_named(self, app: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "latin.txt").write_bytes("gut\nschön\n".encode("latin-1"))
        for arguments, message in (
            (["--examples", str(tmp_path / "latin.txt")], "latin.txt, line 2"),
            (["--model_name_or_path", "/no/such/model"], "There is no folder /no/such/model."),
            (["--max_source_tokens", "0"], "max_source_tokens is 0"),
            (["--examples", str(tmp_path / "none.txt")], "none.txt"),
        ):
            with pytest.raises(SystemExit):
                app.main(arguments)
            assert message in capsys.readouterr().err

    def test_what_is_wrong_with_the_model_is_told_at_length(
        self, app: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(app, "show", Mock(side_effect=DemoError("It is broken.", whole="All that is broken")))
        with pytest.raises(SystemExit):
            app.main(["--model_name_or_path", "m"])
        assert "All that is broken" in capsys.readouterr().err


def test_missing_gradio_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ImportError, match=r"vanilla-transformer\[demo\]"):
        build_page(ModelShelf(None, others="any"))


@pytest.fixture(scope="module")
def gradio() -> Any:
    try:
        return import_gradio()
    except ImportError:
        pytest.skip("the page needs Gradio: the extra [demo]")


@dataclass
class Server:
    """A Space in a process of its own, the model that it shows, and the hosts that it looked up."""

    address: str
    demo: DemoModel
    hosts: Path


@pytest.fixture(scope="module")
def server(
    gradio: Any, folders: dict[str, str], repository_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("server")
    guard = repository_root / "tests" / "support" / "network_guard" / "sitecustomize.py"
    (root / "sitecustomize.py").write_text(LISTENER.format(hosts=str(root / "hosts.txt"), guard=str(guard)))
    given: Any = {"examples": ["abcd", "hgf"], "options": ["--other_models=any"]}
    space = save_space(root / "space", model_name_or_path=folders["backwards"], **given)
    own = space / "vanilla_transformer" / "visualization" / "page.html"
    own.write_text(own.read_text(encoding="utf-8").replace("<h1>", "<h1>Of the Space: "), encoding="utf-8")
    command = [sys.executable, str(space / "app.py")]
    hosted = {"PYTHONPATH": str(root), "SPACE_ID": "someone/space", "GRADIO_SERVER_NAME": "127.0.0.1"}
    options: Any = {"text": True, "cwd": root, "env": {**os.environ, **hosted}}
    with (
        open(root / "errors.txt", "w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, **options) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = next((word for word in line.split() if word.startswith("http://127.0.0.1:")), "nowhere")
            assert line == f"The page is at {address} (Ctrl-C ends it)\n", (root / "errors.txt").read_text()
            shelf = ModelShelf(folders["backwards"])
            yield Server(address, shelf.get(shelf.name), root / "hosts.txt")
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=PATIENCE)[0] == "The page is closed.\n"
            assert process.returncode == 0
            assert "Traceback" not in (root / "errors.txt").read_text()
        finally:
            process.kill()


def show_rows(demo: DemoModel, text: str, num_beams: int) -> list[list[Any]]:
    translations = translate_text(demo, text, replace(demo.settings, num_beams=num_beams)).translations
    scores = ["" if score is None else round(score, 4) for _, score in translations]
    return [[rank, score, text] for rank, score, (text, _) in zip(count(1), scores, translations, strict=False)]


@pytest.fixture(scope="module")
def clients(server: Server) -> list[Any]:
    client = importlib.import_module("gradio_client").Client
    return [client(server.address, verbose=False, analytics_enabled=False) for _ in range(2)]


class TestApi:
    def test_translates(self, server: Server, clients: list[Any]) -> None:
        client = clients[0]
        translation, table, note, attention = client.predict("abcd", api_name="/translate")
        assert (translation, table["headers"]) == ("dcba", ["Rank", "Score", "Translation"])
        assert table["data"] == show_rows(server.demo, "abcd", num_beams=4)
        assert "seconds" in note
        assert 'sandbox="allow-scripts"' in attention
        assert "Of the Space: Where the model looks" in attention, "it is not the Space's own package"
        assert client.predict("abcd", 1, api_name="/translate")[1]["data"] == [[1, "", "dcba"]]
        assert client.predict("ab\n\ncde", api_name="/translate")[0] == "ba\n\nedc"

        assert set(client.view_api(return_format="dict")["named_endpoints"]) == {"/translate"}

    def test_answers_everybody_with_their_own(self, clients: list[Any]) -> None:
        texts = ["ab", "cd", "ef", "gh", "ha"]
        jobs = [clients[index % 2].submit(text, api_name="/translate") for index, text in enumerate(texts)]
        assert [job.result(timeout=PATIENCE)[0] for job in jobs] == [text[::-1] for text in texts]

    def test_says_what_is_wrong_with_a_request(self, clients: list[Any]) -> None:
        with pytest.raises(Exception, match="There is no text yet") as caught:
            clients[0].predict(None, api_name="/translate")
        assert "Traceback" not in str(caught.value)


def test_errors_of_the_program_stay_in_the_log(gradio: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(error: Exception) -> None:
        raise error

    for error, message in (
        (KeyError("secret"), "The program failed (KeyError); its log says where."),
        (DemoError("no <model>"), "no &lt;model&gt;"),
        (DemoError("one\ntwo", whole="one\ntwo\nthree"), "one<br>two"),
    ):
        with pytest.raises(gradio.Error) as caught:
            for_people(fail)(error)
        assert caught.value.message == message
    assert all(word in caplog.text for word in ("secret", "three"))


class Browser(chromium.Browser):
    def write(self, selector: str, text: str) -> None:
        box = self.find(selector)
        box.clear()
        box.send_keys(text)

    def load(self, name: str) -> None:
        self.write("#model textarea, #model input", name)
        self.find("#model .submit-button").click()

    def translate(self, text: str) -> None:
        self.write("#text textarea", text)
        self.find("#translate").click()

    @contextmanager
    def frame(self) -> Iterator[None]:
        self.driver.switch_to.frame(self.find("#attention iframe"))
        try:
            yield
        finally:
            self.driver.switch_to.default_content()

    def read_translation(self) -> str:
        return "".join(self.read_all("#translation textarea", "value"))

    def read_rows(self) -> list[list[str]]:
        cells = self.read_all("#n-best [role=gridcell]", "innerText")
        return [cells[start : start + 3] for start in range(0, len(cells), 3)]

    def read_error(self) -> str:
        toast = self.find(".toast-body")
        self.wait_for(lambda: toast.text)
        text = str(toast.text)
        self.find(".toast-close").click()
        self.wait_for(lambda: not self.find_all(".toast-body"))
        return text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium.open_chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield Browser(driver)


class TestBrowser:
    def test_person_translates_without_the_internet(self, server: Server, browser: Browser) -> None:
        browser.driver.get(server.address)
        browser.translate("abcd")
        browser.wait_for(lambda: browser.read_translation() == "dcba")
        expected = [[str(cell) for cell in row] for row in show_rows(server.demo, "abcd", num_beams=4)]
        browser.wait_for(lambda: browser.read_rows() == expected)

        browser.write("#beams input[type=number]", "2")
        browser.find("#translate").click()
        expected = [[str(cell) for cell in row] for row in show_rows(server.demo, "abcd", num_beams=2)]
        browser.wait_for(lambda: browser.read_rows() == expected)

        browser.find_all("#examples button")[1].click()
        browser.wait_for(lambda: browser.read_translation() == "fgh")
        assert browser.read_all("#text textarea", "value") == ["hgf"]

        browser.find("#attention iframe")
        loaded = browser.run("return performance.getEntriesByType('resource').map((it) => it.name)")
        assert loaded
        assert all(name.startswith(server.address) for name in loaded), loaded
        assert not [entry for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def test_person_reads_what_is_wrong_and_nothing_of_the_text_before(self, server: Server, browser: Browser) -> None:
        browser.driver.get(server.address)
        browser.find("#translate").click()
        assert "There is no text yet" in browser.read_error()
        browser.translate("abcd")
        with browser.frame():
            assert (browser.find("#source").text, browser.find("#target").text) == ("abcd", "dcba")
            assert browser.find("#lines line")
        browser.translate("a" * 130)
        assert "tokens; 128 are the most" in browser.read_error()
        assert browser.read_translation() == ""
        assert not any("".join(row) for row in browser.read_rows())
        assert "seconds" not in browser.find("#note").text
        assert not browser.find_all("#attention iframe")
        browser.translate("abc")
        browser.wait_for(lambda: browser.read_translation() == "cba")

    def test_text_runs_in_the_direction_of_its_script(self, server: Server, browser: Browser) -> None:
        browser.driver.get(server.address)
        browser.translate("abcd")
        browser.wait_for(browser.read_rows)
        for part in ("#text textarea", "#translation textarea"):
            style = f"const style = getComputedStyle(document.querySelector({part!r}));"
            assert browser.run(f"{style} return [style.unicodeBidi, style.textAlign]") == ["plaintext", "start"]
        # Of what is not in a box, the places of its letters tell; the model does not know these.
        write = """
            const leaf = document.querySelector(arguments[0]), range = document.createRange();
            leaf.textContent = arguments[1];
            return [0, arguments[1].length - 1].map((index) => {
              range.setStart(leaf.firstChild, index);
              range.setEnd(leaf.firstChild, index + 1);
              return range.getBoundingClientRect().left;
            })"""
        for leaf in ("#n-best [role=gridcell]:nth-child(3) span", "#examples button *"):
            first, last = browser.run(write, leaf, "\u05d0\u05d1 abc.")
            assert first > last, leaf
            first, last = browser.run(write, leaf, "abc.")
            assert first < last, leaf
        # And headings stand above their columns.
        places = """return ["columnheader", "gridcell"].map((role) =>
            [...document.querySelectorAll(`#n-best [role=${role}]`)].slice(0, 3).map((cell) => {
              const { left, right } = cell.getBoundingClientRect();
              return [Math.round(left), Math.round(right)];
            }))"""
        headings, cells = browser.run(places)
        assert headings == cells
        rank, score, translation = ([right - left] for left, right in cells)
        assert rank < score < translation

    def test_page_fits_a_phone(self, server: Server, browser: Browser) -> None:
        with browser.screen(390, 844, mobile=True):
            browser.driver.get(server.address)
            browser.translate("abcd")
            browser.wait_for(browser.read_rows)
            assert browser.run("return document.documentElement.scrollWidth - innerWidth") == 0
            # No number is broken, and the table needs no scrolling.
            lines = """return [...document.querySelectorAll(
                "#n-best [role=gridcell]:nth-child(-n + 2) span, #n-best [role=columnheader] span"
            )].map((cell) => new Set([...Array(cell.firstChild?.length ?? 0).keys()].map((index) => {
                const range = document.createRange();
                range.setStart(cell.firstChild, index);
                range.setEnd(cell.firstChild, index + 1);
                return range.getBoundingClientRect().top;
            })).size)"""
            assert max(browser.run(lines)) == 1
            table = "const table = document.querySelector('#n-best .virtual-table-viewport');"
            assert browser.run(f"{table} return table.scrollWidth - table.clientWidth") <= 0
            with browser.frame():
                sides = "const root = document.documentElement, map = document.querySelector('.map');"
                browser.wait_for(lambda: browser.run(f"{sides} return root.scrollHeight <= innerHeight"))
                widths = f"{sides} return [root.scrollWidth - innerWidth, map.scrollWidth - map.clientWidth]"
                assert browser.run(widths) == [0, 0]

    def test_attention_has_the_theme_of_the_page(self, server: Server, browser: Browser) -> None:
        def read_theme() -> list[Any]:
            with browser.frame():
                background = "getComputedStyle(document.body).backgroundColor"
                return list(browser.run(f"return [document.documentElement.dataset.theme, {background}]"))

        browser.driver.get(f"{server.address}?__theme=dark")
        browser.translate("abcd")
        browser.wait_for(lambda: read_theme()[0] == "dark")
        assert read_theme()[1] == "rgb(17, 17, 19)"
        browser.run("document.body.classList.remove('dark')")
        browser.wait_for(lambda: read_theme() == ["light", "rgb(255, 255, 255)"])

    def test_page_speaks_of_the_task(self, server: Server, browser: Browser, folders: dict[str, str]) -> None:
        browser.driver.get(server.address)
        assert browser.find("#translate").text == "Translate"
        browser.find("#model-settings button").click()
        browser.load(folders["summaries"])
        browser.wait_for(lambda: browser.find("#translate").text == "Summarize")
        assert browser.find("h1").text == "Summarize, and see where the model looks"
        assert browser.find("#translation").text.startswith("Summary")
        assert browser.read_all("#prefix textarea, #prefix input", "value") == ["a"]
        assert "Shift+Enter to summarize it" in browser.find("#text textarea").get_attribute("placeholder")
        browser.translate("ab\ncd")
        browser.wait_for(browser.read_rows)
        shelf = ModelShelf(folders["summaries"])
        demo = shelf.get(shelf.name)
        expected = translate_text(demo, "ab\ncd", demo.settings).translations[0].text
        assert browser.read_translation() == expected
        assert "Summary" in browser.read_all("#n-best [role=columnheader]", "innerText")[-1]

    def test_models_of_two_people_do_not_mix(self, server: Server, browser: Browser, folders: dict[str, str]) -> None:
        driver = browser.driver
        driver.get(server.address)
        browser.translate("abc")
        browser.wait_for(lambda: browser.read_translation() == "cba")
        first = driver.current_window_handle
        driver.switch_to.new_window("tab")
        driver.get(server.address)
        browser.find("#model-settings button").click()
        browser.load("nobody/nothing")
        assert "no model of that name could be loaded from the Hub" in browser.read_error()
        browser.load(folders["untrained"])
        browser.wait_for(lambda: "is loaded" in browser.find("#loaded").text)
        browser.translate("abc")
        shelf = ModelShelf(folders["untrained"])
        expected = translate_text(shelf.get(shelf.name), "abc", Settings()).translations[0].text
        browser.wait_for(lambda: browser.read_rows())
        assert browser.read_translation() == expected != "cba"
        driver.close()
        driver.switch_to.window(first)
        browser.translate("def")
        browser.wait_for(lambda: browser.read_translation() == "fed")


def test_nobody_is_told_about_it(server: Server) -> None:
    assert set(server.hosts.read_text().split()) == {"127.0.0.1"}


class TestWhatThePageTells:
    def test_where_the_model_lies_is_not_told(self, server: Server) -> None:
        for place in ("", "config"):
            with urllib.request.urlopen(f"{server.address}{place}", timeout=PATIENCE) as answer:
                text = answer.read().decode()
            assert ": vanilla_transformer, " in text
            assert str(server.hosts.parent) not in text

    def test_files_are_not_taken(self, server: Server) -> None:
        head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
        body = head + b"a" * 99 + b"\r\n--x--\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        request = urllib.request.Request(f"{server.address}gradio_api/upload", body, kind)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=PATIENCE)
        with caught.value as refused:
            assert refused.code == 413
