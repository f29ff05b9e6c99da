"""Batch translation, checked against one call of `generate` per sentence; and scripts/translate.py."""

import gzip
import io
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets.utils.tqdm import are_progress_bars_disabled
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import TOKENIZER as LETTERS
from letters import make_letters_model
from library_models import make_t5
from tiny_seq2seq import BROKEN_WORD, MAX_TOKENS, WORDS, make_model, make_tokenizer
from tiny_translations import (
    MODEL,
    TOKENIZER,
    expected_translation,
    interrupt_after,
    random_sentences,
    save_model,
    translate_alone,
    write_sources,
)
from transformers import NllbTokenizer, PreTrainedTokenizerFast, pipelines
from transformers.utils import logging as logging_of_transformers

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.apps.batches import find_max_tokens
from vanilla_transformer.inference.arguments import InferenceArguments
from vanilla_transformer.inference.files import describe_settings
from vanilla_transformer.inference.loading import load_model_and_tokenizer, set_languages
from vanilla_transformer.inference.translate import (
    Translation,
    find_length_settings,
    translate,
    translate_lines,
    translate_n_best,
)

REPOSITORY = Path(__file__).parents[2]
sentence_lists = st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), max_size=12)


@pytest.mark.parametrize("generate_kwargs", [{}, {"num_beams": 3}, {"max_new_tokens": 3}], ids=str)
def test_translate_equals_one_call_of_generate_per_sentence(generate_kwargs: dict[str, Any]) -> None:
    sentences = random_sentences(40)
    expected = [translate_alone(sentence, **generate_kwargs) for sentence in sentences]
    assert len(set(expected)) > 10, "the oracle must tell sentences apart"
    assert translate(MODEL, TOKENIZER, sentences, batch_size=7, progress=False, **generate_kwargs) == expected


