"""What the README files say of the code is so: the paper's map, links, names, commands, and what the examples do."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from letters import TOKENIZER, make_letters_model
from torch import nn
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.conversion.sources import SOURCES
from vanilla_transformer.conversion.systems.torch_module import to_torch_nn
from vanilla_transformer.model import (
    attention_vanilla_transformer,
    decoding_vanilla_transformer,
    loss_vanilla_transformer,
)

ROOT = Path(__file__).parents[2]
README = "README.md"
MAP = "vanilla_transformer/README.md"
FOLDERS = ("vanilla_transformer/conversion", "vanilla_transformer/export")
FILES = (
    README,
    "scripts/README.md",
    "scripts/from_text_to_server.md",
    "scripts/production.md",
    "scripts/results.md",
    "scripts/tutorial/README.md",
    MAP,
    *(f"{folder}/README.md" for folder in FOLDERS),
)
# The numbered sections, equations, figures and tables of the paper from section 3 on, but for its conclusion.
PAPER = {
    *("3.1", "3.2.1", "3.2.2", "3.2.3", "3.3", "3.4", "3.5", "4", "5.1", "5.2", "5.3", "5.4", "6.1", "6.2", "6.3"),
    *("equation 1", "equation 2", "equation 3"),
    *("Figure 1", "Figure 2", "Figure 3", "Figure 4", "Figure 5"),
    *("Table 1", "Table 2", "Table 3", "Table 4"),
}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(name: str) -> str:
    """The text without its fenced blocks, in which `#` is no heading."""
    return FENCED.sub("", read(name))


def code_spans(name: str) -> list[str]:
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose(name))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(file, code) of each fenced block in a language."""
    return [(name, code) for name in FILES for kind, code in FENCED.findall(read(name)) if kind == language]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    for name in ("out/demo", "out/my-model", "me/my-model"):
        make_letters_model().save_pretrained(folder / name)
        TOKENIZER.save_pretrained(folder / name)
    torch.save(to_torch_nn(make_letters_model()).state_dict(), folder / "model.pt")
    return folder


def rows_of_the_paper() -> list[list[str]]:
    """The three cells of each row of the table that maps the paper to the code."""
    section = read(README).split("\n## The paper in this code\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


def test_every_part_of_the_paper_has_a_row_also_where_nothing_is_there() -> None:
    items = {item for row in rows_of_the_paper() for item in row[0].split(", ")}
    assert {re.sub(r" (left|right|row E)$", "", item) for item in items} == PAPER
    rows = {row[0]: row[2] for row in rows_of_the_paper() if "](" not in row[2]}
    assert set(rows) == {"4, Table 1", "6.1, Table 2", "6.3, Table 4"}
    assert all(text.startswith("not ") for text in rows.values())


def test_every_symbol_beside_the_paper_exists() -> None:
    named = [
        (label, path, symbol)
        for *_, where in rows_of_the_paper()
        for label, path, symbols in re.findall(r"\[([\w.]+)\]\(([\w./]+)\): ((?:`[\w.]+`(?:, )?)+)", where)
        for symbol in re.findall(r"`([\w.]+)`", symbols)
    ]
    assert len(named) > 35
    for label, path, symbol in named:
        assert Path(path).name == label
        found: object = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for part in symbol.split("."):
            assert hasattr(found, part), f"{path} has no {symbol}"
            found = getattr(found, part)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function ran that the section names beside the faster one."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, counted)

    count(attention_vanilla_transformer, "scaled_dot_product_attention")
    count(decoding_vanilla_transformer, "step_fast")
    count(loss_vanilla_transformer, "label_smoothed_cross_entropy")
    count(loss_vanilla_transformer, "fused_cross_entropy")
    count(attention_vanilla_transformer, "choose_attention")
    return counts


def load(models: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    model = AutoModelForSeq2SeqLM.from_pretrained(models / "out/demo", **options)
    return model, dict(TOKENIZER(["abc"], text_target=["abc"], return_tensors="pt"))


@pytest.mark.parametrize("options", [{}, {"attn_implementation": "eager"}], ids=["default", "eager"])
def test_eager_attention_runs_the_search_as_written(options: Any, models: Path, calls: Counter[str]) -> None:
    model, batch = load(models, **options)
    encoder_layers, decoder_layers, steps = model.config.encoder_layers, model.config.decoder_layers, 4
    model.generate(batch["input_ids"], num_beams=2, min_new_tokens=steps, max_new_tokens=steps)
    if options:
        attentions = encoder_layers + 2 * decoder_layers * steps
        assert calls == {"scaled_dot_product_attention": attentions, "choose_attention": attentions}
    else:
        assert calls == {"step_fast": steps - 1, "choose_attention": encoder_layers + 2 * decoder_layers}


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="this torch has no chunked loss")
@pytest.mark.parametrize("options", [{}, {"skip_logits": False}], ids=["default", "with logits"])
def test_logits_go_with_the_loss_as_written(options: Any, models: Path, calls: Counter[str]) -> None:
    model, batch = load(models)
    model.train()(**batch, **options)
    loss = "label_smoothed_cross_entropy" if options else "fused_cross_entropy"
    assert calls == {"choose_attention": model.config.encoder_layers + 2 * model.config.decoder_layers, loss: 1}


def anchors(name: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(name), flags=re.MULTILINE)
    found = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(set(found)) == len(found), f"{name} has two headings of one name"
    return set(found)


@pytest.mark.parametrize("name", FILES)
def test_every_link_leads_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(name))
    assert links
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(ROOT))), link


