"""Scores checked against sacreBLEU itself and a token-by-token loop; scripts/evaluate_translation.py."""

import builtins
import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_seq2seq import MAX_TOKENS, WORDS, make_model, make_tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    M2M100Config,
    M2M100ForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from vanilla_transformer.data.numbers_and_dates import numbers_and_dates
from vanilla_transformer.inference.evaluate import make_compute_metrics, score_loss, score_summaries, score_translations
from vanilla_transformer.inference.metrics.comparison import (
    Comparison,
    PairedScore,
    compare_summaries,
    compare_translations,
)
from vanilla_transformer.inference.metrics.sacrebleu_scores import find_bleu_tokenizer
from vanilla_transformer.inference.translate import translate

REPOSITORY = Path(__file__).parents[2]
MODEL: Any = make_model()
TOKENIZER = make_tokenizer()
HYPOTHESES = ["A man rides a horse .", "Two DOGS, on the beach!", "  nobody is here", "drei vier fünf"]
REFERENCES = ["A man is riding a horse .", "Two dogs, on the beach!", "nobody is here", "eins zwei drei"]

sentences = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


def random_pairs(count: int, *, seed: int = 0) -> tuple[list[str], list[str]]:
    generator = random.Random(seed)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) for _ in range(2 * count)]
    return texts[:count], texts[count:]


def naive_loss(model: Any, source: list[int], target: list[int]) -> list[float]:
    """The oracle: negative log-likelihood of each target token, one forward pass per token, no padding anywhere."""
    losses = []
    for position, token in enumerate(target):
        decoder_input_ids = torch.tensor([[model.config.decoder_start_token_id, *target[:position]]])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=decoder_input_ids).logits[0, -1].double()
        losses.append(float(logits.exp().sum().log() - logits[token]))
    return losses


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("tokenize", ["13a", "char"])
def test_scores_are_sacrebleus(lowercase: bool, tokenize: str) -> None:
    scores = score_translations(HYPOTHESES, REFERENCES, lowercase=lowercase, tokenize=tokenize)
    streams = [REFERENCES]
    bleu = sacrebleu.corpus_bleu(HYPOTHESES, streams, lowercase=lowercase, tokenize=tokenize).score
    assert scores["bleu"] == pytest.approx(bleu)
    assert scores["bleu_lowercase"] == pytest.approx(
        sacrebleu.corpus_bleu(HYPOTHESES, streams, lowercase=True, tokenize=tokenize).score
    )
    metric = sacrebleu.CHRF(lowercase=lowercase)
    assert scores["chrf"] == pytest.approx(metric.corpus_score(HYPOTHESES, streams).score)
    case = "lc" if lowercase else "mixed"
    version = sacrebleu.__version__
    assert scores["bleu_signature"] == f"nrefs:1|case:{case}|eff:no|tok:{tokenize}|smooth:exp|version:{version}"
    assert scores["bleu_lowercase_signature"] == f"nrefs:1|case:lc|eff:no|tok:{tokenize}|smooth:exp|version:{version}"
    assert scores["chrf_signature"] == f"nrefs:1|case:{case}|eff:yes|nc:6|nw:0|space:no|version:{version}"
    assert "ter" not in scores
    ter = sacrebleu.TER()
    with_ter = score_translations(HYPOTHESES, REFERENCES, lowercase=lowercase, tokenize=tokenize, ter=True)
    assert with_ter["ter"] == ter.corpus_score(HYPOTHESES, streams).score > 0
    assert with_ter["ter_signature"] == str(ter.get_signature())
    assert {name: score for name, score in with_ter.items() if not name.startswith("ter")} == scores