@settings(max_examples=12)
@given(
    sentences=sentence_lists,
    batch_size=st.none() | st.integers(1, 5),
    max_batch_tokens=st.none() | st.integers(1, 99),
    window_size=st.integers(1, 6),
)
def test_every_input_has_one_output_in_order(
    sentences: list[str], batch_size: int | None, max_batch_tokens: int | None, window_size: int
) -> None:
    expected = [translate_alone(sentence, max_new_tokens=4) for sentence in sentences]
    options: dict[str, Any] = {"batch_size": batch_size, "max_batch_tokens": max_batch_tokens}
    options |= {"progress": False, "max_new_tokens": 4}
    assert translate(MODEL, TOKENIZER, sentences, **options) == expected
    lines = (sentence + "\n" for sentence in sentences)
    assert list(translate_lines(MODEL, TOKENIZER, lines, window_size=window_size, **options)) == expected


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shape of what `generate` has been given, call by call."""
    found: list[tuple[int, int]] = []
    generate = MODEL.generate

    def recorded(**inputs: Any) -> torch.Tensor:
        found.append(tuple(inputs["input_ids"].shape))
        return generate(**inputs)

    monkeypatch.setattr(MODEL, "generate", recorded)
    return found


def test_batches_are_filled_with_tokens_times_beams(shapes: list[tuple[int, int]]) -> None:
    sentences = [" ".join(WORDS[:length]) for length in (19, 7, 19, 23, 7, 19, 7, 7, 7)]

    def shapes_of(**options: Any) -> list[tuple[int, int]]:
        shapes.clear()
        translate(MODEL, TOKENIZER, sentences, progress=False, **options)
        return list(shapes)

    # Words and </s>; fewer than 16 tokens count as 16.
    assert shapes_of(max_batch_tokens=64) == [(2, 24), (3, 20), (4, 8)]
    assert shapes_of(max_batch_tokens=64, num_beams=2) == [(1, 24), (1, 20), (1, 20), (1, 20), (2, 8), (2, 8), (1, 8)]
    assert shapes_of(max_batch_tokens=64, batch_size=2) == [(2, 24), (2, 20), (2, 8), (2, 8), (1, 8)]
    assert shapes_of(batch_size=6) == [(6, 24), (3, 8)]
    assert shapes_of() == [(9, 24)]
    assert shapes_of(max_batch_tokens=1)[0] == (1, 24), "the longest sentence is translated whatever the limit"
    sentences *= 20
    assert shapes_of(max_new_tokens=1)[0] == (4096 // 24, 24), "the default for a model of the library"


def test_text_without_words_gives_no_translation_and_has_no_prefix() -> None:
    outputs = translate(MODEL, TOKENIZER, ["", "w1 w2", " \t", "\u3000"], progress=False)
    assert outputs == ["", translate_alone("w1 w2"), "", ""]
    assert translate(MODEL, TOKENIZER, [], progress=False) == []
    outputs = translate(MODEL, TOKENIZER, ["w1", ""], source_prefix="w5 w6 ", progress=False)
    assert outputs == [translate_alone("w5 w6 w1"), ""]


def test_n_best_are_the_beams_of_generate_best_first() -> None:
    sentences = ["w1 w2 w3", "", "w7"]
    options: dict[str, Any] = {"num_beams": 3, "batch_size": 1, "progress": False}
    n_best = translate_n_best(MODEL, TOKENIZER, sentences, num_return_sequences=3, **options)
    for sentence, translations in zip(sentences, n_best, strict=True):
        expected, scores = ["", "", ""], [0.0, 0.0, 0.0]
        if sentence:
            search: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "output_scores": True}
            output = MODEL.generate(**TOKENIZER(sentence, return_tensors="pt"), **search, return_dict_in_generate=True)
            expected = TOKENIZER.batch_decode(output.sequences, skip_special_tokens=True)
            scores = output.sequences_scores.tolist()
        assert [translation.text for translation in translations] == expected
        assert [translation.score for translation in translations] == pytest.approx(scores, abs=1e-5)
    assert [best.text for best, *_ in n_best] == translate(MODEL, TOKENIZER, sentences, num_beams=3, progress=False)
    # As lines they have number, score and translation.
    numbered = [(number, *best) for number, translations in enumerate(n_best, start=5) for best in translations]
    expected = [f"{number}\t{score:.4f}\t{text}" for number, text, score in numbered]
    lines = [sentence + "\n" for sentence in sentences]
    assert list(translate_lines(MODEL, TOKENIZER, lines, n_best=3, first_line=5, **options)) == expected


def test_samples_have_no_scores() -> None:
    (samples,) = translate_n_best(MODEL, TOKENIZER, ["w1"], num_return_sequences=4, do_sample=True, progress=False)
    assert len(set(samples)) > 1
    assert {sample.score for sample in samples} == {None}
    assert translate_n_best(MODEL, TOKENIZER, [" "], num_return_sequences=1, progress=False) == [[Translation("")]]


def test_overlong_sources_are_truncated_with_a_warning_that_names_the_line(caplog: pytest.LogCaptureFixture) -> None:
    long, longest = " ".join(WORDS[:30]), " ".join(WORDS[:40])
    expected = [translate_alone(" ".join(WORDS[: MAX_TOKENS - 1]))] * 2
    outputs = translate(MODEL, TOKENIZER, ["w1", long, longest], progress=False)
    assert outputs[1:] == expected
    assert [record.getMessage() for record in caplog.records] == [
        f"source line 2: truncated to {MAX_TOKENS} of its 31 tokens",
        f"source line 3: truncated to {MAX_TOKENS} of its 41 tokens",
    ]
    caplog.clear()
    lines = ["w1\n", "\n", "w1 w2 w3 w4\r\n"]
    found = list(translate_lines(MODEL, TOKENIZER, lines, window_size=2, max_source_length=3, progress=False))
    assert found == [translate_alone("w1"), "", translate_alone("w1 w2")]
    assert caplog.messages == ["source line 3: truncated to 3 of its 5 tokens"]
    caplog.clear()
    unlimited = make_tokenizer()
    unlimited.model_max_length = int(1e30)
    assert translate(MODEL, unlimited, [long], progress=False) == [translate_alone(long)]
    assert not caplog.records


def test_learned_positions_limit_sources_too(caplog: pytest.LogCaptureFixture) -> None:
    model = make_letters_model(position_embedding_type="learned", max_position_embeddings=9, position_offset=2)
    model.generation_config.max_new_tokens = 5
    assert LETTERS.model_max_length > 9
    found = translate(model, LETTERS, ["abcdefgh", "abcde"], progress=False)
    assert found[0] == found[1]
    assert caplog.messages == ["source line 1: truncated to 7 of its 10 tokens"]
    pipe = cast(Any, pipelines.pipeline)("translation", model=model, tokenizer=LETTERS, device="cpu")
    assert pipe("abcdefgh", truncation=True)[0]["translation_text"] == found[0]


def test_training_flags_are_restored_and_training_goes_on() -> None:
    model: Any = make_model()
    model.train()
    model.model.encoder.eval()
    flags = [module.training for module in model.modules()]
    assert translate(model, TOKENIZER, ["w1 w2"], progress=False) == [translate_alone("w1 w2")]
    assert [module.training for module in model.modules()] == flags
    stream = translate_lines(model, TOKENIZER, ["w1", "w2"], window_size=1, progress=False)
    next(stream)
    assert [module.training for module in model.modules()] == flags, "nor does an unfinished stream change them"
    assert not torch.is_inference_mode_enabled()
    model(input_ids=torch.tensor([[4, 2]]), labels=torch.tensor([[5, 2]])).loss.backward()
    assert model.model.shared.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="num_return_sequences"):
        translate(model, TOKENIZER, ["w1"], progress=False, num_return_sequences=2)


@pytest.mark.parametrize("n_best", [None, 2])
def test_reading_runs_ahead_of_writing_by_no_more_than_the_window(n_best: int | None) -> None:
    sentences = random_sentences(200)
    read = written = most_ahead = 0

    def lines() -> Iterator[str]:
        nonlocal read
        for sentence in sentences:
            read += 1
            yield sentence + "\n"

    options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 1, "max_batch_tokens": 400, "progress": False}
    for _ in translate_lines(MODEL, TOKENIZER, lines(), n_best=n_best, window_size=30, **options):
        most_ahead = max(most_ahead, read - written // (n_best or 1))
        written += 1
    assert written == 200 * (n_best or 1)
    assert most_ahead == 30


def test_a_line_break_in_a_translation_does_not_break_the_line() -> None:
    force: dict[str, Any] = {"forced_bos_token_id": TOKENIZER.convert_tokens_to_ids(BROKEN_WORD), "progress": False}
    (raw,) = translate(MODEL, TOKENIZER, ["w1"], **force)
    assert "\n" in raw
    assert list(translate_lines(MODEL, TOKENIZER, ["w1\n"], **force)) == [raw.replace("\n", " ")]


def test_the_bar_is_on_stderr_and_counts_all_sentences(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True, raising=False)
    translate(MODEL, TOKENIZER, ["w1", "", "w2 w3"], progress="test set")
    out, err = capfd.readouterr()
    assert out == ""
    assert "test set: 100%" in err
    assert "3/3" in err
    translate(MODEL, TOKENIZER, ["w1"], progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens is 0; it must be at least 1"),
        ({"n_best": 0}, "n_best is 0; it must be at least 1"),
        ({"max_source_length": 1}, "maximum length is 1 tokens; it must be at least 2"),
        ({"window_size": 0}, "window_size is 0"),
        ({"n_best": 1}, "n_best is 1 and num_beams is 1; n_best needs beam search"),
        ({"n_best": 3, "num_beams": 2}, "n_best is 3 and num_beams is 2; n_best needs beam search"),
        ({"n_best": 3, "do_sample": True}, "n_best is 3 and num_beams is 1; n_best needs beam search"),
    ],
    ids=str,
)
def test_illegal_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(translate_lines(MODEL, TOKENIZER, ["w1"], progress=False, **options))
    with pytest.raises(TypeError, match="one string"):
        translate(MODEL, TOKENIZER, "w1 w2", progress=False)


def test_languages_of_a_multilingual_tokenizer() -> None:
    tokenizer = NllbTokenizer(vocab={"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁w": 4}, merges=[])
    arguments = set_languages(tokenizer, source_lang="deu_Latn", target_lang="fra_Latn")
    assert arguments == {"forced_bos_token_id": tokenizer.convert_tokens_to_ids("fra_Latn")}
    assert tokenizer.convert_ids_to_tokens(tokenizer("w").input_ids)[0] == "deu_Latn"
    assert tokenizer.convert_ids_to_tokens(tokenizer(text_target="w").input_ids)[0] == "fra_Latn"
    for unknown in ("klingon", "▁w"):  # which is a piece of words
        with pytest.raises(ValueError, match=f"target_lang is '{unknown}'"):
            set_languages(tokenizer, source_lang="deu_Latn", target_lang=unknown)
    settings = describe_settings(MODEL, tokenizer, {})
    set_languages(tokenizer, source_lang="eng_Latn", target_lang="fra_Latn")
    assert describe_settings(MODEL, tokenizer, {}) != settings, "what was begun is not gone on with"
    with pytest.raises(ValueError, match="one fixed pair"):
        set_languages(TOKENIZER, source_lang="en", target_lang="de")


def test_a_model_of_many_languages_is_told_which() -> None:
    tokenizer = NllbTokenizer(vocab={"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁w": 4}, merges=[])
    arguments, model = InferenceArguments("model"), make_model()
    with pytest.raises(ValueError, match=r"knows many languages: name .* with --source_lang and --target_lang"):
        arguments.collect_settings(model, tokenizer)
    model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids("fra_Latn")
    assert arguments.collect_settings(model, tokenizer) == {}, "it was trained for this language"


def test_a_model_of_several_pairs_is_told_which() -> None:
    model = make_t5()
    prefixes = {"de": "translate English to German: ", "fr": "translate English to French: "}
    model.config.task_specific_params = {f"translation_en_to_{to}": {"prefix": text} for to, text in prefixes.items()}
    for to, prefix in prefixes.items():
        assert InferenceArguments("model", source_lang="en", target_lang=to).find_prefix(model) == prefix
    langs: Any
    for langs in ({}, {"source_lang": "en", "target_lang": "es"}):
        with pytest.raises(ValueError, match=r"en to de, en to fr: name the languages .* or .* --source_prefix"):
            InferenceArguments("model", **langs).find_prefix(model)
    assert InferenceArguments("model", source_prefix="").find_prefix(model) == ""
    del model.config.task_specific_params["translation_en_to_fr"]
    assert InferenceArguments("model").find_prefix(model) == prefixes["de"]
    with pytest.raises(ValueError, match="translates en to de: name the languages"):
        InferenceArguments("model", source_lang="en", target_lang="fr").find_prefix(model)


def test_a_model_of_the_library_without_a_limit_stops_neither_at_20_tokens_nor_behind_its_positions() -> None:
    model = make_model()
    model.generation_config.max_new_tokens = None
    model.final_logits_bias[:, model.config.eos_token_id] = -1e9  # so that nothing else ends a translation
    number = partial(translate, model, TOKENIZER, ["w1 w2"], progress=False)
    assert len(number()[0].split()) == model.config.max_position_embeddings - 1
    assert len(number(max_length=20)[0].split()) == 19, "of which the first begins the translation"
    assert len(number(max_new_tokens=3)[0].split()) == 3
    model.generation_config.max_length = 8
    assert len(number()[0].split()) == 7
    assert find_length_settings(make_t5(), {}) == {"max_new_tokens": 256}
    assert find_length_settings(make_letters_model(), {}) == {}, "whose limit is the length of the source + 50"


def test_a_source_is_cut_at_the_positions_of_a_model_of_the_library(caplog: Any) -> None:
    positions = MODEL.config.max_position_embeddings
    found = translate(MODEL, TOKENIZER, ["w3 " * 40], max_source_length=100, progress=False)
    assert found == [translate_alone("w3 " * (positions - 1))]
    assert f"source line 1: truncated to {positions} of its 41 tokens" in caplog.messages
    assert find_max_tokens(MODEL, TOKENIZER, 100) == positions, "of a sentence that the server takes"


# The script


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def source_file(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "source.txt")


@pytest.fixture
def run(main: Any) -> Callable[..., None]:
    """scripts/translate.py's main."""
    return cast(Callable[..., None], main("translate"))


