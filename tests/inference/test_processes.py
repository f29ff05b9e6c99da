"""`translate` and `evaluate` by many processes, any of which may be killed, and what they say to each other."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import check_processes
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from many_processes import Launcher, launcher
from tiny_translations import expected_translation, random_sentences, save_model, write_sources

from vanilla_transformer.inference.parts import Work
from vanilla_transformer.inference.processes import Processes


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with launcher(tmp_path_factory.mktemp("logs"), module="translating_programs") as instance:
        yield instance


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def translate(tmp_path: Path, model_folder: str) -> list[str]:
    """The command line of a translation of source.txt to out/output.txt."""
    source, output = write_sources(tmp_path / "source.txt"), tmp_path / "out" / "output.txt"
    options = ["--device=cpu", "--disable_tqdm", "--window_size=4"]
    return [f"--model_name_or_path={model_folder}", f"--input_file={source}", f"--output_file={output}", *options]


def check_output(folder: Path) -> None:
    found = (folder / "out" / "output.txt").read_text(encoding="utf-8")
    assert found == expected_translation(folder / "source.txt")
    assert {path.name for path in (folder / "out").iterdir()} <= {"output.txt", ".output.txt.partial.lock"}


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_translate_as_one(group: Launcher, translate: list[str], tmp_path: Path, processes: int) -> None:
    group.run("run", {"command": "translate", "arguments": translate}, processes=processes)
    check_output(tmp_path)
    said = group.run("run", {"command": "translate", "arguments": translate}, processes=processes, ends=(1,))
    assert said.count("translate: error: ") == 1, "one of them says why, and all end"


@pytest.mark.parametrize(("rank", "event"), [(0, 3), (0, 9), (0, 25), (1, 2), (1, 4), (1, 7)])
def test_a_killed_process_costs_its_part(
    group: Launcher, translate: list[str], tmp_path: Path, rank: int, event: int
) -> None:
    kill = (rank, event, str(tmp_path / "out"))
    group.run("run", {"command": "translate", "arguments": translate, "kill": kill}, ends=(0, 1))
    others = 3 if event % 2 else 1
    if not (tmp_path / "out" / "output.txt").exists():
        group.run("run", {"command": "translate", "arguments": translate}, processes=others)
    check_output(tmp_path)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("backtranslate", ["--method=sampling", "--top_k=9", "--max_length_ratio=99", "--tag=<BT>"]),
        ("backtranslate", ["--method=noised", "--max_length_ratio=99"]),
        ("distill", ["--num_beams=3", "--n_best=3", "--max_new_tokens=5"]),
    ],
)
def test_processes_make_the_pairs_of_one(
    group: Launcher, translate: list[str], tmp_path: Path, command: str, options: list[str]
) -> None:
    references = random_sentences(23, seed=5)
    (tmp_path / "references.txt").write_text("".join(f"{line}\n" for line in references))
    options += [f"--reference_file={tmp_path}/references.txt"] if command == "distill" else []
    words = [word for word in translate if not word.startswith("--output_file")] + options

    def run(name: str, processes: int, **more: Any) -> Path:
        path = tmp_path / name / "pairs.tsv"
        arguments = [*words, f"--output_file={path}"]
        group.run("run", {"command": command, "arguments": arguments, **more}, processes=processes, ends=(0, 1))
        return path

    alone = run("alone", 1).read_text(encoding="utf-8")
    assert len(alone.splitlines()) > 15
    killed = run("killed", 3, kill=(1, 7, str(tmp_path / "killed")))
    if not killed.exists():
        run("killed", 2)
    assert killed.read_text(encoding="utf-8") == alone


def test_a_folder_of_parquet_by_many(group: Launcher, translate: list[str], tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    sentences = random_sentences(30)
    for number in range(3):
        table = pa.table({"id": list(range(10)), "en": sentences[number::3]})
        pq.write_table(table, tmp_path / "corpus" / f"{number}.parquet", row_group_size=3)
    names = [f"--input_file={tmp_path}/corpus", f"--output_file={tmp_path}/de/", "--source_column=en"]
    arguments = [word for word in translate if "_file=" not in word] + names
    group.run("run", {"command": "translate", "arguments": arguments})
    (tmp_path / "plain.txt").write_text("".join(f"{line}\n" for line in sentences))
    expected = expected_translation(tmp_path / "plain.txt").splitlines()
    for number in range(3):
        rows = pq.read_table(tmp_path / "de" / f"{number}.parquet").to_pylist()
        assert [row["id"] for row in rows] == list(range(10))
        assert [row["en"] for row in rows] == sentences[number::3]
        assert [row["translation"] for row in rows] == expected[number::3]


@pytest.mark.parametrize("processes", [2, 7])
def test_processes_evaluate_as_one(group: Launcher, model_folder: str, tmp_path: Path, processes: int) -> None:
    pairs = [str(tmp_path / name) for name in ("a.en", "a.de")]
    for seed, path in enumerate(pairs):
        Path(path).write_text("".join(f"{line}\n" for line in random_sentences(5, seed=seed)))
    reports = {}
    for count in (1, processes):
        output = tmp_path / f"out-{count}"
        arguments = ["--model_name_or_path", model_folder, "--device=cpu", "--output_dir", str(output), "--test_file"]
        said = group.run("run", {"command": "evaluate", "arguments": [*arguments, *pairs]}, processes=count)
        assert said.count("perplexity") == 1
        reports[count] = json.loads((output / "metrics.json").read_text())
    one, many = reports[1], reports[processes]
    assert (one["processes"], many["processes"]) == (1, processes)
    for name in ("bleu", "chrf", "ter", "tokens", "sentences", "output_tokens", "bleu_signature"):
        assert one[name] == many[name]
    assert many["loss"] == pytest.approx(one["loss"], abs=1e-6)
    for name in ("sources.txt", "hypotheses.txt", "references.txt"):
        assert len({(tmp_path / f"out-{count}" / name).read_bytes() for count in reports}) == 1


def test_one_process_without_the_folder_ends_all(group: Launcher, translate: list[str], tmp_path: Path) -> None:
    """As on machines that share none: a rank has another folder of this name."""
    options = {"command": "translate", "arguments": translate, "elsewhere": 1}
    said = group.run("run", options, processes=3, ends=(1,))
    assert said.count("translate: error: ") == 1
    assert "Process 1 on" in said
    assert "--parts_dir" in said
    assert not (tmp_path / "out" / "output.txt").exists()


def test_a_launcher_is_known_by_what_it_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Processes.from_environment() == Processes(0, 1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="RANK is missing: start the processes with torchrun"):
        Processes.from_environment()
    monkeypatch.setenv("RANK", "2")
    assert Processes.from_environment() == Processes(2, 3)
    shares = [Processes(rank, 3).share(10) for rank in range(3)]
    assert [number for share in shares for number in share] == list(range(10))


def test_another_model_or_folder_is_found_out(tmp_path: Path) -> None:
    work = Work(tmp_path, settings={"input": "i", "model": "m", "options": {}})
    work.check({"model": "m", "options": {}}, Processes(1, 2))
    with pytest.raises(ValueError, match=r"Process 1 on .* has another model than the first process"):
        work.check({"model": "n", "options": {}}, Processes(1, 2))
    with pytest.raises(FileNotFoundError, match=r"Process 1 on .* does not see .*--parts_dir"):
        Work(tmp_path / "elsewhere").check({}, Processes(1, 2))


def test_kills_under_torchrun(model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script that does it many times, with few."""
    source = tmp_path / "source.txt"
    source.write_text("".join(f"{line}\n" for line in random_sentences(200)))
    words = [f"--model_name_or_path={model_folder}", f"--input_file={source}", f"--output_dir={tmp_path / 'out'}"]
    check_processes.main([*words, "--num_kills=1", "--seed=1", "--num_processes=2", "--window_size=20"])
    assert "with 1 kills" in capsys.readouterr().out
