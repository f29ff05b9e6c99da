"""Cards that are made again: what a user wrote into them survives, on either side, and the rest is renewed."""

import json
import re
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import EvalResult, ModelCard
from hypothesis import given
from hypothesis import strategies as st
from model_cards import change, data_of, names_of
from tiny_vanilla import make_model

from vanilla_transformer.hub.card import (
    build_model_card,
    merge_edited_cards,
    merge_model_card,
    says_the_same,
    write_model_card,
)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and records as a training and two evaluations leave them."""
    folder = tmp_path_factory.mktemp("original") / "numbers"
    make_model(langs=["en", "de"]).save_pretrained(folder)
    data = {"train_file": ["train.en", "train.de"], "source_lang": "en", "target_lang": "de"}
    training = {"optim": "adamw_torch", "per_device_train_batch_size": 8, "lr_scheduler_type": "linear", "seed": 3}
    write_json(folder / "arguments.json", {"model": {}, "data": data, "training": training})
    write_json(folder / "metrics.json", {"steps": 10, "epochs": 2.0, "metrics": {"eval_bleu": 3.25}})
    (folder / "curves.png").write_bytes(b"a picture")
    for name, beams in (("test", 2), ("test-greedy", 1)):
        scores = {
            "arguments": {
                "model_name_or_path": "out/numbers",
                "output_dir": f"out/numbers/{name}",
                "test_file": ["news.en", "news.de"],
            },
            "bleu": 3.0 + beams,
            "bleu_signature": "nrefs:1",
            "chrf": 30.0 + beams,
            "chrf_signature": "nrefs:1",
            "generation_config": {"length_penalty": 0.6, "length_penalty_type": "gnmt"},
            "num_beams": beams,
            "sentences": 3,
        }
        write_json(folder / name / "metrics.json", scores)
        for side in ("sources", "references", "hypotheses"):
            (folder / name / f"{side}.txt").write_text(f"{side} 1\n{side} 2\n{side} 3\n")
    return folder


@pytest.fixture
def trained(original: Path, tmp_path: Path) -> Path:
    """A copy of it, at another place."""
    return shutil.copytree(original, tmp_path / "numbers")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Nothing but configuration, code and weights."""
    make_model().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def use_base_model(folder: Path, name: str | None) -> ModelCard:
    """The card of a model whose training went on from that one."""
    change(folder / "arguments.json", model={"model_name_or_path": name} if name else {})
    return build_model_card(folder)


def relation_of(card: ModelCard) -> tuple[str | None, str | None]:
    data = data_of(card).to_dict()
    return data.get("base_model"), data.get("base_model_relation")


class TestWriting:
    def test_edits_survive_and_the_rest_is_renewed(self, trained: Path) -> None:
        path = write_model_card(trained, repo_id="alice/numbers", license="mit")
        assert path == trained / "README.md"
        text = path.read_text(encoding="utf-8")
        edited = text.replace("## Limits\n", "## Limits\n\n- It says \u201cdrölf\u201d.\n")
        edited = edited.replace("license: mit", "license: cc0-1.0\nthumbnail: a.png") + "\nMy own words.\n"
        path.write_text(edited, encoding="utf-8")
        change(trained / "test" / "metrics.json", bleu=12.345)
        write_model_card(trained, repo_id="alice/numbers")
        renewed = path.read_text(encoding="utf-8")
        for words in ("- It says \u201cdrölf\u201d.", "license: cc0-1.0", "thumbnail: a.png", "\nMy own words.\n"):
            assert words in renewed
        assert "12.35 sacreBLEU" in renewed or "12.34 sacreBLEU" in renewed
        assert not (trained / "_partial").exists()
        write_model_card(trained, repo_id="alice/numbers")
        assert path.read_text(encoding="utf-8") == renewed
        write_model_card(trained, repo_id="alice/numbers", license="wtfpl")
        assert data_of(ModelCard.load(path)).license == "wtfpl"

    @pytest.mark.parametrize(
        "content",
        [b"---\n- a\n---\n", b"---\na: [\n---\n", b"---\nmodel-index: [1]\n---\n", b"\xff", b"---\n1: a\n---\n"],
    )
    def test_a_card_that_cannot_be_read_is_named_and_kept(self, plain: Path, content: bytes) -> None:
        (plain / "README.md").write_bytes(content)
        with pytest.raises(ValueError, match=r"README\.md cannot be read as a model card"):
            write_model_card(plain)
        assert (plain / "README.md").read_bytes() == content

    def test_misspelt_metadata_are_refused(self, plain: Path) -> None:
        misspelt: Any = {"licence": "mit"}
        with pytest.raises(TypeError, match="licence"):
            write_model_card(plain, **misspelt)
        assert not (plain / "README.md").exists()