def test_every_readme_is_tested_and_every_file_that_it_names_exists() -> None:
    paths = [path for folder in ("scripts", "vanilla_transformer") for path in (ROOT / folder).rglob("*.md")]
    paths = [path for path in paths if "node_modules" not in path.parts]  # a reader of the tutorial has it
    # The tutorial's pages are tested as notebooks.
    found = {
        path.relative_to(ROOT).as_posix() for path in paths if not path.name.startswith(("model_card", "tutorial."))
    }
    assert found | {README} == set(FILES)
    pattern = r"(?<![\w/])((?:scripts|tests|vanilla_transformer)/[\w/]+(?:\.\w+)*)"
    named = {path for name in FILES for path in re.findall(pattern, read(name))}
    missing = [path for path in named if not (ROOT / path).exists()]
    assert [path for path in missing if not path.endswith("/node_modules")] == []  # which npm makes


def test_every_script_is_listed() -> None:
    listed = re.findall(r"\]\((\w[\w./-]*)\)", prose("scripts/README.md").split("\n## ")[0])
    there = {path.name for path in (ROOT / "scripts").iterdir() if path.suffix != ".md" and path.name[0] not in "._"}
    assert there - {"__pycache__"} <= set(listed)


def test_every_module_is_on_the_map() -> None:
    """The tree of the package, a folder's files two spaces further right than the folder."""
    (tree,) = (code for name, code in blocks("") if name == MAP)
    folders: list[str] = []
    listed = set()
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in re.findall(r"(?<=  )[a-z_0-9]+(?:\.py|_|/)(?=  |$)|^vanilla_transformer/", line):
            if name.endswith("/"):
                folders[depth:] = [name]
            else:
                listed.add("".join(folders[:depth]) + (f"{name}vanilla_transformer.py" if name.endswith("_") else name))
    paths = {path.relative_to(ROOT).as_posix() for path in (ROOT / "vanilla_transformer").rglob("*.py")}
    assert listed == {path for path in paths if path.count("/") == 1 or not path.endswith("__init__.py")}


@pytest.mark.parametrize("name", FILES)
def test_every_dotted_name_exists(name: str) -> None:
    """Names such as `data.batching.TokenBatchSampler`, relative to the package."""
    names = {path.stem for path in (ROOT / "vanilla_transformer").iterdir()}
    for span in code_spans(name):
        match = re.match(r"(?:vanilla_transformer\.)?((\w+)\.[A-Za-z_][\w.]*)(?![\w/])", span)
        if match and match[2] in names and not match[1].endswith((".json", ".py", ".yaml")):
            assert resolve_name(f"vanilla_transformer.{match[1]}"), span


@cache
def options_of(command: str | None, script: str | None) -> set[str]:
    name = script or f"vanilla_transformer.commands.{command}".replace("-", "_")
    module: Any = sys.modules[importlib.import_module(name).main.__module__]  # most scripts only call a command
    parsers = [module.make_parser()]
    if module.__name__.endswith("convert"):
        parsers += [module.make_parser(source_format) for source_format in SOURCES]
    return {option for parser in parsers for option in parser._option_string_actions}


@pytest.mark.parametrize("name", [*FILES, ".github/workflows/release.yml"])
def test_every_option_of_a_command_exists(name: str) -> None:
    shell = read(name)
    if name.endswith(".md"):
        code = "".join(code for language, code in FENCED.findall(shell) if language == "bash")
        shell = "\n".join([code, *code_spans(name)])
    for command in re.split(r" \| | && | # |\n", shell.replace("\\\n", " ")):
        if match := re.search(r"(?:vanilla-transformer ([a-z][a-z-]*)|scripts/(\w+)\.py)( .*)", command):
            unknown = set(re.findall(r"(?<!\S)--\w+", match[3])) - options_of(match[1], match[2])
            assert not unknown, f"{command}: {unknown}"


def check(names: dict[str, Any]) -> None:
    """Checks what an example has made, by the names that it gives to it."""
    if "translate" in names:
        (result,) = names["translate"]("abc", max_new_tokens=4)
        assert isinstance(result["translation_text"], str)
    if "weights" in names:
        heads = names["model"].config.decoder_attention_heads
        lengths = [names["batch"][side].shape[1] for side in ("labels", "input_ids")]
        assert [list(layer.shape) for layer in names["weights"]] == 2 * [[1, heads, *lengths]]
    if "module" in names:
        assert isinstance(names["module"], nn.Module)
    if "converted" in names:
        assert AutoModelForSeq2SeqLM.from_pretrained("out/mine").config.encoder_attention_heads == 4
    if "forced" in names:
        sequence, word = names["found"][0].tolist(), names["twenty"]
        assert any(sequence[start:][: len(word)] == word for start in range(len(sequence)))
    if "merged" in names:
        assert type(names["merged"]) is VanillaTransformerForConditionalGeneration


# A DataLoader warns where there is no GPU to pin memory for.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize(
    ("name", "code"),
    [pytest.param(*block, id=f"{block[0]}-{number}") for number, block in enumerate(blocks("python"), start=1)],
)
def test_examples_run(name: str, code: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    # Registered once in this process, the package would not be missed.
    assert any("vanilla_transformer" in ast.unparse(node) for node in imported)
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, name, "exec"), names)
    check(names)
