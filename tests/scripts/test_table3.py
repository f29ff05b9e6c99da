"""Table 3: its rows, their scaling, the tables, and the script that trains them, stopped and started again."""

import contextlib
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import table3 as script
import table3_rows as table3
import torch
from corpus_files import command_line
from hypothesis import given
from hypothesis import strategies as st
from many_processes import write_pairs
from transformers import AutoTokenizer

from vanilla_transformer import PRESETS, VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.commands import train
from vanilla_transformer.inference.evaluate import score_translations
from vanilla_transformer.inference.scores import score_loss
from vanilla_transformer.training import records
from vanilla_transformer.training.trainer import TranslationTrainer

ONE = Fraction(1)
SIZES = ("d_model", "d_ff", "h", "d_k", "d_v")
NAMES = ("N", "d_model", "d_ff", "h", "d_k", "d_v")


def scale_config(row: str, scale: str = "1", layers_factor: str = "1", **changes: Any) -> VanillaTransformerConfig:
    overrides = table3.scale_overrides(row, scale=Fraction(scale), layers_factor=Fraction(layers_factor))
    return VanillaTransformerConfig.from_preset(row, **overrides, **changes)


def count_by_hand(config: VanillaTransformerConfig) -> int:
    """Number of parameters by the paper's equations: no bias in attention, one table for both languages and output."""
    columns = table3.describe_config(config)
    layers, d_model, d_ff, heads, d_k, d_v = (int(columns[name]) for name in ("N", *SIZES))
    attention = 2 * d_model * heads * d_k + 2 * d_model * heads * d_v
    feed_forward = d_model * d_ff + d_ff + d_ff * d_model + d_model
    norm = 2 * d_model
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    positions = 2 * config.max_position_embeddings * d_model if config.position_embedding_type == "learned" else 0
    return config.vocab_size * d_model + layers * (encoder_layer + decoder_layer) + positions


def count_parameters(config: VanillaTransformerConfig) -> int:
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    return sum(parameter.numel() for parameter in model.parameters())


class TestRows:
    def test_every_preset_of_the_table_has_a_row(self) -> None:
        assert set(table3.PAPER) == set(PRESETS) - {"tiny", "small", "iwslt", "student"}

    @pytest.mark.parametrize("row", table3.PAPER)
    @pytest.mark.parametrize("scale", ["1", "1/4"])
    def test_the_number_of_parameters_is_the_papers_equations(self, row: str, scale: str) -> None:
        config = scale_config(row, scale, "1/2", vocab_size=1000)
        assert count_parameters(config) == count_by_hand(config)

    @pytest.mark.parametrize("row", [row for row in table3.PAPER if row not in ("big", "E-learned")])
    def test_with_some_41000_tokens_the_parameters_round_to_the_papers(self, row: str) -> None:
        config = scale_config(row, vocab_size=41_000)
        assert count_by_hand(config) / 1e6 == pytest.approx(table3.PAPER[row].parameters, abs=0.6)

    def test_big_is_trained_three_times_as_long(self) -> None:
        assert [table3.count_steps(row, 7) for row in ("base", "C-N2", "big")] == [7, 7, 21]


