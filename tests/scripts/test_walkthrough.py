"""The walk through the Transformer: what it computes by hand is checked, what it says holds in every language."""

import contextlib
import importlib
import io
import os
import re
import string
import sys
import textwrap
import unicodedata
from typing import Any

import pytest
import torch

WIDTHS = (60, 100)
walkthrough: Any = importlib.import_module("walkthrough")
printing: Any = importlib.import_module("walkthrough_steps.printing")


def print_walk(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        walkthrough.main(["--disable_tqdm", *arguments])
    return printed.getvalue()


@pytest.fixture(scope="module")
def output() -> str:
    """What a whole walk prints; in so many steps the model learns as much as in the default's."""
    return print_walk("--steps", "280")


@pytest.fixture(scope="module")
def untrained() -> dict[str, str]:
    return {language: print_walk("--lang", language, "--steps", "1") for language in walkthrough.TEXTS}


def blocks_of(texts: dict[str, str]) -> list[str]:
    blocks = [block for text in texts.values() if "\n" in text for block in text.strip("\n").split("\n\n")]
    return [block for block in blocks if not block.startswith(("# ", "    "))]


def kinds_of(text: str) -> list[str]:
    """Which blocks of a text are headings, which are formulas and which are paragraphs."""
    return [re.findall(r"^# |^    |^", block)[0] for block in text.strip("\n").split("\n\n")]


class TestTexts:
    def test_every_language_says_everything_with_the_same_values(self) -> None:
        english = walkthrough.TEXTS["en"]
        for texts in walkthrough.TEXTS.values():
            assert texts.keys() == english.keys()
            for name in english:
                used = [
                    {(field, spec) for _, field, spec, _ in string.Formatter().parse(text[name]) if field}
                    for text in (english, texts)
                ]
                assert used[0] == used[1], name
                assert kinds_of(english[name]) == kinds_of(texts[name]), name

    def test_both_languages_print_the_same_numbers(self, untrained: dict[str, str]) -> None:
        english, chinese = untrained["en"], untrained["zh"]
        numbers = [sorted(re.findall(r"-?\d+\.\d+(?:e[-+]\d+)?", text)) for text in (english, chinese)]
        assert numbers[0] == numbers[1]
        assert len(numbers[0]) > 100


class TestLines:
    @pytest.mark.parametrize("width", WIDTHS)
    def test_english_is_filled_as_textwrap_fills_it(self, width: int) -> None:
        for block in blocks_of(walkthrough.TEXTS["en"]):
            # Formulas, which are not broken, would begin elsewhere.
            paragraph = " ".join(word for word in block.split() if word not in "=+*/")
            expected = textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False)
            assert printing.fill(paragraph, width) == expected

    @pytest.mark.parametrize("width", WIDTHS)
    def test_chinese_fits_and_loses_nothing(self, width: int) -> None:
        for block in blocks_of(walkthrough.TEXTS["zh"]):
            paragraph = printing.join_lines(block)
            lines = printing.fill(paragraph, width).split("\n")
            assert "".join(lines).replace(" ", "") == paragraph.replace(" ", "") == re.sub(r"\s", "", block)
            for line in lines:
                assert line == line.strip()
                assert line[0] == "*" or unicodedata.category(line[0]) not in ("Pe", "Pf", "Po")
                assert unicodedata.category(line[-1]) not in ("Ps", "Pi")
                assert printing.display_width(line) <= width or re.fullmatch(r"[!-~]+.?", line)

    def test_chinese_characters_take_two_columns(self) -> None:
        assert printing.display_width("x 是 y。") == 8
        assert printing.fill("一二三四五。六七", 10) == "一二三四\n五。六七"
        assert printing.fill("一二三 a = b 四", 10) == "一二三\na = b 四"
        assert printing.join_lines("一二\n三。\nabc\n四") == "一二三。abc 四"

    def test_lines_are_no_wider_than_the_terminal(self, untrained: dict[str, str]) -> None:
        for text in untrained.values():
            # An untrained model's translations are what they are.
            for line in text.split("\n14  ")[0].splitlines():
                assert printing.display_width(line) <= 80


