"""What of a model's folder belongs on the Hub, what stays here, and what must not be in such a folder at all."""

import fnmatch
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_imports

from vanilla_transformer.files import find_damage, read_json

CARD_NAME = "README.md"
CODE_FOLDER = Path(__file__).resolve().parents[1] / "model"  # what travels with a checkpoint

# What a model, its tokenizer and its card consist of. Code is found by the names in the configurations.
# Names are patterns, parted by blanks.
_PARTS = (
    "config.json generation_config.json adapter_config.json *.safetensors *.safetensors.index.json tokenizer.json "
    "target_tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json *vocab.json vocab-*.json "
    f"vocab.txt merges.txt *.spm *.model {CARD_NAME} LICENSE* NOTICE* *.png *.jpg *.svg"
)
# Records of the training, pushed if they name no folders of this machine.
_RECORDS = "arguments.json averaging.json conversion.json metrics.json *_results.json trainer_state.json"
_TRAINING_ONLY = (
    "optimizer*.pt optimizer*.bin scheduler.pt scaler.pt rng_state*.pth training_args.bin data_state_*.json"
)
_ALWAYS_PICKLES = "*.pkl *.pickle *.joblib *.dill"  # perhaps compressed, or of a protocol without a mark
_PICKLES = f"{_ALWAYS_PICKLES} *.bin *.pt *.pth *.ckpt"
_PICKLE_START = re.compile(rb"\x80[\x02-\x05]")

_SECRET_FILES = (
    ".env .env.* *.env .netrc _netrc .npmrc .pypirc .htpasswd .git-credentials .ssh .aws *.pem *.key *.p12 *.pfx *.jks "
    "*.keystore *.ppk *.kdbx id_rsa* id_dsa* id_ecdsa* id_ed25519*"
)
_SECRET_WORDS = {"secret", "secrets", "password", "passwords", "passwd", "credential", "credentials", "apikey"}
# What it is, how it begins (published prefixes, parted by blanks, or the name before it), and how it goes on.
_SECRET_CONTENTS = (
    ("a token of the Hub", "hf_", r"[A-Za-z0-9]{20,}"),
    ("a private key", "-----BEGIN", r" [A-Z ]*PRIVATE KEY"),
    ("a key of AWS", "AKIA ASIA", r"[0-9A-Z]{16}\b"),
    ("a key of AWS", "aws_secret_access_key AWS_SECRET_ACCESS_KEY", r"\W{1,5}[A-Za-z0-9/+]{40}"),
    ("a token of GitHub", "gho_ ghp_ ghr_ ghs_ ghu_", r"[A-Za-z0-9]{36}"),
    ("a token of GitHub", "github_pat_", r"\w{30,}"),
    ("a token of GitLab", "glcbt- gldt- gloas- glpat- glptt- glrt- glsoat-", r"[\w-]{20,}"),
    ("a token of Slack", "xapp- xoxa- xoxb- xoxe- xoxp- xoxr- xoxs-", r"[A-Za-z0-9-]{10,}"),
    ("a web hook", "hooks.slack.com/ discord.com/api/webhooks/", r"\w+/[\w-]+"),
    ("a key of Google", "AIza", r"[\w-]{35}"),
    ("a key of Google", "GOCSPX- ya29.", r"[\w-]{20,}"),
    ("a key of Anthropic", "sk-ant-", r"[\w-]{20,}"),
    ("a key of OpenAI", "sk-admin- sk-or- sk-proj- sk-svcacct-", r"[\w-]{20,}"),
    ("a key of OpenAI", "sk-", r"[A-Za-z0-9]{32,}"),
    ("a key of Azure", "AccountKey= SharedAccessKey=", r"[A-Za-z0-9+/]{40,}="),
    ("a key of Stripe", "rk_live_ rk_test_ sk_live_ sk_test_ whsec_", r"[A-Za-z0-9]{20,}"),
    ("a key of SendGrid", "SG.", r"[\w-]{22}\.[\w-]{43}"),
    ("a key of Twilio", "SK", r"[0-9a-f]{32}\b"),
    ("a key of Weights & Biases", "wandb_api_key WANDB_API_KEY", r"\W{1,5}[0-9a-f]{40}"),
    ("a token of npm", "npm_", r"[A-Za-z0-9]{36}"),
    ("a token of PyPI", "pypi-AgE", r"[\w-]{20,}"),
    ("a token of Telegram", ":AA", r"(?<=\d:AA)[\w-]{33}\b"),
    ("a token of Replicate", "r8_", r"[A-Za-z0-9]{37}"),
    ("a token of DigitalOcean", "doo_v1_ dop_v1_ dor_v1_", r"[0-9a-f]{64}"),
    ("a token of Databricks", "dapi", r"[0-9a-f]{32}"),
    ("a JSON web token", "eyJ", r"[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"),
    ("a password in an address", "://", r"[^\s/:@\"'<>{}$]*:[^\s/@\"'<>{}$]+@[\w\[]"),
)
_LARGEST_TEXT = 20_000_000  # bytes; a tokenizer.json is larger than most texts
# On Unix, in a home, on Windows, on a server of Windows, or as an address.
_ABSOLUTE_PATH = re.compile(
    r"""(?:^|[\s'"`=:,;|({\[])(?:/[\w.-]+/|~\w*/|[A-Za-z]:(?:\\|/(?!/))|\\\\[\w.-]+\\|file:/)"""
)


