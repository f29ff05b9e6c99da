"""scripts/train.py beyond its defaults: recipe, averaging, two vocabularies, streams, and what it leaves behind."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from corpus_files import command_line
from datasets import Dataset
from many_processes import write_pairs
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.commands import train as script
from vanilla_transformer.files import digest_weights, locked
from vanilla_transformer.training import callbacks
from vanilla_transformer.training.trainer import data_state_name

pytestmark = pytest.mark.usefixtures("no_curves")


def run(settings: dict[str, Any]) -> None:
    script.main(command_line(settings))


Refuse = Callable[[list[Any]], str]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Expects scripts/train.py to end with an error, and returns what it says."""

    def run(words: list[Any]) -> str:
        with pytest.raises(SystemExit) as end:
            script.main([str(word) for word in words])
        assert end.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of scripts/train.py for one epoch of three steps."""
    folder = tmp_path_factory.mktemp("data")
    settings: dict[str, Any] = {"preset": "tiny", "config_overrides": "encoder_layers=1,decoder_layers=1,d_k=4"}
    settings |= {f"{name}_file": write_pairs(folder, name, count) for name, count in (("train", 30), ("validation", 6))}
    settings |= {"vocab_size": 280, "per_device_train_batch_size": 10, "learning_rate": 0.003, "warmup_steps": 2}
    settings |= {"num_train_epochs": 1, "logging_steps": 1, "label_smoothing_factor": 0.1}
    return settings | {"generation_max_length": 12, "use_cpu": True, "disable_tqdm": True}


@pytest.fixture
def settings(small: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Those of two epochs, in batches of so many tokens."""
    rest = {name: value for name, value in small.items() if name != "per_device_train_batch_size"}
    return {**rest, "max_source_tokens": 60, "num_train_epochs": 2, "output_dir": str(tmp_path / "run")}


