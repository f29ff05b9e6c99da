"""Glossaries: which terms a text has, how a tokenizer writes their translations, and what pipelines and commands do."""

from __future__ import annotations

import copy
import functools
import itertools
import re
import unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from letters import make_letters_model
from library_models import make_m2m100, make_nllb_tokenizer
from library_vocabularies import write_fsmt_vocabulary, write_marian_vocabulary
from tiny_seq2seq import make_model, make_tokenizer
from tiny_translations import run_interrupted
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import FSMTTokenizer, MarianTokenizer, PreTrainedTokenizerFast, pipelines

from vanilla_transformer import TranslationPipeline, VanillaTransformerConfig, VanillaTransformerTokenizer
from vanilla_transformer.commands.translate import main as translate_command
from vanilla_transformer.data.vocabularies import get_vocabularies
from vanilla_transformer.inference.ensembles import Ensemble
from vanilla_transformer.inference.files import translate_file
from vanilla_transformer.inference.glossary import Glossary, TargetTerms, cut
from vanilla_transformer.inference.translate import translate
from vanilla_transformer.model.decoding_vanilla_transformer import Phrase, TokenSet

pipeline: Any = pipelines.pipeline  # its types know only the tasks that the library has itself

# Terms


def is_in_word(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN" and not "\u4e00" <= character <= "\u9fff"


def simplify(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def make_pattern(term: str) -> str:
    """A term as a regular expression: space between two words, and perhaps beside a sign or a Chinese character."""
    pattern = last = ""
    for word in simplify(term).split():
        for place, character in enumerate(word):
            if last:
                are_letters = is_in_word(last) and is_in_word(character)
                pattern += r"\s*" if not are_letters else r"\s+" if place == 0 else ""
            pattern += re.escape(character)
            last = character
    return pattern


def find_naively(terms: list[str], text: str) -> list[str]:
    """From the left, the longest term that begins here and has no letters of its own word beside it; as patterns."""
    patterns, text = list(map(make_pattern, terms)), simplify(text)
    place, found = 0, []
    while place < len(text):
        there = []
        for pattern in patterns:
            match = re.compile(pattern).match(text, place)
            if match is None:
                continue
            sides = [(match.start() - 1, match.start()), (match.end() - 1, match.end())]
            if not any(
                left >= 0 and right < len(text) and all(map(is_in_word, (text[left], text[right])))
                for left, right in sides
            ):
                there.append((match.end(), pattern))
        if there:
            place, pattern = max(there)
            found.append(pattern)
        else:
            place += 1
    return found


PIECES = st.lists(
    st.sampled_from(["a", "b", "ab", "B", "é", "e\u0301", "1", "机", "器", "-", "ß", "ß".upper()]),
    min_size=1,
    max_size=3,
)
TERMS = st.lists(PIECES.map("".join), min_size=1, max_size=3).map(" ".join)
TEXTS = st.lists(
    st.sampled_from(["a", "b", "ab", "B", "É", "e\u0301", "e", "1", "机", "器", "-", "ß", "ss", " ", " ", ", "]),
    max_size=12,
)


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(st.lists(TERMS, min_size=1, max_size=5), TEXTS.map("".join))
@hypothesis.example(["a", "- a"], "-a")
def test_terms_are_found_by_words(terms: list[str], text: str) -> None:
    found = [alternatives[0] for alternatives in Glossary({term: term for term in terms}).find(text)]
    first = {make_pattern(term): term for term in reversed(terms)}
    assert found == [first[pattern] for pattern in find_naively(terms, text)]


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({}, "The CAT saw two cats and a big cat.", ["cat", "big cat"]),
        ({"case_sensitive": True}, "CAT Cat cat", ["cat"]),
        ({"match": "endings"}, "Cats and a catfish, catfishes, catalogues", ["cat", "catfish", "catfish"]),
        ({"match": "endings"}, "two bigger cats", ["big cat"]),
        ({"match": "endings"}, "os osx ox", ["os"]),
        ({}, "os, os; big\n cat, big-cat", ["os", "os", "big cat", "cat"]),
    ],
)
def test_options_say_what_a_term_is(options: Any, text: str, expected: list[str]) -> None:
    terms = ["cat", "big cat", "catfish", "os"]
    found = Glossary({term: term for term in terms}, **options).find(text)
    assert [alternatives[0] for alternatives in found] == expected


