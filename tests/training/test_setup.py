"""Training: what is learned, at which rate, from which arguments, and what a stopped run leaves behind."""

import copy
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st
from library_models import make_nllb_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import IntervalStrategy

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.tasks import TRANSLATION, record_directions
from vanilla_transformer.training.arguments import DataArguments, ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.checkpoints import CheckpointError
from vanilla_transformer.training.checks import check_special_tokens
from vanilla_transformer.training.examples import load_corpora, tokenize_pairs
from vanilla_transformer.training.output_folder import claim_output_dir
from vanilla_transformer.training.setup import (
    build_config,
    build_model,
    build_trainer,
    load_or_train_tokenizer,
    parse_overrides,
    settle_languages,
    settle_training_arguments,
)

TOKENIZER = VanillaTransformerTokenizer()
PAD, EOS = 1, 2
TINY = ModelArguments(preset="tiny")


def make_dataset(count: int, *, seed: int = 0, longest: int = 12) -> Dataset:
    generator = np.random.default_rng(seed)

    def text() -> str:
        return "".join(generator.choice(list("abcdef"), size=generator.integers(1, longest)))

    return Dataset.from_dict({"source": [text() for _ in range(count)], "target": [text() for _ in range(count)]})


def make_corpora(train: int = 24, validation: int = 6) -> DatasetDict:
    return DatasetDict(train=make_dataset(train, seed=1), validation=make_dataset(validation, seed=2))


def make_arguments(output_dir: Path, **changes: Any) -> TranslationTrainingArguments:
    settings: dict[str, Any] = {"output_dir": str(output_dir), "per_device_train_batch_size": 4, "report_to": []}
    settings |= {"per_device_eval_batch_size": 2, "disable_tqdm": True, "use_cpu": True, **changes}
    return TranslationTrainingArguments(**settings)


