"""Which checkpoints count as whole: real folders of the Trainer's files, damaged one by one."""

import contextlib
import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_trainer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_vanilla import make_model
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from transformers.trainer_callback import TrainerState

from vanilla_transformer.files import find_weights_problem, replacing_files
from vanilla_transformer.training.averaging import average_checkpoints, select_checkpoints
from vanilla_transformer.training.checkpoints import (
    RecordWorldSize,
    delete_old_checkpoints,
    find_last_whole_checkpoint,
    find_problem,
    list_checkpoints,
    read_world_size,
)


def write_state(folder: Path, *, world_size: int | None = None, streaming: bool = False) -> None:
    state: dict[str, Any] = {"global_step": 3}
    if world_size is not None:
        entry = {"args": {"streaming": streaming}, "attributes": {"world_size": world_size}}
        state["stateful_callbacks"] = {"RecordWorldSize": entry}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def write_checkpoint(folder: Path, *, world_size: int = 1) -> Path:
    """What the Trainer leaves in a checkpoint, as far as it is needed to go on from it."""
    folder.mkdir(parents=True)
    tensors = {"a.weight": torch.rand(5, 3), "b.bias": torch.rand(7).to(torch.bfloat16), "empty": torch.empty(0)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"state": {}}, folder / name)
    ranks = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    for name in ranks:
        torch.save(torch.get_rng_state(), folder / name)
    write_state(folder)
    return folder


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_each_file_is_needed(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3", world_size=2)
    assert find_problem(str(checkpoint), world_size=2) is None
    for name in ("trainer_state.json", "scheduler.pt", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"):
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        assert f"{name} is missing" in str(find_problem(checkpoint, world_size=2))
        assert find_weights_problem(checkpoint) is None, "what it takes to resume is not asked of the weights"
        (checkpoint / name).write_bytes(content)
    (checkpoint / "model.safetensors").unlink()
    assert find_problem(checkpoint, world_size=2) == find_weights_problem(checkpoint) == "there are no weights"
    for damaged in (b"", b'{"global_step": 3', b"\xff\xfe"):
        (checkpoint / "trainer_state.json").write_bytes(damaged)
        assert find_problem(checkpoint) == "trainer_state.json is missing or damaged"


@settings(max_examples=50)
@given(
    name=st.sampled_from(["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt"]),
    share=st.floats(min_value=0, max_value=1, exclude_max=True),
)
def test_files_cut_off_anywhere_are_a_problem(tmp_path_factory: Any, name: str, share: float) -> None:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("cut") / "checkpoint-3")
    torch.save({"scale": 2.0}, checkpoint / "scaler.pt")
    assert find_problem(checkpoint) is None
    path = checkpoint / name
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert find_problem(checkpoint) == f"{path.name} is cut off or damaged"


@settings(max_examples=20)
@given(content=st.binary(max_size=64), share=st.floats(min_value=0, max_value=1))
def test_arbitrary_bytes_are_a_problem_not_a_crash(tmp_path_factory: Any, content: bytes, share: float) -> None:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("garbage") / "checkpoint-3")
    path = checkpoint / "optimizer.pt"
    whole = path.read_bytes()
    path.write_bytes(content)
    assert find_problem(checkpoint) == "optimizer.pt is cut off or damaged"
    # Somewhere within the file: it may go unnoticed among the numbers, but must not raise.
    start = int(share * len(whole))
    path.write_bytes(whole[:start] + content + whole[start + len(content) :])
    assert find_problem(checkpoint) in (None, "optimizer.pt is cut off or damaged")


def test_no_file_is_unpickled(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3")

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save(Trap(), checkpoint / "optimizer.pt")
    assert find_problem(checkpoint) is None
    assert not (tmp_path / "trapped").exists()
    torch.load(checkpoint / "optimizer.pt", weights_only=False)
    assert (tmp_path / "trapped").exists()


def test_all_shards_that_the_index_lists_are_checked(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3")
    (checkpoint / "model.safetensors").unlink()
    make_model().save_pretrained(checkpoint, max_shard_size="5KB")
    shards = sorted(checkpoint.glob("model-*.safetensors"))
    index = checkpoint / "model.safetensors.index.json"
    assert len(shards) > 2
    assert find_problem(checkpoint) is None
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1])
    assert find_problem(checkpoint) == find_weights_problem(checkpoint) == f"{shards[1].name} is cut off or damaged"
    shards[1].unlink()
    assert find_problem(checkpoint) == f"{shards[1].name} is missing"
    shards[1].write_bytes(content)
    text = index.read_text()
    for damaged in (text[:-20], "[]", "{}"):
        index.write_text(damaged)
        assert find_problem(checkpoint) == f"{index.name} is damaged"
    index.unlink()
    assert find_problem(checkpoint) == f"{shards[0].name} is a part of weights without an index"
    index.write_text(text)
    assert find_problem(checkpoint) is None


