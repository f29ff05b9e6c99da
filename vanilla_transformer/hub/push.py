"""Publishes a model's folder on the Hub: checked first, shown, and then pushed in one commit or one pull request."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, errors, get_token
from huggingface_hub.hf_api import ModelInfo
from transformers.utils import logging

from vanilla_transformer.files import replacing_files
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig

from .cards import CardChoice, PushedCard, make_card
from .checks import CodeChoice, Inspection, inspect_model_folder
from .errors import HUB_ERRORS, PushError, explain_error, is_network_error
from .facts import ModelFolder
from .files import CARD_NAME, Problem, join_lines, read_bytes, read_json, read_text, select_files
from .words import get_task_words

logger = logging.get_logger(__name__)

# Weights that would be loaded instead of new ones, or that are parts of old ones.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
# The cards that were pushed from a folder, by branch; the Trainer never uploads what begins with an underscore.
_RECORD = "_pushed.json"
_STATUSES = ("new", "changed", "unchanged", "deleted")
# Such as apache-2.0; what else the Hub takes it does not tell its client.
_LICENSE = re.compile(r"[a-z0-9]+([.+-][a-z0-9]+)*")
_SHOWN_TEXT = 100  # characters


@dataclass(frozen=True)
class PlannedFile:
    """A file of a push.

    Args:
        path: Its path in the repository.
        size: In bytes.
        status: What the push does to the file on the Hub.
    """

    path: str
    size: int
    status: Literal["new", "changed", "unchanged", "deleted"]


@dataclass
class PlannedPush:
    """A push that was prepared by `plan_push`: nothing has changed yet, neither on the Hub nor in the folder.

    Args:
        folder: What is pushed.
        repo_id: Where to, with the namespace.
        problems: Why it cannot be pushed.
        files: What would be pushed, and which weights on the Hub it replaces.
        left_out: What is not pushed, each with the reason.
        notes: What else one should know.
        commit_url: The address of the commit, once it was pushed and if anything was.
    """

    folder: Path
    repo_id: str
    problems: list[Problem]
    files: list[PlannedFile]
    left_out: dict[str, str]
    notes: list[str]
    _target: "_Target"
    _sources: dict[str, Path | bytes]
    _replaced: dict[str, Path | bytes] = field(default_factory=dict)
    _backup: str | None = None
    commit_url: str | None = None

    def describe(self) -> str:
        """What is pushed where, and what is not, in lines for a terminal."""
        lines = [f"{self.folder} -> {self._target.describe()}", ""]
        shown = [file for file in self.files if file.status != "unchanged"]
        width = max([len(name) for name in (*(file.path for file in shown), *self.left_out)], default=0)
        lines += [f"  {file.path:<{width}}  {_format_size(file.size):>9}  {file.status}" for file in shown]
        counts = {status: sum(file.status == status for file in self.files) for status in _STATUSES}
        size = sum(file.size for file in self.files if file.status in ("new", "changed"))
        counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        lines += [f"  {counted}; {_format_size(size)} to push"]
        if self.left_out:
            lines += ["", "Left out (--include NAME pushes what is neither a pickle nor looks like a secret):"]
            lines += [f"  {name:<{width}}  {reason}" for name, reason in self.left_out.items()]
        return "\n".join([*lines, "", *self.notes]).rstrip()

    @property
    def changes(self) -> bool:
        """Whether there is anything to push."""
        return self._target.makes_branch or any(file.status != "unchanged" for file in self.files)

    def push(self, commit_message: str | None = None) -> str:
        """Pushes, in one commit or one pull request.

        A repository that does not exist is made. If it has changed since the push was planned, nothing is pushed. Once
        it succeeded, the card that was pushed, the completed config.json and code taken from the installed package are
        in the folder too. A card with text that is not in the one that was pushed stays beside it, as README.md.bak-1.

        Args:
            commit_message: Title of the commit. Default: one that names the folder.

        Returns:
            The address to look at: the repository's, its branch's or the pull request's.

        Raises:
            ValueError: If there are problems.
            PushError: If the Hub refuses, or cannot be reached. The folder is as it was, and the same call again goes
                on: files that arrived are not sent twice.
        """
        if self.problems:
            raise ValueError(self.describe_problems())
        changed = [file.path for file in self.files if file.status in ("new", "changed")]
        operations: list[Any] = [CommitOperationAdd(path, _openable(self._sources[path])) for path in changed]
        operations += [CommitOperationDelete(file.path) for file in self.files if file.status == "deleted"]
        message = commit_message or f"Push {self.folder.resolve().name}"
        url, commit = self._target.commit(operations, message)
        self.commit_url = commit.commit_url if commit is not None else None
        try:
            self._update_folder()
        except OSError as error:
            logger.warning(f"It was pushed, but the card that was pushed cannot be written into the folder: {error}")
        return url

    def describe_problems(self) -> str:
        """Why it cannot be pushed, in lines for a terminal."""
        return f"{self.folder} cannot be pushed:\n  " + "\n  ".join(map(str, self.problems))

    def _update_folder(self) -> None:
        card = self._sources[CARD_NAME]
        new = {name: _read(source) for name, source in self._replaced.items()}
        if isinstance(card, bytes):
            new[CARD_NAME] = card
            old = read_bytes(self.folder / CARD_NAME)
            if self._backup is not None and old is not None:
                new[self._backup] = old
            if not self._target.create_pr:
                record = {**read_json(self.folder / _RECORD), self._target.key: card.decode()}
                new[_RECORD] = (json.dumps(record, indent=2) + "\n").encode()
        changed = {name: content for name, content in new.items() if read_bytes(self.folder / name) != content}
        if changed:
            with replacing_files(self.folder) as partial:
                for name, content in changed.items():
                    (partial / name).write_bytes(content)


def plan_push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
    include: Sequence[str] = (),
    code: CodeChoice | None = None,
    card: CardChoice | None = None,
    **metadata: Any,
) -> PlannedPush:
    """Checks a model's folder and finds out what pushing it would change; changes nothing itself.

    The model card is built from the folder's records. What a user wrote into the folder's README.md and into the one
    on the Hub stays. A config.json of this package without `langs` gets them, and the task that they name, if the
    folder's arguments.json or `language` tells them.

    Args:
        folder: A folder that `save_pretrained` or the Trainer wrote.
        repo_id: `namespace/name` on the Hub, or the name alone for the user's own namespace.
        private: Whether a repository that does not exist shall be private.
        revision: A branch, which is made if there is none. Default: the repository's main branch.
        create_pr: Whether to open a pull request instead of a commit to the main branch.
        token: A token of the Hub. Default: the one of `hf auth login` or of the variable HF_TOKEN.
        include: Files or sub-folders, or patterns of them, to push beyond those that `hub_files.select_files` chooses.
        code: What to do about code in the folder that differs from the installed package's, as for
            `check_model_folder`.
        card: Whose README.md counts where the folder's and the Hub's were edited at the same place in different ways.
            Default: it is a problem.
        **metadata: What the card shall say of `license`, `datasets`, `language`, `tags`, `model_name` and
            `base_model`.

    Returns:
        The plan, with all problems of the folder.

    Raises:
        ValueError: If there is no such folder, or an argument is not legal.
        PushError: If the Hub refuses. One that cannot be reached is noted in the plan only.
    """
    root = Path(folder)
    if create_pr and revision is not None:
        raise ValueError(f"A pull request is opened against the main branch, not against revision={revision!r}.")
    target = _Target(repo_id, private=private, revision=revision, create_pr=create_pr, token=token)
    target.look()
    there = target.read_card()
    select_files(root, include)  # before anything is read
    metadata["revision"] = target.name_revision()
    problems: list[Problem] = []
    config, pushed = _prepare(root, target, there, card, metadata, problems)
    changes = {} if config is None else {"config.json": _dump(config)}
    found = inspect_model_folder(
        root, card=pushed.text if pushed else None, include=include, code=code, changes=changes
    )
    problems += [problem for problem in found.problems if pushed is not None or problem.check != "card"]
    sources: dict[str, Path | bytes] = dict(found.files)
    if pushed is not None:
        sources[CARD_NAME] = pushed.text.encode()
    return PlannedPush(
        folder=root,
        repo_id=target.repo_id,
        problems=problems,
        files=_compare(sources, target),
        left_out=found.selection.left_out,
        notes=[*target.notes, *_notes(found, config, pushed, metadata.get("license"))],
        _target=target,
        _sources=dict(sorted(sources.items())),
        _replaced={**found.replaced, **changes},
        _backup=pushed.backup if pushed is not None else None,
    )


def push_model_folder(
    folder: str | os.PathLike[str], repo_id: str, *, commit_message: str | None = None, **kwargs: Any
) -> str:
    """Checks a model's folder and pushes it to the Hub, in one commit or one pull request.

    Args:
        folder: A folder that `save_pretrained` or the Trainer wrote.
        repo_id: `namespace/name` on the Hub, or the name alone for the user's own namespace.
        commit_message: Title of the commit.
        **kwargs: As for `plan_push`.

    Returns:
        The address to look at: the repository's, its branch's or the pull request's.

    Raises:
        ValueError: If something is wrong with the folder (all of it is listed) or with an argument.
        PushError: If the Hub refuses, or cannot be reached.

    Example:
        ```python
        push_model_folder("out/my-model", "me/my-model", license="apache-2.0", datasets=["multi30k"])
        ```
    """
    return plan_push(folder, repo_id, **kwargs).push(commit_message)


class _Target:
    """Where a push goes, and what is there."""

    def __init__(
        self, repo_id: str, *, private: bool, revision: str | None, create_pr: bool, token: str | None
    ) -> None:
        self.repo_id, self.private, self.revision, self.create_pr = repo_id, private, revision, create_pr
        self.token = token or get_token()
        self.api = HfApi(token=self.token or False)
        self.info: ModelInfo | None = None  # of the repository, at the revision if that exists
        self.reached = True
        self.makes_branch = False
        self.notes: list[str] = []

    @property
    def place(self) -> str:
        """What the names of all of its branches begin with in a folder's record."""
        return f"{self.api.endpoint}/{self.repo_id}@"

    @property
    def key(self) -> str:
        """Names the branch in a folder's record."""
        return f"{self.place}{self.revision or 'main'}"

    def describe(self) -> str:
        """The address, and what is there."""
        url = f"{self.api.endpoint}/{self.repo_id}"
        if not self.reached:
            return f"{url} (not reached)"
        if self.info is None:
            return f"{url} (new, {'private' if self.private else 'public'})"
        what = ["private" if self.info.private else "public"]
        what += [f"{'new ' * self.makes_branch}branch {self.revision}"] if self.revision else []
        what += ["in a pull request"] if self.create_pr else []
        return f"{url} ({', '.join(what)})"

    def look(self) -> None:
        """Finds out what is there.

        Raises:
            ValueError: If that contradicts the arguments.
            PushError: If the Hub refuses to say.
        """
        try:
            if "/" not in self.repo_id and self.token:
                self.repo_id = f"{self.api.whoami()['name']}/{self.repo_id}"
            self.info = self._read_info()
        except errors.HFValidationError as error:
            raise ValueError(f"repo_id must be like 'me/my-model', not {self.repo_id!r}: {error}") from error
        except errors.RepositoryNotFoundError:
            if self.create_pr:
                raise ValueError(
                    f"There is no repository {self.repo_id} to open a pull request against, or the token may not read "
                    "it. Without a pull request it is made."
                ) from None
            if not self.token:
                self.notes.append("There is no token, so that a private repository would not be seen.")
        except HUB_ERRORS as error:
            explained = self._explain(error)
            if not is_network_error(error):
                raise explained from error
            self.reached = False
            self.notes.append(f"{explained} All files are listed as new.")
        if self.info is not None and self.private and not self.info.private:
            raise ValueError(
                f"{self.repo_id} exists and is public, and private=True makes new repositories private only: change it "
                "in its settings on the Hub first."
            )

    def _read_info(self) -> ModelInfo:
        try:
            return self.api.model_info(self.repo_id, revision=self.revision, files_metadata=True)
        except errors.RevisionNotFoundError:
            self.makes_branch = True  # it will start as the main branch
            return self.api.model_info(self.repo_id, files_metadata=True)

    def name_revision(self) -> str | None:
        """The branch, if the examples of use must name it, since the main branch holds no model."""
        if self.revision in (None, "main") or not self.reached:
            return None
        main = self.info
        if main is not None and not self.makes_branch:
            try:
                main = self.api.model_info(self.repo_id)
            except HUB_ERRORS as error:
                raise self._explain(error) from error
        names = {file.rfilename for file in main.siblings or ()} if main is not None else set()
        return None if "config.json" in names else self.revision

    def _explain(self, error: Exception) -> PushError:
        return explain_error(
            error, self.repo_id, endpoint=self.api.endpoint, token=self.token, is_new=self.info is None
        )

    def read_card(self) -> str | None:
        """The card that is there."""
        if self.info is None or CARD_NAME not in {file.rfilename for file in self.info.siblings or ()}:
            return None
        try:
            path = self.api.hf_hub_download(self.repo_id, CARD_NAME, revision=self.info.sha)
        except HUB_ERRORS as error:
            raise self._explain(error) from error
        return read_text(Path(path))

    def commit(self, operations: list[Any], message: str) -> tuple[str, CommitInfo | None]:
        """Does it all at once, if there is anything to do, and returns the address, and the commit if there is one."""
        url = f"{self.api.endpoint}/{self.repo_id}"
        if self.revision:
            url += f"/tree/{self.revision}"
        if not operations and not self.makes_branch:
            return url, None
        try:
            if not self.token:
                raise errors.LocalTokenNotFoundError
            parent = self._make_place()
            if not operations:
                return url, None
            done = self.api.create_commit(
                self.repo_id,
                operations,
                commit_message=message,
                create_pr=self.create_pr,
                parent_commit=parent,
                revision=self.revision,
            )
        except HUB_ERRORS as error:
            raise self._explain(error) from error
        return done.pr_url or url, done

    def _make_place(self) -> str | None:
        """Makes repository and branch where they are missing, and returns the commit that the push builds on."""
        if self.info is None:
            self.repo_id = self.api.create_repo(self.repo_id, private=self.private).repo_id
            self.info = self.api.model_info(self.repo_id)
            self.makes_branch = self.revision not in (None, "main")
        if self.makes_branch:
            self.api.create_branch(self.repo_id, branch=str(self.revision), revision=self.info.sha)
            self.makes_branch = False
        return self.info.sha


