r"""Serve translations over HTTP with LibreTranslate's API, so that its clients work unchanged.

    pip install "vanilla-transformer[serve]"
    vanilla-transformer serve --model_name_or_path out/my-model
    vanilla-transformer serve --model_name_or_path out/en-de out/de-en --dtype int8 --num_beams 4
    vanilla-transformer serve --model_name_or_path out/many
    vanilla-transformer serve --model_name_or_path Helsinki-NLP/opus-mt-en-de --source_lang en --target_lang de

    curl 127.0.0.1:5000/translate -d q="Good morning." -d source=en -d target=de

POST /translate takes a text or a list of texts, in JSON or a form; GET /languages names the languages. With
--language_detector, the source may be auto, and POST /detect names a text's language. There are /health, /metrics
(Prometheus) and /docs (OpenAPI). Texts of all clients are translated together. Where more is sent than --max_queue, the
answer is 503 with Retry-After, and beyond --rate_limit 429. SIGTERM ends the server when what it accepted is answered.

Only this machine can reach it unless --host says otherwise; for encrypted connections put a proxy before it. Each model
is for the languages that its configuration names, one pair or many, or for --source_lang and --target_lang.
"""

import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vanilla_transformer.export.engines import EngineArguments
from vanilla_transformer.inference.arguments import GLOSSARY_NEEDS, GlossaryArguments
from vanilla_transformer.options import option, refuse_unused

from .command_line import make_argument_parser, make_main

if TYPE_CHECKING:
    from vanilla_transformer.apps.batches import BatchingTranslator, Direction

_PACKAGES = "fastapi fastapi-offline uvicorn prometheus_client python-multipart sentencex Babel"


