"""A small Hugging Face Hub on this machine, for tests that run real clients against it.

    with LocalHub(tokens={"hf_alice": "alice"}, read_only_tokens={"hf_reader": "alice"}) as hub:
        hub.failures.append(["POST", "/commit/", 500, 1])      # the next commit fails
        env = hub.env("hf_alice", hf_home=tmp_path)            # for a process of its own: HF_ENDPOINT is read at import
        with hub.client("hf_alice"): ...                       # or for this one
        hub.files("alice/model"), hub.requests                 # what arrived

It speaks what huggingface_hub and transformers say to push and pull models: repositories, private ones too, branches,
pull requests, commits, model cards, and large files over LFS, to which `env` keeps its clients. It knows no xet,
datasets, spaces, tags, organisations, gated models or git. Contents lie in a temporary folder, all else in memory.
"""

import base64
import fnmatch
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
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import transformers.utils.hub
import yaml
from huggingface_hub import constants

# Files kept out of git itself: by their names, as a repository's .gitattributes says, or from this size on.
LARGE_PATTERNS = ("*.bin", "*.gz", "*.model", "*.pkl", "*.pt", "*.pth", "*.safetensors", "*.zip", "*tfevents*")
LARGE_SIZE = 10 * 1024 * 1024
GITATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LARGE_PATTERNS)

# A commit: its id, parent, title, author, all its files by their paths, and the names of those that it changed.
Commit = dict[str, Any]


class File(NamedTuple):
    """A file of a commit; `oid` is git's name for it."""

    oid: str
    size: int
    sha256: str
    lfs: bool


class User(NamedTuple):
    """Whose token it was."""

    name: str
    may_write: bool


class HubError(Exception):
    """An answer that is an error; `code` is what the client tells its exceptions by."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] = {}) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(path: str, size: int, sample: bytes) -> bool:
    names = (path, path.rsplit("/", 1)[-1])
    by_name = any(fnmatch.fnmatch(name, pattern) for name in names for pattern in LARGE_PATTERNS)
    return by_name or size >= LARGE_SIZE or b"\0" in sample


def card_errors(text: str) -> list[str]:
    """What the Hub refuses in the metadata of a model card."""
    match = re.match(r"^---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    metadata = yaml.safe_load(match[1]) if match else {}
    errors = []
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", str(metadata.get("license", "unknown"))):
        errors.append(f'"license" must be one of the known identifiers, got {metadata["license"]!r}')
    languages = metadata.get("language") or []
    for language in [languages] if isinstance(languages, str) else languages:
        if not re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual", str(language)):
            errors.append(f'"language" with value "{language}" is not valid')
    return errors


class Repo:
    """A repository: commits, and the branches and pull requests that point at them."""

    def __init__(self, repo_id: str, *, private: bool, author: str, files: dict[str, File]) -> None:
        self.id, self.private = repo_id, private
        self.refs: dict[str, str] = {}
        self.commits: dict[str, Commit] = {}
        self.commit("refs/heads/main", author, "initial commit", files, sorted(files))

    def commit(self, ref: str, author: str, title: str, files: dict[str, File], changed: list[str]) -> str:
        """Moves `ref` to a new commit and returns its name."""
        name = os.urandom(20).hex()
        commit = {"id": name, "parent": self.refs.get(ref), "title": title, "author": author}
        self.commits[name] = {**commit, "files": files, "changed": changed}
        self.refs[ref] = name
        return name

    def find(self, revision: str) -> Commit:
        """The commit that a branch, a full reference or a commit's name means."""
        for ref in (revision, f"refs/heads/{revision}"):
            if ref in self.refs:
                return self.commits[self.refs[ref]]
        if revision in self.commits:
            return self.commits[revision]
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def history(self, revision: str = "main") -> list[Commit]:
        """The commit and those before it, newest first."""
        commits = [self.find(revision)]
        while parent := commits[-1]["parent"]:
            commits.append(self.commits[parent])
        return commits

    def add_pull_request(self) -> int:
        """The number of a new pull request from the main branch; its reference is refs/pr/<number>."""
        number = 1 + sum(ref.startswith("refs/pr/") for ref in self.refs)
        self.refs[f"refs/pr/{number}"] = self.refs["refs/heads/main"]
        return number