class TestScaling:
    def test_at_full_size_nothing_is_overridden(self) -> None:
        assert all(table3.scale_overrides(row, scale=ONE, layers_factor=ONE) == {} for row in table3.PAPER)

    @given(st.sampled_from(list(table3.PAPER)), st.integers(0, 4), st.sampled_from(["1", "1/2", "2", "3/2"]))
    def test_every_size_is_multiplied_and_nothing_else_changes(self, row: str, power: int, layers: str) -> None:
        full, scaled = VanillaTransformerConfig.from_preset(row), scale_config(row, f"1/{2**power}", layers)
        before, after = table3.describe_config(full), table3.describe_config(scaled)
        for name in ("d_model", "d_ff", "d_k", "d_v"):
            assert after[name] * 2**power == before[name]
        assert after["N"] == before["N"] * Fraction(layers)
        assert all(after[name] == before[name] for name in ("h", "P_drop", "eps_ls"))
        assert (scaled.decoder_layers, scaled.decoder_ffn_dim) == (scaled.encoder_layers, scaled.encoder_ffn_dim)
        assert scaled.position_embedding_type == full.position_embedding_type

    def test_what_cannot_be_scaled_is_refused(self) -> None:
        for row, scale, layers, message in (
            ("A-h32", "1/32", "1", r"Row A-h32: d_k = 16 \* 1/32 = 0\.5 is not a whole number"),
            ("C-N2", "1", "1/4", r"Row C-N2: encoder_layers = 2 \* 1/4 = 0\.5 is not a whole number"),
            ("A-h1", "1/512", "1", r"(?s)Row A-h1 with scale=1/512: .*d_model must be even"),
        ):
            with pytest.raises(ValueError, match=message):
                table3.scale_overrides(row, scale=Fraction(scale), layers_factor=Fraction(layers))

    @pytest.mark.parametrize("text", ["0", "-1", "1/0", "half", "nan"])
    def test_factors_are_exact_and_positive_numbers(self, text: str) -> None:
        assert table3.parse_factor("scale", "0.1") == table3.parse_factor("scale", "1/10") == Fraction(1, 10)
        with pytest.raises(ValueError, match=f"scale={re.escape(text)}: must be a positive number"):
            table3.parse_factor("scale", text)


