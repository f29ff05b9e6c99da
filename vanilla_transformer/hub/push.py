"""Publishes a model's folder on the Hub: checked first, shown, and then pushed in one commit or one pull request."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, errors, get_token
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]
from transformers.utils import logging

from vanilla_transformer.files import replacing_files
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig

from .card import HOW_TO_GENERATE, Card, CardChoice, choose_card, make_card, mark_as_pushed, read_card
from .checks import CodeChoice, Inspection, inspect_model_folder
from .facts import ModelFolder
from .files import CARD_NAME, Problem, join_lines, read_settings, select_files

logger = logging.get_logger(__name__)

# httpx's own base class, under whatever name the client imports it.
_HTTP_ERROR: type[Exception] = errors.HfHubHTTPError.__mro__[1]
# What the client raises: its own, httpx's, and those that the uploader of large files takes for all of its failures.
HUB_ERRORS = (_HTTP_ERROR, OSError, ValueError, RuntimeError)
_TIMEOUT = 30  # seconds
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
# Weights that would be loaded instead of new ones, or that are parts of old ones.
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


class PushError(RuntimeError):
    """The Hub, or the way to it, did not let a push happen; the message is the client's own."""


def check_token(token: str | None = None) -> str:
    """Returns the user's name if a token may write, to be asked before the work that is to be pushed is done.

    PushError if there is no token, the Hub does not accept it, it is read-only, or the Hub cannot be asked.
    """
    try:
        user: dict[str, Any] = HfApi(token=token).whoami()
    except HUB_ERRORS as error:
        raise _explain(error, token) from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise PushError(f"The token of {user['name']} is read-only: make one that may write, in your settings there.")
    return str(user["name"])


