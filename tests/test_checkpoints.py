"""Which checkpoints count as whole: real folders of the Trainer's files, damaged one by one."""

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from vanilla_transformer.checkpoints import find_last_whole_checkpoint, find_problem


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
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return folder


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_whole_checkpoint_has_no_problem(tmp_path: Path, world_size: int) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3", world_size=world_size)
    assert find_problem(checkpoint, world_size=world_size) is None
    assert find_problem(str(checkpoint), world_size=world_size) is None


@pytest.mark.parametrize(
    "name", ["trainer_state.json", "scheduler.pt", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"]
)
def test_each_file_is_needed(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3", world_size=2)
    (checkpoint / name).unlink()
    assert f"{name} is missing" in str(find_problem(checkpoint, world_size=2))


def test_the_weights_are_needed(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3")
    (checkpoint / "model.safetensors").unlink()
    assert find_problem(checkpoint) == "there are no weights"


def test_a_checkpoint_of_one_process_does_not_serve_two(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3", world_size=1)
    assert find_problem(checkpoint, world_size=2) == "rng_state_0.pth is missing"


def test_sharded_weights_in_a_folder_of_their_own_will_do(tmp_path: Path) -> None:
    """As FSDP and DeepSpeed write them."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3")
    for name in ("model.safetensors", "optimizer.pt"):
        (checkpoint / name).unlink()
    assert find_problem(checkpoint) == "optimizer.pt is missing"
    (checkpoint / "pytorch_model_fsdp_0").mkdir()
    assert find_problem(checkpoint) is None


@pytest.mark.parametrize("content", [b"", b'{"global_step": 3', b"\xff\xfe"])
def test_a_garbled_state_is_a_problem(tmp_path: Path, content: bytes) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3")
    (checkpoint / "trainer_state.json").write_bytes(content)
    assert find_problem(checkpoint) == "trainer_state.json is missing or damaged"


@given(share=st.floats(min_value=0, max_value=1, exclude_max=True))
def test_weights_cut_off_anywhere_are_a_problem(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("cut") / "checkpoint-3")
    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(share * len(content))])
    assert find_problem(checkpoint) == "model.safetensors is cut off or damaged"
    weights.write_bytes(content)
    assert find_problem(checkpoint) is None


def test_the_second_of_two_weight_files_is_checked_too(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3")
    shards = [checkpoint / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    content = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").rename(shards[0])
    shards[1].write_bytes(content[:-1])
    assert find_problem(checkpoint) == f"{shards[1].name} is cut off or damaged"


@given(content=st.binary(max_size=64))
def test_weights_of_arbitrary_bytes_are_a_problem_not_a_crash(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("garbage") / "checkpoint-3")
    (checkpoint / "model.safetensors").write_bytes(content)
    assert find_problem(checkpoint) == "model.safetensors is cut off or damaged"


@pytest.mark.parametrize("header", ["5", "[]", '{"a": 1}', '{"a": {"dtype": "F32"}}', '{"a": {"data_offsets": [0]}}'])
def test_weights_with_a_header_of_another_kind_are_a_problem_not_a_crash(tmp_path: Path, header: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint-3")
    content = len(header).to_bytes(length=8, byteorder="little") + header.encode()
    (checkpoint / "model.safetensors").write_bytes(content)
    assert find_problem(checkpoint) == "model.safetensors is cut off or damaged"


def test_the_last_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        write_checkpoint(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "old-checkpoint-500").mkdir()
    before = names(tmp_path)
    assert find_last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-100"
    assert names(tmp_path) == before


def test_later_broken_checkpoints_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 4, 6, 8):
        write_checkpoint(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    (tmp_path / "checkpoint-8" / "trainer_state.json").unlink()
    assert find_last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    # The one before stays as it is: nothing will be read from or written to it.
    expected = {"checkpoint-2", "checkpoint-4", "incomplete-checkpoint-6", "incomplete-checkpoint-8"}
    assert names(tmp_path) == expected
    assert (tmp_path / "incomplete-checkpoint-8" / "model.safetensors").is_file()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "checkpoint-8: trainer_state.json is missing" in messages[0]
    assert "optimizer.pt is missing. It was renamed to incomplete-checkpoint-6" in messages[1]


def test_what_was_set_aside_earlier_is_kept(tmp_path: Path) -> None:
    for attempt in range(3):
        broken = write_checkpoint(tmp_path / "checkpoint-5")
        (broken / "trainer_state.json").unlink()
        (broken / "attempt").write_text(str(attempt))
        assert find_last_whole_checkpoint(tmp_path) is None
    aside = ["incomplete-checkpoint-5", "incomplete-checkpoint-5-2", "incomplete-checkpoint-5-3"]
    assert [(tmp_path / name / "attempt").read_text() for name in aside] == ["0", "1", "2"]


def test_looking_without_renaming(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-2" / "rng_state.pth").unlink()
    assert find_last_whole_checkpoint(tmp_path, set_aside=False) == tmp_path / "checkpoint-1"
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-2"}
    assert "rng_state.pth is missing" in caplog.text


def test_a_missing_random_state_of_one_rank_makes_the_checkpoint_before_it_the_last(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / f"checkpoint-{step}", world_size=2)
    (tmp_path / "checkpoint-2" / f"rng_state_{random.randrange(2)}.pth").unlink()
    assert find_last_whole_checkpoint(tmp_path, world_size=2) == tmp_path / "checkpoint-1"


def test_nothing_there(tmp_path: Path) -> None:
    assert find_last_whole_checkpoint(tmp_path / "missing") is None
    assert find_last_whole_checkpoint(tmp_path) is None
    assert not (tmp_path / "missing").exists()