def make_trainer(
    output_dir: Path, *, overrides: str | None = None, corpora: DatasetDict | None = None, **changes: Any
) -> Any:
    model_arguments = ModelArguments(preset="tiny", config_overrides=overrides)
    data_arguments = DataArguments(train_file=["in memory"])
    arguments = make_arguments(output_dir, **changes)
    corpora = corpora or make_corpora()
    config = build_config(model_arguments, TOKENIZER)
    settle_training_arguments(arguments, config, validates="validation" in corpora)
    model = build_model(model_arguments, config)
    return build_trainer(model, TOKENIZER, corpora, data_arguments, arguments)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The oracle, from the definition: cross-entropy with (1 - epsilon) one-hot + epsilon uniform."""
    log_probabilities = logits.float().log_softmax(dim=-1)
    counted = labels != -100
    picked = log_probabilities.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    losses = -(1 - epsilon) * picked - epsilon * log_probabilities.mean(dim=-1)
    return losses[counted].mean()


class TestReversal:
    def draw(self, count: int, generator: np.random.Generator) -> list[tuple[int, ...]]:
        return [tuple(generator.integers(4, 12, size=generator.integers(3, 6)).tolist()) for _ in range(count)]

    def collate(self, sequences: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
        sources = [torch.tensor([*sequence, EOS]) for sequence in sequences]
        targets = [torch.tensor([*reversed(sequence), EOS]) for sequence in sequences]
        input_ids = pad_sequence(sources, batch_first=True, padding_value=PAD)
        labels = pad_sequence(targets, batch_first=True, padding_value=-100)
        return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(), "labels": labels}

    def test_reversal_is_learned_to_the_last_unseen_sequence(self) -> None:
        generator = np.random.default_rng(0)
        unseen = self.draw(200, generator)
        held_out = set(unseen)
        fields = {"encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0, "label_smoothing": 0.0}
        config = VanillaTransformerConfig.from_preset("tiny", vocab_size=12, **fields)
        model = VanillaTransformerForConditionalGeneration(config).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=8e-3, betas=(0.9, 0.98), eps=1e-9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, (300 - step) / 250))
        for _ in range(300):
            batch = self.collate([sequence for sequence in self.draw(64, generator) if sequence not in held_out])
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        inputs = self.collate(unseen)
        inputs.pop("labels")
        generated = model.eval().generate(**inputs)[:, 1:].tolist()  # without the start symbol
        translations = [tuple(row[: row.index(EOS)]) if EOS in row else tuple(row) for row in generated]
        assert translations == [sequence[::-1] for sequence in unseen]


def test_length_groups_come_in_any_order(tmp_path: Path) -> None:
    """Batches hold examples of about one length, and neither fall nor rise in length from one to the next."""
    texts = ["a " * (1 + number % 24) for number in range(480)]
    corpora = DatasetDict(train=Dataset.from_dict({"source": texts, "target": ["b"] * len(texts)}))
    trainer = make_trainer(tmp_path, corpora=corpora, per_device_train_batch_size=4)
    loader = trainer.get_train_dataloader()
    orders = []
    for epoch in (0, 1, 0):
        trainer.state.epoch = epoch
        trainer.callback_handler.train_dataloader = loader
        trainer.callback_handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)
        orders.append([batch["attention_mask"].sum(dim=1).tolist() for batch in loader])
    assert orders[0] == orders[2] != orders[1]
    for order in orders:
        expected = sorted(len(ids) for ids in trainer.train_dataset["input_ids"])
        assert sorted(length for batch in order for length in batch) == expected
        assert sum(len(set(batch)) > 2 for batch in order) <= 8, "only where 50 batches end may lengths mix"
        means = [sum(batch) / len(batch) for batch in order]
        steps = [b - a for a, b in itertools.pairwise(means) if b != a]
        turns = sum(a * b < 0 for a, b in itertools.pairwise(steps))
        assert turns > len(steps) / 3


def test_length_groups_pad_no_more_than_the_librarys(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(3, 0.6, size=3000).astype(int).clip(1, 200)
    texts = ["a " * length for length in lengths]
    corpora = DatasetDict(train=Dataset.from_dict({"source": texts, "target": ["b"] * len(texts)}))
    trainer = make_trainer(tmp_path, corpora=corpora, per_device_train_batch_size=16)
    loader = trainer.get_train_dataloader()
    trainer.callback_handler.train_dataloader = loader
    trainer.callback_handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)
    library = LengthGroupedSampler(16, lengths=lengths.tolist(), generator=torch.Generator().manual_seed(0))

    def padding(indices: list[int]) -> float:
        batches = [lengths[indices[start : start + 16]] for start in range(0, len(indices), 16)]
        return float(1 - lengths.sum() / sum(len(batch) * batch.max() for batch in batches))

    assert padding(list(loader.batch_sampler.sampler)) < 1.1 * padding(list(library)) < 0.2


class TestRecipe:
    def test_defaults_are_the_papers(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path)
        trainer.create_optimizer_and_scheduler(num_training_steps=10)
        (group, *_) = trainer.optimizer.param_groups
        assert isinstance(trainer.optimizer, torch.optim.AdamW)
        assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-9)
        assert all(group["weight_decay"] == 0 for group in trainer.optimizer.param_groups)
        arguments: Any = trainer.args
        assert (arguments.lr_scheduler_type, arguments.warmup_steps) == ("inverse_sqrt", 4000)
        assert (arguments.predict_with_generate, arguments.load_best_model_at_end) == (True, True)
        assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("chrf", True)
        assert trainer.model.generation_config.num_beams == 4
        assert arguments.generation_num_beams == 1

    def test_without_generation_the_loss_chooses_the_best_checkpoint(self, tmp_path: Path) -> None:
        arguments = make_arguments(tmp_path, predict_with_generate=False)
        assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("loss", False)

    def test_who_wants_the_loss_only_has_the_best_chosen_by_it(self, tmp_path: Path) -> None:
        arguments = make_arguments(tmp_path, prediction_loss_only=True)
        settle_training_arguments(arguments, VanillaTransformerConfig(), validates=True)
        assert (arguments.metric_for_best_model, arguments.greater_is_better) == ("loss", False)

    def test_without_validation_data_nothing_is_validated(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, corpora=DatasetDict(train=make_dataset(4)), max_steps=1)
        assert trainer.args.eval_strategy == IntervalStrategy.NO
        assert not trainer.args.load_best_model_at_end
        assert trainer.train().global_step == 1

    def test_lengths_that_change_cannot_be_balanced(self, tmp_path: Path) -> None:
        arguments = make_arguments(tmp_path, train_sampling_strategy="batch_rebalance")
        with pytest.raises(ValueError, match="train_sampling_strategy=batch_rebalance needs fixed lengths"):
            settle_training_arguments(arguments, VanillaTransformerConfig(), validates=True, regularizes_subwords=True)

    def test_label_smoothing_is_applied_once_and_in_training_only(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, overrides="dropout=0", label_smoothing_factor=0.3)
        model: Any = trainer.model
        assert (model.config.label_smoothing, trainer.args.label_smoothing_factor) == (0.3, 0)
        assert trainer.label_smoother is None
        batch = dict(next(iter(trainer.get_train_dataloader())))
        labels = batch["labels"]
        with torch.no_grad():
            logits = model.eval()(**batch).logits
            trained_on = trainer.compute_loss(model.train(), dict(batch))
            evaluated = trainer.prediction_step(model.eval(), dict(batch), prediction_loss_only=True)[0]
        torch.testing.assert_close(trained_on, smoothed_loss(logits, labels, epsilon=0.3))
        torch.testing.assert_close(evaluated, smoothed_loss(logits, labels, epsilon=0))
        assert abs(trained_on - evaluated) > 1e-3

    def test_four_times_two_is_one_times_eight(self, tmp_path: Path) -> None:
        """Gradient accumulation: every target token has the same weight, however the batch is divided."""
        corpora = DatasetDict(train=make_dataset(8, longest=30))
        settings: dict[str, Any] = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
        settings |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "label_smoothing_factor": 0.1}
        settings |= {"overrides": "dropout=0", "corpora": corpora}
        results = []
        for size, accumulation in ((8, 1), (2, 4)):
            set_seed(0)
            settings |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
            trainer = make_trainer(tmp_path / str(size), **settings)
            start = weights(trainer.model)
            assert trainer.train().global_step == 1
            results.append(weights(trainer.model))
        lengths = [len(labels) for labels in trainer.train_dataset["labels"]]
        assert max(lengths) > 2 * min(lengths), "equal lengths would hide a mean of means"
        assert not any(torch.equal(start[name], results[0][name]) for name in start)
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)

    def test_a_loop_of_ones_own_with_accelerate(self) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        model: Any = build_model(TINY, build_config(TINY, TOKENIZER))
        rows = tokenize_pairs(make_dataset(6), TOKENIZER, max_source_length=64, max_target_length=64, name="data")
        collator = DataCollatorForSeq2Seq(TOKENIZER, model=model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(rows, batch_size=3, collate_fn=collator)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        before = weights(model)
        model.train()
        losses = []
        for batch in itertools.chain.from_iterable(loader for _ in range(5)):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


def test_every_batch_may_use_the_papers_limit(tmp_path: Path) -> None:
    """The library's trainer writes its own default of 20 tokens into the generation config after the first batch."""
    corpora = DatasetDict(train=make_dataset(2), validation=make_dataset(6, seed=3))
    changes: dict[str, Any] = {"overrides": "lm_head_bias=true", "train_sampling_strategy": "random"}
    trainer = make_trainer(tmp_path, corpora=corpora, **changes)
    with torch.no_grad():
        trainer.model.lm_head.bias[[PAD, EOS]] = -1e4  # translations end at the limit only
    before = copy.deepcopy(trainer.model.generation_config)
    predictions = trainer.predict(trainer.eval_dataset).predictions
    lengths = [int(np.sum((row != PAD) & (row != -100))) for row in predictions]
    # The source with </s>, plus 50, plus the start symbol.
    assert lengths == [len(row) + 50 + 1 for row in trainer.eval_dataset["input_ids"]]
    assert trainer.model.generation_config.to_dict() == before.to_dict()
    assert before.max_length is None
    assert before.num_beams == 4


