"""A web server on this machine for tests of pages: folders under paths, and which files were asked for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class PageServer(ThreadingHTTPServer):
    """Serves folders, each under a path such as "/model/", with headers for all."""

    daemon_threads = True

    def __init__(self, folders: dict[str, Path], headers: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folders, self.headers = folders, headers
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(SimpleHTTPRequestHandler):
    server: PageServer

    def translate_path(self, path: str) -> str:
        name = path.split("?")[0]
        prefix = max((each for each in self.server.folders if name.startswith(each)), key=len, default=None)
        self.server.asked.append(name)
        found = Path("missing") if prefix is None else self.server.folders[prefix] / name.removeprefix(prefix)
        return str(found / "index.html" if name.endswith("/") else found)

    def end_headers(self) -> None:
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""


@contextmanager
def serve(folders: dict[str, Path], headers: dict[str, str] | None = None) -> Iterator[PageServer]:
    """Serves until the end of the block; `shutdown()` and `server_close()` end it earlier."""
    server = PageServer(folders, headers or {})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
