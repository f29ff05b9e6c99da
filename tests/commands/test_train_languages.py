"""One model of several languages: learned from the command line, saved, and used in every direction by everything."""

import json
import re
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from corpus_files import command_line
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, pipelines

from vanilla_transformer.commands import evaluate, train, translate
from vanilla_transformer.commands.serve import ServingArguments, load_translators
from vanilla_transformer.hub.card import build_model_card
from vanilla_transformer.tasks import record_directions
from vanilla_transformer.training.arguments import DataArguments, ModelArguments
from vanilla_transformer.training.checks import check_target_tokens
from vanilla_transformer.training.examples import load_corpora
from vanilla_transformer.training.setup import settle_directions, settle_prefix

pipeline: Any = pipelines.pipeline  # its types know only the tasks that the library has itself
pytestmark = pytest.mark.usefixtures("no_curves")

WORDS = {
    "en": ["one", "two", "three", "four", "five"],
    "de": ["eins", "zwei", "drei", "vier", "fünf"],
    "fr": ["un", "deux", "trois", "quatre", "cinq"],
}
LEARNED = [("en", "de"), ("de", "en"), ("en", "fr"), ("fr", "en")]
UNSEEN = [("de", "fr"), ("fr", "de")]
NUMBERS = [[0, 3, 4], [4], [2, 2], [4, 1, 0]]


def say(numbers: list[int], language: str) -> str:
    return " ".join(WORDS[language][number] for number in numbers)


def write_corpora(folder: Path, count: int = 300) -> dict[tuple[str, str], list[str]]:
    """Texts of numbers from English to each of the others, but none of `NUMBERS`."""
    generator = np.random.default_rng(0)
    files = {}
    for pair in (("en", "de"), ("en", "fr")):
        drawn = (generator.integers(0, 5, size=generator.integers(1, 4)).tolist() for _ in range(10 * count))
        texts = [numbers for numbers in drawn if numbers not in NUMBERS or len(numbers) == 1][:count]
        files[pair] = [str(folder / f"{'-'.join(pair)}.{language}") for language in pair]
        for path, language in zip(files[pair], pair, strict=True):
            Path(path).write_text("".join(f"{say(numbers, language)}\n" for numbers in texts), encoding="utf-8")
    return files


def make_settings(files: dict[tuple[str, str], list[str]], output_dir: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"preset": "tiny", "tokenizer_type": "wordlevel", "output_dir": str(output_dir)}
    settings |= {"lang_pairs": ["en-de", "en-fr"], "both_directions": "true"}
    settings |= {"config_overrides": "dropout=0.0,label_smoothing=0.0,normalize_before=true", "use_cpu": "true"}
    settings |= {"learning_rate": 5e-3, "warmup_steps": 20, "lr_scheduler_type": "linear", "max_steps": 300}
    settings |= {"max_source_tokens": 512, "eval_strategy": "no", "save_strategy": "no", "report_to": "none"}
    return settings | {"disable_tqdm": "true", "generation_max_length": 8}