@dataclass(frozen=True)
class Problem:
    """Why a folder is not fit to be pushed: what found it, and what is wrong, where, and what to do about it."""

    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


@dataclass
class Selection:
    """What of a folder is pushed, by the paths in the repository, and what is not, each with the reason."""

    files: dict[str, Path] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def select_files(folder: str | os.PathLike[str], include: Sequence[str] = ()) -> Selection:
    """Tells what of a model's folder belongs on the Hub: only what is known to be a part of a model.

    Not checkpoints, the optimizer's state and logs, not evaluations (their references are often somebody's property),
    and no record that names folders of this machine. `include` names files or sub-folders to push all the same, or
    patterns of them such as `test-*`; what is not there is a ValueError.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    selection = Selection()
    code = {path.name for path in find_code_files(root)}
    for entry in sorted(root.iterdir()):
        reason = _reason_to_leave_out(entry, code)
        if reason is None:
            selection.files[entry.name] = entry
        else:
            selection.left_out[entry.name + "/" * entry.is_dir()] = reason
    for pattern in include:
        included = list(_included(root, pattern))
        if not included:
            raise ValueError(f"There is nothing to include in {folder} that is called or matches {pattern!r}.")
        for path in included:
            name = path.relative_to(root).as_posix()
            selection.files[name] = path
            selection.left_out.pop(name, None)
    # Without `include` no folder is looked into: in a training, checkpoints are deleted meanwhile.
    folders = [name for name in selection.left_out if name.endswith("/")] if include else []
    for name in folders:
        inner = [path for path in (root / name).rglob("*") if path.is_file()]
        if inner and all(path in selection.files.values() for path in inner):
            selection.left_out.pop(name)
    return selection


def find_code_files(folder: Path) -> list[Path]:
    """The files with code that the configurations of a folder name, and those that these import, there or not."""
    return follow_imports(folder, [f"{module}.py" for module in sorted(set(_named_modules(folder)))])


def follow_imports(folder: Path, names: Sequence[str]) -> list[Path]:
    """The files of these names, and those beside them that they import, there or not."""
    found = [folder / name for name in names]
    for path in found:
        if path.is_file():
            imported = [folder / f"{module}.py" for module in sorted(get_relative_imports(path))]
            found += [each for each in imported if each not in found]
    return found


def find_refused_files(folder: Path, selection: Selection) -> Iterator[Problem]:
    """What must not be in a folder that is pushed: pickles, what looks like a secret, other repositories' code."""
    for entry in sorted({*folder.iterdir(), *selection.files.values()}):
        name = entry.relative_to(folder).as_posix()
        named = _matches(name, _PICKLES) and not _matches(name, _TRAINING_ONLY)
        is_sure = _matches(name, _ALWAYS_PICKLES)
        if entry.is_file() and ((is_sure or _is_pickle(entry)) if name in selection.files else named):
            reason = "which can run code when it is loaded; only safetensors are pushed"
            yield Problem("files", f"{name} is a pickle, {reason}. Delete it, or move it away.")
    for path in _walk(folder):
        if _is_secret_name(path.name):
            name = path.relative_to(folder).as_posix()
            yield Problem("files", f"{name} looks like a secret by its name: move it away.")
    for name, path in selection.files.items():
        if not stays_within(folder, path):
            shown = path.readlink() if path.is_symlink() else path.resolve()
            reason = "out of the folder" if path.exists() else "which is not there"
            advice = "put the file itself there, or delete the link"
            yield Problem("files", f"{name} is a link to {shown}, {reason}: {advice}.")
        # The library runs `user/code--module.Class` from there, as whoever owns that repository may change it.
        settings = read_settings(path) if name.endswith("config.json") else {}
        if foreign := sorted({reference for reference in _references(settings) if "--" in reference}):
            advice = "put the code into the folder, and name it without the repository and --"
            yield Problem("code", f"{name} names code of another repository: {', '.join(foreign)}; {advice}.")
        if name != CARD_NAME:  # another may take its place
            yield from find_secrets(name, _text_of(path))


