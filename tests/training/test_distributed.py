"""Many processes, for real: torchrun's agent with two ranks on the CPU, against one process and independent counts.

All tests assert the number of processes, and those of FSDP2 that each parameter is divided.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from many_processes import KILLED, Launcher, launcher, write_pairs
from safetensors.torch import load_file
from tiny_vanilla import SHARING, make_model
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.data.batching import TokenBatchSampler
from vanilla_transformer.training.checkpoints import read_world_size
from vanilla_transformer.training.sharding import save_sharded_model
from vanilla_transformer.training.trainer import data_state_name

CONFIGS = Path(__file__).resolve().parents[2] / "scripts" / "accelerate_configs"
PAIRS, VALIDATION_PAIRS = 60, 7
ONE_LAYER = "encoder_layers=1,decoder_layers=1"

Log = dict[tuple[int, str], float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def groups(folder: Path) -> Iterator[Launcher]:
    with launcher(folder) as instance:
        yield instance


@pytest.fixture(scope="module")
def shared(folder: Path) -> list[str]:
    return [
        *("--preset", "tiny", "--vocab_size", "280", "--max_train_samples", str(PAIRS)),
        *("--train_file", *write_pairs(folder, "train", PAIRS)),
        *("--validation_file", *write_pairs(folder, "validation", VALIDATION_PAIRS)),
        *("--learning_rate", "0.01", "--warmup_steps", "2", "--logging_steps", "1", "--save_strategy", "steps"),
        *("--report_to", "none", "--use_cpu", "--disable_tqdm", "true", "--per_device_eval_batch_size", "2"),
    ]


def read_log(output_dir: Path) -> Log:
    state = json.loads((output_dir / "trainer_state.json").read_text())
    return {
        (entry["step"], name): value
        for entry in state["log_history"]
        for name, value in entry.items()
        if not name.endswith(("runtime", "per_second", "total_flos"))
    }


def select(log: Log, *names: str) -> dict[tuple[int, str], float]:
    chosen = {key: value for key, value in log.items() if key[1] in names}
    assert {name for _, name in chosen} == set(names)
    return chosen


def without_sums(log: Log) -> Log:
    return {key: value for key, value in log.items() if not key[1].startswith("train_")}


def read_batches(folder: Path, world: int) -> list[list[dict[str, Any]]]:
    files = [folder / f"{rank}.jsonl" for rank in range(world)]
    ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    assert {entry["world"] for rank in ranks for entry in rank} == {world}
    assert not (folder / f"{world}.jsonl").exists()
    return ranks


def pairs_of(entries: list[dict[str, Any]]) -> Counter[str]:
    return Counter(json.dumps(pair) for entry in entries for pair in entry["pairs"])


def corpus_of(output_dir: Path, folder: Path) -> Counter[str]:
    """The training pairs as the run's tokenizer takes them apart."""
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    sources, targets = ((folder / f"train.{language}").read_text().splitlines() for language in ("en", "de"))
    encoded = tokenizer(sources, text_target=targets)
    return Counter(json.dumps(pair) for pair in zip(encoded["input_ids"], encoded["labels"], strict=True))


def assert_same_weights(one: Path, other: Path, *, exact: bool = True) -> None:
    weights, others = (load_file(path / "model.safetensors") for path in (one, other))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.allclose(others[name], tensor, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-4), name


@pytest.fixture(scope="module")
def recipe_arguments(shared: list[str]) -> list[str]:
    return [
        *shared,
        *("--config_overrides", f"dropout=0.0,{ONE_LAYER}", "--recipe", "paper", "--average_checkpoints", "0"),
        *("--tokens_per_batch", "140", "--tokens_per_device", "70"),
        *("--max_steps", "8", "--save_steps", "4", "--eval_steps", "8"),
    ]


@pytest.fixture(scope="module")
def together(groups: Launcher, folder: Path, recipe_arguments: list[str]) -> Path:
    arguments = ["--output_dir", str(folder / "together"), *recipe_arguments]
    said = groups.run("train", {"arguments": arguments, "batches": str(folder / "two")})
    assert said.count(f"The model is in {folder / 'together'}") == 1, "the first process speaks for all"
    assert "find_unused_parameters" not in said, "each update uses all parameters"
    return folder / "together"


