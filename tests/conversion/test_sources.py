"""Which system a model is of, what may be said of it, and the command that converts."""

import inspect
import itertools
import json
import pickle
import signal
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from library_models import SIZES, make_marian
from local_hub import LocalHub
from safetensors.torch import save_file
from test_weights import Bomb
from tiny_vanilla import make_loud_model
from torch import nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, FSMTConfig, MarianMTModel

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.commands import convert as script
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.sources import SOURCES, convert, detect_format
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.src_tok_emb = nn.Embedding(20, 16)
        self.tgt_tok_emb = nn.Embedding(24, 16)
        self.transformer = nn.Transformer(16, 4, 1, 1, 24, batch_first=True)
        self.generator = nn.Linear(16, 24)


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "marian"
    make_marian().save_pretrained(folder)
    return str(folder)


def test_models_of_the_library_are_recognised_by_their_configuration(tmp_path: Path, marian: str) -> None:
    assert detect_format(marian) == "marian"
    FSMTConfig(langs=["en", "de"], src_vocab_size=9, tgt_vocab_size=9, **SIZES).save_pretrained(tmp_path / "fsmt")
    assert detect_format(str(tmp_path / "fsmt")) == "fsmt"
    BartConfig(**SIZES).save_pretrained(tmp_path / "bart")
    with pytest.raises(ConversionError, match="of the type bart: another architecture"):
        detect_format(str(tmp_path / "bart"))
    VanillaTransformerConfig.from_preset("tiny").save_pretrained(tmp_path / "ours")
    with pytest.raises(ConversionError, match="this package's own"):
        detect_format(str(tmp_path / "ours"))


CHECKPOINTS: dict[str, Any] = {
    "annotated": {"encoder.layers.0.self_attn.linears.0.weight": torch.ones(2, 2)},
    "fairseq": {"args": None, "model": {"encoder.layers.0.self_attn.in_proj_weight": torch.ones(2, 2)}},
    "joeynmt": {"steps": 3, "model_state": {"a": torch.ones(1)}},
    "opennmt_py": {"vocab": {"src": ["a"]}, "opt": None, "model": {"a": torch.ones(1)}, "generator": None},
    "torch_nn": {"epoch": 3, "state": {"module.encoder.layers.0.self_attn.in_proj_weight": torch.ones(2, 2)}},
}


def test_a_branch_of_the_hub_is_recognised_by_its_own_configuration(marian: str) -> None:
    with LocalHub(tokens={"hf_alice": "alice"}) as hub, hub.client("hf_alice"):
        api = HfApi()
        api.create_repo("alice/both")
        api.create_branch("alice/both", branch="library")
        api.upload_file(
            path_or_fileobj=f"{marian}/config.json",
            path_in_repo="config.json",
            repo_id="alice/both",
            revision="library",
        )
        assert detect_format("alice/both", "library") == "marian"
        assert script.find_format(["--model_name_or_path", "alice/both", "--revision", "library"]) == "marian"
        with pytest.raises(ConversionError, match="alice/both"):
            detect_format("alice/both")


def test_checkpoints_are_recognised_by_the_names_in_them(tmp_path: Path) -> None:
    for name, is_zip in itertools.product(CHECKPOINTS, (True, False)):
        torch.save(CHECKPOINTS[name], tmp_path / "it.pt", _use_new_zipfile_serialization=is_zip)
        assert detect_format(str(tmp_path / "it.pt")) == name
    torch.save({"model": Translator().state_dict(), "args": {"nhead": 4}}, tmp_path / "it.pt")
    assert detect_format(str(tmp_path / "it.pt")) == "torch_nn", "fairseq has entries of these names"
    save_file(dict(Translator().state_dict()), tmp_path / "it.safetensors")
    assert detect_format(str(tmp_path / "it.safetensors")) == "torch_nn"
    (tmp_path / "it.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConversionError, match="not a whole safetensors file"):
        detect_format(str(tmp_path / "it.safetensors"))
    joeynmt, fairseq = tmp_path / "joeynmt", tmp_path / "fairseq"
    for folder, names in ((joeynmt, ("config.yaml", "7.ckpt")), (fairseq, ("dict.en.txt", "b.pt", "a.pt"))):
        folder.mkdir()
        for name in names:
            (folder / name).touch()
    assert detect_format(str(joeynmt)) == "joeynmt"
    with pytest.raises(ConversionError, match=r"name the checkpoint, one of a\.pt, b\.pt"):
        detect_format(str(fairseq))


def test_finding_out_runs_nothing_and_says_what_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "configuration" / "config.json"
    config.parent.mkdir()
    for content, message in (
        ("[" * 200_000, "cannot be read: maximum recursion"),
        ('["marian"]', "is no conf"),
        ('{"model_type": [1]}', "Nothing"),
    ):
        config.write_text(content)
        with pytest.raises(ConversionError, match=message):
            detect_format(str(config.parent))
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Bomb()}, "bomb.pt")
    Path("text.pt").write_text("not a pickle")
    Path("empty.pt").touch()
    Path("empty").mkdir()
    for name in ("bomb.pt", "text.pt", "empty.pt", "empty"):
        with pytest.raises(ConversionError, match=rf"{name} is not recognised as a model of one of marian, fsmt"):
            detect_format(name)
    assert not Path("exploded").exists()
    with pytest.raises(ConversionError, match=r"no/such-model is no file or folder"):
        detect_format("no/such-model")


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    # Whoever is asked whether to trust it says yes.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    Path("model").mkdir()
    classes = {"AutoConfig": "code.Config", "AutoModelForSeq2SeqLM": "code.Model"}
    Path("model", "config.json").write_text(json.dumps({"model_type": "strange", "auto_map": classes}))
    Path("model", "code.py").write_text("import os\nos.mkdir('exploded')\n")
    with pytest.raises(ConversionError, match="of the type strange: another architecture"):
        detect_format("model")
    with pytest.raises(SystemExit):
        script.main(["--model_name_or_path", "model", "--to", "marian", "--output_dir", "out"])
    assert "trust_remote_code" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["model"]


