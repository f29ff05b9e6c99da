r"""Trains a Transformer on pairs of texts, or fine-tunes one, with transformers' own Seq2SeqTrainer.

    vanilla-transformer train --builtin_corpus --preset small --output_dir out/numbers
    vanilla-transformer train --preset base --train_file train.en.gz train.de.gz --validation_file val.en val.de \
        --source_lang en --target_lang de --output_dir out/my-model
    vanilla-transformer train --recipe paper --preset base --train_file ... --output_dir out/base
    vanilla-transformer train --task summarization --preset small --dataset_name user/articles --output_dir out/short
    vanilla-transformer train --model_name_or_path out/general --train_file domain.tsv --train_file general.tsv \
        --dataset_weights 1 1 --learning_rate 5e-5 --warmup_steps 100 --output_dir out/domain
    vanilla-transformer train --preset small --lang_pairs en-de en-fr --both_directions true --train_file train.en \
        train.de --train_file multi.en multi.fr --output_dir out/many
    vanilla-transformer train my_arguments.yaml
    vanilla-transformer train my_arguments.yaml --seed 2 --output_dir out/seed2

A run that was stopped goes on from its last whole checkpoint when the same command is given again.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from datasets import Dataset
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    AutoModelForSeq2SeqLM,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
    set_seed,
)
from transformers.hf_argparser import string_to_bool
from transformers.trainer import TRAINER_STATE_NAME

from vanilla_transformer.files import (
    AVERAGED_FOLDER,
    AVERAGING_FILE,
    LOCK_FILE,
    explain_missing_model,
    locked,
    read_json,
)
from vanilla_transformer.hub.push import PushError, check_token
from vanilla_transformer.memory import keep_freed_memory
from vanilla_transformer.tasks import get_task, record_directions, record_task
from vanilla_transformer.training.arguments import (
    DataArguments,
    ModelArguments,
    RecipeArguments,
    TranslationTrainingArguments,
)
from vanilla_transformer.training.checkpoints import (
    CheckpointError,
    find_last_whole_checkpoint,
    find_problem,
    list_checkpoints,
)
from vanilla_transformer.training.checks import (
    check_lengths,
    check_special_tokens,
    check_streaming,
    check_target_tokens,
    check_teacher,
    check_validation,
)
from vanilla_transformer.training.examples import (
    Corpora,
    describe_files,
    known_languages,
    load_corpora,
    make_regularization,
)
from vanilla_transformer.training.output_folder import check_output_dir, claim_output_dir
from vanilla_transformer.training.pushes import describe_error
from vanilla_transformer.training.recipe import paper_recipe
from vanilla_transformer.training.records import close_progress, explain_choice, write_metrics
from vanilla_transformer.training.setup import (
    build_config,
    build_model,
    build_trainer,
    check_model_arguments,
    load_or_train_tokenizer,
    settle_directions,
    settle_languages,
    settle_prefix,
    settle_training_arguments,
)
from vanilla_transformer.training.trainer import DataError, TranslationTrainer

from .command_line import INTERRUPTED, USAGE, check_spelling, parser_options, settled_bars

# How --help divides the options: the most used ones, then those of each class of arguments.
_FIRST_GROUP = "the most used options"
_MOST_USED = (
    *("preset", "model_name_or_path", "builtin_corpus", "train_file", "validation_file", "dataset_name"),
    *(
        "dataset_weights",
        "lang_pairs",
        "source_lang",
        "target_lang",
        "vocab_size",
        "output_dir",
        "num_train_epochs",
        "max_steps",
        "max_source_tokens",
    ),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "warmup_steps", "logging_steps"),
    *("eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit", "average_checkpoints"),
    *("seed", "bf16", "use_cpu", "disable_tqdm", "push_to_hub"),
)
_GROUPS = ("the paper's recipe", "model and tokenizer", "data", "other options of training, most of them the library's")


def make_parser() -> HfArgumentParser:
    """The command line's parser: transformers' own, whose training arguments have types of the library's."""
    argument_classes: Any = (RecipeArguments, ModelArguments, DataArguments, TranslationTrainingArguments)
    usage = f"{USAGE} | arguments.json | arguments.yaml [options]"
    parser = HfArgumentParser(argument_classes, **parser_options(__doc__, shows_defaults=True, usage=usage))
    titles = dict.fromkeys(_MOST_USED, _FIRST_GROUP)
    for each, title in zip(argument_classes, _GROUPS, strict=True):
        titles = {field.name: title for field in fields(each)} | titles
    groups = {title: parser.add_argument_group(title) for title in (_FIRST_GROUP, *_GROUPS)}
    options = parser._optionals._group_actions
    for action in [action for action in options if action.dest in titles]:
        options.remove(action)
        groups[titles[action.dest]]._group_actions.append(action)
    return parser