def test_without_a_whole_checkpoint_there_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        assert find_last_whole_checkpoint(folder) is None
    assert not (tmp_path / "missing").exists()
    for step in (1, 2):
        write_checkpoint(tmp_path / f"checkpoint-{step}", world_size=2)
    (tmp_path / "checkpoint-2" / "rng_state_1.pth").unlink()
    found = find_last_whole_checkpoint(tmp_path, world_size=2, set_aside=False)
    assert found == tmp_path / "checkpoint-1"
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2"}
    assert ".pth is missing" in caplog.text


def test_later_broken_checkpoints_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 4, 6, 8):
        write_checkpoint(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    (tmp_path / "checkpoint-8" / "trainer_state.json").unlink()
    assert find_last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    assert names(tmp_path) == {*(f"checkpoint-{n}" for n in (2, 4)), *(f"_incomplete-checkpoint-{n}" for n in (6, 8))}
    assert (tmp_path / "_incomplete-checkpoint-8" / "model.safetensors").is_file()
    first, second = caplog.messages
    assert "checkpoint-8: trainer_state.json is missing" in first
    assert "optimizer.pt is missing. It was renamed to _incomplete-checkpoint-6" in second


def test_what_was_set_aside_earlier_is_cleared_unless_it_may_be_all_that_is_left(tmp_path: Path) -> None:
    for attempt in range(3):
        broken = write_checkpoint(tmp_path / "checkpoint-5")
        (broken / "trainer_state.json").unlink()
        (broken / "attempt").write_text(str(attempt))
        (tmp_path / ".metrics.json-7.partial").write_text("{")
        assert find_last_whole_checkpoint(tmp_path) is None
        assert names(tmp_path) == {"_incomplete-checkpoint-5"}
        assert (tmp_path / "_incomplete-checkpoint-5" / "attempt").read_text() == str(attempt)
    write_state(tmp_path / "_incomplete-checkpoint-5")
    assert find_last_whole_checkpoint(tmp_path) is None
    assert names(tmp_path) == {"_incomplete-checkpoint-5"}
    write_checkpoint(tmp_path / "checkpoint-3")
    for set_aside, left in ((False, {"_incomplete-checkpoint-5", "checkpoint-3"}), (True, {"checkpoint-3"})):
        assert find_last_whole_checkpoint(tmp_path, set_aside=set_aside)
        assert names(tmp_path) == left


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    for step in (100, 20, 9):
        write_checkpoint(tmp_path / f"checkpoint-{step}")
    for name in ("checkpoint-best", "_incomplete-checkpoint-111", "averaged", "old-checkpoint-500"):
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    assert list(list_checkpoints(str(tmp_path))) == [9, 20, 100]
    found = find_last_whole_checkpoint(tmp_path, set_aside=False)
    assert found == list_checkpoints(tmp_path)[100] == tmp_path / "checkpoint-100"
    assert names(tmp_path) == before
    assert list_checkpoints(tmp_path / "missing") == {}


make_trainer = partial(tiny_trainer.make_trainer, max_steps=4, eval_strategy="no")


class TestNumberOfProcesses:
    def test_the_recorded_number_counts(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        checkpoint = write_checkpoint(tmp_path / "checkpoint-3", world_size=2)
        assert find_problem(checkpoint, world_size=1) == "rng_state.pth is missing"
        write_state(checkpoint, world_size=2)
        for world_size in (1, 2, 4):
            assert find_problem(checkpoint, world_size=world_size) is None
            caplog.clear()
            assert find_last_whole_checkpoint(tmp_path, world_size=world_size) == checkpoint
            assert ("was saved by 2 process(es)" in caplog.text) == (world_size != 2)
        (checkpoint / "rng_state_1.pth").unlink()
        assert find_problem(checkpoint, world_size=1) == "rng_state_1.pth is missing"

    @pytest.mark.parametrize("entry", [None, 5, [], {}, {"attributes": 3}, {"attributes": {"world_size": "2"}}])
    def test_a_record_of_another_kind_counts_as_none(self, tmp_path: Path, entry: Any) -> None:
        checkpoint = write_checkpoint(tmp_path / "checkpoint-3")
        state = {"global_step": 3, "stateful_callbacks": {"RecordWorldSize": entry}}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        assert read_world_size(checkpoint) is None
        assert find_problem(checkpoint) is None

    @pytest.mark.parametrize("restore", [False, True])
    def test_the_trainer_records_it_and_goes_on_with_the_present_one(self, tmp_path: Path, restore: bool) -> None:
        make_trainer(tmp_path, RecordWorldSize()).train()
        checkpoint = tmp_path / "checkpoint-2"
        assert read_world_size(checkpoint) == 1
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        entries: Any = state.stateful_callbacks
        entries["RecordWorldSize"]["attributes"]["world_size"] = 2
        state.save_to_json(str(checkpoint / "trainer_state.json"))
        assert read_world_size(checkpoint) == 2
        settings = {"max_steps": 6, "restore_callback_states_from_checkpoint": restore}
        trainer = make_trainer(tmp_path, RecordWorldSize(), **settings)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert sum(isinstance(callback, RecordWorldSize) for callback in trainer.callback_handler.callbacks) == 1
        assert read_world_size(tmp_path / "checkpoint-6") == 1
        assert find_problem(tmp_path / "checkpoint-6", world_size=2) is None

    def test_a_run_that_began_without_the_record_gets_one(self, tmp_path: Path) -> None:
        make_trainer(tmp_path).train()
        assert read_world_size(tmp_path / "checkpoint-4") is None
        trainer = make_trainer(tmp_path, RecordWorldSize(), max_steps=6)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert read_world_size(tmp_path / "checkpoint-6") == 1


def test_each_process_needs_its_place_in_a_stream(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3", world_size=2)
    write_state(checkpoint, world_size=2, streaming=True)
    assert find_problem(checkpoint) == "data_state_0.json is missing or damaged"
    write_state(checkpoint, world_size=2, streaming=False)
    assert find_problem(checkpoint) is None
    (checkpoint / "data_state_0.json").write_text("{}")
    for text, problem in (('{"position": ', "data_state_1.json is missing or damaged"), ('{"position": 5}', None)):
        assert find_problem(checkpoint) == "data_state_1.json is missing or damaged"
        (checkpoint / "data_state_1.json").write_text(text)
        assert find_problem(checkpoint) == problem


class TestOtherLayouts:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        checkpoint = write_checkpoint(tmp_path / "checkpoint-3")
        (checkpoint / "additional_chat_templates").mkdir()  # which does not matter
        assert find_problem(checkpoint) is None
        for name in ("model.safetensors", "optimizer.pt"):
            (checkpoint / name).unlink()
        assert find_problem(checkpoint) == "optimizer.pt is missing"
        return checkpoint

    # One process without a process group: torch says so in passing.
    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
    def test_folders_of_fsdp(self, checkpoint: Path) -> None:
        parts = [checkpoint / name for name in ("optimizer_0", "pytorch_model_fsdp_0")]
        for part in parts:
            save_distributed({"x": torch.rand(5)}, checkpoint_id=part)
        assert find_problem(checkpoint) is None
        for part in parts:
            content = (part / ".metadata").read_bytes()
            (part / ".metadata").unlink()
            assert find_problem(checkpoint) == f"{part.name}/.metadata is missing"
            (part / ".metadata").write_bytes(content)

    def test_files_of_fsdp(self, checkpoint: Path) -> None:
        for name in ("pytorch_model_fsdp.bin", "optimizer.bin"):
            torch.save({"x": torch.rand(5)}, checkpoint / name)
        assert find_problem(checkpoint) is None
        for name in ("pytorch_model_fsdp.bin", "optimizer.bin"):
            (checkpoint / name).write_bytes((checkpoint / name).read_bytes()[:-9])
            assert find_problem(checkpoint) == f"{name} is cut off or damaged"

    def test_folders_of_deepspeed(self, checkpoint: Path) -> None:
        (checkpoint / "scheduler.pt").unlink()  # DeepSpeed's own schedules are in its files
        parts = checkpoint / "global_step3"
        parts.mkdir()
        assert find_problem(checkpoint) == "latest is missing"
        (checkpoint / "latest").write_text("global_step3")
        assert find_problem(checkpoint) is None


def test_a_half_deleted_checkpoint_goes_first_with_the_next_deletion(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    assert find_last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    write_checkpoint(tmp_path / "checkpoint-8")
    delete_old_checkpoints(tmp_path, 3, step=8)
    assert names(tmp_path) == {"checkpoint-4", "checkpoint-6", "checkpoint-8"}


def test_old_files_stay_until_the_new_ones_are_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    (folder / "_partial").mkdir(parents=True)
    (folder / "_partial" / "half").write_text("{")  # what a killed process left is not taken over
    with replacing_files(folder) as partial:
        assert names(partial) == set()
        (partial / "a").write_text("1")
        (partial / "b").write_text("1")
    for error in (KeyboardInterrupt, None):
        with contextlib.suppress(KeyboardInterrupt), replacing_files(folder) as partial:
            (partial / "b").write_text("2")
            assert (folder / "b").read_text() == "1"
            if error:
                raise error
        assert names(folder) == {"a", "b"}
        assert [(folder / name).read_text() for name in ("a", "b")] == ["1", "1" if error else "2"]


def test_the_first_steps_are_deleted_but_for_the_best_and_the_new_one(tmp_path: Path) -> None:
    """Step 60 is of a part of the run that was given up: the run went on from an earlier step."""
    for step in (5, 10, 15, 20, 60):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "_deleted-checkpoint-1").mkdir()  # a deletion that was cut off
    delete_old_checkpoints(tmp_path, 4, step=20, kept=[5])
    assert list(list_checkpoints(tmp_path)) == [5, 10, 15, 20]
    delete_old_checkpoints(tmp_path, 1, step=20, kept=[5])
    assert names(tmp_path) == {"checkpoint-5", "checkpoint-20"}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes of files")
@pytest.mark.parametrize("name", ["trainer_state.json", "model.safetensors", "optimizer.pt"])
def test_what_another_user_may_not_read_is_an_error_and_no_damage(name: str) -> None:
    # pytest's own folder is closed to other users.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        folder.chmod(0o777)
        checkpoint = write_checkpoint(folder / "checkpoint-3")
        (checkpoint / "model.safetensors").chmod(0o644)
        is_root, path = os.geteuid() == 0, checkpoint / name
        path.chmod(0o600 if is_root else 0)
        os.seteuid(65534 if is_root else os.geteuid())
        try:
            with pytest.raises(PermissionError, match=name):
                find_last_whole_checkpoint(folder)
        finally:
            os.seteuid(0 if is_root else os.geteuid())
        assert names(folder) == {"checkpoint-3"}


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, RecordWorldSize()).train()
    return folder


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    """A copy with the checkpoints 2 and 4."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


class TestDamage:
    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("model.safetensors", "model.safetensors is damaged: it has changed since it was saved"),
            ("optimizer.pt", "optimizer.pt is cut off or damaged"),
            ("rng_state.pth", "rng_state.pth is cut off or damaged"),
            ("config.json", "config.json is damaged"),
            ("trainer_state.json", "has fields that this version of transformers does not know: newer"),
        ],
    )
    def test_the_one_before_is_resumed(self, run: Path, name: str, problem: str, caplog: Any) -> None:
        assert find_last_whole_checkpoint(run) == run / "checkpoint-4"
        path = run / "checkpoint-4" / name
        if name == "trainer_state.json":
            path.write_text(json.dumps({**json.loads(path.read_text()), "newer": 1}))
        else:
            content = path.read_bytes()
            half = len(content) // 2
            path.write_bytes(content[:half] + bytes(len(content) // 4) + content[half + len(content) // 4 :])
        assert find_last_whole_checkpoint(run) == run / "checkpoint-2"
        assert problem in caplog.text
        assert names(run) == {"checkpoint-2", "_incomplete-checkpoint-4"}

    def test_a_run_does_not_begin_again_because_all_are_damaged(self, run: Path) -> None:
        for step in (2, 4):
            (run / f"checkpoint-{step}" / "optimizer.pt").write_bytes(b"")
        with pytest.raises(ValueError, match=r"can be resumed \(checkpoint-4: optimizer\.pt is .*; checkpoint-2: opt"):
            find_last_whole_checkpoint(run)
        assert names(run) == {"checkpoint-2", "checkpoint-4"}

    def test_damaged_weights_are_not_averaged(self, run: Path, tmp_path: Path) -> None:
        path = run / "checkpoint-2" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-9] + bytes(9))
        with pytest.raises(ValueError, match=r"checkpoint-2 cannot be averaged: model\.safetensors is damaged: it has"):
            average_checkpoints(select_checkpoints(run, last=2), tmp_path / "average")
        assert not (tmp_path / "average").exists()