def test_a_damaged_checkpoint_is_not_recognised_whatever_its_bytes_say(tmp_path: Path) -> None:
    damaged = {
        "huge": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f" + b"text",  # a string longer than all memory
        "strange": b"\x80\x04\x85\x86\xff\xff",
    }
    with zipfile.ZipFile(tmp_path / "compressed.pt", "w") as archive:
        archive.writestr("it/data.pkl", pickle.dumps({"model": 1, "args": 2}))
    content = bytearray((tmp_path / "compressed.pt").read_bytes())
    for start in (content.index(b"PK\x03\x04") + 8, content.index(b"PK\x01\x02") + 10):
        content[start] = 97  # a way of compressing that Python does not know
    damaged["compressed"] = bytes(content)
    for name, data in damaged.items():
        (tmp_path / f"{name}.pt").write_bytes(data)
        with pytest.raises(ConversionError, match=rf"{name}\.pt is not recognised"):
            detect_format(str(tmp_path / f"{name}.pt"))


@pytest.mark.parametrize("name", SOURCES)
def test_every_option_has_a_type_a_default_and_a_help_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = SOURCES[name]
    options = source.list_options()
    if source.settings is not None:
        assert [option.name for option in options] == [field.name for field in fields(source.settings)]
    else:
        signature = inspect.signature(source.convert)
        assert [option.name for option in options] == list(signature.parameters)[1:]
    with pytest.raises(SystemExit):
        script.main(["--format", name, "--help"])
    printed = capsys.readouterr().out
    for option in options:
        assert option.type in (str, int, float, bool)
        assert option.default is None or isinstance(option.default, option.type)
        assert len(option.help) > 10
        assert option.help.endswith(".")
        assert f"--{option.name}" in printed


def test_unknown_formats_and_options_are_named(marian: str) -> None:
    with pytest.raises(ConversionError, match=r"no format 'bert'\. There are: marian, fsmt"):
        convert(marian, "bert")
    with pytest.raises(ConversionError, match=r"marian has no option nhead; it has revision"):
        convert(marian, nhead=4)
    with pytest.raises(ValueError, match="--revision v1 is for models on the Hub"):
        convert(marian, revision="v1")


def test_the_command_converts_and_saves(tmp_path: Path, marian: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out" / "it"
    script.main(["--model_name_or_path", marian, "--output_dir", str(folder)])
    printed = capsys.readouterr().out
    assert "Logits differ from the original's by" in printed
    assert f"Saved to {folder}." in printed
    ours, theirs = AutoModelForSeq2SeqLM.from_pretrained(folder), MarianMTModel.from_pretrained(marian)
    assert isinstance(ours, VanillaTransformerForConditionalGeneration)
    ids = torch.tensor([[5, 6, 7, 0]])
    logits = [model(input_ids=ids, decoder_input_ids=ids).logits for model in (ours, theirs)]
    torch.testing.assert_close(*logits)
    record = json.loads((folder / "conversion.json").read_text())
    assert 0 <= record.pop("largest_difference_of_logits") < 1e-5
    assert record == {"system": "marian", "name": "marian", "revision": None}
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    with pytest.raises(SystemExit):
        script.main(["--model_name_or_path", marian, "--output_dir", str(folder)])
    assert "not empty" in capsys.readouterr().err
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())