@pytest.fixture(scope="module")
def trained(small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained for three steps by the script itself, from a file of arguments."""
    folder = tmp_path_factory.mktemp("trained")
    output_dir = folder / "model"
    settings = {**small, "hub_license": "mit", "output_dir": str(output_dir)}
    (folder / "arguments.yaml").write_text(yaml.safe_dump(settings))
    path = Path(__file__).parents[2] / "scripts" / "train.py"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(path), "arguments.yaml"])
        runpy.run_path(str(path), run_name="__main__")
    assert "pairs: 30 train, 6 validation" in said.getvalue()
    assert f"The model is in {output_dir}" in said.getvalue()
    return output_dir


class TestTraining:
    def test_all_that_belongs_to_the_model_is_saved(self, trained: Path, small: dict[str, Any]) -> None:
        names = ("arguments", "config", "generation_config", "tokenizer", "tokenizer_config", "train_results")
        expected = {"model.safetensors", "modeling_vanilla_transformer.py", "pipeline_vanilla_transformer.py"}
        assert expected | {f"{name}.json" for name in names} <= {path.name for path in trained.iterdir()}
        scores = json.loads((trained / "eval_results.json").read_text())
        assert all(0 <= scores[name] <= 100 for name in ("eval_bleu", "eval_chrf"))
        assert scores["eval_loss"] > 0
        recorded = json.loads((trained / "arguments.json").read_text())
        assert recorded["model"]["config_overrides"] == small["config_overrides"]
        assert recorded["data"]["train_file"] == small["train_file"]
        search = GenerationConfig.from_pretrained(trained)
        assert (search.num_beams, search.max_length, search.max_new_tokens) == (4, None, None)

    def test_it_leaves_its_record(self, trained: Path) -> None:
        card = (trained / "README.md").read_text(encoding="utf-8")
        assert "\nlicense: mit\n" in card
        assert "BLEU" in card
        assert str(trained.parent) not in card
        assert (trained / "curves.png").read_bytes().startswith(b"\x89PNG")
        record = json.loads((trained / "metrics.json").read_text())
        assert "eval_bleu" in json.dumps(record)
        history = json.loads((trained / "trainer_state.json").read_text())["log_history"]
        for name in ("target_tokens_per_second", "padding_share", "grad_norm", "learning_rate"):
            assert name in history[0]
        assert any(path.name.startswith("events.") for path in (trained / "runs").rglob("*"))

    def test_the_model_is_what_the_arguments_asked_for(self, trained: Path) -> None:
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(trained)
        tokenizer = AutoTokenizer.from_pretrained(trained)
        assert type(model) is VanillaTransformerForConditionalGeneration
        assert type(tokenizer) is VanillaTransformerTokenizer
        assert (model.config.encoder_layers, model.config.d_k, model.config.d_model) == (1, 4, 32)
        assert model.config.label_smoothing == 0.1
        assert model.config.vocab_size == len(tokenizer)

    def test_the_same_command_with_more_epochs_goes_on(
        self, trained: Path, small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = Path(shutil.copytree(trained, tmp_path / "model"))
        script.main(command_line(small, output_dir=model, num_train_epochs=2))
        assert f"Resuming from {model / 'checkpoint-3'}" in capsys.readouterr().out
        before, after = (json.loads((folder / "trainer_state.json").read_text()) for folder in (trained, model))
        assert (before["global_step"], after["global_step"]) == (3, 6)
        losses = [[entry["loss"] for entry in state["log_history"] if "loss" in entry] for state in (before, after)]
        assert len(losses[0]) == 3
        assert losses[1][:3] == losses[0], "the first three steps are those of the first part"
        assert len(losses[1]) == 6
        old, new = (load_file(folder / "checkpoint-3" / "model.safetensors") for folder in (trained, model))
        assert all(old[name].equal(new[name]) for name in old)

    def test_the_checkpoint_that_a_run_goes_on_from_may_be_deleted_meanwhile(
        self, small: dict[str, Any], tmp_path: Path
    ) -> None:
        model = tmp_path / "model"
        changes = {"output_dir": model, "load_best_model_at_end": False, "save_total_limit": 1}
        script.main(command_line(small, **changes))
        script.main(command_line(small, **changes, num_train_epochs=3))
        assert [folder.name for folder in model.glob("checkpoint-*")] == ["checkpoint-9"]
        assert json.loads((model / "train_results.json").read_text())["epoch"] == 3

    def test_a_finished_run_keeps_its_record(self, trained: Path, small: Any, tmp_path: Path) -> None:
        model = Path(shutil.copytree(trained, tmp_path / "model"))
        before = (model / "train_results.json").read_bytes()
        script.main(command_line(small, output_dir=model))
        assert (model / "train_results.json").read_bytes() == before

    def test_a_run_of_other_arguments_is_refused(self, trained: Path, small: Any, refuse: Refuse) -> None:
        before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
        changed = command_line(small, output_dir=trained, vocab_size=300)
        assert "vocab_size: 280 there, 300 now" in refuse(changed)
        assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before

    def test_its_model_is_scored_and_translates(
        self, trained: Path, small: Any, main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        named = ["--model_name_or_path", trained, "--device", "cpu", "--max_new_tokens", "8", "--disable_tqdm"]
        test_file = small["validation_file"]
        main("evaluate_translation")(*named, "--test_file", *test_file, "--output_dir", tmp_path / "scores")
        assert re.search(r"^sentences +6  4 beams$", capsys.readouterr().out, flags=re.MULTILINE)
        hypotheses = (tmp_path / "scores" / "hypotheses.txt").read_text(encoding="utf-8")
        main("translate")(*named, "--input_file", test_file[0], "--output_file", tmp_path / "output.de")
        assert (tmp_path / "output.de").read_text(encoding="utf-8") == hypotheses
        assert hypotheses.count("\n") == 6


class TestErrorsOfTraining:
    """Each ends with one message, and leaves no folder behind that would refuse the command when it is put right."""

    @pytest.mark.parametrize(
        ("german", "changes", "message"),
        [
            (b"eins\n" * 29, {}, r"train\.en has 30 lines, but .*train\.de has 29"),
            (b"eins\nf\xfcnf\n" * 15, {}, r"train\.de, line 2: byte 0xfc"),
            (b"eins\n" * 30, {"config_overrides": "d_model=wide"}, r"d_model.*(?s:.*)'?wide"),
            (b"eins\n" * 30, {"vocab_size": 9}, r"vocab_size=9 is too small"),
        ],
    )
    def test_text_files_and_arguments(
        self, german: bytes, changes: Any, message: str, small: Any, refuse: Refuse, tmp_path: Path
    ) -> None:
        files = write_pairs(tmp_path, "train", 30)
        Path(files[1]).write_bytes(german)
        said = refuse(command_line({**small, "train_file": files}, output_dir=tmp_path / "out", **changes))
        assert re.search(message, said), said
        assert said.index("usage: ") < 3
        assert len(said.split("error:")[0].splitlines()) <= 3, "the message is not buried under a hundred arguments"
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(("name", "write"), [("a.json", json.dumps), ("a.yaml", yaml.safe_dump)])
    def test_a_file_of_arguments(self, name: str, write: Any, refuse: Refuse, tmp_path: Path) -> None:
        (tmp_path / name).write_text(write({"builtin_corpus": True, "preset": "tiny", "presett": "big"}))
        assert "presett" in refuse([tmp_path / name])
        assert "missing" in refuse([tmp_path / f"missing-{name}"])
        (tmp_path / name).write_text("[1]")
        assert "holds a list: it must hold names and values" in refuse([tmp_path / name])


class TestWhatIsKept:
    def test_a_run_that_ended_early_does_nothing_again(self, settings: dict[str, Any]) -> None:
        """It goes on from its last checkpoint, which is not the best, and may be one of one."""
        del settings["num_train_epochs"]
        steps = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
        best = {"metric_for_best_model": "loss", "greater_is_better": True, "early_stopping_patience": 2}
        run({**settings, **steps, **best, "max_steps": 6, "save_total_limit": 1, "learning_rate": 0.01})
        folder = Path(settings["output_dir"])
        state = json.loads((folder / "trainer_state.json").read_text())
        last = state["global_step"]
        assert state["best_global_step"] < last < 6
        assert (folder / f"checkpoint-{last}").is_dir()

    def test_the_last_validation_does_not_round_the_model(
        self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may be pushed after that."""
        runs: list[script.Run] = []
        set_up = script.set_up

        def remember(*wishes: Any) -> script.Run:
            runs.append(set_up(*wishes))
            return runs[0]

        monkeypatch.setattr(script, "set_up", remember)
        run({**settings, "bf16_full_eval": True, "num_train_epochs": 1})
        assert {tensor.dtype for tensor in runs[0].model.parameters()} == {torch.float32}

    def test_no_checkpoint_where_none_is_asked_for(self, settings: dict[str, Any]) -> None:
        run({**settings, "save_strategy": "no", "num_train_epochs": 1})
        assert not [*Path(settings["output_dir"]).glob("checkpoint-*")]


class TestRecipe:
    def parse(self, *words: Any, preset: str = "big") -> Any:
        argv = ["--preset", preset, "--train_file", "pairs.tsv", "--output_dir", "out", "--use_cpu", *map(str, words)]
        return script.parse(script.make_parser(), argv)[-1]

    def test_it_is_the_papers(self) -> None:
        arguments = self.parse("--recipe", "paper")
        assert (arguments.max_steps, arguments.average_checkpoints, arguments.save_total_limit) == (300_000, 20, 20)
        assert arguments.max_grad_norm == 0
        assert arguments.gradient_accumulation_steps * arguments.max_source_tokens == pytest.approx(25_000, rel=1e-3)
        assert arguments.max_target_tokens == arguments.max_source_tokens
        assert not arguments.load_best_model_at_end
        assert self.parse("--recipe", "paper", preset="base").max_steps == 100_000
        arguments = self.parse()
        assert (arguments.max_steps, arguments.average_checkpoints, arguments.max_source_tokens) == (-1, 0, None)

    def test_what_is_given_wins(self) -> None:
        arguments = self.parse(
            "--recipe", "paper", "--max_steps", 7, "--max_grad_norm", 2, "--tokens_per_batch", 6000,
            "--tokens_per_device", 1500, "--average_checkpoints", 30,
        )  # fmt: skip
        assert (arguments.max_steps, arguments.max_grad_norm) == (7, 2)
        assert (arguments.gradient_accumulation_steps, arguments.max_source_tokens) == (4, 1500)
        assert arguments.save_total_limit == 30, "as many as are averaged"
        assert self.parse("--recipe", "paper", "--num_train_epochs", 3).max_steps == -1
        arguments = self.parse("--recipe", "paper", "--max_source_tokens", 2500)
        assert (arguments.max_source_tokens, arguments.max_target_tokens) == (2500, 2500)
        assert arguments.gradient_accumulation_steps == 10, "the update stays what it is"

    def test_a_file_of_arguments_can_name_it(self, tmp_path: Path) -> None:
        path = tmp_path / "arguments.yaml"
        words = {"recipe": "paper", "preset": "base", "train_file": ["pairs.tsv"], "output_dir": "out", "use_cpu": True}
        # YAML takes 1e-3 for text.
        path.write_text(yaml.safe_dump({**words, "max_steps": 9}) + "learning_rate: 1e-3\n")
        arguments = script.parse(script.make_parser(), [str(path)])[-1]
        assert (arguments.max_steps, arguments.average_checkpoints, arguments.adam_beta2) == (9, 5, 0.98)
        assert arguments.learning_rate == 0.001


def test_the_average_of_the_checkpoints_is_the_model(settings: dict[str, Any]) -> None:
    run({**settings, "num_train_epochs": 4, "average_checkpoints": 3})
    output = Path(settings["output_dir"])
    checkpoints = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    assert len(checkpoints) == 3
    weights = [load_file(folder / "model.safetensors") for folder in checkpoints]
    saved = load_file(output / "model.safetensors")
    assert saved.keys() == weights[0].keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, torch.stack([each[name] for each in weights]).mean(dim=0))
    assert json.loads((output / "eval_results.json").read_text())["eval_loss"] > 0


