"""A small Hugging Face Hub on this machine, for tests that run real clients against it.

    with LocalHub(tokens={"hf_alice": "alice"}, read_only_tokens={"hf_reader": "alice"}) as hub:
        hub.failures.append(["POST", "/commit/", 500, 1])      # the next commit fails
        env = hub.env("hf_alice", hf_home=tmp_path)            # for a process of its own: HF_ENDPOINT is read at import
        with hub.client("hf_alice"):                           # or for this one
            ...
        hub.files("alice/model"), hub.requests                 # what arrived

It speaks what huggingface_hub and transformers say to push and pull models: repositories, private ones too, branches,
pull requests, commits, model cards, and large files over LFS, to which `env` keeps its clients. It knows no xet,
datasets, spaces, tags, organisations, gated models or git. Contents lie in a temporary folder, all else in memory.
"""

import base64
import hashlib
import json
import os
import re
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypedDict
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import transformers.utils.hub
from huggingface_hub import constants
from local_hub_repo import (
    GITATTRIBUTES,
    File,
    HubError,
    Repo,
    card_errors,
    front_matter,
    git_blob,
    is_large,
    lfs_pointer,
)


class Request(TypedDict):
    """A request as it came in, and the status of the answer."""

    method: str
    path: str
    status: int | None
    body: bytes
    auth: str | None


class User(NamedTuple):
    """Whose token it was."""

    name: str
    may_write: bool