_CONVERTED: dict[Any, str] = {int: "a whole number", float: "a number", string_to_bool: "true or false"}
# Strategies, and Norwegian.
_MAY_BE_NO = frozenset({"eval_strategy", "save_strategy", "logging_strategy", "source_lang", "target_lang"})


def read_settings(path: str) -> dict[str, Any]:
    """Reads a JSON or YAML file of arguments."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        settings = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}.") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a {type(settings).__name__}: it must hold names and values of arguments.")
    parser = make_parser()
    check_spelling(parser, [f"--{name}" for name in settings])
    for action in parser._actions:
        if settings.get(action.dest) is not None:
            settings[action.dest] = _settle(f"{path}: {action.dest}", action, settings[action.dest])
    return settings


def _settle(place: str, action: argparse.Action, value: Any) -> Any:
    """A file's value as the command line would give it."""
    if action.nargs == "+" and action.type in (str, float):
        values = value if isinstance(value, list) else [value]
        return [_settle_one(place, action, each) for each in values]
    return _settle_one(place, action, value)


def _settle_one(place: str, action: argparse.Action, value: Any) -> Any:
    if value is False and action.dest in _MAY_BE_NO:
        return "no"  # which YAML takes for false
    kind: Any = action.type
    if kind not in _CONVERTED or not isinstance(value, str):
        return value
    try:
        return kind(value)  # YAML takes 1e-3 for text
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{place} is {value!r}; it must be {_CONVERTED[kind]}.") from error


def parse_given(words: list[str]) -> dict[str, Any]:
    """The arguments that a command line names, without the defaults of others."""
    parser = make_parser()
    check_spelling(parser, words)
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    return vars(parser.parse_args(words))