def test_a_warm_up_that_does_not_fit_is_said_before_the_training(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks.logger, "propagate", True)
    run({**settings, "eval_strategy": "no", "save_strategy": "no", "max_steps": 3, "warmup_steps": 4000})
    (message,) = [message for message in caplog.messages if "warm-up" in message]
    assert message == (
        "3 update(s), but the warm-up takes 4,000: the learning rate never reaches its peak. Choose fewer "
        "--warmup_steps and a --learning_rate that suits them, or train longer."
    )


def test_two_vocabularies(settings: dict[str, Any], tmp_path: Path) -> None:
    """From text to a model that reads in one vocabulary and writes in the other, and goes on being trained."""
    run({**settings, "separate_vocabularies": True, "target_vocab_size": 270})
    output = Path(settings["output_dir"])
    tokenizer = AutoTokenizer.from_pretrained(output)
    config = VanillaTransformerConfig.from_pretrained(output)
    assert (len(tokenizer), tokenizer.target_vocab_size) == (config.vocab_size, config.decoder_vocab_size)
    assert config.vocab_size > config.target_vocab_size
    assert not config.share_encoder_decoder_embeddings
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    batch = tokenizer(["one two"], return_tensors="pt")
    labels = tokenizer(text_target=["eins zwei"], return_tensors="pt")["input_ids"]
    assert tokenizer.decode(labels[0], skip_special_tokens=True) == "eins zwei"
    assert model(**batch, labels=labels).logits.shape[-1] == tokenizer.target_vocab_size
    further = {**settings, "model_name_or_path": str(output), "output_dir": str(tmp_path / "further")}
    del further["preset"], further["config_overrides"]
    run({**further, "num_train_epochs": 1})
    assert AutoTokenizer.from_pretrained(tmp_path / "further").separate_vocabs


