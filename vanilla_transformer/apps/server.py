"""A server with LibreTranslate's API: texts of many clients in, translations out. Endpoints and errors are as there."""

import asyncio
import hmac
import json
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.formparsers import MultiPartException, MultiPartParser

from .batches import BadTextError, BatchingTranslator, QueueFullError, StoppedError
from .texts import Pieces, name_language

BODY_SECONDS = 30.0  # how long a client may take to send its request
_RETRY_AFTER = {"Retry-After": "1"}  # seconds
_FIELDS = {
    "q": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "source": {"type": "string", "description": "A language of GET /languages"},
    "target": {"type": "string", "description": "One of its targets"},
    "format": {"type": "string", "enum": ["text", "html"], "default": "text"},
    "api_key": {"type": "string"},
}
_SCHEMA = {"schema": {"type": "object", "required": ["q", "source", "target"], "properties": _FIELDS}}
_KINDS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
_REQUEST_BODY = {"requestBody": {"required": True, "content": dict.fromkeys(_KINDS, _SCHEMA)}}

Pair = tuple[str, str]


class Limits(NamedTuple):
    """What the server takes from its clients."""

    request_bytes: int = 2**18
    api_keys: frozenset[str] = frozenset()  # none: everybody may ask
    cuts_lines: bool = True  # into sentences


USUAL_LIMITS = Limits()


class Metrics:
    """What Prometheus reads at /metrics."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("http_requests", "Answers by path and status.", ["path", "status"], registry=registry)
        self.seconds = Histogram("translate_seconds", "From a request to its answer.", registry=registry)
        labels = ["source", "target"]
        self.sentences = Counter("translated_sentences", "Sentences.", labels, registry=registry)
        self.tokens = Counter("translated_source_tokens", "Tokens of the sources.", labels, registry=registry)
        sizes: Any = {"buckets": [2**power for power in range(11)], "registry": registry}
        self.batches = Histogram("batch_sentences", "Sentences of a batch.", labels, **sizes)
        self.pending = Gauge("pending_sentences", "Accepted and not yet translated.", labels, registry=registry)

    def count_batches(self, pair: Pair) -> Callable[[int, int], None]:
        """What a `BatchingTranslator` of these languages tells of its batches."""

        def count(sentences: int, tokens: int) -> None:
            self.sentences.labels(*pair).inc(sentences)
            self.tokens.labels(*pair).inc(tokens)
            self.batches.labels(*pair).observe(sentences)

        return count


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request, of at most so many bytes and within `BODY_SECONDS`."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise HTTPException(413, f"The request is too large; it may have {most} bytes.")
    except TimeoutError:
        raise HTTPException(408, f"The request did not come within {BODY_SECONDS:g} seconds.") from None
    return bytes(body)


def _refuse_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise HTTPException(400, "A field is given twice.")
    return fields


async def _read_parts(request: Request, body: bytes) -> dict[str, Any]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    form = await MultiPartParser(request.headers, stream(), max_files=0, max_part_size=len(body) + 1).parse()
    return _refuse_twice(form.multi_items())


async def read_fields(request: Request, most: int) -> dict[str, Any]:
    """The fields of a request in JSON or a form; an HTTPException of 4xx says what is wrong with it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await read_body(request, most)
    try:
        if kind == "application/json":
            fields = json.loads(body.decode("utf-8"), object_pairs_hook=_refuse_twice)
        elif kind == "application/x-www-form-urlencoded":
            options: Any = {"keep_blank_values": True, "errors": "strict", "max_num_fields": 100}
            fields = _refuse_twice(urllib.parse.parse_qsl(body.decode("utf-8"), **options))
        elif kind == "multipart/form-data":
            fields = await _read_parts(request, body)
        else:
            raise HTTPException(415, f"The content type is {kind!r}; it must be one of {', '.join(_KINDS)}.")
    except (ValueError, RecursionError, KeyError, MultiPartException) as error:
        raise HTTPException(400, f"The body is no {kind} in UTF-8: {type(error).__name__}.") from error
    if not isinstance(fields, dict):
        raise HTTPException(400, f"The body is a {type(fields).__name__}; it must be an object.")
    return fields


