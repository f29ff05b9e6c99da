"""Training of the vocabulary, against byte-pair encoding written out by hand, and the script that runs it."""

import importlib.util
import json
import logging
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import RunPython
from corpus_files import write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from vanilla_transformer.data.tokenizer_training import MINIMUM_VOCAB_SIZE, train_separate_tokenizer, train_tokenizer
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

ENGLISH = ["a man rides a horse", "two men ride two horses", "the man is riding", "a horse is a horse"]
GERMAN = ["ein Mann reitet ein Pferd", "zwei Männer reiten zwei Pferde", "der Mann reitet", "ein Pferd ist ein Pferd"]
TEXTS = ENGLISH + GERMAN


def train(texts: list[str], vocab_size: int = 290, min_frequency: int = 2) -> VanillaTransformerTokenizer:
    return train_tokenizer(texts, vocab_size=vocab_size, min_frequency=min_frequency, show_progress=False)


def merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def byte_pair_merges(words: Counter[str], count: int, min_frequency: int) -> list[tuple[str, str]]:
    """Merges the most frequent pair, the one of the older symbols first among equals, up to `count` new symbols."""
    age = {symbol: index for index, symbol in enumerate(sorted(set("".join(words))))}
    spelled = {word: list(word) for word in words}
    merges: list[tuple[str, str]] = []
    while len({first + second for first, second in merges}) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in spelled.items():
            for pair in pairwise(symbols):
                pairs[pair] += words[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], age[pair[0]], age[pair[1]]), default=None)
        if best is None or pairs[best] < min_frequency:
            break
        merges.append(best)
        age.setdefault("".join(best), len(age))
        spelled = {word: merge(symbols, best) for word, symbols in spelled.items()}
    return merges


def words_of(texts: list[str]) -> Counter[str]:
    return Counter("Ġ" + word for text in texts for word in text.split(" "))


def merges_of(tokenizer: VanillaTransformerTokenizer) -> list[tuple[str, str]]:
    return [(first, second) for first, second in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]


# Without a letter twice in a row: how often "aa" is in "aaa" is a matter of taste.
ascii_words = st.lists(st.sampled_from("abcd"), min_size=1, max_size=6).map(
    lambda letters: "".join(letter for index, letter in enumerate(letters) if letters[index - 1 : index] != [letter])
)


@settings(max_examples=25)
@given(st.lists(st.lists(ascii_words, min_size=1).map(" ".join), min_size=1), st.integers(1, 3))
def test_merges_are_those_of_the_textbook(texts: list[str], min_frequency: int) -> None:
    expected = byte_pair_merges(words_of(texts), count=20, min_frequency=min_frequency)
    tokenizer = train(texts, vocab_size=MINIMUM_VOCAB_SIZE + 20, min_frequency=min_frequency)
    assert merges_of(tokenizer) == expected


def test_texts_are_cut_by_the_merges() -> None:
    tokenizer = train(TEXTS)
    for text in [*TEXTS, "these men ride"]:
        expected: list[str] = []
        for word in text.replace("ä", "Ã¤").split(" "):
            symbols = list("Ġ" + word)
            for pair in merges_of(tokenizer):
                symbols = merge(symbols, pair)
            expected += symbols
        assert tokenizer.tokenize(text) == expected


def test_ids_have_no_gaps_and_begin_with_the_special_tokens() -> None:
    tokenizer = train(TEXTS)
    assert len(tokenizer) == tokenizer.vocab_size == 290
    tokens = tokenizer.convert_ids_to_tokens(list(range(290)))
    assert tokens[:4] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert sorted(tokenizer.get_vocab().values()) == list(range(290))
    assert tokens[MINIMUM_VOCAB_SIZE:] == ["".join(pair) for pair in merges_of(tokenizer)]
    assert tokenizer.model_max_length == 1024