def stays_within(folder: Path, path: Path) -> bool:
    """Whether a path of a folder leads to something in it, and not, by a link, elsewhere or nowhere."""
    return path.exists() and path.resolve().is_relative_to(folder.resolve())


def find_secrets(name: str, text: str) -> Iterator[Problem]:
    """Where a text holds what looks like a secret; the secret itself is not repeated."""
    for kind, starts, rest in _SECRET_CONTENTS:
        for start in starts.split():
            if match := _find_secret(start, rest, text):
                line = text.count("\n", 0, match.start()) + 1
                yield Problem("files", f"{name}, line {line}, has what looks like {kind}: take it out, and revoke it.")


def _find_secret(start: str, rest: str, text: str) -> re.Match[str] | None:
    if start not in text:  # a hundred times faster than the search
        return None
    word = r"\b" if start[0].isalnum() else ""
    found = re.finditer(word + re.escape(start) + rest, text)
    # Instructions have hf_xxxx and the like.
    return next((match for match in found if len(set(match[0][-16:])) > 1), None)


def read_settings(path: Path) -> dict[str, Any]:
    """Its object, empty if there is none that can be read."""
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def read_bytes(path: Path) -> bytes | None:
    """Its content, or `None` if there is no such file."""
    return path.read_bytes() if path.is_file() else None