@pytest.mark.parametrize(
    ("match", "terms", "text", "expected"),
    [
        ("endings", ["किताब", "कलम"], "किताबें कलमें", ["किताब", "कलम"]),  # vowel signs are marks on letters
        ("endings", ["كتاب"], "كتابٌ", ["كتاب"]),
        ("words", ["サーバー"], "サーバー1台とサーバーA。サーバー、ｻｰﾊﾞｰ", ["サーバー"] * 3),
    ],
)
def test_marks_and_signs_without_a_script(match: Any, terms: list[str], text: str, expected: list[str]) -> None:
    assert [found[0] for found in Glossary({term: term for term in terms}, match=match).find(text)] == expected


def test_a_text_s_own_words_come_before_other_forms_of_them() -> None:
    for match, language in (("endings", None), ("stems", "en")):
        if match == "stems":
            pytest.importorskip("snowballstemmer", reason="an extra of its own")
        glossary = Glossary({"cat": "Katze", "cats": "Katzen"}, match=match, language=language)  # type: ignore[arg-type]
        assert glossary.find("cats, a cat") == [("Katzen",), ("Katze",)]


def test_stems() -> None:
    pytest.importorskip("snowballstemmer", reason="an extra of its own")
    for language in ("en", "en_XX", "english", "EN-us"):
        glossary = Glossary({"city walk": "Rundgang", "fly": "Fliege"}, match="stems", language=language)
        assert glossary.find("He flies; cities walked, and flyers.") == [("Fliege",), ("Rundgang",)]
    for language in ("de", "deu_Latn", "german"):
        assert Glossary({"Haus": "house"}, match="stems", language=language).find("Hauses") == [("house",)]
    for unknown in (None, "xx"):
        with pytest.raises(
            ValueError, match=r"Stems need the source's language; it is .*must be one of ar, hy,.*german"
        ):
            Glossary({"a": "b"}, match="stems", language=unknown)


def test_a_file_has_a_term_a_line(tmp_path: Path) -> None:
    path = tmp_path / "terms.tsv"
    path.write_text("term\tBegriff\tBegriffe\t\n\nneural  network\tneuronales Netz\nTerm\tTerm\n", encoding="utf-8")
    glossary = Glossary.from_file(path)
    assert glossary.find("A neural network's terms: TERM") == [("neuronales Netz",), ("Begriff", "Begriffe", "Term")]
    assert repr(glossary) == repr(Glossary.from_file(path))
    path.write_text("term\tBegriff\nalone\n")
    with pytest.raises(ValueError, match=r"terms.tsv, line 2: 'alone' must have a term, a tab"):
        Glossary.from_file(path)
    assert repr(glossary) != repr(Glossary({"term": "Begriff"})) != repr(Glossary({"term": "Begriff"}, match="endings"))


