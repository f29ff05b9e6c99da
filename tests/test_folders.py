"""Folders that are complete or absent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vanilla_transformer.folders import check_new_folder, new_folder


def test_a_new_folder_holds_what_was_put_into_it_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "b") as partial:
        (partial / "file").write_text("content")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "file").read_text() == "content"
    assert os.listdir(tmp_path / "a") == ["b"]


def test_after_an_error_there_is_no_folder(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        with new_folder(folder) as partial:
            (partial / "file").write_text("content")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fill(tmp_path / "b")
    assert os.listdir(tmp_path) == []


def test_an_empty_folder_is_filled_and_one_with_files_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as partial:
        (partial / "file").write_text("new")
    with pytest.raises(FileExistsError, match="empty is a folder that is not empty"), new_folder(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty" / "file").read_text() == "new"
    with pytest.raises(FileExistsError, match="file is a file"):
        check_new_folder(tmp_path / "empty" / "file")


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
    program = (
        "import os, sys; os.umask(0o027)\n"
        "from vanilla_transformer.folders import new_folder\n"
        "with new_folder(sys.argv[1]): pass\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "b"], check=True)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o750


def test_a_relative_path_means_the_folder_it_meant_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with new_folder("here") as partial:
        (partial / "file").write_text("content")
    assert (tmp_path / "here" / "file").exists()
