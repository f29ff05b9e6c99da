"""`vanilla-transformer evaluate`: what it prints and writes, and what it refuses."""

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import sacrebleu
from tiny_seq2seq import make_model, make_tokenizer, random_pairs

from vanilla_transformer.commands import evaluate as command
from vanilla_transformer.data.numbers_and_dates import numbers_and_dates
from vanilla_transformer.inference.compare import compare_summaries, compare_translations
from vanilla_transformer.inference.evaluate import score_summaries, score_translations
from vanilla_transformer.inference.losses import score_loss
from vanilla_transformer.inference.translate import translate

Run: TypeAlias = Callable[..., str]
MODEL: Any = make_model()
TOKENIZER = make_tokenizer()


def write_lines(path: Path, lines: list[str]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def read_json(folder: str | Path, name: str = "metrics.json") -> Any:
    return json.loads(Path(folder, name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    MODEL.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def evaluate(model_folder: str, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with a model, unless it compares, and returns what it prints."""

    def run(*arguments: str) -> str:
        model = [] if "--compare" in arguments else ["--model_name_or_path", model_folder, "--device", "cpu"]
        capsys.readouterr()
        command.main([*model, "--disable_tqdm", *arguments])
        return capsys.readouterr().out

    return run


@pytest.fixture
def refuse(evaluate: Run, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with arguments that it refuses, and returns what it says."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as refusal:
            evaluate(*arguments)
        assert refusal.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.fixture
def test_files(tmp_path: Path) -> tuple[str, str]:
    sources, targets = random_pairs(9)
    return write_lines(tmp_path / "test.en", sources), write_lines(tmp_path / "test.de", targets)


def test_reports_what_the_library_computes(
    evaluate: Run, refuse: Run, test_files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_dir = tmp_path / "scores"
    arguments = ("--test_file", *test_files, "--num_beams", "2", "--batch_size", "4", "--output_dir", str(output_dir))
    table = evaluate(*arguments, "--max_samples", "8")
    sources, targets = (texts[:8] for texts in random_pairs(9))
    hypotheses = translate(MODEL, TOKENIZER, sources, num_beams=2, progress=False)
    for name, lines in (("hypotheses", hypotheses), ("references", targets), ("sources", sources)):
        assert (output_dir / f"{name}.txt").read_text(encoding="utf-8") == "".join(line + "\n" for line in lines)
    metrics = read_json(output_dir)
    expected = score_translations(hypotheses, targets, ter=True)
    loss = score_loss(MODEL, TOKENIZER, sources, targets, progress=False)
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["loss"] == pytest.approx(loss["loss"])
    assert (metrics["sentences"], metrics["num_beams"], metrics["tokens"]) == (8, 2, loss["tokens"])
    assert metrics["output_tokens"] == sum(len(hypothesis.split()) + 1 for hypothesis in hypotheses)
    assert metrics["generation_config"]["max_new_tokens"] == 8, "the model's own config, where no argument changes it"
    assert metrics["sentences_per_second"] == pytest.approx(8 / metrics["seconds"])
    assert metrics["versions"]["sacrebleu"] == sacrebleu.__version__
    assert f"--test_file {test_files[0]} {test_files[1]} --num_beams 2" in metrics["command"]
    assert metrics["arguments"]["max_samples"] == 8
    for part in (expected["bleu_signature"], f"{loss['loss']:.4f}", f"{expected['chrf']:.2f}", "2 beams"):
        assert part in table
    assert f"{expected['ter']:.2f}  {expected['ter_signature']}" in table

    assert "holds sources.txt, hypotheses.txt, references.txt, metrics.json" in refuse(*arguments)
    assert read_json(output_dir) == metrics
    evaluate(*arguments, "--overwrite")
    assert read_json(output_dir)["sentences"] == 9

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "score_share", interrupt)
    with pytest.raises(SystemExit, match="130"):
        evaluate(*arguments, "--overwrite")
    assert not (output_dir / "metrics.json").exists(), "of the texts before those that are there now"


def test_a_glossary_s_terms_are_in_what_is_scored(
    evaluate: Run, refuse: Run, test_files: tuple[str, str], tmp_path: Path
) -> None:
    terms = {"w3": "w7 w8", "w5": "w9"}
    file = write_lines(tmp_path / "terms.tsv", ["\t".join(term) for term in terms.items()])
    evaluate("--test_file", *test_files, "--num_beams", "3", "--glossary", file, "--output_dir", str(tmp_path / "out"))
    sources, targets = random_pairs(9)
    hypotheses = (tmp_path / "out" / "hypotheses.txt").read_text(encoding="utf-8").splitlines()
    found = [
        target in f"{hypothesis} "
        for source, hypothesis in zip(sources, hypotheses, strict=True)
        for term, target in terms.items()
        if term in source.split()
    ]
    assert found
    assert all(found)
    assert hypotheses == translate(MODEL, TOKENIZER, sources, num_beams=3, glossary=terms, progress=False)
    metrics = read_json(tmp_path / "out")
    assert metrics["bleu"] == score_translations(hypotheses, targets)["bleu"]
    assert metrics["arguments"]["glossary"] == file
    assert "--glossary_case needs --glossary" in refuse("--test_file", *test_files, "--glossary_case")


def test_scores_the_built_in_corpus(evaluate: Run, tmp_path: Path) -> None:
    corpus = ("--builtin_corpus", "--split", "validation", "--max_samples", "3")
    table = evaluate(*corpus, "--no_ter", "--output_dir", str(tmp_path))
    assert "greedy" in table
    assert "TER" not in table
    pairs = numbers_and_dates(split="validation")[:3]
    metrics = read_json(tmp_path)
    assert "ter" not in metrics
    expected = score_loss(MODEL, TOKENIZER, pairs["source"], pairs["target"], progress=False)
    assert metrics["loss"] == pytest.approx(expected["loss"])


def test_the_built_in_corpus_has_the_model_s_languages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = copy.deepcopy(MODEL)
    model.config.langs = ["fr", "en"]
    for part in (model, TOKENIZER):
        part.save_pretrained(tmp_path / "model")
    words = ["--model_name_or_path", tmp_path / "model", "--builtin_corpus", "--max_samples", "2", "--no_ter"]
    command.main([*map(str, words), "--device", "cpu", "--output_dir", str(tmp_path / "scores")])
    expected = numbers_and_dates(source_lang="fr", target_lang="en", split="test")[:2]["source"]
    assert (tmp_path / "scores" / "sources.txt").read_text(encoding="utf-8").splitlines() == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "exactly one of --builtin_corpus, --test_file and --dataset_name; got none"),
        (("--builtin_corpus", "--test_file", "a.tsv"), "got builtin_corpus, test_file"),
        (("--builtin_corpus", "--split", "dev"), "'dev'"),
        (("--builtin_corpus", "--max_samples", "0"), "--max_samples is 0"),
        (("--builtin_corpus", "--overwrite"), "--overwrite needs --output_dir"),
        (("--builtin_corpus", "--compare_seed", "1"), "--compare_seed needs --compare"),
        (("--builtin_corpus", "--dataset_config_name", "a"), "--dataset_config_name needs --dataset_name"),
        (("--builtin_corpus", "--rouge_stemmer"), "--rouge_stemmer: the task translation has no such score"),
        (("--builtin_corpus", "--task", "summarization", "--lowercase"), "--lowercase: the task summarization has no"),
        (("--test_file", "missing.tsv"), "missing.tsv"),
        (("--test_file", "a.tsv", "--bleu_tokenize", "moses"), "tokenize is 'moses'"),
        (("--builtin_corpus", "--model_name_or_path", ""), "or --compare; got neither"),
        (("--builtin_corpus", "--model_name_or_path", "m", "--compare", "a", "b"), "or --compare; got both"),
        (("--builtin_corpus", "--source_lang", "en"), "give both or neither"),
        (("--builtin_corpus", "--num_beams", "0"), "num_beams is 0; it must be at least 1"),
        (("--builtin_corpus", "--device", "foo"), "device is 'foo'"),
        (("--builtin_corpus", "--device", "cuda:99"), "device is 'cuda:99'"),
        (("--builtin_corpus", "--bleu_tokenize", "ko-mecab"), "extra dependencies"),
    ],
    ids=str,
)
def test_refuses_wrong_arguments(refuse: Run, arguments: tuple[str, ...], message: str) -> None:
    assert message in refuse(*arguments)


@pytest.fixture
def systems() -> dict[str, list[str]]:
    """References, and two systems that get each third or each sixth word wrong."""
    words = [text.split() for text in random_pairs(30)[1]]

    def spoil(every: int) -> list[str]:
        lines = (enumerate(line, start=row) for row, line in enumerate(words))
        return [" ".join("x" if place % every == 0 else word for place, word in line) for line in lines]

    return {"references": list(map(" ".join, words)), "third": spoil(3), "sixth": spoil(6)}


def test_of_text_files(evaluate: Run, refuse: Run, systems: dict[str, list[str]], tmp_path: Path) -> None:
    files = {name: write_lines(tmp_path / f"{name}.de", texts) for name, texts in systems.items()}
    compared = ("--compare", files["third"], files["sixth"])
    arguments = (*compared, "--test_file", files["third"], files["references"], "--compare_samples", "200")
    output_dir = tmp_path / "out"
    table = evaluate(*arguments, "--compare_seed", "3", "--output_dir", str(output_dir))
    compared_systems = {files[name]: systems[name] for name in ("third", "sixth")}
    expected = compare_translations(compared_systems, systems["references"], samples=200, seed=3)
    report = read_json(output_dir, "comparison.json")
    assert {name: report[name] for name in expected} == expected
    assert f"--compare {files['third']} {files['sixth']}" in report["command"]
    assert report["arguments"]["compare_seed"] == 3
    assert report["versions"]["sacrebleu"] == sacrebleu.__version__
    header, baseline, other, *notes = table.splitlines()
    assert " ".join(header.split()) == "BLEU (mean ± 95% CI) p chrF (mean ± 95% CI) p"
    first, second = (
        [f"{each['score']:.2f} ({each['mean']:.2f} ± {each['ci']:.2f})" for each in (row["bleu"], row["chrf"])]
        for row in expected["systems"]
    )
    p_values = [f"{expected['systems'][1][name]['p_value']:.4f}*" for name in ("bleu", "chrf")]
    assert baseline.split() == f"baseline: {files['third']} {first[0]} {first[1]}".split()
    assert other.split() == f"{files['sixth']} {second[0]} {p_values[0]} {second[1]} {p_values[1]}".split()
    assert "200 samples, seed 3" in notes[0]
    assert expected["bleu_signature"] in notes[-2]
    assert expected["chrf_signature"] in notes[-1]

    assert "holds comparison.json" in refuse(*arguments, "--output_dir", str(output_dir))
    assert "200 samples, seed 12345" in evaluate(*arguments, "--output_dir", str(output_dir), "--overwrite")

    table = evaluate(*arguments, "--compare_method", "approximate_randomization")
    assert "±" not in table
    assert "Paired approximate randomization over 30 sentences, 200 samples, seed 12345" in table


def test_of_folders(evaluate: Run, refuse: Run, test_files: tuple[str, str], tmp_path: Path) -> None:
    """The language chooses the tokeniser, and a comparison takes that of its folders, where it is one."""
    folders = [str(tmp_path / name) for name in ("zh", "zh-too", "de")]
    for folder, beams in zip(folders, "131", strict=True):
        languages = ("--source_lang", "en", "--target_lang", Path(folder).name[:2])
        evaluate("--test_file", *test_files, *languages, "--num_beams", beams, "--output_dir", folder)
    arguments = ("--compare", *folders[:2], "--output_dir", str(tmp_path / "out"))
    evaluate(*arguments)
    scores = read_json(tmp_path / "out", "comparison.json")
    assert (scores["sentences"], scores["samples"], scores["seed"]) == (9, 1000, 12345)
    assert "|tok:zh|" in scores["bleu_signature"]
    for folder, system in zip(folders[:2], scores["systems"], strict=True):
        assert system["system"] == folder
        assert system["chrf"]["score"] == pytest.approx(read_json(folder)["chrf"])
    assert "scored with tok:13a and tok:zh; choose one with --bleu_tokenize" in refuse("--compare", *folders)
    evaluate(*arguments, "--overwrite", "--lowercase", "--bleu_tokenize", "char")
    assert "|case:lc|eff:no|tok:char|" in read_json(tmp_path / "out", "comparison.json")["bleu_signature"]
    for folder in folders[:2]:
        evaluate("--test_file", *test_files, "--output_dir", folder, "--overwrite", "--lowercase")
    evaluate(*arguments, "--overwrite")
    assert "|case:lc|" in read_json(tmp_path / "out", "comparison.json")["bleu_signature"]
    evaluate("--test_file", *test_files, "--output_dir", folders[2], "--overwrite")
    said = refuse("--compare", folders[0], folders[2])
    assert "BLEU was scored with case:lc and case:mixed; choose one with --lowercase" in said
    evaluate("--compare", folders[0], folders[2], *arguments[3:], "--overwrite", "--lowercase", "false")
    assert "|case:mixed|" in read_json(tmp_path / "out", "comparison.json")["bleu_signature"]
    broken = Path(folders[1], "metrics.json")
    broken.write_text(broken.read_text()[:99])
    assert f"--compare: {broken} is damaged" in refuse(*arguments, "--overwrite")


def test_the_length_of_references_is_checked_before_translating(refuse: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(command, "translate_share", lambda *arguments, **options: pytest.fail("too late"))
    said = refuse("--builtin_corpus", "--max_samples", "2", "--max_target_length", "1")
    assert "The maximum length is 1 tokens; it must be at least 2" in said


@pytest.mark.parametrize("name", ["ja-mecab", "ko-mecab"])
def test_signatures_with_versions_of_tokenizers(name: str) -> None:
    """SacreBLEU adds that of MeCab to its tokeniser's name."""
    arguments = command.EvaluationArguments(compare=["a", "b"])
    signatures = [f"nrefs:1|case:mixed|eff:no|tok:{name}-{version}|smooth:exp" for version in ("0.996-IPA", "1.0-KO")]
    command.settle_scores(arguments, [{"bleu_signature": signature} for signature in signatures])
    assert (arguments.bleu_tokenize, arguments.lowercase) == (name, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("third", "sixth"), "no folder has a references.txt"),
        (("third", "third", "--builtin_corpus"), "third is given twice"),
        (("third", "--test_file", "third", "references"), "at least two"),
        (("third", "missing", "--builtin_corpus"), "No such file or directory: 'missing'"),
        (("third", "empty", "--builtin_corpus"), "empty holds no hypotheses.txt"),
        (("folder", "short"), "short has 29 translations, but there are 30 references"),
        (("folder", "other"), "folder and other were scored on different references"),
        (("folder", "third", "--compare_method", "t-test"), "invalid choice: 't-test'"),
        (("folder", "third", "--bleu_tokenize", "moses"), "tokenize is 'moses'"),
        (("folder", "third", "--max_samples", "3"), "--max_samples needs --test_file"),
        (("folder", "third", "--num_beams", "3"), "--num_beams needs --model_name_or_path"),
        (("folder", "third", "--engine", "onnx", "--device", "cpu"), "--device and --engine need --model_name_or_path"),
        (("folder", "third", "--source_column", "a"), "--source_column needs --test_file"),
        (("folder", "third", "--dataset_split", "a"), "--dataset_split needs --dataset_name or --builtin_corpus"),
    ],
    ids=str,
)
def test_refuses_what_cannot_be_compared(
    refuse: Run, systems: dict[str, Any], arguments: tuple[str, ...], message: str, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, texts in systems.items():
        write_lines(Path(name), texts)
    write_lines(Path("short"), systems["third"][:-1])
    Path("empty").mkdir()
    for folder, references in (("folder", "references"), ("other", "sixth")):
        write_lines(Path(folder, "hypotheses.txt"), systems["third"])
        write_lines(Path(folder, "references.txt"), systems[references])
    assert message in refuse("--compare", *arguments, "--output_dir", "out")
    assert not Path("out").exists()


@pytest.fixture
def documents(tmp_path: Path) -> str:
    """References are what the model writes, its end and the source first, its beginning on a line of its own."""
    sources, _ = random_pairs(9)
    rows = []
    for source, output in zip(sources, translate(MODEL, TOKENIZER, sources, progress=False), strict=True):
        beginning, end = " ".join(output.split()[:2]), " ".join(output.split()[2:])
        rows.append({"text": source, "summary": f"{end} {source}\n{beginning}"})
    return write_lines(tmp_path / "documents.jsonl", [json.dumps(row) for row in rows])


def test_scores_are_those_of_the_texts_that_are_kept(evaluate: Run, documents: str, tmp_path: Path) -> None:
    output_dir = tmp_path / "scores"
    evaluate("--test_file", documents, "--task", "summarization", "--output_dir", str(output_dir))
    metrics = read_json(output_dir)
    rows = [json.loads(line) for line in (output_dir / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["source"] for row in rows] == random_pairs(9)[0]
    hypotheses, references = ([row[name] for row in rows] for name in ("hypothesis", "reference"))
    assert all("\n" in reference for reference in references)
    expected = score_summaries(hypotheses, references)
    assert {name: metrics[name] for name in expected} == expected
    lines = (output_dir / "references.txt").read_text(encoding="utf-8").splitlines()
    assert lines == [reference.replace("\n", " ") for reference in references]
    assert score_summaries(hypotheses, lines)["rougeLsum"] < expected["rougeLsum"], "line breaks count"

    columns = ("--source_column", "text", "--target_column", "summary", "--task", "translation")
    evaluate("--test_file", documents, *columns, "--output_dir", str(output_dir), "--overwrite")
    assert not (output_dir / "texts.jsonl").exists(), "it would be taken for that of this model"


def test_they_are_compared_by_rouge(evaluate: Run, documents: str, tmp_path: Path) -> None:
    sources, _ = random_pairs(9)
    references = [json.loads(line)["summary"] for line in Path(documents).read_text().splitlines()]
    scored, halves = str(tmp_path / "scored"), str(tmp_path / "halves.jsonl")
    evaluate("--test_file", documents, "--task", "summarization", "--output_dir", scored)
    first_lines = [reference.partition("\n")[0] for reference in references]
    write_lines(Path(halves), [json.dumps({"hypothesis": text}) for text in first_lines])
    write_lines(tmp_path / "lead.txt", sources)
    systems = {
        scored: translate(MODEL, TOKENIZER, sources, progress=False),
        halves: first_lines,
        str(tmp_path / "lead.txt"): sources,
    }
    expected = compare_summaries(systems, references, samples=100)
    arguments = ("--compare", *systems, "--compare_samples", "100", "--output_dir", str(tmp_path / "out"))
    table = evaluate(*arguments)
    for more in (("--task", "summarization"), ("--task", "summarization", "--test_file", documents)):
        assert evaluate(*arguments, *more, "--overwrite") == table
    report = read_json(tmp_path / "out", "comparison.json")
    assert {name: report[name] for name in expected} == expected
    headers = [line.split() for line in table.splitlines() if "ROUGE-" in line]
    names = [[word for word in header if "ROUGE" in word] for header in headers]
    assert names == [["ROUGE-1", "ROUGE-2"], ["ROUGE-L", "ROUGE-Lsum"]]
    assert table.count(f"baseline: {scored} ") == table.count(f"\n{halves} ") == 2
    assert f"{expected['systems'][1]['rougeLsum']['score']:.2f} (" in table
    assert "over 9 summaries, 100 samples" in table
    assert table.endswith(f"ROUGE {expected['rouge_signature']}\n")
    options = ("--rouge_stemmer", "--rouge_tokenize", "ascii")
    assert "ROUGE tok:ascii|stem:yes|" in evaluate(*arguments, "--overwrite", *options)
    evaluate("--test_file", documents, "--task", "summarization", *options, "--output_dir", scored, "--overwrite")
    Path(f"{halves}.gz").write_bytes(gzip.compress(Path(halves).read_bytes()))
    again = evaluate("--compare", scored, f"{halves}.gz", str(tmp_path / "lead.txt"), *arguments[4:], "--overwrite")
    assert "ROUGE tok:ascii|stem:yes|" in again, "as the folder was scored"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"hypothesis": "a"}', "a"], "a.jsonl, line 2 is not JSON"),
        (['{"summary": "a"}'], "a.jsonl, line 1 must be a JSON object with a text named hypothesis"),
    ],
)
def test_a_file_that_is_not_like_it_is_refused(
    refuse: Run, lines: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(Path("a.jsonl"), lines)
    assert message in refuse("--compare", "a.jsonl")


def test_folders_of_different_tasks_are_not_compared(refuse: Run, tmp_path: Path) -> None:
    folders = {"summarization": tmp_path / "a", "translation": tmp_path / "b"}
    for task, folder in folders.items():
        write_lines(folder / "metrics.json", [json.dumps({"task": task})])
    said = refuse("--compare", *map(str, folders.values()))
    assert "scored for different tasks, summarization and translation" in said
