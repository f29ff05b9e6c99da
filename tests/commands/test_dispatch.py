"""`vanilla-transformer`: its commands, that its help waits for nothing, and the scripts that do the same."""

import importlib
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

import vanilla_transformer
from vanilla_transformer.__main__ import COMMANDS, main
from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.options import option

SLOW = {"train"}  # its options are classes of transformers
SCRIPTS = {
    **{
        name: name.replace("-", "_")
        for name in (
            "train",
            "train-tokenizer",
            "translate",
            "backtranslate",
            "distill",
            "app",
            "serve",
            "plot-attention",
        )
    },
    "clean": "clean_corpus",
    "evaluate": "evaluate_translation",
    "convert": "convert_checkpoint",
    "export": "export_model",
    "push": "push_to_hub",
    "plot-curves": "plot_learning_curves",
    "average": "average_checkpoints",
}


CONSOLE_SCRIPT = """import sys, contextlib
from {0} import {1}
{1}()
for name in {commands}:
    with contextlib.suppress(SystemExit):
        {1}([name, "--help"])
print({{"torch", "transformers", "datasets", "numpy", "huggingface_hub"}} & sys.modules.keys())
"""


def import_command(name: str) -> Any:
    return importlib.import_module(f"vanilla_transformer.commands.{name.replace('-', '_')}")


def refuse(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["demo", "test"])
def test_bash_scripts_explain_themselves(name: str, scripts_directory: Path, tmp_path: Path) -> None:
    command = [str(scripts_directory / name), "--help"]
    result = subprocess.run(command, capture_output=True, check=True, cwd=tmp_path, text=True)
    assert f"scripts/{name}" in result.stdout
    assert "#" not in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["-h"]])
def test_every_command_is_listed_with_a_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments)
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert lines == [[name, what] for name, what in COMMANDS.items()]
    files = (Path(__file__).parents[2] / "vanilla_transformer" / "commands").glob("[!_]*.py")
    found = {path.stem.replace("_", "-") for path in files} - {"command-line"}
    assert found == set(COMMANDS)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refuse("trian", "--help", capsys=capsys)
    assert said.startswith("vanilla-transformer: there is no command 'trian'. There are: train, ")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", COMMANDS)