def get_text(fields: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A field that is a text."""
    value = fields.get(name, default)
    if not isinstance(value, str):
        raise HTTPException(400, f"{name} is missing." if value is None else f"{name} must be a string.")
    return value


def get_texts(fields: Mapping[str, Any]) -> list[str]:
    """The texts to translate, one or a list of them."""
    value = fields.get("q")
    texts = value if isinstance(value, list) else [get_text(fields, "q")]
    if not all(isinstance(text, str) for text in texts):
        raise HTTPException(400, "q must be a string or a list of strings.")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise HTTPException(400, "q holds half of a surrogate pair, which is no character.") from error
    return texts


class _Server:
    """What the endpoints share."""

    def __init__(self, translators: Mapping[Pair, BatchingTranslator], metrics: Metrics, limits: Limits) -> None:
        self.translators = translators
        self.metrics = metrics
        self.limits = limits
        for pair, translator in translators.items():
            metrics.pending.labels(*pair).set_function(partial(getattr, translator, "pending"))

    def check_key(self, fields: Mapping[str, Any]) -> None:
        keys = self.limits.api_keys
        if not keys:
            return
        given = get_text(fields, "api_key", "").encode("utf-8", "replace")
        # Every key is compared, so that the time tells nothing.
        if not sum(hmac.compare_digest(given, key.encode()) for key in keys):
            raise HTTPException(403, "Invalid API key" if given else "An API key is needed: api_key.")

    def find_pair(self, fields: Mapping[str, Any]) -> Pair:
        pair = get_text(fields, "source"), get_text(fields, "target")
        if pair[0] == "auto":
            raise HTTPException(400, "source is 'auto', but no language detector is configured; name the language.")
        if pair not in self.translators:
            known = ", ".join(f"{source} to {target}" for source, target in self.translators)
            raise HTTPException(400, f"{pair[0][:50]!r} to {pair[1][:50]!r} is not translated here, but {known}.")
        return pair

    async def translate(self, request: Request) -> dict[str, Any]:
        """Translates a text or a list of texts."""
        fields = await read_fields(request, self.limits.request_bytes)
        self.check_key(fields)
        texts, pair = get_texts(fields), self.find_pair(fields)
        kind = get_text(fields, "format", "text")
        if kind not in ("text", "html"):
            raise HTTPException(400, f"format is {kind[:50]!r}; it must be text or html.")
        if str(fields.get("alternatives", 0)) != "0":
            raise HTTPException(400, "alternatives must be 0: this server gives one translation.")

        def cut() -> list[Pieces]:
            options = {"is_html": kind == "html", "cuts_lines": self.limits.cuts_lines}
            return [Pieces(text, pair[0], **options) for text in texts]

        pieces = await asyncio.to_thread(cut)
        future = self.translators[pair].submit([sentence for text in pieces for sentence in text.sentences])
        # A client that leaves must not cancel what the thread is about to answer.
        translations: list[str] = await asyncio.shield(asyncio.wrap_future(future))
        found = iter(translations)
        joined = [text.join([next(found) for _ in text.sentences]) for text in pieces]
        return {"translatedText": joined if isinstance(fields["q"], list) else joined[0]}

    async def detect(self, request: Request) -> None:
        """There is no detector: says so."""
        fields = await read_fields(request, self.limits.request_bytes)
        self.check_key(fields)
        get_texts(fields)
        raise HTTPException(501, "No language detector is configured; name the source language.")

    async def languages(self) -> list[dict[str, Any]]:
        """The source languages, each with its targets."""
        codes = dict.fromkeys(code for pair in self.translators for code in pair)
        targets = {code: [target for source, target in self.translators if source == code] for code in codes}
        return [{"code": code, "name": name_language(code), "targets": targets[code]} for code in codes]

    async def settings(self) -> dict[str, Any]:
        """What LibreTranslate's pages ask for."""
        has_keys = bool(self.limits.api_keys)
        first = [{"code": code, "name": name_language(code)} for code in next(iter(self.translators))]
        language = dict(zip(("source", "target"), first, strict=True))
        none = {"suggestions": False, "filesTranslation": False, "supportedFilesFormat": []}
        common = {"charLimit": self.limits.request_bytes, "frontendTimeout": 500, "language": language}
        return {"apiKeys": has_keys, "keyRequired": has_keys, **common, **none}

    async def health(self) -> dict[str, str]:
        """That the server runs."""
        return {"status": "ok"}

    async def show_metrics(self) -> Response:
        """Numbers for Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    """Lets every error be answered as LibreTranslate does: `{"error": ...}`."""
    statuses = {BadTextError: 400, QueueFullError: 503, StoppedError: 503}

    async def answer_refusal(request: Request, error: Any) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    async def answer_text(request: Request, error: Any) -> JSONResponse:
        status = statuses[type(error)]
        return JSONResponse({"error": str(error)}, status, _RETRY_AFTER if status == 503 else None)

    async def answer_failure(request: Request, error: Any) -> JSONResponse:
        return JSONResponse({"error": "The server failed; its log says why."}, 500)

    app.add_exception_handler(Exception, answer_failure)
    app.add_exception_handler(AnyHTTPException, answer_refusal)
    for kind in statuses:
        app.add_exception_handler(kind, answer_text)


def make_app(
    translators: Mapping[Pair, BatchingTranslator], metrics: Metrics, limits: Limits = USUAL_LIMITS
) -> FastAPI:
    """The server, to run with uvicorn or any other ASGI server; at its end it waits for what was accepted.

    `translators` are by their source and target language; clients can name those alone, no model and no file.
    """
    server = _Server(translators, metrics, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        for translator in translators.values():
            await asyncio.to_thread(translator.stop)

    app = FastAPI(title="vanilla_transformer", lifespan=lifespan)
    _add_errors(app)

    @app.middleware("http")
    async def count(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        known = request.url.path in paths
        path = request.url.path if known else "other"  # or strangers could make names without end
        status, start = 500, time.monotonic()
        try:
            response = await call_next(request)
            status = response.status_code
            return response
        finally:
            metrics.requests.labels(path, status).inc()
            if path == "/translate":
                metrics.seconds.observe(time.monotonic() - start)

    for path, endpoint in (("/translate", server.translate), ("/detect", server.detect)):
        app.post(path, openapi_extra=_REQUEST_BODY)(endpoint)
    app.get("/languages")(server.languages)
    app.get("/frontend/settings")(server.settings)
    app.get("/health")(server.health)
    app.get("/metrics")(server.show_metrics)
    paths = {"/translate", "/detect", "/languages", "/frontend/settings", "/health", "/metrics"}
    return app
