"""The page's search.js, in Node, beside a search through all sequences there are; its types and its style."""

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_packages import SUPPORT, find_node_modules, run_node

import vanilla_transformer.export

WEB = Path(vanilla_transformer.export.__file__).parent / "web"
EXPLAINER = WEB.parent / "explainer"
VOCABULARY, EOS = 3, 2
LONGEST = 4
Table = dict[str, list[float]]


def make_table(seed: int) -> Table:
    """Log-probabilities of the next token behind every prefix."""
    generator = np.random.default_rng(seed)
    table: Table = {}
    for length in range(LONGEST):
        for prefix in itertools.product(range(VOCABULARY), repeat=length):
            logits = generator.normal(scale=2, size=VOCABULARY)
            values = logits - np.log(np.exp(logits).sum())
            table[",".join(map(str, prefix))] = values.astype(np.float32).tolist()
    return table


def list_all(table: Table, limit: int, alpha: float, kind: str) -> list[tuple[list[int], float]]:
    """Every sequence that ends, or comes to the limit, with its score, the best first."""
    found = []
    for length in range(1, limit + 1):
        for tokens in itertools.product(range(VOCABULARY), repeat=length):
            if EOS in tokens[:-1] or (tokens[-1] != EOS and length < limit):
                continue
            total = sum(table[",".join(map(str, tokens[:place]))][token] for place, token in enumerate(tokens))
            divisor = ((5 + length) / 6) ** alpha if kind == "gnmt" else length**alpha
            found.append((list(tokens), total / divisor))
    return sorted(found, key=lambda pair: -pair[1])


@settings(max_examples=15, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    limit=st.integers(1, LONGEST),
    alpha=st.sampled_from([-0.5, 0.0, 0.6, 1.5]),
    wanted=st.integers(1, 4),
    kind=st.sampled_from(["gnmt", "transformers"]),
)
def test_with_room_for_all_beams_it_finds_the_best_of_all(
    seeds: list[int], limit: int, alpha: float, wanted: int, kind: str
) -> None:
    tables = [make_table(seed) for seed in seeds]
    limits = [max(1, limit - place % 2) for place in range(len(seeds))]
    beams = {"numBeams": 2**LONGEST, "numWanted": wanted, "lengthPenalty": alpha, "lengthPenaltyType": kind}
    # The library's rule of when to end finds the best only with "never".
    options = {"limits": limits, "eos": EOS, "earlyStopping": "never", **beams}
    found = run_node("web_search.mjs", WEB / "search.js", request={"tables": tables, "options": options})
    for table, limit_, hypotheses in zip(tables, limits, found, strict=True):
        expected = list_all(table, limit_, alpha, kind)[:wanted]
        assert [hypothesis["tokens"] for hypothesis in hypotheses] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose(
            [hypothesis["score"] for hypothesis in hypotheses], [score for _, score in expected], rtol=1e-5
        )


def test_greedy_search_takes_the_likeliest_token() -> None:
    tables = [make_table(seed) for seed in range(20)]
    options = {"limits": [LONGEST] * 20, "eos": EOS, "numBeams": 1}
    found = run_node("web_search.mjs", WEB / "search.js", request={"tables": tables, "options": options})
    for table, [hypothesis] in zip(tables, found, strict=True):
        tokens: list[int] = []
        while len(tokens) < LONGEST and EOS not in tokens:
            tokens.append(int(np.argmax(table[",".join(map(str, tokens))])))
        assert hypothesis["tokens"] == tokens


@pytest.mark.parametrize(
    ("libraries", "files"),
    [
        (["DOM", "DOM.Iterable"], [WEB / "page.js"]),
        (["WebWorker"], [WEB / "worker.js", WEB / "service-worker.js"]),
        (["DOM", "DOM.Iterable"], [EXPLAINER / "explainer.js"]),
        (["WebWorker"], [EXPLAINER / "explainer-worker.js"]),
    ],
    ids=["page", "workers", "explainer", "explainer's worker"],
)
def test_types_are_right(tmp_path: Path, libraries: list[str], files: list[Path]) -> None:
    packages = find_node_modules("typescript", "@huggingface/transformers")
    options: dict[str, Any] = {
        **dict.fromkeys(("allowJs", "checkJs", "noEmit", "strict", "noUnusedLocals", "skipLibCheck"), True),
        "target": "ES2022",
        "module": "ESNext",
        "moduleResolution": "bundler",
        "types": [],
        "lib": ["ES2024", *libraries],
        "rootDirs": [str(EXPLAINER), str(WEB), str(SUPPORT / "web_types")],
        "paths": {"*": [str(packages / "*")]},
    }
    project = {"compilerOptions": options, "files": [str(file) for file in files]}
    (tmp_path / "tsconfig.json").write_text(json.dumps(project), encoding="utf-8")
    run_tool(packages, "tsc", "-p", str(tmp_path))


def test_style_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = find_node_modules("eslint", "@eslint/js")
    monkeypatch.setenv("VANILLA_TRANSFORMER_NODE_MODULES", str(packages))
    monkeypatch.chdir(WEB.parents[2])  # files above the folder of work are not looked at
    pages = [*WEB.glob("*.js"), *EXPLAINER.glob("*.js")]
    files = [*pages, *SUPPORT.glob("*.mjs")]
    run_tool(packages, "eslint", "-c", str(SUPPORT / "eslint.config.mjs"), *map(str, files))
    for file in pages:
        assert max(map(len, file.read_text(encoding="utf-8").splitlines())) <= 120, file.name


def run_tool(packages: Path, name: str, *arguments: str) -> None:
    ended = subprocess.run([str(packages / ".bin" / name), *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
