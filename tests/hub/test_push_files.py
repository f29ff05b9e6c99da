"""What looks like a secret or a pickle in a model's folder, and what only does so at first sight."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vanilla_transformer.hub.files import find_refused_files, find_secrets, select_files

# In parts, so that nobody takes this file for one with secrets.
SECRETS = {
    "a token of the Hub": "hf_" + "abcDEF123" * 4,
    "a private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "a key of AWS": "AKIA" + "IOSFODNN7EXAMPLE",
    "a token of GitHub": "ghp_" + "a1" * 18,
    "a token of Slack": "xoxb-" + "1234567890",
    "a key of Google": "AIza" + "bCdEf" * 7,
}


def refusals(folder: Path) -> list[str]:
    return [problem.message for problem in find_refused_files(folder, select_files(folder))]


@pytest.mark.parametrize(
    "name",
    [".env", "prod.env", ".netrc", "server.pem", "id_rsa", "id_ed25519.pub", "token", "hf_token.txt", "my-token.json",
     "credentials", "aws_credentials.json", "passwords.csv", "logs/.git-credentials"],
)  # fmt: skip
def test_names_of_secrets_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert refusals(tmp_path) == [f"{name} looks like a secret by its name: move it away."]


def test_a_cloned_repository_may_be_pushed_from(tmp_path: Path) -> None:
    (tmp_path / ".git" / "refs").mkdir(parents=True)
    (tmp_path / ".git" / "refs" / "token").touch()
    assert not refusals(tmp_path)
    assert ".git/" in select_files(tmp_path).left_out


@pytest.mark.parametrize(
    "name", ["special_tokens_map.json", "added_tokens.json", "tokenization.py", "token_counts.json"]
)
def test_names_of_tokenizers_are_no_secrets(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    assert not refusals(tmp_path)


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_found_and_not_repeated(kind: str) -> None:
    placeholders = f"hf_{'x' * 34} AKIA{'X' * 16}"
    text = f"one {placeholders}\ntwo hf_hub_download gh_pages -----BEGIN PUBLIC KEY-----\n"
    assert not list(find_secrets("notes.md", text))
    (problem,) = find_secrets("notes.md", f"{text}key = '{SECRETS[kind]}'\n")
    assert problem.message.startswith(f"notes.md, line 3, has what looks like {kind}")
    assert SECRETS[kind] not in problem.message


@pytest.mark.parametrize("start", [b"\x80\x02", b"PK"])
def test_weights_that_begin_like_a_pickle_are_none(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    data = path.read_bytes()
    size, padded = (int.from_bytes(number, "little") for number in (data[:8], start))
    path.write_bytes(padded.to_bytes(8, "little") + data[8 : 8 + size].ljust(padded) + data[8 + size :])
    assert path.read_bytes().startswith(start)
    assert not refusals(tmp_path)
    path.write_bytes(pickle.dumps({"weight": [0.0]}))
    assert "model.safetensors is a pickle" in refusals(tmp_path)[0]


@pytest.mark.parametrize("name", ["source.spm", "target_vocab.json", "vocab-src.json", "sentencepiece.bpe.model"])
def test_vocabularies_of_any_tokenizer_are_selected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert set(select_files(tmp_path).files) == {name}