@pytest.fixture(scope="module")
def alone(groups: Launcher, folder: Path, recipe_arguments: list[str]) -> Path:
    arguments = ["--output_dir", str(folder / "alone"), *recipe_arguments]
    groups.run("train", {"arguments": arguments, "batches": str(folder / "one")}, processes=1)
    return folder / "alone"


class TestTokenBatches:
    def test_the_recipe_keeps_the_tokens_of_an_update(self, together: Path, alone: Path) -> None:
        for output_dir, world in ((together, 2), (alone, 1)):
            for step in (4, 8):
                checkpoint = output_dir / f"checkpoint-{step}"
                assert read_world_size(checkpoint) == world
                assert len(list(checkpoint.glob("rng_state*"))) == world
            training = json.loads((output_dir / "arguments.json").read_text())["training"]
            assert training["max_source_tokens"] == training["max_target_tokens"] == 70
            assert world * training["gradient_accumulation_steps"] * 70 == 140

    def test_each_pair_is_in_one_batch_of_one_rank(self, together: Path, alone: Path, folder: Path) -> None:
        ranks, (batches,) = read_batches(folder / "two", 2), read_batches(folder / "one", 1)
        assert len(ranks[0]) == len(ranks[1]) == 8
        epochs = [pairs_of(ranks[0][start : start + 4] + ranks[1][start : start + 4]) for start in (0, 4)]
        assert epochs[0] == epochs[1] == corpus_of(together, folder)
        assert [entry["pairs"] for entry in ranks[0][:4]] != [entry["pairs"] for entry in ranks[0][4:]]
        for step in range(8):
            first, second, whole = (
                [entry for entry in entries if entry["step"] == step] for entries in (*ranks, batches)
            )
            assert len(first) == len(second) == 1
            assert pairs_of(first + second) == pairs_of(whole)

    def test_losses_and_scores_are_those_of_one_process(self, together: Path, alone: Path) -> None:
        """Also on the uneven shards of the validation sentences: 7, in batches of 2, for 2 ranks."""
        names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_perplexity", "train_loss")
        scores = ("eval_bleu", "eval_chrf", "eval_exact_match", "eval_gen_len")
        expected, found = (select(read_log(path), *names, *scores) for path in (alone, together))
        assert sum(name == "loss" for _, name in expected) == 8
        assert expected[8, "eval_bleu"] > 0
        assert found == pytest.approx(expected, rel=1e-4)
        assert_same_weights(together, alone, exact=False)

    def test_tokens_of_all_ranks_are_counted(self, together: Path, alone: Path, folder: Path) -> None:
        log, log_alone = read_log(together), read_log(alone)
        ranks = read_batches(folder / "two", 2)
        everything = [entry for rank in ranks for entry in rank]
        for index, side in enumerate(("source", "target")):
            counted = sum(len(pair[index]) for entry in everything for pair in entry["pairs"])
            assert log[8, f"train_{side}_tokens"] == log_alone[8, f"train_{side}_tokens"] == counted
        for step in range(8):
            entries = [entry for entry in everything if entry["step"] == step]
            tokens = sum(len(side) for entry in entries for pair in entry["pairs"] for side in pair)
            cells = sum(entry["cells"] for entry in entries)
            assert log[step + 1, "padding_share"] == pytest.approx(1 - tokens / cells, abs=1e-4)

    def test_one_process_goes_on_where_two_were(
        self, groups: Any, together: Path, folder: Path, recipe_arguments: Any
    ) -> None:
        output_dir = folder / "fewer"
        shutil.copytree(together, output_dir, ignore=shutil.ignore_patterns("checkpoint-8", "*.safetensors"))
        shutil.copy(together / "checkpoint-4" / "model.safetensors", output_dir / "checkpoint-4")
        said = groups.run("train", {"arguments": ["--output_dir", str(output_dir), *recipe_arguments]}, processes=1)
        assert "checkpoint-4 was saved by 2 process(es), and now there are 1" in said
        expected, found = (select(read_log(path), "loss") for path in (together, output_dir))
        assert found == pytest.approx(expected, rel=1e-4)
        assert read_world_size(output_dir / "checkpoint-8") == 1

    def test_divided_by_fsdp2_it_is_the_same(
        self, groups: Any, together: Path, folder: Path, recipe_arguments: Any
    ) -> None:
        environment = launch_environment("fsdp2") | {"ACCELERATE_MIXED_PRECISION": "no"}
        output_dir = folder / "sharded"
        arguments, batches = ["--output_dir", str(output_dir), *recipe_arguments], folder / "sharded-batches"
        # Some are longer, so that a rank that has finished must go on for the others' sake.
        options = {"arguments": arguments, "batches": str(batches), "sharded": True, "longer": 3}
        groups.run("train", {**options, "in_step": (1, 6)}, environment=environment, ends=KILLED)
        said = groups.run("train", options, environment=environment)
        assert f"Resuming from {output_dir / 'checkpoint-4'}\n" in said
        for rank in read_batches(batches, 2):
            assert all(entry["sharded"] for entry in rank)
        expected, found = (read_log(path) for path in (together, output_dir))
        assert found[8, "eval_gen_len"] > expected[8, "eval_gen_len"] == 12
        names = ("loss", "grad_norm", "eval_loss", "padding_share")
        assert select(found, *names) == pytest.approx(select(expected, *names), rel=1e-3)
        assert_saved_as_unsharded(output_dir, together)
        assert_saved_as_unsharded(output_dir / "checkpoint-4", together / "checkpoint-4")


