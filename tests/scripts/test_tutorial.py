"""The tutorial: its files are current, its notebooks run, and its checks reject wrong answers and say why."""

import importlib
import itertools
import string
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import nbformat
import pytest
import torch
from chromium import Browser, open_chromium
from node_packages import find_node_modules
from page_server import serve

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.export.onnx import OLDEST_TRANSFORMERS

build: Any = importlib.import_module("tutorial.build")
checks: Any = importlib.import_module("tutorial.checks")
solutions: Any = importlib.import_module("tutorial.solutions")
FOLDER = Path(build.__file__).parent
LANGUAGES = list(checks.LANGUAGES)
SOLUTIONS = build.read_solutions()

# By exercise: the hint, and what makes the solution wrong: a part of it, and what takes its place.
WRONG = {
    "positional_encoding": {
        "positions.exchanged": ("[angles.sin(), angles.cos()]", "[angles.cos(), angles.sin()]"),
        "positions.halves": (
            "torch.stack([angles.sin(), angles.cos()], dim=-1)",
            "torch.cat([angles.sin(), angles.cos()], 1)",
        ),
        "positions.from_one": ("arange(length,", "arange(1, length + 1,"),
        "positions.own_exponent": (
            "torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)",
            "torch.cat([(positions / 10000 ** (j / d_model) + j % 2 * math.pi / 2).sin() for j in range(d_model)], 1)",
        ),
        "positions.doubled_exponent": ("(torch.arange(0", "(2 * torch.arange(0"),
        "positions.not_doubled": ("arange(0, d_model, 2)", "arange(d_model // 2)"),
        "positions.not_divided": (" / d_model)", ".double())"),
    },
    "attention": {
        "attention.scale": (" / math.sqrt(query.shape[-1])", ""),
        "attention.square": ("math.sqrt(query.shape[-1])", "query.shape[-1]"),
        "attention.width": ("math.sqrt(query.shape[-1])", "math.sqrt(key.shape[-2])"),
        "attention.axis": ("softmax(dim=-1)", "softmax(dim=-2)"),
        "attention.inverted": ("~allowed", "allowed"),
        "attention.unmasked": (".masked_fill(~allowed, -math.inf)", ""),
        "attention.masked_late": (".masked_fill(~allowed, -math.inf).softmax(dim=-1)", ".softmax(dim=-1) * allowed"),
        "attention.zero": ("-math.inf", "0.0"),
        "attention.scores": (".masked_fill(~allowed, -math.inf).softmax(dim=-1)", " * allowed"),
        "attention.weights": ("return weights @ value", "return weights"),
        "nan": ("math.sqrt(query.shape[-1])", "0.0"),
    },
    "split_heads": {
        "heads.view": (
            "unflatten(-1, (heads, -1)).transpose(1, 2)",
            "reshape(len(states), heads, states.shape[1], -1)",
        ),
        "heads.order": (".transpose(1, 2)", ""),
        "heads.interleaved": ("(heads, -1)).transpose(1, 2)", "(-1, heads)).permute(0, 3, 1, 2)"),
        "heads.sizes": ("(heads, -1)", "(-1, heads)"),
        "shape": ("transpose(1, 2)", "flatten(1)"),
    },
    "padding_mask": {
        "padding.inverted": ("!=", "=="),
        "padding.axes": ("[:, None, None, :]", ""),
        "padding.end": ("(input_ids != pad_id)", "((input_ids != pad_id) & (input_ids != 2))"),
        "padding.number": ("!= pad_id", "!= 1"),
        "dtype": ("(input_ids != pad_id)", "(input_ids != pad_id).float()"),
    },
    "add_and_norm": {
        "residual.missing": ("x = x + sublayer", "x = sublayer"),
        "residual.outside": (
            "x = x + sublayer",
            "return x + torch.nn.functional.layer_norm(sublayer, gain.shape, gain, bias, epsilon)",
        ),
        "residual.variance": ("((x - mean) ** 2).mean(", "x.var("),
        "residual.epsilon": ("(variance + epsilon).sqrt()", "(variance.sqrt() + epsilon)"),
        "residual.epsilon_missing": (" + epsilon", ""),
        "residual.square_root": (".sqrt()", ""),
        "residual.axis": ("dim=-1", "dim=1"),
        "residual.gain": (" * gain + bias", ""),
        "residual.bias": (" + bias", ""),
        "residual.mean": ("return (x - mean)", "return x"),
        "values": ("* gain", "* gain * 1.01"),
    },
    "feed_forward": {
        "feed_forward.linear": (".clamp(min=0)", ""),
        "feed_forward.late": ("(x @ w1 + b1).clamp(min=0) @ w2 + b2", "((x @ w1 + b1) @ w2 + b2).clamp(min=0)"),
        "feed_forward.early": ("(x @ w1 + b1).clamp(min=0)", "((x @ w1).clamp(min=0) + b1)"),
        "feed_forward.bias": (" + b2", ""),
        "feed_forward.inner": (" @ w2 + b2", ""),
        "feed_forward.other": ("(x @ w1 + b1).clamp(min=0)", "torch.nn.functional.gelu(x @ w1 + b1)"),
        "feed_forward.residual": ("return (", "return x + ("),
        "error": ("x @ w1", "w1 @ x"),
    },
    "shift_right": {
        "shift.not": ("torch.cat([start, labels[:, :-1]], dim=1)", "labels"),
        "shift.not_filled": ("start = ", "return labels\n    start = "),
        "shift.left": ("[start, labels[:, :-1]]", "[labels[:, 1:], torch.full_like(start, pad_id)]"),
        "shift.kept": (".masked_fill(shifted == -100, pad_id)", ""),
        "shift.longer": ("labels[:, :-1]", "labels"),
        "shift.start_missing": ("torch.cat([start, labels[:, :-1]], dim=1)", "labels[:, :-1]"),
        "shift.around": ("torch.cat([start, labels[:, :-1]], dim=1)", "labels.roll(1, 1)"),
        "shift.twice": ("[start, labels[:, :-1]]", "[start, start, labels[:, :-2]]"),
        "type": ("return shifted", "shifted"),
    },
    "causal_mask": {
        "causal.transposed": ("tril()", "triu()"),
        "causal.inverted": ("return torch", "return ~torch"),
        "causal.strict": ("tril()", "tril(-1)"),
        "causal.one_more": ("tril()", "tril(1)"),
    },
    "smoothed_loss": {
        "loss.plain": ("((1 - epsilon) * right + epsilon * log_p.mean(dim=-1))", "right"),
        "loss.others": ("log_p.mean(dim=-1)", "(log_p.sum(-1) - right) / (log_p.shape[1] - 1)"),
        "loss.mass": ("log_p.mean(dim=-1)", "(log_p.sum(-1) - right) / log_p.shape[1]"),
        "loss.too_much": ("(1 - epsilon) * right", "right"),
        "loss.exchanged": ("(1 - epsilon) * right + epsilon *", "epsilon * right + (1 - epsilon) *"),
        "loss.sign": ("return -(", "return ("),
        "loss.sum": ("dim=-1)).mean()", "dim=-1)).sum()"),
        "loss.padding": ("dim=-1)).mean()", "dim=-1)).sum() / labels.numel()"),
        "loss.sentences": ("dim=-1)).mean()", "dim=-1)).sum() / len(labels)"),
        "loss.axis": ("logits[counted].log_softmax(dim=-1)", "logits.log_softmax(dim=1)[counted]"),
        "loss.logits": (".log_softmax(dim=-1)", ""),
        "loss.probabilities": ("log_softmax", "softmax"),
    },
    "learning_rate": {
        "rate.maximum": ("min(", "max("),
        "rate.no_width": ("d_model**-0.5 * ", ""),
        "rate.width": ("d_model**-0.5", "d_model**0.5"),
        "rate.no_warmup": ("min(step**-0.5, step * warmup_steps**-1.5)", "step**-0.5"),
        "rate.never_falls": ("min(step**-0.5, step * warmup_steps**-1.5)", "step * warmup_steps**-1.5"),
        "rate.one_late": ("return float", "step -= 1\n    return float"),
        "rate.one_early": ("return float", "step += 1\n    return float"),
        "rate.zero": ("step == 0", "False"),
        "value": ("-1.5", "-1.4"),
    },
    "greedy_search": {
        "search.start": ("return ids[1:]", "return ids"),
        "search.end_missing": ("return ids[1:]", "return ids[1:-1]"),
        "search.endless": (" and (len(ids) == 1 or ids[-1] != end_id)", ""),
        "search.one_more": ("<= longest", "<= longest + 1"),
        "search.one_less": ("<= longest", "< longest"),
        "greedy.last_only": ("[ids]", "[ids[-1:]]"),
        "greedy.least": ("argmax", "argmin"),
    },
    "beam_search": {
        "search.start": ("return ids[1:]", "return ids"),
        "search.endless": (
            "beginnings = [(total, ids) for total, ids in extended if ids[-1] != end_id]",
            "beginnings = extended",
        ),
        "search.one_more": ("ended: ", "longest += 1\n    ended: "),
        "beam.multiplied": ("total / ((", "total * (("),
        "beam.length": ("(5 + length)", "(4 + length)"),
        "beam.start_counted": ("(5 + length)", "(6 + length)"),
        "beam.library": ("((5 + length) / 6) ** alpha", "length**alpha"),
        "beam.unpenalized": (" / ((5 + length) / 6) ** alpha", ""),
        "beam.greedy": ("topk(min(beams, log_p.numel()))", "topk(1)"),
        "beam.chosen_before": (
            "max(ended)",
            "max(ended, key=lambda each: each[0] * ((4 + len(each[1])) / 6) ** alpha)",
        ),
        "beam.other": ("is_over = ", "is_over = bool(ended) or "),
    },
}
# Answers of other kinds, which are right too.
RIGHT = {
    "positional_encoding": """
        wave = lambda p, j: (math.cos if j % 2 else math.sin)(p / 10000 ** ((j - j % 2) / d_model))
        return torch.tensor([[wave(p, j) for j in range(d_model)] for p in range(length)])""",
    "attention": "return torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed)",
    "split_heads": "return torch.stack(states.chunk(heads, dim=-1), dim=1)",
    "padding_mask": "return ~input_ids.eq(pad_id).reshape(len(input_ids), 1, 1, -1)",
    "add_and_norm": "return torch.nn.functional.layer_norm(sublayer + x, gain.shape, gain, bias, epsilon)",
    "feed_forward": "return torch.addmm(b2, torch.relu(x @ w1 + b1).flatten(0, 1), w2).view(x.shape)",
    "shift_right": "return torch.nn.functional.pad(labels.where(labels >= 0, pad_id), (1, -1), value=start_id)",
    "causal_mask": "return torch.arange(length)[:, None] >= torch.arange(length)",
    "smoothed_loss": """
        return torch.nn.functional.cross_entropy(logits.mT, labels, ignore_index=-100, label_smoothing=epsilon)""",
    "learning_rate": "return min(step**-0.5, step / warmup_steps / warmup_steps**0.5) / d_model**0.5 if step else 0",
    "greedy_search": """
        ids = torch.tensor([[start_id]])
        for _ in range(longest):
            ids = torch.cat([ids, predict(ids).topk(1).indices], dim=1)
            if ids[0, -1] == end_id:
                break
        return ids[0, 1:]""",
    "beam_search": """
        beginnings, ended = [([], 0.0)], []
        for n in range(1, longest + 1):
            longer = []
            for ids, total in beginnings:
                log_p = predict(torch.tensor([[start_id, *ids]]))[0].tolist()
                longer += [([*ids, word], total + each) for word, each in enumerate(log_p)]
            longer = sorted(longer, key=lambda one: -one[1])[:beams]
            ended += [one for one in longer if one[0][-1] == end_id or n == longest]
            beginnings = [one for one in longer if one[0][-1] != end_id]
            if not beginnings:
                break
        scored = [(total / ((5 + len(ids)) / 6) ** alpha, ids) for ids, total in ended]
        return max(scored)[1], max(scored)[0]""",
}
HINTS = [(name, hint) for name, wrong in WRONG.items() for hint in wrong]


