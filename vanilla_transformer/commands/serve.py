r"""Serve translations over HTTP with LibreTranslate's API, so that its clients work unchanged.

    pip install "vanilla-transformer[serve]"
    vanilla-transformer serve --model_name_or_path out/my-model
    vanilla-transformer serve --model_name_or_path out/en-de out/de-en --engine ctranslate2 --num_beams 4
    vanilla-transformer serve --model_name_or_path Helsinki-NLP/opus-mt-en-de --source_lang en --target_lang de

    curl 127.0.0.1:5000/translate -d q="Good morning." -d source=en -d target=de

POST /translate takes a text or a list of texts, in JSON or a form; GET /languages names the languages. There are
/health, /metrics (Prometheus) and /docs (OpenAPI). Texts of all clients are translated together. Where more is sent
than --max_queue, the answer is 503 with Retry-After. SIGTERM ends the server when what it accepted is answered.

Only this machine can reach it unless --host says otherwise; for encrypted connections put a proxy before it. Each model
is for the languages that its configuration names, or for --source_lang and --target_lang.
"""

import dataclasses
import signal
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vanilla_transformer.export.engines import EngineArguments
from vanilla_transformer.inference.arguments import GlossaryArguments
from vanilla_transformer.options import option

from .command_line import make_argument_parser, make_main

if TYPE_CHECKING:
    from vanilla_transformer.apps.batches import BatchingTranslator

_PACKAGES = "fastapi uvicorn prometheus_client python-multipart sentencex Babel"


@dataclass
class ServingArguments(GlossaryArguments, EngineArguments):
    """What to serve, to whom, and how much of it."""

    model_name_or_path: str = option("Folders or Hub names of sequence-to-sequence models, a pair each.", nargs="+")
    max_source_length: int | None = option(
        "The most tokens of a sentence; longer ones are refused. Default: what is known of the model, at most 1024.",
        None,
    )
    host: str = option("The address to listen at; 0.0.0.0 lets others in.", "127.0.0.1")
    port: int = option("The port; 0: any that is free.", 5000)
    max_queue: int = option("The most sentences of a model that are accepted and not yet translated.", 1024)
    max_wait: float = option("How long a sentence waits for others while nothing is translated, in milliseconds.", 5.0)
    max_request_bytes: int = option("The largest request.", 262144)
    api_keys: str | None = option("UTF-8 text, a key per line: clients need one of them. Default: no key.", None)
    split_sentences: bool = option("Cut lines into sentences.", True)

    def __post_init__(self) -> None:
        names: Any = self.model_name_or_path
        self.served: list[str] = [names] if isinstance(names, str) else names
        self.model_name_or_path = self.served[0]
        super().__post_init__()
        for name in ("max_queue", "max_request_bytes", "max_source_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if not 0 <= self.max_wait < 60_000:
            raise ValueError(f"max_wait is {self.max_wait}; it must be at least 0 and below 60000 milliseconds.")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535.")
        if len(self.served) > 1 and self.source_lang is not None:
            raise ValueError(
                "--source_lang and --target_lang are of one model; several say theirs in their config.json."
            )
        if len(self.served) > 1 and self.glossary is not None:
            raise ValueError("--glossary is for one model, and several are named.")

    def select(self, name: str) -> EngineArguments:
        """The arguments of one model."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(EngineArguments)}
        return EngineArguments(**given | {"model_name_or_path": name})

    def read_api_keys(self) -> frozenset[str]:
        """The keys of the file; none without one."""
        from vanilla_transformer.data.corpora import read_lines

        if self.api_keys is None:
            return frozenset()
        keys = frozenset(line.strip() for line in read_lines(self.api_keys)) - {""}
        if not keys:
            raise ValueError(f"--api_keys: {self.api_keys} holds no key; it must have one per line.")
        return keys


def load_translators(arguments: ServingArguments, metrics: Any) -> "dict[tuple[str, str], BatchingTranslator]":
    """Loads the models, each with a thread of its own, by their source and target language."""
    from vanilla_transformer.apps.batches import BatchingTranslator, find_max_tokens
    from vanilla_transformer.inference.translate import Translator

    loaded: dict[tuple[str, str], tuple[Translator, int]] = {}
    for name in arguments.served:
        one = arguments.select(name)
        model, tokenizer, settings = one.load()
        given = None if one.source_lang is None else (one.source_lang, str(one.target_lang))
        pair = given or tuple(getattr(model.config, "langs", None) or ())
        if len(pair) != 2:
            raise ValueError(
                f"{name} does not say its languages (langs in config.json); give --source_lang and --target_lang."
            )
        if pair in loaded:
            raise ValueError(f"{name} translates {' to '.join(pair)}, as another model here does; name one of them.")
        most = find_max_tokens(model, tokenizer, arguments.max_source_length)
        batches: Any = {"batch_size": one.batch_size, "max_batch_tokens": one.max_batch_tokens}
        settings |= arguments.find_glossary(model, one.source_lang)
        # Nothing is truncated: what is too long is refused.
        prefix: Any = {"source_prefix": one.find_prefix(model), "max_source_length": 10**9}
        loaded[pair] = (Translator(model, tokenizer, **batches, **prefix, **settings), most)
    queue: Any = {"max_queue": arguments.max_queue, "max_wait": arguments.max_wait / 1000}
    return {
        pair: BatchingTranslator(translator, max_tokens=most, on_batch=metrics.count_batches(pair), **queue)
        for pair, (translator, most) in loaded.items()
    }


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

    keys = arguments.read_api_keys()
    with explain_missing("The server needs packages of its own", extra="serve", packages=_PACKAGES):
        import python_multipart  # noqa: F401 (starlette reads forms with it)
        import uvicorn

        from vanilla_transformer.apps.server import Limits, Metrics, make_app

    metrics = Metrics()
    translators = load_translators(arguments, metrics)
    limits = Limits(arguments.max_request_bytes, keys, arguments.split_sentences)
    app = make_app(translators, metrics, limits)
    options: dict[str, Any] = {"log_level": "warning", "server_header": False, "limit_concurrency": 1024}
    config = uvicorn.Config(app, **options)
    server = uvicorn.Server(config)
    try:
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


make_parser = partial(make_argument_parser, ServingArguments, __doc__)
main = make_main(make_parser, run, "The server has ended; what it accepted is answered.")
