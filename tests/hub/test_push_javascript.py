"""One repository for both: Python's on the main branch, JavaScript's on another, which transformers.js loads itself."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hub_folders import contents
from huggingface_hub import HfApi, snapshot_download
from letters import TOKENIZER, make_letters_model, train_on_letters
from local_hub import LocalHub
from node_packages import translate_in_node
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer.export import onnx as exporting
from vanilla_transformer.export.transformersjs import export_transformersjs
from vanilla_transformer.hub.javascript import BRANCH, FILES, find_javascript_problems

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own
pytest.importorskip("transformers", minversion=exporting.OLDEST_TRANSFORMERS)
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

WORDS = ["abc", "hgfe"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trained model, and its export."""
    path = tmp_path_factory.mktemp("javascript")
    folder, exported = path / "model", path / "exported"
    model = make_letters_model(langs=["en", "de"])
    train_on_letters(model, path / "training", reverse=True)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    export_transformersjs(model, exported, tokenizer=TOKENIZER)
    return folder, exported


def test_a_repository_serves_python_and_javascript(
    folders: tuple[Path, Path],
    tmp_path: Path,
    main: Callable[[str], Callable[..., None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, exported = folders
    assert not find_javascript_problems(exported, folder)
    with LocalHub(tokens={"hf_alice": "alice"}) as hub, hub.client("hf_alice"):
        options = ["--model_name_or_path", folder, "--repo_id", "alice/both", "--license", "apache-2.0"]
        for _ in range(2):
            main("push_to_hub")(*options, "--transformersjs", exported)
        assert f"/alice/both/tree/{BRANCH}\n" in capsys.readouterr().out
        files = {branch: set(HfApi().list_repo_files("alice/both", revision=branch)) for branch in ("main", BRANCH)}
        assert "model.safetensors" in files["main"]
        assert not {name for name in files["main"] if name.startswith("onnx")}
        assert files[BRANCH] == {*FILES, "README.md", ".gitattributes"}
        javascript = Path(snapshot_download("alice/both", revision=BRANCH, local_dir=tmp_path / "javascript"))
        python = snapshot_download("alice/both", local_dir=tmp_path / "python")
    assert {name: (javascript / name).read_bytes() for name in FILES} == {
        name: (exported / name).read_bytes() for name in FILES
    }
    weights = [AutoModelForSeq2SeqLM.from_pretrained(path).lm_head.weight for path in (python, folder)]
    assert torch.equal(*weights)
    answer = translate_in_node(javascript, WORDS, settings={"max_new_tokens": 8})
    assert answer["translations"] == [word[::-1] for word in WORDS]


def test_what_is_not_whole_or_of_other_weights_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, main: Callable[[str], Callable[..., None]]
) -> None:
    folder, exported = tmp_path / "model", tmp_path / "exported"
    shutil.copytree(folders[1], exported)
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[0])
    with torch.no_grad():
        model.lm_head.weight[5] += 1
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    before = contents(folder)
    options = ["--model_name_or_path", folder, "--transformersjs", exported]
    with LocalHub(tokens={"hf_alice": "alice"}) as hub, hub.client("hf_alice"):
        with pytest.raises(SystemExit, match="was not exported from the weights in"):
            main("push_to_hub")(*options, "--repo_id", "alice/other")
        assert not HfApi().repo_exists("alice/other")
        with pytest.raises(SystemExit):
            main("push_to_hub")(*options, "--repo_id", "alice/other", "--create_pr")
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[:-9])
        with pytest.raises(SystemExit, match=r"model\.safetensors is cut off or damaged"):
            main("push_to_hub")(*options, "--repo_id", "alice/other")
        (folder / "model.safetensors").write_bytes(weights)
    (exported / "onnx" / "encoder_model.onnx").unlink()
    [problem] = find_javascript_problems(exported, folder)
    assert "lacks onnx/encoder_model.onnx: make it with export --format transformersjs" in problem.message
    assert contents(folder) == before
