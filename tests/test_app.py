"""The page of scripts/app.py: the functions behind it, its API, its process, and itself in a real browser."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import TOKENIZER, make_letters_model, train_on_letters
from library_models import MODELS, make_m2m100, make_nllb_tokenizer, make_t5, make_tokenizer
from transformers import LlamaConfig

from vanilla_transformer.demo import (
    MAX_BEAMS,
    DemoError,
    DemoModel,
    ModelShelf,
    Settings,
    find_examples,
    translate_text,
)
from vanilla_transformer.demo_page import build_page, for_people, import_gradio
from vanilla_transformer.numbers_and_dates import numbers_and_dates

TEXT = "alpha delta echo papa"
LANGUAGES = ("eng_Latn", "deu_Latn", "fra_Latn")
# As root, Chromium must do without its sandbox; the others keep it from looking for anything outside.
BROWSER_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1400,1000"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PATIENCE = 30  # seconds, on a busy machine
# Goes before the guard that keeps tests off the network, and so hears of what that forbids, too.
LISTENER = """
import runpy, sys
hosts = open({hosts!r}, "a", buffering=1)
sys.addaudithook(lambda event, arguments: event == "socket.getaddrinfo" and print(arguments[0], file=hosts))
runpy.run_path({guard!r})
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two saved models, of which the first has learnt to write letters backwards."""
    root = tmp_path_factory.mktemp("models")
    models = {"backwards": make_letters_model(), "untrained": make_letters_model()}
    train_on_letters(models["backwards"], root / "training", reverse=True)
    for name, model in models.items():
        model.save_pretrained(root / name)
        TOKENIZER.save_pretrained(root / name)
    return {name: str(root / name) for name in models}


def make_nllb() -> DemoModel:
    tokenizer = make_nllb_tokenizer()
    model = make_m2m100(len(tokenizer))
    model.generation_config.max_new_tokens = 6
    return DemoModel("nllb", model, tokenizer)


class TestTranslation:
    @pytest.mark.parametrize("kind", MODELS)
    @pytest.mark.parametrize("num_beams", [1, 3])
    def test_is_what_generate_gives(self, kind: str, num_beams: int) -> None:
        model, tokenizer = MODELS[kind](), make_tokenizer()
        model.generation_config.max_new_tokens = 12
        answer = translate_text(
            DemoModel(kind, model, tokenizer), f" alpha\n{TEXT} ", Settings(num_beams=num_beams, length_penalty=0.3)
        )

        options: dict[str, Any] = {"length_penalty": 0.3} if num_beams > 1 else {}
        options |= {"num_beams": num_beams, "num_return_sequences": num_beams}
        options |= {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 12}
        with torch.no_grad():
            expected = model.generate(**tokenizer(f"alpha {TEXT}", return_tensors="pt"), **options)
        texts = tokenizer.batch_decode(expected.sequences, skip_special_tokens=True)
        assert [translation.text for translation in answer.translations] == texts
        if num_beams == 1:
            assert answer.translations[0].score is None
        else:
            scores = torch.tensor([translation.score for translation in answer.translations])
            torch.testing.assert_close(scores, expected.sequences_scores)
            assert scores.tolist() == sorted(scores.tolist(), reverse=True)

    def test_of_a_model_without_a_limit_is_not_cut_off_after_twenty_tokens(self) -> None:
        model = make_t5()
        model.generation_config.eos_token_id = None
        answer = translate_text(DemoModel("t5", model, make_tokenizer()), TEXT, Settings(num_beams=1))
        assert len(answer.translations[0].text.split()) > 100

    def test_puts_the_prefix_before_the_text(self) -> None:
        demo = DemoModel("t5", make_t5(), make_tokenizer())
        assert demo.settings.source_prefix == "alpha bravo "
        with_prefix = translate_text(demo, TEXT, Settings(source_prefix="golf hotel "))
        written_out = translate_text(demo, f"golf hotel {TEXT}", Settings())
        assert with_prefix.translations == written_out.translations
        assert with_prefix.attention is not None
        assert len(with_prefix.attention.source) == len(TEXT.split()) + 3

    def test_comes_with_the_attention_of_the_best_one(self) -> None:
        model, tokenizer = make_letters_model(), TOKENIZER
        answer = translate_text(DemoModel("letters", model, tokenizer), "abcdefg", Settings(num_beams=2))
        attention = answer.attention
        assert attention is not None
        assert attention.target_text == answer.translations[0].text
        assert "".join(attention.source).strip("▁") == "abcdefg</s>"

    def test_of_a_long_text_comes_without_attention(self, monkeypatch: pytest.MonkeyPatch) -> None:
        demo = DemoModel("letters", make_letters_model(), TOKENIZER)
        attention = translate_text(demo, "abcdefg", Settings(num_beams=1)).attention
        assert attention is not None
        size = attention.encoder.size + attention.decoder.size + attention.cross.size
        monkeypatch.setattr("vanilla_transformer.demo.MAX_MAP_WEIGHTS", size)
        assert translate_text(demo, "abcdefg", Settings(num_beams=1)).attention is not None
        monkeypatch.setattr("vanilla_transformer.demo.MAX_MAP_WEIGHTS", size - 1)
        answer = translate_text(demo, "abcdefg", Settings(num_beams=1))
        assert answer.attention is None
        assert answer.note == "The text is too long for its attention to be shown."

    def test_languages_of_several_people_do_not_mix(self) -> None:
        nllb = make_nllb()
        pairs = [(source, target) for source in LANGUAGES for target in LANGUAGES]
        requests = [
            ("xyz dog", Settings(num_beams=2, source_lang=source, target_lang=target)) for source, target in pairs
        ]
        alone = [translate_text(nllb, *request).translations for request in requests]
        assert len(set(alone)) > len(LANGUAGES)
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda request: translate_text(nllb, *request).translations, requests))
        assert together == alone

    def test_says_what_is_wrong_with_a_request(self) -> None:
        nllb = make_nllb()
        pair = {"source_lang": "eng_Latn", "target_lang": "deu_Latn"}
        for text, changes, message in (
            (" \n", pair, "nothing to translate"),
            ("abc", {**pair, "num_beams": 0}, f"it must be 1 to {MAX_BEAMS}"),
            ("abc", {**pair, "num_beams": MAX_BEAMS + 1}, f"it must be 1 to {MAX_BEAMS}"),
            ("abc", {"source_lang": "eng_Latn"}, "many languages"),
            ("abc", {**pair, "target_lang": "klingon"}, "'klingon', which NllbTokenizer does not know"),
            ("abc", {**pair, "max_source_tokens": 4}, "has 6 tokens; 4 are the most"),
        ):
            with pytest.raises(DemoError, match=message):
                translate_text(nllb, text, Settings(**changes))

    def test_starts_with_the_models_own_settings(self) -> None:
        nllb = make_nllb()
        before = nllb.settings
        translate_text(nllb, "abc", Settings(source_lang="fra_Latn", target_lang="deu_Latn"))
        assert nllb.settings == before == Settings(source_lang="eng_Latn")
        assert nllb.languages == sorted(LANGUAGES)
        model = make_letters_model()
        model.generation_config.num_beams, model.generation_config.length_penalty = 7, 0.6
        demo = DemoModel("letters", model, TOKENIZER)
        assert (demo.settings.num_beams, demo.settings.length_penalty, demo.languages) == (7, 0.6, [])
        model.config.langs = ["en", "de"]
        assert demo.summary == f"vanilla_transformer, en to de, {model.num_parameters():,} parameters, on cpu"


class TestShelf:
    def test_loads_a_model_once_and_gives_up_the_one_not_used_for_longest(self, folders: dict[str, str]) -> None:
        shelf = ModelShelf(folders["untrained"], others="any", size=2)
        with ThreadPoolExecutor(3) as pool:
            first, *same = pool.map(shelf.get, [folders["untrained"]] * 3)
        assert all(demo is first for demo in same)
        other = shelf.get(folders["backwards"])
        assert shelf.get(f" {folders['untrained']} ") is first
        third = shelf.get(folders["backwards"] + "/")
        assert shelf.get(folders["untrained"]) is first
        assert shelf.get(folders["backwards"] + "/") is third
        assert shelf.get(folders["backwards"]) is not other

    def test_loads_for_people_only_what_they_may_have(self, folders: dict[str, str]) -> None:
        with pytest.raises(ValueError, match="no model to show"):
            ModelShelf(None, others="none")
        shelf = ModelShelf(folders["untrained"], others="none")
        assert shelf.get(folders["untrained"]).name == folders["untrained"]
        with pytest.raises(DemoError, match="loads no other"):
            shelf.get(folders["backwards"])
        shelf = ModelShelf(folders["untrained"], others="hub")
        for name in (folders["backwards"], os.path.relpath(folders["backwards"]), "../untrained", "tests", "~/model"):
            with pytest.raises(DemoError, match="by their names on the Hub"):
                shelf.get(name)
        with pytest.raises(DemoError, match=r"'nobody/nothing' could not be loaded from the Hub\. \w"):
            shelf.get("nobody/nothing")

    def test_says_why_a_model_cannot_be_loaded(self, tmp_path: Path) -> None:
        shelf = ModelShelf(None, others="any")
        LlamaConfig().save_pretrained(tmp_path / "llama")
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "config.json").write_text("{nonsense")
        for name, message in (
            ("", "There is no model yet"),
            (str(tmp_path / "llama"), "is a llama model; this page needs an encoder-decoder model"),
            (str(tmp_path), "could not be loaded. Unrecognized model"),
            (str(tmp_path / "broken"), "could not be loaded. .*not a valid JSON file"),
            ("two words", "'two words' could not be loaded from the Hub"),
        ):
            with pytest.raises(DemoError, match=message) as caught:
                shelf.get(name)
            assert "\n" not in str(caught.value)

    def test_runs_code_of_the_first_model_only(self, tmp_path: Path) -> None:
        folder = tmp_path / "strange"
        folder.mkdir()
        ran = tmp_path / "ran"
        config = {"model_type": "strange", "auto_map": {"AutoConfig": "strange_code.Strange"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "strange_code.py").write_text(f"open({str(ran)!r}, 'w').close()\nStrange = None\n")
        with pytest.raises(DemoError, match="could not be loaded"):
            ModelShelf(None, others="any", trust_remote_code=True).get(str(folder))
        assert not ran.exists()
        with pytest.raises(DemoError, match="could not be loaded"):
            ModelShelf(str(folder), trust_remote_code=True).get(str(folder))
        assert ran.exists()


class TestExamples:
    def test_suit_the_model(self, tmp_path: Path) -> None:
        nllb = make_nllb()
        model = make_letters_model()
        record = tmp_path / "arguments.json"

        def find(data: Any) -> tuple[str, ...]:
            record.write_text(json.dumps(data))
            return find_examples(str(tmp_path), model, TOKENIZER)

        corpus = numbers_and_dates(split="test", source_lang="fr", target_lang="en")["source"]
        found = find({"data": {"builtin_corpus": True, "source_lang": "fr", "target_lang": "en"}})
        assert len(found) == 5
        assert set(found) <= set(corpus)
        assert find({"data": {"source_lang": "fr"}})[0].startswith("Un homme")
        unknown = {"builtin_corpus": True, "source_lang": "fr", "target_lang": "xx"}
        assert find({"data": unknown})[0].startswith("Un homme")
        assert find({"data": {"source_lang": "tlh"}}) == ()
        strange: list[Any] = [None, [], {"data": "x"}]
        for damaged in strange:
            assert find(damaged)[0].startswith("A man")
        record.write_text("{nonsense")
        model.config.langs = ["zh", "en"]
        assert find_examples(str(tmp_path), model, TOKENIZER)[0].startswith("他")
        assert find_examples(str(tmp_path), nllb.model, nllb.tokenizer)[0].startswith("A man")

    def test_may_be_given(self, folders: dict[str, str]) -> None:
        shelf = ModelShelf(folders["untrained"], examples=["abc", "def"])
        assert shelf.get(folders["untrained"]).examples == ("abc", "def")
        assert ModelShelf(folders["untrained"]).get(folders["untrained"]).examples[0].startswith("A man")


class TestArguments:
    @pytest.fixture
    def app(self, monkeypatch: pytest.MonkeyPatch, scripts_directory: Path) -> Any:
        monkeypatch.syspath_prepend(scripts_directory)
        for name in ("MODEL_NAME_OR_PATH", "SPACE_ID", "GRADIO_SERVER_NAME"):
            monkeypatch.delenv(name, raising=False)
        return importlib.import_module("app")

    def test_let_others_load_models_only_where_that_is_wanted(self, app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        assert app.AppArguments().other_models == "any"
        assert app.AppArguments("m", server_name="localhost").other_models == "any"
        assert app.AppArguments("m", server_name="0.0.0.0").other_models == "none"
        assert app.AppArguments("m", server_name="0.0.0.0", other_models="hub").other_models == "hub"
        assert app.AppArguments("m", share=True).other_models == "none"
        monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
        assert app.AppArguments("m").other_models == "none"
        with pytest.raises(ValueError, match="no model to show"):
            app.AppArguments()
        monkeypatch.delenv("GRADIO_SERVER_NAME")
        monkeypatch.setenv("SPACE_ID", "someone/space")
        monkeypatch.setenv("MODEL_NAME_OR_PATH", "someone/model")
        arguments = app.AppArguments()
        assert (arguments.model_name_or_path, arguments.other_models) == ("someone/model", "none")

    def test_that_are_wrong_are_named(self, app: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        for arguments, message in (
            (["--max_source_tokens", "0"], "max_source_tokens is 0"),
            (["--examples", str(tmp_path / "none.txt")], "none.txt"),
        ):
            with pytest.raises(SystemExit):
                app.main(arguments)
            assert message in capsys.readouterr().err

    def test_with_a_wrong_model_are_refused(
        self, app: Any, gradio: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        with pytest.raises(SystemExit):
            app.main(["--model_name_or_path", str(tmp_path)])
        assert "could not be loaded. Unrecognized model" in capsys.readouterr().err

    def test_examples_are_the_lines_that_are_not_empty(self, app: Any, tmp_path: Path) -> None:
        (tmp_path / "examples.txt").write_text("eins \n\n  zwei\n", encoding="utf-8")
        assert app.read_examples(str(tmp_path / "examples.txt")) == ["eins", "zwei"]


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
    """scripts/app.py in a process of its own, the model that it shows, and the hosts that it looked up."""

    address: str
    demo: DemoModel
    hosts: Path


@pytest.fixture(scope="module")
def server(
    gradio: Any, folders: dict[str, str], scripts_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("server")
    guard = scripts_directory.parent / "tests" / "network_guard" / "sitecustomize.py"
    program = LISTENER.format(hosts=str(root / "hosts.txt"), guard=str(guard))
    (root / "sitecustomize.py").write_text(program)
    (root / "examples.txt").write_text("abcd\nhgf\n")
    command = [sys.executable, str(scripts_directory / "app.py"), "--model_name_or_path", folders["backwards"]]
    command += ["--examples", str(root / "examples.txt")]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with (
        open(root / "errors.txt", "w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=root, env=environment
        ) as process,
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
    """The table that the page should have."""
    translations = translate_text(demo, text, replace(demo.settings, num_beams=num_beams)).translations
    scores = ["" if score is None else round(score, 4) for _, score in translations]
    return [[rank, score, text] for rank, score, (text, _) in zip(count(1), scores, translations, strict=False)]


class TestApi:
    @pytest.fixture
    def client(self, server: Server) -> Any:
        client = importlib.import_module("gradio_client").Client
        return client(server.address, verbose=False, analytics_enabled=False)

    def test_translates(self, server: Server, client: Any) -> None:
        translation, table, note, attention = client.predict("abcd", api_name="/translate")
        assert translation == "dcba"
        assert table["headers"] == ["Rank", "Score", "Translation"]
        assert table["data"] == show_rows(server.demo, "abcd", num_beams=4)
        assert "seconds" in note
        assert 'sandbox="allow-scripts"' in attention
        assert client.predict("abcd", 1, api_name="/translate")[1]["data"] == [[1, "", "dcba"]]

    def test_has_nothing_but_that(self, client: Any) -> None:
        assert set(client.view_api(return_format="dict")["named_endpoints"]) == {"/translate"}

    def test_answers_everybody_with_their_own(self, server: Server) -> None:
        client = importlib.import_module("gradio_client").Client
        clients = [client(server.address, verbose=False, analytics_enabled=False) for _ in range(2)]
        texts = ["ab", "cd", "ef", "gh", "ha"]
        jobs = [clients[index % 2].submit(text, api_name="/translate") for index, text in enumerate(texts)]
        assert [job.result(timeout=PATIENCE)[0] for job in jobs] == [text[::-1] for text in texts]

    def test_says_what_is_wrong_with_a_request(self, client: Any) -> None:
        for arguments, message in (
            (["  "], "nothing to translate"),
            (["abc " * 300], "are the most that are translated here"),
        ):
            with pytest.raises(Exception, match=message) as caught:
                client.predict(*arguments, api_name="/translate")
            assert "Traceback" not in str(caught.value)


def test_errors_of_the_program_stay_in_the_log(gradio: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(gradio.Error) as caught:
        for_people(fail)(KeyError("secret"))
    assert caught.value.message == "The program failed (KeyError); its log says where."
    assert "secret" in caplog.text
    with pytest.raises(gradio.Error) as caught:
        for_people(fail)(DemoError("no <model>"))
    assert caught.value.message == "no &lt;model&gt;"


class Browser:
    """Chromium, with what a person does to the page."""

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
            time.sleep(0.05)

    def write(self, selector: str, text: str) -> None:
        box = self.find(selector)
        box.clear()
        box.send_keys(text)

    def translate(self, text: str) -> None:
        self.write("#text textarea", text)
        self.find("#translate").click()

    def read_all(self, selector: str, what: str) -> list[str]:
        # All at once, since the page may change between one look and the next.
        script = f"return [...document.querySelectorAll({selector!r})].map((element) => element.{what})"
        found: list[str] = self.driver.execute_script(script)
        return found

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
    selenium = pytest.importorskip(
        "selenium.webdriver", reason="the page in a browser needs selenium: the extra [test]"
    )
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("the page in a browser needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for option in (*BROWSER_OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield Browser(started)
    started.quit()


class TestBrowser:
    def test_person_translates(self, server: Server, browser: Browser) -> None:
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

    def test_person_sees_where_the_model_looks(self, server: Server, browser: Browser) -> None:
        browser.driver.get(server.address)
        browser.translate("abcd")
        frame = browser.find("#attention iframe")
        browser.driver.switch_to.frame(frame)
        try:
            assert browser.find("#source").text == "abcd"
            assert browser.find("#target").text == "dcba"
            assert browser.find_all("#lines line")
        finally:
            browser.driver.switch_to.default_content()

    def test_person_reads_what_is_wrong(self, server: Server, browser: Browser) -> None:
        browser.driver.get(server.address)
        browser.find("#translate").click()
        assert "There is nothing to translate yet" in browser.read_error()
        browser.translate("a" * 300)
        assert "tokens; 200 are the most" in browser.read_error()
        browser.translate("abc")
        browser.wait_for(lambda: browser.read_translation() == "cba")

    def test_models_of_two_people_do_not_mix(self, server: Server, browser: Browser, folders: dict[str, str]) -> None:
        driver = browser.driver
        driver.get(server.address)
        browser.translate("abc")
        browser.wait_for(lambda: browser.read_translation() == "cba")
        first = driver.current_window_handle
        driver.switch_to.new_window("tab")
        driver.get(server.address)
        browser.find("#model-settings button").click()
        browser.write("#model textarea, #model input", "nobody/nothing")
        browser.find("#model .submit-button").click()
        assert "could not be loaded from the Hub" in browser.read_error()
        browser.write("#model textarea, #model input", folders["untrained"])
        browser.find("#model .submit-button").click()
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

    def test_page_is_whole_without_the_internet(self, server: Server, browser: Browser) -> None:
        browser.driver.get(server.address)
        browser.translate("abc")
        browser.find("#attention iframe")
        loaded = browser.driver.execute_script("return performance.getEntriesByType('resource').map((it) => it.name)")
        assert loaded
        assert all(name.startswith(server.address) for name in loaded), loaded
        assert not [entry for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]


def test_nobody_is_told_about_it(server: Server) -> None:
    assert set(server.hosts.read_text().split()) == {"127.0.0.1"}