def test_the_same_texts_give_the_same_files(tmp_path: Path, run_python: RunPython, repository_root: Path) -> None:
    """Whatever their order, the number of threads, and the seed of Python's hashes."""
    texts = TEXTS * 200  # several batches
    train(texts).save_pretrained(tmp_path / "here")
    random.shuffle(texts)
    program = """
import json, sys
from vanilla_transformer.data.tokenizer_training import train_tokenizer
train_tokenizer(json.load(sys.stdin), vocab_size=290).save_pretrained(sys.argv[1])
"""
    environment = {"PYTHONHASHSEED": "5", "RAYON_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "true"}
    options: Any = {"cwd": repository_root, "input": json.dumps(texts), "environment": environment}
    result = run_python("-c", program, tmp_path / "there", **options)
    # Nothing but the files: where there is no terminal, there are no progress bars.
    assert (result.stdout, result.stderr) == ("", "")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


def test_special_tokens_in_the_texts_are_text() -> None:
    tokenizer = train(["</s> <pad>"] * 5, vocab_size=270)
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3]
    assert tokenizer("</s>", split_special_tokens=True)["input_ids"].count(2) == 1


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "no text at all"),
        (["", " ", "\n\t"], {}, "no text at all"),
        (TEXTS[0], {}, "single string, 'a man rides"),
        (["a", "b", None], {}, r"texts\[2\] is None, of type NoneType"),
        (TEXTS, {"vocab_size": 259}, r"vocab_size=259 .* at least 260 \(4 special tokens and 256 bytes\)"),
        (TEXTS, {"min_frequency": 0}, "min_frequency=0: must be at least 1"),
        (TEXTS, {"model_max_length": 0}, "model_max_length=0: must be at least 1"),
    ],
)
def test_what_cannot_be_trained_is_refused(texts: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_tokenizer(texts, **options)  # type: ignore[arg-type]


def test_the_smallest_vocabulary_spells_everything() -> None:
    tokenizer = train(TEXTS, vocab_size=MINIMUM_VOCAB_SIZE)
    assert len(tokenizer) == MINIMUM_VOCAB_SIZE
    assert tokenizer.batch_decode(tokenizer(TEXTS)["input_ids"], skip_special_tokens=True) == TEXTS


# --- two vocabularies ---


def sides_of(tokenizer: VanillaTransformerTokenizer) -> list[list[tuple[str, str]]]:
    return [merges_of(tokenizer.source_tokenizer), merges_of(tokenizer.target_tokenizer)]


def test_separate_vocabularies_are_those_of_each_side() -> None:
    for target_vocab_size, expected_size in ((280, 280), (None, 275)):
        tokenizer = train_separate_tokenizer(
            iter(ENGLISH), GERMAN, vocab_size=275, target_vocab_size=target_vocab_size, length=4, model_max_length=50
        )
        assert tokenizer.separate_vocabs
        assert (len(tokenizer), tokenizer.target_vocab_size, tokenizer.model_max_length) == (275, expected_size, 50)
        assert sides_of(tokenizer) == [merges_of(train(ENGLISH, 275)), merges_of(train(GERMAN, expected_size))]


def test_a_small_corpus_and_a_small_side_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert len(train(["ab ab"], vocab_size=1000)) == MINIMUM_VOCAB_SIZE + 2
    train_separate_tokenizer(ENGLISH, ["ab ab"], vocab_size=270)
    one, side = caplog.records
    assert one.levelno == side.levelno == logging.WARNING
    assert one.getMessage().startswith("The vocabulary has 262 tokens instead of vocab_size=1000")
    assert side.getMessage().startswith("The vocabulary has 262 tokens instead of vocab_size=270")
    assert side.getMessage().endswith("in the target texts.")


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        (ENGLISH, GERMAN, {"target_vocab_size": 259}, "target_vocab_size=259 .* at least 260"),
        (ENGLISH, GERMAN, {"vocab_size": 259}, "^vocab_size=259 .* at least 260"),
        (ENGLISH, "ein Mann", {}, "target_texts is a single string, 'ein Mann'"),
        (ENGLISH, ["", " "], {}, "target_texts holds no text at all"),
        (["a", None], GERMAN, {}, r"source_texts\[1\] is None"),
    ],
)
def test_the_side_of_an_error_is_named(source: Any, target: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_separate_tokenizer(source, target, **{"vocab_size": 270, **options})


# --- scripts/train_tokenizer.py ---


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    yield importlib.import_module("vanilla_transformer.commands.train_tokenizer")
    # main() turned it up for its process.
    logging.getLogger("vanilla_transformer").setLevel(logging.NOTSET)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two text files, one of them compressed, and the same pairs as a table."""
    write_lines(tmp_path / "train.en", ENGLISH)
    write_lines(tmp_path / "train.de.gz", GERMAN)
    pairs = ({"translation": {"en": en, "de": de}} for en, de in zip(ENGLISH, GERMAN, strict=True))
    write_lines(tmp_path / "train.jsonl", list(map(json.dumps, pairs)))
    return tmp_path


def failure(script: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the script says last when it ends with the status of a usage error."""
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].partition(": ")[2]


