"""The Chinese README has what the English one has: who changes one alone is told where the two differ."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = "README.md", ".github/README.zh.md"
BLOCK = re.compile(
    r"^```(?P<language>\w*)\n(?P<code>[\s\S]*?)^```$"
    r"|^(?P<level>#+) (?P<heading>.*)$"
    r"|^\|(?P<row>.*)\|$"
    r"|^(?P<output>(?: {4}.*\n)+)"
    r"|^(?P<item>- .*(?:\n  .*)*)"
    r"|^(?P<paragraph> *\S.*(?:\n(?!- |#+ |\||```)\S.*)*)$",
    flags=re.MULTILINE,
)
COMMENT = re.compile(r"(^|[^\S\n]+)# .*", flags=re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    kind: str
    facts: tuple[str, ...]  # what both languages have alike: code, links, numbers
    line: int
    beginning: str

    def __str__(self) -> str:
        return f"line {self.line} ({self.kind}: {self.beginning})"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(text: str) -> list[str]:
    """As GitHub makes them."""
    titles = [match["heading"] for match in BLOCK.finditer(text) if match["heading"]]
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def target(link: str, name: str, headings: list[str]) -> str:
    """Where a link of a README leads, in words that fit both: the number of a heading, a path from the root on."""
    path, _, anchor = link.partition("#")
    if "://" in link:
        return link
    if not path:
        return f"heading {headings.index(anchor) + 1}" if anchor in headings else f"no heading ({link})"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
    path = path.replace(".zh.", ".en.") if path not in {ENGLISH, CHINESE} else path  # a page in both languages
    return "the other README" if path in {ENGLISH, CHINESE} - {name} else f"{path}#{anchor}".rstrip("#")


def facts_of_text(text: str, name: str, headings: list[str]) -> list[str]:
    """Sorted: the two languages order words differently."""
    text = re.sub(r"\s+", " ", text)
    codes, text = re.findall(r"`[^`]+`", text), re.sub(r"`[^`]+`", "", text)
    links = [f"a link to {target(link, name, headings)}" for _, link in LINK.findall(text)]
    return [*sorted(codes), *sorted(links), *sorted(re.findall(r"\d+(?:[.,]\d+)*", LINK.sub(r"\1", text)))]


def facts_of_code(code: str) -> list[str]:
    """The lines without comments."""
    return [line for line in COMMENT.sub("", code).splitlines() if line]


def parse(name: str, text: str) -> list[Block]:
    headings, blocks = anchors(text), []
    for match in BLOCK.finditer(text):
        kind = str(match.lastgroup)
        cells = match[kind].split("|") if kind == "row" else [match[kind]]
        if kind == "code":
            facts, label = facts_of_code(match["code"]), f"code {match['language']}".rstrip()
        elif kind == "output":
            facts, label = match["output"].splitlines(), kind
        else:
            facts = [fact for cell in cells for fact in facts_of_text(cell, name, headings)]
            details = {"heading": f" of level {len(match['level'] or '')}", "row": f" of {len(cells)} cells"}
            label = kind + details.get(kind, "")
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(label, tuple(facts), line, match[0].splitlines()[0].strip()[:40]))
    return blocks


def runs_that_differ(one: list[Any], other: list[Any]) -> list[tuple[slice, slice]]:
    codes = SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return [(slice(a, b), slice(c, d)) for tag, a, b, c, d in codes if tag != "equal"]


def say(english: Any, chinese: Any, between: str = ", ") -> str:
    texts = [between.join(map(str, found)) or "nothing" for found in (english, chinese)]
    return f"  {ENGLISH}: {texts[0]}\n  {CHINESE}: {texts[1]}"


def differences(english: str, chinese: str) -> list[str]:
    """What one README has and the other has not, of headings, else of all blocks."""
    one, other = parse(ENGLISH, english), parse(CHINESE, chinese)
    titles = [[block for block in blocks if block.kind.startswith("heading")] for blocks in (one, other)]
    if [block.kind for block in titles[0]] != [block.kind for block in titles[1]]:
        pairs = [f"\n  {left}  |  {right}" for left, right in zip_longest(*titles, fillvalue="nothing")]
        return [f"The headings differ in number or level, {ENGLISH} | {CHINESE}:" + "".join(pairs)]
    found = []
    for here, there in runs_that_differ(*([(block.kind, block.facts) for block in side] for side in (one, other))):
        left, right = one[here], other[there]
        if [block.kind for block in left] != [block.kind for block in right]:
            found.append("There are other blocks:\n" + say(left, right))
            continue
        for a, b in zip(left, right, strict=True):
            only = [(a.facts[i], b.facts[j]) for i, j in runs_that_differ([*a.facts], [*b.facts])]
            found += [f"{a.kind}, lines {a.line} and {b.line}:\n" + say(*facts, between=" and ") for facts in only]
    return found


def test_both_readmes_have_the_same_headings_code_tables_links_and_numbers() -> None:
    found = differences(read(ENGLISH), read(CHINESE))
    assert not found, "\n".join(["Say in both READMEs what one says:", *found])


def test_every_link_of_the_chinese_readme_leads_somewhere() -> None:
    links = [link for _, link in LINK.findall(read(CHINESE)) if not link.startswith("https://")]
    assert links
    for path, _, anchor in (link.partition("#") for link in links):
        file = (ROOT / CHINESE).parent / path if path else ROOT / CHINESE
        assert file.exists(), path
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{path}#{anchor}"


SAMPLE = """# Name

