"""`vanilla-transformer translate`: options that would be without effect are refused before a model is loaded."""

from typing import Any

import pytest

from vanilla_transformer.commands.translate import TranslationArguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_file": "b"}, "--output_file needs --input_file; to keep the translation of stdin, redirect stdout"),
        ({"source_column": "en"}, "--source_column needs --input_file"),
        ({"input_file": "a.tsv", "target_column": "de"}, "--target_column needs --output_file"),
        ({"input_file": "a", "overwrite": True, "parts_dir": "p"}, "--overwrite and --parts_dir need --output_file"),
        ({"input_file": "a", "output_file": "b", "ray_actors": 4}, "--ray_actors needs --ray"),
        ({"input_file": "a", "output_file": "x/../g.tsv", "glossary": "g.tsv"}, "the output file is the glossary"),
        ({"glossary_match": "stems", "glossary_case": True}, "--glossary_case and --glossary_match need --glossary"),
    ],
    ids=str,
)
def test_options_that_need_another(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TranslationArguments(["model"], **options)  # type: ignore[arg-type]


def test_options_that_have_it() -> None:
    files = {"input_file": "a.tsv", "output_file": "b"}
    options: dict[str, Any] = {"source_column": "en", "target_column": "de", "ray_actors": 4, "ray_gpus": 0.5}
    assert TranslationArguments(["model"], **files, ray=True, **options).ray_gpus == 0.5  # type: ignore[arg-type]
