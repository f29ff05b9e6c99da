"""The paper's recipe: its learning rate at every step, its batches on any hardware, its arguments in a real trainer."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tiny_trainer import make_trainer
from transformers import Seq2SeqTrainingArguments, get_scheduler

from vanilla_transformer import PRESETS, VanillaTransformerConfig
from vanilla_transformer.tasks import TRANSLATION
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.recipe import (
    find_num_devices,
    find_warmup_problem,
    paper_learning_rate,
    paper_recipe,
    paper_training_arguments,
    split_token_batch,
)


def make_arguments(output_dir: Path, preset: str = "base", **changes: Any) -> TranslationTrainingArguments:
    quick: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    quick |= {"per_device_train_batch_size": 4, "num_devices": 1, **changes}
    return paper_training_arguments(preset, output_dir=output_dir, **quick)


class TestLearningRate:
    @pytest.mark.parametrize(("preset", "warmup_steps"), [("base", 4000), ("big", 4000), ("C-d256", 1), ("tiny", 777)])
    def test_the_scheduler_is_the_papers_formula(self, preset: str, warmup_steps: int, tmp_path: Path) -> None:
        arguments = make_arguments(tmp_path, preset, warmup_steps=warmup_steps)
        trainer = make_trainer(tmp_path, args=arguments)
        trainer.create_optimizer_and_scheduler(num_training_steps=arguments.max_steps)
        scheduler = trainer.lr_scheduler
        d_model = {"base": 512, "big": 1024, "C-d256": 256, "tiny": 32}[preset]
        trainer.optimizer.step()
        for step in range(9001):
            expected = 1 / math.sqrt(d_model) * min(1 / math.sqrt(step) if step else 0.0, step / warmup_steps**1.5)
            for rate in (scheduler.get_last_lr()[0], paper_learning_rate(step, d_model, warmup_steps)):
                assert math.isclose(rate, expected, rel_tol=1e-12), f"step {step}"
            scheduler.step()

    def test_an_update_is_made_with_the_rate_of_the_step_before(self, tmp_path: Path) -> None:
        lengths: dict[str, Any] = {"warmup_steps": 3, "max_steps": 6, "logging_steps": 1, "save_strategy": "no"}
        lengths |= {"average_checkpoints": 0, "eval_strategy": "no"}
        trainer = make_trainer(tmp_path, args=make_arguments(tmp_path, **lengths))
        used: list[float] = []
        trainer.create_optimizer_and_scheduler(num_training_steps=6)
        optimizer = trainer.optimizer
        optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
        trainer.train()
        assert paper_learning_rate(4000, 512) == pytest.approx(6.98771e-4, rel=1e-5), "the well-known peak of base"
        assert used[0] == 0
        assert used == pytest.approx([paper_learning_rate(update - 1, 512, 3) for update in range(1, 7)], rel=1e-12)
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [entry["learning_rate"] for entry in logged] == pytest.approx(used, rel=1e-12)
        # Without clipping the norm is still measured.
        assert all(entry["grad_norm"] > 0 for entry in logged)

    @given(step=st.integers(1, 10**6), d_model=st.integers(1, 4096), warmup_steps=st.integers(1, 10**5))
    def test_it_peaks_at_the_end_of_the_warm_up(self, step: int, d_model: int, warmup_steps: int) -> None:
        peak = paper_learning_rate(warmup_steps, d_model, warmup_steps)
        assert peak == pytest.approx((d_model * warmup_steps) ** -0.5, rel=1e-12)
        assert 0 < paper_learning_rate(step, d_model, warmup_steps) <= peak

    @pytest.mark.parametrize(("name", "value"), [("step", -1), ("d_model", 0), ("warmup_steps", 0)])
    def test_impossible_numbers_are_refused(self, name: str, value: int) -> None:
        with pytest.raises(ValueError, match=rf"{name}={value}: must be at least"):
            paper_learning_rate(**{"step": 1, "d_model": 2, "warmup_steps": 3, name: value})


class TestWarmup:
    def rates(self, arguments: Any, updates: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = get_scheduler(
            arguments.lr_scheduler_type,
            optimizer,
            num_warmup_steps=arguments.get_warmup_steps(updates),
            num_training_steps=updates,
        )
        rates = []
        for _ in range(updates):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return rates

    @pytest.mark.parametrize(
        "schedule", ["inverse_sqrt", "linear", "cosine", "constant", "constant_with_warmup", "reduce_lr_on_plateau"]
    )
    @pytest.mark.parametrize("updates", [3, 10, 11, 20, 21, 40])
    def test_it_is_reported_where_it_has_no_room(self, schedule: str, updates: int, tmp_path: Path) -> None:
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path), lr_scheduler_type=schedule, warmup_steps=10, eval_strategy="steps", use_cpu=True
        )
        problem = find_warmup_problem(arguments, updates)
        rates = [1.0] if schedule == "reduce_lr_on_plateau" else self.rates(arguments, updates)
        beginning = f"{updates} update(s), but the warm-up takes 10: the learning rate "
        if max(rates) < 1:
            assert str(problem).startswith(f"{beginning}never reaches its peak")
        elif schedule == "inverse_sqrt" and rates[-1] > 2**-0.5 + 1e-9:
            assert str(problem).startswith(f"{beginning}has hardly begun to fall")
        else:
            assert problem is None

    def test_a_share_of_the_updates_always_fits(self, tmp_path: Path) -> None:
        for warmup in (0, 0.9):
            settings: dict[str, Any] = {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": warmup, "use_cpu": True}
            assert find_warmup_problem(Seq2SeqTrainingArguments(str(tmp_path), **settings), 3) is None


class TestTokenBatch:
    @given(batch=st.integers(1, 10**6), device=st.integers(1, 10**5), devices=st.integers(1, 512))
    @example(batch=25_000, device=4096, devices=1)
    @example(batch=25_000, device=25_000, devices=8)
    def test_the_parts_come_to_the_batch_in_few_passes(self, batch: int, device: int, devices: int) -> None:
        assume(devices <= batch)
        passes, tokens = split_token_batch(batch, device, devices)
        assert 1 <= tokens <= device
        assert batch <= devices * passes * tokens < batch + devices * passes
        assert (passes - 1) * devices * device < batch

    @pytest.mark.parametrize("numbers", [(0, 10, 10), (10, 0, 10), (10, 10, 0), (10, 10, 11)])
    def test_numbers_below_one_and_more_devices_than_tokens_are_refused(self, numbers: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"=0: must be at least 1|=11: must not exceed tokens_per_batch=10"):
            split_token_batch(*numbers)

    def test_the_launcher_announces_the_number_of_devices(self, monkeypatch: Any, tmp_path: Path) -> None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        assert find_num_devices() == 1
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert find_num_devices() == 8
        settings = paper_recipe("base", tokens_per_device=4096)
        assert (settings["gradient_accumulation_steps"], settings["max_source_tokens"]) == (1, 3125)
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            assert find_num_devices() == 1
        finally:
            torch.distributed.destroy_process_group()


class TestArguments:
    def test_the_papers_numbers_for_base(self, tmp_path: Path) -> None:
        arguments = make_arguments(tmp_path / "new")
        assert not (tmp_path / "new").exists()
        expected = {"adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-9, "weight_decay": 0.0}
        expected |= {"max_grad_norm": 0.0, "warmup_steps": 4000, "max_steps": 100_000, "average_checkpoints": 5}
        expected |= {"save_steps": 1500, "eval_steps": 1500, "save_total_limit": 5, "load_best_model_at_end": False}
        expected |= {"label_smoothing_factor": 0.0, "gradient_accumulation_steps": 7, "max_source_tokens": 3572}
        assert {name: getattr(arguments, name) for name in expected} == expected
        assert arguments.learning_rate == pytest.approx((512 * 4000) ** -0.5)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_every_preset_has_its_rate_and_all_but_big_the_length_of_base(self, preset: str, tmp_path: Path) -> None:
        arguments = make_arguments(tmp_path, preset)
        d_model = VanillaTransformerConfig.from_preset(preset).d_model
        assert arguments.learning_rate == pytest.approx((d_model * 4000) ** -0.5)
        lengths = (arguments.max_steps, arguments.save_steps, arguments.eval_steps, arguments.average_checkpoints)
        assert lengths == ((300_000, 600, 600, 20) if preset == "big" else (100_000, 1500, 1500, 5))

    def test_a_share_as_warm_up_needs_a_rate(self, tmp_path: Path) -> None:
        for share in (0, 0.1):
            with pytest.raises(ValueError, match=f"learning_rate must be given with warmup_steps={share}"):
                make_arguments(tmp_path, warmup_steps=share)
        assert make_arguments(tmp_path, warmup_steps=0.1, learning_rate=0.01).learning_rate == 0.01

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"train_sampling_strategy": "nonsense"}, "train_sampling_strategy='nonsense': must be one of random"),
            ({"average_checkpoints": 2, "save_strategy": "no"}, "average_checkpoints=2 needs checkpoints"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, options: Any, message: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=message):
            TranslationTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)

    def test_a_schedule_that_looks_at_the_loss_keeps_its_best_checkpoint_too(self, tmp_path: Path) -> None:
        options: Any = {"average_checkpoints": 2, "lr_scheduler_type": "reduce_lr_on_plateau"}
        arguments = TranslationTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
        assert (arguments.metric_for_best_model, arguments.save_total_limit) == ("loss", 3)

    def test_scores_of_translations_choose_only_where_there_are_translations(self, tmp_path: Path) -> None:
        options: Any = {"metric_for_best_model": "bleu", "predict_with_generate": False, "use_cpu": True}
        with pytest.raises(ValueError, match="metric_for_best_model=bleu needs predict_with_generate"):
            TranslationTrainingArguments(output_dir=str(tmp_path), **options).choose_metric(TRANSLATION)

    def test_overrides_win_and_more_averaged_checkpoints_are_also_kept(self, tmp_path: Path) -> None:
        changes: dict[str, Any] = {"learning_rate": 0.5, "max_steps": 7, "adam_beta2": 0.9, "save_steps": 3}
        changed = make_arguments(tmp_path, **changes)
        assert {name: getattr(changed, name) for name in changes} == changes
        rate = make_arguments(tmp_path, "big", warmup_steps=77).learning_rate
        assert rate == pytest.approx(paper_learning_rate(77, 1024, 77))
        assert make_arguments(tmp_path, num_train_epochs=3).max_steps == -1, "epochs take the place of updates"
        assert make_arguments(tmp_path, num_train_epochs=3, max_steps=9).max_steps == 9
        assert make_arguments(tmp_path, average_checkpoints=8).save_total_limit == 8
        assert make_arguments(tmp_path, average_checkpoints=0).save_total_limit == 5
        assert make_arguments(tmp_path, average_checkpoints=8, save_total_limit=30).save_total_limit == 30
        divided = make_arguments(tmp_path, tokens_per_batch=8000, tokens_per_device=1000, num_devices=2)
        assert (divided.gradient_accumulation_steps, divided.max_target_tokens) == (4, 1000)

    def test_the_recipe_names_arguments_that_there_are_and_leaves_the_rate_to_them(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no preset 'bigger'"):
            paper_recipe("bigger")
        settings = paper_recipe("base", use_cpu=True)
        arguments = TranslationTrainingArguments(output_dir=str(tmp_path), **settings)
        assert arguments.learning_rate is None
        for name, value in settings.items():
            assert getattr(arguments, name) == value, name