def test_exact_match_ignores_white_space_at_the_ends_only() -> None:
    scores = score_translations(HYPOTHESES, REFERENCES, lowercase=True)
    assert scores["exact_match"] == 25
    perfect = score_translations(REFERENCES, REFERENCES)
    assert perfect["exact_match"] == 100
    assert perfect["bleu"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("hypotheses", "references", "message"),
    [(["a"], ["a", "b"], "1 hypotheses and 2 references"), ([], [], "0 hypotheses")],
    ids=["misaligned", "empty"],
)
def test_lists_that_do_not_match_are_refused(hypotheses: list[str], references: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score_translations(hypotheses, references)
    with pytest.raises(ValueError, match=message.replace("hypotheses", "sources").replace("references", "targets")):
        score_loss(MODEL, TOKENIZER, hypotheses, references, progress=False)


def test_wrong_arguments_of_score_translations_are_refused() -> None:
    with pytest.raises(TypeError, match="single string"):
        score_translations("a b", "a b")
    with pytest.raises(ValueError, match=r"tokenize is 'moses'; it must be one of .*13a"):
        score_translations(["a"], ["a"], tokenize="moses")


def test_without_sacrebleu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_sacrebleu(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "sacrebleu":
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_sacrebleu)
    with pytest.raises(ImportError, match=r'pip install "vanilla-transformer\[train\]"'):
        score_translations(["a"], ["a"])
    with pytest.raises(ImportError, match="sacrebleu"):
        make_compute_metrics(TOKENIZER)


@pytest.mark.parametrize("code", ["zh", "de", "cs"])
def test_a_languages_tokeniser_is_sacrebleus_own_choice(code: str) -> None:
    chosen = sacrebleu.BLEU(trg_lang=code).tokenizer.signature()
    for langs in (["en", code], [code], ["zh", f"{code}_XX"], ["ja", f"{code.upper()}-x"]):
        assert find_bleu_tokenizer(langs) == chosen


def test_languages_without_a_tokeniser_of_their_own() -> None:
    """Japanese needs a package; what is not known is cut as the default is."""
    expected = "char"
    with suppress(RuntimeError):
        expected = sacrebleu.BLEU(trg_lang="ja").tokenizer.signature()
    assert find_bleu_tokenizer(["en", "ja"]) == find_bleu_tokenizer(["jpn_Jpan"]) == expected
    assert find_bleu_tokenizer(["en", "zho_Hans"]) == find_bleu_tokenizer(["cmn"]) == "zh"
    assert find_bleu_tokenizer(None) == find_bleu_tokenizer([]) == sacrebleu.BLEU().tokenizer.signature() == "13a"


def test_metrics_of_a_training_use_the_given_tokeniser() -> None:
    """Words and characters match in different numbers."""
    predicted, expected = (
        np.array([TOKENIZER(" ".join(words)).input_ids]) for words in (WORDS[:7], WORDS[:5] + WORDS[7:9])
    )
    prediction = EvalPrediction(predictions=predicted, label_ids=expected)
    scores = [make_compute_metrics(TOKENIZER, bleu_tokenize=name)(prediction)["bleu"] for name in ("13a", "char")]
    texts = [TOKENIZER.batch_decode(ids, skip_special_tokens=True) for ids in (predicted, expected)]
    assert scores == pytest.approx(
        [sacrebleu.corpus_bleu(texts[0], [texts[1]], tokenize=name).score for name in ("13a", "char")]
    )
    assert scores[0] != scores[1]


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_loss_equals_a_loop_over_tokens(batch_size: int) -> None:
    sources, targets = random_pairs(12)
    targets[3] = ""
    expected = [
        loss
        for source, target in zip(sources, targets, strict=True)
        for loss in naive_loss(MODEL, TOKENIZER(source).input_ids, TOKENIZER(target).input_ids)
    ]
    scores = score_loss(MODEL, TOKENIZER, sources, targets, batch_size=batch_size, progress=False)
    assert scores["tokens"] == len(expected) == sum(len(target.split()) + 1 for target in targets)
    assert scores["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-5)


@settings(max_examples=15, deadline=None)
@given(pairs=st.lists(st.tuples(sentences, sentences), min_size=1, max_size=8), batch_size=st.integers(1, 5))
def test_loss_of_a_corpus_is_the_token_weighted_mean_of_its_pairs(
    pairs: list[tuple[str, str]], batch_size: int
) -> None:
    sources, targets = map(list, zip(*pairs, strict=True))
    together = score_loss(MODEL, TOKENIZER, sources, targets, batch_size=batch_size, progress=False)
    alone = [score_loss(MODEL, TOKENIZER, [source], [target], progress=False) for source, target in pairs]
    tokens = sum(scores["tokens"] for scores in alone)
    assert together["tokens"] == tokens
    mean = sum(scores["loss"] * scores["tokens"] for scores in alone) / tokens
    assert together["loss"] == pytest.approx(mean, rel=1e-5)


def test_loss_of_a_model_that_shifts_labels_itself() -> None:
    config = M2M100Config(
        vocab_size=len(TOKENIZER),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        init_std=0.5,
    )
    model = M2M100ForConditionalGeneration(config).eval()
    assert not hasattr(model, "prepare_decoder_input_ids_from_labels"), "the other way is tested above"
    sources, targets = random_pairs(5)
    encoded = [
        (TOKENIZER(source).input_ids, TOKENIZER(target).input_ids)
        for source, target in zip(sources, targets, strict=True)
    ]
    expected = [loss for source, target in encoded for loss in naive_loss(model, source, target)]
    scores = score_loss(model, TOKENIZER, sources, targets, batch_size=2, progress=False)
    assert scores["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_loss_neither_trains_nor_drops_out_and_restores_the_training_flag() -> None:
    sources, targets = random_pairs(5)
    model = make_model()
    model.train()
    scores = score_loss(model, TOKENIZER, sources, targets, progress=False)
    assert scores == score_loss(MODEL, TOKENIZER, sources, targets, progress=False)
    assert model.training
    assert model.model.encoder.training


def test_overlong_pairs_are_truncated_with_a_warning_that_names_the_line(caplog: pytest.LogCaptureFixture) -> None:
    long = " ".join(WORDS[:30])
    shortened = " ".join(WORDS[:4])
    scores = score_loss(MODEL, TOKENIZER, ["w1", long], [long, "w2"], max_target_length=5, progress=False)
    assert caplog.messages == [
        f"source line 2: truncated to {MAX_TOKENS} of its 31 tokens",
        "target line 1: truncated to 5 of its 31 tokens",
    ]
    expected = score_loss(
        MODEL, TOKENIZER, ["w1", " ".join(WORDS[: MAX_TOKENS - 1])], [shortened, "w2"], progress=False
    )
    assert scores["tokens"] == 7
    assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_loss_refuses_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="batch_size is 0"):
        score_loss(MODEL, TOKENIZER, ["w1"], ["w1"], batch_size=0, progress=False)


def test_metrics_of_a_trainer_are_those_of_its_translations(tmp_path: Path) -> None:
    sources, targets = random_pairs(6)
    pairs = [TOKENIZER(source, text_target=target) for source, target in zip(sources, targets, strict=True)]
    model = make_model()
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            predict_with_generate=True,
            per_device_eval_batch_size=2,
            generation_max_length=9,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        eval_dataset=Dataset.from_list([dict(pair) for pair in pairs]).select_columns(["input_ids", "labels"]),
        data_collator=DataCollatorForSeq2Seq(TOKENIZER, model=model),
        compute_metrics=make_compute_metrics(TOKENIZER),
    )
    metrics = trainer.evaluate()
    translations = translate(MODEL, TOKENIZER, sources, max_new_tokens=8, progress=False)
    scores = score_translations(translations, targets)
    for name in ("bleu", "chrf", "exact_match"):
        assert metrics[f"eval_{name}"] == pytest.approx(scores[name])
    assert 1 <= metrics["eval_gen_len"] <= 9


def test_metrics_of_known_predictions() -> None:
    compute_metrics = make_compute_metrics(TOKENIZER)
    # </s> w0 w1 w2 w3 </s> against w0 w1 w2 w3 </s>; </s> w4 </s> against w5 w6 </s>
    predictions = np.array([[2, 4, 5, 6, 7, 2], [2, 8, 2, 1, -100, -100]])
    labels = np.array([[4, 5, 6, 7, 2], [9, 10, 2, -100, -100]])
    metrics = compute_metrics(EvalPrediction(predictions=(predictions,), label_ids=labels))
    expected = score_translations(["w0 w1 w2 w3", "w4"], ["w0 w1 w2 w3", "w5 w6"])
    assert metrics == {
        "bleu": expected["bleu"],
        "chrf": expected["chrf"],
        "exact_match": 50,
        "gen_len": 4.5,
    }
    assert all(isinstance(value, float) for value in metrics.values()), "JSON must take them"


# The script


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    MODEL.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, model_folder: str) -> Callable[..., None]:
    """scripts/evaluate_translation.py's main, imported as Python runs it, with the model's arguments given."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import evaluate_translation as script

    def run(*arguments: str) -> None:
        model = [] if "--compare" in arguments else ["--model_name_or_path", model_folder]
        script.main([*model, "--device", "cpu", "--disable_tqdm", *arguments])

    return run


@pytest.fixture
def test_files(tmp_path: Path) -> tuple[str, str]:
    sources, targets = random_pairs(9)
    paths = tmp_path / "test.en", tmp_path / "test.de"
    for path, texts in zip(paths, (sources, targets), strict=True):
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(paths[0]), str(paths[1])


def test_script_reports_what_the_library_computes(
    main: Callable[..., None], test_files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_dir = tmp_path / "scores"
    arguments = ("--test_file", *test_files, "--num_beams", "2", "--batch_size", "4", "--output_dir", str(output_dir))
    main(*arguments, "--max_samples", "8")
    table = capsys.readouterr().out
    sources, targets = (texts[:8] for texts in random_pairs(9))
    hypotheses = translate(MODEL, TOKENIZER, sources, num_beams=2, progress=False)
    assert (output_dir / "hypotheses.txt").read_text(encoding="utf-8") == "".join(line + "\n" for line in hypotheses)
    assert (output_dir / "references.txt").read_text(encoding="utf-8") == "".join(line + "\n" for line in targets)
    assert len((output_dir / "sources.txt").read_text(encoding="utf-8").splitlines()) == len(targets)
    metrics = json.loads((output_dir / "metrics.json").read_text(encoding="utf-8"))
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

    with pytest.raises(SystemExit) as refusal:
        main(*arguments)
    assert refusal.value.code == 2
    assert "holds sources.txt, hypotheses.txt, references.txt, metrics.json" in capsys.readouterr().err
    assert json.loads((output_dir / "metrics.json").read_text(encoding="utf-8")) == metrics
    main(*arguments, "--overwrite")
    assert json.loads((output_dir / "metrics.json").read_text(encoding="utf-8"))["sentences"] == 9


def test_script_scores_the_built_in_corpus(
    main: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main("--builtin_corpus", "--split", "validation", "--max_samples", "3", "--no_ter", "--output_dir", str(tmp_path))
    table = capsys.readouterr().out
    assert "greedy" in table
    assert "TER" not in table
    pairs = numbers_and_dates(split="validation")[:3]
    metrics = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert "ter" not in metrics
    expected = score_loss(MODEL, TOKENIZER, pairs["source"], pairs["target"], progress=False)
    assert metrics["loss"] == pytest.approx(expected["loss"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "exactly one of --builtin_corpus, --test_file and --dataset_name; got none"),
        (("--builtin_corpus", "--test_file", "a.tsv"), "got builtin_corpus, test_file"),
        (("--builtin_corpus", "--split", "dev"), "'dev'"),
        (("--builtin_corpus", "--max_samples", "0"), "--max_samples is 0"),
        (("--test_file", "missing.tsv"), "missing.tsv"),
        (("--test_file", "a.tsv", "--bleu_tokenize", "moses"), "tokenize is 'moses'"),
        (("--builtin_corpus", "--source_lang", "en"), "give both or neither"),
    ],
    ids=str,
)
def test_script_refuses_wrong_arguments(
    main: Callable[..., None], arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(*arguments)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_script_refuses_neither_or_both_of_a_model_and_a_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import evaluate_translation as script

    for arguments, found in (
        (["--builtin_corpus"], "neither"),
        (["--builtin_corpus", "--model_name_or_path", "m", "--compare", "a", "b"], "both"),
    ):
        with pytest.raises(SystemExit):
            script.main(arguments)
        assert f"either --model_name_or_path or --compare; got {found}" in capsys.readouterr().err


def write_lines(path: Path, lines: list[str]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def systems() -> dict[str, list[str]]:
    """References, and two systems that get each third or each sixth word wrong."""
    words = [text.split() for text in random_pairs(30)[1]]
    return {
        "references": [" ".join(line) for line in words],
        **{
            name: [
                " ".join("x" if (number + index) % every == 0 else word for index, word in enumerate(line))
                for number, line in enumerate(words)
            ]
            for name, every in (("third", 3), ("sixth", 6))
        },
    }


class TestComparison:
    def test_of_text_files(
        self,
        main: Callable[..., None],
        systems: dict[str, list[str]],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        files = {name: write_lines(tmp_path / f"{name}.de", texts) for name, texts in systems.items()}
        compared = ("--compare", files["third"], files["sixth"])
        arguments = (*compared, "--test_file", files["third"], files["references"], "--compare_samples", "200")
        output_dir = tmp_path / "out"
        main(*arguments, "--compare_seed", "3", "--output_dir", str(output_dir))
        table = capsys.readouterr().out
        expected = compare_translations(
            {files[name]: systems[name] for name in ("third", "sixth")}, systems["references"], samples=200, seed=3
        )
        report = json.loads((output_dir / "comparison.json").read_text(encoding="utf-8"))
        assert {name: report[name] for name in expected} == expected
        assert f"--compare {files['third']} {files['sixth']}" in report["command"]
        assert report["arguments"]["compare_seed"] == 3
        assert report["versions"]["sacrebleu"] == sacrebleu.__version__
        header, baseline, other, *notes = table.splitlines()
        assert " ".join(header.split()) == "BLEU (mean ± 95% CI) p chrF (mean ± 95% CI) p"
        cells = [
            f"{score['score']:.2f} ({score['mean']:.2f} ± {score['ci']:.2f})" for score in score_cells(expected, 0)
        ]
        assert baseline.split() == f"baseline: {files['third']} {cells[0]} {cells[1]}".split()
        cells = [
            f"{score['score']:.2f} ({score['mean']:.2f} ± {score['ci']:.2f}) {score['p_value']:.4f}*"
            for score in score_cells(expected, 1)
        ]
        assert other.split() == f"{files['sixth']} {cells[0]} {cells[1]}".split()
        assert "200 samples, seed 3" in notes[0]
        assert expected["bleu_signature"] in notes[-2]
        assert expected["chrf_signature"] in notes[-1]

        with pytest.raises(SystemExit):
            main(*arguments, "--output_dir", str(output_dir))
        assert "holds comparison.json" in capsys.readouterr().err
        main(*arguments, "--output_dir", str(output_dir), "--overwrite")
        assert "200 samples, seed 12345" in capsys.readouterr().out

        main(*arguments, "--compare_method", "approximate_randomization")
        table = capsys.readouterr().out
        assert "±" not in table
        assert "Paired approximate randomization over 30 sentences, 200 samples, seed 12345" in table

    def test_of_folders_that_the_script_made(
        self,
        main: Callable[..., None],
        test_files: tuple[str, str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        folders = []
        for beams in ("1", "3"):
            folders.append(str(tmp_path / f"beams-{beams}"))
            main("--test_file", *test_files, "--num_beams", beams, "--output_dir", folders[-1])
        capsys.readouterr()
        main("--compare", *folders, "--output_dir", str(tmp_path / "out"), "--lowercase", "--bleu_tokenize", "char")
        scores = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
        assert (scores["sentences"], scores["samples"], scores["seed"]) == (9, 1000, 12345)
        assert "|case:lc|eff:no|tok:char|" in scores["bleu_signature"]
        for folder, system in zip(folders, scores["systems"], strict=True):
            metrics = json.loads((Path(folder) / "metrics.json").read_text(encoding="utf-8"))
            assert system["system"] == folder
            assert system["chrf"]["score"] == pytest.approx(metrics["chrf"])

    def test_of_folders_in_chinese(
        self,
        main: Callable[..., None],
        test_files: tuple[str, str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The language chooses the tokeniser, and a comparison takes that of its folders, where it is one."""
        folders = [str(tmp_path / name) for name in ("zh", "zh-too", "de")]
        for folder in folders:
            main("--test_file", *test_files, "--source_lang", "en", "--target_lang", Path(folder).name[:2],
                 "--output_dir", folder)  # fmt: skip
        main("--compare", *folders[:2], "--output_dir", str(tmp_path / "out"))
        scores = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
        assert "|tok:zh|" in scores["bleu_signature"]
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main("--compare", *folders)
        assert "BLEU was scored with 13a and zh; choose one with --bleu_tokenize" in capsys.readouterr().err

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
            (("folder", "third", "--compare_samples", "0"), "samples is 0"),
            (("folder", "third", "--compare_seed", "0"), "seed is 0"),
            (("folder", "third", "--compare_method", "t-test"), "invalid choice: 't-test'"),
            (("folder", "third", "--bleu_tokenize", "moses"), "tokenize is 'moses'"),
        ],
        ids=str,
    )
    def test_refuses_what_cannot_be_compared(
        self,
        main: Callable[..., None],
        systems: dict[str, list[str]],
        arguments: tuple[str, ...],
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name, texts in systems.items():
            write_lines(Path(name), texts)
        write_lines(Path("short"), systems["third"][:-1])
        Path("empty").mkdir()
        for folder, references in (("folder", "references"), ("other", "sixth")):
            write_lines(Path(folder, "hypotheses.txt"), systems["third"])
            write_lines(Path(folder, "references.txt"), systems[references])
        with pytest.raises(SystemExit) as refusal:
            main("--compare", *arguments, "--output_dir", "out")
        assert refusal.value.code == 2
        assert message in capsys.readouterr().err
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


class TestSummaries:
    def test_scores_are_those_of_the_texts_that_are_kept(
        self, main: Callable[..., None], documents: str, tmp_path: Path
    ) -> None:
        output_dir = tmp_path / "scores"
        main("--test_file", documents, "--task", "summarization", "--output_dir", str(output_dir))
        metrics = json.loads((output_dir / "metrics.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (output_dir / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [row["source"] for row in rows] == random_pairs(9)[0]
        hypotheses, references = ([row[name] for row in rows] for name in ("hypothesis", "reference"))
        assert all("\n" in reference for reference in references)
        expected = score_summaries(hypotheses, references)
        assert {name: metrics[name] for name in expected} == expected
        lines = (output_dir / "references.txt").read_text(encoding="utf-8").splitlines()
        assert lines == [reference.replace("\n", " ") for reference in references]
        assert score_summaries(hypotheses, lines)["rougeLsum"] < expected["rougeLsum"], "line breaks count"

        main("--test_file", documents, "--task", "translation", "--output_dir", str(output_dir), "--overwrite",
             "--source_column", "text", "--target_column", "summary")  # fmt: skip
        assert not (output_dir / "texts.jsonl").exists(), "it would be taken for that of this model"

    def test_they_are_compared_by_rouge(
        self, main: Callable[..., None], documents: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        sources, _ = random_pairs(9)
        references = [json.loads(line)["summary"] for line in Path(documents).read_text().splitlines()]
        scored, halves = str(tmp_path / "scored"), str(tmp_path / "halves.jsonl")
        main("--test_file", documents, "--task", "summarization", "--output_dir", scored)
        first_lines = [reference.partition("\n")[0] for reference in references]
        write_lines(Path(halves), [json.dumps({"hypothesis": text}) for text in first_lines])
        write_lines(tmp_path / "lead.txt", sources)
        capsys.readouterr()
        systems = {
            scored: translate(MODEL, TOKENIZER, sources, progress=False),
            halves: first_lines,
            str(tmp_path / "lead.txt"): sources,
        }
        expected = compare_summaries(systems, references, samples=100)
        arguments = ("--compare", *systems, "--compare_samples", "100", "--output_dir", str(tmp_path / "out"))
        main(*arguments)
        table = capsys.readouterr().out
        for more in (("--task", "summarization"), ("--task", "summarization", "--test_file", documents)):
            main(*arguments, *more, "--overwrite")
            assert capsys.readouterr().out == table
        report = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
        assert {name: report[name] for name in expected} == expected
        headers = [line.split() for line in table.splitlines() if "ROUGE-" in line]
        assert [[word for word in header if "ROUGE" in word] for header in headers] == [
            ["ROUGE-1", "ROUGE-2"],
            ["ROUGE-L", "ROUGE-Lsum"],
        ]
        assert table.count(f"baseline: {scored} ") == table.count(f"\n{halves} ") == 2
        assert f"{expected['systems'][1]['rougeLsum']['score']:.2f} (" in table
        assert "over 9 summaries, 100 samples" in table
        assert table.endswith(f"ROUGE {expected['rouge_signature']}\n")
        main(*arguments, "--overwrite", "--rouge_stemmer", "--rouge_tokenize", "ascii")
        assert "ROUGE tok:ascii|stem:yes|" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (['{"hypothesis": "a"}', "a"], "a.jsonl, line 2 is not JSON"),
            (['{"summary": "a"}'], "a.jsonl, line 1 must be a JSON object with a text named hypothesis"),
            (["[1]"], "a.jsonl, line 1 must be a JSON object"),
            (['{"hypothesis": "a"}'], "no folder has a references.txt"),
        ],
    )
    def test_a_file_that_is_not_like_it_is_refused(
        self,
        main: Callable[..., None],
        lines: list[str],
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write_lines(Path("a.jsonl"), lines)
        with pytest.raises(SystemExit):
            main("--compare", "a.jsonl")
        assert message in capsys.readouterr().err

    def test_folders_of_different_tasks_are_not_compared(
        self, main: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folders = {"summarization": tmp_path / "a", "translation": tmp_path / "b"}
        for task, folder in folders.items():
            write_lines(folder / "metrics.json", [json.dumps({"task": task})])
        with pytest.raises(SystemExit):
            main("--compare", *map(str, folders.values()))
        assert "scored for different tasks, summarization and translation" in capsys.readouterr().err


def score_cells(comparison: Comparison, index: int) -> tuple[PairedScore, PairedScore]:
    system = comparison["systems"][index]
    return system["bleu"], system["chrf"]


def test_script_help_names_every_option(main: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    for option in ("--test_file", "--dataset_name", "--builtin_corpus", "--num_beams", "--output_dir", "--compare"):
        assert option in text