class TestOverrides:
    names = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    values = leaves | st.lists(leaves, max_size=3) | st.dictionaries(st.text(max_size=4), leaves, max_size=3)

    @given(settings=st.dictionaries(names, values, max_size=5))
    def test_any_json_survives(self, settings: dict[str, Any]) -> None:
        text = ",".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        assert parse_overrides(text) == settings

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (None, {}),
            (" d_k = null , activation_function = gelu ,", {"d_k": None, "activation_function": "gelu"}),
            ("eos_token_id=[2, 3],d_v=8", {"eos_token_id": [2, 3], "d_v": 8}),
            ("a=1e-9,b=true,c=10000 steps,d=", {"a": 1e-9, "b": True, "c": "10000 steps", "d": ""}),
            ('a="x,b=1",c="="', {"a": "x,b=1", "c": "="}),
        ],
    )
    def test_values_are_json_or_else_strings(self, text: str | None, expected: dict[str, Any]) -> None:
        assert parse_overrides(text) == expected

    @pytest.mark.parametrize("text", ["d_k=8,dropout", "dropout,d_k=8", "d_k=8 dropout,d_v"])
    def test_a_part_without_an_equals_sign_is_named(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"config_overrides: '(dropout|d_v)' is not of the form name=value"):
            parse_overrides(text)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=300, normalize_before=True)
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