def recipe_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that a recipe brings, given the other settings: nothing without `recipe`."""
    if settings.get("recipe") is None:
        return {}
    budget = settings.get("max_source_tokens")
    defaults = paper_recipe(
        settings.get("preset") or "base",
        tokens_per_batch=settings["tokens_per_batch"],
        tokens_per_device=budget or settings["tokens_per_device"],
        use_cpu=bool(settings.get("use_cpu")),
    )
    if budget:
        defaults |= {"max_source_tokens": budget, "max_target_tokens": budget}
    if settings.get("num_train_epochs") is not None:
        defaults["max_steps"] = -1  # the library's value for "as many as the epochs have"
    return defaults


def parse(parser: HfArgumentParser, argv: list[str]) -> Any:
    """Parses a command line, or a JSON or YAML file and what follows it, over the defaults of a recipe."""
    if argv and argv[0].endswith((".json", ".yaml", ".yml")):
        settings = read_settings(argv[0]) | parse_given(argv[1:])
        recipe = {item.name: item.default for item in fields(RecipeArguments)}
        return parser.parse_dict(recipe_defaults(recipe | settings) | settings)
    check_spelling(parser, argv)
    # Twice: what a recipe depends on must be known before its defaults are.
    given = vars(parser.parse_known_args(argv)[0])
    if not any(word.partition("=")[0] in ("--num_train_epochs", "--num-train-epochs") for word in argv):
        del given["num_train_epochs"]  # it is the library's default
    parser.set_defaults(**recipe_defaults(given))
    return parser.parse_args_into_dataclasses(argv)


def prepare(
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    arguments: TranslationTrainingArguments,
    held: ExitStack,
) -> tuple[Corpora, PreTrainedTokenizerBase, PreTrainedConfig]:
    """Loads the pairs of texts, loads or trains the tokenizer, builds the configuration, and claims the folder.

    `held` holds the folder's lock, so that the same command cannot run twice.
    """
    output_dir = str(arguments.output_dir)
    task = get_task(data_arguments.task)
    langs = known_languages(data_arguments)
    with arguments.main_process_first(local=False, desc="preparing data and output folder"):
        check_output_dir(output_dir, model_arguments, data_arguments)
        prefix = settle_prefix(model_arguments, data_arguments)
        directions = settle_directions(model_arguments, data_arguments)
        added = dict.fromkeys(each.strip() for each in directions.values())
        corpora = load_corpora(data_arguments, source_prefix=prefix, directions=directions, seed=arguments.seed)
        limit = {"model_max_length": data_arguments.lengths[0]} if task.is_bounded else {}
        options: Any = {"sample": data_arguments.tokenizer_sample, "added_tokens": added, **limit}
        tokenizer = load_or_train_tokenizer(model_arguments, corpora["train"], output_dir, **options)
        check_target_tokens(tokenizer, directions)
        # Better refused now than when the folder is taken.
        check_special_tokens(tokenizer)
        settle_languages(tokenizer, data_arguments)
        if "validation" not in corpora:
            check_validation(arguments)
        make_regularization(tokenizer, data_arguments)
        config = build_config(model_arguments, tokenizer, langs=langs)
        if not config.is_encoder_decoder:
            where = model_arguments.model_name_or_path or model_arguments.config_name
            name = f" ({config.architectures[0]})" if config.architectures else ""
            raise ValueError(f"{where} holds a single-stack model{name}; this command trains encoder-decoder models.")
        check_lengths(config, data_arguments)
        if directions:
            record_directions(config, directions)
        elif langs is None or getattr(config, "langs", langs) is not None:  # else it has several pairs, and keeps them
            record_task(config, task, prefix=prefix, langs=langs)
        if arguments.teacher_model:
            prefixes: Any = {pair: directions[pair] for pair in data_arguments.directions}
            own: Any = {None if langs is None else tuple(langs): prefix}
            check_teacher(arguments.teacher_model, config, tokenizer, task, prefixes or own)
        if arguments.should_save:
            held.enter_context(locked(Path(output_dir) / LOCK_FILE, output_dir))
        files = describe_files(data_arguments, output_dir) if arguments.should_save else None
        claim_output_dir(output_dir, model_arguments, data_arguments, arguments, tokenizer, files=files)
    return corpora, tokenizer, config


def find_checkpoint(arguments: TranslationTrainingArguments) -> str | None:
    """The checkpoint that is named, or the last whole one of this run."""
    if named := arguments.resume_from_checkpoint:
        if problem := find_problem(named, world_size=arguments.world_size, contents=True):
            raise ValueError(f"resume_from_checkpoint={named}: {problem}.")
        return named
    if arguments.save_only_model and any(Path(str(arguments.output_dir)).glob("checkpoint-*")):
        raise ValueError(
            f"{arguments.output_dir} holds checkpoints, but with save_only_model none of them can be resumed: give "
            "another output_dir, or name one of them as model_name_or_path."
        )
    with arguments.main_process_first(local=False, desc="looking for a checkpoint"):
        own = {"world_size": arguments.world_size, "set_aside": arguments.should_save}
        checkpoint = find_last_whole_checkpoint(str(arguments.output_dir), **own)
    return None if checkpoint is None else str(checkpoint)


def take_average(trainer: TranslationTrainer, model: PreTrainedModel) -> int:
    """Puts the average of the last checkpoints, which the run has just made, in the place of the model's weights.

    Returns of how many, or 0 if the weights stay as they are.
    """
    folder = Path(str(trainer.args.output_dir)) / AVERAGED_FOLDER
    trainer.accelerator.wait_for_everyone()
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        if trainer.is_world_process_zero():
            print(f"The average of the last checkpoints is in {folder}; the model divided among processes is the last.")
        return 0
    model.load_state_dict(AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict())
    return len((read_json(folder / AVERAGING_FILE) or {})["checkpoints"])


def describe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, corpora: Corpora) -> str:
    """Says in a line what is trained on what."""
    pairs = [
        f"{len(dataset):,} {name}" if isinstance(dataset, Dataset) else f"a stream to {name}"
        for name, dataset in corpora.items()
    ]
    target = f" + {tokenizer.target_vocab_size:,}" if getattr(tokenizer, "separate_vocabs", False) else ""
    return f"{model.num_parameters():,} parameters, {len(tokenizer):,}{target} tokens, pairs: {', '.join(pairs)}"


def push(trainer: TranslationTrainer) -> None:
    """Pushes the output folder, and ends with a message if that fails."""
    try:
        commit = trainer.push_to_hub()
    # Besides the Hub's own errors there are those of the connection, of xet, and of the disk.
    except Exception as error:
        raise SystemExit(
            f"The model is in {trainer.args.output_dir}, but it could not be pushed to {trainer.hub_model_id}: "
            f"{describe_error(error)}\n`vanilla-transformer push` pushes it without training again; so does this one."
        ) from error
    if commit is not None:
        print(f"It is on the Hub: {commit.commit_url}")


class Run(NamedTuple):
    """A training that may begin."""

    trainer: TranslationTrainer
    model: PreTrainedModel
    corpora: Corpora
    checkpoint: str | None
    first_step: int  # the checkpoint's, which save_total_limit may delete while the training goes on


def set_up(
    parser: HfArgumentParser,
    held: ExitStack,
    recipe: RecipeArguments,
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    arguments: TranslationTrainingArguments,
) -> Run:
    """Checks what was asked for, makes everything that the training needs, and says what will be trained on what."""
    try:
        check_model_arguments(model_arguments)
        if model_arguments.model_name_or_path is not None:
            with explain_missing_model(model_arguments.model_name_or_path):
                pass  # it is there, or on the Hub
        check_streaming(data_arguments, arguments)
        if arguments.push_to_hub and arguments.process_index == 0:
            check_token(arguments.hub_token)
        set_seed(arguments.seed)
        corpora, tokenizer, config = prepare(model_arguments, data_arguments, arguments, held)
        task, draws = get_task(data_arguments.task), data_arguments.regularizes_subwords
        validates = "validation" in corpora
        settle_training_arguments(arguments, config, validates=validates, regularizes_subwords=draws, task=task)
        checkpoint = find_checkpoint(arguments)
        state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))) if checkpoint else TrainerState()
        limit = data_arguments.lengths[1] if task.is_bounded else None
        model = build_model(model_arguments, config, max_new_tokens=limit)
        model.generation_config.update(**settle_languages(tokenizer, data_arguments))
        trainer = build_trainer(model, tokenizer, corpora, data_arguments, arguments)
    except (HfHubHTTPError, PushError) as error:  # better now than after the training
        parser.error(f"push_to_hub: {error}")
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    if trainer.is_world_process_zero():
        print(describe(model, tokenizer, corpora))
        if recipe.recipe:
            print(
                f"An update: {arguments.world_size} process(es) x {arguments.gradient_accumulation_steps} passes x "
                f"{arguments.max_source_tokens:,} source and {arguments.max_target_tokens:,} target tokens"
            )
        if checkpoint:
            print(f"Resuming from {checkpoint}")
    return Run(trainer, model, corpora, checkpoint, state.global_step)


def train(run: Run) -> None:
    """Trains, saves the model, scores and pushes it."""
    trainer = run.trainer
    arguments: Any = trainer.args
    result = trainer.train(resume_from_checkpoint=run.checkpoint)
    averaged = take_average(trainer, run.model) if arguments.average_checkpoints else 0
    trainer.save_model(_internal_call=True)  # else it is pushed here already, before its scores are known
    trainer.save_state()
    # Before the end's evaluation is logged, at the last step, for what was chosen.
    choice = explain_choice(trainer, averaged)
    metrics: dict[str, float] = {}
    # A finished run that is started again has nothing to add to the record of its training.
    if result.global_step > run.first_step:
        if isinstance(run.corpora["train"], Dataset):
            result.metrics["train_samples"] = len(run.corpora["train"])
        metrics |= result.metrics
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        if run.first_step and trainer.is_world_process_zero():
            what = (
                "Loss, seconds and tokens are those"
                if "train_resumed_at_step" in result.metrics
                else "The loss is that"
            )
            print(f"{what} since update {run.first_step:,}, where this part began.")
    if "validation" in run.corpora:
        # Outside of a training, the library would round the model itself, which may be pushed.
        arguments.bf16_full_eval = arguments.fp16_full_eval = False
        scores = trainer.evaluate()
        metrics |= scores
        trainer.log_metrics("eval", scores)
        trainer.save_metrics("eval", scores)
    write_metrics(str(arguments.output_dir), trainer.state, metrics, args=arguments, model=run.model)
    if trainer.is_world_process_zero():
        print(f"The model is in {arguments.output_dir}. {choice}")
    if arguments.push_to_hub:
        push(trainer)
        return
    try:
        trainer.create_model_card()
    except (OSError, ValueError) as error:  # of a card that is there
        print(f"The model card is not written: {describe_error(error)}")


def explain_stop(arguments: TranslationTrainingArguments, step: int) -> str:
    """Says how far a run came that was stopped after so many updates, and where the same command goes on."""
    when = f"at update {step:,}" if step else "before the first update"
    checkpoints = list_checkpoints(str(arguments.output_dir))
    latest = reversed(checkpoints.values())
    whole = (folder for folder in latest if find_problem(folder, world_size=arguments.world_size) is None)
    if checkpoint := arguments.resume_from_checkpoint or next(whole, None):
        return f"Stopped {when}. The same command goes on from {Path(checkpoint).name}."
    if arguments.save_only_model and checkpoints:
        return f"Stopped {when}. With save_only_model no checkpoint can be resumed."
    return f"Stopped {when}. There is no checkpoint yet: the same command begins again."


def main(argv: list[str] | None = None) -> None:
    """Trains, saves the model, and prints its validation scores."""
    parser = make_parser()
    keep_freed_memory()
    try:
        wishes = parse(parser, sys.argv[1:] if argv is None else argv)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    arguments, run = wishes[-1], None
    try:
        # Without a bar, each log is a line.
        arguments.disable_tqdm = arguments.disable_tqdm or not sys.stderr.isatty()
        with settled_bars(arguments, reads_datasets=True), ExitStack() as held:
            run = set_up(parser, held, *wishes)
            train(run)
    except (CheckpointError, DataError, FloatingPointError, OSError) as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        if run is not None:
            close_progress(run.trainer)
        if arguments.process_index == 0:
            # The terminal has written ^C into the line.
            step = max(run.trainer.state.global_step, run.first_step) if run else 0
            print(f"\n{explain_stop(arguments, step)}", file=sys.stderr)
        sys.exit(INTERRUPTED)