def join_lines(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _reason_to_leave_out(entry: Path, code: Iterable[str]) -> str | None:
    if fnmatch.fnmatchcase(entry.name, "checkpoint-*"):
        return "a checkpoint of the training; it can be pushed on its own"
    if entry.name.startswith(("_", ".")) or entry.name.endswith(".partial"):
        return "hidden, unfinished or set aside"
    if entry.is_dir():
        return _reason_to_leave_out_folder(entry)
    if _matches(entry.name, _TRAINING_ONLY):
        return "needed only to resume the training"
    if _matches(entry.name, _RECORDS):
        where = next(_local_paths(read_settings(entry)), None)
        return None if where is None else f"names folders of this machine ({where})"
    if _matches(entry.name, _PARTS) or entry.name in code:
        return None
    return "not a part of the model"


def _reason_to_leave_out_folder(folder: Path) -> str:
    if folder.name == "runs":
        return "logs of the training"
    if (folder / "vanilla_transformer_config.json").is_file():  # as export/ctranslate2.py has it
        return "exported to CTranslate2; `vanilla-transformer export` makes it again of what is pushed"
    if (folder / "config.json").is_file():
        return "a model of its own; it can be pushed on its own"
    if any((folder / name).is_file() for name in ("metrics.json", "hypotheses.txt", "comparison.json")):
        return "an evaluation; its scores are in the model card"
    return "not a part of the model"


def _included(root: Path, pattern: str) -> Iterator[Path]:
    wanted = pattern.rstrip("/")
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        names = [name.as_posix(), *(parent.as_posix() for parent in name.parents)]
        if path.is_file() and any(fnmatch.fnmatchcase(candidate, wanted) for candidate in names):
            yield path


def _named_modules(folder: Path) -> Iterator[str]:
    """The modules named by `auto_map` and `custom_pipelines`; the entries may be damaged, or of another repository."""
    for name in ("config.json", "tokenizer_config.json"):
        for reference in _references(read_settings(folder / name)):
            module, dot, _ = reference.partition(".")
            if dot and module.isidentifier():
                yield module


def _references(content: Any) -> Iterator[str]:
    """All texts under `auto_map` and `custom_pipelines`, also those of a part's own configuration."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from (_strings if key in ("auto_map", "custom_pipelines") else _references)(value)


def _strings(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for item in content.values() if isinstance(content, dict) else content:
            yield from _strings(item)


def _local_paths(content: Any, where: str = "") -> Iterator[str]:
    """The dotted names of those entries of a record in which there is an absolute path."""
    if isinstance(content, dict):
        for key, value in content.items():
            name = f"{where}.{key}" if where else str(key)
            yield from _local_paths(key, name)
            yield from _local_paths(value, name)
    elif isinstance(content, list):
        for value in content:
            yield from _local_paths(value, where)
    elif isinstance(content, str) and _ABSOLUTE_PATH.search(content):
        yield where


def _walk(folder: Path) -> Iterator[Path]:
    """Everything in the folder, except what is in a sub-folder that is refused by its name, or is git's own."""
    for entry in sorted(folder.iterdir()):
        if entry.name == ".git":  # of a repository that was cloned from the Hub; never uploaded
            continue
        yield entry
        if entry.is_dir() and not entry.is_symlink() and not _is_secret_name(entry.name):
            yield from _walk(entry)


def _matches(name: str, patterns: str) -> bool:
    base_name = name.rpartition("/")[2].lower()
    return any(fnmatch.fnmatchcase(base_name, pattern) for pattern in patterns.lower().split())


def _is_secret_name(name: str) -> bool:
    words, stem_words = (re.findall("[a-z0-9]+", text.lower()) for text in (name, Path(name).stem))
    # "token" counts at the end only, before the suffix or as one: a tokenizer may come with token_counts.json.
    ends = {*words[-1:], *stem_words[-1:]}
    return _matches(name, _SECRET_FILES) or bool(_SECRET_WORDS & set(words)) or "token" in ends


def _is_pickle(path: Path) -> bool:
    """By its content: a pickle itself, or the archive around one that torch writes."""
    if path.suffix == ".safetensors" and find_damage(path) is None:
        return False  # it begins with the size of its header, which may look like either
    try:
        with path.open("rb") as file:
            start = file.read(2)
        if start == b"PK":
            with zipfile.ZipFile(path) as archive:
                return any(name.endswith(".pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return True
    except OSError:
        return False
    return _PICKLE_START.fullmatch(start) is not None


def _text_of(path: Path) -> str:
    """The text of a file, or "" if it is none."""
    try:
        is_text = path.suffix != ".safetensors" and path.stat().st_size <= _LARGEST_TEXT
        return path.read_bytes().decode("utf-8") if is_text else ""
    except (OSError, ValueError):
        return ""