class TestConfig:
    def test_a_preset_takes_vocabulary_and_special_tokens_from_the_tokenizer(self) -> None:
        tokenizer = VanillaTransformerTokenizer(bos_token="<begin>", pad_token="<blank>")
        tokenizer.add_tokens(["<x>", "<y>"])
        config: Any = build_config(ModelArguments(preset="iwslt"), tokenizer)
        assert config.vocab_size == len(tokenizer) == len(VanillaTransformerTokenizer()) + 2
        assert config.encoder_ffn_dim == 1024
        for name in ("bos", "pad", "eos"):
            assert getattr(config, f"{name}_token_id") == getattr(tokenizer, f"{name}_token_id")
        assert config.decoder_start_token_id == tokenizer.bos_token_id

    def test_overrides_reach_every_kind_of_base(self, saved_model: Path) -> None:
        overrides = "hidden_size=16,encoder_layers=1,d_k=3,d_v=5,activation_function=gelu,position_offset=2"
        for name in ("preset", "config_name", "model_name_or_path"):
            base: dict[str, Any] = {name: "tiny" if name == "preset" else str(saved_model)}
            config: Any = build_config(ModelArguments(**base, config_overrides=overrides), TOKENIZER)
            assert (config.d_model, config.encoder_layers, config.d_k, config.d_v) == (16, 1, 3, 5)
            assert (config.activation_function, config.position_offset) == ("gelu", 2)
            assert config.normalize_before == (name != "preset")
            assert config.decoder_layers == 2
            assert config.vocab_size == (300 if name == "model_name_or_path" else len(TOKENIZER))

    def test_a_tokenizer_larger_than_the_model_is_refused(self, saved_model: Path) -> None:
        arguments = ModelArguments(model_name_or_path=str(saved_model), tokenizer_name="larger")
        tokenizer = VanillaTransformerTokenizer()
        tokenizer.add_tokens([f"<{number}>" for number in range(41)])
        with pytest.raises(ValueError, match=r"tokenizer larger has 301 source tokens, but the model .* knows 300"):
            build_config(arguments, tokenizer)
        arguments = ModelArguments(preset="tiny", config_overrides="vocab_size=300")
        with pytest.raises(ValueError, match="has 301 source tokens, and the model would know 300 of them"):
            build_config(arguments, tokenizer)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ("dropuot=0.3,d_k=4", r"dropuot not among the fields of VanillaTransformerConfig: .*dropout"),
            ("dropout=1.5", r"dropout must be in \[0, 1\), not 1\.5"),
        ],
    )
    def test_an_unknown_field_and_an_illegal_value_are_refused(self, overrides: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            build_config(ModelArguments(preset="tiny", config_overrides=overrides), TOKENIZER)

    def test_going_on_from_a_model_keeps_its_weights_and_takes_overrides(self, saved_model: Path) -> None:
        arguments = ModelArguments(model_name_or_path=str(saved_model), config_overrides="dropout=0.4")
        model: Any = build_model(arguments, build_config(arguments, TOKENIZER))
        original = VanillaTransformerForConditionalGeneration.from_pretrained(saved_model)
        assert model.config.dropout == 0.4
        torch.testing.assert_close(weights(model), weights(original), rtol=0, atol=0)

    def test_the_shape_of_another_model_brings_nothing_else(self, tmp_path: Path) -> None:
        """Neither its 16 bits, nor what stood before its sources."""
        config = VanillaTransformerConfig.from_preset("tiny", vocab_size=300)
        record_directions(config, {("en", "de"): "<2de> ", ("de", "en"): "<2en> "})
        VanillaTransformerForConditionalGeneration(config).bfloat16().save_pretrained(tmp_path)
        arguments = ModelArguments(config_name=str(tmp_path))
        found: Any = build_config(arguments, TOKENIZER, langs=["en", "fr"])
        assert (found.langs, found.task_specific_params) == (["en", "fr"], None)
        assert {tensor.dtype for tensor in build_model(arguments, found).parameters()} == {torch.float32}

    def test_a_new_model_searches_as_the_paper_does(self, tmp_path: Path) -> None:
        build_model(TINY, build_config(TINY, TOKENIZER)).save_pretrained(tmp_path)
        search: Any = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path).generation_config
        assert (search.num_beams, search.length_penalty, search.length_penalty_type) == (4, 0.6, "gnmt")
        assert (search.max_length, search.max_new_tokens) == (None, None)


