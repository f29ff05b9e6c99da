"""benchmarks/check_glossary.py: which words become terms, what counts as there, and what the script prints."""

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from library_models import WORDS, make_marian, make_tokenizer

from vanilla_transformer.inference.translate import translate

script: Any = importlib.import_module("check_glossary")
OTHERS = dict(zip(WORDS[:6], WORDS[6:12], strict=True))


def make_pairs(count: int) -> list[tuple[str, str]]:
    generator = np.random.default_rng(0)
    sources = [list(generator.choice(list(OTHERS), size=3, replace=False)) for _ in range(count)]
    return [(" ".join(source), " ".join(OTHERS[word] for word in reversed(source))) for source in sources]


def test_terms_are_words_that_belong_together() -> None:
    pairs = make_pairs(60)
    terms = script.choose_terms(pairs[:20], pairs[20:], skip=1, most=2, seed=0)
    words = [source.split() for source, _ in pairs]
    frequent = max(OTHERS, key=[word for source in words for word in source].count)
    for source, found in zip(words, terms, strict=False):
        assert len(found) == 2  # of three words, one of which may be frequent
        assert all(OTHERS[word] == other and word in source and word != frequent for word, other in found)
    assert script.choose_terms(pairs[:20], pairs[20:], skip=1, most=2, seed=1) != terms
    assert sum(map(len, script.choose_terms(pairs[:20], pairs[20:], skip=0, most=9, seed=0))) == 60
    assert set(script.collect(terms)) == {word for found in terms for word, _ in found}


@pytest.mark.parametrize(
    ("terms", "text", "expected"),
    [
        ([("Haus",)], "Das Haus.", (1, 1)),
        ([("Haus",)], "Die Häuser, Haustüren und Wohnhaus", (0, 1)),
        ([("Haus",), ("Haus",)], "Haus und Hof", (1, 2)),
        ([("Haus",), ("Hof", "Höfe")], "Haus an Haus, Höfe-Hof", (2, 2)),
        ([], "Haus", (0, 0)),
    ],
)
def test_what_appeared_are_whole_words(terms: Any, text: str, expected: tuple[int, int]) -> None:
    assert script.count_appeared([terms], [text]) == expected


def test_all_terms_appear_in_the_translations_of_a_model_that_knows_nothing(
    main: Any, tmp_path: Path, capsys: Any
) -> None:
    model, tokenizer = make_marian(), make_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    pairs = make_pairs(40)
    for side, name in enumerate(("en", "de")):
        (tmp_path / name).write_text("\n".join(pair[side] for pair in pairs[:12]) + "\n")
        (tmp_path / f"corpus.{name}").write_text("\n".join(pair[side] for pair in pairs[12:]) + "\n")
    options = ["--model_name_or_path", tmp_path / "model", "--device", "cpu", "--num_beams", 4, "--max_new_tokens", 12]
    options += ["--pairs", tmp_path / "en", tmp_path / "de", "--corpus", tmp_path / "corpus.en", tmp_path / "corpus.de"]
    main("check_glossary")(*options, "--skip_frequent", 0, "--rounds", 1)
    out = capsys.readouterr().out
    rows = {row[0]: row[1:] for row in re.findall(r"^(own|common) +(\d+) +([\d.]+)% +([\d.]+)%", out, re.MULTILINE)}
    assert "12 pairs, 24 terms of their own" in out
    assert {name: row[1] for name, row in rows.items()} == {"own": "100.00", "common": "100.00"}
    assert int(rows["own"][0]) == 24
    assert int(rows["common"][0]) == 36  # all three words of each source
    plain = translate(
        model, tokenizer, [source for source, _ in pairs[:12]], num_beams=4, max_new_tokens=12, progress=False
    )
    wanted = [[(OTHERS[word],) for word in source.split()] for source, _ in pairs[:12]]
    appeared, count = script.count_appeared(wanted, plain)
    assert rows["common"][2] == f"{appeared / count:.2%}"[:-1]
    main("check_glossary")("--model_name_or_path", tmp_path / "model", "--pairs", tmp_path / "en", tmp_path / "fr")
    assert capsys.readouterr().out == f"Skipped, since there is no {tmp_path / 'fr'}.\n"
    with pytest.raises(SystemExit):
        main("check_glossary")("--model_name_or_path", tmp_path / "model", "--pairs", tmp_path / "en")
    assert "--pairs must name two files" in capsys.readouterr().err