English · [中文](.github/README.zh.md)

## Use it

It takes 8 minutes, `--beams 4`: [more](scripts/README.md#speed), [a table](#results).

- **One**: `a` and `b`
- **Two**: ![a page](.github/app.png)

```bash
scripts/demo "#1"  # translate
# and then:
scripts/test
```

## Results

| model | BLEU |
|---|---|
| A (small) | **37.74** |
"""
TRANSLATED = """# Name

[English](../README.md) · 中文

## 使用

用 `--beams 4` 需要 8 分钟：[表格](#结果)、[更多](../scripts/README.md#speed)。

- **其一**：`b` 和 `a`
- **其二**：![网页](app.png)

```bash
scripts/demo "#1"  # 翻译
# 然后：
scripts/test
```

## 结果

| 模型 | BLEU |
|---|---|
| A（小） | **37.74** |
"""


def test_a_translation_has_no_differences() -> None:
    assert differences(SAMPLE, TRANSLATED) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("## Results", "### Results", "heading of level 3: ### Results"),
        ("## Results", "Results", "nothing  |  line 18 (heading of level 2: ## 结果)"),
        ("takes 8", "takes 9", "paragraph, lines 7 and 7:\n  README.md: 9\n  .github/README.zh.md: 8"),
        ("`--beams 4`", "`--beam 4`", "README.md: `--beam 4`\n  .github/README.zh.md: `--beams 4`"),
        ("#speed", "#spend", "README.md: a link to scripts/README.md#spend\n"),
        ("(#results)", "(#use-it)", "README.md: a link to heading 2\n  .github/README.zh.md: a link to heading 3"),
        ("(#results)", "(#result)", "README.md: a link to no heading (#result)\n"),
        (".github/app.png", "app.png", "README.md: a link to app.png\n"),
        ("(.github/README.zh.md)", "(README.zh.md)", ".github/README.zh.md: a link to the other README"),
        ("- **Two**", "- More\n- **Two**", "README.md: line 10 (item: - More)\n  .github/README.zh.md: nothing"),
        ("- **Two**", "**Two**", "README.md: line 10 (paragraph: **Two**: ![a page](.github/app.png))"),
        ("scripts/test", "scripts/test -x", "code bash, lines 12 and 12:\n  README.md: scripts/test -x\n"),
        ('"#1"', '"#2"', 'README.md: scripts/demo "#2"\n  .github/README.zh.md: scripts/demo "#1"'),
        ("```bash", "```python", "README.md: line 12 (code python: ```python)"),
        ("37.74", "37.75", "row of 2 cells, lines 22 and 22:\n  README.md: 37.75\n  .github/README.zh.md: 37.74"),
        ("**37.74** |", "**37.74** | 1 |", "README.md: line 22 (row of 3 cells: | A (small) | **37.74** | 1 |)"),
    ],
)
def test_what_differs_is_named(before: str, after: str, said: str) -> None:
    assert SAMPLE.count(before) == 1
    assert said in "\n".join(differences(SAMPLE.replace(before, after), TRANSLATED))
