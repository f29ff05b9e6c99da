"""Texts in sentences and together again: white space, tags and placeholders stay, and the time is bounded."""

import random
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

# ruff: noqa: E402 (what the server needs may be missing)
for _name in ("sentencex", "babel"):
    pytest.importorskip(_name, reason=f"the server needs {_name}: pip install 'vanilla-transformer[serve]'")

from vanilla_transformer.apps.sentences import KEPT
from vanilla_transformer.apps.texts import Pieces
from vanilla_transformer.data.detection import find_iso_code
from vanilla_transformer.hub.words import name_language


class TestPieces:
    @given(st.text(), st.sampled_from(["en", "de", "zh", "deu_Latn", "xx"]), st.booleans())
    def test_a_text_comes_together_as_it_was(self, text: str, language: str, cuts_lines: bool) -> None:
        pieces = Pieces(text, language, cuts_lines=cuts_lines)
        assert pieces.join(pieces.sentences) == text
        assert all(sentence == sentence.strip() != "" for sentence in pieces.sentences)
        assert not any(mark in sentence for sentence in pieces.sentences for mark in "\r\n")

    @given(
        st.lists(st.sampled_from(["<b>", "</b>", "<br/>", "a b", "&amp;", "\n", "<!-- a -->", " ", "c.", "<p x='1'>"]))
    )
    @example(["<b>", "a b", "\n", "</b>", "&amp;"])
    @example(["<b>", " ", "a b", "</b>", "&amp;"])
    @example(["&amp;", "<b>", "a b", " ", "\n", "</b>"])
    @example(["a b", "<b>", "a b", "\n", "</b>", "a b"])
    @example(["c.", "<b>", "c.", "c.", "</b>"])
    def test_markup_comes_together_as_it_was(self, parts: list[str]) -> None:
        pieces = Pieces("".join(parts), "en", is_html=True)
        joined = pieces.join(pieces.sentences)
        assert re.sub(r"\s+", " ", joined) == re.sub(r"\s+", " ", "".join(parts)), "a line break is a space"
        assert not any("<" in sentence or "&amp;" in sentence for sentence in pieces.sentences)

    def test_a_line_break_of_html_ends_no_sentence(self) -> None:
        assert Pieces("10&nbsp;\nkm 5&nbsp;m", "en", is_html=True).sentences == ["10\xa0 km 5\xa0m"]
        page = "<div>\n <p>This is\n  <b>a long</b>\nsentence.</p>\n<pre>one\n two</pre><p>a\nb</p>\n</div>"
        pieces = Pieces(page, "en", is_html=True)
        assert pieces.sentences == ["This is a long sentence.", "This is", "a long", "sentence.", "one", "two", "a b"]
        expected = page.replace("is\n  <b>", "is <b>").replace("</b>\n", "</b> ").replace("a\nb", "a b")
        assert pieces.join(pieces.sentences) == expected

    def test_lines_are_cut_by_the_rules_of_the_language(self) -> None:
        text = "Mr. Smith came.  He left.\n\nWhy?"
        pieces = Pieces(text, "en")
        assert pieces.sentences == ["Mr. Smith came.", "He left.", "Why?"]
        assert pieces.join(["A.", "B.", "C?"]) == "A.  B.\n\nC?"
        assert Pieces(text, "en", cuts_lines=False).sentences == ["Mr. Smith came.  He left.", "Why?"]
        assert Pieces("你好。我很好。", "zho_Hans").sentences == ["你好。", "我很好。"]
        assert Pieces("x &lt; y", "en", is_html=True).join(["1 < 2 & 3"]) == "1 &lt; 2 &amp; 3"

    @pytest.mark.parametrize(
        ("page", "expected"),
        [
            ("<p>hi</p><!-- <div>old</div> --><p>x</p>", "<p>HI</p><!-- <div>old</div> --><p>X</p>"),
            ("<img alt=\"a > b\"> y <a href='?a>b'>z</a>", "<img alt=\"a > b\"> Y <a href='?a>b'>Z</a>"),
            ("<button @click=\"() => f('x')\">go</button>", "<button @click=\"() => f('x')\">GO</button>"),
            ("<p title=don't>it's</p>", "<p title=don't>IT'S</p>"),
            ('<img alt="3 < 4">hi', '<img alt="3 < 4">HI'),
            ("<p onclick='if (a<b) f()'>hi</p>", "<p onclick='if (a<b) f()'>HI</p>"),
            ("<!-- a <!-- b --> c -->", "<!-- a <!-- b --> C --&gt;"),
            ("a <!-- no end", "A &lt;!-- NO END"),
        ],
    )
    def test_comments_and_attributes_may_hold_the_signs_of_tags(self, page: str, expected: str) -> None:
        pieces = Pieces(page, "en", is_html=True)
        assert pieces.join([sentence.upper() for sentence in pieces.sentences]) == expected

    def test_time_grows_with_the_length_alone(self) -> None:
        for text in (
            "<a " * 20_000,
            '<a "<' * 12_000,
            "<a '" + "<" * 60_000,
            "a" + " " * 60_000 + "b",
            "a" + " \n" * 30_000 + "b",
            '<a "' * 15_000,
            "<!--" * 15_000,
            "<!-- -->" * 7_500,
            '<a "x" ' * 9_000,
            "!-" * 30_000,
            "a. " * 20_000,
            "\n" * 62_500,
            "&" * 62_500,
            "<b>a</b> " * 7_500,
            "<code>" * 10_000,
            "<a b=c " * 7_500,
            "a {b}. " * 7_500,
            "{a" * 30_000,
            "%(a" * 20_000,
            "a@" * 30_000,
            "http://" * 7_500,
        ):
            for is_html in (True, False):
                start = time.process_time()
                pieces = Pieces(text, "en", is_html=is_html)
                pieces.join(["a"] * len(pieces.sentences))
                assert time.process_time() - start < 5, text[:20]

    def test_long_lines_are_cut_where_short_ones_are(self) -> None:
        sentences = [f"This is the sentence of number {number}, by Mr. Smith." for number in range(500)]
        assert Pieces(" ".join(sentences), "en").sentences == sentences

    def test_languages_have_names(self) -> None:
        codes = {"en": "en", "deu_Latn": "de", "pt-BR": "pt", "tlh": "tlh", "tl": "tl", "sh": "sr", "prs_Arab": "fa"}
        assert {code: find_iso_code(code) for code in codes} == codes
        assert [name_language(code) for code in ("en", "deu_Latn", "pt-BR", "q-none")] == [
            *("English", "German", "Brazilian Portuguese", "q-none")
        ]


