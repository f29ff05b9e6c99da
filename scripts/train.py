r"""Trains a Transformer on sentence pairs, or fine-tunes one, with transformers' own Seq2SeqTrainer.

    python scripts/train.py --builtin_corpus --preset small --output_dir out/numbers
    python scripts/train.py --preset base --train_file train.en.gz train.de.gz --validation_file val.en val.de \
        --source_lang en --target_lang de --output_dir out/my-model
    python scripts/train.py my_arguments.yaml

A run that was stopped goes on from its last whole checkpoint when the same command is given again.
"""

import sys
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, set_seed
from transformers.utils import logging

import vanilla_transformer  # noqa: F401  (registers the model with the Auto classes)
from vanilla_transformer.checkpoints import find_last_whole_checkpoint
from vanilla_transformer.training import (
    DataArguments,
    ModelArguments,
    TranslationTrainingArguments,
    build_config,
    build_model,
    build_trainer,
    claim_output_dir,
    load_corpora,
    load_or_train_tokenizer,
    settle_training_arguments,
)

logger = logging.get_logger("vanilla_transformer.train")


def make_parser() -> HfArgumentParser:
    """Returns the parser of the command line."""
    argument_classes: Any = (ModelArguments, DataArguments, TranslationTrainingArguments)
    return HfArgumentParser(
        argument_classes,
        description=(__doc__ or "").split("\n", 1)[0],
    )


def parse(argv: list[str]) -> tuple[ModelArguments, DataArguments, TranslationTrainingArguments]:
    """Parses a command line, or the JSON or YAML file that is its only argument."""
    parser = make_parser()
    parsed: Any
    if len(argv) == 1 and argv[0].endswith(".json"):
        parsed = parser.parse_json_file(argv[0])
    elif len(argv) == 1 and argv[0].endswith((".yaml", ".yml")):
        parsed = parser.parse_yaml_file(argv[0])
    else:
        parsed = parser.parse_args_into_dataclasses(argv)
    model_arguments, data_arguments, training_arguments = parsed
    return model_arguments, data_arguments, training_arguments


def main(argv: list[str] | None = None) -> None:
    """Trains, saves the model, and prints its validation scores."""
    model_arguments, data_arguments, arguments = parse(sys.argv[1:] if argv is None else argv)
    set_seed(arguments.seed)
    output_dir = Path(str(arguments.output_dir))
    with arguments.main_process_first(local=False, desc="preparing the output folder"):
        claim_output_dir(output_dir, model_arguments, data_arguments, arguments)
        corpora = load_corpora(data_arguments)
        tokenizer = load_or_train_tokenizer(model_arguments, corpora["train"], output_dir)
        checkpoint = arguments.resume_from_checkpoint or find_last_whole_checkpoint(
            output_dir, world_size=arguments.world_size
        )
    config = build_config(model_arguments, tokenizer)
    settle_training_arguments(arguments, config, validates="validation" in corpora)
    model = build_model(model_arguments, config)
    trainer = build_trainer(model, tokenizer, corpora, data_arguments, arguments)
    if trainer.is_world_process_zero():
        pairs = ", ".join(f"{len(dataset):,} {split}" for split, dataset in corpora.items())
        print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens, pairs: {pairs}")
        if checkpoint:
            print(f"Resuming from {checkpoint}")

    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    if "validation" in corpora:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        print(f"The model is in {output_dir}")
    if arguments.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