class TestEveryCommand:
    def test_help_begins_with_commands_to_copy_and_has_every_option(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: vanilla-transformer {name} [-h] [--argument value ...]")
        examples = text.split("\n\n")[2]
        assert f"vanilla-transformer {name} --" in examples
        assert all(line.startswith("    ") for line in examples.splitlines())
        parser = import_command(name).make_parser()
        assert not parser.allow_abbrev
        for action in parser._actions:
            assert action.help, f"{action.option_strings} is not explained"
            assert action.option_strings[0] in text

    def test_an_error_is_not_buried(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        usage, *error = refuse(name, "--no_such_argument", capsys=capsys).splitlines()
        assert usage.startswith(f"usage: vanilla-transformer {name} [-h] [--argument value ...]")
        assert len(error) <= 3

    def test_script_is_the_same_command(self, name: str) -> None:
        assert importlib.import_module(SCRIPTS[name]).main is import_command(name).main


def test_python_runs_the_package_and_knows_its_models(tmp_path: Path) -> None:
    """With a command that works, everything is registered as for everybody else; translating waits for no datasets."""
    (tmp_path / "config.json").write_text('{"model_type": "vanilla_transformer"}')
    (tmp_path / "source.txt").write_text("a")
    words = ["translate", "--model_name_or_path", str(tmp_path), "--input_file", str(tmp_path / "source.txt")]
    command = [sys.executable, "-X", "importtime", "-m", "vanilla_transformer", *words]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, text=True)
    assert done.returncode == 2
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {"torch", "transformers"} == {"torch", "transformers", "datasets", "pandas"} & imported
    assert "no file named model.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("path", "waits"),
    [
        ("bin/vanilla-transformer", False),
        ("Scripts/vanilla-transformer.exe/__main__.py", False),
        ("vanilla-transformer/program.py", True),
        ("vanilla-transformer.py", True),
    ],
)
def test_other_programs_that_ask_for_help_get_the_whole_package(
    path: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", path, raising=False)
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    assert vanilla_transformer._only_help_is_wanted() is not waits
    monkeypatch.setattr(sys, "argv", [path, "train"])
    assert not vanilla_transformer._only_help_is_wanted()


def test_the_console_script_helps_without_torch(tmp_path: Path, repository_root: Path) -> None:
    project = tomllib.loads((repository_root / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["scripts"].items()
    assert EntryPoint(name, value, "console_scripts").load() is main
    # As pip writes it, but for all commands in one process.
    script = tmp_path / name
    script.write_text(CONSOLE_SCRIPT.format(*value.split(":"), commands=sorted(COMMANDS.keys() - SLOW)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(repository_root), os.environ["PYTHONPATH"]])}
    command = [sys.executable, script, "--help"]
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    assert done.stdout.startswith("usage: vanilla-transformer COMMAND")
    assert done.stdout.count("usage: vanilla-transformer ") == len(COMMANDS) - len(SLOW) + 1
    assert done.stdout.endswith("\nset()\n")


@dataclass
class Options:
    """Of every kind."""

    needed: str = option("Must be given.")
    numbers: list[int] | None = option("Any number.", None)
    rate: float = option("A number.", 0.5)
    kind: Literal["one", "two"] | None = option("A choice.", None)
    switch: bool = option("Off unless it is named.", False)
    kept_on: bool = option("On unless it is switched off.", True)
    either: bool | None = option("Not said by default.", None)
    names: list[str] = field(default_factory=lambda: ["a"], metadata={"help": "Several.", "aliases": ["--called"]})


class TestOptions:
    """They are read as transformers' HfArgumentParser reads them."""

    @pytest.mark.parametrize(
        "words",
        [
            [],
            ["--numbers", "1", "-2", "--rate=2", "--kind", "two", "--names", "b", "c"],
            ["--switch", "--no_kept_on", "--either", "yes"],
            ["--switch", "false", "--kept_on", "0", "--either", "n"],
            ["--no-kept-on", "--kept-on", "T", "--called", "b"],
        ],
    )
    def test_give_a_dataclass(self, words: list[str]) -> None:
        from transformers import HfArgumentParser

        library: Any = HfArgumentParser(Options)  # type: ignore[arg-type]
        arguments = ["--needed", "x", *words]
        found = make_argument_parser(Options, None).parse_args_into_dataclasses(arguments)
        assert found == library.parse_args_into_dataclasses(arguments, look_for_args_file=False)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "required: --needed"),
            (["--needed", "x", "--kind", "three"], "invalid choice: 'three'"),
            (["--needed", "x", "--switch", "perhaps"], "'perhaps' must be true or false"),
            (["--needed", "x", "--rate", "fast"], "invalid float value: 'fast'"),
            (["--needed", "x", "--nee", "y"], "unrecognized arguments: --nee (did you mean --needed?)"),
            (["--swich"], "unrecognized arguments: --swich (did you mean --switch?)"),
            (["--needed", "x", "y"], "unrecognized arguments: y"),
        ],
    )
    def test_are_refused(self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            make_argument_parser(Options, None).parse_args_into_dataclasses(words)
        assert message in capsys.readouterr().err


def test_the_names_in_help_are_those_of_the_package() -> None:
    """They are written down in the commands, since importing them takes seconds."""
    from vanilla_transformer.commands import convert, evaluate, export, train_tokenizer, translate
    from vanilla_transformer.conversion.sources import SOURCES, TARGETS
    from vanilla_transformer.export.ctranslate2 import QUANTIZATIONS
    from vanilla_transformer.export.onnx import OLDEST_OPSET
    from vanilla_transformer.inference import compare
    from vanilla_transformer.inference.translate import DEFAULT_BATCH_TOKENS, DEFAULT_BATCH_TOKENS_OF_OTHERS
    from vanilla_transformer.model.pipeline_vanilla_transformer import WINDOW_SIZE
    from vanilla_transformer.tasks import TASKS

    def choices(command: Any, name: str) -> set[str]:
        return set(next(action for action in command.make_parser()._actions if action.dest == name).choices)

    assert choices(convert, "format") == set(SOURCES)
    assert choices(convert, "to") == set(TARGETS)
    assert get_args(export.Quantization) == QUANTIZATIONS
    assert evaluate.Method == compare.Method
    assert f"Default: {OLDEST_OPSET}," in export.make_parser().format_help()
    text = " ".join(translate.make_parser().format_help().split())
    assert f"Default: {WINDOW_SIZE}," in text
    assert f"Default: {DEFAULT_BATCH_TOKENS} ({DEFAULT_BATCH_TOKENS_OF_OTHERS} for models of the library)" in text
    assert f"to do: {', '.join(TASKS)}." in text
    assert train_tokenizer.TokenizerArguments("x", files=["x"]).vocab_size == 37000


@pytest.mark.parametrize(
    "name", sorted(COMMANDS.keys() - {"clean", "train", "translate", "backtranslate", "distill", "evaluate"})
)
def test_few_commands_run_in_several_processes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "started 2 processes (WORLD_SIZE=2)" in refuse(name, capsys=capsys)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "processes" not in refuse(name, "--no_such_argument", capsys=capsys)