def test_script_trains_on_files(script: ModuleType, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(corpus / "train.en"), str(corpus / "train.de.gz")]
    script.main(["--files", *files, "--vocab_size", "290", "--model_max_length", "50", "--output_dir", f"{corpus}/out"])
    loaded = AutoTokenizer.from_pretrained(corpus / "out")
    assert type(loaded) is VanillaTransformerTokenizer
    assert merges_of(loaded) == merges_of(train(TEXTS))
    assert loaded.model_max_length == 50
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"290 tokens, saved to {corpus}/out"
    english = printed.index(f"{files[0]}: 4 sentences")
    tokens = sum(len(loaded.tokenize(text)) for text in ENGLISH)
    words = sum(len(text.split()) for text in ENGLISH)
    rates = f"{tokens / 4:.1f} tokens per sentence, {tokens / words:.2f} per word"
    assert printed[english + 1] == f"  {rates}, without </s>"
    for line in printed[english + 2 : english + 4]:
        text = line.strip().replace(" ", "").replace("▁", " ").strip()
        assert text in ENGLISH
        assert len(line.split()) == len(loaded.tokenize(text))
    compressed = write_lines(corpus / "train.jsonl.xz", (corpus / "train.jsonl").read_text().splitlines())
    table = ["--files", str(compressed), "--source_lang", "en", "--target_lang", "de", "--disable_tqdm"]
    script.main([*table, "--vocab_size", "290", "--output_dir", f"{corpus}/table"])
    assert merges_of(VanillaTransformerTokenizer.from_pretrained(corpus / "table")) == merges_of(train(TEXTS))


