"""Scores checked against sacreBLEU itself, the loss against a token-by-token loop."""

import math
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import tiny_vanilla
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from library_models import make_m2m100
from tiny_seq2seq import MAX_TOKENS, WORDS, make_model, make_tokenizer
from transformers import DataCollatorForSeq2Seq, EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments

from vanilla_transformer.inference.evaluate import make_compute_metrics, score_translations
from vanilla_transformer.inference.scores import find_bleu_tokenizer, score_loss
from vanilla_transformer.inference.translate import translate

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
        with pytest.raises(ValueError, match="{} sources and {} targets".format(*counts)):
            score_loss(MODEL, TOKENIZER, hypotheses, references, progress=False)
    with pytest.raises(ValueError, match="batch_size is 0"):
        score_loss(MODEL, TOKENIZER, ["w1"], ["w1"], batch_size=0, progress=False)


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


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_loss_equals_a_loop_over_tokens(batch_size: int) -> None:
    sources, targets = random_pairs(12)
    targets[3] = ""
    encoded = zip(TOKENIZER(sources).input_ids, TOKENIZER(targets).input_ids, strict=True)
    expected = [loss for source, target in encoded for loss in naive_loss(MODEL, source, target)]
    scores = score_loss(MODEL, TOKENIZER, sources, targets, batch_size=batch_size, progress=False)
    assert scores["tokens"] == len(expected) == sum(len(target.split()) + 1 for target in targets)
    assert scores["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-5)


@settings(max_examples=10)
@given(pairs=st.lists(st.tuples(sentences, sentences), min_size=1, max_size=8), batch_size=st.integers(1, 5))
def test_loss_of_a_corpus_is_the_mean_of_its_pairs_by_tokens(pairs: list[tuple[str, str]], batch_size: int) -> None:
    sources, targets = map(list, zip(*pairs, strict=True))
    together = score_loss(MODEL, TOKENIZER, sources, targets, batch_size=batch_size, progress=False)
    alone = [score_loss(MODEL, TOKENIZER, [source], [target], progress=False) for source, target in pairs]
    tokens = sum(scores["tokens"] for scores in alone)
    assert together["tokens"] == tokens
    mean = sum(scores["loss"] * scores["tokens"] for scores in alone) / tokens
    assert together["loss"] == pytest.approx(mean, rel=1e-5)


def test_loss_of_a_model_that_shifts_labels_itself() -> None:
    model = make_m2m100(len(TOKENIZER))
    assert not hasattr(model, "prepare_decoder_input_ids_from_labels"), "the other way is tested above"
    sources, targets = random_pairs(5)
    encoded = zip(TOKENIZER(sources).input_ids, TOKENIZER(targets).input_ids, strict=True)
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
    long, cut, shortened = (" ".join(WORDS[:length]) for length in (30, MAX_TOKENS - 1, 4))
    scores = score_loss(MODEL, TOKENIZER, ["w1", long], [long, "w2"], max_target_length=5, progress=False)
    assert caplog.messages == [
        f"source line 2: truncated to {MAX_TOKENS} of its 31 tokens",
        "target line 1: truncated to 5 of its 31 tokens",
    ]
    expected = score_loss(MODEL, TOKENIZER, ["w1", cut], [shortened, "w2"], progress=False)
    assert scores["tokens"] == 7
    assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_learned_positions_limit_what_is_scored(caplog: pytest.LogCaptureFixture) -> None:
    sizes: Any = {"position_embedding_type": "learned", "max_position_embeddings": 8}
    model = tiny_vanilla.make_model(vocab_size=len(TOKENIZER), **sizes)
    long, cut = (" ".join(WORDS[:length]) for length in (20, 7))
    scores = score_loss(model, TOKENIZER, [long, "w1"], ["w1", long], progress=False)
    assert [message.split(":")[0] for message in caplog.messages] == ["source line 1", "target line 2"]
    assert scores == score_loss(model, TOKENIZER, [cut, "w1"], ["w1", cut], progress=False)


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