class TestTables:
    COLUMNS = {row: table3.describe_config(VanillaTransformerConfig.from_preset(row)) for row in ("base", "big")}
    MEASUREMENTS = (
        table3.Measurement("big", COLUMNS["big"], 3000, 214_000_000, 4.4444, 26.06),
        table3.Measurement("base", COLUMNS["base"], 1000, 63_049_000, 5.0, 25.0),
    )

    def test_the_papers_figures_stand_next_to_the_measured_ones_in_the_papers_order(self) -> None:
        headers, base, big = table3.make_cells(self.MEASUREMENTS)
        assert headers[:10] == ["row", "N", "d_model", "d_ff", "h", "d_k", "d_v", "P_drop", "eps_ls", "steps"]
        assert headers[10:] == ["PPL paper", "PPL", "BLEU paper", "BLEU", "params*10^6 paper", "params*10^6"]
        assert base[:10] == ["base", "6", "512", "2048", "8", "64", "64", "0.1", "0.1", "1,000"]
        assert base[10:] == ["4.92", "5.00", "25.8", "25.0", "65", "63.0"]
        assert big[0] == "big"
        assert big[-6:] == ["4.33", "4.44", "26.4", "26.1", "213", "214.0"]

    def test_a_test_set_has_columns_of_its_own(self) -> None:
        tested = table3.Measurement("base", self.COLUMNS["base"], 1, 1, 2.0, 3.0, test_perplexity=4.0, test_bleu=5.0)
        headers, base, big = table3.make_cells([self.MEASUREMENTS[0], tested])
        assert headers[-2:] == ["test PPL", "test BLEU"]
        assert (base[-2:], big[-2:]) == (["4.00", "5.0"], ["", ""])

    def test_text_is_aligned_and_markdown_says_the_same(self) -> None:
        cells = table3.make_cells(self.MEASUREMENTS)
        lines = table3.format_text(cells).splitlines()
        assert [re.split(r"\s{2,}", line) for line in lines] == cells
        assert len({len(line) for line in lines}) == 1
        headers, ruler, *rows = [line.strip("| ").split(" | ") for line in table3.format_markdown(cells).splitlines()]
        assert len(ruler) == len(headers)
        assert [[re.sub(r"\\(.)", r"\1", cell) for cell in row] for row in (headers, *rows)] == cells

    def test_the_search_is_named_with_its_length_penalty(self) -> None:
        found = table3.describe_search({"num_beams": 4})
        assert found.startswith("beam 4, length penalty 1 (score / length^penalty, the lib")
        gnmt = table3.describe_search({"num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt"})
        assert gnmt.startswith("beam 4, length penalty 0.6 (score / ((5 + length) / 6)^penalty, the paper's formula")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two rows of one layer, 32 wide, for eight updates."""
    folder = tmp_path_factory.mktemp("data")
    settings: dict[str, Any] = {"rows": ["base", "B-dk16"], "scale": "1/16", "layers_factor": "1/6", "steps": 8}
    settings |= {"warmup_steps": 4, "tokens_per_batch": 128, "tokens_per_device": 64, "save_steps": 2}
    settings |= {"vocab_size": 280, "source_lang": "en", "target_lang": "de", "use_cpu": True, "disable_tqdm": True}
    settings["training_overrides"] = "report_to=none,logging_steps=1,eval_steps=8,generation_max_length=12"
    counts = {"train": 30, "validation": 5, "test": 3}
    return settings | {f"{name}_file": write_pairs(folder, name, count) for name, count in counts.items()}


def train_here(job: Any, lock: int) -> None:
    """Calls the training that the script starts, without the seconds that imports take in a new process."""
    python, program, *words = job.command
    assert (python, Path(program)) == (sys.executable, Path(script.__file__).with_name("train.py"))
    try:
        train.main(words)
    except SystemExit as end:
        raise KeyboardInterrupt from end  # the terminal sends Ctrl-C to both processes


class Finished(NamedTuple):
    folder: Path
    output_of_first_start: str
    output_of_second_start: str


@pytest.fixture(scope="module")
def finished(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that was stopped in its first row and started again."""
    folder = tmp_path_factory.mktemp("table3") / "out"
    words = command_line(settings, output_dir=folder)
    update = TranslationTrainer.training_step

    def stop_after_three(self: TranslationTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        return update(self, *args, **kwargs)

    first, second = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "train", train_here)
        patch.setattr(records, "plot_learning_curves", lambda *_, **__: None)
        with patch.context() as stopping:
            stopping.setattr(TranslationTrainer, "training_step", stop_after_three)
            with contextlib.redirect_stderr(first), pytest.raises(SystemExit) as end:
                script.main(words)
        assert end.value.code == 130, first.getvalue()
        assert not (folder / "base" / "result.json").exists()
        with contextlib.redirect_stdout(second):
            script.main(words)
    return Finished(folder, first.getvalue(), second.getvalue())