def assert_same_weights(first: Path, second: Path | str) -> None:
    """Of two runs of 6 steps."""
    one, other = (load_file(Path(folder, "checkpoint-6", "model.safetensors")) for folder in (first, second))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class TestSeveralCorpora:
    def test_pairs_are_repeated_and_a_run_goes_on_within_an_epoch(
        self, settings: dict[str, Any], tmp_path: Path, capsys: Any, refuse: Refuse
    ) -> None:
        """60 pairs of each; stopped within an epoch and started again, it ends with the weights of an unbroken run."""
        dataset = Dataset.from_dict({"source": [f"{row} two" for row in range(60)], "target": ["three four"] * 60})
        dataset.save_to_disk(tmp_path / "saved")
        more = ["--dataset_name", tmp_path / "saved", "--dataset_weights", 1, 1, "--added_tokens", "<BT>"]
        settings |= {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
        whole = [*command_line({**settings, "output_dir": str(tmp_path / "whole")}), *more]
        script.main(list(map(str, whole)))
        assert "pairs: 120 train" in capsys.readouterr().out
        script.main(list(map(str, [*command_line({**settings, "max_steps": 2}), *more])))
        script.main(list(map(str, [*command_line(settings), *more])))
        assert_same_weights(tmp_path / "whole", settings["output_dir"])
        tokenizer = AutoTokenizer.from_pretrained(settings["output_dir"])
        assert tokenizer.tokenize("<BT> two")[0] == "<BT>"
        assert len(tokenizer) == AutoConfig.from_pretrained(settings["output_dir"]).vocab_size
        card = (tmp_path / "whole" / "README.md").read_text()
        assert "`train.en`, `train.de` and `saved`, in the proportion 1.0 : 1.0" in card
        message = refuse([*command_line(settings), *more[:3], 1, 2, *more[5:]])
        assert "other arguments (dataset_weights: [1.0, 1.0] there, [1.0, 2.0] now)" in message

    def test_files_of_arguments_have_lists_of_files(
        self, settings: dict[str, Any], tmp_path: Path, capsys: Any
    ) -> None:
        corpora = [settings["train_file"], write_pairs(tmp_path, "more", 10)]
        settings |= {"train_file": corpora, "dataset_temperature": 2, "max_steps": 1, "eval_strategy": "no"}
        (tmp_path / "arguments.yaml").write_text(yaml.safe_dump(settings))
        script.main([str(tmp_path / "arguments.yaml")])
        # 10^0.5 : 30^0.5, where all 30 are there once.
        assert f"pairs: {30 + round(30 / 3**0.5)} train" in capsys.readouterr().out
        # On a command line, the same run.
        del settings["train_file"]
        words = command_line(settings)
        script.main([*words, "--train_file", *corpora[0], "--train_file", *corpora[1]])

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--dataset_weights", "1", "2"], "dataset_weights has 2 number(s), and there are 1 corpora"),
            (["--dataset_weights", "-1"], "dataset_weights has -1.0; each must be"),
            (
                ["--dataset_weights", "1", "--dataset_temperature", "2"],
                "dataset_weights or dataset_temperature, not both",
            ),
            (["--dataset_temperature", "0"], "dataset_temperature=0.0: must be above 0"),
            (["--added_tokens", "a b"], "added_tokens has 'a b'"),
        ],
    )
    def test_wrong_wishes(self, settings: dict[str, Any], words: list[str], message: str, refuse: Refuse) -> None:
        assert message in refuse([*command_line(settings), *words])

    def test_what_is_found_late_is_an_error_all_the_same(
        self, settings: dict[str, Any], trained: Path, refuse: Refuse
    ) -> None:
        wrong = [*command_line(settings), "--bleu_tokenize", "nonsense"]
        assert "tokenize is 'nonsense'; it must be one of" in refuse(wrong)
        words = {**settings, "model_name_or_path": str(trained), "config_overrides": "encoder_layers=3"}
        words |= {"output_dir": f"{settings['output_dir']}-2"}
        words = {name: value for name, value in words.items() if name not in ("preset", "vocab_size")}
        assert "ignore_mismatched_sizes" in refuse(command_line(words))