def assert_saved_as_unsharded(folder: Path, expected: Path) -> None:
    assert_same_weights(folder, expected, exact=False)
    assert json.loads((folder / "config.json").read_text()) == json.loads((expected / "config.json").read_text())
    assert sorted(path.name for path in folder.glob("*.py")) == sorted(path.name for path in expected.glob("*.py"))


class TestSentenceBatches:
    def test_losses_are_those_of_one_process(self, groups: Launcher, folder: Path, shared: list[str]) -> None:
        """Two ranks with batches of 5 as one with batches of 10, by tokens: the two halves have not as many."""
        arguments = [
            *(*shared, "--config_overrides", f"dropout=0.0,{ONE_LAYER}", "--train_sampling_strategy", "random"),
            *("--max_steps", "8", "--save_strategy", "no", "--eval_strategy", "no", "--predict_with_generate", "false"),
        ]
        for name, processes, size in (("halves", 2, "5"), ("wholes", 1, "10")):
            words = ["--output_dir", str(folder / name), *arguments, "--per_device_train_batch_size", size]
            options = {"arguments": words, "batches": str(folder / f"{name}-batches")}
            groups.run("train", options, processes=processes)
        ranks, (batches,) = read_batches(folder / "halves-batches", 2), read_batches(folder / "wholes-batches", 1)
        for first, second, whole in zip(*ranks, batches, strict=True):
            assert pairs_of([first, second]) == pairs_of([whole])
        expected, found = (select(read_log(folder / name), "loss", "grad_norm") for name in ("wholes", "halves"))
        assert sum(name == "loss" for _, name in expected) == 8
        assert found == pytest.approx(expected, rel=1e-4)
        assert_same_weights(folder / "halves", folder / "wholes", exact=False)
        # Without translations too the loss on uneven shards is a mean over each sentence's tokens, once.
        results = [json.loads((folder / name / "eval_results.json").read_text()) for name in ("halves", "wholes")]
        assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=1e-4)


def train_in(groups: Launcher, folder: Path, arguments: list[str], name: str, **options: Any) -> str:
    options["arguments"] = ["--output_dir", str(folder / name), *arguments]
    return groups.run("train", options, ends=KILLED if {"in_step", "in_save"} & options.keys() else (0,))