class TestMerging:
    def test_a_foreign_card_keeps_its_text_and_gains_metadata(self, trained: Path) -> None:
        text = "\n# Mine\n\n<!-- generated: none -->\r\n  text  \n"
        foreign = ModelCard(f"---\ntags:\n- mine\nlicense: mit\nlanguage: fr\n---\n{text}")
        merged = merge_model_card(foreign, build_model_card(trained))
        assert merged.text == text
        data = data_of(merged).to_dict()
        assert data["tags"] == ["mine"]
        assert data["license"] == "mit"
        assert data["language"] == "fr"
        assert data["pipeline_tag"] == "translation"
        assert len(data_of(merged).eval_results) == 4

    def test_a_card_of_metadata_alone_gets_the_text(self, trained: Path) -> None:
        # As the Hub makes one where a license is chosen for a new repository.
        merged = merge_model_card(ModelCard("---\nlicense: mit\n---\n"), build_model_card(trained))
        assert data_of(merged).license == "mit"
        assert "No license was given" not in merged.text
        assert names_of(merged) == [name for name in names_of(build_model_card(trained)) if name != "license"]
        data_of(merged).license = None
        again = merge_model_card(ModelCard(merged.content), build_model_card(trained))
        assert "No license was given" in again.text

    def test_deleted_sections_stay_deleted_and_new_ones_find_their_place(self, trained: Path) -> None:
        (trained / "curves.png").rename(trained / "later.png")
        card = build_model_card(trained)
        begin, end = card.text.index("<!-- generated: limits"), card.text.index("<!-- end: limits")
        card.text = card.text[:begin] + card.text[end:]
        (trained / "later.png").rename(trained / "curves.png")
        merged = merge_model_card(card, build_model_card(trained))
        assert "limits" not in names_of(merged)
        assert names_of(merged) == [name for name in names_of(build_model_card(trained)) if name != "limits"]

    def test_sections_of_which_nothing_is_known_now_go_and_come_back(self, trained: Path) -> None:
        whole = build_model_card(trained)
        (trained / "curves.png").rename(trained / "later.png")
        without = build_model_card(trained)
        merged = merge_model_card(whole, without)
        assert names_of(merged) == names_of(without)
        assert names_of(merge_model_card(merged, whole)) == names_of(whole)
        edited = ModelCard(whole.content.replace("![Learning curves]", "![Curves]"))
        assert "![Curves](curves.png)" in merge_model_card(edited, without).text

    def test_line_endings_stay_what_they_are(self, trained: Path) -> None:
        card = build_model_card(trained)
        windows = ModelCard(card.content.replace("\n", "\r\n"))
        merged = merge_model_card(windows, build_model_card(trained, repo_id="alice/other"))
        assert "alice/other" in merged.text
        assert merged.content.count("\n") == merged.content.count("\r\n")

    def test_edits_of_two_cards_are_merged(self, trained: Path) -> None:
        card = build_model_card(trained, repo_id="alice/numbers").content
        limits = re.search(r"<!-- generated: limits .*<!-- end: limits -->\n\n", card, re.DOTALL)
        assert limits is not None
        here = card.replace("# numbers\n", "# Numbers!\n").replace("library_name: tra", "library_name: Tra")
        here = here.replace("tags:\n", "tags:\n- here\n").replace(limits[0], "") + "\nMine.\n"
        there = card.replace("## Use\n", "## How to\n").replace("pipeline_tag: trans", "pipeline_tag: mis")
        there = "\r\n".join(there.replace("tags:\n", "tags:\n- there\n").split("\n"))
        change(trained / "test" / "metrics.json", bleu=12.34)
        now = build_model_card(trained, repo_id="alice/numbers")
        for one, other in ((here, there), (there, here)):
            merged, conflicts = merge_edited_cards(ModelCard(one), ModelCard(other), now)
            assert not conflicts
            text = merged.content.replace("\r\n", "\n")
            for words in (
                "# Numbers!\n",
                "## How to\n",
                "library_name: Tra",
                "pipeline_tag: mis",
                "\nMine.\n",
                "12.34",
            ):
                assert words in text
            assert {"here", "there"} < set(data_of(merged).tags)
            assert "limits" not in names_of(merged)
            assert (merged.content.count("\r\n") == merged.content.count("\n")) == (one is there)
            assert merge_model_card(merged, now).content == merged.content
            # What both were made from by editing is known here, so that only the later edits count.
            newest = ModelCard(merged.content.replace("Numbers!", "Numbers?").replace("Mine.", "Ours."))
            again, conflicts = merge_edited_cards(newest, merged, now, base=merged)
            assert not conflicts
            assert says_the_same(again, newest)

    @pytest.mark.parametrize(
        ("old", "one", "other", "where"),
        [
            ("## Limits", "## Bounds", "## Borders", "the section limits"),
            (
                "<!-- end: use -->\n",
                "<!-- end: use -->\nA\n",
                "<!-- end: use -->\nB\n",
                "the text after the section use",
            ),
            ("pipeline_tag: translation", "pipeline_tag: a", "pipeline_tag: b", "the metadata pipeline_tag"),
            ("value: ", "value: 1", "value: 2", "a score in the metadata"),
        ],
    )
    def test_the_same_place_edited_in_two_ways_is_told(
        self, trained: Path, old: str, one: str, other: str, where: str
    ) -> None:
        card = build_model_card(trained)
        assert old in card.content
        here, there = (ModelCard(card.content.replace(old, new, 1)) for new in (one, other))
        for prefer, expected in (("here", here), ("there", there)):
            choice: Any = prefer
            merged, conflicts = merge_edited_cards(here, there, card, prefer=choice)
            assert conflicts == [where]
            assert says_the_same(merged, expected)

    def test_a_card_that_has_all_of_the_other_is_taken(self, trained: Path) -> None:
        card = build_model_card(trained)
        here, there = (ModelCard(f"{card.content}\n{words}") for words in ("One.\n", "One.\n\nTwo.\n"))
        for cards in ((here, there), (there, here)):
            merged, conflicts = merge_edited_cards(*cards, card)
            assert not conflicts
            assert merged.text.split()[-2:] == ["One.", "Two."]

    def test_metadata_that_the_user_changed_or_removed_stay_so(self, trained: Path) -> None:
        card = build_model_card(trained, tags=["first"])
        data = data_of(card)
        data.language, data.pipeline_tag = ["en", "de", "nl"], None
        change(trained / "config.json", langs=["fr", "it"], auto_map={})
        merged = data_of(merge_model_card(ModelCard(card.content), build_model_card(trained, tags=["second"])))
        assert merged.language == ["en", "de", "nl"]
        assert merged.pipeline_tag is None
        assert merged.tags[-2:] == ["first", "second"]
        untouched = data_of(merge_model_card(build_model_card(trained), build_model_card(trained, language="eu")))
        assert untouched.language == "eu"

    def test_the_relation_is_to_the_base_model_of_the_card(self, trained: Path) -> None:
        card = use_base_model(trained, "me/base")
        found = relation_of(card)
        assert found == ("me/base", "finetune")
        # One that a user gave stays, with the relation, when it is not given again.
        unknown = use_base_model(trained, None)
        given = build_model_card(trained, base_model="me/base")
        merged = merge_model_card(given, unknown)
        assert relation_of(given) == relation_of(merged) == ("me/base", "finetune")
        assert relation_of(merge_model_card(card, unknown)) == (None, None)
        assert relation_of(merge_model_card(card, use_base_model(trained, "me/other"))) == ("me/other", "finetune")
        assert relation_of(merge_model_card(given, build_model_card(trained, base_model="me/new")))[0] == "me/new"

    @pytest.mark.parametrize("is_given", [False, True])
    @pytest.mark.parametrize("is_old", [False, True])
    @pytest.mark.parametrize(
        ("edit", "expected"),
        [
            (("base_model_relation: finetune", "base_model_relation: adapter"), ("me/base", "adapter")),
            (("base_model_relation: finetune\n", ""), ("me/base", None)),
            (("base_model: me/base\n", ""), (None, None)),
            (("base_model: me/base", "base_model: me/other"), ("me/other", None)),
        ],
    )
    def test_no_relation_is_told_but_the_users_and_that_of_the_generated_base_model(
        self,
        trained: Path,
        edit: tuple[str, str],
        expected: tuple[str | None, str | None],
        is_old: bool,
        is_given: bool,
    ) -> None:
        """Cards of older versions have none, nor do they record it."""
        generated = use_base_model(trained, "me/base")
        content = generated.content
        if is_old:
            content = content if "adapter" in edit[1] else content.replace("base_model_relation: finetune\n", "")
            content = re.sub(r', "base_model_relation": "\w+"', "", content)
        card = ModelCard(content.replace(*edit))
        if is_old and not edit[1] and "relation" in edit[0]:
            expected = ("me/base", "finetune")  # nobody has removed it, it is new
        if is_given:
            generated = build_model_card(trained, base_model="me/base")
            # The user's latest word.
            expected = ("me/base", expected[1] if expected[0] == "me/base" else "finetune")
        merged = merge_model_card(card, generated)
        assert relation_of(merged) == expected
        assert merge_model_card(merged, generated).content == merged.content
        for cards in ((card, generated), (generated, card)):
            both, conflicts = merge_edited_cards(*cards, generated)
            assert (relation_of(both), conflicts) == (expected, [])
            assert merge_model_card(both, generated).content == both.content
        # What the user writes there then is the user's.
        data = data_of(merged)
        data.base_model, data.base_model_relation = "me/other", "finetune"
        generated = use_base_model(trained, "me/base")
        again = merge_model_card(merge_model_card(ModelCard(merged.content), generated), generated)
        # Unless it is our word that stands there still.
        assert relation_of(again) == ("me/other", None if expected[1] == "finetune" else "finetune")

    def test_results_are_merged_one_by_one(self, trained: Path) -> None:
        card = build_model_card(trained)
        data = data_of(card)
        own = EvalResult("translation", "wmt", "WMT", "bleurt", 0.5)
        bleu, chrf, greedy, removed = data.eval_results
        bleu.metric_value = 99.0
        for result in (bleu, chrf, greedy):
            result.dataset_name = "News of the day"
        data.eval_results = [bleu, own, chrf, greedy]
        for name in ("test", "test-greedy"):
            change(trained / name / "metrics.json", bleu=11.0, chrf=22.0)
        merged = data_of(merge_model_card(ModelCard(card.content), build_model_card(trained)))
        found = {result.metric_name or "own": result for result in merged.eval_results}
        assert len(found) == len(merged.eval_results) == 4
        assert removed.metric_name not in found
        assert found["own"] == own
        assert found["sacreBLEU (2 beams, GNMT length penalty 0.6)"].metric_value == 99.0
        assert found["chrF (2 beams, GNMT length penalty 0.6)"].metric_value == 22.0
        assert found["chrF (2 beams, GNMT length penalty 0.6)"].dataset_name == "News of the day"
        assert found["sacreBLEU (greedy)"].metric_value == 11.0

    def test_results_that_are_gone_leave_no_index(self, trained: Path) -> None:
        card = build_model_card(trained)
        for name in ("test", "test-greedy"):
            shutil.rmtree(trained / name)
        data = data_of(merge_model_card(card, build_model_card(trained))).to_dict()
        assert not {"model-index", "model_name", "metrics"} & data.keys()

    @pytest.mark.parametrize("record", ["{", "{}", "[]", '{"sections": 1, "metadata": {}}'])
    def test_with_a_broken_record_all_metadata_are_the_users(self, trained: Path, record: str) -> None:
        card = build_model_card(trained)
        head, _, tail = card.content.rpartition('{"sections"')
        broken = ModelCard(f"{head}{record}{tail[tail.index(' -->') :]}")
        change(trained / "config.json", langs=["fr", "it"])
        merged = merge_model_card(broken, build_model_card(trained))
        assert data_of(merged).language == ["en", "de"]
        assert names_of(merged) == names_of(card)


