"""What looks like a secret or a pickle in a model's folder, and what only does so at first sight."""

import json
import pickle
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vanilla_transformer.hub.files import find_refused_files, find_secrets, select_files

# In parts, so that nobody takes this file for one with secrets.
SECRETS = [
    ("a token of the Hub", "hf_" + "abcDEF123" * 4),
    ("a private key", "-----BEGIN RSA " + "PRIVATE KEY-----"),
    ("a key of AWS", "AKIA" + "IOSFODNN7EXAMPLE"),
    ("a token of GitHub", "ghp_" + "a1" * 18),
    ("a token of Slack", "xoxb-" + "1234567890"),
    ("a key of Google", "AIza" + "bCdEf" * 7),
    ("a key of AWS", 'aws_secret_access_key = "' + "wJalrXUtnFEMI/K7MDENG/" + 'bPxRfiCYEXAMPLEKEY"'),
    ("a key of OpenAI", "sk-" + "aB3" * 16),
    ("a key of OpenAI", "sk-proj-" + "aB3_-" * 20),
    ("a key of Anthropic", "sk-ant-api03-" + "aB3_-" * 18),
    ("a token of GitLab", "glpat-" + "aB3_-" * 4),
    ("a token of npm", "npm_" + "aB3" * 12),
    ("a token of PyPI", "pypi-AgEIcHlwaS5vcmc" + "aB3_-" * 12),
    ("a key of Azure", "AccountName=me;AccountKey=" + "aB3+/" * 17 + "a=="),
    ("a key of Stripe", "sk_live_" + "aB3" * 8),
    ("a key of Stripe", "whsec_" + "aB3" * 10),
    ("a JSON web token", "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0." + "SflKxwRJSM_eKK-F2QT4"),
    ("a password in an address", "https://user:" + "pw@example.org/repository"),
    ("a password in an address", "postgresql://user:" + "p%40ss@127.0.0.1:5432/base"),
    ("a web hook", "https://hooks.slack.com/services/" + "T00000000/B00000000/aB3dE5fG7hJ9"),
    ("a web hook", "https://discord.com/api/webhooks/" + "1234567890/aB3dE5fG7hJ9_-"),
    ("a token of Slack", "xapp-1-" + "A0123-456-abcdef"),
    ("a key of Google", "GOCSPX-" + "aB3_-" * 5 + "abc"),
    ("a key of Weights & Biases", "WANDB_API_KEY=" + "0123456789" * 4),
    ("a token of Telegram", "123456789:AA" + "aB3" * 11),
    ("a key of SendGrid", "SG." + "aB" * 11 + "." + "aB3" * 14 + "a"),
    ("a key of Twilio", "SK" + "0123456789abcdef" * 2),
    ("a token of Replicate", "r8_" + "aB3" * 12 + "a"),
    ("a token of DigitalOcean", "dop_v1_" + "0123456789abcdef" * 4),
    ("a token of Databricks", "dapi" + "0123456789abcdef" * 2),
]


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


def test_names_of_tokenizers_are_no_secrets(tmp_path: Path) -> None:
    names = {"special_tokens_map.json", "added_tokens.json", "tokenization.py", "token_counts.json"}
    for name in names | {"source.spm", "target_vocab.json", "vocab-src.json", "sentencepiece.bpe.model"}:
        (tmp_path / name).write_text("{}")
    assert not refusals(tmp_path)
    known = set(select_files(tmp_path).files)
    assert known >= {"source.spm", "target_vocab.json", "vocab-src.json", "sentencepiece.bpe.model"}


@pytest.mark.parametrize(("kind", "secret"), SECRETS)
def test_secrets_are_found_and_not_repeated(kind: str, secret: str) -> None:
    placeholders = f"hf_{'x' * 34} AKIA{'X' * 16}"
    text = f"one {placeholders}\ntwo hf_hub_download gh_pages -----BEGIN PUBLIC KEY-----\n"
    assert not list(find_secrets("notes.md", text))
    (problem,) = find_secrets("notes.md", f"{text}<{secret}>\n")
    assert problem.message.startswith(f"notes.md, line 3, has what looks like {kind}:")
    assert secret not in problem.message


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