def fields_of(text: str) -> list[Any]:
    return sorted(part[1:3] for part in string.Formatter().parse(text) if part[1])


def define(name: str, code: str) -> Any:
    """The function of that name in a student's code."""
    names = dict(vars(solutions))
    exec(code, names)
    return names[name]


@pytest.fixture(scope="module")
def checker() -> Any:
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=50)
    return checks.Checker("en", VanillaTransformerForConditionalGeneration(config).eval())


class TestFiles:
    @pytest.mark.parametrize("language", LANGUAGES)
    def test_notebooks_pages_and_figures_are_current(self, language: str, tmp_path: Path) -> None:
        notebook = build.make_notebook(language)
        advice = "run python scripts/tutorial/build.py"
        assert nbformat.read(FOLDER / f"tutorial.{language}.ipynb", as_version=4) == notebook, advice
        page = (FOLDER / f"tutorial.{language}.md").read_text(encoding="utf-8")
        assert build.strip_outputs(page) == build.make_page(notebook), advice
        assert page.count("```text\n") > 12
        build.draw_figures(tmp_path)
        for number in (1, 2):
            name = f"figure{number}.{language}.svg"
            assert (FOLDER / name).read_bytes() == (tmp_path / name).read_bytes(), advice
            assert f"]({name})" in page

    def test_both_languages_have_the_same_cells_and_hints(self) -> None:
        english, chinese = (build.make_notebook(language).cells for language in LANGUAGES)
        for one, other in zip(english, chinese, strict=True):
            assert (one.id, one.cell_type) == (other.id, other.cell_type)
            if one.cell_type == "code":
                assert one.source.replace('Checker("en"', 'Checker("zh"') == other.source
            assert one.source.count("**") == other.source.count("**"), one.id
            assert one.source.count("$") == other.source.count("$"), one.id
        texts = [checks.read_source(language)[1] for language in LANGUAGES]
        assert texts[0].keys() == texts[1].keys()
        for name, text in texts[0].items():
            fields = [
                sorted(part[1:3] for part in string.Formatter().parse(each) if part[1])
                for each in (text, texts[1][name])
            ]
            assert fields[0] == fields[1], name

    def test_notebooks_have_no_outputs_and_no_solutions(self) -> None:
        for language in LANGUAGES:
            cells = nbformat.read(FOLDER / f"tutorial.{language}.ipynb", as_version=4).cells
            code = [cell for cell in cells if cell.cell_type == "code"]
            assert not any(cell.outputs or cell.execution_count for cell in code)
            exercises = [cell.source for cell in code if "exercise" in cell.metadata.tags]
            assert len(exercises) == 12
            assert all(source.endswith('"""\n    raise NotImplementedError') for source in exercises)

    def test_every_cell_and_every_exercise_has_a_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cells = {**build.read_cells(), "lost": ""}
        monkeypatch.setattr(build, "read_cells", lambda: cells)
        with pytest.raises(ValueError, match=r"english\.txt leaves out lost"):
            build.make_notebook("en")


