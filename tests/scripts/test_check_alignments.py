"""benchmarks/check_alignments.py: IBM model 1 against the sum over all alignments, and what the script prints."""

import importlib
import itertools
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from library_models import WORDS, make_marian, make_tokenizer

from vanilla_transformer.visualization.attention import align_lines

LINES = ["das Haus | the house", "das Buch | the book", "ein Buch | a book", "das ist ein Haus | this is a house"]
PAIRS = [tuple(side.split() for side in line.split("|")) for line in LINES]
OTHERS = dict(zip(WORDS[:6], WORDS[6:12], strict=True))


script: Any = importlib.import_module("check_alignments")


def learn_naively(iterations: int) -> dict[tuple[str, str], float]:
    """Expectation maximization by its definition: each alignment of a pair counts as often as it is probable."""
    sources, targets = ({word for pair in PAIRS for word in pair[side]} for side in (0, 1))
    table = {key: 1 / len(targets) for key in itertools.product(sources, targets)}
    for _ in range(iterations):
        counts: dict[tuple[str, str], float] = defaultdict(float)
        for source, target in PAIRS:
            alignments = [
                list(zip(choice, target, strict=True)) for choice in itertools.product(source, repeat=len(target))
            ]
            weights = [math.prod(table[link] for link in alignment) for alignment in alignments]
            for alignment, weight in zip(alignments, weights, strict=True):
                for link in alignment:
                    counts[link] += weight / sum(weights)
        totals = {word: sum(counts[word, other] for other in targets) for word in sources}
        table = {(word, other): counts[word, other] / totals[word] for word, other in table}
    return table


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_ibm_model_1_is_the_sum_over_all_alignments(iterations: int) -> None:
    found, expected = script.learn(PAIRS, iterations), learn_naively(iterations)
    for (source, target), probability in expected.items():
        assert found[source].get(target, 0.0) == pytest.approx(probability)


def test_a_layer_is_compared_with_the_obvious_links(main: Any, tmp_path: Path, capsys: Any) -> None:
    model, tokenizer = make_marian(decoder_layers=2), make_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    generator = np.random.default_rng(0)
    sources = [list(generator.choice(list(OTHERS), size=3, replace=False)) for _ in range(60)]
    targets = [[OTHERS[word] for word in reversed(source)] for source in sources]
    texts = [(" ".join(source), " ".join(target)) for source, target in zip(sources, targets, strict=True)]
    for name, lines in (("en", [en for en, _ in texts]), ("de", [de for _, de in texts])):
        (tmp_path / name).write_text("\n".join([*lines[:20], ""]) + "\n")  # and an empty pair
        (tmp_path / f"corpus.{name}").write_text("\n".join(lines[20:]) + "\n")
    files = {"--pairs": ["en", "de"], "--corpus": ["corpus.en", "corpus.de"]}
    options = [word for option, names in files.items() for word in (option, *(tmp_path / name for name in names))]
    main("check_alignments")("--model_name_or_path", tmp_path / "model", "--device", "cpu", *options)
    out = capsys.readouterr().out
    assert "IBM model 1 has 60 links in 21 pairs." in out
    obvious = {(0, 2), (1, 1), (2, 0)}
    printed = dict(re.findall(r"^(\w+) +([\d.]+% +[\d.]+%)$", out, re.MULTILINE))
    for name, layer in (("0", 0), ("1", 1), ("mean", None)):
        found = list(align_lines(model, tokenizer, texts[:20], layer=layer, progress=False))
        hits = sum(len(obvious & set(alignment)) for alignment in found)
        assert 0 < hits < 60
        shares = [f"{hits / sum(map(len, found)):.1%}", f"{hits / 60:.1%}"]
        assert printed.pop(name).split() == shares
    assert not printed