class TestScript:
    def test_ctrl_c_says_how_to_go_on(self, finished: Finished) -> None:
        message = finished.output_of_first_start
        message = message[message.rindex("Stopped.") :]
        assert "the same command goes on from there" in message
        assert "python scripts/table3.py --rows base B-dk16 --scale 1/16" in message
        assert f"--output_dir {finished.folder}" in message

    def test_the_second_start_went_on_from_the_last_checkpoint(self, finished: Finished) -> None:
        assert f"Resuming from {finished.folder}/base/checkpoint-2\n" in finished.output_of_second_start
        assert finished.output_of_second_start.count("Resuming from") == 1
        state = json.loads((finished.folder / "base" / "trainer_state.json").read_text())
        assert state["global_step"] == 8
        assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == list(range(1, 9))

    def test_the_figures_are_those_of_the_saved_models(self, finished: Finished, settings: dict[str, Any]) -> None:
        folder = finished.folder
        table = json.loads((folder / "table3.json").read_text())
        assert [row["measurement"]["row"] for row in table["rows"]] == ["base", "B-dk16"]
        for row in table["rows"]:
            measured = row["measurement"]
            model = VanillaTransformerForConditionalGeneration.from_pretrained(folder / measured["row"])
            tokenizer = AutoTokenizer.from_pretrained(folder / measured["row"])
            assert measured["parameters"] == count_by_hand(model.config)
            assert measured["config"]["d_model"] == 32
            for split, prefix in (("validation", ""), ("test", "test_")):
                sources, references = (Path(file).read_text().splitlines() for file in settings[f"{split}_file"])
                loss = score_loss(model, tokenizer, sources, references, batch_size=1, progress=False)
                assert measured[f"{prefix}perplexity"] == pytest.approx(loss["perplexity"], rel=1e-4)
                hypotheses = (folder / measured["row"] / f"{split}.txt").read_text().splitlines()
                assert measured[f"{prefix}bleu"] == pytest.approx(score_translations(hypotheses, references)["bleu"])
        assert table["rows"][1]["measurement"]["config"]["d_k"] == 1
        assert table["rows"][1]["paper"] == {"perplexity": 5.16, "bleu": 25.1, "parameters": 58}
        assert table["settings"]["steps"] == 8
        text = (folder / "table3.md").read_text()
        for words in ("\n| base | 1 | 32 | 128 | 8 | 4 | 4 | 0.1 | 0.1 | 8 | 4.92 | ", "beam 4", "no averaging"):
            assert words in text

    def test_rows_are_trained_by_the_recipe_with_one_tokenizer(self, finished: Finished) -> None:
        folder = finished.folder
        files = [folder / name / "tokenizer.json" for name in ("tokenizer", "base", "B-dk16")]
        assert len({file.read_bytes() for file in files}) == 1
        assert not list(folder.rglob("*.partial"))
        training = json.loads((folder / "B-dk16" / "arguments.json").read_text())["training"]
        expected = {"max_steps": 8, "warmup_steps": 4, "adam_beta2": 0.98, "max_grad_norm": 0, "average_checkpoints": 0}
        assert {name: training[name] for name in expected} == expected
        assert training["gradient_accumulation_steps"] * training["max_source_tokens"] == 128
        state = json.loads((folder / "B-dk16" / "trainer_state.json").read_text())
        rates = [entry["learning_rate"] for entry in state["log_history"] if "loss" in entry]
        expected_rates = [(32 * 4) ** -0.5 * min(step / 4, (4 / max(step, 1)) ** 0.5) for step in range(8)]
        assert rates == pytest.approx(expected_rates)

    def test_finished_rows_are_not_trained_again(
        self, finished: Finished, settings: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        results = [finished.folder / row / "result.json" for row in ("base", "B-dk16")]
        times = [path.stat().st_mtime_ns for path in results]
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
        script.main(command_line(settings, output_dir=finished.folder))
        assert [path.stat().st_mtime_ns for path in results] == times
        output = capsys.readouterr().out
        assert "base is finished" in output
        assert re.search(r"^B-dk16 +1 +32 +128 +8 +1 ", output, re.M)

    def test_other_settings_are_refused_with_what_differs(self, finished: Finished, refuse: Any, settings: Any) -> None:
        message = refuse(command_line(settings, output_dir=finished.folder, steps=9, rows="E-learned"))
        assert "steps: 8 there, 9 now" in message
        assert "rows:" not in message

    @pytest.fixture
    def refuse(self, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
        def run(words: list[str]) -> str:
            with pytest.raises(SystemExit) as end:
                script.main(words)
            assert end.value.code == 2
            return capsys.readouterr().err

        return run

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"rows": ["base", "tiny", "F-1"]}, "rows: tiny, F-1 not among the rows of Table 3, which are base, A-h1"),
            ({"rows": ["base", "base"]}, "rows: base base names a row twice"),
            ({"scale": "1/3"}, "d_model = 512 * 1/3 = 170.667 is not a whole number"),
            ({"steps": 0}, "steps=0: must be at least 1"),
            ({"learning_rate_factor": 0}, "learning_rate_factor=0.0: must be positive"),
            ({"tokens_per_batch": 0}, "tokens_per_batch=0: must be at least 1"),
            ({"training_overrides": "bf17=true"}, "training_overrides: bf17 not among the arguments"),
            ({"streaming": True}, "streaming: the rows"),
        ],
    )
    def test_wrong_arguments_are_refused_before_anything_is_written(
        self, changes: Any, message: str, refuse: Any, settings: Any, tmp_path: Path
    ) -> None:
        assert message in refuse(command_line(settings, output_dir=tmp_path / "new", **changes))
        assert not (tmp_path / "new").exists()

    def test_a_strange_folder_or_no_validation_is_refused(self, refuse: Any, settings: Any, tmp_path: Path) -> None:
        rest = {name: value for name, value in settings.items() if name != "validation_file"}
        assert "validation_file is missing" in refuse(command_line(rest, output_dir=tmp_path))
        (tmp_path / "thesis.tex").write_text("precious")
        assert "is not empty and has no settings.json" in refuse(command_line(settings, output_dir=tmp_path))
        assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_dry_run_shows_configurations_and_commands_and_writes_nothing(
        self, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changes = {"rows": ["base", "big"], "num_processes": 2, "learning_rate_factor": 0.5, "dry_run": True}
        script.main(command_line(settings, output_dir=tmp_path / "new", **changes))
        assert not (tmp_path / "new").exists()
        _, base, big, _, base_command, _, big_command, *_ = capsys.readouterr().out.splitlines()
        expected = count_by_hand(scale_config("base", "1/16", "1/6", vocab_size=280))
        assert base.split() == ["base", "1", "32", "128", "8", "4", "4", "0.1", "0.1", "8", f"{expected:,}"]
        assert big.split()[9] == "24"
        assert "torch.distributed.run --standalone --nproc_per_node=2" in base_command
        assert "--config_overrides d_model=32,encoder_ffn_dim=128" in base_command
        # Two processes with 64 tokens each come to 128 in one pass.
        assert "--max_source_tokens 64 --max_target_tokens 64 --gradient_accumulation_steps 1" in base_command
        assert f"--learning_rate {0.5 * (64 * 4) ** -0.5}" in big_command

    def test_a_failing_training_ends_the_run_with_its_command(
        self, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = tmp_path / "train.py"
        broken.write_text("raise SystemExit(3)")
        monkeypatch.setattr(script, "TRAIN_SCRIPT", broken)
        with pytest.raises(SystemExit) as end:
            script.main(command_line(settings, output_dir=tmp_path / "out"))
        assert re.search(r"--preset base .*\nended with status 3; .*the same command goes on", str(end.value.code))
        assert not (tmp_path / "out" / "table3.md").exists()

    def test_a_training_does_not_outlive_the_script(
        self, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sign, endless = tmp_path / "pid", tmp_path / "train.py"
        write = f"open({str(sign)!r}, 'w').write(str(os.getpid()) + ' ')"
        endless.write_text(f"import os, time\n{write}\ntime.sleep(600)\n")
        monkeypatch.setattr(script, "TRAIN_SCRIPT", endless)

        def interrupt_this_process_alone() -> None:
            while not (sign.exists() and sign.read_text().endswith(" ")):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt_this_process_alone)
        thread.start()
        with pytest.raises(SystemExit) as end:
            script.main(command_line(settings, output_dir=tmp_path / "out"))
        thread.join()
        assert end.value.code == 130
        with pytest.raises(ProcessLookupError):
            os.kill(int(sign.read_text()), 0)
        with (tmp_path / "out" / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_a_training_that_outlives_a_killed_script_keeps_the_folder(
        self, finished: Finished, settings: dict[str, Any], tmp_path: Path, refuse: Callable[..., str]
    ) -> None:
        recorded = json.loads((finished.folder / "settings.json").read_text())
        with script.claim(tmp_path / "out", recorded) as lock:
            orphan = subprocess.Popen(["sleep", "600"], pass_fds=[lock])
        try:
            assert "is in use" in refuse(command_line(settings, output_dir=tmp_path / "out"))
        finally:
            orphan.kill()
            orphan.wait()