class TestStreaming:
    @pytest.fixture
    def streaming(self, settings: dict[str, Any]) -> dict[str, Any]:
        del settings["num_train_epochs"]
        steps = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
        return {**settings, **steps, "streaming": True, "streaming_window": 12}

    def test_several_corpora_have_their_shares(self, streaming: dict[str, Any], tmp_path: Path, refuse: Refuse) -> None:
        more = ["--train_file", *write_pairs(tmp_path, "more", 7)]
        said = refuse([*command_line(streaming), *more])
        assert "streaming 2 corpora needs dataset_weights" in said
        more += ["--dataset_weights", "1", "3"]
        script.main([*command_line({**streaming, "output_dir": str(tmp_path / "whole")}), *more])
        script.main([*command_line({**streaming, "max_steps": 3}), *more])
        script.main([*command_line(streaming), *more])
        assert_same_weights(tmp_path / "whole", streaming["output_dir"])
        position = json.loads(Path(streaming["output_dir"], "checkpoint-6", data_state_name(0)).read_text())
        assert [corpus["pass_examples"] > 0 for corpus in (position["position"], *position["others"])] == [True, True]

    def test_bpe_dropout_on_the_fly(self, streaming: dict[str, Any]) -> None:
        run({**streaming, "bpe_dropout": 0.2, "eval_strategy": "no"})
        assert '"global_step": 6,' in (Path(streaming["output_dir"]) / "trainer_state.json").read_text()

    def test_a_vocabulary_that_cannot_be_sampled_is_refused(self, settings: dict[str, Any], refuse: Refuse) -> None:
        message = refuse(command_line(settings, tokenizer_type="bpe", unigram_alpha=0.1))
        assert "unigram_alpha needs a unigram vocabulary, but VanillaTransformerTokenizer is a BPE model" in message
        assert not Path(settings["output_dir"]).exists()

    def test_what_a_stream_lacks_is_said_at_once(self, settings: dict[str, Any], refuse: Refuse) -> None:
        del settings["max_source_tokens"]
        message = refuse(command_line(settings, streaming=True))
        for name in ("max_source_tokens", "max_steps", "eval_strategy", "save_strategy"):
            assert f"{name} must" in message
        assert not Path(settings["output_dir"]).exists()

    def test_the_builtin_corpus_is_no_stream(self, refuse: Refuse) -> None:
        words = {"preset": "tiny", "builtin_corpus": True, "streaming": True}
        assert "the built-in corpus is made in memory" in refuse(command_line(words))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"preset": "tinny"}, "tinny"),
        ({"recipe": "mine"}, "recipe"),
        ({"recipe": "paper", "tokens_per_batch": "many"}, "tokens_per_batch"),
        ({"config_overrides": "dropuot=0.3"}, "dropuot not among the fields"),
        ({"tokens_per_batch": 1000}, "tokens_per_batch=1000 needs a recipe"),
        ({"bpe_dropout": 1}, "bpe_dropout=1.0: must be at least 0 and less than 1"),
        ({"unigram_alpha": 0}, "unigram_alpha=0.0: must be greater than 0"),
        ({"target_tokenizer_name": "de.model"}, "target_tokenizer_name=de.model needs tokenizer_name"),
        ({"target_vocab_size": 300}, "target_vocab_size=300 needs separate_vocabularies"),
        ({"max_source_tokens": 0}, "max_source_tokens=0: must be at least 1 token"),
        ({"average_checkpoints": 2, "load_best_model_at_end": True}, "two different models at the end"),
        ({"average_checkpoints": -1}, "average_checkpoints=-1: must not be negative"),
        ({"streaming_window": 0}, "streaming_window=0: must be at least 1"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy=sequential has no effect"),
    ],
)
def test_impossible_wishes_are_refused(
    settings: dict[str, Any], wrong: dict[str, Any], message: str, refuse: Refuse
) -> None:
    errors = refuse(command_line(settings, **wrong))
    assert message in errors
    assert "vocabulary has" not in errors, "said before a tokenizer is trained"


