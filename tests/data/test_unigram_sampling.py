"""Sampling from unigram vocabularies: the oracle lists all ways to cut a text, and weighs them."""

import io
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import set_seed

from vanilla_transformer.conversion.tokenizers.sentencepiece import convert_sentencepiece
from vanilla_transformer.data.subword_regularization import SubwordRegularization, measure_length_growth
from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer
from vanilla_transformer.data.unigram_sampling import UnigramSampler

SOURCES = ["a man rides a horse", "two men ride two horses", "the man is riding", "a horse is a horse"]
TARGETS = ["ein Mann reitet ein Pferd", "zwei Männer reiten zwei Pferde", "der Mann reitet", "ein Pferd ist ein Pferd"]
PAIRS = {"source": SOURCES, "target": TARGETS}
SYLLABLES = ["ba", "der", "fü", "gen", "hô", "ki", "lo", "mé", "nun", "per", "stu"]
CHANCE = random.Random(0)
WORDS = ["".join(CHANCE.choices(SYLLABLES, k=CHANCE.randint(1, 4))) for _ in range(300)] + ["badergen"] * 9
SHARED: Any = train_tokenizer([*WORDS, *SOURCES, *TARGETS], model_type="unigram", vocab_size=340, show_progress=False)
ALPHAS = pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 3.0])


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vanilla_transformer.data.unigram_sampling._KNOWN_CHARACTERS", 100)
    sampler = UnigramSampler(SHARED.backend_tokenizer, 0.5)
    for word in WORDS:
        sampler._cut(f"{word}")
        assert sum(map(len, sampler._known)) <= 100


def list_ways(text: str, scores: dict[str, float]) -> Iterator[tuple[tuple[str, ...], float]]:
    """All ways to cut a text into pieces, with the logarithms of their probabilities."""
    if not text:
        yield (), 0.0
    for end in range(1, len(text) + 1):
        if (piece := text[:end]) in scores:
            yield from (((piece, *rest), scores[piece] + score) for rest, score in list_ways(text[end:], scores))


def weigh(text: str, scores: dict[str, float], alpha: float) -> dict[tuple[str, ...], float]:
    """The probability of each way to cut a text."""
    ways = {way: math.exp(alpha * score) for way, score in list_ways(text, scores)}
    return {way: weight / sum(ways.values()) for way, weight in ways.items()}


def check_frequencies(found: Counter[tuple[str, ...]], expected: dict[tuple[str, ...], float]) -> None:
    count = found.total()
    assert found.keys() <= expected.keys()
    for way, rate in expected.items():
        # Six standard deviations: by chance, one run in millions fails.
        assert abs(found[way] - count * rate) <= 6 * math.sqrt(count * rate * (1 - rate)) + 1, way


