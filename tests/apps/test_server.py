"""The server: LibreTranslate's own client, many clients at once, nonsense, a full queue, and its end by SIGTERM."""

import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chromium
import pytest
from letters import TOKENIZER, make_letters_model, train_on_letters
from library_models import generate_by_hand, make_m2m100, make_marian, make_nllb_tokenizer, make_tokenizer

# ruff: noqa: E402 (what the server needs may be missing)
_NEEDED = ("fastapi", "fastapi_offline", "uvicorn", "prometheus_client", "python_multipart", "sentencex", "babel")
for _name in (*_NEEDED, "lingua", "libretranslatepy"):
    pytest.importorskip(_name, reason=f"the server needs {_name}: pip install 'vanilla-transformer[serve,test]'")

import uvicorn
from libretranslatepy import LibreTranslateAPI

from vanilla_transformer.apps import server as serving
from vanilla_transformer.apps.server import USUAL_LIMITS, Limits, Metrics, make_app
from vanilla_transformer.commands.serve import ServingArguments, load_translators, main
from vanilla_transformer.data.detection import Detection, Detector, load_lingua
from vanilla_transformer.export.ctranslate2 import CONFIG_FILE, export_ctranslate2
from vanilla_transformer.inference.loading import load_model_and_tokenizer
from vanilla_transformer.inference.translate import translate, translate_n_best

JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
PAIR = {"source": "en", "target": "de"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model from English to German, which writes letters backwards, and one from German to English."""
    root = tmp_path_factory.mktemp("served")
    backwards, untrained = make_letters_model(langs=["en", "de"]), make_letters_model(langs=["de", "en"])
    train_on_letters(backwards, root / "training", reverse=True)
    for name, model in (("backwards", backwards), ("untrained", untrained)):
        model.save_pretrained(root / name)
        TOKENIZER.save_pretrained(root / name)
    return [str(root / "backwards"), str(root / "untrained")]


class Served:
    """A server in a thread."""

    def __init__(
        self, names: list[str], limits: Limits = USUAL_LIMITS, detector: Detector | None = None, **options: Any
    ) -> None:
        self.metrics = Metrics()
        arguments: Any = ServingArguments(names, **options)  # type: ignore[arg-type]
        self.translators: Any = load_translators(arguments, self.metrics)
        app = make_app(self.translators, self.metrics, limits, detector)
        config = uvicorn.Config(app, port=0, log_level="warning")
        self.listener = config.bind_socket()
        self.listener.listen()
        self.port = self.listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()

    def ask(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """The status, body and headers of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
            response = connection.getresponse()
            content = response.read()
            kind = response.headers.get("content-type", "")
            return response.status, json.loads(content) if "json" in kind else content, dict(response.headers)
        finally:
            connection.close()

    def translate(self, q: Any, **fields: Any) -> tuple[int, Any]:
        return self.ask("/translate", json.dumps({"q": q, **PAIR, **fields}).encode(), JSON)[:2]

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def serve(names: list[str], limits: Limits = USUAL_LIMITS, **options: Any) -> Iterator[Served]:
    served = Served(names, limits, **options)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture(scope="module")
def served(folders: list[str]) -> Iterator[Served]:
    with serve(folders) as running:
        yield running


@pytest.fixture
def texts() -> list[str]:
    choose = random.Random(3)
    return ["".join(choose.choices("abcdefgh", k=choose.randrange(1, 5))) for _ in range(60)]


def translate_directly(folder: str, texts: list[str], **options: Any) -> list[str]:
    model, tokenizer = load_model_and_tokenizer(folder)
    return translate(model, tokenizer, texts, progress=False, **options)


class TestClients:
    def test_libretranslatepy_works_unchanged(self, served: Served, folders: list[str]) -> None:
        client = LibreTranslateAPI(served.address)
        assert client.translate("abc", "en", "de") == "cba"
        assert [client.translate("abc", "de", "en")] == translate_directly(folders[1], ["abc"])
        assert client.languages() == [
            {"code": "en", "name": "English", "targets": ["de"]},
            {"code": "de", "name": "German", "targets": ["en"]},
        ]
        with pytest.raises(urllib.error.HTTPError) as error:
            client.detect("abc")
        assert error.value.code == 501
        assert "No language detector is configured" in error.value.read().decode()
        error.value.close()

    def test_texts_come_as_json_and_as_forms_of_both_kinds(self, served: Served) -> None:
        assert served.translate("abc") == (200, {"translatedText": "cba"})
        assert served.translate(["abc", "", "ab\n"]) == (200, {"translatedText": ["cba", "", "ba\n"]})
        assert served.translate([]) == (200, {"translatedText": []})
        form = urllib.parse.urlencode({"q": "abc", **PAIR}).encode()
        assert served.ask("/translate", form, FORM)[:2] == (200, {"translatedText": "cba"})
        parts = "".join(
            f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in {"q": "abc", **PAIR}.items()
        )
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        assert served.ask("/translate", f"{parts}--x--\r\n".encode(), kind)[:2] == (200, {"translatedText": "cba"})
        # What decodes a body is not for clients to choose: some codecs take minutes.
        for told in ("; charset=utf-16", "; charset=punycode"):
            kind = {"Content-Type": f"multipart/form-data; boundary=x{told}"}
            assert served.ask("/translate", f"{parts}--x--\r\n".encode(), kind)[:2] == (200, {"translatedText": "cba"})
        latin = f"{parts}--x--\r\n".replace("abc", "\xe9t\xe9").encode("latin-1")
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        assert served.ask("/translate", latin, kind)[0] == 400, "as in the other forms"
        for told in ('boundary="x\\"; charset=punycode"', "boundary*=punycode''x", "boundary=" + 71 * "x", ""):
            kind = {"Content-Type": f"multipart/form-data; {told}"}
            assert served.ask("/translate", f"{parts}--x--\r\n".encode(), kind)[0] == 400

    def test_a_format_that_is_empty_is_text(self, served: Served) -> None:
        for kind in (None, ""):
            assert served.translate("abc", format=kind) == (200, {"translatedText": "cba"})

    def test_pages_of_other_servers_may_ask(self, served: Served) -> None:
        origin = {"Origin": "https://a.example"}
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        status, _, headers = served.ask("/translate", None, {**origin, **asked}, "OPTIONS")
        assert status == 200
        assert headers["access-control-allow-headers"] == "content-type"
        body = json.dumps({"q": "abc", **PAIR}).encode()
        status, answer, headers = served.ask("/translate", body, {**JSON, **origin})
        assert (status, answer["translatedText"], headers["access-control-allow-origin"]) == (200, "cba", "*")
        assert served.ask("/translate", b"[", {**JSON, **origin})[2]["access-control-allow-origin"] == "*"

    def test_markup_and_white_space_stay(self, served: Served) -> None:
        assert served.translate("\n ab  \r\n\r\n\tcd\n")[1] == {"translatedText": "\n ba  \r\n\r\n\tdc\n"}
        page = '<p class="ab">ab <b>cd</b><br>\n<!-- ab --></p><script>ab</script>&lt;'
        status, answer = served.translate(page, format="html")
        text = answer["translatedText"]
        assert status == 200
        assert text.startswith('<p class="ab">ba <b>dc</b><br>\n<!-- ab --></p><script>ab</script>')

    def test_many_at_once_get_what_translate_gives(self, served: Served, folders: list[str], texts: list[str]) -> None:
        expected = translate_directly(folders[0], texts)
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(served.translate, texts))
        assert answers == [(200, {"translatedText": each}) for each in expected]

    @pytest.mark.parametrize("engine", ["ctranslate2", "onnx"])
    def test_other_engines(self, engine: str, folders: list[str], texts: list[str], tmp_path: Path) -> None:
        if engine == "onnx":
            from vanilla_transformer.export.onnx import export_onnx

            export_onnx(folders[0], tmp_path / "en-de")
        else:
            export_ctranslate2(folders[0], tmp_path / "en-de")
        # The same once more for other languages.
        shutil.copytree(tmp_path / "en-de", tmp_path / "fr-en")
        path = tmp_path / "fr-en" / ("config.json" if engine == "onnx" else CONFIG_FILE)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"langs": ["fr", "en"]}))
        with serve([str(tmp_path / "en-de"), str(tmp_path / "fr-en")], engine=engine, num_beams=2) as served:
            expected = translate_directly(folders[0], texts, num_beams=2)
            assert served.translate(texts) == (200, {"translatedText": expected})
            answer = served.translate(texts[:9], source="fr", target="en")
            assert answer == (200, {"translatedText": expected[:9]})
            assert served.translate("ab", source="de", target="en")[0] == 400

    def test_alternatives_are_what_beam_search_finds(self, folders: list[str]) -> None:
        with serve(folders[:1], Limits(alternatives=2), max_alternatives=2, num_beams=3) as served:
            model, tokenizer = load_model_and_tokenizer(folders[0])
            (found,) = translate_n_best(model, tokenizer, ["abc"], num_return_sequences=3, num_beams=3, progress=False)
            best, *others = dict.fromkeys(each.text for each in found)
            assert served.translate("abc", alternatives=2)[1] == {"translatedText": best, "alternatives": others}
            assert best == "cba"
            assert others
            answer = served.translate(["abc", "abc"], alternatives="2")[1]
            assert answer == {"translatedText": [best] * 2, "alternatives": [others] * 2}
            assert served.translate("abc")[1] == {"translatedText": best}
            for wrong in (3, -1, "x", 1.5, [1]):
                status, answer = served.translate("abc", alternatives=wrong)
                assert (status, answer["error"]) == (400, "alternatives must be a number from 0 to 2.")
        with pytest.raises(ValueError, match=r"max_alternatives is 2 and num_beams of .* is 2"):
            load_translators(ServingArguments(folders[:1], max_alternatives=2, num_beams=2), Metrics())  # type: ignore[arg-type]

    def test_health_settings_metrics_and_openapi(self, served: Served) -> None:
        assert served.ask("/health")[:2] == (200, {"status": "ok"})
        settings = served.ask("/frontend/settings")[1]
        assert settings["language"]["source"] == {"code": "en", "name": "English"}
        assert settings["keyRequired"] is False
        schema = served.ask("/openapi.json")[1]
        assert schema["paths"]["/translate"]["post"]["requestBody"]["content"].keys() >= {"application/json"}

        def count() -> float:
            lines = served.ask("/metrics")[1].decode().splitlines()
            return sum(
                float(line.split()[-1]) for line in lines if line.startswith('translated_sentences_total{source="en')
            )

        before = count()
        served.translate(["ab", "cd\nef"])
        assert count() == before + 3