def test_a_training_that_diverges_ends_with_a_message(settings: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="The training has diverged: at update 3 the gradient norm is nan"):
        run({**settings, "learning_rate": 1e30, "eval_strategy": "no"})
    assert not (Path(settings["output_dir"]) / "model.safetensors").exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_corpus_of_which_nothing_fits_into_a_batch_is_an_error_in_a_line(
    settings: dict[str, Any], streaming: bool
) -> None:
    settings |= {"max_source_tokens": 1, "eval_strategy": "no", "save_strategy": "no", "max_steps": 2}
    with pytest.raises(SystemExit, match=r"max_source_tokens=1 (and|or) max_target_tokens=1"):
        run({**settings, "streaming": streaming})


def test_a_learned_table_of_positions_is_as_long_as_the_texts(settings: dict[str, Any], refuse: Refuse) -> None:
    learned = f"{settings['config_overrides']},position_embedding_type=learned"
    said = refuse(command_line(settings, config_overrides=learned, max_target_length=40))
    assert "max_source_length=256: the model reads at most 128 tokens" in said
    assert not Path(settings["output_dir"]).exists()


def test_a_named_checkpoint_that_is_damaged_is_refused(settings: dict[str, Any], refuse: Refuse) -> None:
    run({**settings, "num_train_epochs": 1, "eval_strategy": "no"})
    (checkpoint,) = Path(settings["output_dir"]).glob("checkpoint-*")
    (checkpoint / "optimizer.pt").write_bytes(b"")
    said = refuse(command_line(settings, eval_strategy="no", resume_from_checkpoint=checkpoint))
    assert f"resume_from_checkpoint={checkpoint}: optimizer.pt is cut off or damaged" in said


