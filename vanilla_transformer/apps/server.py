"""A server with LibreTranslate's API: texts of many clients in, translations out, by the same endpoints and fields."""

import asyncio
import hmac
import json
import math
import re
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vanilla_transformer.data.detection import Detection, Detector
from vanilla_transformer.hub.words import name_language

from .batches import BadTextError, Direction, LostError, NotReadyError, QueueFullError, StoppedError
from .rates import RateLimiter, find_network
from .texts import Pieces

BODY_SECONDS = 30.0  # how long a client may take to send its request
_RETRY_AFTER = {"Retry-After": "1"}  # seconds
_MOST_RUNNING = 4096  # requests
_FIELDS = {
    "q": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "source": {"type": "string", "description": "A language of GET /languages, or auto"},
    "target": {"type": "string", "description": "One of its targets"},
    "format": {"type": "string", "enum": ["text", "html"], "default": "text"},
    "alternatives": {"type": "integer", "minimum": 0, "default": 0},
    "api_key": {"type": "string"},
}
_DETECTED = {name: _FIELDS[name] for name in ("q", "api_key")}
_KINDS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
# Pages of the server ask nobody else for anything.
_POLICY = (
    b"default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
_PATHS = frozenset(
    {"/translate", "/detect", "/languages", "/frontend/settings", "/health", "/metrics", "/docs", "/openapi.json"}
)
_TAG = re.compile("<[^<>]*>")
_SHORT = 40  # characters of a text that is too short for a language to be seen in it
_QUICK = 2000  # characters that are cut while other requests wait
_TEXT = 20  # characters that take as long as a text that has none
_BOUNDARY = re.compile(r"[\w'()+,./:=? -]{1,70}", re.ASCII)

Pair = tuple[str, str]


class Limits(NamedTuple):
    """What the server takes from its clients."""

    request_bytes: int = 2**18
    api_keys: frozenset[str] = frozenset()  # none: everybody may ask
    rate_limit: int | None = None  # requests a minute of each client
    alternatives: int = 0  # other translations that a client may ask for
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

    def count_batches(self, pairs: Iterable[Pair]) -> Callable[[int, int], None]:
        """What a `BatchingTranslator` of these languages tells of its batches, which may have sentences of any pair."""
        pair = [",".join(dict.fromkeys(side)) for side in zip(*pairs, strict=True)]

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
    except ClientDisconnect:
        raise HTTPException(400, "The request broke off.") from None
    return bytes(body)


def _refuse_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise HTTPException(400, "A field is given twice.")
    return fields


async def _read_parts(request: Request, body: bytes) -> dict[str, Any]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    body.decode("utf-8")  # or the parser would read it as Latin-1
    _, told = parse_options_header(request.headers["content-type"])
    boundary = told.get(b"boundary", b"").decode("latin-1")
    if not _BOUNDARY.fullmatch(boundary):
        raise HTTPException(400, "The content type names no boundary, or one that RFC 2046 does not allow.")
    # Of its parameters nothing else: a client must not choose what decodes the body.
    headers = Headers({"content-type": f'multipart/form-data; boundary="{boundary}"'})
    form = await MultiPartParser(headers, stream(), max_files=0, max_part_size=len(body) + 1).parse()
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


def get_count(fields: Mapping[str, Any], name: str, most: int) -> int:
    """A field that is a number from 0 to `most`, in a form as a text; 0 without it."""
    value = fields.get(name)
    value = 0 if value is None else value
    if not re.fullmatch("[0-9]{1,9}", str(value)) or int(value) > most:
        raise HTTPException(
            400,
            f"{name} must be 0: this server gives one translation."
            if most == 0
            else (f"{name} must be a number from 0 to {most}."),
        )
    return int(value)


class _Server:
    """What the endpoints share."""

    def __init__(
        self,
        translators: Mapping[Pair, Direction],
        metrics: Metrics,
        limits: Limits,
        detector: Detector | None,
    ) -> None:
        self.translators = translators
        self.metrics = metrics
        self.limits = limits
        self.detector = detector
        self.rates = None if limits.rate_limit is None else RateLimiter(limits.rate_limit)
        for pair, translator in translators.items():
            metrics.pending.labels(*pair).set_function(partial(getattr, translator, "pending"))

    async def read(self, request: Request) -> dict[str, Any]:
        """The fields of a request of a client that may ask, and has not asked too often."""
        keys = self.limits.api_keys
        address = find_network(request.client.host if request.client else "")
        if not keys:
            self._count(address)
        fields = await read_fields(request, self.limits.request_bytes)
        if keys:
            given = get_text(fields, "api_key", "").encode("utf-8", "replace")
            # Every key is compared, so that the time tells nothing.
            is_known = bool(sum(hmac.compare_digest(given, key.encode()) for key in keys))
            self._count(given.decode() if is_known else address)
            if not is_known:
                raise HTTPException(403, "Invalid API key" if given else "An API key is needed: api_key.")
        return fields

    def _count(self, client: str) -> None:
        wait = 0.0 if self.rates is None else self.rates.admit(client)
        if wait:
            message = f"Slow down: a client may send {self.limits.rate_limit} requests a minute."
            raise HTTPException(429, message, {"Retry-After": str(math.ceil(wait))})

    def find_pair(self, source: str, target: str) -> Pair:
        """The languages, which must be served."""
        if (source, target) not in self.translators:
            known = ", ".join(f"{source} to {target}" for source, target in self.translators)
            raise HTTPException(400, f"{source[:50]!r} to {target[:50]!r} is not translated here, but {known}.")
        return source, target

    def detect_sources(self, texts: Sequence[str], target: str, is_html: bool) -> list[Detection]:
        """The likeliest language of each text, of short ones that of all together.

        It is one that is translated into the target, or the target itself, as of a text without letters.
        """
        if self.detector is None:
            raise HTTPException(400, "source is 'auto', but no language detector is configured; name the language.")
        plain = [_TAG.sub(" ", text) if is_html else text for text in texts]
        together = self._choose(self.detector("\n".join(plain)), target)
        return [self._choose(self.detector(text), target) if len(text) > _SHORT else together for text in plain]

    def _choose(self, found: Sequence[Detection], target: str) -> Detection:
        fitting = [each for each in found if each.language == target or (each.language, target) in self.translators]
        if not any(each.confidence for each in found):
            fitting = [each for each in fitting if each.language == target] or fitting
        return [*fitting, *found][0]

    async def translate(self, request: Request) -> Response:
        """Translates a text or a list of texts."""
        fields = await self.read(request)
        texts, source, target = get_texts(fields), get_text(fields, "source"), get_text(fields, "target")
        kind = "text" if fields.get("format") in (None, "") else get_text(fields, "format")
        if kind not in ("text", "html"):
            raise HTTPException(400, f"format is {kind[:50]!r}; it must be text or html.")
        count = get_count(fields, "alternatives", self.limits.alternatives)

        def prepare() -> tuple[list[Detection] | None, list[Pair], list[Pieces]]:
            found = self.detect_sources(texts, target, kind == "html") if source == "auto" else None
            sources = [source] * len(texts) if found is None else [each.language for each in found]
            if found is None:
                self.find_pair(source, target)
            # What turns out to be in the target's language stays as it is.
            is_done = [found is not None and each == target for each in sources]
            pairs = [
                (each, target) if done else self.find_pair(each, target)
                for each, done in zip(sources, is_done, strict=True)
            ]
            options = {"is_html": kind == "html", "cuts_lines": self.limits.cuts_lines}
            return found, pairs, [Pieces(text, each, **options) for text, each in zip(texts, sources, strict=True)]

        is_quick = sum(map(len, texts)) + _TEXT * len(texts) <= _QUICK
        found, pairs, pieces = prepare() if is_quick else await asyncio.to_thread(prepare)
        translations = await self._translate(pairs, pieces)

        def join(text: Pieces, own: list[list[str]]) -> list[str]:
            ranks = range(count + 1)
            return list(dict.fromkeys(text.join([each[min(rank, len(each) - 1)] for each in own]) for rank in ranks))

        def join_all() -> list[list[str]]:
            parts = zip(texts, pairs, pieces, translations, strict=True)
            return [
                [text] if found is not None and pair[0] == pair[1] else join(each, own)
                for text, pair, each, own in parts
            ]

        joined = join_all() if is_quick else await asyncio.to_thread(join_all)
        answer: dict[str, Any] = {"translatedText": [best for best, *_ in joined]}
        if found is not None:
            answer["detectedLanguage"] = [each._asdict() for each in found]
        if count:
            answer["alternatives"] = [others for _, *others in joined]
        is_list = isinstance(fields["q"], list)
        return JSONResponse(answer if is_list else {name: value[0] for name, value in answer.items()})

    async def _translate(self, pairs: Sequence[Pair], pieces: Sequence[Pieces]) -> list[list[list[str]]]:
        """For each text, the translations of each of its sentences."""
        translations: list[list[list[str]]] = [[[sentence] for sentence in text.sentences] for text in pieces]
        accepted = []
        for pair in dict.fromkeys(pairs):
            if translator := self.translators.get(pair):
                own = [index for index, each in enumerate(pairs) if each == pair]
                sentences = [sentence for index in own for sentence in pieces[index].sentences]
                accepted.append((own, translator.submit(sentences)))
        for own, future in accepted:
            # A client that leaves must not cancel what the thread is about to answer.
            done: list[list[str]] = await asyncio.shield(asyncio.wrap_future(future))
            found = iter(done)
            for index in own:
                translations[index] = [next(found) for _ in pieces[index].sentences]
        return translations

    async def detect(self, request: Request) -> Response:
        """Says which of the languages served a text may be in, the likeliest first."""
        fields = await self.read(request)
        texts = get_texts(fields)
        if self.detector is None:
            raise HTTPException(501, "No language detector is configured; name the source language.")
        found = self.detector("\n".join(texts))
        return JSONResponse([each._asdict() for each in found if each.confidence or each is found[0]])

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

    async def health(self) -> JSONResponse:
        """Whether all of the models can translate."""
        failed = [" to ".join(pair) for pair, translator in self.translators.items() if not translator.is_ready]
        if failed:
            return JSONResponse({"status": "failed", "languages": failed}, 503)
        return JSONResponse({"status": "ok"})

    async def show_metrics(self) -> Response:
        """Numbers for Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    """Lets every error be answered as LibreTranslate does: `{"error": ...}`."""
    # 503, and in how many seconds to ask again.
    seconds = {QueueFullError: "1", LostError: "1", StoppedError: "1", NotReadyError: "10"}

    async def answer_refusal(request: Request, error: Any) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    async def answer_text(request: Request, error: Any) -> JSONResponse:
        if isinstance(error, BadTextError):
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"error": str(error)}, 503, {"Retry-After": seconds[type(error)]})

    async def answer_failure(request: Request, error: Any) -> JSONResponse:
        # What answers here is outside of what adds such headers.
        return JSONResponse(
            {"error": "The server failed; its log says why."}, 500, {"Access-Control-Allow-Origin": "*"}
        )

    app.add_exception_handler(Exception, answer_failure)
    app.add_exception_handler(AnyHTTPException, answer_refusal)
    for kind in (BadTextError, *seconds):
        app.add_exception_handler(kind, answer_text)


class _Gate:
    """Counts every answer, refuses what is too much at once, and lets pages load nothing from elsewhere."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, start = 500, time.monotonic()

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"content-security-policy", _POLICY)]
            await send(message)

        self.running += 1
        try:
            if self.running > _MOST_RUNNING:
                busy = JSONResponse({"error": "The server has too many requests."}, 503, _RETRY_AFTER)
                await busy(scope, receive, answer)
            else:
                await self.app(scope, receive, answer)
        finally:
            self.running -= 1
            # Of other paths strangers could make names without end.
            path = scope["path"] if scope["path"] in _PATHS else "other"
            self.metrics.requests.labels(path, status).inc()
            if path == "/translate":
                self.metrics.seconds.observe(time.monotonic() - start)


