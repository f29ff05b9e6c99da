r"""Trains a Transformer on sentence pairs, or fine-tunes one, with transformers' own Seq2SeqTrainer.

    python scripts/train.py --builtin_corpus --preset small --output_dir out/numbers
    python scripts/train.py --preset base --train_file train.en.gz train.de.gz --validation_file val.en val.de \
        --source_lang en --target_lang de --output_dir out/my-model
    python scripts/train.py my_arguments.yaml

A run that was stopped goes on from its last whole checkpoint when the same command is given again.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from datasets import DatasetDict
from transformers import HfArgumentParser, PreTrainedConfig, PreTrainedTokenizerBase, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME

import vanilla_transformer  # noqa: F401  (registers the model with the Auto classes)
from vanilla_transformer.checkpoints import find_last_whole_checkpoint
from vanilla_transformer.training import (
    DataArguments,
    ModelArguments,
    TranslationTrainingArguments,
    build_config,
    build_model,
    build_trainer,
    check_output_dir,
    claim_output_dir,
    load_corpora,
    load_or_train_tokenizer,
    settle_training_arguments,
)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults, and the examples as they stand."""


def make_parser() -> HfArgumentParser:
    """Returns the parser of the command line."""
    argument_classes: Any = (ModelArguments, DataArguments, TranslationTrainingArguments)
    return HfArgumentParser(
        argument_classes,
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,  # a misspelt argument is an error, not the beginning of another one
        # The library's own lists more than a hundred arguments ahead of every error.
        usage="%(prog)s [-h] [--argument value ...] | arguments.json | arguments.yaml",
    )


def parse(
    parser: HfArgumentParser, argv: list[str]
) -> tuple[ModelArguments, DataArguments, TranslationTrainingArguments]:
    """Parses a command line, or the JSON or YAML file that is its only argument."""
    parsed: Any
    if len(argv) == 1 and argv[0].endswith(".json"):
        parsed = parser.parse_json_file(argv[0])
    elif len(argv) == 1 and argv[0].endswith((".yaml", ".yml")):
        parsed = parser.parse_yaml_file(argv[0])
    else:
        parsed = parser.parse_args_into_dataclasses(argv)
    model_arguments, data_arguments, training_arguments = parsed
    return model_arguments, data_arguments, training_arguments


def prepare(
    model_arguments: ModelArguments, data_arguments: DataArguments, arguments: TranslationTrainingArguments
) -> tuple[DatasetDict, PreTrainedTokenizerBase, PreTrainedConfig]:
    """Loads the sentence pairs, loads or trains the tokenizer, builds the configuration, and claims the folder."""
    output_dir = str(arguments.output_dir)
    with arguments.main_process_first(local=False, desc="preparing data and output folder"):
        check_output_dir(output_dir, model_arguments, data_arguments)
        corpora = load_corpora(data_arguments)
        tokenizer = load_or_train_tokenizer(model_arguments, corpora["train"], output_dir)
        config = build_config(model_arguments, tokenizer)
        claim_output_dir(output_dir, model_arguments, data_arguments, arguments, tokenizer)
    return corpora, tokenizer, config


def find_checkpoint(arguments: TranslationTrainingArguments) -> str | None:
    """The checkpoint that is named, or the last whole one of this run."""
    if arguments.resume_from_checkpoint:
        return arguments.resume_from_checkpoint
    if arguments.save_only_model and any(Path(str(arguments.output_dir)).glob("checkpoint-*")):
        raise ValueError(
            f"{arguments.output_dir} holds checkpoints, but with save_only_model none of them can be resumed: give "
            "another output_dir, or name one of them as model_name_or_path."
        )
    with arguments.main_process_first(local=False, desc="looking for a checkpoint"):
        checkpoint = find_last_whole_checkpoint(str(arguments.output_dir), world_size=arguments.world_size)
    return None if checkpoint is None else str(checkpoint)


def read_step(checkpoint: str) -> int:
    """The number of updates that a checkpoint has seen."""
    return TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME)).global_step


def main(argv: list[str] | None = None) -> None:
    """Trains, saves the model, and prints its validation scores."""
    parser = make_parser()
    try:
        model_arguments, data_arguments, arguments = parse(parser, sys.argv[1:] if argv is None else argv)
        set_seed(arguments.seed)
        corpora, tokenizer, config = prepare(model_arguments, data_arguments, arguments)
        checkpoint = find_checkpoint(arguments)
        # Now, since save_total_limit may delete the checkpoint while the training goes on.
        first_step = read_step(checkpoint) if checkpoint else 0
    except (OSError, ValueError) as error:
        parser.error(str(error))
    settle_training_arguments(arguments, config, validates="validation" in corpora)
    model = build_model(model_arguments, config)
    trainer = build_trainer(model, tokenizer, corpora, data_arguments, arguments)
    if trainer.is_world_process_zero():
        pairs = ", ".join(f"{len(dataset):,} {split}" for split, dataset in corpora.items())
        print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens, pairs: {pairs}")
        if checkpoint:
            print(f"Resuming from {checkpoint}")

    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    if result.global_step > first_step:
        # A finished run that is started again has nothing to add to the record of its training.
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
    if "validation" in corpora:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        print(f"The model is in {arguments.output_dir}")
    if arguments.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
