r"""Measures how fast a page of `export --format web` translates in headless Chromium, beside Python and CTranslate2.

    python scripts/benchmarks/benchmark_browser.py --model_name_or_path out/A --page out/A-page --test_file test.en
    python scripts/benchmarks/benchmark_browser.py --model_name_or_path out/demo --page out/my-page --lines 100

The page is served from this machine with the headers that allow threads. Its own modules translate all lines at once,
as the page's worker does, and each line of about --sentence_words words by itself, for the time of one sentence. Python
does the same with PyTorch in float32, CTranslate2 in int8. All search with --num_beams; words are those of the source.
Without --test_file the lines are those of the built-in corpus. Chromium and its driver must be installed (Debian:
chromium, chromium-driver), and selenium. Limit the cores with `taskset -c 0,1`.
"""

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmark_tools import check_at_least_one, write_report

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.data.lines import open_text
from vanilla_transformer.export.ctranslate2_model import load_for_ctranslate2
from vanilla_transformer.inference.loading import load_model_and_tokenizer
from vanilla_transformer.inference.translate import translate

DISTRIBUTIONS = ("vanilla-transformer", "transformers", "torch", "ctranslate2", "selenium")
SIDES = ("browser", "python", "ctranslate2")
WAIT = 600  # seconds for all that a browser is asked to do
HEADERS = {"Cross-Origin-Embedder-Policy": "require-corp", "Cross-Origin-Opener-Policy": "same-origin"}

# The page's worker, asked by this page: it translates as for visitors.
_PAGE = "benchmark.html"
_SCRIPT = """
const worker = new Worker("worker.js", { type: "module" });
let handle = () => {};
worker.onmessage = ({ data }) => handle(data);
window.wait = (isOver) => new Promise((resolve, reject) => {
  handle = (data) => {
    if (data.type === "error") reject(new Error(data.message));
    else if (isOver(data)) resolve(data);
  };
});
let number = 0;
window.translate = async (texts, numBeams) => {
  const id = (number += 1), translations = texts.map(() => "");
  const start = performance.now();
  worker.postMessage({ type: "translate", id, texts, numBeams, numWanted: 1 });
  await wait((data) => {
    if (data.type === "result") translations[data.index] = data.result.translations[0]?.text ?? "";
    return data.type === "done";
  });
  return { seconds: (performance.now() - start) / 1000, translations };
};
window.ready = wait((data) => data.type === "ready");
"""

# Seconds, and the translations.
Translated = tuple[float, list[str]]
Translate = Callable[[list[str]], Translated]


@dataclass
class BenchmarkArguments:
    """What to translate, with which model, and how."""

    model_name_or_path: str = field(metadata={"help": "Folder of a trained model of this package."})
    page: str = field(metadata={"help": "What `export --format web` made of it."})
    test_file: str | None = field(
        default=None, metadata={"help": "UTF-8 text, one sentence per line, .gz too. Default: the built-in corpus."}
    )
    lines: int = field(default=1000, metadata={"help": "Lines to translate; too few are repeated. Default: 1000."})
    sentences: int = field(default=20, metadata={"help": "Sentences to translate one by one. Default: 20."})
    sentence_words: int = field(default=12, metadata={"help": "Words of each, or as near as there are. Default: 12."})
    num_beams: int = field(default=4, metadata={"help": "Beams. Default: 4."})
    rounds: int = field(default=3, metadata={"help": "Times that each side translates the lines. Default: 3."})
    side: list[str] = field(
        default_factory=lambda: list(SIDES),
        metadata={"help": "Sides to measure. Default: all.", "choices": list(SIDES)},
    )
    output_file: str | None = field(default=None, metadata={"help": "JSON file for the figures."})

    def __post_init__(self) -> None:
        check_at_least_one(self, ("lines", "sentences", "sentence_words", "num_beams", "rounds"))
        if not (Path(self.page) / "worker.js").is_file():
            raise ValueError(f"--page {self.page} is no folder that export --format web made.")


class _Handler(SimpleHTTPRequestHandler):
    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def do_GET(self) -> None:
        """Serves the folder, and the page that asks its worker."""
        if self.path != f"/{_PAGE}":
            return super().do_GET()
        content = f"<!DOCTYPE html><title>benchmark</title><script>{_SCRIPT}</script>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        return None

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