class TestResuming:
    def test_two_killed_processes_reach_the_same_weights(self, groups: Launcher, folder: Path, shared: Any) -> None:
        arguments = [
            *(*shared, "--config_overrides", f"dropout=0.3,{ONE_LAYER}", "--per_device_train_batch_size", "10"),
            *("--max_steps", "6", "--save_steps", "2", "--save_total_limit", "9", "--eval_strategy", "no"),
            *("--predict_with_generate", "false"),
        ]
        run = partial(train_in, groups, folder, arguments)
        run("unbroken", batches=str(folder / "unbroken-batches"))
        ranks = read_batches(folder / "unbroken-batches", 2)
        for start in (0, 3):
            epoch = [entry for rank in ranks for entry in rank[start : start + 3]]
            assert pairs_of(epoch) == corpus_of(folder / "unbroken", folder)

        broken = folder / "broken"
        run("broken", in_save=(1, 4))
        assert not (broken / "checkpoint-4" / "rng_state_1.pth").exists()
        said = run("broken", in_step=(0, 5))
        assert f"Resuming from {broken / 'checkpoint-2'}\n" in said
        assert "renamed to _incomplete-checkpoint-4" in said
        said = run("broken")
        assert f"Resuming from {broken / 'checkpoint-4'}\n" in said

        assert without_sums(read_log(broken)) == without_sums(read_log(folder / "unbroken"))
        assert_same_weights(broken, folder / "unbroken")
        for rank in range(2):
            name = f"checkpoint-6/rng_state_{rank}.pth"
            found, expected = (torch.load(path / name, weights_only=False) for path in (broken, folder / "unbroken"))
            assert found["cpu"].equal(expected["cpu"])


class TestStreaming:
    def test_each_pair_is_in_one_rank_and_a_killed_run_goes_on(self, groups: Any, folder: Path, shared: Any) -> None:
        arguments = [
            *(*shared, "--config_overrides", f"dropout=0.3,{ONE_LAYER}", "--streaming", "--max_source_tokens", "120"),
            *("--max_steps", "6", "--save_steps", "2", "--average_checkpoints", "2", "--eval_strategy", "no"),
            *("--max_eval_samples", "1"),  # a rank has none of its own
        ]
        run = partial(train_in, groups, folder, arguments)
        batches = folder / "stream-batches"
        run("stream", batches=str(batches))
        first_pass: Counter[str] = Counter()
        for rank in read_batches(batches, 2):
            entries = iter(rank)
            seen: list[dict[str, Any]] = []
            while sum(len(entry["pairs"]) for entry in seen) < PAIRS / 2:
                seen.append(next(entries))
            first_pass += pairs_of(seen)
        assert first_pass == corpus_of(folder / "stream", folder)
        for step in (4, 6):
            checkpoint = folder / "stream" / f"checkpoint-{step}"
            states = [json.loads((checkpoint / data_state_name(rank)).read_text()) for rank in range(2)]
            assert [state["arguments"]["rank"] for state in states] == [0, 1]
        metrics = json.loads((folder / "stream" / "eval_results.json").read_text())
        assert metrics["eval_loss"] > 0

        last, before = (load_file(folder / "stream" / f"checkpoint-{step}/model.safetensors") for step in (6, 4))
        for name, tensor in load_file(folder / "stream" / "model.safetensors").items():
            torch.testing.assert_close(tensor, (last[name] + before[name]) / 2)

        run("broken-stream", in_step=(1, 3))
        said = run("broken-stream")
        assert f"Resuming from {folder / 'broken-stream' / 'checkpoint-2'}\n" in said
        expected, found = (read_log(folder / name) for name in ("stream", "broken-stream"))
        assert without_sums(found) == without_sums(expected)
        assert_same_weights(folder / "broken-stream", folder / "stream")