class LocalHub:
    """The Hub: who may do what, the repositories, the contents, and a server on a free port.

    Attributes:
        repos: `Repo` by "owner/name", in small letters.
        requests: every `Request` so far, in the order in which they came.
        failures: what is to go wrong, as lists of method, regular expression for the path, status (or the
            arguments of `HubError`), and how often it still happens.
    """

    def __init__(
        self, tokens: Mapping[str, str] | None = None, read_only_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.users = {token: User(name, True) for token, name in (tokens or {"hf_test": "user"}).items()}
        self.users |= {token: User(name, False) for token, name in (read_only_tokens or {}).items()}
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.failures: list[list[Any]] = []
        self.lock = threading.RLock()
        self._folder = tempfile.TemporaryDirectory(prefix="local-hub-")
        self.root = Path(self._folder.name)
        (self.root / "blobs").mkdir()
        self._server = _Server(self)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._folder.cleanup()

    def env(self, token: str | None = None, hf_home: str | Path | None = None, **extra: str) -> dict[str, str]:
        """The environment of a client in a process of its own, with this token (None: nobody's) and further variables.

        `hf_home` is for the client's caches, which processes may share; by default it is in the Hub's own folder.
        """
        foreign = ("HF_", "HUGGING_FACE_")
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(foreign) and not name.upper().endswith("_PROXY")
        }
        env.setdefault("OMP_NUM_THREADS", "1")
        env |= {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(hf_home or self.root / "hf_home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }
        return env | ({"HF_TOKEN": token} if token else {}) | extra

    @contextmanager
    def client(self, token: str) -> Iterator[pytest.MonkeyPatch]:
        """Makes this process a client, whose constants were read from the environment at import."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "ENDPOINT", self.endpoint)
            template = f"{self.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr(constants, "HF_HUB_CACHE", str(self.root / "cache"))
            patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            # Older versions of transformers have none. It keeps the endpoint that it was made with.
            patch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
            patch.setenv("HF_TOKEN", token)
            yield patch

    def repo(self, repo_id: str) -> Repo:
        """The repository of this name; KeyError if there is none."""
        return self.repos[repo_id.lower()]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, File]:
        """The files of a repository by their paths."""
        return self.repo(repo_id).find(revision)["files"]

    def read(self, repo_id: str, path: str, revision: str = "main") -> bytes:
        """The bytes of a file."""
        return self.content(self.files(repo_id, revision)[path]["sha256"]).read_bytes()

    def user(self, authorization: str | None) -> User | None:
        """Who sends this header; None is anybody."""
        if not authorization:
            return None
        user = self.users.get(authorization.removeprefix("Bearer ").strip())
        if user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return user

    def readable(self, repo_id: str, user: User | None) -> Repo:
        """The repository, if this user may know of it."""
        repo = self.repos.get(repo_id.lower())
        if repo is None or (repo.private and (user is None or user.name != repo.id.split("/")[0])):
            if user is None:
                raise HubError(401, "Invalid username or password.", "RepoNotFound")
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repo

    def writable(self, repo_id: str, user: User | None, ref: str) -> Repo:
        """The repository, if this user may commit to `ref`; a pull request is anybody's who has a token to write."""
        repo = self.readable(repo_id, user)
        if user is None:
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        if not user.may_write:
            raise HubError(403, "Forbidden: the token is read-only")
        if user.name != repo.id.split("/")[0] and not ref.startswith("refs/pr/"):
            raise HubError(403, "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
        return repo

    def take_failure(self, method: str, path: str) -> Any:
        """The status with which this request shall fail, or the arguments of `HubError`."""
        with self.lock:
            for failure in self.failures:
                wanted, pattern, what, times = failure
                if times > 0 and wanted == method and re.search(pattern, path):
                    failure[3] -= 1
                    return what
        return None

    def store(self, data: bytes) -> str:
        """Keeps the bytes and returns their sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        (self.root / "blobs" / sha256).write_bytes(data)
        return sha256

    def small_file(self, data: bytes) -> File:
        """A file that git itself holds."""
        return File(oid=git_blob(data), size=len(data), sha256=self.store(data), lfs=False)

    def large_file(self, sha256: str) -> File:
        """A file whose contents came in before."""
        if not self.content(sha256).exists():
            raise HubError(400, f"Your push was rejected because an LFS pointer points to nothing: {sha256}")
        size = self.content(sha256).stat().st_size
        return File(oid=git_blob(lfs_pointer(sha256, size)), size=size, sha256=sha256, lfs=True)

    def content(self, sha256: str) -> Path:
        """The file with these contents, if they came in."""
        return self.root / "blobs" / sha256


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: LocalHub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    """Answers requests. The methods named in _ROUTES get the parts of the path that the pattern names."""

    disable_nagle_algorithm = True  # or each answer waits for its headers to be acknowledged
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps silent; `LocalHub.requests` is the log."""

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        self.hub = self.server.hub
        self.query = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.record = Request(
            method=self.command, path=self.path, status=None, body=b"", auth=self.headers.get("Authorization")
        )
        self.hub.requests.append(self.record)
        failure = self.hub.take_failure(self.command, url.path)
        try:
            self.record["body"] = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if failure is not None:
                raise HubError(*failure) if isinstance(failure, tuple) else HubError(failure, "the test asked for it")
            self.route(url.path)
        except HubError as error:
            self.send_json({"error": str(error)}, error.status, error.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception as error:
            traceback.print_exc()
            if self.record["status"] is None:
                self.send_json({"error": repr(error)}, 500)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815 (the base class's names)

    def route(self, path: str) -> None:
        for method, pattern, name in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method in (self.command, "GET" if self.command == "HEAD" else None):
                parts = {key: unquote(value or "") for key, value in match.groupdict().items()}
                with self.hub.lock:
                    getattr(self, name)(**parts)
                return
        raise HubError(404, f"no such page: {self.command} {path}")

    def send(self, body: bytes, status: int, headers: Mapping[str, str]) -> None:
        self.record["status"] = status
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Request-Id": os.urandom(8).hex(), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, content: Any, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        self.send(json.dumps(content).encode(), status, {"Content-Type": "application/json; charset=utf-8", **headers})

    def send_file(self, path: Path, headers: Mapping[str, str] = {}) -> None:
        self.send(path.read_bytes(), 200, {"Content-Type": "application/octet-stream", **headers})

    @property
    def json(self) -> Any:
        return json.loads(self.record["body"] or b"{}")

    @property
    def user(self) -> User | None:
        return self.hub.user(self.record["auth"])

    @property
    def author(self) -> str:
        return self.user.name if self.user else "anybody"

    def target(self, revision: str) -> str:
        """The reference that a commit to this revision moves; a pull request that is yet to be opened has none."""
        if self.query.get("create_pr"):
            return "refs/pr/"
        return revision if revision.startswith("refs/") else f"refs/heads/{revision}"

    # Accounts and repositories

    def whoami(self) -> None:
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        token = {"displayName": "token", "role": "write" if self.user.may_write else "read"}
        auth = {"type": "access_token", "accessToken": token}
        self.send_json({"type": "user", "name": self.user.name, "orgs": [], "auth": auth})

    def validate_card(self) -> None:
        errors = [{"message": error} for error in card_errors(self.json["content"])]
        self.send_json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def create_repo(self) -> None:
        wanted, user = self.json, self.user
        if user is None:
            raise HubError(401, "Invalid username or password.")
        owner = wanted.get("organization") or user.name
        repo_id = f"{owner}/{wanted['name']}"
        if owner != user.name or not user.may_write:
            raise HubError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        url = f"{self.hub.endpoint}/{repo_id}"
        if repo_id.lower() in self.hub.repos:
            # With exist_ok the client takes the address from the refusal.
            self.send_json({"error": "You already created this model repo", "url": url}, 409)
            return
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        files = {".gitattributes": self.hub.small_file(GITATTRIBUTES.encode())}
        self.hub.repos[repo_id.lower()] = Repo(repo_id, private=private, author=user.name, files=files)
        self.send_json({"url": url, "name": repo_id, "id": repo_id})

    def model_info(self, repo_id: str, revision: str = "main") -> None:
        repo = self.hub.readable(repo_id, self.user)
        commit = repo.find(revision)
        files = commit["files"]
        card = front_matter(self.text_of(files, "README.md")) or {}
        config = json.loads(self.text_of(files, "config.json") or "{}")
        library = card.get("library_name") or ("transformers" if "model_type" in config else None)
        tags = [library, *(card.get("tags") or []), "custom_code" if "auto_map" in config else None]
        info: dict[str, Any] = {"id": repo.id, "sha": commit["id"], "private": repo.private, "gated": False}
        info |= {"lastModified": commit["date"], "createdAt": repo.created, "cardData": card, "library_name": library}
        info |= {"tags": [tag for tag in tags if tag], "pipeline_tag": card.get("pipeline_tag")}
        info["siblings"] = [{"rfilename": path} for path in sorted(files)]
        self.send_json(info)

    def text_of(self, files: dict[str, File], path: str) -> str:
        return self.hub.content(files[path]["sha256"]).read_text() if path in files else ""

    def tree(self, repo_id: str, revision: str, folder: str) -> None:
        """All files in a folder, those in sub-folders of it included."""
        files = self.hub.readable(repo_id, self.user).find(revision)["files"]
        prefix = f"{folder}/" if folder else ""
        entries = [
            {"type": "file", "path": path, "oid": file["oid"], "size": file["size"]}
            for path, file in sorted(files.items())
            if path.startswith(prefix)
        ]
        if folder and not entries:
            raise HubError(404, f"{folder} does not exist", "EntryNotFound")
        self.send_json(entries)

    def create_branch(self, repo_id: str, name: str) -> None:
        ref = f"refs/heads/{name}"
        repo = self.hub.writable(repo_id, self.user, ref)
        if ref in repo.refs:
            raise HubError(409, f"Reference already exists: {ref}")
        repo.refs[ref] = repo.find(self.json.get("startingPoint", "main"))["id"]
        self.send_json({}, 201)

    # Commits

    def preupload(self, repo_id: str, revision: str) -> None:
        """Says of each file whether it is large, and what is there, so that the client can leave out what is."""
        commit = self.hub.writable(repo_id, self.user, self.target(revision)).find(revision)
        answers = []
        for wanted in self.json["files"]:
            large = is_large(wanted["path"], wanted["size"], base64.b64decode(wanted["sample"]))
            answer = {"path": wanted["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if old := commit["files"].get(wanted["path"]):
                answer["oid"] = old["sha256"] if old["lfs"] else old["oid"]
            answers.append(answer)
        self.send_json({"files": answers, "commitOid": commit["id"]})

    def commit(self, repo_id: str, revision: str) -> None:
        ref = self.target(revision)
        repo = self.hub.writable(repo_id, self.user, ref)
        header, *operations = (json.loads(line) for line in self.record["body"].splitlines() if line.strip())
        commit = repo.find(revision)
        if header["value"].get("parentCommit") not in (None, commit["id"]):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(commit["files"])
        for operation in operations:
            self.apply(operation["key"], operation["value"], files)
        summary, message = header["value"]["summary"], header["value"].get("description", "")
        answer = {"success": True, "hookOutput": ""}
        if ref == "refs/pr/":
            number = repo.add_pull_request()
            ref = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{repo.id}/discussions/{number}"
        changed = [operation["value"]["path"] for operation in operations]
        name = repo.commit(ref, self.author, summary, message, files, changed)
        self.send_json(answer | {"commitOid": name, "commitUrl": f"{self.hub.endpoint}/{repo.id}/commit/{name}"})

    def apply(self, key: str, value: dict[str, Any], files: dict[str, File]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = self.hub.small_file(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            files[path] = self.hub.large_file(value["oid"])
        elif key == "deletedFile" and path in files:
            del files[path]
        else:
            raise HubError(404, f"no file to do {key} to: {path}", "EntryNotFound")

    # Contents

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        repo = self.hub.readable(repo_id, self.user)
        commit = repo.find(revision)
        # With an absent file it makes the client remember the absence.
        headers = {"X-Repo-Commit": commit["id"]}
        file = commit["files"].get(path)
        if file is None:
            raise HubError(404, f"Entry not found: {path}", "EntryNotFound", headers)
        if not file["lfs"]:
            self.send_file(self.hub.content(file["sha256"]), headers | {"ETag": f'"{file["oid"]}"'})
            return
        headers |= {"X-Linked-Size": str(file["size"]), "X-Linked-ETag": f'"{file["sha256"]}"'}
        # Another name of the host, as on the real Hub: a client must not send its token there.
        address = self.hub.endpoint.replace("127.0.0.1", "localhost")
        self.send(b"", 302, headers | {"Location": f"{address}/_cdn/{file['sha256']}"})

    def cdn(self, sha256: str) -> None:
        self.send_file(self.hub.content(sha256), {"ETag": f'"{sha256}"'})

    def lfs_batch(self, repo_id: str) -> None:
        # A client that is about to open a pull request names no reference.
        ref = (self.json.get("ref") or {}).get("name", "refs/pr/")
        self.hub.writable(repo_id, self.user, ref)
        objects = []
        for wanted in self.json["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
            if not self.hub.content(wanted["oid"]).exists():
                upload = {"href": f"{self.hub.endpoint}/_lfs/{wanted['oid']}", "header": {}}
                answer["actions"] = {"upload": upload}
            objects.append(answer)
        self.send_json({"transfer": "basic", "objects": objects})

    def lfs_upload(self, sha256: str) -> None:
        if hashlib.sha256(self.record["body"]).hexdigest() != sha256:
            raise HubError(400, f"these are not the contents of {sha256}")
        self.hub.store(self.record["body"])
        self.send_json({})


# The names of owner and model are asked for without the owner too, by those who mistyped them.
_REPO = r"(?P<repo_id>[^/]+(?:/[^/]+)?)"
_REVISION = r"(?P<revision>[^/]+)"
_SHA256 = r"(?P<sha256>[0-9a-f]{64})"
_NAME = r"(?P<name>[^/]+)"

# Method, pattern of the whole path, method of _Handler; whoever may GET may ask for the HEAD.
_ROUTES = (
    ("GET", "/api/whoami-v2", "whoami"),
    ("POST", "/api/validate-yaml", "validate_card"),
    ("POST", "/api/repos/create", "create_repo"),
    ("GET", f"/api/models/{_REPO}/tree/{_REVISION}(?:/(?P<folder>.+))?", "tree"),
    ("POST", f"/api/models/{_REPO}/branch/{_NAME}", "create_branch"),
    ("POST", f"/api/models/{_REPO}/preupload/{_REVISION}", "preupload"),
    ("POST", f"/api/models/{_REPO}/commit/{_REVISION}", "commit"),
    ("GET", f"/api/models/{_REPO}/revision/{_REVISION}", "model_info"),
    ("GET", f"/api/models/{_REPO}", "model_info"),
    ("GET", f"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", f"/_lfs/{_SHA256}", "lfs_upload"),
    ("GET", f"/_cdn/{_SHA256}", "cdn"),
)