@dataclass
class PlannedPush:
    """A push that was prepared by `plan_push`: nothing has changed yet, neither on the Hub nor in the folder."""

    folder: Path
    repo_id: str  # with the namespace
    problems: list[Problem]  # why it cannot be pushed
    files: dict[str, Path | bytes]  # by the paths in the repository; the client sends only what is not there already
    deleted: list[str]  # the weights on the Hub that are replaced
    left_out: dict[str, str]  # what is not pushed, each with the reason
    notes: list[str]  # what else one should know
    _target: "Target"
    _written: dict[str, Path | bytes]  # what the folder gets after the push
    commit_url: str | None = None  # once it was pushed, and if anything was
    has_changed: bool = False  # whether the push made a commit or a branch

    def describe(self) -> str:
        """What is pushed where, and what is not, in lines for a terminal."""
        files = self.files.items()
        sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in files}
        width = max(map(len, [*self.files, *self.deleted, *self.left_out]), default=0)
        lines = [f"{self.folder} -> {self._target.describe()}", ""]
        lines += [f"  {name:<{width}}  {_format_size(size):>9}" for name, size in sizes.items()]
        lines += [f"  {name:<{width}}    deleted" for name in self.deleted]
        lines += [f"  {_format_size(sum(sizes.values()))}; what is there already is not sent again"]
        if self.left_out:
            lines += ["", "Left out (--include NAME pushes what is neither a pickle nor looks like a secret):"]
            lines += [f"  {name:<{width}}  {reason}" for name, reason in self.left_out.items()]
        return "\n".join([*lines, "", *self.notes]).rstrip()

    @property
    def card(self) -> str:
        """The model card that would be pushed."""
        source = self.files.get(CARD_NAME, b"")
        return (source if isinstance(source, bytes) else source.read_bytes()).decode("utf-8", errors="replace")

    def describe_problems(self) -> str:
        """Why it cannot be pushed, in lines for a terminal."""
        return f"{self.folder} cannot be pushed:\n  " + "\n  ".join(map(str, self.problems))

    def push(self, commit_message: str | None = None) -> str:
        """Pushes, in one commit or one pull request, and returns the address to look at.

        If the repository has changed since the push was planned, nothing is pushed. In the end what was pushed is in
        the folder too; a card with text that was not pushed stays beside it, as README.md.bak-1. If there are problems
        (ValueError), or the Hub refuses or is not reached (PushError), the folder is as it was.
        """
        if self.problems:
            raise ValueError(self.describe_problems())
        operations: list[Any] = [CommitOperationDelete(name) for name in self.deleted]
        for name, file in self.files.items():
            operations.append(CommitOperationAdd(name, file if isinstance(file, bytes) else str(file)))
        makes_branch = self._target.makes_branch
        url, self.commit_url = self._target.commit(operations, commit_message or f"Push {self.folder.resolve().name}")
        self.has_changed = makes_branch or self.commit_url is not None
        try:
            with replacing_files(self.folder) as partial:
                for name, source in self._written.items():
                    (partial / name).write_bytes(source if isinstance(source, bytes) else source.read_bytes())
        except OSError as error:
            logger.warning(f"It was pushed, but the card that was pushed cannot be written into the folder: {error}")
        return url


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

    A config.json of this package without `langs` gets them, and the task that they name, if the folder's arguments.json
    or `language` tells them. `repo_id` is `namespace/name`, or the name alone for the user's own namespace. It is made
    if it does not exist, `private` or not, and so is the branch `revision` (default: main). `create_pr` opens a pull
    request instead. `include` and `code` are those of `check_model_folder`, `metadata` those of `build_model_card`.
    `card` says whose README.md counts where the folder's and the Hub's were both edited; by default that is a problem.

    The folder's problems are in the plan. A ValueError says that an argument is not legal, a PushError what the Hub
    refuses; one that cannot be reached is noted in the plan only.
    """
    root = Path(folder)
    if create_pr and revision is not None:
        raise ValueError(f"A pull request is opened against the main branch, not against revision={revision!r}.")
    target = Target(repo_id, private, revision, create_pr, token)
    target.look()
    select_files(root, include)  # before anything is read
    config, text, notes = None, None, list(target.notes)
    backup: dict[str, bytes] = {}
    problems: list[Problem] = []
    if read_settings(root / "config.json"):  # or else the checks say so
        try:
            config = _complete_config(root, metadata.get("language"))
            text, backup = _renew_card(target, root, card, {**metadata, "config": config}, notes)
        except PushError:
            raise
        except Exception as error:  # any record in the folder may be damaged
            problems.append(Problem("card", join_lines(error)))
    changes = {} if config is None else {"config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}
    found = inspect_model_folder(root, card=text, include=include, code=code, changes=changes)
    problems += [problem for problem in found.problems if not problems or problem.check != "card"]
    made: dict[str, Path | bytes] = {} if text is None else {CARD_NAME: text.encode()}
    files = dict(sorted({**found.files, **made}.items()))
    deleted = [name for name in target.files if _WEIGHTS.fullmatch(name) and name not in files]
    notes += _note_findings(found, config)
    written = {**found.replaced, **changes, **backup, **made}
    return PlannedPush(root, target.repo_id, problems, files, deleted, found.selection.left_out, notes, target, written)


def push_model_folder(
    folder: str | os.PathLike[str], repo_id: str, *, commit_message: str | None = None, **kwargs: Any
) -> str:
    """Checks a model's folder and pushes it to the Hub, in one commit or one pull request; returns the address.

    The arguments and errors are those of `plan_push`, and a ValueError that lists all that is wrong with the folder.

        push_model_folder("out/my-model", "me/my-model", license="apache-2.0", datasets=["multi30k"])
    """
    return plan_push(folder, repo_id, **kwargs).push(commit_message)


def take_card(
    folder: str | os.PathLike[str], repo_id: str, *, revision: str | None = None, token: str | None = None
) -> bool:
    """Brings the Hub's card into a folder whose own card was not edited since both were the same.

    Returns whether the folder's card may be pushed: `False`, with a warning, if both were edited or one cannot be read.
    PushError if the Hub refuses or cannot be reached, ValueError if no repository can have this name.
    """
    root = Path(folder)
    target = Target(repo_id, False, revision, False, token)
    target.look()
    if target.notes:
        raise PushError(target.notes[0])
    try:
        here, there = read_card(root / CARD_NAME), target.read_card()
        if there is None:
            return True
        is_edited = here is not None and here.base != here.own_digest
        chosen = choose_card(here, there) if is_edited else there
    except ValueError as error:
        logger.warning(f"The training pushes no card to {repo_id}: {error} `vanilla-transformer push` can settle it.")
        return False
    if chosen is not None and chosen.own_digest == there.own_digest:
        with replacing_files(root) as partial:
            (partial / CARD_NAME).write_bytes(mark_as_pushed(chosen.source).encode())
    return True


def mark_card(folder: str | os.PathLike[str]) -> None:
    """Notes in a folder's card that it has arrived on the Hub: what differs from now on is an edit."""
    path = Path(folder) / CARD_NAME
    if path.is_file() and (marked := mark_as_pushed(text := path.read_bytes().decode("utf-8"))) != text:
        with replacing_files(folder) as partial:
            (partial / CARD_NAME).write_bytes(marked.encode())