def _prepare(
    folder: Path,
    target: _Target,
    there: str | None,
    choice: CardChoice | None,
    metadata: Mapping[str, Any],
    problems: list[Problem],
) -> tuple[dict[str, Any] | None, PushedCard | None]:
    """The configuration, if it is to be another one, and the card, unless there is a problem with making it."""
    if not read_json(folder / "config.json"):
        return None, None  # which the checks will say
    pushed = {key: text for key, text in read_json(folder / _RECORD).items() if key.startswith(target.place)}
    try:
        config = _complete_config(folder, metadata.get("language"))
        card = make_card(
            folder,
            target.repo_id,
            there=there,
            pushed=pushed,
            key=target.key,
            choice=choice,
            config=config,
            **metadata,
        )
    # Any record in the folder may be damaged, and the metadata of cards, in which YAML finds errors of its own.
    except Exception as error:
        problems.append(Problem("card", f"{CARD_NAME} cannot be made: {join_lines(error)}"))
        return None, None
    problems += card.problems
    return config, card


def _complete_config(folder: Path, language: str | Sequence[str] | None) -> dict[str, Any] | None:
    """The configuration with the languages that it lacks, or `None` if it lacks none, or they are not known."""
    settings = read_json(folder / "config.json")
    tasks = settings.get("custom_pipelines")
    if settings.get("model_type") != VanillaTransformerConfig.model_type or not isinstance(tasks, dict):
        return None
    if settings.get("langs") or "translation" not in tasks:
        return None
    languages = ModelFolder(folder, None).languages
    if languages is None and language is not None and not isinstance(language, str) and len(language) == 2:
        languages = [*language]
    if languages is None:
        return None
    added = VanillaTransformerConfig(langs=languages).custom_pipeline_tasks
    return {**settings, "langs": languages, "custom_pipelines": {**added, **tasks}}