def test_script_trains_two_vocabularies(script: ModuleType, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--vocab_size", "275", "--target_vocab_size", "280"]
    out = ["--output_dir", f"{corpus}/out", "--overwrite_output_dir", "--separate_vocabularies", *sizes]
    texts = ["--source_files", f"{corpus}/train.en", "--target_files", f"{corpus}/train.de.gz"]
    table = ["--files", f"{corpus}/train.jsonl", "--source_lang", "en", "--target_lang", "de"]
    (corpus / "dataset").mkdir()
    shutil.copy(corpus / "train.jsonl", corpus / "dataset")
    dataset = ["--dataset_name", f"{corpus}/dataset", *table[2:]]
    for arguments in (texts, table, dataset):
        script.main([*arguments, *out])
        loaded = VanillaTransformerTokenizer.from_pretrained(corpus / "out")
        assert sides_of(loaded) == [merges_of(train(ENGLISH, 275)), merges_of(train(GERMAN, 280))]
        printed = capsys.readouterr().out.splitlines()
        assert printed[0] == f"275 source and 280 target tokens, saved to {corpus}/out"
        for texts_of_side, side in ((ENGLISH, loaded.source_tokenizer), (GERMAN, loaded.target_tokenizer)):
            tokens = sum(len(side.tokenize(text)) for text in texts_of_side)
            assert sum(line.startswith(f"  {tokens / 4:.1f} tokens per sentence") for line in printed) == 1
    script.main(["--files", f"{corpus}/train.en", "--overwrite_output_dir", *out[:2], *sizes[:2]])
    assert not (corpus / "out" / "target_tokenizer.json").exists()
    assert not AutoTokenizer.from_pretrained(corpus / "out").separate_vocabs


def test_script_must_know_the_sides(script: ModuleType, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, table = str(corpus / "train.en"), str(corpus / "train.jsonl")
    out = ["--output_dir", str(corpus / "out")]
    separate = [*out, "--separate_vocabularies"]
    message = failure(script, [*separate, "--files", table, text], capsys)
    assert f"--files {text} does not say which side it is" in message
    assert "both --source_files and --target_files" in failure(script, [*separate, "--source_files", text], capsys)
    message = failure(script, [*separate, "--source_files", text, "--target_files", table], capsys)
    assert f"{table} is a table, which has both sides: name it after --files" in message
    both = ["--source_files", text, "--target_files", text]
    for arguments in ([], ["--files", table, *both], ["--files", table, "--dataset_name", "x"]):
        message = failure(script, [*separate, *arguments], capsys)
        assert "Give one of --files (tables), --dataset_name, and --source_files with --target_files." in message
    assert "--source_files" in failure(script, [*out, *both], capsys)
    message = failure(script, [*out, "--files", text, "--target_vocab_size", "300"], capsys)
    assert message == "error: --target_vocab_size 300 needs --separate_vocabularies."
    assert not (corpus / "out").exists()


def test_script_keeps_what_the_folder_holds(
    script: ModuleType, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--files", f"{corpus}/train.en", "--output_dir", f"{corpus}/out", "--vocab_size"]
    (corpus / "out").mkdir()
    (corpus / "out" / "notes.txt").write_text("mine")
    script.main([*arguments, "275"])
    before = (corpus / "out" / "tokenizer.json").read_bytes()
    message = failure(script, [*arguments, "270"], capsys)
    assert message == f"error: {corpus}/out holds a tokenizer (tokenizer.json); --overwrite_output_dir replaces it."
    assert (corpus / "out" / "tokenizer.json").read_bytes() == before
    script.main([*arguments, "270", "--overwrite_output_dir"])
    assert len(VanillaTransformerTokenizer.from_pretrained(corpus / "out")) == 270
    assert (corpus / "out" / "notes.txt").read_text() == "mine"
    before = (corpus / "out" / "tokenizer.json").read_bytes()

    def fill_disk(_: Any, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{")
        raise OSError("No space left on device")

    monkeypatch.setattr(VanillaTransformerTokenizer, "save_pretrained", fill_disk)
    assert "No space left" in failure(script, [*arguments, "272", "--overwrite_output_dir"], capsys)
    assert (corpus / "out" / "tokenizer.json").read_bytes() == before


def test_script_explains_errors(script: ModuleType, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(corpus / "train.en")
    (corpus / "blank.txt").write_text("\n\n")
    out = ["--output_dir", str(corpus / "out")]
    for arguments, message in (
        ([], "either --files or --dataset_name"),
        (["--files", text, "--dataset_name", "x"], "either --files or --dataset_name"),
        (["--files", f"{corpus}/nowhere.txt"], "nowhere.txt"),
        (["--files", text, "--vocab_size", "100"], "vocab_size=100 is too small"),
        (["--files", f"{corpus}/blank.txt"], "no text at all"),
    ):
        assert message in failure(script, [*out, *arguments], capsys)
    assert not (corpus / "out").exists()
    assert f"{text} is a file" in failure(script, ["--files", text, "--output_dir", text], capsys)


def test_a_word_without_end_is_learned_from_in_pieces(caplog: pytest.LogCaptureFixture) -> None:
    """Byte-pair encoding takes the square of a word's length: minutes for 200,000 characters."""
    word = "abcdefghij" * 20_000
    tokenizer = train_tokenizer([word, "hello hello hello"], vocab_size=300)
    (message,) = [text for text in caplog.messages if "has a word of more than" in text]
    assert message.startswith("The text that begins 'abcdefghij")
    assert message.endswith("more than 1000 characters: it is cut. (1 so far)")
    assert tokenizer.tokenize("hello hello")[1:] == ["Ġhello"]
    assert tokenizer.tokenize("abcdefghij")[-1] == "abcdefghij"
    caplog.clear()
    train_tokenizer(["many words " * 1000, "很多词。" * 1000], vocab_size=270)
    assert "is cut" not in caplog.text