@pytest.mark.parametrize(
    ("kind", "arguments", "found"),
    [
        (ModelArguments, {"preset": "base", "model_name_or_path": "x"}, "; got preset, model_name_or_path"),
        (DataArguments, {}, "builtin_corpus, train_file and dataset_name; got none of them"),
    ],
)
def test_exactly_one_model_and_one_corpus_are_named(kind: Any, arguments: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=f"Give exactly one of .*{found}"):
        kind(**arguments)


class TestCorpora:
    def test_files(self, tmp_path: Path) -> None:
        files: dict[str, Any] = {}
        for split, count in (("train", 5), ("validation", 3)):
            files[f"{split}_file"] = [str(tmp_path / f"{split}.{lang}") for lang in ("en", "de")]
            for path in files[f"{split}_file"]:
                Path(path).write_text("".join(f"{split} {path[-2:]} {number}\n" for number in range(count)))
        corpora = load_corpora(DataArguments(**files))
        assert corpora["train"][1] == {"source": "train en 1", "target": "train de 1"}
        assert corpora["validation"]["target"] == [f"validation de {number}" for number in range(3)]
        assert len(corpora["train"]) == 5
        few = load_corpora(DataArguments(**files, max_train_samples=2, max_eval_samples=1))
        assert few["train"]["source"] == ["train en 0", "train en 1"]
        assert few["validation"]["source"] == ["validation en 0"]
        assert list(load_corpora(DataArguments(train_file=files["train_file"]))) == ["train"]
        Path(files["train_file"][0]).write_text("a\nb\n \nd\ne\n")
        assert load_corpora(DataArguments(**files, drop_empty_lines=True))["train"]["source"] == ["a", "b", "d", "e"]

    def test_splits_of_a_dataset(self, tmp_path: Path) -> None:
        rows = [{"translation": {"en": f"e{number}", "de": f"d{number}"}} for number in range(4)]
        splits = {"train": rows, "dev": rows[:2]}
        DatasetDict({name: Dataset.from_list(part) for name, part in splits.items()}).save_to_disk(tmp_path / "set")
        named: dict[str, Any] = {"dataset_name": str(tmp_path / "set"), "source_lang": "de", "target_lang": "en"}
        corpora = load_corpora(DataArguments(**named, validation_split="dev", max_train_samples=3))
        assert corpora["train"]["source"] == ["d0", "d1", "d2"]
        assert corpora["validation"].to_list() == [{"source": f"d{n}", "target": f"e{n}"} for n in range(2)]
        assert list(load_corpora(DataArguments(**named, validation_split=""))) == ["train"]
        with pytest.raises(ValueError, match="no split 'validation'; the splits are 'train', 'dev'"):
            load_corpora(DataArguments(**named))

    def test_the_built_in_corpus_is_generated_as_far_as_it_is_needed(self) -> None:
        few = load_corpora(DataArguments(builtin_corpus=True, max_train_samples=20, max_eval_samples=7))
        more = load_corpora(DataArguments(builtin_corpus=True, max_train_samples=40, max_eval_samples=1000))
        assert [len(corpora[name]) for corpora in (few, more) for name in ("train", "validation")] == [20, 7, 40, 500]
        assert more["train"].take(20).to_list() == few["train"].to_list()
        assert more["validation"].take(7).to_list() == few["validation"].to_list()
        assert not set(more["train"]["source"]) & set(more["validation"]["source"])

    @pytest.mark.parametrize("name", ["max_train_samples", "max_eval_samples"])
    def test_limits_are_positive(self, name: str) -> None:
        arguments: dict[str, Any] = {"builtin_corpus": True, name: 0}
        with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
            load_corpora(DataArguments(**arguments))