def _dump(config: Mapping[str, Any]) -> bytes:
    """As the library writes it."""
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _notes(found: Inspection, config: Mapping[str, Any] | None, card: PushedCard | None, license: Any) -> Iterator[str]:
    """What else one should know of a push."""
    if card is not None and card.backup is not None:
        yield f"The folder's {CARD_NAME} has text that the one to push lacks: it will be kept as {card.backup}."
    if config is not None:
        source, target = config["langs"]
        task = f"translation_{source}_to_{target}"
        offered = f", which brings the task {task}" if task in config["custom_pipelines"] else ""
        yield f"config.json gets langs={config['langs']}{offered}."
    if license is not None and not _LICENSE.fullmatch(str(license)):
        yield (
            f"license={license!r} is none that the Hub knows: its identifiers are like apache-2.0, mit and cc-by-4.0; "
            "for one of your own give other."
        )
    if card is not None and not ModelCard(card.text).data.to_dict().get("license"):
        yield "No license is given, so that others may not use the model: --license apache-2.0, say, gives one."
    if found.replaced:
        yield f"From the installed package, not from the folder: {', '.join(sorted(found.replaced))}."
    if found.outcomes and not found.problems:
        where = "here and without this package" if found.is_self_contained else "here"
        texts = [repr(_shorten(text)) for text in (found.probes[0], found.outcomes[0])]
        words = get_task_words(found.task)
        yield f"It {words.does} {texts[0]} {words.joint} {texts[1]}, {where}."


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_TEXT else f"{text[: _SHOWN_TEXT - 1]}\N{HORIZONTAL ELLIPSIS}"