class Target:
    """Where a push goes, and what is there."""

    def __init__(self, repo_id: str, private: bool, revision: str | None, create_pr: bool, token: str | None) -> None:
        self.repo_id, self.private, self.revision, self.create_pr = repo_id, private, revision, create_pr
        self.token = token or get_token()
        self.api = HfApi(token=self.token or False)
        self.info: ModelInfo | None = None  # of the repository, at the revision if that exists
        self.makes_branch = False
        self.notes: list[str] = []

    @property
    def files(self) -> list[str]:
        """The names of those that are there."""
        return [] if self.info is None else [file.rfilename for file in self.info.siblings or ()]

    @property
    def url(self) -> str:
        """Of the repository."""
        return f"{self.api.endpoint}/{self.repo_id}"

    def describe(self) -> str:
        """The address, and what is there."""
        if self.info is None:
            return f"{self.url} (new, {'private' if self.private else 'public'})"
        branch = f", {'new ' * self.makes_branch}branch {self.revision}" if self.revision else ""
        request = ", in a pull request" if self.create_pr else ""
        return f"{self.url} ({'private' if self.info.private else 'public'}{branch}{request})"

    def look(self) -> None:
        """Finds out what is there, and whether that contradicts the arguments."""
        try:
            if "/" not in self.repo_id and self.token:
                self.repo_id = f"{self.api.whoami()['name']}/{self.repo_id}"
            self.info = self._read_info()
        except errors.HFValidationError as error:
            raise ValueError(f"repo_id must be like 'me/my-model', not {self.repo_id!r}: {error}") from error
        except errors.RepositoryNotFoundError as error:
            if self.create_pr:
                raise ValueError(f"There is no repository {self.repo_id} to open a pull request against.") from error
        except HUB_ERRORS as error:
            if isinstance(error, errors.HfHubHTTPError):
                raise _explain(error, self.token) from error
            self.notes.append(f"{self.api.endpoint} cannot be reached ({join_lines(error)}).")
        if self.info is not None and self.private and not self.info.private:
            advice = "private=True makes new ones private only; change it in its settings on the Hub first"
            raise ValueError(f"{self.repo_id} exists and is public: {advice}.")

    def _read_info(self) -> ModelInfo:
        try:
            return self.api.model_info(self.repo_id, revision=self.revision, timeout=_TIMEOUT)
        except errors.RevisionNotFoundError:
            self.makes_branch = True  # it will start as the main branch
            return self.api.model_info(self.repo_id, timeout=_TIMEOUT)

    def name_revision(self) -> str | None:
        """The branch, if the examples of use must name it, since the main branch holds no model."""
        if self.revision in (None, "main") or self.notes:
            return None
        names = self.files
        if self.info is not None and not self.makes_branch:
            names = [file.rfilename for file in self.api.model_info(self.repo_id).siblings or ()]
        return None if "config.json" in names else self.revision

    def read_card(self) -> Card | None:
        """The card that is there."""
        if self.info is None or CARD_NAME not in self.files:
            return None
        try:
            path = self.api.hf_hub_download(self.repo_id, CARD_NAME, revision=self.info.sha)
        except HUB_ERRORS as error:
            raise _explain(error, self.token) from error
        return Card.parse(Path(path).read_bytes(), f"{CARD_NAME} on the Hub")

    def commit(self, operations: list[Any], message: str) -> tuple[str, str | None]:
        """Does it all at once, and returns the address, and that of the commit if there was anything to do."""
        url = f"{self.url}/tree/{self.revision}" if self.revision else self.url
        try:
            if not self.token:
                raise errors.LocalTokenNotFoundError("Log in with `hf auth login`, or set the variable HF_TOKEN.")
            parent = self._make_place()
            options: dict[str, Any] = {"create_pr": self.create_pr, "parent_commit": parent, "revision": self.revision}
            done: CommitInfo = self.api.create_commit(self.repo_id, operations, commit_message=message, **options)
        except HUB_ERRORS as error:
            raise _explain(error, self.token) from error
        # Where nothing has changed, the client makes no commit.
        return done.pr_url or url, None if done.oid == parent else done.commit_url

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