class TestTokenizing:
    def test_ids_are_the_tokenizers_and_end_with_the_end(self, caplog: pytest.LogCaptureFixture) -> None:
        dataset = make_dataset(20)
        rows = tokenize_pairs(dataset, TOKENIZER, max_source_length=64, max_target_length=64, name="data")
        for row, pair in zip(rows, dataset, strict=True):
            assert row == dict(TOKENIZER(pair["source"], text_target=pair["target"]))
        assert caplog.text == "", "where everything fits, nothing is reported"

    def test_pairs_that_are_too_long_are_cut_and_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        sources, targets = ["a"] * 1500, ["b"] * 1500
        sources[2] = targets[7] = sources[1200] = "x" * 20
        dataset = Dataset.from_dict({"source": sources, "target": targets})
        rows = tokenize_pairs(dataset, TOKENIZER, max_source_length=10, max_target_length=12, name="training data")
        cut = "3 of 1500 pairs of training data were cut to max_source_length=10 or max_target_length=12"
        assert cut in caplog.text
        assert "number 3, 8, 1201." in caplog.text
        for ids, length in ((rows[2]["input_ids"], 10), (rows[7]["labels"], 12)):
            assert (len(ids), ids[-1]) == (length, EOS)
        untouched = [index for index in range(1500) if index not in (2, 1200)]
        assert {tuple(rows[index]["input_ids"]) for index in untouched} == {tuple(TOKENIZER("a")["input_ids"])}

    def test_a_tokenizer_is_trained_on_both_sides_or_loaded(self, tmp_path: Path) -> None:
        dataset = Dataset.from_dict({"source": ["quick " * 9] * 3, "target": ["schnell " * 9] * 3})
        arguments = ModelArguments(preset="tiny", vocab_size=272)
        trained: Any = load_or_train_tokenizer(arguments, dataset, tmp_path)
        assert not list(tmp_path.iterdir()), "nothing is written before the run is known to be good"
        assert {"Ġquick", "Ġschnell"} <= set(trained.get_vocab())
        trained.add_tokens(["<mark>"])
        trained.save_pretrained(tmp_path)
        named = ModelArguments(preset="tiny", tokenizer_name=str(tmp_path))
        for each, folder in ((arguments, tmp_path), (named, tmp_path / "elsewhere")):
            assert load_or_train_tokenizer(each, dataset, folder).get_vocab() == trained.get_vocab()

    def test_sentencepiece_models_are_taken_as_they_are(self, tmp_path: Path) -> None:
        texts = ["quick brown foxes", "schnelle braune Füchse", "the quick", "der schnelle"]
        files = [str(tmp_path / "source.model"), str(tmp_path / "target.model")]
        for file, kind in zip(files, ("unigram", "bpe"), strict=True):
            written = io.BytesIO()
            options: dict[str, Any] = {
                "vocab_size": 40,
                "hard_vocab_limit": False,
                "minloglevel": 2,
                "model_type": kind,
            }
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=written, **options)
            Path(file).write_bytes(written.getvalue())
        dataset = Dataset.from_dict({"source": texts, "target": texts})
        both = ModelArguments(preset="tiny", tokenizer_name=files[0], target_tokenizer_name=files[1])
        tokenizer: Any = load_or_train_tokenizer(both, dataset, tmp_path, model_max_length=77)
        config: Any = build_config(both, tokenizer, langs=["en", "de"])
        theirs = [sentencepiece.SentencePieceProcessor(model_file=file) for file in files]
        for text in texts:
            encoded = tokenizer(text, text_target=text)
            assert encoded["input_ids"] == [*theirs[0].encode(text), theirs[0].eos_id()]
            assert encoded["labels"] == [*theirs[1].encode(text), theirs[1].eos_id()]
        assert (tokenizer.model_max_length, config.vocab_size) == (77, len(tokenizer))
        assert config.decoder_vocab_size == tokenizer.target_vocab_size
        assert (config.bos_token_id, config.eos_token_id, config.decoder_start_token_id) == (1, 2, 1)
        assert config.pad_token_id == max(processor.get_piece_size() for processor in theirs)
        data = DataArguments(train_file=["train.en", "train.de"])
        claim_output_dir(tmp_path / "run", both, data, make_arguments(tmp_path / "run"), tokenizer)
        for name, file in zip(("source.spm", "target.spm"), files, strict=True):
            assert (tmp_path / "run" / name).read_bytes() == Path(file).read_bytes()
        shared = ModelArguments(preset="tiny", tokenizer_name=files[1])
        assert load_or_train_tokenizer(shared, dataset, tmp_path)("the")["input_ids"] == [*theirs[1].encode("the"), 2]
        tokenizer.save_pretrained(tmp_path / "folder")
        folder = ModelArguments(preset="tiny", tokenizer_name=f"{tmp_path}/folder", target_tokenizer_name=files[1])
        with pytest.raises(ValueError, match=r"target\.model is for two \.model files .*, and .* is no file"):
            load_or_train_tokenizer(folder, dataset, tmp_path)