def make_nonsense(choose: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """A request that cannot be answered: method, path, body and headers."""
    good = {"q": "abc", **PAIR}
    wrong: Any = choose.choice([None, 7, 1e99, True, {}, {"a": []}, [1], [None], [["a"]], "\ud800"])
    broken = {**good, choose.choice(["q", "source", "target", "format"]): wrong}
    path = choose.choice(["/translate", "/detect"])
    bodies = [
        json.dumps(broken).encode() if wrong is not None else json.dumps({**PAIR, "q": None}).encode(),
        json.dumps({**good, choose.choice(["source", "target", "format"]): "x" * choose.randrange(4000)}).encode(),
        json.dumps(good).encode()[: choose.randrange(len(json.dumps(good)))],
        choose.randbytes(choose.randrange(1, 300)),
        b"[" * choose.choice([10, 10_000, 200_000]),
        b'{"q":' * 40_000,
        b'{"q": ' + b"9" * 5000 + b"}",
        json.dumps(good).encode("utf-16"),
        b'{"q": "a", "q": "b", "source": "en", "target": "de"}',
        json.dumps({**good, "q": "abc " * 100_000}).encode(),
        json.dumps({**good, "alternatives": 3}).encode(),
        json.dumps({**good, "source": "auto"}).encode(),
        json.dumps({**good, "source": "../../etc/passwd"}).encode(),
        b"q=%ff&source=en&target=de",
        b"&".join([b"q=a"] * 200),
        b"null",
        b"",
    ]
    body = choose.choice(bodies)
    # A request to detect that has a text is no nonsense.
    path = "/translate" if b'"q": "abc' in body or b'"q": [' in body else path
    kinds = ["application/json"] * 5 + [*FORM.values(), "multipart/form-data", "multipart/form-data; boundary=x"]
    kinds += ["text/plain", "", "application/json; charset=latin-1", "\u00e4".encode().decode("latin-1")]
    return choose.choice(["POST"] * 9 + ["PUT"]), path, body, {"Content-Type": choose.choice(kinds)}


class TestNonsense:
    def test_is_refused_and_the_server_goes_on(self, served: Served) -> None:
        choose = random.Random(0)
        statuses: dict[int, int] = {}
        for _ in range(500):
            method, path, body, headers = make_nonsense(choose)
            status, answer, _ = served.ask(path, body, headers, method)
            assert 400 <= status < 500, (status, method, path, body[:200], headers, answer)
            assert set(answer) == {"error"}
            statuses[status] = statuses.get(status, 0) + 1
        assert statuses.keys() >= {400, 405, 413, 415}
        assert served.translate("abc") == (200, {"translatedText": "cba"})

    def test_connections_that_are_cut_or_speak_no_http_harm_nobody(self, served: Served) -> None:
        import socket

        choose = random.Random(1)
        head = b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
                connection.sendall(choose.choice([head, head[: choose.randrange(len(head))], choose.randbytes(99)]))
        assert served.translate("abc") == (200, {"translatedText": "cba"})

    def test_a_body_that_does_not_come_is_given_up(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serving, "BODY_SECONDS", 0.2)
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        connection.putrequest("POST", "/translate")
        connection.putheader("Content-Length", "10")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408
        connection.close()

    def test_a_sentence_too_long_is_refused(self, folders: list[str]) -> None:
        with serve(folders[:1], max_source_length=6) as served:
            assert served.translate("abcd")[0] == 200
            status, answer = served.translate(["ab", "abcdefgh"])
            assert (status, answer["error"]) == (400, "A sentence has 10 tokens; it must have at most 6.")
            assert served.translators["en", "de"].pending == 0

    def test_keys_and_sizes(self, folders: list[str]) -> None:
        with serve(folders[:1], Limits(200, frozenset({"secret", "schlüssel"}))) as served:
            assert served.translate("ab")[0] == 403
            assert served.translate("ab", api_key="other")[0] == 403
            assert served.translate("ab", api_key="schlüssel") == (200, {"translatedText": "ba"})
            assert LibreTranslateAPI(served.address, "secret").translate("ab", "en", "de") == "ba"
            assert served.translate("a" * 200, api_key="secret")[0] == 413


class TestRates:
    def test_a_client_that_asks_too_often_is_told_when_to_come_again(self, folders: list[str]) -> None:
        with serve(folders[:1], Limits(rate_limit=3)) as served:
            assert [served.translate("ab")[0] for _ in range(4)] == [200, 200, 200, 429]
            status, answer, headers = served.ask("/detect", b"q=ab", FORM)
            assert (status, answer["error"]) == (429, "Slow down: a client may send 3 requests a minute.")
            assert 1 <= int(headers["retry-after"]) <= 20
            assert served.ask("/languages")[0] == served.ask("/health")[0] == 200
            body = json.dumps({"q": "ab", **PAIR}).encode()
            # What a proxy on this machine says of its clients counts.
            assert served.ask("/translate", body, JSON | {"X-Forwarded-For": "192.0.2.7"})[0] == 200

    def test_each_key_has_its_own_rate_and_wrong_ones_have_none(self, folders: list[str]) -> None:
        with serve(folders[:1], Limits(api_keys=frozenset({"one", "two"}), rate_limit=2)) as served:
            assert [served.translate("ab", api_key="one")[0] for _ in range(3)] == [200, 200, 429]
            assert [served.translate("ab", api_key="two")[0] for _ in range(3)] == [200, 200, 429]
            assert [served.translate("ab", api_key=f"guess {number}")[0] for number in range(3)] == [403, 403, 429]


GERMAN = "Der Mann reitet auf einem braunen Pferd durch den Wald."
ENGLISH = "The man is riding on a brown horse through the forest."


@pytest.fixture(scope="module")
def detecting(folders: list[str]) -> Iterator[Served]:
    with serve(folders, detector=load_lingua(["en", "de"])) as running:
        yield running


class TestDetection:
    def test_languages_are_detected_in_the_format_of_libretranslate(self, detecting: Served) -> None:
        for text, language in ((GERMAN, "de"), (ENGLISH, "en")):
            first, second = LibreTranslateAPI(detecting.address).detect(text)
            assert first["language"] == language != second["language"]
            assert 100 >= first["confidence"] > second["confidence"] > 0
        status, answer, _ = detecting.ask("/detect", json.dumps({"q": "\u4f60\u597d"}).encode(), JSON)
        assert (status, [each["confidence"] for each in answer]) == (200, [0.0])

    def test_the_source_is_detected_for_each_text(self, detecting: Served, folders: list[str]) -> None:
        status, answer = detecting.translate(ENGLISH, source="auto")
        assert (status, answer["detectedLanguage"]["language"]) == (200, "en")
        assert answer["translatedText"] == detecting.translate(ENGLISH)[1]["translatedText"]
        status, answer = detecting.translate([GERMAN, ENGLISH, GERMAN], source="auto", target="en")
        assert [each["language"] for each in answer["detectedLanguage"]] == ["de", "en", "de"]
        expected = detecting.translate(GERMAN, source="de", target="en")[1]["translatedText"]
        assert answer["translatedText"] == [expected, ENGLISH, expected], "what is English already stays"
        page = f'<img alt="1 < 2">{ENGLISH}&nbsp;&quot;<b>My </b>friend.&quot;'
        assert detecting.translate(page, source="auto", target="en", format="html")[1]["translatedText"] == page
        assert detecting.translate([], source="auto") == (200, {"translatedText": [], "detectedLanguage": []})
        assert detecting.translate("", source="auto")[1]["translatedText"] == ""
        assert detecting.translate("ab", source="auto", target="fr")[0] == 400

    def test_a_detected_language_is_one_that_is_translated(self, folders: list[str]) -> None:
        sure = [Detection("fr", 60.0), Detection("de", 30.0), Detection("en", 10.0)]
        unsure = [Detection(name, 0.0) for name in ("fr", "de", "en")]  # as of a text without letters, in any order
        with serve(folders, detector=lambda text: unsure if text == "12" else sure) as served:
            status, answer = served.translate("Menu", source="auto", target="en", alternatives=None)
            assert (status, answer["detectedLanguage"]) == (200, {"language": "de", "confidence": 30.0})
            status, answer = served.translate("12", source="auto", target="en")
            assert (status, answer["translatedText"]) == (200, "12")

    def test_a_detector_needs_languages_that_it_knows(self) -> None:
        assert {each.language for each in load_lingua(["deu_Latn", "pt-BR"])(GERMAN)} == {"deu_Latn", "pt-BR"}
        with pytest.raises(ValueError, match="needs two languages that it knows; of those given: en"):
            load_lingua(["en", "tlh"])
        text = "Kumusta ka? Maganda ang panahon ngayon."
        assert load_lingua(["en", "de", "tl"])(text)[0].language == "tl"


class TestPage:
    def test_the_page_of_the_specification_loads_nothing_from_elsewhere(self, served: Served) -> None:
        status, page, headers = served.ask("/docs")
        links = re.findall(r"""(?:src|href)=["']([^"']*)["']|url: ["']([^"']*)["']""", page.decode())
        own = {first or second for first, second in links}
        assert status == 200
        assert own == {
            "/openapi.json",
            *(f"/static-offline-docs/{name}" for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")),
        }
        assert all(served.ask(link)[0] == 200 for link in own)
        assert '"validatorUrl": null' in page.decode()  # or it would show its address to a public server
        # What the scripts might ask for, the browser refuses.
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert served.ask("/redoc")[0] == 404

    def test_a_browser_shows_it_and_asks_nobody_else(self, served: Served, tmp_path: Path) -> None:
        with chromium.open_chromium(tmp_path) as driver:
            browser = chromium.Browser(driver)
            driver.get(f"{served.address}/docs")
            browser.wait_for(lambda: len(browser.find_all(".opblock")) == 6)
            asked = browser.run("return performance.getEntriesByType('resource').map((each) => each.name)")
            assert {f"{served.address}/openapi.json"} < set(asked)
            assert all(name.startswith((f"{served.address}/", "data:")) for name in asked), asked
            assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.fixture(params=["continuous", "batches"])
def translating(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How sentences are put together: one by one, or, as with other engines, in batches that end together."""
    if request.param == "batches":
        monkeypatch.setattr("vanilla_transformer.apps.batches.ContinuousBatch", refuse_continuous)
    return str(request.param)


def refuse_continuous(_: Any) -> None:
    raise ValueError("not with this engine")


def test_more_tokens_than_learned_positions_are_refused(tmp_path: Path) -> None:
    model = make_letters_model(position_embedding_type="learned", max_position_embeddings=12, langs=["en", "de"])
    for part in (model, TOKENIZER):
        part.save_pretrained(tmp_path)
    for given in (None, 100):
        with serve([str(tmp_path)], max_source_length=given) as served:
            assert served.translate("abcdefgh")[0] == 200
            status, answer = served.translate("abcdefghabc")
            assert (status, "13 tokens; it must have at most 12" in answer["error"]) == (400, True)


class TestLostDevice:
    def test_nobody_waits_for_a_model_that_can_translate_no_more(
        self, folders: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("device lost")

        with serve(folders[:1]) as served:
            translator = served.translators["en", "de"].translator
            assert served.translate("abc") == (200, {"translatedText": "cba"})
            for name in ("add", "step", "clear"):
                monkeypatch.setattr(translator._continuous, name, fail)
            for _ in range(2):
                assert served.translate(["abc", "ab"])[0] == 503
            assert served.ask("/health")[0] == 503
            assert (translator.is_ready, translator.pending) == (False, 0)


class TestQueue:
    def test_beyond_its_bound_the_answer_is_503(
        self, folders: list[str], translating: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serve(folders[:1], max_queue=3) as served, ThreadPoolExecutor(2) as pool:
            translator = served.translators["en", "de"].translator
            computing, name = (
                (translator._continuous, "step") if translating == "continuous" else (translator.translator, "run")
            )
            original, running, released = getattr(computing, name), threading.Event(), threading.Event()

            def block(*arguments: Any) -> Any:
                running.set()
                assert released.wait(60)
                return original(*arguments)

            monkeypatch.setattr(computing, name, block)
            first = pool.submit(served.translate, "ab")
            assert running.wait(60)
            second = pool.submit(served.translate, ["cd", "ef"])
            while translator.pending < 3:
                time.sleep(0.01)
            status, answer, headers = served.ask("/translate", json.dumps({"q": "a", **PAIR}).encode(), JSON)
            assert (status, headers["retry-after"]) == (503, "1")
            assert "3 sentences are waiting" in answer["error"]
            assert served.translate(["a"] * 4)[0] == 400  # never has a place
            assert served.ask("/health")[0] == 200
            released.set()
            assert first.result() == (200, {"translatedText": "ba"})
            assert second.result() == (200, {"translatedText": ["dc", "fe"]})
            assert translator.pending == 0
            assert served.translate("ab")[0] == 200

    @pytest.mark.usefixtures("translating")
    def test_nobody_waits_for_more_than_were_answered_last(self, folders: list[str]) -> None:
        with serve(folders[:1], max_wait=59_000.0) as served, ThreadPoolExecutor(3) as pool:
            start = time.monotonic()
            assert [served.translate(text)[0] for text in "abc"] == [200] * 3  # one client never waits
            assert time.monotonic() - start < 59
            served.translators["en", "de"].translator._answered = 3
            first = [pool.submit(served.translate, text) for text in "ab"]
            time.sleep(1)
            assert not any(each.done() for each in first)
            third = pool.submit(served.translate, "c")
            assert [each.result(50)[0] for each in (*first, third)] == [200] * 3
            assert served.translators["en", "de"].translator._answered == 3  # they were together

    def test_too_many_requests_at_once_are_refused(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serving, "_MOST_RUNNING", 0)
        status, answer, headers = served.ask("/health")
        assert (status, answer, headers["retry-after"]) == (503, {"error": "The server has too many requests."}, "1")
        monkeypatch.undo()
        assert served.ask("/health")[0] == 200

    def test_a_sentence_that_fails_costs_no_other_client(
        self, folders: list[str], translating: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serve(folders[:1], max_wait=200.0) as served, ThreadPoolExecutor(4) as pool:
            translator = served.translators["en", "de"].translator.translator
            original, bad = translator.run, TOKENIZER("ha")["input_ids"]
            sizes: list[int] = []

            def fail(token_ids: list[list[int]]) -> Any:
                sizes.append(len(token_ids))
                if bad in token_ids:
                    raise RuntimeError("out of memory, say")
                return original(token_ids)

            monkeypatch.setattr(translator, "run", fail)
            if translating == "continuous":
                batch: Any = served.translators["en", "de"].translator._continuous
                add = batch.add
                monkeypatch.setattr(batch, "add", lambda sources: (fail([*sources.values()]), add(sources)))
            served.translators["en", "de"].translator._answered = 4  # as if so many had just been: they are waited for
            answers = list(pool.map(served.translate, ["ab", "ha", "cd", "ef"]))
            assert [status for status, _ in answers] == [200, 500, 200, 200]
            assert [answers[index][1]["translatedText"] for index in (0, 2, 3)] == ["ba", "dc", "fe"]
            assert answers[1][1] == {"error": "The server failed; its log says why."}
            assert 'path="/translate",status="500"} 1.0' in served.ask("/metrics")[1].decode()
            assert max(sizes) > 1  # they were together
            assert served.translators["en", "de"].pending == 0


def count_accepted(address: str) -> float:
    """How many sentences a server is translating or has translated."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    names = ("pending_sentences{", "translated_sentences_total{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


class TestCommand:
    def test_sigterm_ends_it_when_what_was_accepted_is_answered(self, folders: list[str], tmp_path: Path) -> None:
        # Every token takes half a second, so that some requests wait while the signal comes.
        slow = "import time, vanilla_transformer.inference.continuous as c; step = c.ContinuousBatch.step\n"
        slow += "c.ContinuousBatch.step = lambda self: (time.sleep(0.5), step(self))[1]\n"
        slow += "from vanilla_transformer.commands.serve import main; main()"
        options = ["--model_name_or_path", folders[0], "--port", "0", "--batch_size", "2"]
        command = [sys.executable, "-c", slow, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[4]
            assert address.startswith("http://127.0.0.1:")
            client = LibreTranslateAPI(address)
            with ThreadPoolExecutor(6) as pool:
                asked = [pool.submit(client.translate, text, "en", "de") for text in ("ab", "cd", "ef", "gh", "a", "b")]
                while count_accepted(address) < 6:
                    time.sleep(0.05)
                os.kill(process.pid, signal.SIGTERM)
                assert [each.result(60) for each in asked] == ["ba", "dc", "fe", "hg", "a", "b"]
            rest, errors = process.communicate(timeout=60)
            assert (process.returncode, rest) == (0, "The server has ended; what it accepted is answered.\n"), errors
        finally:
            process.kill()
            process.communicate()

    def test_wrong_arguments_are_named(
        self, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_letters_model().save_pretrained(tmp_path / "mute")
        TOKENIZER.save_pretrained(tmp_path / "mute")
        (tmp_path / "keys").write_text("\n\n")
        languages = ["--source_lang", "en", "--target_lang", "de"]
        for options, message in (
            ([str(tmp_path / "mute")], "does not say its languages"),
            ([folders[0], folders[0]], "translates en to de, as another model here does"),
            ([*folders, *languages], "are of one model"),
            ([folders[0], "--max_queue", "0"], "max_queue is 0"),
            ([folders[0], "--port", "70000"], "port is 70000"),
            ([folders[0], "--max_wait", "-1"], "max_wait is -1"),
            ([folders[0], "--api_keys", str(tmp_path / "keys")], "holds no key"),
            ([folders[0], "--engine", "onnx"], "onnx"),
            ([folders[0], "--length_penalty_type", "none"], "length_penalty_type must be one of"),
            ([folders[0], "--max_new_tokens", "0"], "max_new_tokens"),
            ([folders[0], "--num_beams", "0"], "num_beams is 0"),
        ):
            with pytest.raises(SystemExit) as end:
                main(["--port", "0", "--model_name_or_path", *options])
            assert end.value.code == 2
            assert message in capsys.readouterr().err
        assert threading.active_count() < 50

    def test_a_port_that_is_taken_is_named(
        self, served: Served, folders: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as end:
            main(["--model_name_or_path", folders[0], "--port", str(served.port)])
        assert end.value.code == 2
        assert (
            f"Nothing can listen at --host 127.0.0.1 --port {served.port}: Address already in use"
            in capsys.readouterr().err
        )

    def test_a_multilingual_model_serves_the_pair_that_it_is_told(self, tmp_path: Path) -> None:
        tokenizer = make_nllb_tokenizer()
        model = make_m2m100(len(tokenizer))
        model.generation_config.max_new_tokens = 8
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        tokenizer.src_lang = "eng_Latn"
        forced = tokenizer.convert_tokens_to_ids("fra_Latn")
        (expected,) = generate_by_hand(model, tokenizer, "hello", forced_bos_token_id=forced, max_new_tokens=8)
        with serve([str(tmp_path)], source_lang="eng_Latn", target_lang="fra_Latn") as served:
            answer = served.translate("hello", source="eng_Latn", target="fra_Latn")
            assert answer == (200, {"translatedText": expected})
            assert served.ask("/languages")[1][0]["name"] == "English"

    def test_a_marian_model_serves_beside_one_of_this_package(self, folders: list[str], tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        model = make_marian()
        model.config.langs = ["fr", "en"]
        model.generation_config.max_new_tokens = 8
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        (expected,) = generate_by_hand(model, tokenizer, "w4 w5", max_new_tokens=8)
        with serve([str(tmp_path), folders[0]]) as served:
            assert served.translate("w4 w5", source="fr", target="en") == (200, {"translatedText": expected})
            assert served.translate("abc") == (200, {"translatedText": "cba"})

    def test_a_model_may_write_the_language_that_it_reads(self, folders: list[str], tmp_path: Path) -> None:
        model, tokenizer = load_model_and_tokenizer(folders[0])
        model.config.langs = ["en", "en"]
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path)
        with serve([str(tmp_path)]) as served:
            assert served.translate("abc", target="en") == (200, {"translatedText": "cba"})

    def test_a_model_that_is_mute_is_told_its_languages(self, tmp_path: Path) -> None:
        make_letters_model().save_pretrained(tmp_path / "mute")
        TOKENIZER.save_pretrained(tmp_path / "mute")
        with serve([str(tmp_path / "mute")], source_lang="fr", target_lang="en") as served:
            assert served.translate("ab", source="fr", target="en")[0] == 200
            assert served.translate("ab")[0] == 400
