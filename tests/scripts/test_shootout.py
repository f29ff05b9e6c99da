"""benchmarks/shootout.py without the other systems: their settings, their logs, what is measured, and the table."""

import gzip
import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.commands import train
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.training.setup import build_config

script: Any = importlib.import_module("shootout")
systems: Any = importlib.import_module("shootout_systems")
marian: Any = importlib.import_module("shootout_marian")

SOURCES, TARGETS = ["a pul@@ ley", "two men", "a man is here"], ["ei@@ ne rol@@ le", "zwei", "ein mann ist hier"]
SETTINGS = systems.Settings(
    updates=4,
    batch_tokens=20,
    pairs_per_batch=2,
    unsorted_batch_tokens=30,
    warmup_steps=2,
    learning_rate=0.005,
    logging_steps=1,
)
CONDITIONS = {"updates": 4, "threads": 1}


def count_parameters(model: Any) -> int:
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    for part in ("train", "valid", "test.2016"):
        (folder / f"{part}.en").write_text("\n".join(SOURCES) + "\n", encoding="utf-8")
        with gzip.open(folder / f"{part}.de.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(TARGETS) + "\n")
    return folder


@pytest.fixture
def one(tmp_path: Path) -> Any:
    """A run whose folder is there, on prepared data."""
    script.prepare_data(write_corpus(tmp_path / "corpus"), ("en", "de"), tmp_path / "data")
    folder = tmp_path / "run"
    folder.mkdir()
    return systems.Run(tmp_path / "data", folder, Path(sys.executable), SETTINGS, seed=3)


class TestData:
    def test_it_becomes_plain_files_and_one_vocabulary(self, one: Any) -> None:
        assert script.read_lines(one.data / "test.tgt") == TARGETS
        pieces = script.read_lines(one.data / "vocabulary.txt")
        assert pieces[0] == "a", "the most frequent"
        assert sorted(pieces) == sorted({piece for line in SOURCES + TARGETS for piece in line.split()})

    @pytest.mark.parametrize(("surplus", "message"), [(None, "it has none"), ("test.2017.en", r"test\.2016\.en, test")])
    def test_a_part_must_have_one_file(self, tmp_path: Path, surplus: str | None, message: str) -> None:
        folder = write_corpus(tmp_path / "corpus")
        if surplus is None:
            (folder / "test.2016.en").unlink()
        else:
            (folder / surplus).write_text("a\n", encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            script.prepare_data(folder, ("en", "de"), tmp_path / "data")

    def test_files_must_be_aligned(self, tmp_path: Path) -> None:
        folder = write_corpus(tmp_path / "corpus")
        (folder / "valid.en").write_text("a\n", encoding="utf-8")
        with pytest.raises(ValueError, match="valid files have 1 and 3 lines"):
            script.prepare_data(folder, ("en", "de"), tmp_path / "data")

    def test_pairs_of_a_batch(self, one: Any) -> None:
        lengths = script.measure_lengths(one.data)
        assert lengths == [[4, 3, 5], [5, 2, 5]]
        assert script.count_pairs_per_batch(lengths, 1000) == 3
        assert script.count_pairs_per_batch(lengths, 5) == 1
        assert script.count_unsorted_tokens(lengths, 3) == 3 * 5
        assert script.count_unsorted_tokens(lengths, 1) == round((5 + 3 + 5) / 3)

    def test_other_files_are_other_data(self, one: Any) -> None:
        before = script.describe_data(one.data)
        assert script.describe_data(one.data) == before
        (one.data / "test.tgt").write_text("ein\n", encoding="utf-8")
        assert script.describe_data(one.data) != before


class TestShape:
    def test_marian_and_ours_have_as_many_parameters(self, one: Any) -> None:
        systems.Ours().prepare(one)
        _, arguments, _, training = train.parse(train.make_parser(), [one.file("train.yaml")])
        tokenizer = train_tokenizer(SOURCES + TARGETS, model_type="wordlevel", vocab_size=arguments.vocab_size)
        config: Any = build_config(arguments, tokenizer)
        vocabulary = marian.read_vocabulary(str(one.data / "vocabulary.txt"))
        assert len(vocabulary) == len(tokenizer) == arguments.vocab_size

        other = marian.make_model(systems.SHAPE, len(vocabulary))
        assert count_parameters(other) == count_parameters(VanillaTransformerForConditionalGeneration(config))
        assert other.config.dropout == config.dropout == 0.3
        assert other.get_input_embeddings().weight is other.get_output_embeddings().weight
        assert config.label_smoothing == systems.SMOOTHING
        assert (training.max_steps, training.seed, training.learning_rate) == (4, 3, 0.005)
        assert training.max_source_tokens == training.max_target_tokens == 20

    def test_joeynmt(self, one: Any) -> None:
        systems.JoeyNMT().prepare(one)
        settings = yaml.safe_load(Path(one.file("train.yaml")).read_text(encoding="utf-8"))
        for stack in (settings["model"][side] for side in ("encoder", "decoder")):
            sizes = ("num_layers", "hidden_size", "ff_size", "num_heads")
            assert [stack[name] for name in sizes] == [4, 128, 256, 4]
            assert stack["embeddings"]["embedding_dim"] == 128
        training = settings["training"]
        assert (training["updates"], training["batch_size"], settings["random_seed"]) == (4, 30, 3)
        assert training["learning_rate"] == 0.005
        # Else it refuses to begin, or validates.
        assert training["validation_freq"] % training["logging_freq"] == 0
        assert training["validation_freq"] > training["updates"]

    def test_opennmt_py(self, one: Any) -> None:
        systems.OpenNMTPy().prepare(one)
        settings = yaml.safe_load(Path(one.file("train.yaml")).read_text(encoding="utf-8"))
        names = ("layers", "hidden_size", "word_vec_size", "transformer_ff", "heads", "seed", "train_steps")
        assert [settings[name] for name in names] == [4, 128, 128, 256, 4, 3, 4]
        assert settings["bucket_size"] == len(SOURCES)
        # The schedule's own formula, at the end of the warm-up.
        peak = settings["learning_rate"] * settings["hidden_size"] ** -0.5 * settings["warmup_steps"] ** -0.5
        assert peak == pytest.approx(0.005)

    @pytest.mark.parametrize("name", systems.SYSTEMS)
    def test_every_system_has_commands(self, name: str, one: Any) -> None:
        system = systems.SYSTEMS[name]
        system.prepare(one)
        test = one.data / "test.src"
        for command in (system.train(one), system.translate(one, test, one.folder / "out")):
            assert command.words[0] == sys.executable
        given = [str(command.stdin), str(command.stdout), *command.words]
        assert {str(test), str(one.folder / "out")} <= {*given}
        assert any(word.startswith("torch==") for words in system.list_requirements() for word in words)


# Lines as the systems print them.
LOGS = {
    "joeynmt": (
        "2026-01-01 10:00:00,000 - INFO - joeynmt.model - Total params: 2000\n"
        "2026-01-01 10:00:01,000 - INFO - joeynmt.training - Epoch   1, Step:        2, Batch Loss:     6.1, ...\n"
        "2026-01-01 10:00:02,000 - INFO - joeynmt.training - Epoch   1, Step:     1234, Batch Loss:     5.1, ...\n"
    ),
    "opennmt_py": (
        "[2026-01-01 10:00:00,000 INFO]  * number of parameters: 2000\n"
        "[2026-01-01 10:00:01,000 INFO] Step  2/ 2000; acc: 5.2; ppl: 8.1; xent: 9.0; lr: 0.00012; sents:     120; "
        "bsz:  900/ 950/60; 1311/1402 tok/s;      1 sec;\n"
        "[2026-01-01 10:00:02,000 INFO] Step 1234/ 2000; acc: 5.2; ppl: 8.1; xent: 9.0; lr: 0.00012; sents:     120; "
        "bsz: 1000/1050/60; 1311/1402 tok/s;      1 sec;\n"
    ),
    "marian": "update 2 of 2000\nwarnings about update 5 of 7\nupdate 1234 of 2000\n",
    "ours": "step 2 of 2,000: loss 8.9\nno step 7 of 9\nstep 1,234 of 2,000: loss 5.0, 1,234 target tokens/s\n",
}


def run_text(text: str, name: str, log: Path) -> Any:
    """Runs a process that prints the text, as if the system did."""
    command = systems.Command([sys.executable, "-c", f"print({text!r}, end='')"])
    return script.run(command, systems.SYSTEMS[name], log, threads=1)


@pytest.mark.parametrize("name", LOGS)
def test_updates_are_found_in_each_log(name: str, tmp_path: Path) -> None:
    ticks = run_text(LOGS[name], name, tmp_path / "log")
    assert [tick.update for tick in ticks] == [2, 1234]
    assert ticks[0].seconds <= ticks[1].seconds
    assert (tmp_path / "log").read_text(encoding="utf-8") == LOGS[name]


def test_a_process_that_fails_says_so(tmp_path: Path) -> None:
    command = systems.Command([sys.executable, "-c", "print('what happened'); raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match=r"(?s)JoeyNMT failed with status 3.*what happened"):
        script.run(command, systems.SYSTEMS["joeynmt"], tmp_path / "log", threads=1)


def test_memory_of_all_processes_is_counted(tmp_path: Path) -> None:
    child = "data = bytearray(200 * 2**20); import time; time.sleep(1)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print('update 1 of 1')"
    (tick,) = script.run(systems.Command([sys.executable, "-c", parent]), systems.Marian(), tmp_path / "log", threads=1)
    assert 200 < tick.megabytes < 400


def test_input_and_output_may_be_files(tmp_path: Path) -> None:
    source, output, log = (tmp_path / name for name in ("source", "output", "log"))
    source.write_text("two men\n", encoding="utf-8")
    code = "import sys; print(sys.stdin.read().upper(), end=''); print('loading', file=sys.stderr)"
    command = systems.Command([sys.executable, "-c", code], stdin=source, stdout=output)
    assert script.run(command, systems.SYSTEMS["joeynmt"], log, threads=1) == []
    assert output.read_text(encoding="utf-8") == "TWO MEN\n"
    assert log.read_text(encoding="utf-8") == "loading\n"


def test_a_process_that_is_not_waited_for_is_ended() -> None:
    command = systems.Command([sys.executable, "-c", "import time; print('on', flush=True); time.sleep(60)"])
    start = time.perf_counter()
    with script.started(command, {}) as (process, printed):
        assert printed.readline() == "on\n"
    assert process.poll() is not None
    assert time.perf_counter() - start < 30


def test_speed_is_taken_between_the_first_and_the_last_line() -> None:
    ticks = [script.Tick(10, 100.0, 1.0), script.Tick(20, 101.0, 1.0), script.Tick(50, 110.0, 1.0)]
    assert script.measure_speed(ticks) == 4.0
    with pytest.raises(ValueError, match="names 1 updates"):
        script.measure_speed(ticks[:1])


class TestCounts:
    def test_opennmt_py(self, one: Any) -> None:
        counts = systems.OpenNMTPy().count(one, LOGS["opennmt_py"])
        assert counts == systems.Counts(2 * 950 + 1232 * 1050, 2000)

    def test_ours(self, one: Any) -> None:
        Path(one.file("model")).mkdir()
        metrics = {"tokens_seen": {"source": 1, "target": 50}, "parameters": 2000}
        Path(one.file("model/metrics.json")).write_text(json.dumps(metrics), encoding="utf-8")
        assert systems.Ours().count(one, "") == systems.Counts(50, 2000)

    def test_joeynmt(self, one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[list[str]] = []

        def answer(words: list[str], **_: Any) -> Any:
            asked.append(words)
            return SimpleNamespace(stdout="50\n")

        monkeypatch.setattr(systems.subprocess, "run", answer)
        assert systems.JoeyNMT().count(one, LOGS["joeynmt"]) == systems.Counts(50, 2000)
        assert (asked[0][0], asked[0][-1]) == (sys.executable, one.file("model/latest.ckpt"))

    def test_a_log_without_numbers(self, one: Any) -> None:
        with pytest.raises(ValueError, match="no sizes of batches"):
            systems.OpenNMTPy().count(one, "")


def test_bleu_is_of_words(one: Any) -> None:
    assert script.score(one.data, TARGETS) == pytest.approx(100)
    assert script.score(one.data, ["ei@@ ne rol@@ le", "zwei", "ein mann ist da"]) < 99
    joined = [line.replace("@@ ", "") for line in TARGETS]
    assert script.score(one.data, joined) == pytest.approx(100)
    with pytest.raises(ValueError, match="1 translations of 3 sentences"):
        script.score(one.data, ["zwei"])


def make_result(system: str, seed: int, **changes: Any) -> dict[str, Any]:
    figures = {name: 1000.0 for _, name, _ in script.COLUMNS}
    described = {"processor": "a processor", "versions": {"torch": "2"}, "conditions": CONDITIONS}
    return {"system": system, "seed": seed, **described, **figures, **changes}


def test_the_table_has_means_and_deviations() -> None:
    table = script.make_table(
        [make_result("ours", 1, bleu=40.0), make_result("marian", 1, bleu=39.0), make_result("ours", 2, bleu=41.0)]
    )
    head, _, ours, other, *rest = table.splitlines()
    assert head.startswith("| system | BLEU | updates/s | target tokens/s |")
    assert ours.startswith("| vanilla_transformer | 40.50 ± 0.71 | 1000.00 | 1,000 |")
    assert other.startswith("| MarianMT, Seq2SeqTrainer | 39.00 | 1000.00 |")
    assert "a processor; updates 4, threads 1." in "\n".join(rest)
    assert rest[-2:] == ["- vanilla_transformer: torch 2; seeds 1, 2", "- MarianMT, Seq2SeqTrainer: torch 2; seeds 1"]


class TestMain:
    @pytest.fixture
    def words(self, tmp_path: Path) -> list[str]:
        folder = write_corpus(tmp_path / "corpus")
        options = {"data_folder": folder, "output_dir": tmp_path / "out", "environments": tmp_path / "environments"}
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*given, "--updates", "4", "--threads", "1", "--seeds", "1", "2", "--systems", "ours", "marian"]

    @pytest.fixture
    def trained(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The trainings, none of which takes place."""
        done: list[str] = []

        def train(system: Any, one: Any, threads: int) -> dict[str, float]:
            done.append(one.folder.name)
            return {name: 1.0 for _, name, _ in script.COLUMNS}

        monkeypatch.setattr(script, "make_environment", lambda folder, system: folder / "bin" / "python")
        monkeypatch.setattr(script, "find_versions", lambda python, system: {"torch": "2"})
        monkeypatch.setattr(script, "train_and_measure", train)
        return done

    def test_systems_take_turns_and_nothing_is_done_twice(
        self, words: list[str], trained: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script.main(words)
        assert trained == ["ours-1", "marian-1", "ours-2", "marian-2"]
        table = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
        assert capsys.readouterr().out.endswith(table)
        (tmp_path / "out" / "ours-2.json").unlink()
        script.main(words)
        assert trained[4:] == ["ours-2"]
        assert (tmp_path / "out" / "table.md").read_text(encoding="utf-8") == table

    def test_results_of_other_settings_are_refused(self, words: list[str], trained: list[str]) -> None:
        script.main(words)
        with pytest.raises(SystemExit, match=r"'updates': 4.*not with.*'updates': 8.*another --output_dir"):
            script.main([*words, "--updates", "8"])

    def test_wrong_arguments_are_explained(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        for wrong, message in (
            (["--updates", "1"], "--updates is 1"),
            (["--threads", "0"], "--threads is 0"),
            (["--learning_rate", "0"], "must be positive"),
            (["--source_lang", "cs"], "must have one file"),
        ):
            with pytest.raises(SystemExit):
                script.main([*words, *wrong])
            assert message in capsys.readouterr().err


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def create(folder: Path, **_: Any) -> None:
        folder.mkdir()
        made.append(folder)

    monkeypatch.setattr(script.venv, "create", create)
    monkeypatch.setattr(script.subprocess, "run", lambda words, **_: made.append(words[4:]))
    system = systems.SYSTEMS["opennmt_py"]
    python = script.make_environment(tmp_path / "one", system)
    assert python == tmp_path / "one" / "bin" / "python"
    assert made[0] == tmp_path / "one"
    assert made[-1] == ["--quiet", "--no-deps", "OpenNMT-py==3.5.1"]
    script.make_environment(tmp_path / "one", system)
    assert len(made) == 3, "nothing was made again"