def _explain(error: Exception, token: str | None) -> PushError:
    """What the client says, without the token, and what to do about it."""
    # The uploader of large files wraps what the Hub answers.
    response: Any = getattr(error, "response", getattr(error.__cause__, "response", None))
    status = getattr(response, "status_code", None)
    if status == 429:
        again = "then give the same command again, which sends nothing twice that arrived"
        return PushError(f"The Hub takes no more requests from you for now: {_say_wait(response.headers)}, {again}.")
    refusal = "The Hub does not accept the token" if status == 401 else "The Hub, or its client, refuses"
    text = f"{refusal}: {type(error).__name__}: {join_lines(error)}"
    if status is None and isinstance(error, (_HTTP_ERROR, ConnectionError)):
        text += " Give the same command again when the Hub can be reached: what has arrived is not sent twice."
    elif isinstance(error, RuntimeError) or (status or 0) >= 500:
        text += " The same command again sends nothing twice that arrived."
    secret = token or get_token()
    return PushError(text.replace(secret, "<token>") if secret else text)


def _say_wait(headers: Mapping[str, str]) -> str:
    limit = parse_ratelimit_headers(headers)
    wait = headers.get("Retry-After") or (str(limit.reset_in_seconds) if limit and limit.remaining == 0 else "")
    return f"wait {wait} seconds" if wait.isdigit() else f"wait until {wait}" if wait else "wait some minutes"


def _renew_card(
    target: Target, root: Path, choice: CardChoice | None, metadata: dict[str, Any], notes: list[str]
) -> tuple[str, dict[str, bytes]]:
    """The card to push, and a copy of the folder's if that is lost; adds what one should know to `notes`."""
    existing, backup = _find_card(root, target.read_card(), choice)
    place: dict[str, Any] = {"repo_id": target.repo_id, "revision": target.name_revision()}
    text = mark_as_pushed(make_card(root, existing, **place, **metadata))
    notes += _note_card(existing, Card.parse(text.encode(), CARD_NAME), backup)
    return text, backup


def _find_card(folder: Path, there: Card | None, choice: CardChoice | None) -> tuple[Card | None, dict[str, bytes]]:
    """The card to renew, and a copy of the folder's under a free name if that has text of its user's which is lost."""
    path = folder / CARD_NAME
    try:
        here = read_card(path)
    except ValueError:
        if choice != "hub":
            raise
        return there, {_free_name(folder): path.read_bytes()}
    preferred = {"folder": here or there, "hub": there or here}
    chosen = choose_card(here, there) if choice is None else preferred[choice]
    is_lost = here is not None and chosen is not None and not here.own <= chosen.own
    return chosen, {_free_name(folder): path.read_bytes()} if is_lost else {}


def _free_name(folder: Path) -> str:
    return next(name for n in count(1) if not (folder / (name := f"{CARD_NAME}.bak-{n}")).exists())


def _complete_config(folder: Path, language: str | Sequence[str] | None) -> dict[str, Any] | None:
    """The configuration with the languages that it lacks, or `None` if it lacks none, or they are not known."""
    settings = read_settings(folder / "config.json")
    tasks = settings.get("custom_pipelines")
    if settings.get("model_type") != VanillaTransformerConfig.model_type or not isinstance(tasks, dict):
        return None
    if settings.get("langs") or "translation" not in tasks:
        return None
    model = ModelFolder(folder)
    languages = model.languages
    if model.directions:
        return None
    if languages is None and not isinstance(language, str | None) and len(language) == 2:
        languages = [*language]
    if languages is None:
        return None
    added = VanillaTransformerConfig(langs=languages).custom_pipeline_tasks
    return {**settings, "langs": languages, "custom_pipelines": {**added, **tasks}}


def _note_card(existing: Card | None, card: Card, backup: Mapping[str, bytes]) -> Iterator[str]:
    if existing is not None and existing.is_by_hand:
        yield f"{CARD_NAME} was not made by this package and is pushed as it is: {HOW_TO_GENERATE}"
    for name in backup:
        yield f"The folder's {CARD_NAME} has text that the one to push lacks: it will be kept as {name}."
    if not card.data.to_dict().get("license"):
        yield "No license is given, so that others may not use the model: --license apache-2.0, say, gives one."


def _note_findings(found: Inspection, config: Mapping[str, Any] | None) -> Iterator[str]:
    if config is not None:
        yield f"config.json gets langs={config['langs']}."
    if found.replaced:
        yield f"From the installed package, not from the folder: {', '.join(sorted(found.replaced))}."
    if found.outcomes and not found.problems:
        where = "here and without this package" if found.is_self_contained else "here"
        texts = [text if len(text) < 100 else f"{text[:99]}…" for text in (found.probes[0], found.outcomes[0])]
        yield f"Tried: {texts[0]!r} becomes {texts[1]!r}, {where}."


def _format_size(size: float) -> str:
    if size < 1000:
        return f"{size:.0f} B"
    return next(f"{size / scale:.1f} {unit}" for scale, unit in _UNITS if size >= scale)