def _describe_body(required: Sequence[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"schema": {"type": "object", "required": list(required), "properties": dict(fields)}}
    return {"requestBody": {"required": True, "content": dict.fromkeys(_KINDS, schema)}}


def make_app(
    translators: Mapping[Pair, Direction],
    metrics: Metrics,
    limits: Limits = USUAL_LIMITS,
    detector: Detector | None = None,
) -> FastAPI:
    """The server, to run with uvicorn or any other ASGI server; at its end it waits for what was accepted.

    `translators` are by their source and target language; clients can name those alone, no model and no file.
    """
    server = _Server(translators, metrics, limits, detector)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        for translator in translators.values():
            await asyncio.to_thread(translator.stop)

    # The page of the specification, with its scripts; it would show the address to a public server to check it.
    app = FastAPIOffline(
        redoc_url=None, title="vanilla_transformer", lifespan=lifespan, swagger_ui_parameters={"validatorUrl": None}
    )
    _add_errors(app)
    app.add_middleware(_Gate, metrics=metrics)
    # Pages of other servers may ask, as they may ask LibreTranslate.
    everybody: Any = {"allow_origins": ["*"], "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    app.add_middleware(CORSMiddleware, **everybody, expose_headers=["Retry-After"])
    app.post("/translate", openapi_extra=_describe_body(("q", "source", "target"), _FIELDS))(server.translate)
    app.post("/detect", openapi_extra=_describe_body(("q",), _DETECTED))(server.detect)
    app.get("/languages")(server.languages)
    app.get("/frontend/settings")(server.settings)
    app.get("/health")(server.health)
    app.get("/metrics")(server.show_metrics)
    return app