@dataclass
class ServingArguments(GlossaryArguments, EngineArguments):
    """What to serve, to whom, and how much of it."""

    IS_ENSEMBLE: ClassVar[bool] = False
    model_name_or_path: str = option("Folders or Hub names of sequence-to-sequence models.", nargs="+")
    max_source_length: int | None = option(
        "The most tokens of a sentence; longer ones are refused. Default: what is known of the model, at most 1024.",
        None,
    )
    host: str = option("The address to listen at; 0.0.0.0 lets others in.", "127.0.0.1")
    port: int = option("The port; 0: any that is free.", 5000)
    max_queue: int = option("The most sentences of a model that are accepted and not yet translated.", 1024)
    max_wait: float = option(
        "How long a sentence may wait for as many requests as were answered last, while nothing is translated, in "
        "milliseconds.",
        25.0,
    )
    max_request_bytes: int = option("The largest request.", 262144)
    api_keys: str | None = option("UTF-8 text, a key per line: clients need one of them. Default: no key.", None)
    rate_limit: int | None = option(
        "The most requests a minute of a client, by its key or else its address. Default: no limit.", None
    )
    language_detector: Literal["lingua"] | None = option(
        "What detects languages, among those served: lingua. Default: nothing.", None
    )
    max_alternatives: int = option("The most other translations that a request may ask for; below num_beams.", 0)
    workers: int = option(
        "Processes for each model, which divide the threads; each holds the model. On a CPU, one for each core or two "
        "serve many clients fastest.",
        1,
    )
    split_sentences: bool = option("Cut lines into sentences; --no_split_sentences: do not.", True)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unused(self, GLOSSARY_NEEDS)
        for name in ("max_queue", "max_request_bytes", "max_source_length", "rate_limit", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if not 0 <= self.max_wait < 60_000:
            raise ValueError(f"max_wait is {self.max_wait}; it must be at least 0 and below 60000 milliseconds.")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535.")
        if self.max_alternatives < 0:
            raise ValueError(f"max_alternatives is {self.max_alternatives}; it must be at least 0.")
        if len(self.model_names) > 1 and self.source_lang is not None:
            raise ValueError(
                "--source_lang and --target_lang are of one model; several say theirs in their config.json."
            )
        if len(self.model_names) > 1 and self.glossary is not None:
            raise ValueError("--glossary is for one model, and several are named.")

    def read_api_keys(self) -> frozenset[str]:
        """The keys of the file; none without one."""
        from vanilla_transformer.data.lines import read_lines

        if self.api_keys is None:
            return frozenset()
        keys = frozenset(line.strip() for line in read_lines(self.api_keys)) - {""}
        if not keys:
            raise ValueError(f"--api_keys: {self.api_keys} holds no key; it must have one per line.")
        return keys


def load_translator(
    arguments: ServingArguments, one: EngineArguments, on_batch: Callable[[int, int], None]
) -> "tuple[dict[tuple[str, str], str], BatchingTranslator]":
    """Loads one of the models, with a thread of its own; returns its pairs of languages and their prefixes, too."""
    from vanilla_transformer.apps.batches import BatchingTranslator, find_max_tokens
    from vanilla_transformer.inference.translate import Translator
    from vanilla_transformer.model.pipeline_vanilla_transformer import find_directions

    n_best = arguments.max_alternatives + 1 if arguments.max_alternatives else None
    name = one.model_name_or_path
    model, tokenizer, settings = one.load()
    directions = find_directions(model.config)
    if one.source_lang is not None:
        directions = {(one.source_lang, str(one.target_lang)): one.find_prefix(model)}
    elif one.source_prefix is not None:
        directions = dict.fromkeys(directions, one.source_prefix)
    if arguments.glossary is not None and len(directions) > 1:
        found = ", ".join(map(" to ".join, directions))
        raise ValueError(f"--glossary is for one pair of languages: give --source_lang and --target_lang ({found}).")
    if not directions:
        raise ValueError(
            f"{name} does not say its languages (langs in config.json); give --source_lang and --target_lang."
        )
    batches: Any = {"batch_size": one.batch_size, "max_batch_tokens": one.max_batch_tokens}
    settings |= arguments.find_glossary(model, one.source_lang)
    translator = Translator(model, tokenizer, n_best=n_best, **batches, **settings)
    translator.limit = None  # Nothing is truncated: what is too long is refused.
    if n_best is not None and n_best > translator.num_beams:
        found = f"max_alternatives is {arguments.max_alternatives} and num_beams of {name} is {translator.num_beams}"
        raise ValueError(f"{found}; alternatives need more beams than there are of them.")
    # Settings that this engine cannot follow are found out now, and not by the first client.
    translator.run(translator.encode(["a"], 1, next(iter(directions.values()))))
    most = find_max_tokens(model, tokenizer, arguments.max_source_length)
    queue: Any = {"max_queue": arguments.max_queue, "max_wait": arguments.max_wait / 1000}
    return directions, BatchingTranslator(translator, max_tokens=most, on_batch=on_batch, **queue)


def load_translators(arguments: ServingArguments, metrics: Any) -> "dict[tuple[str, str], Direction]":
    """Loads the models, in this process or others, by their source and target language."""
    from vanilla_transformer.apps.batches import Direction
    from vanilla_transformer.apps.workers import TranslatingProcesses

    loaded: dict[tuple[str, str], Direction] = {}
    try:
        for one in arguments.divide():
            load = partial(load_translator, arguments, one)
            translator: BatchingTranslator | TranslatingProcesses
            if arguments.workers == 1:
                directions, translator = load(lambda sentences, tokens: None)
            else:
                translator = TranslatingProcesses(load, num_processes=arguments.workers, max_queue=arguments.max_queue)
                directions = translator.directions
            translator.on_batch = metrics.count_batches(directions)
            if pair := next(filter(loaded.get, directions), None):
                translator.stop()
                name = one.model_name_or_path
                raise ValueError(
                    f"{name} translates {' to '.join(pair)}, as another model here does; name one of them."
                )
            loaded |= {pair: Direction(translator, prefix) for pair, prefix in directions.items()}
    except BaseException:
        for each in loaded.values():
            each.stop()
        raise
    return loaded


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens already, so that nobody who reads the address comes too early."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"Nothing can listen at --host {host} --port {port}: {error.strerror or error}.") from error


def run(arguments: ServingArguments) -> None:
    """Loads the models and serves until Ctrl-C or SIGTERM."""
    from vanilla_transformer.files import explain_missing

    logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
    keys = arguments.read_api_keys()
    with explain_missing("The server needs packages of its own", extra="serve", packages=_PACKAGES):
        import python_multipart  # noqa: F401 (starlette reads forms with it)
        import uvicorn

        from vanilla_transformer.apps.server import Limits, Metrics, make_app
        from vanilla_transformer.data.detection import DETECTORS

    metrics = Metrics()
    translators = load_translators(arguments, metrics)
    limits = Limits(
        request_bytes=arguments.max_request_bytes,
        api_keys=keys,
        rate_limit=arguments.rate_limit,
        alternatives=arguments.max_alternatives,
        cuts_lines=arguments.split_sentences,
    )
    options: dict[str, Any] = {"log_level": "warning", "server_header": False, "access_log": False}
    try:
        languages = dict.fromkeys(code for pair in translators for code in pair)
        chosen = arguments.language_detector
        detector = None if chosen is None else DETECTORS[chosen](languages)
        server = uvicorn.Server(uvicorn.Config(make_app(translators, metrics, limits, detector), **options))
        listener = listen(arguments.host, arguments.port)
        # uvicorn ends in order, too, but then raises the signal again, which would look like a failure.
        signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"The server is at http://{shown}:{port} (Ctrl-C ends it)", flush=True)
        server.run(sockets=[listener])
    finally:
        for translator in translators.values():
            translator.stop()
    print("The server has ended; what it accepted is answered.", flush=True)


make_parser = partial(make_argument_parser, ServingArguments, __doc__, shows_defaults=True)
main = make_main(make_parser, run, "The server has ended; what it accepted is answered.")
