"""Folders that are complete or absent, what a file of text must not replace, names of models that are no folders."""

import os
import struct
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from vanilla_transformer import files
from vanilla_transformer.export.onnx_model import load_for_onnx
from vanilla_transformer.files import (
    check_model_name,
    check_new_file,
    check_new_folder,
    check_text_output,
    find_damage,
    locked,
    new_file,
    new_folder,
    read_json,
)
from vanilla_transformer.inference.loading import load_model_and_tokenizer


def test_after_an_error_there_is_no_folder_and_no_file(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        with new_folder(folder) as partial, new_file(folder.with_suffix(".txt")) as file:
            (partial / "file").write_text("content")
            file.write_text("content")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fill(tmp_path / "b")
    assert os.listdir(tmp_path) == []


def test_a_file_is_replaced_at_the_end_and_only_where_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    for content in ("old", "new"):
        with new_file(path, overwrite=True) as partial:
            partial.write_text(content)
            assert not path.exists() or path.read_text() == "old"
    assert path.read_text() == "new"
    with (
        pytest.raises(
            FileExistsError,
            match=r"file exists: choose another name, or replace it with --overwrite \(overwrite=True\)",
        ),
        new_file(path),
    ):
        pass
    with pytest.raises(FileExistsError, match="is a folder"), new_file(tmp_path):
        pass
    assert os.listdir(tmp_path / "a") == ["file"]


def test_a_new_folder_is_filled_and_one_with_files_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for empty in (False, True):
        if empty:
            (folder / "file").unlink()
        with new_folder(folder) as partial:
            (partial / "file").write_text("content")
            assert not (folder / "file").exists()
        assert (folder / "file").read_text() == "content"
        assert os.listdir(tmp_path / "a") == ["b"]
    with pytest.raises(FileExistsError, match="b is a folder that is not empty"), new_folder(folder):
        pass
    with pytest.raises(FileExistsError, match="file is a file"):
        check_new_folder(folder / "file")


def test_what_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        with new_folder(folder) as partial:
            (partial / "file").write_text("mine")
            folder.mkdir()
            (folder / "file").write_text("theirs")

    with pytest.raises(FileExistsError, match="not empty"):
        fill(tmp_path / "b")
    assert (tmp_path / "b" / "file").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["b"]


def test_others_may_read_it_as_far_as_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with new_folder(tmp_path / "b"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o750


def test_an_empty_folder_keeps_its_permissions(tmp_path: Path) -> None:
    for mode in (0o700, 0o1775, 0o555):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        with new_folder(folder) as partial:
            assert partial.stat().st_mode & 0o077 == mode & 0o077, "while it is filled too"
            (partial / "file").write_text("content")
        assert folder.stat().st_mode & 0o7777 == mode
        assert (folder / "file").exists()


def test_a_relative_path_is_that_of_the_start_and_a_link_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("elsewhere", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("target")
    monkeypatch.chdir(tmp_path)
    with new_folder("here") as partial, new_folder("link") as linked:
        for folder in (partial, linked):
            (folder / "file").write_text("content")
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert (tmp_path / "here" / "file").exists()
    assert (tmp_path / "target" / "file").exists()
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "elsewhere") == []


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for folder in (".", "", "../here", tmp_path / "here"):
        with pytest.raises(FileExistsError, match="is the current folder"):
            check_new_folder(folder)
    assert os.listdir(tmp_path) == ["here"]


def test_a_mount_point_is_not_replaced(tmp_path: Path) -> None:
    table = Path("/proc/self/mounts")
    mounted = [line.split()[1] for line in table.read_text().splitlines()] if table.exists() else []
    empty = [path for path in mounted if os.path.isdir(path) and os.access(path, os.R_OK) and not os.listdir(path)]
    if not empty:
        pytest.skip("nothing empty is mounted here")
    (tmp_path / "link").symlink_to(empty[0])
    for folder in (empty[0], tmp_path / "link"):
        with pytest.raises(FileExistsError, match="where a file system is mounted"):
            check_new_folder(folder)


def test_a_file_above_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    for check in (check_new_folder, check_new_file, partial(check_text_output, inputs=[])):
        for place in ("file/b", "file/a/b", "link/b"):
            with pytest.raises(NotADirectoryError, match=rf"cannot be made: {tmp_path}/file is a file, not a folder\."):
                check(tmp_path / place)
    assert check_new_file(tmp_path / "a" / "b") == tmp_path / "a" / "b"


def test_a_folder_above_it_that_is_closed() -> None:
    program = (
        f"import os, runpy, sys\ncheck = runpy.run_path({files.__file__!r})['check_new_folder']\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"  # the superuser may write anywhere
        "for place in sys.argv[1:]:\n    try: check(place)\n    except PermissionError as error: print(error)\n"
    )
    with tempfile.TemporaryDirectory() as closed:
        Path(closed).chmod(0o555)
        places = [f"{closed}/{place}" for place in ("b", "a/b")]
        command = [sys.executable, "-c", program, *places]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert found == [f"{place} cannot be made: nothing may be written to {closed}." for place in places]


def test_a_text_is_not_written_over_what_it_is_made_from(tmp_path: Path) -> None:
    one, other, link = tmp_path / "one", tmp_path / "other", tmp_path / "link"
    for path in (one, other):
        path.write_text("kept")
    link.symlink_to(other)
    for path in (one, other, link, tmp_path / "." / ".." / tmp_path.name / "one"):
        with pytest.raises(ValueError, match="the output file is the input file"):
            check_text_output(path, inputs=[one, other], overwrite=True)
    with pytest.raises(ValueError, match=r"a\.gz: the output is written as plain text"):
        check_text_output(tmp_path / "a.gz", inputs=[])
    with pytest.raises(FileExistsError, match="exists: choose another name"):
        check_text_output(one, inputs=[other])
    assert check_text_output(one, inputs=[other], overwrite=True) == one
    assert check_text_output(tmp_path / "new", inputs=[tmp_path / "nowhere"]) == tmp_path / "new"


@pytest.mark.parametrize(
    "name", ["out/my/model", "./model", "../model", "~/model", "/model", "model/", "my model", "x" * 300, "a\0b"]
)
def test_what_the_hub_cannot_have_is_a_missing_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    look: Any
    for look in (check_model_name, load_model_and_tokenizer):
        with pytest.raises(FileNotFoundError, match=rf"^There is no folder {name}\.$"):
            look(name)


def test_folders_and_names_on_the_hub_are_fine_and_a_file_is_none(tmp_path: Path) -> None:
    for name in (tmp_path, str(tmp_path), f"{tmp_path}/", "bert-base", "user/my.model_1"):
        check_model_name(name)
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(NotADirectoryError, match=r"is a file\. Name the folder of a model, or a model on the Hub"):
        check_model_name(path)


def test_a_name_that_the_hub_does_not_give_may_be_a_folder_that_is_not_there(tmp_path: Path) -> None:
    message = r"There is no folder out/typo, and no model of that name could be loaded from the Hub: .*offline"
    with pytest.raises(OSError, match=message) as error:
        load_model_and_tokenizer("out/typo")
    assert "\n" not in str(error.value)
    # What is wrong within a folder is said as it is.
    (tmp_path / "config.json").touch()
    with pytest.raises(OSError, match=r"^the disk fails$"), files.explain_missing_model(tmp_path):
        raise OSError("the disk fails")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no model: it has no config\.json\. Name a folder"):
        load_model_and_tokenizer(str(tmp_path))
    for step in (50, 900, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").touch()
    (tmp_path / "checkpoint-1100").mkdir()
    message = r"Its training has not come to its end: resume it, or name a checkpoint, .*checkpoint-1000 say\."
    with pytest.raises(FileNotFoundError, match=message):
        load_model_and_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "file"), [("transformersjs", "onnx/decoder_model_merged.onnx"), ("web", "model/decoder.onnx")]
)
def test_what_only_javascript_runs_says_so(tmp_path: Path, kind: str, file: str) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).touch()
    (tmp_path / "config.json").touch()
    for load in (load_model_and_tokenizer, load_for_onnx):
        with pytest.raises(ValueError, match=rf"was made by export --format {kind}, for JavaScript"):
            load(str(tmp_path))


def test_a_lock_is_held_by_one_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "_lock"
    for _ in range(2):
        with locked(path, "out/run"):
            with pytest.raises(
                BlockingIOError, match=rf"^out/run is in use by process {os.getpid()} on {gethostname()}"
            ):
                locked(path, "out/run").__enter__()
            assert path.is_file(), "the one that was refused has not removed it"
        assert not path.exists()
    path.write_text("process 1 on a machine that was switched off")
    with locked(path, "out/run"):
        assert path.read_text() == f"process {os.getpid()} on {gethostname()}"


def test_json_that_is_nested_too_deeply_is_damage(tmp_path: Path) -> None:
    nested = b"[" * 200_000
    (tmp_path / "config.json").write_bytes(nested)
    assert read_json(tmp_path / "config.json") is None
    weights = tmp_path / "model.safetensors"
    for content in (struct.pack("<Q", len(nested)) + nested, b"", b"<html>", struct.pack("<Q", 10**12)):
        weights.write_bytes(content)
        assert str(find_damage(weights)).startswith("is cut off or damaged (")