@pytest.mark.parametrize(("given", "used"), [({}, 0.2), ({"label_smoothing_factor": 0.0}, 0.0)], ids=str)
def test_label_smoothing_of_0_switches_the_models_own_off(given: dict[str, Any], used: float, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, overrides="label_smoothing=0.2", **given)
    assert (trainer.model.config.label_smoothing, trainer.args.label_smoothing_factor) == (used, 0)


@pytest.mark.parametrize(("metric", "mode"), [("chrf", "max"), ("loss", "min")])
def test_a_schedule_by_a_metric_knows_what_is_better(metric: str, mode: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model=metric)
    assert trainer.create_scheduler(10, trainer.create_optimizer()).mode == mode


def test_languages_of_multilingual_tokenizers_are_set() -> None:
    tokenizer = make_nllb_tokenizer()
    data = DataArguments(train_file=["a", "b"], source_lang="deu_Latn", target_lang="fra_Latn")
    assert settle_languages(tokenizer, data) == {"forced_bos_token_id": tokenizer.convert_tokens_to_ids("fra_Latn")}
    pairs = Dataset.from_dict({"source": ["a"], "target": ["b"]})
    (row,) = tokenize_pairs(pairs, tokenizer, max_source_length=9, max_target_length=9, name="pairs")
    for column, language in (("input_ids", "deu_Latn"), ("labels", "fra_Latn")):
        assert tokenizer.convert_ids_to_tokens(row[column])[0] == language
    with pytest.raises(ValueError, match="NllbTokenizer marks texts with their languages: give source_lang"):
        settle_languages(tokenizer, DataArguments(train_file=["a", "b"]))
    assert settle_languages(TOKENIZER, data) == {}