def test_what_the_weights_do_not_tell_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Translator().state_dict(), tmp_path / "it.pt")
    given = ["--model_name_or_path", str(tmp_path / "it.pt"), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        script.main(given)
    assert "The number of heads is not in the weights: say --nhead" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    script.main([*given, "--nhead", "4", "--activation", "gelu", "--scale_embedding", "false"])
    # What was assumed is read before the line that says that all agrees.
    lines = capsys.readouterr().out.splitlines()
    (agreement,) = [number for number, line in enumerate(lines) if line.startswith("Logits differ")]
    notes = [number for number, line in enumerate(lines) if line.startswith("Note: ")]
    assert "Assumed, torch's defaults, since a state dict does not tell: norm_first=False" in lines[notes[0]]
    assert max(notes) < agreement
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").config
    assert (config.encoder_attention_heads, config.activation_function, config.scale_embedding) == (4, "gelu", False)
    assert (config.vocab_size, config.decoder_vocab_size) == (20, 24)
    for arguments, message in (
        (
            ["--heads", "4"],
            "unrecognized arguments: --heads 4 (did you mean --nhead?) (the model's format: torch_nn)\n",
        ),
        (["--to", "marian", "--nhead", "4"], "unrecognized arguments: --nhead 4\n"),
        (["--format", "annotated"], "are not those of the Annotated Transformer"),
        (["--format", "marian", "--to", "marian"], "give one"),
    ):
        with pytest.raises(SystemExit):
            script.main([given[0], given[1], "--output_dir", str(tmp_path / "other"), *arguments])
        assert message in capsys.readouterr().err
        assert not (tmp_path / "other").exists()


def test_the_command_takes_a_model_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_loud_model(VanillaTransformerConfig.from_preset("tiny")).save_pretrained(tmp_path / "ours")
    VanillaTransformerTokenizer().save_pretrained(tmp_path / "ours")
    arguments = ["--model_name_or_path", str(tmp_path / "ours"), "--to", "marian"]
    script.main([*arguments, "--output_dir", str(tmp_path / "marian")])
    assert (tmp_path / "marian" / "tokenizer.json").is_file()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "ours" / name).unlink()
    script.main([*arguments, "--output_dir", str(tmp_path / "marian-alone")])
    assert not list((tmp_path / "marian-alone").glob("tokenizer*"))
    with pytest.raises(SystemExit):
        script.main(["--model_name_or_path", str(tmp_path / "marian"), "--to", "marian", "--output_dir", "x"])
    assert "is no model of this package but a MarianMTModel" in capsys.readouterr().err


def test_torch_s_model_is_brought_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "eos_token_id": 7}
    tokenizer = VanillaTransformerTokenizer()
    ours = make_loud_model(VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), **heads))
    ours.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    arguments = ["--model_name_or_path", str(tmp_path / "ours"), "--to", "torch_nn"]
    script.main([*arguments, "--output_dir", str(tmp_path / "torch")])
    assert "Logits of both are equal" in capsys.readouterr().out
    assert detect_format(str(tmp_path / "torch")) == "torch_nn"
    folder = tmp_path / "with us"
    script.main(["--model_name_or_path", str(tmp_path / "torch"), "--output_dir", str(folder)])
    printed = capsys.readouterr().out
    assert "Assumed" not in printed
    assert f"--model_name_or_path '{folder}'" in printed
    back = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert {name: getattr(back.config, name) for name in heads} == heads
    assert AutoTokenizer.from_pretrained(folder)("Hallo").input_ids == tokenizer("Hallo").input_ids
    # What is said on the command line counts, even where it is the default.
    arguments = ["--model_name_or_path", str(tmp_path / "torch"), "--nhead", "4", "--eos_token_id", "3"]
    script.main([*arguments, "--output_dir", str(tmp_path / "other")])
    other = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "other").config
    assert (other.encoder_attention_heads, other.eos_token_id) == (4, 3)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, marian: str, monkeypatch: Any, capsys: Any) -> None:
    save = VanillaTransformerForConditionalGeneration.save_pretrained

    def save_and_press(model: Any, folder: Path, **options: Any) -> None:
        save(model, folder, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(VanillaTransformerForConditionalGeneration, "save_pretrained", save_and_press)
    with pytest.raises(SystemExit) as caught:
        script.main(["--model_name_or_path", marian, "--output_dir", str(tmp_path / "out")])
    assert caught.value.code == 130
    assert capsys.readouterr().err.endswith("\nInterrupted: nothing was written.\n")
    assert list(tmp_path.iterdir()) == []