def read_scores(tokenizer: Any) -> dict[str, float]:
    return dict(json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"])


def draw_ways(tokenizer: Any, text: str, alpha: float, count: int) -> Counter[tuple[str, ...]]:
    draw = SubwordRegularization(tokenizer, unigram_alpha=alpha)
    drawn = draw({"source": [text] * count, "target": [""] * count})["input_ids"]
    assert {ids[-1] for ids in drawn} == {tokenizer.eos_token_id}
    return Counter(tuple(tokenizer.convert_ids_to_tokens(ids[:-1])) for ids in drawn)


@ALPHAS
def test_ways_to_cut_are_as_frequent_as_their_probabilities_say(alpha: float) -> None:
    expected = weigh("Ġbadergen", read_scores(SHARED), alpha)
    assert len(expected) > 10
    check_frequencies(draw_ways(SHARED, "badergen", alpha, 20_000), expected)


@settings(max_examples=25)
@given(
    scores=st.dictionaries(st.text("abc", min_size=2, max_size=4), st.floats(-6, 0), max_size=8),
    text=st.text("abc", min_size=1, max_size=8),
    alpha=st.floats(0.05, 4),
)
def test_any_vocabulary_is_sampled_exactly(scores: dict[str, float], text: str, alpha: float) -> None:
    scores |= {"a": -1.0, "b": -2.5, "c": -4.0}
    vocab = [("<unk>", -99.0), *scores.items()]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.add_special_tokens(["<unk>"])
    encoded = backend.encode(text)
    sampler = UnigramSampler(backend, alpha)
    drawn = (sampler.draw(encoded.ids, encoded.word_ids) for _ in range(2000))
    found = Counter(tuple(vocab[index][0] for index in ids) for ids in drawn)
    check_frequencies(found, weigh(text, scores, alpha))


@pytest.fixture(scope="module")
def spm_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sentencepiece models with what text is never, or always, cut into."""
    folder = tmp_path_factory.mktemp("spm")
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "bytes": {"byte_fallback": True, "vocab_size": 330},
        "symbols": {"user_defined_symbols": ["rid", "##"], "control_symbols": ["<2de>"]},
    }
    files = {}
    for name, changes in kinds.items():
        written = io.BytesIO()
        options = {"vocab_size": 70, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1, **changes}
        sentences = iter([*WORDS, *SOURCES, *TARGETS])
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=written, **options)
        files[name] = folder / f"{name}.model"
        files[name].write_bytes(written.getvalue())
    return files


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5])
def test_it_draws_as_sentencepiece_does(alpha: float, spm_files: dict[str, Path]) -> None:
    tokenizer = convert_sentencepiece(spm_files["plain"])
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(spm_files["plain"]))
    sentencepiece.set_random_generator_seed(1)
    options: dict[str, Any] = {"out_type": str, "enable_sampling": True, "alpha": alpha, "nbest_size": -1}
    expected = Counter(tuple(theirs.encode("badergen", **options)) for _ in range(20_000))
    assert len(expected) > 5
    found = draw_ways(tokenizer, "badergen", alpha, 20_000)
    for way in expected | found:
        rate = (expected[way] + found[way]) / 40_000
        assert abs(expected[way] - found[way]) <= 6 * math.sqrt(2 * 20_000 * rate * (1 - rate)) + 1, way


@pytest.mark.parametrize("name", ["plain", "bytes", "symbols"])
def test_what_has_no_other_way_to_be_cut_stays(name: str, spm_files: dict[str, Path]) -> None:
    tokenizer: Any = convert_sentencepiece(spm_files[name])
    draw = SubwordRegularization(tokenizer, unigram_alpha=0.05)
    scores = read_scores(tokenizer)

    @settings(max_examples=60)
    @given(text=st.text("ahorseid #Ж中<>/", max_size=30))
    def check(text: str) -> None:
        plain, drawn = tokenizer(text)["input_ids"], draw({"source": text, "target": text})
        assert drawn["attention_mask"] == [1] * len(drawn["input_ids"])
        for ids in (drawn["input_ids"], drawn["labels"]):
            assert tokenizer.decode(ids) == tokenizer.decode(plain)
            kept = [
                [index for index in row if not 0 >= scores[tokenizer.convert_ids_to_tokens(index)] > -30]
                for row in (ids, plain)
            ]
            assert kept[0] == kept[1]

    check()


def test_draws_repeat_with_a_seed() -> None:
    draw = SubwordRegularization(SHARED, unigram_alpha=0.1)
    rows = []
    for seed in (1, 1, 2):
        set_seed(seed)
        rows.append(draw(PAIRS))
    assert rows[0] == rows[1] != rows[2]


def test_texts_are_cut_to_their_limits() -> None:
    draw = SubwordRegularization(SHARED, unigram_alpha=0.1, max_source_length=5, max_target_length=3)
    drawn = draw(PAIRS)
    for name, limit in (("input_ids", 5), ("labels", 3)):
        assert all(len(ids) == limit and ids[-1] == 2 for ids in drawn[name])
    assert all(
        SHARED.decode(ids[:-1]) and text.startswith(SHARED.decode(ids[:-1]))
        for ids, text in zip(drawn["input_ids"], SOURCES, strict=True)
    )


def test_each_side_by_its_own_kind() -> None:
    options: dict[str, Any] = {"model_type": "bpe", "target_model_type": "unigram", "show_progress": False}
    mixed = train_separate_tokenizer(SOURCES * 3, TARGETS * 3, vocab_size=290, target_vocab_size=320, **options)
    draw = SubwordRegularization(mixed, bpe_dropout=0.5, unigram_alpha=0.1)
    rows = [draw(PAIRS) for _ in range(10)]
    for name, side, texts in (("input_ids", mixed.source_tokenizer, SOURCES), ("labels", mixed, TARGETS)):
        assert len({json.dumps(row[name]) for row in rows}) == 10
        assert all(side.batch_decode(row[name], skip_special_tokens=True) == texts for row in rows)
    assert min(measure_length_growth(mixed, 0.5, SOURCES, TARGETS, unigram_alpha=0.1)) > 1.1
    with pytest.raises(ValueError, match=r"BPE-dropout needs byte-pair merges, but .* a Unigram model: give unigram_a"):
        SubwordRegularization(mixed, bpe_dropout=0.5)
    with pytest.raises(
        ValueError, match=r"unigram_alpha needs a unigram vocabulary, but .* is a BPE model: give bpe_dropout"
    ):
        SubwordRegularization(mixed, unigram_alpha=0.5)


def test_numbers_without_a_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bpe_dropout=0\.1, but no vocabulary of VanillaTransformerTokenizer has mer"):
        SubwordRegularization(SHARED, bpe_dropout=0.1, unigram_alpha=0.1)
    words = train_tokenizer(SOURCES, model_type="wordlevel", vocab_size=20)
    with pytest.raises(
        ValueError, match=r"merges and unigram_alpha needs a unigram vocabulary, but .*a WordLevel model"
    ):
        SubwordRegularization(words, bpe_dropout=0.1, unigram_alpha=0.1)
    for alpha in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"unigram_alpha={alpha}: must be greater than 0, and finite"):
            SubwordRegularization(SHARED, unigram_alpha=alpha)
