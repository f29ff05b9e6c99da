"""Parallel corpora of which a model writes one side: what is kept of translations, and what an interruption changes."""

import gzip
import json
import logging
import random
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import sacrebleu
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_seq2seq import WORDS
from tiny_translations import (
    MODEL,
    TOKENIZER,
    random_sentences,
    run_interrupted,
    save_model,
    translate_alone,
    write_sources,
)
from translating_programs import run_until

from vanilla_transformer.commands import distill as distill_command
from vanilla_transformer.data.records import EVERYTHING, Part, RecordFile
from vanilla_transformer.inference.files import translate_file
from vanilla_transformer.inference.outputs import Piece
from vanilla_transformer.inference.synthetic import BackTranslation, Distillation, add_noise, find_references
from vanilla_transformer.inference.translate import Translation

SETTINGS: dict[str, Any] = {"window_size": 4, "batch_size": 2, "progress": False}
SENTENCES = ["w1 w2", "", *random_sentences(12)]
SAMPLING: dict[str, Any] = {"do_sample": True, "num_beams": 1, "top_k": 0, "seed": 3}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{line}\n" for line in SENTENCES), encoding="utf-8")
    return path


def back_translate(source: Path, target: Path, make_pairs: dict[str, Any] | None = None, **options: Any) -> Path:
    # Words of a random model say nothing of how long translations should be.
    made = BackTranslation(TOKENIZER, **{"max_length_ratio": 99, **(make_pairs or {})})
    translate_file(MODEL, TOKENIZER, source, target, make_pairs=made, **SETTINGS | options)
    return target


def read_tsv(path: Path) -> list[tuple[str, str]]:
    header, *rows = [tuple(line.split("\t")) for line in path.read_text(encoding="utf-8").splitlines()]
    assert header == ("source", "target")
    return rows  # type: ignore[return-value]


EXPECTED = [(translate_alone(text), text) for text in SENTENCES if translate_alone(text)]


class TestNoise:
    words = st.lists(st.text("abc", min_size=1), min_size=1, max_size=30, unique=True)

    @given(words=words, seed=st.integers(), distance=st.integers(0, 4))
    def test_words_move_no_further_than_they_may(self, words: list[str], seed: int, distance: int) -> None:
        text = add_noise(" ".join(words), random.Random(seed), drop=0, replace=0, distance=distance)
        places = [text.split().index(word) for word in words]
        assert sorted(places) == list(range(len(words)))
        assert all(abs(place - number) <= distance for number, place in enumerate(places))

    @given(words=words, seed=st.integers())
    def test_a_word_is_left_whatever_is_dropped(self, words: list[str], seed: int) -> None:
        assert add_noise(" ".join(words), random.Random(seed), drop=1, replace=0) in words
        assert add_noise(" ".join(words), random.Random(seed), drop=0, replace=1, blank="_") == " ".join(
            "_" * len(words)
        )

    def test_rates_are_those_of_the_paper(self) -> None:
        words = [str(number) for number in range(20_000)]
        noised = add_noise(" ".join(words), random.Random(0)).split()
        assert len(noised) / len(words) == pytest.approx(0.9, abs=0.01)
        assert noised.count("<BLANK>") / len(noised) == pytest.approx(0.1, abs=0.01)
        found = [int(word) for word in noised if word != "<BLANK>"]
        assert 0.2 < sum(first > second for first, second in pairwise(found)) / len(found) < 0.5

    def test_characters_are_the_words_of_a_script_without_spaces(self) -> None:
        noised = add_noise("我们去北京", random.Random(1), drop=0, replace=0)
        assert sorted(noised) == sorted("我们去北京")
        assert noised != "我们去北京"

    def test_words_among_such_characters_stay_whole(self) -> None:
        for seed in range(20):
            noised = add_noise("He visited 李 yesterday", random.Random(seed), drop=0, replace=0)
            assert sorted(noised.split()) == sorted(["He", "visited", "李", "yesterday"])
            noised = add_noise("我的iPhone坏了", random.Random(seed), drop=0, replace=0)
            assert " " not in noised
            assert sorted(noised.replace("iPhone", "")) == sorted("我的坏了")