def become_client(patch: pytest.MonkeyPatch, endpoint: str, cache: str, token: str) -> None:
    """Makes this process a client of a Hub: its constants were read from the environment at import."""
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    values = {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": cache}
    for name, value in {**values, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}.items():
        patch.setattr(constants, name, value)
    # Older versions of transformers have none. It keeps the endpoint that it was made with.
    patch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
    patch.setenv("HF_TOKEN", token)


class LocalHub:
    """The Hub: who may do what, the repositories, the contents, and a server on a free port.

    `repos` are by "owner/name" in small letters. `requests` came in in this order, each with method, path, body, auth
    and the status of the answer. `failures` are what is to go wrong: lists of method, regular expression for the path,
    status (or the arguments of `HubError`), and how often it still happens.
    """

    def __init__(self, tokens: Mapping[str, str], read_only_tokens: Mapping[str, str] = {}) -> None:
        self.users = {token: User(name, True) for token, name in tokens.items()}
        self.users |= {token: User(name, False) for token, name in read_only_tokens.items()}
        self.repos: dict[str, Repo] = {}
        self.requests: list[dict[str, Any]] = []
        self.failures: list[list[Any]] = []
        self.lock = threading.RLock()
        self._folder = tempfile.TemporaryDirectory(prefix="local-hub-")
        self.root = Path(self._folder.name)
        (self.root / "blobs").mkdir()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._folder.cleanup()

    def env(self, token: str, hf_home: Path) -> dict[str, str]:
        """The environment of a client in a process of its own, which has its caches in `hf_home`."""
        env = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
        env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": token}
        return env | {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(hf_home)}

    @contextmanager
    def client(self, token: str) -> Iterator[pytest.MonkeyPatch]:
        """Makes this process a client."""
        with pytest.MonkeyPatch.context() as patch:
            become_client(patch, self.endpoint, str(self.root / "cache"), token)
            yield patch

    def repo(self, repo_id: str) -> Repo:
        return self.repos[repo_id.lower()]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, File]:
        files: dict[str, File] = self.repo(repo_id).find(revision)["files"]
        return files

    def read(self, repo_id: str, path: str, revision: str = "main") -> bytes:
        return self.content(self.files(repo_id, revision)[path].sha256).read_bytes()

    def contents(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """The bytes of all files."""
        return {path: self.read(repo_id, path, revision) for path in self.files(repo_id, revision)}

    def titles(self, repo_id: str, revision: str = "main") -> list[str]:
        """Those of the commits, newest first."""
        return [commit["title"] for commit in self.repo(repo_id).history(revision)]

    def known(self, user: User | None) -> User:
        if user is None:
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        return user

    def readable(self, repo_id: str, user: User | None) -> Repo:
        """The repository, if this user may know of it."""
        repo = self.repos.get(repo_id.lower())
        if repo is None or (repo.private and self.known(user).name != repo.id.split("/")[0]):
            self.known(user)
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repo

    def writable(self, repo_id: str, user: User | None, ref: str) -> Repo:
        """The repository, if this user may commit to `ref`; a pull request is anybody's who has a token to write."""
        repo, user = self.readable(repo_id, user), self.known(user)
        if not user.may_write:
            raise HubError(403, "Forbidden: the token is read-only")
        if user.name != repo.id.split("/")[0] and not ref.startswith("refs/pr/"):
            raise HubError(403, "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
        return repo

    def store(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        (self.root / "blobs" / sha256).write_bytes(data)
        return sha256

    def small_file(self, data: bytes) -> File:
        return File(oid=git_blob(data), size=len(data), sha256=self.store(data), lfs=False)

    def large_file(self, sha256: str) -> File:
        """A file whose contents came in before."""
        if not self.content(sha256).exists():
            raise HubError(400, f"Your push was rejected because an LFS pointer points to nothing: {sha256}")
        size = self.content(sha256).stat().st_size
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        return File(oid=git_blob(pointer.encode()), size=size, sha256=sha256, lfs=True)

    def content(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: LocalHub


class _Handler(BaseHTTPRequestHandler):
    """Answers requests. The methods named in _ROUTES get the parts of the path that the pattern names."""

    disable_nagle_algorithm = True  # or each answer waits for its headers to be acknowledged
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        """Keeps silent; `LocalHub.requests` is the log."""

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        self.hub = self.server.hub
        self.query = {name: values[-1] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.record: dict[str, Any] = {"method": self.command, "path": self.path, "status": None, "body": b""}
        self.record["auth"] = self.headers.get("Authorization")
        self.hub.requests.append(self.record)
        try:
            self.record["body"] = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            for failure in self.hub.failures:
                method, pattern, what, times = failure
                if times > 0 and method == self.command and re.search(pattern, url.path):
                    failure[3] -= 1
                    raise HubError(*what) if isinstance(what, tuple) else HubError(what, "the test asked for it")
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

    @property
    def json(self) -> Any:
        return json.loads(self.record["body"] or b"{}")

    @property
    def user(self) -> User | None:
        """Whose token came; None is anybody."""
        token = (self.record["auth"] or "").removeprefix("Bearer ").strip()
        if token and token not in self.hub.users:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(token)

    def target(self, revision: str) -> str:
        """The reference that a commit to this revision moves; a pull request that is yet to be opened has none."""
        if self.query.get("create_pr"):
            return "refs/pr/"
        return revision if revision.startswith("refs/") else f"refs/heads/{revision}"

    # Accounts and repositories

    def whoami(self) -> None:
        user = self.hub.known(self.user)
        token = {"displayName": "token", "role": "write" if user.may_write else "read"}
        auth = {"type": "access_token", "accessToken": token}
        self.send_json({"type": "user", "name": user.name, "orgs": [], "auth": auth})

    def validate_card(self) -> None:
        errors = [{"message": error} for error in card_errors(self.json["content"])]
        self.send_json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def create_repo(self) -> None:
        wanted, user = self.json, self.hub.known(self.user)
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
        info: dict[str, Any] = {"id": repo.id, "sha": commit["id"], "private": repo.private, "gated": False}
        self.send_json(info | {"tags": [], "siblings": [{"rfilename": path} for path in sorted(commit["files"])]})

    def tree(self, repo_id: str, revision: str, folder: str) -> None:
        """All files in a folder, those in sub-folders of it included."""
        files = self.hub.readable(repo_id, self.user).find(revision)["files"]
        found = [(path, file) for path, file in sorted(files.items()) if path.startswith(folder and f"{folder}/")]
        if folder and not found:
            raise HubError(404, f"{folder} does not exist", "EntryNotFound")
        self.send_json([{"type": "file", "path": path, "oid": file.oid, "size": file.size} for path, file in found])

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
                answer["oid"] = old.sha256 if old.lfs else old.oid
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
        answer = {"success": True, "hookOutput": ""}
        if ref == "refs/pr/":
            number = repo.add_pull_request()
            ref = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{repo.id}/discussions/{number}"
        changed = [operation["value"]["path"] for operation in operations]
        name = repo.commit(ref, self.hub.known(self.user).name, header["value"]["summary"], files, changed)
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
        if not file.lfs:
            self.send(self.hub.content(file.sha256).read_bytes(), 200, headers | {"ETag": f'"{file.oid}"'})
            return
        headers |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"'}
        # Another name of the host, as on the real Hub: a client must not send its token there.
        address = self.hub.endpoint.replace("127.0.0.1", "localhost")
        self.send(b"", 302, headers | {"Location": f"{address}/_cdn/{file.sha256}"})

    def cdn(self, sha256: str) -> None:
        self.send(self.hub.content(sha256).read_bytes(), 200, {"ETag": f'"{sha256}"'})

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