@pytest.fixture
def refuse(run: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the script says to arguments that it refuses."""

    def say(*arguments: str) -> str:
        with pytest.raises(SystemExit) as refusal:
            run(*arguments)
        assert refusal.value.code == 2
        return capsys.readouterr().err

    return say


def test_loading_chooses_dtype_and_device(model_folder: str) -> None:
    model, tokenizer = load_model_and_tokenizer(model_folder, device="cpu", dtype="bfloat16")
    assert (model.dtype, model.device.type, model.training) == (torch.bfloat16, "cpu", False)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    with pytest.raises(ValueError, match="dtype is 'float13'"):
        load_model_and_tokenizer(model_folder, dtype="float13")


def test_script_from_stdin_to_stdout(run: Any, model_folder: str, monkeypatch: Any, capsys: Any) -> None:
    # A byte order mark, a Windows line end, an empty line, a last line without its end, a locale that is not UTF-8.
    text = "\ufeffw1 w2\r\n\nw3 \u2028 w4\nw5"
    locale: dict[str, Any] = {"encoding": "ascii", "errors": "surrogateescape"}
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), **locale))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, **locale))
    run("--model_name_or_path", model_folder, "--device=cpu")
    expected = [translate_alone(line) for line in ("w1 w2", "", "w3 w4", "w5")]
    assert written.getvalue().decode() == "".join(line + "\n" for line in expected)
    assert "line" not in capsys.readouterr().err, "a bar is for a terminal"


def test_script_from_file_to_file(run: Any, refuse: Any, model_folder: str, tmp_path: Path, capsys: Any) -> None:
    source, output = tmp_path / "source.txt.gz", tmp_path / "output.txt"
    sentences = random_sentences(5)
    with gzip.open(source, "wt", encoding="utf-8") as file:
        file.write("\n".join(sentences) + "\n")
    arguments = ["--model_name_or_path", model_folder, "--device", "cpu", "--input_file", str(source), "--num_beams=2"]
    expected = [translate_alone(sentence, num_beams=2) for sentence in sentences]
    run(*arguments, "--output_file", str(output), "--batch_size", "2")
    assert output.read_text(encoding="utf-8").splitlines() == expected
    assert "output.txt exists" in refuse(*arguments, "--output_file", str(output))
    run(*arguments, "--disable_tqdm", "--max_new_tokens", "2", "--max_batch_tokens", "50")
    shorter = [translate_alone(sentence, num_beams=2, max_new_tokens=2) for sentence in sentences]
    assert capsys.readouterr().out.splitlines() == shorter
    run(*arguments, "--disable_tqdm", "--n_best", "2")
    fields = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [number for number, _, _ in fields] == [str(number) for number in range(1, 6) for _ in range(2)]
    assert [text for _, _, text in fields[::2]] == expected


def test_an_interrupted_script_says_how_to_go_on(
    run: Any, model_folder: str, source_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    output = source_file.with_name("output.txt")
    arguments = ["--model_name_or_path", model_folder, "--device=cpu", f"--input_file={source_file}", "--window_size=2"]
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        with pytest.raises(SystemExit) as end:
            run(*arguments, f"--output_file={output}")
    assert end.value.code == 130
    assert "whole lines, in order; to a file, the same command goes on." in capsys.readouterr().err
    run(*arguments, f"--output_file={output}")
    assert "4 of 23 lines are done, going on" in caplog.text
    assert output.read_text(encoding="utf-8") == expected_translation(source_file)


def test_script_answers_each_line_at_a_terminal(run: Any, model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    answers, screen = os.pipe()
    received = []

    def type_lines() -> None:
        for line in (b"w1 w2\n", b"w3\n"):
            os.write(keyboard, line)
            ready, _, _ = select.select([answers], [], [], 30)
            received.append(os.read(answers, 1000).decode() if ready else "no answer")
        os.write(keyboard, b"\x04")

    with open(terminal) as stdin, open(screen, "w") as stdout, monkeypatch.context() as patch:
        for name, stream in (("stdin", stdin), ("stdout", stdout)):
            patch.setattr(sys, name, stream)
        typist = threading.Thread(target=type_lines)
        typist.start()
        run("--model_name_or_path", model_folder, "--device", "cpu")
        typist.join()
    os.close(keyboard)
    os.close(answers)
    assert received == [translate_alone("w1 w2") + "\n", translate_alone("w3") + "\n"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output_file", "out.txt"], "--output_file needs --input_file"),
        (["--batch_size", "many"], "invalid int value"),
        (["--source_lang", "en"], "source_lang is 'en' and target_lang is None; give both or neither"),
        (["--num_beam", "2", "--beams"], "unrecognized arguments: --num_beam --beams (did you mean --num_beams?)"),
    ],
    ids=str,
)
def test_script_refuses_wrong_arguments(refuse: Any, arguments: list[str], message: str) -> None:
    assert message in refuse("--model_name_or_path", "nowhere", *arguments)


def test_script_refuses_what_model_or_file_cannot_give(
    refuse: Any, model_folder: str, source_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w1\nf\xfcr\n")))
    assert "standard input, line 2: byte 0xfc" in refuse("--model_name_or_path", model_folder, "--device=cpu")
    model = ["--model_name_or_path", model_folder, "--device=cpu", "--input_file"]
    latin = source_file.with_name("latin.txt")
    latin.write_bytes("für".encode("latin-1"))
    assert "n_best is 2 and num_beams is 1" in refuse(*model, str(source_file), "--n_best=2")
    assert "latin.txt, line 1: byte 0xfc at position 1 of the line is not UTF-8" in refuse(*model, str(latin))
    output = source_file.with_name("output.txt")
    assert "latin.txt, line 1: byte 0xfc" in refuse(*model, str(latin), "--output_file", str(output))
    cut = source_file.with_name("cut.txt.gz")
    cut.write_bytes(gzip.compress(source_file.read_bytes())[:-9])
    assert "cut.txt.gz: truncated or damaged file" in refuse(*model, str(cut), "--output_file", str(output))


def test_script_refuses_another_direction_than_the_models(refuse: Any, run: Any, tmp_path: Path, capsys: Any) -> None:
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=260, langs=["en", "de"])
    VanillaTransformerForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    VanillaTransformerTokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "source.txt").write_text("a\n")
    words = [f"--model_name_or_path={tmp_path / 'model'}", "--device=cpu", f"--input_file={tmp_path / 'source.txt'}"]
    said = refuse(*words, "--source_lang", "de", "--target_lang", "en")
    assert "translates en to de (langs in its config.json), not de to en" in said
    run(*words, "--source_lang", "en", "--target_lang", "de", "--max_new_tokens", "2")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_bars_are_drawn_on_a_terminal_only(
    run: Any, model_folder: str, source_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ["--model_name_or_path", model_folder, "--device=cpu", "--input_file", str(source_file)]
    run(*words)
    assert capsys.readouterr().err == ""
    assert logging_of_transformers.is_progress_bar_enabled(), "other programs get theirs back"
    assert not are_progress_bars_disabled()
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True, raising=False)
    run(*words)
    assert "line/s" in capsys.readouterr().err
    run(*words, "--disable_tqdm")
    assert capsys.readouterr().err == ""


def test_the_scripts_folder_hides_no_module() -> None:
    names = {path.stem for path in (REPOSITORY / "scripts").glob("*.py")}
    program = f"import importlib.util as u; print([n for n in {sorted(names)!r} if u.find_spec(n) is not None])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/", check=True)
    assert found.stdout.strip() == "[]"