@pytest.fixture(scope="module")
def cards(original: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Cards of one model at different times."""
    folder = shutil.copytree(original, tmp_path_factory.mktemp("times") / "numbers")
    texts = [build_model_card(folder).content]
    change(folder / "test" / "metrics.json", bleu=1.5)
    (folder / "curves.png").unlink()
    texts.append(build_model_card(folder, repo_id="alice/numbers", license="mit", tags=["new"]).content)
    shutil.rmtree(folder / "test")
    (folder / "arguments.json").unlink()
    texts.append(build_model_card(folder, language=["fr"]).content)
    return texts


LINES = st.one_of(
    st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=20).filter(str.strip),
    st.sampled_from(["<!-- end: use -->", "<!-- generated: limits 0123456789ab -->", "# Mine", "---", "-->", "<!--"]),
)
EDITS = st.lists(st.tuples(st.sampled_from(["insert", "delete"]), st.integers(0, 300), LINES), max_size=6)
VALUES = st.one_of(
    st.text("abc", max_size=3), st.integers(), st.lists(st.text("abc", min_size=1, max_size=3)), st.none()
)
METADATA = st.dictionaries(
    st.sampled_from(["license", "language", "pipeline_tag", "mine", "base_model", "base_model_relation"]), VALUES
)


SECTIONS = ("summary", "use", "architecture", "data", "training", "evaluation", "examples", "limits", "license")
# What is done to whole sections.
RESHAPED = st.lists(
    st.tuples(
        st.sampled_from(["delete", "without body", "without comments", "up", "down", "twice"]),
        st.sampled_from(SECTIONS),
    ),
    max_size=3,
)


def reshape(text: str, how: str, name: str) -> str:
    found = re.search(rf"<!-- generated: {name} [^\n]*\n(.*?)<!-- end: {name} -->\n?", text, re.DOTALL)
    if found is None:
        return text
    whole, body = found[0], found[1]
    others = text.replace(whole, "")
    return {
        "delete": others,
        "without body": text.replace(body, ""),
        "without comments": text.replace(whole, body),
        "up": whole + others,
        "down": others + whole,
        "twice": text + whole,
    }[how]


@given(first=st.integers(0, 2), number=st.integers(0, 2), edits=RESHAPED, windows=st.booleans())
def test_sections_that_were_deleted_or_moved_or_converted_stay_so(
    cards: list[str], first: int, number: int, edits: list[tuple[str, str]], windows: bool
) -> None:
    card = ModelCard(cards[first])
    for how, name in edits:
        card.text = reshape(card.text, how, name)
    card = ModelCard(card.content.replace("\n", "\r\n") if windows else card.content)
    generated = ModelCard(cards[number])
    merged = merge_model_card(card, generated)
    assert merge_model_card(merged, generated).content == merged.content
    assert number != first or merge_model_card(card, merged).content == merged.content
    assert windows == ("\r\n" in merged.content)
    for how, name in edits:
        if how == "delete" and {each for _, each in edits if each == name} == {name} and name in names_of(card):
            assert name not in names_of(merged)
    # Beside itself, and beside a card of now in which nothing was written, nothing else comes of it. (Beside one of
    # another time, sections that were moved may be reported as a conflict, which loses nothing.)
    for other in (card, ModelCard(cards[first])) if number == first else (card,):
        both, conflicts = merge_edited_cards(card, other, generated)
        assert not conflicts
        assert says_the_same(both, merged)


@given(
    first=st.integers(-1, 2), then=st.lists(st.integers(0, 2), min_size=1, max_size=3), edits=EDITS, metadata=METADATA
)
def test_whatever_is_edited_survives_and_merging_again_changes_nothing(
    cards: list[str], first: int, then: list[int], edits: list[tuple[str, int, str]], metadata: dict[str, Any]
) -> None:
    content = "---\nmine: 1\n---\nforeign\n" if first < 0 else cards[first]
    card = ModelCard(content)
    lines = card.text.split("\n")
    inserted = []
    for kind, place, text in edits:
        place %= len(lines) + 1
        if kind == "insert":
            lines.insert(place, text)
            inserted.append(text)
        elif place < len(lines) and lines[place] not in inserted:
            del lines[place]
    card.text = "\n".join(lines)
    for key, value in metadata.items():
        card.data[key] = value
    card = ModelCard(card.content)
    before = deepcopy(card.data.to_dict())
    blank = not card.text.strip()
    for number in then:
        generated = ModelCard(cards[number])
        merged = merge_model_card(card, generated)
        assert merge_model_card(merged, generated).content == merged.content
        found = merged.text.split("\n")
        for text in inserted:
            assert blank or found.count(text) >= inserted.count(text), text
        given_now = {1: "license", 2: "language"}.get(number)
        for key, value in metadata.items():
            if key in before and value != data_of(ModelCard(content)).get(key) and key != given_now:
                assert merged.data.to_dict().get(key) == before[key], key
        card, before = merged, deepcopy(merged.data.to_dict())