KEPT_TEXTS = [
    "{name}",
    "{{ x }}",
    "${a}",
    "%s",
    "%(n)d",
    "%1$s",
    "https://a.example/b?c=d&e=(f)",
    "www.a.example",
    "a.b@c.example",
]
TAGS = ["<b>", "</b>", '<a href="x">', "</a>", "<i>", "</i>", "<code>x &amp; y</code>"]


def write_noise(sentence: str) -> str:
    """What a model might make of a sentence, at its worst."""
    choose = random.Random(sentence)
    return "".join(choose.choices("ab .<{%s}&;", k=choose.randrange(9)))


class TestWhatIsKept:
    @given(st.lists(st.sampled_from([*KEPT_TEXTS, "word", "Two words.", " ", "\n", ", "])), st.booleans())
    def test_comes_out_once_each_and_in_order_whatever_the_model_does(self, parts: list[str], is_html: bool) -> None:
        text = " ".join(parts)
        pieces = Pieces(text, "en", is_html=is_html)
        joined = pieces.join(["x" for _ in pieces.sentences])
        expected = KEPT.findall(text)
        assert KEPT.findall(joined.replace("&amp;", "&") if is_html else joined) == expected

    @given(st.lists(st.sampled_from([*TAGS, "word", "Two words.", " ", "{a}"])), st.booleans())
    def test_tags_come_out_once_each_whatever_the_model_does(self, parts: list[str], is_html: bool) -> None:
        pieces = Pieces("".join(parts), "en", is_html=is_html)
        tags = re.findall("<[^<>]*>", "".join(parts))
        for translate in (str, str.upper, lambda sentence: "", lambda sentence: "x", write_noise):
            joined = pieces.join([translate(sentence) for sentence in pieces.sentences])
            found = [tag for tag in re.findall("<[^<>]*>", joined) if tag in TAGS or tag in ("<code>", "</code>")]
            assert sorted(found) == sorted(tags)

    def test_a_translation_that_keeps_it_is_taken_whole(self) -> None:
        pieces = Pieces("Hello {name}, see www.a.example today.", "en")
        assert pieces.sentences == ["Hello {name}, see www.a.example today.", "Hello", "see", "today."]
        assert pieces.join(["Heute www.a.example, {name}!", "1", "2", "3"]) == "Heute www.a.example, {name}!"
        assert pieces.join(["Heute {Name}!", "Hallo", "siehe", "heute."]) == "Hallo {name}, siehe www.a.example heute."
        assert Pieces("{name}: 5 %", "en").sentences == ["{name}: 5 %", "5 %"]
        assert Pieces("{name}", "en").sentences == []
        assert Pieces("100%sure, 5 % so", "en").sentences == ["100%sure, 5 % so"]

    @pytest.mark.parametrize(
        ("text", "kept"),
        [
            ("网址：https://example.com，欢迎访问我们的网站。我们明天见。", ["https://example.com"]),
            ("请访问www.example.com。", ["www.example.com"]),
            ("请写信给info@example.com联系我们。", ["info@example.com"]),
            ("詳しくはhttps://example.jp/aをご覧ください。", ["https://example.jp/a"]),
            ("ดูที่https://example.com/aได้เลย", ["https://example.com/a"]),
            ("https://example.com에서 %d개를 보세요.", ["https://example.com", "%d"]),
            ("已删除%d个文件，共%1$s。", ["%d", "%1$s"]),
            ("See https://example.com—it is good.", ["https://example.com"]),
            ("Siehe https://example.com/größe.", ["https://example.com/größe"]),
            ("Schreib an jörg@müller.example!", ["jörg@müller.example"]),
            ("100%sûr, éhttps://a.b", []),
        ],
    )
    def test_where_it_ends_in_all_scripts(self, text: str, kept: list[str]) -> None:
        assert KEPT.findall(text) == kept
        pieces = Pieces(text, "en")
        assert pieces.join(pieces.sentences) == text
        assert KEPT.findall(pieces.join(["x" for _ in pieces.sentences])) == kept

    def test_what_was_apart_without_a_space_stays_apart(self) -> None:
        for text, runs, expected in (
            ("请访问www.a.example。", ["Visit"], "Visit www.a.example。"),
            ("写信给a@b.example联系我们。", ["Write to", "contact us."], "Write to a@b.example contact us."),
            ("a@b.example에게 쓰세요", ["Write"], "a@b.example Write"),
            ("<b>蓝色</b>衬衫{x}", ["Blue", "shirt"], "<b>Blue</b> shirt{x}"),
            ("<b>Haus</b>boot", ["House", "boat"], "<b>House</b>boat"),
        ):
            assert Pieces(text, "en", is_html="<" in text).join(["", *runs]) == expected

    def test_characters_of_scripts_without_spaces_are_words(self) -> None:
        pieces = Pieces("Deleted %d <b>blue files</b>.", "en", is_html=True)
        assert pieces.join(["已删除%d个蓝色文件。", "删除", "蓝色文件"]) == "已删除%d个<b>蓝色文件</b>。"
        assert Pieces("See <b>{x}</b> now.", "en").join(["现在看{x}吧。", "a", "b"]) == "现在看<b>{x}</b>吧。"

    def test_tags_stand_where_what_they_enclose_is_found(self) -> None:
        pieces = Pieces("<p>A man in a <b>blue shirt</b> <i>sits</i>.</p>", "en", is_html=True)
        whole, *runs = pieces.sentences
        assert (whole, runs) == ("A man in a blue shirt sits.", ["A man in a", "blue shirt", "sits"])
        found = pieces.join(["Es sitzt ein Mann im blauen Hemd.", "Ein Mann in", "Blauen Hemd.", "sitzt"])
        assert found == "<p>Es <i>sitzt</i> ein Mann im <b>blauen Hemd</b>.</p>"
        for lost in ("Es sitzt ein Mann.", "sitzt blauen Hemd sitzt.", "Es sitztblauen Hemd"):
            assert (
                pieces.join([lost, "Ein Mann in", "blauem", "sitzt"])
                == "<p>Ein Mann in <b>blauem</b> <i>sitzt</i>.</p>"
            )

    def test_tags_are_not_put_into_what_is_kept(self) -> None:
        for source, whole, expected in (
            ("<b>name</b> to {name}.", "{name} zum Namen.", "<b>Name</b> zu {name}."),
            ("Read <a>docs</a> at www.a.org/docs now.", "Docs: www.a.org/docs.", "<a>Docs</a>: www.a.org/docs."),
        ):
            pieces = Pieces(source, "en")
            known = {"name": "Name", "to": "zu", "docs": "docs"}
            runs = [known.get(run, run) for run in pieces.sentences[1:]]
            assert pieces.join([whole, *runs]) == expected
        assert Pieces("See <b>{x}</b> now.", "en").join(["Jetzt {x}.", "a", "b"]) == "Jetzt <b>{x}</b>."

    def test_tags_at_the_edges_leave_a_sentence_whole(self) -> None:
        page = "<ul><li><b>Two <u>men</u>.</b> <i>They sit.</i></li></ul>"
        pieces = Pieces(page, "en", is_html=True)
        assert pieces.sentences == ["Two men.", "Two", "men", "They sit."]
        joined = pieces.join(["Zwei Leute.", "Zwei", "Leute", "Sie sitzen."])
        assert joined == "<ul><li><b>Zwei <u>Leute</u>.</b> <i>Sie sitzen.</i></li></ul>"
        assert Pieces("<b>The end.", "en").join(["Das Ende."]) == "<b>Das Ende."
        assert Pieces("Hello <name>!", "en").join(["x", "Hallo"]) == "Hallo <name>!"
        assert Pieces("if x <y and z> w", "en").sentences == ["if x <y and z> w"]

    def test_a_sentence_does_not_end_within_it(self) -> None:
        ends = "See https://a.example/?b=c!d. {{ One. Two }} Three. Four."
        sentences = Pieces(ends, "en").sentences
        assert sentences[-1] == "Four."
        assert all(("{{" in sentence) == ("}}" in sentence) for sentence in sentences)