def _read(source: Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


def _compare(sources: dict[str, Path | bytes], target: _Target) -> list[PlannedFile]:
    """What the push does to each file on the Hub."""
    siblings = (target.info.siblings or []) if target.info is not None else []
    there = {file.rfilename: file for file in siblings}
    files = []
    for name, source in sorted(sources.items()):
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        old = there.get(name)
        if old is None:
            status: Literal["new", "changed", "unchanged"] = "new"
        else:
            # A large file is known by the hash of its content, another one by git's.
            known, prefix = (old.lfs.sha256, b"") if old.lfs else (old.blob_id, b"blob %d\0" % size)
            status = "unchanged" if _hash(source, prefix) == known else "changed"
        files.append(PlannedFile(name, size, status))
    stale = [file for name, file in there.items() if _WEIGHTS.fullmatch(name) and name not in sources]
    return files + [PlannedFile(file.rfilename, file.size or 0, "deleted") for file in stale]


def _hash(source: Path | bytes, prefix: bytes) -> str:
    """The SHA-256 of a file's content, or, with git's prefix, the SHA-1 that names it there."""
    digest = hashlib.sha1(prefix) if prefix else hashlib.sha256()
    if isinstance(source, bytes):
        digest.update(source)
        return digest.hexdigest()
    with source.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _openable(source: Path | bytes) -> str | bytes:
    return source if isinstance(source, bytes) else str(source)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _format_size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
