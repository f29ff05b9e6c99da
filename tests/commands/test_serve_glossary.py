"""A server's glossary: whoever starts it names the file, and all clients' translations have its terms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from letters import TOKENIZER, make_letters_model

from vanilla_transformer.apps.server import Metrics
from vanilla_transformer.commands.serve import ServingArguments, load_translators


def test_the_terms_of_the_file_are_in_every_answer(tmp_path: Path) -> None:
    model = make_letters_model(langs=["en", "de"])
    model.generation_config.max_new_tokens = 20
    for part in (model, TOKENIZER):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "terms.tsv").write_text("term\tcde\nbig term\tfg h\n")
    names = [str(tmp_path / "model")]
    found = {}
    for glossary in (str(tmp_path / "terms.tsv"), None):
        arguments = ServingArguments(names, glossary=glossary, num_beams=4, device="cpu")  # type: ignore[arg-type]
        (translator,) = load_translators(arguments, Metrics()).values()
        try:
            found[glossary] = translator.submit(["a term", "d", "big terms, big term"]).result(timeout=60)
        finally:
            translator.stop()
    with_it, without = (list(map(str, texts)) for texts in found.values())
    assert with_it[1] == without[1]
    for text, term in zip(with_it[::2], ("cde", "fg h"), strict=True):
        assert re.search(rf"(?<!\w){term}(?!\w)", text)
    model.config.langs = None
    model.config.task_specific_params = {f"translation_{name}": {"prefix": "a"} for name in ("de_to_en", "en_to_de")}
    model.save_pretrained(tmp_path / "model")
    both = ServingArguments(names, glossary=str(tmp_path / "terms.tsv"), num_beams=4, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one pair of languages: give --source_lang and --target_lang .*de to en"):
        load_translators(both, Metrics())
    with pytest.raises(ValueError, match="--glossary is for one model"):
        ServingArguments(names * 2, glossary="terms.tsv")  # type: ignore[arg-type]
