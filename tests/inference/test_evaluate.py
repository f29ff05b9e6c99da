"""Scores checked against sacreBLEU itself."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
from datasets import Dataset
from tiny_seq2seq import make_model, make_tokenizer, random_pairs
from transformers import DataCollatorForSeq2Seq, EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments

from vanilla_transformer.inference.evaluate import make_compute_metrics, score_translations
from vanilla_transformer.inference.scores import find_bleu_tokenizer
from vanilla_transformer.inference.translate import translate

MODEL: Any = make_model()
TOKENIZER = make_tokenizer()
HYPOTHESES = ["A man rides a horse .", "Two DOGS, on the beach!", "  nobody is here", "drei vier fünf"]
REFERENCES = ["A man is riding a horse .", "Two dogs, on the beach!", "nobody is here", "eins zwei drei"]


@pytest.mark.parametrize(("lowercase", "tokenize"), [(False, "13a"), (True, "char")])
def test_scores_are_sacrebleus(lowercase: bool, tokenize: str) -> None:
    scores = score_translations(HYPOTHESES, REFERENCES, lowercase=lowercase, tokenize=tokenize)
    with_ter = score_translations(HYPOTHESES, REFERENCES, lowercase=lowercase, tokenize=tokenize, ter=True)
    oracles: dict[str, Any] = {
        "bleu": sacrebleu.BLEU(lowercase=lowercase, tokenize=tokenize),
        "bleu_lowercase": sacrebleu.BLEU(lowercase=True, tokenize=tokenize),
        "chrf": sacrebleu.CHRF(lowercase=lowercase),
        "ter": sacrebleu.TER(),
    }
    for name, oracle in oracles.items():
        assert with_ter[name] == oracle.corpus_score(HYPOTHESES, [REFERENCES]).score > 0
        assert with_ter[f"{name}_signature"] == str(oracle.get_signature())
    case = "lc" if lowercase else "mixed"
    assert f"|case:{case}|eff:no|tok:{tokenize}|smooth:exp|" in scores["bleu_signature"]
    assert {name: score for name, score in with_ter.items() if not name.startswith("ter")} == scores
    assert scores["exact_match"] == 25


def test_what_cannot_be_scored_is_refused() -> None:
    for hypotheses, references, counts in ((["a"], ["a", "b"], (1, 2)), ([], [], (0, 0))):
        with pytest.raises(ValueError, match=r"{}\b.*{}\b".format(*counts)):
            score_translations(hypotheses, references)


def test_without_sacrebleu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
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


def test_metrics_of_a_trainer_are_those_of_its_translations(tmp_path: Path) -> None:
    sources, targets = random_pairs(6)
    pairs = [TOKENIZER(source, text_target=target) for source, target in zip(sources, targets, strict=True)]
    model = make_model()
    options: Any = {"per_device_eval_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, generation_max_length=9, **options),
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
    # </s> w0 w1 w2 w3 </s> against w0 w1 w2 w3 </s>; </s> w4 </s> against w5 w6 </s>
    predictions = np.array([[2, 4, 5, 6, 7, 2], [2, 8, 2, 1, -100, -100]])
    labels = np.array([[4, 5, 6, 7, 2], [9, 10, 2, -100, -100]])
    for tokenize in ("13a", "char"):
        compute_metrics = make_compute_metrics(TOKENIZER, bleu_tokenize=tokenize)
        metrics = compute_metrics(EvalPrediction(predictions=(predictions,), label_ids=labels))
        expected = score_translations(["w0 w1 w2 w3", "w4"], ["w0 w1 w2 w3", "w5 w6"], tokenize=tokenize)
        assert metrics == {"bleu": expected["bleu"], "chrf": expected["chrf"], "exact_match": 50, "gen_len": 4.5}
        assert all(isinstance(value, float) for value in metrics.values()), "JSON must take them"
