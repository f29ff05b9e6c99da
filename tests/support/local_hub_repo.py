"""What the local Hub holds: files, commits and repositories, and what it thinks of a model card."""

import fnmatch
import hashlib
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypedDict

import yaml

# Files kept out of git itself: by their names, as a repository's .gitattributes says, or from this size on.
LARGE_PATTERNS = ("*.bin", "*.gz", "*.model", "*.pkl", "*.pt", "*.pth", "*.safetensors", "*.zip", "*tfevents*")
LARGE_SIZE = 10 * 1024 * 1024
GITATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LARGE_PATTERNS)


class File(TypedDict):
    """A file of a commit; `oid` is git's name for it."""

    oid: str
    size: int
    sha256: str
    lfs: bool


class Commit(TypedDict):
    """A commit with all its files, and those it names: `changed`."""

    id: str
    parent: str | None
    title: str
    message: str
    date: str
    author: str
    files: dict[str, File]
    changed: list[str]


class HubError(Exception):
    """An answer that is an error; `code` is what the client tells its exceptions by."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] = {}) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def is_large(path: str, size: int, sample: bytes) -> bool:
    names = (path, path.rsplit("/", 1)[-1])
    by_name = any(fnmatch.fnmatch(name, pattern) for name in names for pattern in LARGE_PATTERNS)
    return by_name or size >= LARGE_SIZE or b"\0" in sample


def front_matter(text: str) -> Any:
    match = re.match(r"^---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    return yaml.safe_load(match[1]) if match else None


def card_errors(text: str) -> list[str]:
    """What the Hub refuses in the metadata of a model card."""
    try:
        metadata = front_matter(text)
    except yaml.YAMLError as error:
        return [f"YAML metadata error: {error}"]
    if metadata is None:
        return []
    if not isinstance(metadata, dict):
        return ['"metadata" must be an object']
    errors = []
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", str(metadata.get("license", "unknown"))):
        errors.append(f'"license" must be one of the known identifiers, got {metadata["license"]!r}')
    languages = metadata.get("language") or []
    for language in [languages] if isinstance(languages, str) else languages:
        if not re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual", str(language)):
            errors.append(f'"language" with value "{language}" is not valid')
    for entry in metadata.get("model-index") or []:
        if "name" not in entry:
            errors.append('"model-index[].name" is required')
        for result in entry.get("results") or []:
            missing = {"task", "dataset", "metrics"} - set(result)
            errors += [f'"model-index[].results[].{name}" is required' for name in sorted(missing)]
    return errors


class Repo:
    """A repository: commits, and the branches and pull requests that point at them."""

    def __init__(self, repo_id: str, *, private: bool, author: str, files: dict[str, File]) -> None:
        self.id, self.private, self.created = repo_id, private, _now()
        self.refs: dict[str, str] = {}
        self.commits: dict[str, Commit] = {}
        self.commit("refs/heads/main", author, "initial commit", "", files, sorted(files))

    def commit(
        self, ref: str, author: str, title: str, message: str, files: dict[str, File], changed: list[str]
    ) -> str:
        """Moves `ref` to a new commit and returns its name."""
        name, parent = os.urandom(20).hex(), self.refs.get(ref)
        self.commits[name] = Commit(
            id=name,
            parent=parent,
            title=title,
            message=message,
            date=_now(),
            author=author,
            files=files,
            changed=changed,
        )
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