@contextmanager
def _serve(folder: str) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{_PAGE}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def open_browser(page: str, num_beams: int) -> Iterator[Translate]:
    """Headless Chromium with the page's worker, ready to translate."""
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise FileNotFoundError("Chromium or its driver is missing (Debian: chromium, chromium-driver).")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    with tempfile.TemporaryDirectory() as profile, _serve(page) as url:
        for option in ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"):
            options.add_argument(option)
        started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            started.set_script_timeout(WAIT)
            started.get(url)
            started.execute_script("return ready")

            def run(lines: list[str]) -> Translated:
                answer: Any = started.execute_script("return translate(...arguments)", lines, num_beams)
                return answer["seconds"], answer["translations"]

            yield run
        finally:
            started.quit()


@contextmanager
def open_python(model_name: str, num_beams: int, engine: str) -> Iterator[Translate]:
    """PyTorch in float32, or CTranslate2 in int8."""
    if engine == "ctranslate2":
        loaded: Any = load_for_ctranslate2(model_name, device="cpu", dtype="int8")
    else:
        loaded = load_model_and_tokenizer(model_name, device="cpu")
    model, tokenizer = loaded

    def run(lines: list[str]) -> Translated:
        start = time.perf_counter()
        translations = translate(model, tokenizer, lines, num_beams=num_beams, progress=False)
        return time.perf_counter() - start, translations

    yield run


def read_lines(arguments: BenchmarkArguments) -> list[str]:
    """The lines to translate."""
    if arguments.test_file is not None:
        with open_text(arguments.test_file) as file:
            lines = [line.strip() for line in file if line.strip()]
    else:
        from vanilla_transformer.data.numbers_and_dates import numbers_and_dates

        lines = list(numbers_and_dates(source_lang="en", target_lang="de", split="test")["source"])
    if not lines:
        raise ValueError(f"--test_file {arguments.test_file} holds no text.")
    return list(islice(cycle(lines), arguments.lines))


def count_words(lines: Sequence[str]) -> int:
    """Words between white space."""
    return sum(len(line.split()) for line in lines)


def measure(run: Translate, lines: list[str], arguments: BenchmarkArguments) -> dict[str, Any]:
    """Words per second over all lines, and milliseconds for single sentences, after a round to warm up."""
    by_length = sorted(set(lines), key=lambda line: abs(len(line.split()) - arguments.sentence_words))
    sentences = list(islice(cycle(by_length[: arguments.sentences]), arguments.sentences))
    _, translations = run(lines)
    seconds = [run(lines)[0] for _ in range(arguments.rounds)]
    for sentence in sentences[:3]:
        run([sentence])
    single = [run([sentence])[0] * 1000 for sentence in sentences]
    return {
        "words_per_second": count_words(lines) / statistics.median(seconds),
        "seconds": seconds,
        "milliseconds_of_a_sentence": statistics.median(single),
        "slowest_sentence": max(single),
        "words_of_a_sentence": count_words(sentences) / len(sentences),
        "translations": translations,
    }


def main(argv: list[str] | None = None) -> None:
    """Measures each side in turn, prints the figures and writes them to --output_file."""
    parser = make_argument_parser(BenchmarkArguments, __doc__)
    (arguments,) = parser.parse_args_into_dataclasses(argv)
    lines = read_lines(arguments)
    openers: dict[str, Any] = {
        "browser": partial(open_browser, arguments.page, arguments.num_beams),
        "python": partial(open_python, arguments.model_name_or_path, arguments.num_beams, "transformers"),
        "ctranslate2": partial(open_python, arguments.model_name_or_path, arguments.num_beams, "ctranslate2"),
    }
    results = {}
    for side in arguments.side:
        with openers[side]() as run:
            results[side] = measure(run, lines, arguments)
        found = results[side]
        print(
            f"{side:<12} {found['words_per_second']:8.0f} words/s  {found['milliseconds_of_a_sentence']:7.1f} ms for a "
            f"sentence of {found['words_of_a_sentence']:.1f} words (slowest {found['slowest_sentence']:.1f})",
            flush=True,
        )
    write_report(arguments.output_file, "benchmark_browser.py", argv, DISTRIBUTIONS, arguments, results)


if __name__ == "__main__":
    main()