def give(name: str, files: dict[tuple[str, str], list[str]]) -> list[str]:
    return [word for each in files.values() for word in (f"--{name}", *each)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned from English to each of two languages, and back."""
    root = tmp_path_factory.mktemp("languages")
    files = write_corpora(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vanilla_transformer.training.records.plot_learning_curves", lambda *_, **__: None)
        words = command_line(make_settings(files, root / "model"))
        train.main([*words, *give("train_file", files), *give("validation_file", files)])
    return root / "model"


def test_the_token_says_what_to_write(folder: Path) -> None:
    """Learned directions are right, and an unseen one writes the language that was asked for, mostly."""
    many = pipeline("translation", model=str(folder), src_lang="en", tgt_lang="de")
    for source, target in LEARNED:
        texts, expected = ([say(numbers, language) for numbers in NUMBERS] for language in (source, target))
        found = [each["translation_text"] for each in many(texts, src_lang=source, tgt_lang=target, batch_size=2)]
        assert found == expected, (source, target)
        named = pipeline(f"translation_{source}_to_{target}", model=str(folder))
        assert [each["translation_text"] for each in named(texts)] == expected
    words = many(say(NUMBERS[0], "de"), src_lang="de", tgt_lang="fr")[0]["translation_text"].split()
    assert words
    with pytest.raises(ValueError, match=r"translates de to en, de to fr, en to de.* not de to xx\."):
        many("one", tgt_lang="xx")
    with pytest.raises(ValueError, match=r"not de to de\."):
        many("eins", src_lang="de")
    with pytest.raises(ValueError, match=r"not it to de\."):
        pipeline("translation_it_to_de", model=str(folder))
    with pytest.raises(ValueError, match="Give src_lang and tgt_lang, such as those of en to de, en to fr"):
        pipeline("translation", model=str(folder), src_lang="en")("one")
    assert pipeline("translation", model=str(folder), tgt_lang="fr")("one")[0]["translation_text"] == "un"
    with pytest.warns(UserWarning, match="'translation_de_to_en' is used"):
        assert pipeline("translation", model=str(folder))("eins")[0]["translation_text"] == "one"


def test_the_saved_model_says_its_directions(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    assert settings.get("langs") is None
    expected = {f"translation_{source}_to_{target}": {"prefix": f"<2{target}> "} for source, target in LEARNED + UNSEEN}
    assert settings["task_specific_params"] == expected
    assert settings["custom_pipelines"].keys() == {"translation", *expected}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("<2de> one") == ["<2de>", "one"]
    card = str(build_model_card(folder))
    assert "translates between German, English and French" in card
    assert "language:\n- de\n- en\n- fr\n" in card
    assert "without training on them: German to French, French to German" in card


def test_commands_take_the_languages(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {language: [say(numbers, language) for numbers in NUMBERS] for language in WORDS}
    files = {language: tmp_path / f"test.{language}" for language in WORDS}
    for language, path in files.items():
        path.write_text("".join(f"{text}\n" for text in texts[language]), encoding="utf-8")
    arguments = {"model_name_or_path": folder, "device": "cpu", "disable_tqdm": True}
    for source, target in LEARNED:
        languages = {"source_lang": source, "target_lang": target}
        scored = tmp_path / f"{source}-{target}"
        options = {"test_file": [files[source], files[target]], "output_dir": scored, "ter": False}
        evaluate.main(command_line(arguments | languages | options))
        assert json.loads((scored / "metrics.json").read_text())["exact_match"] == 100
        output = tmp_path / f"{source}-{target}.txt"
        translate.main(command_line(arguments | languages | {"input_file": files[source], "output_file": output}))
        assert output.read_text(encoding="utf-8").splitlines() == texts[target]
    shown = tmp_path / "shown"
    shutil.copytree(folder, shown, ignore=shutil.ignore_patterns("checkpoint-*"))
    for pair in LEARNED[1:]:
        shutil.copytree(tmp_path / "-".join(pair), shown / f"test.{'-'.join(pair)}")
    card = str(build_model_card(shown))
    assert "name: test, de to en" in card
    for pair in LEARNED[1:]:
        assert f"| test, {pair[0]} to {pair[1]} | 4 |" in card
    assert 'src_lang="de", tgt_lang="en"' in card
    assert say(NUMBERS[0], "de") in card
    for languages, message in (
        ({}, "translates de to en, .*: name the languages with --source_lang and --target_lang"),
        ({"source_lang": "en", "target_lang": "it"}, "translates de to en, .* not en to it"),
    ):
        with pytest.raises(SystemExit):
            translate.main(
                command_line(arguments | languages | {"input_file": files["en"], "output_file": tmp_path / "x"})
            )
        assert re.search(message, capsys.readouterr().err)


def test_a_server_has_all_directions_in_one_batch(folder: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the server's metrics need it")
    from vanilla_transformer.apps.server import Metrics

    metrics = Metrics()
    loaded = load_translators(ServingArguments([str(folder)], max_wait=200.0, device="cpu"), metrics)  # type: ignore[arg-type]
    try:
        assert set(loaded) == {*LEARNED, *UNSEEN}
        (translator,) = {direction.translator for direction in loaded.values()}
        cast(Any, translator)._answered = 4  # as if so many had just been: they are waited for
        futures = {pair: loaded[pair].submit([say(NUMBERS[0], pair[0]), " "]) for pair in LEARNED}
        for pair, future in futures.items():
            assert future.result(60) == [[say(NUMBERS[0], pair[1])], [""]]
            assert loaded[pair].pending == 0
        names = {"source": "de,en,fr", "target": "en,fr,de"}  # a configuration is saved in alphabetical order
        assert metrics.registry.get_sample_value("translated_sentences_total", names) == 8
        assert (
            metrics.registry.get_sample_value("batch_sentences_bucket", {**names, "le": "1.0"}) == 4
        )  # the empty ones
        assert metrics.registry.get_sample_value("batch_sentences_count", names) == 5
    finally:
        next(iter(loaded.values())).stop()
    with pytest.raises(ValueError, match="not en to it"):
        load_translators(ServingArguments([str(folder)], source_lang="en", target_lang="it"), metrics)  # type: ignore[arg-type]


def test_corpora_say_their_directions(tmp_path: Path) -> None:
    """Each pair of lines is there once in each direction, with the token of its target."""
    files = write_corpora(tmp_path, count=4)
    arguments = DataArguments(
        train_file=list(files.values()),  # type: ignore[arg-type]
        validation_file=files["en", "de"],
        lang_pairs=["en-de", "en-fr"],
        both_directions=True,
        dataset_weights=[1, 2],
    )
    directions = settle_directions(ModelArguments(preset="tiny"), arguments)
    assert list(directions) == LEARNED + UNSEEN
    corpora = load_corpora(arguments, directions=directions)
    lines = {pair: [Path(path).read_text().splitlines() for path in paths] for pair, paths in files.items()}
    both = {pair: list(zip(*lines[pair], strict=True)) for pair in files}

    def point(pair: tuple[str, str], times: int = 1) -> list[tuple[str, str]]:
        forwards = [(f"<2{pair[1]}> {source}", target) for source, target in both[pair]]
        backwards = [(f"<2{pair[0]}> {target}", source) for source, target in both[pair]]
        return (forwards + backwards) * times

    pairs = list(zip(corpora["train"]["source"], corpora["train"]["target"], strict=True))
    assert sorted(pairs) == sorted(point(("en", "de")) + point(("en", "fr"), times=2))
    found = corpora["validation"]
    assert list(zip(found["source"], found["target"], strict=True)) == point(("en", "de"))


@pytest.mark.parametrize("both", [True, False])
def test_files_for_validation_go_with_the_files_for_training(both: bool, tmp_path: Path) -> None:
    """A dataset's languages are the first; where there are no files for training, files validate it."""
    Dataset.from_list([{"en": "one", "de": "eins"}]).save_to_disk(tmp_path / "saved")
    files = write_corpora(tmp_path, count=4)["en", "fr"]
    arguments = DataArguments(
        dataset_name=str(tmp_path / "saved"),
        train_file=files if both else None,
        validation_file=files,
        lang_pairs=["en-de", "en-fr"] if both else ["en-fr"],
    )
    if not both:
        Dataset.from_list([{"en": "one", "fr": "un"}]).save_to_disk(tmp_path / "saved")
    corpora = load_corpora(arguments, directions=settle_directions(ModelArguments(preset="tiny"), arguments))
    lines = Path(files[0]).read_text().splitlines()
    assert corpora["validation"]["source"][:] == [f"<2fr> {line}" for line in lines]


def test_a_table_of_several_languages_is_read_by_their_names(tmp_path: Path) -> None:
    rows = [{language: say(numbers, language) for language in WORDS} for numbers in NUMBERS]
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pairs = list(permutations(WORDS, 2))
    arguments = DataArguments(
        train_file=[[str(path)]] * 6,  # type: ignore[list-item]
        lang_pairs=["-".join(pair) for pair in pairs],
        streaming=True,
        streaming_window=12,
        dataset_weights=[1.0] * 6,
    )
    streams = load_corpora(arguments, directions=settle_directions(ModelArguments(preset="tiny"), arguments))["train"]
    for (source, target), stream in zip(pairs, streams.streams, strict=True):
        assert list(stream) == [{"source": f"<2{target}> {row[source]}", "target": row[target]} for row in rows]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lang_pairs": ["en-de"]}, r"lang_pairs has 1 pair\(s\), and there are 2 corpora"),
        ({"lang_pairs": ["en-de", "en"]}, "lang_pairs has 'en': must be of the form en-de"),
        ({"lang_pairs": ["en-de", "en-pt-BR"]}, "lang_pairs has 'en-pt-BR': must be of the form en-de, or pt_BR-de"),
        ({"lang_pairs": ["en-de", "fr-fr"]}, "lang_pairs has 'fr-fr': the languages must differ"),
        ({"source_lang": "en", "target_lang": "de"}, "Give lang_pairs or source_lang and target_lang, not both"),
        ({"lang_pairs": None, "both_directions": True}, "both_directions needs lang_pairs"),
        ({"task": "text2text"}, "task=text2text: lang_pairs belongs to the task translation"),
        ({"validation_file": [["a", "b"]] * 3}, "more corpora for validation than lang_pairs"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"train_file": [["a.en", "a.de"], ["b.en", "b.fr"]], "lang_pairs": ["en-de", "en-fr"]}
    with pytest.raises(ValueError, match=message):
        DataArguments(**{**settings, **changes})


def test_further_training(folder: Path, tmp_path: Path) -> None:
    """A pair of the model's keeps its token and the other pairs; a tokenizer without the tokens is refused."""
    files = write_corpora(tmp_path, count=20)
    words = make_settings(files, tmp_path / "further") | {"max_steps": 2, "model_name_or_path": folder}
    own = {"lang_pairs", "both_directions", "preset", "tokenizer_type", "config_overrides"}
    words = {name: value for name, value in words.items() if name not in own}
    pair = {"source_lang": "de", "target_lang": "en", "train_file": files["en", "de"][::-1]}
    train.main(command_line(words | pair))
    configs = [AutoConfig.from_pretrained(path) for path in (folder, tmp_path / "further")]
    assert configs[0].task_specific_params == configs[1].task_specific_params
    assert configs[1].langs is None
    with pytest.raises(SystemExit):
        train.main(command_line(words | pair | {"source_lang": "it", "output_dir": tmp_path / "other"}))
    with pytest.raises(ValueError, match=r"en to de, .*: name the languages with source_lang and target_lang"):
        settle_prefix(ModelArguments(model_name_or_path=str(folder)), DataArguments(train_file=["a.de", "a.en"]))

    # What stands before a source is that of its pair alone.
    one = tmp_path / "one"
    train.main(command_line(words | pair | {"max_steps": 1, "output_dir": one} | {"model_name_or_path": folder}))
    config = AutoConfig.from_pretrained(one)
    record_directions(config, {("de", "en"): "<2en> "})
    config.save_pretrained(one)
    arguments = DataArguments(train_file=["a.de", "a.en"], lang_pairs=["de-en"])
    assert settle_prefix(ModelArguments(model_name_or_path=str(one)), arguments) == ""

    arguments = DataArguments(train_file=["it.it", "it.en"], lang_pairs=["it-en"], both_directions=True)
    directions = settle_directions(ModelArguments(model_name_or_path=str(folder)), arguments)
    assert directions["it", "en"] == "<2en> "
    assert directions["fr", "de"] == "<2de> "
    with pytest.raises(ValueError, match="does not have <2it> as a token"):
        check_target_tokens(AutoTokenizer.from_pretrained(folder), directions)


def test_ctranslate2_computes_it_alike(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2", reason="vanilla-transformer[export] brings it")
    shutil.copytree(folder, tmp_path / "model")
    texts = [say(numbers, "fr") for numbers in NUMBERS]
    fast = pipeline("translation_fr_to_en", model=str(tmp_path / "model"), compute_type="default")
    assert [each["translation_text"] for each in fast(texts)] == [say(numbers, "en") for numbers in NUMBERS]
    assert fast(say(NUMBERS[0], "en"), src_lang="en", tgt_lang="de")[0]["translation_text"] == say(NUMBERS[0], "de")