class TestChecks:
    @pytest.mark.parametrize("name", checks.EXERCISES)
    def test_the_solution_is_right(self, name: str, checker: Any, capsys: pytest.CaptureFixture[str]) -> None:
        solution = getattr(solutions, name)
        assert checker(solution) is solution
        assert capsys.readouterr().out.startswith("✓ Exercise")

    @pytest.mark.parametrize("name", checks.EXERCISES)
    def test_another_right_answer_is_right_too(self, name: str, checker: Any) -> None:
        head = (
            build.make_exercise(SOLUTIONS[name]).removeprefix("@check\n").removesuffix("    raise NotImplementedError")
        )
        code = head + indent(dedent(RIGHT[name]).strip(), "    ")
        assert checker.judge(name, define(name, code)) is None

    @pytest.mark.parametrize(("name", "hint"), HINTS)
    def test_a_wrong_answer_is_rejected_with_its_hint(
        self, name: str, hint: str, checker: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        part, other = WRONG[name][hint]
        assert part in SOLUTIONS[name]
        assert checker(define(name, SOLUTIONS[name].replace(part, other))) is getattr(solutions, name)
        said = capsys.readouterr().out
        expected = checker.messages[hint].split("{")[0]
        assert said.startswith(f"✗ Exercise {checks.EXERCISES.index(name) + 1}: {expected}"), said

    def test_every_hint_is_tried(self) -> None:
        named = set(checks.read_source("en")[1])
        general = {"right", "wrong", "todo", "compared", "summary"}
        assert {hint for _, hint in HINTS} == named - general

    @pytest.mark.parametrize("name", checks.EXERCISES)
    def test_an_exercise_not_yet_done_is_no_error(
        self, name: str, checker: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        names = dict(vars(solutions)) | {"check": checker}
        exec(build.make_exercise(SOLUTIONS[name]), names)
        assert names[name] is getattr(solutions, name)
        assert "not written yet" in capsys.readouterr().out

    def test_what_changes_its_inputs_is_judged_by_its_result(self, checker: Any) -> None:
        code = SOLUTIONS["add_and_norm"].replace("x = x + sublayer", "x += sublayer")
        assert checker.judge("add_and_norm", define("add_and_norm", code)) is None

    def test_tensors_are_taken_for_numbers_and_lists(self, checker: Any) -> None:
        rate = SOLUTIONS["learning_rate"].replace("float(", "torch.tensor(").replace("0.0", "0")
        greedy = SOLUTIONS["greedy_search"].replace("ids[1:]", "torch.tensor(ids[1:])")
        assert checker.judge("learning_rate", define("learning_rate", rate)) is None
        assert checker.judge("greedy_search", define("greedy_search", greedy)) is None

    def test_other_names_are_refused_and_differences_too(self, checker: Any) -> None:
        with pytest.raises(ValueError, match="softmax is no exercise; these are: positional_encoding"):
            checker(torch.softmax)
        with pytest.raises(ValueError, match="x: yours and the model's differ by nan"):
            checker.compare("x", torch.tensor([float("nan")]), torch.tensor([0.0]))

    def test_the_notebooks_random_numbers_stay_as_they_are(self, checker: Any) -> None:
        before = torch.get_rng_state()
        checker(solutions.attention)
        assert torch.equal(before, torch.get_rng_state())

    def test_wide_beams_find_what_trying_all_texts_finds(self) -> None:
        for seed, alpha in itertools.product(range(5), (0.0, 0.6, 2.0)):
            predict = checks.make_predictor(seed, vocabulary=5)
            texts = [
                ids
                for length in range(1, 5)
                for ids in itertools.product(range(1, 5), repeat=length)
                if 2 not in ids[:-1] and (ids[-1] == 2 or length == 4)
            ]
            scores = []
            for ids in texts:
                every = torch.tensor([0, *ids])
                log_p = sum(predict(every[None, :end])[0, every[end]].item() for end in range(1, len(every)))
                scores.append(log_p / ((5 + len(ids)) / 6) ** alpha)
            best = max(range(len(texts)), key=scores.__getitem__)
            ids, score = solutions.beam_search(predict, 0, 2, 1000, alpha, 4)
            assert tuple(ids) == texts[best]
            assert score == pytest.approx(scores[best], rel=1e-5)


def solve(notebook: Any) -> Any:
    """Puts the solutions into a notebook."""
    for cell in notebook.cells:
        if "exercise" in cell.metadata.get("tags", []):
            cell.source = f"@check\n{SOLUTIONS[cell.id]}"
    return notebook


def shorten(notebook: Any) -> Any:
    """Makes the notebook's training so short that it learns nothing."""
    steps = "STEPS, WARMUP, BATCH_SIZE = 2"
    assert sum(f"{steps}40" in cell.source for cell in notebook.cells) == 1
    for cell in notebook.cells:
        cell.source = cell.source.replace(f"{steps}40", steps)
    return notebook


def outputs_of(notebook: Any) -> dict[str, str]:
    """What each cell has printed."""
    return {
        cell.id: "".join(each.text for each in cell.outputs if each.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def find_packages() -> Path | None:
    try:
        return find_node_modules("@huggingface/transformers")
    except pytest.skip.Exception:
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("english")


@pytest.fixture(scope="module")
def english(folder: Path) -> dict[str, str]:
    """What the solved notebook prints, which runs in that folder."""
    return outputs_of(build.run_notebook(solve(build.make_notebook("en")), folder, find_packages()))


class TestNotebooks:
    def test_solved_it_runs_from_the_paper_to_a_translation(self, english: dict[str, str]) -> None:
        for number, name in enumerate(checks.EXERCISES, start=1):
            assert english[name] == f"✓ Exercise {number}: right. It agrees with the model.\n"
        assert "12 of 12 exercises are solved." in english["summary"]
        right, total = map(int, english["held_out"].splitlines()[0].split(" / "))
        assert total == 100
        assert right >= 95
        mine, models = english["beams"].splitlines()[:2]
        assert mine == models
        assert "une balle blanche et un chien" in mine
        assert "un livre bleu" in english["save"]

    def test_its_page_translates_in_a_browser(self, english: dict[str, str], folder: Path, tmp_path: Path) -> None:
        pytest.importorskip("transformers", minversion=OLDEST_TRANSFORMERS)
        for name in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(name)
        find_node_modules("@huggingface/transformers")
        page = folder / "tutorial" / "out" / "page"
        assert page.exists(), english["export"]
        with serve({"/": page}) as server, open_chromium(tmp_path) as driver:
            chromium = Browser(driver)
            driver.get(f"{server.url}/")
            chromium.wait_for(lambda: "Ready" in chromium.find("#status").text)
            chromium.find("#source").send_keys("a green house and a blue ball")
            found = ["une maison verte et une balle bleue"]
            chromium.wait_for(lambda: chromium.read_all("#target .line", "textContent") == found)

    def test_the_chinese_one_runs_too_and_says_what_the_page_lacks(self, tmp_path: Path) -> None:
        printed = outputs_of(build.run_notebook(shorten(solve(build.make_notebook("zh"))), tmp_path))
        assert all(printed[name].startswith("✓ 练习 ") for name in checks.EXERCISES)
        assert "12 个练习中做对了 12 个" in printed["summary"]
        needed = ("npm install --prefix . ", "pip install", f"transformers, from version {OLDEST_TRANSFORMERS} on")
        assert any(each in printed["export"] for each in needed)

    def test_with_nothing_solved_it_goes_on_to_the_end(self, tmp_path: Path) -> None:
        printed = outputs_of(build.run_notebook(shorten(build.make_notebook("en")), tmp_path))
        assert all("not written yet" in printed[name] for name in checks.EXERCISES)
        assert "0 of 12 exercises are solved." in printed["summary"]