def test_pickles_without_a_mark_are_known_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([1], protocol=0))
    (tmp_path / "b.joblib").write_bytes(zlib.compress(pickle.dumps([1])))
    selection = select_files(tmp_path, ["a.pkl", "b.joblib"])
    assert [str(found).split()[1] for found in find_refused_files(tmp_path, selection)] == ["a.pkl", "b.joblib"]


def test_a_folder_that_is_included_as_a_whole_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    for name in ("one.txt", "two.txt"):
        (tmp_path / "eval" / name).touch()
    for include, left_out in (([], ["eval/"]), (["eval/one.txt"], ["eval/"]), (["eval"], [])):
        assert list(select_files(tmp_path, include).left_out) == left_out


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/a:b@c http://127.0.0.1:7860 git+ssh://git@github.com/me/model https://{user}:{pw}@host",
        "sk-learn is sklearn, sk-and-many-more-words-with-hyphens",
        "x:AAaB3dE5fG7hJ9kL2mN4pQ6rS8tU1vW3xY5zA npm_config pypi-server glpat eyJ.eyJ SG.1.2 r8_ dapi",
        '"SKIP": 12, "user:me@example.org", "sk_live"',
    ],
)
def test_what_only_looks_like_a_secret(text: str) -> None:
    assert not list(find_secrets("notes.md", text))


class TestLinks:
    def test_out_of_the_folder_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "secretfile").write_text("mine")
        folder = tmp_path / "model"
        (folder / "sub").mkdir(parents=True)
        (folder / "LICENSE").symlink_to("../secretfile")
        (folder / "NOTICE").symlink_to("nothing")
        (folder / "sub" / "deep.txt").symlink_to(tmp_path / "secretfile")
        assert refusals(folder) == [
            "LICENSE is a link to ../secretfile, out of the folder: put the file itself there, or delete the link.",
            "NOTICE is a link to nothing, which is not there: put the file itself there, or delete the link.",
        ]
        *_, included = find_refused_files(folder, select_files(folder, ["sub"]))
        assert included.message.startswith(f"sub/deep.txt is a link to {tmp_path}/secretfile, out of the folder")

    def test_within_the_folder_are_followed(self, tmp_path: Path) -> None:
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "LICENSE").write_text("free")
        (tmp_path / "LICENSE").symlink_to("texts/LICENSE")
        (tmp_path / "link").symlink_to(tmp_path)
        assert not refusals(tmp_path)
        assert not refusals(tmp_path / "link")
        assert set(select_files(tmp_path).files) == {"LICENSE"}


@pytest.mark.parametrize(
    "text",
    ["/home/me/x", "file:///home/me/x", r"\\server\share\x", "a,/home/me/x", "a;/home/me", "(/home/me/x)",
     "C:/Users/me", "D:\\data", "~/x", "~me/x", "--output_dir=/tmp/x", "s3;file:/home/me"],
)  # fmt: skip
def test_records_with_absolute_paths_stay_here(tmp_path: Path, text: str) -> None:
    for record in ({"data": {"train_file": [text]}}, {text: 1.0}):
        (tmp_path / "metrics.json").write_text(json.dumps(record))
        reason = select_files(tmp_path).left_out["metrics.json"]
        assert reason == f"names folders of this machine ({text if text in record else 'data.train_file'})"


@pytest.mark.parametrize(
    "text",
    ["out/my-model", "https://huggingface.co/me/model", "s3://bucket/x", "and/or/else", "1/2/3", "me/model", "a: b",
     "hdfs://host/x", "./out/x", "../x/y", "data/*/x", "a~b/c", "\\\\n"],
)  # fmt: skip
def test_records_with_other_texts_are_pushed(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps({"data": text}))
    assert "metrics.json" in select_files(tmp_path).files