@pytest.mark.parametrize(
    ("terms", "options", "message"),
    [
        ({" ": "a"}, {}, "term ' ' must be a text with at least one word"),
        ("terms.tsv", {}, r"The glossary is 'terms.tsv'; it must be a mapping .* Glossary.from_file reads one from"),
        ({3: "a"}, {}, "term 3 must be a text"),
        ({"a": ""}, {}, "translates 'a' by ''; it must be a text, or a list of texts"),
        ({"a": []}, {}, r"translates 'a' by \[\]"),
        ({"a": ["b", 3]}, {}, r"translates 'a' by \['b', 3\]"),
        ({"a": 3}, {}, "translates 'a' by 3"),
        ({"a": "b"}, {"match": "exact"}, "match is 'exact'; it must be one of words, endings, stems"),
    ],
)
def test_what_is_no_glossary_is_refused(terms: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Glossary(terms, **options)


# Tokens


def byte_level() -> Any:
    return VanillaTransformerTokenizer().train_new_from_iterator(
        ["some texts, of some words"] * 9, 300, show_progress=False
    )


def gpt2_like() -> Any:
    backend = Tokenizer(
        models.BPE(vocab={symbol: n for n, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def unigram() -> Any:
    pieces = ["<unk>", "</s>", "▁", *"abcxyzé'-.", "▁a", "ab", "▁ab", "▁(", '▁"', '"']
    backend = Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def word_piece() -> Any:
    pieces = ["[UNK]", "[SEP]", *"abcxyz'-.\"(", *("##" + letter for letter in "abcxyz")]
    backend = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.NFC(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", sep_token="[SEP]")


def words_only() -> Any:
    vocabulary = {word: n for n, word in enumerate(["<unk>", "xyz", "xy", "a", "b.", "("])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def marian() -> Any:
    with TemporaryDirectory() as folder:
        write_marian_vocabulary(Path(folder))
        return MarianTokenizer.from_pretrained(folder)


def fsmt() -> Any:
    pytest.importorskip("sacremoses")
    with TemporaryDirectory() as folder:
        write_fsmt_vocabulary(Path(folder))
        return FSMTTokenizer.from_pretrained(folder)


KINDS = [byte_level, gpt2_like, unigram, word_piece, words_only, make_nllb_tokenizer, fsmt]
TOKENIZERS = {kind.__name__: kind for kind in (*KINDS, marian)}
WRITTEN = [*itertools.product([kind.__name__ for kind in KINDS], ["xyz", "xy a"]), ("marian", "dog")]


def is_whole(term: str, text: str) -> bool:
    """Whether it is there as words; bytes of a character that is cut through may be letters."""
    return bool(re.search(rf"(?<![^\W_])(?<!�){term}(?![^\W_]|�)", text))


@functools.cache
def write(kind: str, term: str) -> tuple[Any, list[Phrase], list[int]]:
    """A tokenizer, the phrases of a term, and the tokens without its letters but a."""
    tokenizer = TOKENIZERS[kind]()
    phrases = TargetTerms(tokenizer, len(tokenizer) + 3, []).write([term])[term]
    letters, others = set(term) - {"a", " "}, []
    for token in sorted(get_vocabularies(tokenizer)[1].values()):
        if letters.isdisjoint(str(tokenizer.decode([token])).lower()):
            others.append(token)
    return tokenizer, phrases, others


def has_text(tokenizer: Any, token: int, word: tuple[int, ...]) -> bool:
    with_it, without = ([*word, *between, *word] for between in ([token], []))
    return bool(tokenizer.decode(with_it, skip_special_tokens=True) != tokenizer.decode(without))


def may_stand(near: TokenSet | None, token: int) -> bool:
    return near is None or bool(near.members[token])


@pytest.mark.parametrize(("kind", "term"), WRITTEN)
def test_between_the_tokens_that_may_be_beside_it_a_term_is_a_whole_word(kind: str, term: str) -> None:
    tokenizer, phrases, others = write(kind, term)
    others = [token for token in others if has_text(tokenizer, token, phrases[0].tokens)]
    counts = {True: 0, False: 0}
    for phrase, (left, right) in itertools.product(phrases, itertools.product(others, repeat=2)):
        is_there = may_stand(phrase.before, left) and may_stand(phrase.after, right)
        text = tokenizer.decode([left, *phrase.tokens, right], skip_special_tokens=True)
        assert is_there == is_whole(term, text), (text, left, phrase.tokens, right)
        counts[is_there] += 1
    assert counts[True]
    assert counts[False] or kind == "words_only"
    for near in (near for phrase in phrases for near in phrase[1:] if near is not None):
        assert not near.members[len(tokenizer) :].any()


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.data(), st.sampled_from(WRITTEN))
def test_no_other_tokens_run_into_a_term(data: Any, written: tuple[str, str]) -> None:
    tokenizer, phrases, others = write(*written)
    phrase = data.draw(st.sampled_from(phrases))
    sides = st.lists(st.sampled_from(others), min_size=2, max_size=2)
    left = data.draw(sides.filter(lambda side: may_stand(phrase.before, side[1])))
    right = data.draw(sides.filter(lambda side: may_stand(phrase.after, side[0])))
    assert is_whole(written[1], tokenizer.decode([*left, *phrase.tokens, *right], skip_special_tokens=True))


def test_ways_to_write_a_term() -> None:
    def ways(tokenizer: Any, term: str) -> set[str]:
        return {
            "".join(tokenizer.convert_ids_to_tokens(phrase.tokens))
            for phrase in TargetTerms(tokenizer, 400, []).write([term])[term]
        }

    assert ways(byte_level(), "xyz") == {"Ġxyz", "xyz"}
    assert ways(gpt2_like(), "xyz") == {"Ġxyz", "xyz"}
    assert ways(unigram(), "xyz") == {"▁xyz", "xyz"}
    assert ways(make_nllb_tokenizer(), "ab c") == {"▁ab▁c", "ab▁c"}
    assert ways(words_only(), "xy a") == {"xya"}
    terms = TargetTerms(byte_level(), 400, []).write(["概念", "C++", ".NET"])
    assert all(phrase[1:] == (None, None) for phrase in terms["概念"])  # no space says where it ends
    assert [phrase.after for phrase in terms["C++"]] == [None, None]
    assert [phrase.before for phrase in terms[".NET"]] == [None, None]
    with pytest.raises(ValueError, match="cannot write the glossary's translation 'Haus'"):
        TargetTerms(words_only(), 6, []).write(["xy", "Haus"])


# Pipelines, functions, commands


def has_words(text: str, *terms: str) -> bool:
    return all(re.search(rf"(?<!\w){re.escape(term)}(?!\w)", text) for term in terms)


TOKENIZER = VanillaTransformerTokenizer()
SOURCES = ["abc term", "a b", "", "big terms, big term; Term", "d"]
GLOSSARY = {"term": ["ab", "cde"], "big term": "fg h"}


def make_vanilla(seed_is_ignored: int = 0, **changes: Any) -> Any:
    model = make_letters_model(**changes)
    model.generation_config.max_new_tokens = 30
    return model.eval()


def check_terms(texts: list[str]) -> None:
    assert has_words(texts[0], "ab") or has_words(texts[0], "cde")
    assert has_words(texts[3], "fg h")
    assert has_words(texts[3], "ab") or has_words(texts[3], "cde")


@pytest.mark.parametrize("batch", [{}, {"batch_size": 2}, {"max_batch_tokens": 200}])
def test_the_pipeline_of_this_packages_models(batch: dict[str, int]) -> None:
    pipe: Any = pipeline("translation", model=make_vanilla(), tokenizer=TOKENIZER, device="cpu")
    assert type(pipe) is TranslationPipeline
    plain, found = (
        [each["translation_text"] for each in pipe(SOURCES, num_beams=4, **batch, **given)]
        for given in ({}, {"glossary": GLOSSARY})
    )
    check_terms(found)
    assert [found[row] for row in (1, 2, 4)] == [plain[row] for row in (1, 2, 4)]
    assert pipe(SOURCES[0], num_beams=4, glossary=GLOSSARY)[0]["translation_text"] == found[0]
    with pytest.raises(ValueError, match=r"A glossary needs beam search: .* here are num_beams=1"):
        pipe("d", num_beams=1, glossary=GLOSSARY)
    with pytest.raises(ValueError, match="must be a text"):
        pipe("d", num_beams=4, glossary={"d": ""})


def test_a_glossary_of_the_constructor_and_one_of_the_call() -> None:
    model = make_vanilla()
    pipe: Any = pipeline("translation", model=model, tokenizer=TOKENIZER, device="cpu", num_beams=4, glossary=GLOSSARY)
    plain = pipeline("translation", model=model, tokenizer=TOKENIZER, device="cpu", num_beams=4)(SOURCES)
    check_terms([each["translation_text"] for each in pipe(SOURCES)])
    assert pipe(SOURCES, glossary={}) == plain
    nothing: Any
    for nothing in ({}, Glossary({})):
        assert pipe(SOURCES[0], glossary=nothing, num_beams=1)
    assert has_words(pipe("a term", glossary=Glossary({"a": "hh"}))[0]["translation_text"], "hh")
    streamed = [each[0]["translation_text"] for each in pipe(iter(SOURCES), num_return_sequences=1)]
    assert streamed == [each["translation_text"] for each in pipe(SOURCES)]
    records = pipe(SOURCES[0], num_return_sequences=2, return_scores=True)
    assert len(records) == 2
    assert has_words(records[0]["translation_text"], "ab") or has_words(records[0]["translation_text"], "cde")


def test_terms_that_were_truncated_away_are_not_asked_for() -> None:
    model, tokenizer = make_vanilla(), copy.deepcopy(TOKENIZER)
    tokenizer.model_max_length = 8
    pipe: Any = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", num_beams=4)
    for text, is_kept in (("abcdef term", False), ("a term", True)):
        tokens = tokenizer(text, truncation=True).input_ids
        assert ("term" in tokenizer.decode(tokens)) == is_kept
        plain, found = (pipe(text, truncation=True, **given) for given in ({}, {"glossary": {"term": "hh"}}))
        assert has_words(found[0]["translation_text"], "hh") == is_kept
        assert (found == plain) != is_kept
        (found_by_function,) = translate(
            model, tokenizer, [text], glossary={"term": "hh"}, num_beams=4, max_source_length=8, progress=False
        )
        assert has_words(found_by_function, "hh") == is_kept
    # Nor is a prefix searched, which is not cut off.
    settings: Any = {"num_beams": 4, "source_prefix": "term: ", "max_source_length": 12, "progress": False}
    plain = translate(model, tokenizer, ["abcdef"], **settings)
    found = translate(model, tokenizer, ["abcdef"], **settings, glossary={"term": "hh"})
    assert plain == found


def test_the_pipeline_of_nllb_and_its_languages() -> None:
    tokenizer = make_nllb_tokenizer()
    model = make_m2m100(len(tokenizer))
    languages = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
    settings: dict[str, Any] = {**languages, "max_new_tokens": 16, "num_beams": 4}
    texts = ["a bad cab", "deed", "a bead, a face"]
    # The tokenizer has not seen its languages when the glossary is read.
    early: Any = TranslationPipeline(model, make_nllb_tokenizer(), **settings, glossary={"cab": "taxi"})
    assert has_words(early(texts[0])[0]["translation_text"], "taxi")
    pipe: Any = TranslationPipeline(model, tokenizer, **settings)
    plain = [each["translation_text"] for each in pipe(texts)]
    for batch_size in (1, 3):
        found = pipe(texts, glossary={"cab": ["kutsche", "taxi"], "face": "ge sicht"}, batch_size=batch_size)
        found = [each["translation_text"] for each in found]
        assert has_words(found[0], "taxi") or has_words(found[0], "kutsche")
        assert has_words(found[2], "ge sicht")
        assert found[1] == plain[1]
        ids = pipe(texts[0], glossary={"cab": "taxi"}, tgt_lang="fra_Latn", return_tensors=True)
        assert ids[0]["translation_token_ids"][1] == tokenizer.convert_tokens_to_ids("fra_Latn")


@pytest.mark.parametrize("kind", ["vanilla", "ensemble", "bart"])
def test_much_text(kind: str) -> None:
    model: Any = make_model() if kind == "bart" else make_vanilla()
    tokenizer: Any = make_tokenizer() if kind == "bart" else TOKENIZER
    if kind == "ensemble":
        model = Ensemble([model, make_vanilla()])
    sources = ["w1 w2 w3", "w4", "", "w5 w1 w1"] if kind == "bart" else ["abc term", "a b", "", "big term term"]
    terms: Any = {"w1": "w9", "w5 w1": "w7 w8"} if kind == "bart" else {"term": "ab", "big term": "fg h"}
    settings: dict[str, Any] = {"num_beams": 4, "progress": False, "max_new_tokens": 20}
    plain = translate(model, tokenizer, sources, **settings)
    for batch_size in (1, 4):
        found = translate(model, tokenizer, sources, glossary=terms, batch_size=batch_size, **settings)
        assert has_words(found[0], *list(terms.values())[:1])
        assert has_words(found[3], *terms.values())
        assert [found[1], found[2]] == [plain[1], ""]
    assert (
        translate(model, tokenizer, sources, glossary={"nothing of it": "w1" if kind == "bart" else "a"}, **settings)
        == plain
    )


def test_a_source_prefix_has_no_terms() -> None:
    settings: dict[str, Any] = {"num_beams": 2, "progress": False, "max_new_tokens": 9}
    model, tokenizer = make_model(), make_tokenizer()
    expected = translate(model, tokenizer, ["w3"], source_prefix="w1 ", **settings)
    assert translate(model, tokenizer, ["w3"], source_prefix="w1 ", glossary={"w1": "w9 w9 w9"}, **settings) == expected


def test_without_a_glossary_generate_is_called_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[set[str]] = []
    original = type(make_model()).generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(set(kwargs))
        return original(self, *args, **kwargs)

    model: Any = make_model()
    monkeypatch.setattr(type(model), "generate", generate)
    for terms in (None, {}, {"w8": "w9"}, {"w1": "w9"}):
        translate(model, make_tokenizer(), ["w1 w2"], num_beams=2, progress=False, glossary=terms)
    assert calls[0] == calls[1] == calls[2] == calls[3] - {"custom_generate"}
    assert "custom_generate" in calls[3]


def test_a_file_that_was_begun_with_another_glossary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("w1\nw2\n")
    model, tokenizer = make_model(), make_tokenizer()
    settings: dict[str, Any] = {"num_beams": 2, "progress": False, "window_size": 1}
    run_interrupted(1, monkeypatch, translate_file, model, tokenizer, source, target, **settings)
    with pytest.raises(FileExistsError, match="other settings"):
        translate_file(model, tokenizer, source, target, glossary=Glossary({"w1": "w3"}), **settings)
    translate_file(model, tokenizer, source, target, glossary=Glossary({"w2": "w7"}), overwrite=True, **settings)
    assert "w7" in target.read_text().splitlines()[1].split()


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    for part in (make_vanilla(), TOKENIZER):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "in").write_text("\n".join(SOURCES) + "\n")
    (tmp_path / "terms.tsv").write_text("term\tab\tcde\nBig term\tfg h\n")
    arguments = [
        "--model_name_or_path",
        str(tmp_path / "model"),
        "--input_file",
        str(tmp_path / "in"),
        "--num_beams",
        "4",
    ]
    terms = ["--glossary", str(tmp_path / "terms.tsv")]
    translate_command([*arguments, *terms])
    check_terms(capsys.readouterr().out.split("\n"))
    translate_command([*arguments, *terms, "--glossary_match", "endings", "--glossary_case", "true"])
    lines = capsys.readouterr().out.split("\n")
    assert has_words(lines[3], "ab") or has_words(lines[3], "cde")
    for wrong, message in (
        ([*terms, "--num_beams", "1"], "A glossary needs beam search"),
        (["--glossary", str(tmp_path / "none.tsv")], "none.tsv"),
        ([*terms, "--glossary_match", "stems"], "language|snowballstemmer"),
        ([*terms, "--glossary_lang", "de"], "--glossary_lang is for --glossary_match stems"),
    ):
        with pytest.raises(SystemExit):
            translate_command([*arguments, *wrong])
        assert re.search(message, capsys.readouterr().err)


def test_units_are_words_and_signs() -> None:
    assert cut("Don't pay 3.50€ for हिन्दी_x 机器") == [
        "Don",
        "'",
        "t",
        "pay",
        "3",
        ".",
        "50",
        "€",
        "for",
        "हिन्दी",
        "_",
        "x",
        "机",
        "器",
    ]


def test_a_model_that_does_not_search_with_torch_is_refused() -> None:
    class Exported:
        """Like `CTranslate2Model`, which has a search of its own."""

        config, generation_config = VanillaTransformerConfig(), None

    with pytest.raises(ValueError, match=r"A glossary needs a model that searches with torch, .* a Exported: load"):
        translate(Exported(), TOKENIZER, ["a"], glossary={"a": "b"})  # type: ignore[arg-type]