class TestBackTranslation:
    @pytest.mark.parametrize("kind", [".tsv", ".jsonl", ".jsonl.gz", ".parquet"])
    def test_translations_are_sources_in_every_kind_of_table(self, texts: Path, kind: str, caplog: Any) -> None:
        with caplog.at_level(logging.INFO):
            path = back_translate(texts, texts.with_name(f"pairs{kind}"))
        if kind == ".tsv":
            found = read_tsv(path)
        elif kind == ".parquet":
            found = [(row["source"], row["target"]) for row in pq.read_table(path).to_pylist()]
        else:
            data = path.read_bytes()
            lines = (gzip.decompress(data) if kind.endswith(".gz") else data).decode().splitlines()
            found = [tuple(json.loads(line).values()) for line in lines]
        assert found == EXPECTED
        empty = len(SENTENCES) - len(EXPECTED)
        assert empty
        assert f"{len(EXPECTED)} pairs; dropped: {empty} empty" in caplog.messages

    def test_a_folder_of_tables_and_a_tag(self, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        for number in range(2):
            rows = "".join(f"{number}\t{text}\n" for text in SENTENCES[number::2])
            (tmp_path / "in" / f"{number}.tsv").write_text(f"id\ttext\n{rows}", encoding="utf-8")
        made = BackTranslation(TOKENIZER, tag="<BT>", max_length_ratio=99)
        output = f"{tmp_path}/out/"
        translate_file(MODEL, TOKENIZER, tmp_path / "in", output, make_pairs=made, **SETTINGS)
        for number in range(2):
            expected = [(f"<BT> {source}", target) for source, target in EXPECTED if target in SENTENCES[number::2]]
            assert read_tsv(tmp_path / "out" / f"{number}.tsv") == expected

    def test_what_is_too_long_is_dropped(self, tmp_path: Path, caplog: Any) -> None:
        targets = ["w1", "w1 w2 w3", "w1 w2 w3 w4 w5", "w1 w2", "w1"]
        sources = ["w1 w2 w3", "w1 w2 w3 w4 w5 w6 w7", "w1", " ", "w1 w2 w3 w4"]
        (tmp_path / "a.txt").write_text("\n".join(targets), encoding="utf-8")
        translations = [[Translation(source)] for source in sources]
        piece = Piece(RecordFile(str(tmp_path / "a.txt")), Part(0, 0, len(targets)), translations)
        # With the end, a target of one word has two tokens; sources of up to twice as many stay.
        made = BackTranslation(TOKENIZER, max_length=5, max_length_ratio=2)
        with caplog.at_level(logging.INFO):
            assert list(made([piece])) == [("w1 w2 w3", "w1")]
        assert caplog.messages == ["1 pairs; dropped: 1 empty, 2 too long, 1 too long for their text"]

    def test_what_the_model_did_not_read_to_the_end_is_dropped(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("w1 w2 w3\nw1 w2\n")
        piece = Piece(RecordFile(str(tmp_path / "a.txt")), Part(0, 0, 2), [[Translation("w5")], [Translation("w6")]])
        for prefix, expected in (("", ["w1 w2 w3", "w1 w2"]), ("w9 ", ["w1 w2"])):
            made = BackTranslation(TOKENIZER, source_prefix=prefix, max_source_length=4)
            assert [target for _, target in made([piece])] == expected, "with </s>, and the prefix"

    def test_noise_depends_on_the_place_alone(self, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        noise = {"noise": True, "seed": 5}
        whole = read_tsv(back_translate(texts, texts.with_name("whole.tsv"), noise, window_size=99))
        parts = texts.with_name("parts.tsv")
        run_interrupted(2, monkeypatch, back_translate, texts, parts, noise)
        assert read_tsv(back_translate(texts, parts, noise, batch_size=5)) == whole
        other = read_tsv(back_translate(texts, texts.with_name("other.tsv"), noise | {"seed": 6}))
        assert other != whole
        assert [target for _, target in other] == [target for _, target in whole] == [target for _, target in EXPECTED]
        for (noised, _), (source, _) in zip(whole, EXPECTED, strict=True):
            assert not Counter(noised.split()) - Counter([*source.split(), *["<BLANK>"] * 9])

    def test_samples_depend_on_the_seed_alone(self, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(1)
        whole = read_tsv(back_translate(texts, texts.with_name("whole.tsv"), **SAMPLING))
        drawn = torch.rand(3)
        torch.manual_seed(1)
        assert torch.rand(3).equal(drawn), "the caller's random state is as it was"
        parts = texts.with_name("parts.tsv")
        run_interrupted(2, monkeypatch, back_translate, texts, parts, **SAMPLING)
        for changed in ({"seed": 4}, {"batch_size": 3}):
            with pytest.raises(FileExistsError, match=r"other settings \(options\)"):
                back_translate(texts, parts, **SAMPLING | changed)
        torch.manual_seed(2)
        assert read_tsv(back_translate(texts, parts, **SAMPLING)) == whole
        assert read_tsv(back_translate(texts, texts.with_name("other.tsv"), **SAMPLING | {"seed": 4})) != whole
        assert whole != EXPECTED

    def test_samples_are_drawn_from_the_models_distribution(self, tmp_path: Path) -> None:
        count = 600
        (tmp_path / "same.txt").write_text("w3 w4 w5\n" * count, encoding="utf-8")
        options = SAMPLING | {"window_size": 200, "batch_size": 50, "max_new_tokens": 1}
        found = read_tsv(back_translate(tmp_path / "same.txt", tmp_path / "pairs.tsv", **options))
        ids = TOKENIZER("w3 w4 w5", return_tensors="pt").input_ids
        with torch.no_grad():
            start = torch.tensor([[MODEL.config.decoder_start_token_id]])
            shares = MODEL(input_ids=ids, decoder_input_ids=start).logits[0, -1].softmax(dim=-1)
        counts = Counter(source for source, _ in found)
        for word in WORDS:
            share = shares[TOKENIZER.convert_tokens_to_ids(word)].item()
            assert counts[word] / count == pytest.approx(share, abs=5 * (share * (1 - share) / count) ** 0.5 + 1e-3)

    def test_killed_at_any_change_of_the_files(self, tmp_path: Path) -> None:
        source = write_sources(tmp_path / "source.txt")
        options = SAMPLING | {"window_size": 12, "batch_size": 99}
        noise = {"noise": True, "tag": "<BT>", "max_length": 20}
        expected = back_translate(source, tmp_path / "whole.tsv", noise, **options).read_bytes()
        is_killed, event = True, 1
        while is_killed:
            target = tmp_path / f"out-{event}" / "pairs.tsv"
            is_killed = run_until(event, target.parent, partial(back_translate, source, target, noise, **options))
            assert not target.exists() or target.read_bytes() == expected
            if is_killed and not target.exists():
                back_translate(source, target, noise, **options)
            assert target.read_bytes() == expected
            event += 4
        assert event > 15

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tag": "two words"}, "tag is 'two words'; it must be one word"),
            ({"blank": ""}, "blank is ''; it must be one word"),
            ({"max_length": 0}, "max_length is 0"),
            ({"max_length_ratio": 0.5}, "max_length_ratio is 0.5; each must be at least 1"),
        ],
    )
    def test_what_makes_no_pairs_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            BackTranslation(TOKENIZER, **options)

    def test_pairs_are_a_table(self, texts: Path) -> None:
        with pytest.raises(ValueError, match=r"pairs are written to a table; its name must end with \.tsv"):
            back_translate(texts, texts.with_name("pairs.txt"))


class TestDistillation:
    beams: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 5}

    def distill(self, source: Path, target: Path, make_pairs: Distillation, **options: Any) -> list[tuple[str, str]]:
        given = {"n_best": 3, **self.beams, **SETTINGS, **options}
        translate_file(MODEL, TOKENIZER, source, target, make_pairs=make_pairs, **given)
        return read_tsv(target)

    @pytest.mark.parametrize("select", ["chrf", "bleu"])
    def test_the_translation_most_like_the_reference_is_kept(self, tmp_path: Path, select: Any, caplog: Any) -> None:
        sources, references = random_sentences(20), random_sentences(20, seed=1)
        rows = zip(sources, references, strict=True)
        (tmp_path / "pairs.tsv").write_text("".join(f"{s}\t{r}\n" for s, r in rows), encoding="utf-8")
        made = Distillation(find_references(str(tmp_path / "pairs.tsv")), select, 15)
        with caplog.at_level(logging.INFO):
            found = self.distill(tmp_path / "pairs.tsv", tmp_path / "out.tsv", made)
        expected = []
        for source, reference in zip(sources, references, strict=True):
            ids = TOKENIZER(source, return_tensors="pt")
            with torch.no_grad():
                rows = MODEL.generate(**ids, **self.beams, num_return_sequences=3)
            texts = [text for text in TOKENIZER.batch_decode(rows, skip_special_tokens=True) if text]
            score: Any = {"chrf": sacrebleu.sentence_chrf, "bleu": sacrebleu.sentence_bleu}[select]
            scores = [score(text, [reference]).score for text in texts]
            if scores and max(scores) >= 15:
                expected.append((source, texts[scores.index(max(scores))]))
        assert found == expected
        assert 0 < len(expected) < 20
        assert any("less like their reference than 15" in message for message in caplog.messages)

    def test_several_of_a_source_are_kept_in_order(self, tmp_path: Path, caplog: Any) -> None:
        (tmp_path / "a.en").write_text("w1\nw2\n")
        (tmp_path / "a.de").write_text("one two three\nfour\n")
        texts = (["five", "one two", "one two", "one two three"], ["five", "six", "four", " "])
        pieces = [
            Piece(RecordFile(f"{tmp_path}/a.en"), Part(0, 0, 2), [list(map(Translation, each)) for each in texts])
        ]
        references = find_references(str(tmp_path / "a.en"), str(tmp_path / "a.de"))
        two = [("w1", "one two three"), ("w1", "one two"), ("w2", "four")]
        with caplog.at_level(logging.INFO):
            assert list(Distillation(references, min_similarity=30, keep=2)(pieces)) == two
        assert caplog.messages[-1] == "3 pairs; dropped: 1 less like their reference than 30"
        assert list(Distillation(references, keep=1)(pieces)) == [two[0], two[2]]
        assert list(Distillation(references, keep=9)(pieces))[:3] == [*two[:2], ("w1", "five")]
        best = [("w1", "five"), ("w1", "one two"), ("w2", "five"), ("w2", "six")]
        assert list(Distillation(None, "best", keep=2)(pieces)) == best
        back = [(target, source) for source, target in two]
        assert list(Distillation(references, min_similarity=30, keep=2, swap=True)(pieces)) == back

    def test_keep_asks_for_as_many(self, texts: Path, capsys: Any) -> None:
        folder = save_model(texts.with_name("model"))
        out = texts.with_name("out.tsv")
        words = ["--model_name_or_path", folder, "--device", "cpu", "--input_file", texts, "--output_file", out]
        words += ["--select", "best", "--num_beams", "3", "--max_new_tokens", "5"]
        distill_command.main([*map(str, words), "--keep", "2"])
        sources = [source for source, _ in read_tsv(out)]
        assert max(map(sources.count, sources)) == 2
        for more, message in (
            (["--n_best", "3"], "--n_best needs --select chrf or bleu"),
            (["--keep", "5", "--select", "bleu", "--n_best", "4"], "--keep is 5; it must be from 1 to --n_best, 4"),
            (["--keep", "0"], "--keep is 0"),
            (["--select", "chrf", "--n_best", "0"], "--n_best is 0; it must be at least 1"),
        ):
            with pytest.raises(SystemExit):
                distill_command.main([*map(str, words), *more])
            assert message in capsys.readouterr().err

    def test_the_best_needs_no_reference(self, texts: Path) -> None:
        made = Distillation(None, "best")
        found = self.distill(texts, texts.with_name("out.tsv"), made, n_best=None, num_beams=1, max_new_tokens=8)
        assert found == [(target, source) for source, target in EXPECTED]

    def test_a_source_that_was_cut_is_dropped(self, texts: Path, capsys: Any) -> None:
        folder = save_model(texts.with_name("model"))
        out = texts.with_name("out.tsv")
        words = ["--model_name_or_path", folder, "--device", "cpu", "--input_file", texts, "--output_file", out]
        distill_command.main([*map(str, words), "--select", "best", "--num_beams", "1", "--max_source_length", "3"])
        kept = [source for source, _ in read_tsv(out)]
        assert kept == [text for _, text in EXPECTED if len(TOKENIZER(text)["input_ids"]) <= 3]
        assert 0 < len(kept) < len(SENTENCES) - 1

    def test_references_are_other_files_or_another_column(self, tmp_path: Path) -> None:
        for number in range(2):
            rows = [{"en": f"w{number}", "target": f"t{number} {row}"} for row in range(9)]
            (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (tmp_path / f"{number}.de").write_text("".join(f"{row['target']}\n" for row in rows))
        pattern = f"{tmp_path}/*.jsonl"
        pieces = [
            Piece(RecordFile(f"{tmp_path}/{file}.jsonl", "en"), Part(file, first, count), texts)
            for file in range(2)
            for first, count in ((0, 4), (4, 5))
            for texts in [[[Translation("x"), Translation(f"t{file} {row}")] for row in range(first, first + count)]]
        ]
        expected = [(f"w{file}", f"t{file} {row}") for file in range(2) for row in range(9)]
        for references in (find_references(pattern), find_references(pattern, f"{tmp_path}/*.de")):
            assert list(Distillation(references, min_similarity=100)(pieces)) == expected
        assert [source for source, _ in Distillation(None, "best")(pieces)] == [source for source, _ in expected]

    def test_references_are_the_column_target_wherever_it_stands(self, tmp_path: Path) -> None:
        rows = [("7", "w1", "t1"), ("8", "w2", "t2")]
        for names in (("id", "en", "target"), ("target", "id", "en")):
            order = [("id", "en", "target").index(name) for name in names]
            lines = ["\t".join(names), *("\t".join(row[place] for place in order) for row in rows)]
            (tmp_path / "in.tsv").write_text("".join(f"{line}\n" for line in lines))
            for references in (
                find_references(str(tmp_path / "in.tsv"), source_column="en"),
                find_references("in.en", str(tmp_path / "in.tsv")),
            ):
                assert list(references[0].texts(EVERYTHING)) == ["t1", "t2"]
        (tmp_path / "in.tsv").write_text("en\tde\nw1\tt1\n")
        with pytest.raises(ValueError, match=r"no column 'target'; the columns are 'en', 'de'"):
            list(find_references(str(tmp_path / "in.tsv"), source_column="en")[0].texts(EVERYTHING))
        (tmp_path / "one.tsv").write_text("t1\nt2\n")
        assert list(find_references("in.en", str(tmp_path / "one.tsv"))[0].texts(EVERYTHING)) == ["t1", "t2"]
        (tmp_path / "one.jsonl").write_text('{"de": "t1"}\n')
        assert list(find_references("in.en", str(tmp_path / "one.jsonl"))[0].texts(EVERYTHING)) == ["t1"]

    def test_what_does_not_belong_together_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.en").write_text("w1\nw2\n")
        (tmp_path / "a.de").write_text("w1\n")
        references = find_references(str(tmp_path / "a.en"), str(tmp_path / "a.de"))
        with pytest.raises(ValueError, match=r"a\.en has 2 records, and .*a\.de has 1"):
            self.distill(tmp_path / "a.en", tmp_path / "out.tsv", Distillation(references))
        for row, column, message in (
            ('{"source": "w1", "de": "w1"}', None, "no column 'target'; the columns are 'source', 'de'"),
            ('{"source": "w1", "de": 1}', "de", "pairs.jsonl, line 1: the source is 1 .int., not a string"),
        ):
            (tmp_path / "pairs.jsonl").write_text(f"{row}\n")
            found = find_references(str(tmp_path / "pairs.jsonl"), column=column)
            with pytest.raises(ValueError, match=message):
                self.distill(tmp_path / "pairs.jsonl", tmp_path / "out.tsv", Distillation(found))
        (tmp_path / "a.de").write_text("w1\nw2\n")
        with pytest.raises(ValueError, match="tokenize is 'foo'; it must be one of"):
            self.distill(tmp_path / "a.en", tmp_path / "out.tsv", Distillation(references, "bleu", tokenize="foo"))
        assert not list(tmp_path.glob("out*")), "nothing was translated"
        with pytest.raises(ValueError, match="1 files of sources and 2 of references"):
            self.distill(tmp_path / "a.en", tmp_path / "out.tsv", Distillation(references * 2))
        with pytest.raises(ValueError, match=r"a\.en has no references: name a file of them"):
            find_references(str(tmp_path / "a.en"))
        with pytest.raises(ValueError, match=r"a\.en has no references: name a file of them"):
            find_references(str(tmp_path / "a.en"), column="target")
        with pytest.raises(ValueError, match="min_similarity is 101"):
            Distillation(references, min_similarity=101)
        with pytest.raises(ValueError, match="keep is 0"):
            Distillation(references, keep=0)
        with pytest.raises(ValueError, match="Without references select must be best, and is chrf"):
            Distillation(None)