@pytest.mark.parametrize("streaming", [False, True])
def test_files_whose_content_changed_are_other_data(
    settings: dict[str, Any], tmp_path: Path, streaming: bool, refuse: Refuse
) -> None:
    files = write_pairs(tmp_path, "own", 12)
    settings |= {"train_file": files, "num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}
    if streaming:
        settings |= {"streaming": True, "max_steps": 2}
    run(settings)
    text = Path(files[1]).read_text()
    Path(files[1]).write_text(text.replace("one", "three" if streaming else "eno"))
    assert f"holds a run with other data: {files[1]} changed since" in refuse(command_line(settings))
    Path(files[1]).write_text(text)
    run(settings)


def test_a_run_that_is_under_way_is_not_started_again(settings: dict[str, Any], refuse: Refuse) -> None:
    output = Path(settings["output_dir"])
    with locked(output / "_lock", "it"):
        assert f"{output} is in use by process {os.getpid()} on " in refuse(command_line(settings))
    assert not list(output.iterdir())
    (output / "_lock").write_text("process 1 on a machine that was switched off")
    run({**settings, "eval_strategy": "no", "save_strategy": "no", "num_train_epochs": 1})
    assert (output / "model.safetensors").is_file()
    assert not (output / "_lock").exists()


def test_a_run_that_was_moved_keeps_its_best_checkpoint(settings: dict[str, Any], tmp_path: Path) -> None:
    settings |= {"metric_for_best_model": "loss", "greater_is_better": True, "num_train_epochs": 3}  # the first one
    run(settings)
    first = Path(settings["output_dir"])
    best = json.loads((first / "trainer_state.json").read_text())["best_global_step"]
    expected = digest_weights(first)
    assert digest_weights(first / f"checkpoint-{best}") == expected
    assert len(list(first.glob("checkpoint-*"))) == 2, "the best one and the last one"
    first.rename(tmp_path / "moved")
    run({**settings, "output_dir": tmp_path / "moved"})
    assert digest_weights(tmp_path / "moved") == expected


def test_a_card_that_cannot_be_renewed_costs_no_training(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    output = Path(settings["output_dir"])
    run({**settings, "num_train_epochs": 1})
    card = "---\nlicense: [mit\n---\nMine.\n"
    (output / "README.md").write_text(card)
    run(settings)
    assert "The model card is not written: " in capsys.readouterr().out
    assert (output / "README.md").read_text() == card


class TestWords:
    """What the command says of itself, and to words that it does not know."""

    def test_help_begins_with_what_is_used_most_and_names_no_default_of_none(self) -> None:
        text = script.make_parser().format_help()
        titles = [line for line in text.splitlines() if line.endswith(":") and line[0].isalpha()]
        assert titles[:2] == ["options:", "the most used options:"]
        first, second = (text.index(f"\n{title}") for title in titles[1:3])
        for name in ("--preset", "--train_file", "--output_dir", "--max_steps"):
            assert first < text.index(f"\n  {name} ") < second
        assert text.index("\n  --fsdp ") > text.index("\nother options of training")
        assert "default: None" not in text
        assert "Default: vocab_size. (default" not in " ".join(text.split())

    def test_a_file_says_no_and_has_numbers(self, tmp_path: Path, refuse: Refuse) -> None:
        path = tmp_path / "words.yaml"
        path.write_text("eval_strategy: no\nsource_lang: no\nbf16: no\nmax_steps: 7\n")
        read = {"eval_strategy": "no", "source_lang": "no", "bf16": False, "max_steps": 7}
        assert script.read_settings(str(path)) == read
        path.write_text(
            "train_file: a.tsv\ndataset_weights: 1e-3\nlang_pairs: en-de\nadded_tokens: <BT>\nreport_to: none\n"
        )
        lists = {"train_file": ["a.tsv"], "dataset_weights": [1e-3], "lang_pairs": ["en-de"], "added_tokens": ["<BT>"]}
        assert script.read_settings(str(path)) == {**lists, "report_to": ["none"]}
        path.write_text("resume_from_checkpoint: false\nfsdp: false\nstreaming: 'no'\n")
        assert script.read_settings(str(path)) == {"resume_from_checkpoint": False, "fsdp": False, "streaming": False}
        for text, message in (
            ("max_source_tokens: 4k\n", "words.yaml: max_source_tokens is '4k'; it must be a whole number"),
            ("dataset_weights: [1, two]\n", "words.yaml: dataset_weights is 'two'; it must be a number"),
            ("bf16: 'perhaps'\n", "words.yaml: bf16 is 'perhaps'; it must be true or false"),
            ("preset: [\n", "words.yaml: while parsing"),
        ):
            path.write_text(text)
            assert message in refuse([path])

    def test_options_that_would_do_nothing_are_refused(self, tmp_path: Path, refuse: Refuse) -> None:
        words = ["--output_dir", tmp_path / "out", "--builtin_corpus"]
        own = ["--model_name_or_path", "out/x"]
        for more, message in (
            ([*own, "--added_tokens", "<BT>"], "added_tokens is for a new tokenizer, and that of out/x exists"),
            ([*own, "--separate_vocabularies"], "separate_vocabularies is for a new tokenizer"),
            (["--preset", "tiny", "--validation_file", "a.tsv"], "the built-in corpus has validation pairs of its own"),
        ):
            assert message in refuse([*words, *more])
        words = ["--output_dir", tmp_path / "out", "--preset", "tiny", "--train_file", "a.tsv"]
        said = refuse([*words, "--max_source_tokens", 9, "--dataloader_drop_last"])
        assert "dataloader_drop_last has no effect with max_source_tokens" in said
        assert "target_lang=zh needs source_lang, too" in refuse([*words, "--target_lang", "zh"])

    def test_switches_need_no_value(self, tmp_path: Path) -> None:
        switches = ["--disable_tqdm", "--load_best_model_at_end", "--use_cpu"]
        given = script.parse_given([*switches, "--output_dir", str(tmp_path)])
        assert [given[switch[2:]] for switch in switches] == [True] * 3
        assert script.parse_given(["--disable_tqdm", "false"]) == {"disable_tqdm": False}

    def test_the_best_checkpoint_is_one_that_was_validated(self, tmp_path: Path, refuse: Refuse) -> None:
        words = ["--output_dir", tmp_path / "out", "--builtin_corpus", "--preset", "tiny", "--save_strategy", "steps"]
        assert "save_strategy=steps and eval_strategy=epoch: give both the same one" in refuse(words)

    def test_a_misspelt_option_is_corrected(self, tmp_path: Path, refuse: Refuse) -> None:
        (tmp_path / "words.yaml").write_text("presett: tiny\nbuiltin_corpus: true\n")
        for words in (["--presett", "tiny", "--builtin_corpus"], ["--presett=tiny"], [str(tmp_path / "words.yaml")]):
            message = refuse(words).splitlines()[-1]
            assert "error: unrecognized arguments: --presett" in message
            assert message.endswith("(did you mean --preset?)")

    def test_a_model_that_is_not_there_is_named_in_a_line(self, settings: dict[str, Any], refuse: Refuse) -> None:
        del settings["preset"], settings["config_overrides"]
        said = refuse(command_line(settings, model_name_or_path="out/typo"))
        (message,) = [line for line in said.splitlines() if not line.startswith("usage")]
        assert "error: There is no folder out/typo, and no model of that name could be loaded from the Hub: " in message