class TestSpecialTokens:
    @staticmethod
    def make(**tokens: str) -> PreTrainedTokenizerFast:
        words = Tokenizer(WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4}, unk_token="<unk>"))
        return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **tokens)

    def test_without_a_beginning_padding_is_the_first_input(self) -> None:
        config: Any = build_config(TINY, self.make(pad_token="<pad>", eos_token="</s>"))
        assert (config.bos_token_id, config.decoder_start_token_id) == (None, 1)
        model: Any = build_model(TINY, config)
        assert model(input_ids=torch.tensor([[4, 2]]), labels=torch.tensor([[4, 2]])).loss.isfinite()
        assert model.generate(torch.tensor([[4, 2]]), max_new_tokens=2)[0, 0] == 1

    @pytest.mark.parametrize(
        ("tokens", "message"),
        [
            ({"bos_token": "<s>"}, "has no pad_token and no eos_token"),
            ({"pad_token": "<pad>", "eos_token": "</s>"}, "does not put its eos_token, </s>, behind a target"),
        ],
    )
    def test_what_cannot_be_trained_is_refused(self, tokens: dict[str, str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            check_special_tokens(self.make(**tokens))
        check_special_tokens(TOKENIZER)


def test_a_search_that_is_given_for_validating_stays(tmp_path: Path) -> None:
    """The library takes it from the arguments, after the trainer was given the model."""
    search = GenerationConfig(num_beams=3, max_new_tokens=7, eos_token_id=EOS, pad_token_id=PAD)
    trainer = make_trainer(tmp_path, generation_config=search, generation_num_beams=None, num_train_epochs=1)
    for act in (trainer.evaluate, trainer.train):
        act()
        found = trainer.model.generation_config
        assert (found.num_beams, found.max_new_tokens, found.max_length) == (3, 7, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metric_for_best_model": "chrff"}, "metric_for_best_model=chrff: must be one of .*chrf, .*gen_len"),
        ({"metric_for_best_model": "eval_blue"}, "metric_for_best_model=eval_blue: must be one of"),
        ({"metric_for_best_model": "rougeL"}, "metric_for_best_model=rougeL: must be one of"),
        ({"metric_for_best_model": "gen_len", "predict_with_generate": False}, "gen_len needs predict_with_generate"),
    ],
    ids=str,
)
def test_what_is_not_measured_chooses_no_checkpoint(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_arguments(tmp_path, **given).choose_metric(TRANSLATION)
    for name in ("loss", "eval_loss", "perplexity", "bleu", "eval_chrf", "gen_len"):
        make_arguments(tmp_path, metric_for_best_model=name).choose_metric(TRANSLATION)


def test_a_model_in_16_bits_is_trained_in_32(tmp_path: Path) -> None:
    build_model(TINY, build_config(TINY, TOKENIZER)).bfloat16().save_pretrained(tmp_path)
    arguments = ModelArguments(model_name_or_path=str(tmp_path))
    model = build_model(arguments, build_config(arguments, TOKENIZER))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.save_pretrained(tmp_path / "trained")
    assert build_config(ModelArguments(model_name_or_path=str(tmp_path / "trained")), TOKENIZER).dtype == torch.float32


def test_updates_are_not_counted_as_longer_or_shorter_epochs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "no", "load_best_model_at_end": False, "save_strategy": "epoch"}
    make_trainer(tmp_path, num_train_epochs=2, **options).train()  # 6 updates each
    trainer = make_trainer(tmp_path, num_train_epochs=4, **options | {"per_device_train_batch_size": 8})
    with pytest.raises(CheckpointError, match=r"after 2.00 epochs, of about 6 updates each, and now an epoch has 3"):
        trainer.train(resume_from_checkpoint=True)
    assert make_trainer(tmp_path, num_train_epochs=3, **options).train(resume_from_checkpoint=True).global_step == 18
    trainer = make_trainer(tmp_path, max_steps=20, **options | {"per_device_train_batch_size": 8})
    assert trainer.train(resume_from_checkpoint=True).global_step == 20