class TestChecks:
    def test_each_check_is_printed_and_is_rounding_only(self, untrained: dict[str, str]) -> None:
        differences = re.findall(r"at most\s(\S+e[-+]\d+)\s+apart", untrained["en"])
        assert len(differences) == 14
        assert all(float(difference) < 1e-5 for difference in differences)

    def test_a_wrong_equation_is_noticed(self, monkeypatch: Any) -> None:
        steps = importlib.import_module("walkthrough_steps.model_steps")
        right = steps.masked_scores
        monkeypatch.setattr(steps, "masked_scores", lambda *arguments: right(*arguments) * 1.01)
        with pytest.raises(ValueError, match=r"encoder_attentions\[0\]\[:, 0\] by hand and by the model differ"):
            print_walk("--steps", "1")

    def test_shapes_and_nan_are_noticed_too(self) -> None:
        out = printing.Printer(walkthrough.TEXTS["en"])
        with pytest.raises(ValueError, match=r"x is \(2, 1\) by hand and \(2,\) by the model"):
            out.check("x", torch.zeros(2, 1), torch.zeros(2))
        with pytest.raises(ValueError, match="differ by nan"):
            out.check("x", torch.tensor([float("nan")]), torch.tensor([0.0]))

    def test_adam_by_hand_is_torchs_for_many_updates(self) -> None:
        equations: Any = importlib.import_module("walkthrough_steps.equations")
        parameter = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([parameter], lr=0.01, betas=(0.9, 0.98), eps=1e-9)
        by_hand, mean, variance = parameter.detach().clone(), torch.zeros(3, 4), torch.zeros(3, 4)
        for update in range(1, 6):
            parameter.grad = torch.randn(3, 4, dtype=torch.float64)
            optimizer.step()
            result = equations.adam_update(by_hand, parameter.grad, mean, variance, update, learning_rate=0.01)
            by_hand, mean, variance = result.parameter, result.mean, result.variance
            torch.testing.assert_close(by_hand, parameter.detach(), rtol=1e-12, atol=1e-12)


class TestWalk:
    def test_the_corpus_puts_colours_behind_their_nouns_and_makes_them_agree(self) -> None:
        task: Any = importlib.import_module("walkthrough_steps.task")
        corpus = {" ".join(source): " ".join(target) for source, target in task.make_corpus()}
        assert corpus["a green car and a white book"] == "une voiture verte et un livre blanc"
        assert corpus["a white house"] == "une maison blanche"
        assert len(corpus) == 36 + 36 * 36
        assert all(corpus[" ".join(source)] == " ".join(target) for source, target in task.EXAMPLES)

    def test_the_steps_come_in_order(self, output: str) -> None:
        assert re.findall(r"^(\d+)  .*\n-{4,}$", output, flags=re.MULTILINE) == [str(step) for step in range(15)]

    def test_the_model_learns_the_task(self, output: str) -> None:
        right, total = re.findall(r"translates (\d+)\s+of (\d+)\s+held-out", output)[0]
        assert int(total) == 100
        assert int(right) >= 95
        assert re.search(r"<s> une balle blanche et un chien +-> +</s> 0\.[89]", output)

    @pytest.mark.parametrize("is_trained", [True, False])
    def test_each_row_names_its_largest_weight(self, output: str, untrained: dict[str, str], is_trained: bool) -> None:
        text = output if is_trained else untrained["en"]
        lines = text.split("cross_attentions[-1].mean(1)")[1].splitlines()[1:9]
        columns = lines[0].split()
        assert [line.split()[0] for line in lines[1:]] == ["une", "balle", "blanche", "et", "un", "chien", "</s>"]
        for line in lines[1:]:
            numbers, found = line.split("->")
            weights = [float(number) for number in numbers.split()[1:]]
            assert found.strip() in [columns[i] for i, weight in enumerate(weights) if weight == max(weights)]
        # A trained decoder reads colours off their own words.
        assert not is_trained or re.search(r" blanche .*-> white\n", text)

    def test_the_learning_rate_is_equation_3(self, output: str) -> None:
        rates = re.findall(r"lrate ((?: +0\.\d+)+)\n", output)[0].split()
        expected = [32**-0.5 * min(step**-0.5, step * 100**-1.5) for step in (1, 50, 100, 400)]
        assert [float(rate) for rate in rates] == pytest.approx(expected, abs=5e-6)


class TestCommand:
    def test_any_terminal_gets_utf8_and_a_reader_may_leave(self, monkeypatch: Any, capsys: Any) -> None:
        reader, writer = os.pipe()
        with open(writer, "w", encoding="ascii") as pipe:
            monkeypatch.setattr(sys, "stdout", pipe)
            monkeypatch.setattr(walkthrough, "run", lambda arguments: print("注意力", flush=True))
            walkthrough.main(["--lang", "zh"])
            assert os.read(reader, 100) == "注意力\n".encode()
            os.close(reader)
            with pytest.raises(SystemExit) as end:
                walkthrough.main(["--lang", "zh"])
            print("more")  # what is still buffered goes nowhere, quietly
        assert (end.value.code, capsys.readouterr().err) == (1, "")

    def test_bad_arguments_are_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments, message in ((["--steps", "0"], "at least 1"), (["--lang", "xx"], "invalid choice")):
            with pytest.raises(SystemExit):
                walkthrough.main(arguments)
            assert message in capsys.readouterr().err