def test_fully_shard_by_hand_trains_as_the_whole_model_does(groups: Launcher, tmp_path: Path) -> None:
    names = ("shared-tied", "separate-untied")
    changes = {name: {**SHARING[name], "label_smoothing": 0.1, "lm_head_bias": True} for name in names}
    groups.run("fully_shard_by_hand", {"folder": str(tmp_path), "changes": changes, "steps": 3})
    for name in names:
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert result["world"] == 2
        assert set(result["sharded"].values()) == {"DTensor"}
        assert len(result["losses"]) == len(set(result["losses"])) == 3
        assert result["losses"] == pytest.approx(result["expected"], rel=1e-5)
        if hasattr(torch.nn, "LinearCrossEntropyOptions"):
            assert len(result["fused"]) == 3, "the output layer is gathered with the root, so no logits are needed"
        assert_saved_as_unsharded(tmp_path / name, tmp_path / f"{name}-whole")
        model, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values())
        for key, tensor in load_file(tmp_path / name / "model.safetensors").items():
            assert torch.equal(model.state_dict()[key], tensor)


def test_a_whole_model_is_not_saved_as_a_divided_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was not divided by fully_shard"):
        save_sharded_model(make_model(), str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_a_users_own_loop_sees_each_batch_once(groups: Launcher, folder: Path) -> None:
    """By accelerate, which divides the batches of a sampler without a rank; three epochs, an odd number of batches."""
    chooser = random.Random(0)
    names = ("input_ids", "labels")
    draw = partial(chooser.choices, range(4, 200))
    rows = [{name: [*draw(k=chooser.randint(1, 12)), 2] for name in names} for _ in range(PAIRS - 1)]
    lengths = ([len(row[name]) for row in rows] for name in names)
    sampler = TokenBatchSampler(*lengths, max_source_tokens=60, max_target_tokens=60)
    assert len(sampler) % 2 == 1
    output = folder / "loop"
    output.mkdir()
    groups.run("prepared_loader", {"folder": str(output), "rows": rows, "budget": 60, "epochs": 3})
    ranks = read_batches(output, 2)
    assert len(ranks[0]) == len(ranks[1])
    expected = Counter(json.dumps([row["input_ids"], row["labels"]]) for row in rows)
    epochs = [[entry for rank in ranks for entry in rank if entry["epoch"] == epoch] for epoch in range(3)]
    assert [pairs_of(epoch) for epoch in epochs] == [expected] * 3
    assert len({json.dumps([entry["pairs"] for entry in epoch]) for epoch in epochs}) == 3


def launch_environment(name: str, *more: str) -> dict[str, str]:
    """The variables that `accelerate launch --config_file` sets for its processes."""
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(CONFIGS / f"{name}.yaml"), "--main_process_port", "0", *more, "train.py"]
    )
    arguments, *_ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""  # which `accelerate launch` puts in between
        _, environment = prepare_deepspeed_cmd_env(arguments)
    else:
        environment = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in environment.items() if key.startswith(("ACCELERATE_", "FSDP_"))}


class TestConfigFiles:
    @pytest.mark.parametrize("name", ["ddp", "fsdp2", "deepspeed_zero3"])
    def test_accelerate_knows_every_key(self, name: str) -> None:
        path = CONFIGS / f"{name}.yaml"
        assert load_config_from_file(str(path)).num_processes > 1, "it refuses unknown keys"
        known = vars(launch_command_parser().parse_args(["train.py"]))
        content = yaml.safe_load(path.read_text())
        for part in ("fsdp_config", "deepspeed_config"):
            assert content.get(part, {}).keys() <= known.keys()

    def test_the_launcher_passes_them_on(self) -> None:
        assert sorted(path.stem for path in CONFIGS.iterdir()) == ["ddp", "deepspeed_zero3", "fsdp2"]
        ddp = launch_environment("ddp", "--num_processes", "8")
        assert ddp["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert not any(key.startswith(("FSDP_", "ACCELERATE_USE")) for key in ddp)
        fsdp2 = launch_environment("fsdp2")
        expected = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
        assert {**expected, "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}.items() <= fsdp2.items()
        deepspeed = launch_environment("deepspeed_zero3")
        expected = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
        assert {**expected, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}.items() <= deepspeed.items()
        assert not deepspeed.keys() & {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"}
