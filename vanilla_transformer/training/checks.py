"""What a training cannot do, said before it begins."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.trainer_utils import SaveStrategy, SchedulerType

from vanilla_transformer.data.vocabularies import get_vocabularies, load_needed_tokenizer
from vanilla_transformer.files import explain_missing_model
from vanilla_transformer.inference.translate import count_text_positions
from vanilla_transformer.model.pipeline_vanilla_transformer import find_directions
from vanilla_transformer.tasks import TRANSLATION, Task, find_prefix

from .arguments import DataArguments, TranslationTrainingArguments
from .examples import Pair

SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")


def check_streaming(data_arguments: DataArguments, arguments: TranslationTrainingArguments) -> None:
    """Checks that a run with `streaming` has all that a corpus without a known length needs."""
    if not data_arguments.streaming:
        return
    problems = []
    if arguments.max_source_tokens is None:
        problems.append("max_source_tokens must be given: its batches are filled by tokens")
    if arguments.max_steps <= 0:
        problems.append("max_steps must be given instead of a number of epochs: a stream has no length")
    for name in ("eval_strategy", "save_strategy"):
        if getattr(arguments, name) == "epoch":
            problems.append(f"{name} must be steps or no, not epoch")
    if problems:
        raise ValueError(f"streaming: {'; '.join(problems)}.")


def check_validation(arguments: TranslationTrainingArguments) -> None:
    """Refuses, where there are no validation data, what needs them."""
    if arguments.early_stopping_patience is not None:
        raise ValueError("early_stopping_patience needs validation data.")
    if arguments.eval_on_start:
        raise ValueError("eval_on_start needs validation data.")
    if arguments.save_strategy == SaveStrategy.BEST:
        raise ValueError("save_strategy=best needs validation data.")
    if arguments.lr_scheduler_type in SCHEDULES_BY_METRIC:
        raise ValueError(f"lr_scheduler_type={SchedulerType(arguments.lr_scheduler_type).value} needs validation data.")


def check_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer that cannot pad, or does not end a target: the model would not learn where to stop."""
    if missing := [name for name in ("pad_token", "eos_token") if getattr(tokenizer, name) is None]:
        raise ValueError(f"The tokenizer has no {' and no '.join(missing)}; set them and save it again.")
    if tokenizer.eos_token_id not in tokenizer(text_target="a", verbose=False)["input_ids"]:
        raise ValueError(
            f"The tokenizer does not put its eos_token, {tokenizer.eos_token}, behind a target: without it no model "
            "learns where to stop. Give the tokenizer a post-processor (TemplateProcessing), and save it again."
        )


def check_target_tokens(tokenizer: PreTrainedTokenizerBase, directions: Mapping[Pair, str]) -> None:
    """Refuses a tokenizer that would cut the tokens by which a model of several languages is told the target."""
    tokens = dict.fromkeys(prefix.strip() for prefix in directions.values() if prefix.startswith("<2"))
    if missing := [token for token in tokens if tokenizer.tokenize(token) != [token]]:
        quoted = " ".join(f'"{token}"' for token in missing)
        raise ValueError(
            f"lang_pairs: the tokenizer does not have {', '.join(missing)} as a token each. `vanilla-transformer "
            f"train-tokenizer --added_tokens {quoted}` makes one that has, and so does a training that is given none."
        )


def check_lengths(config: PreTrainedConfig, arguments: DataArguments) -> None:
    """Refuses texts that may be longer than a model's table of positions."""
    positions = count_text_positions(config)
    lengths = dict(zip(("max_source_length", "max_target_length"), arguments.lengths, strict=True))
    if positions is not None and (
        longer := [f"{name}={length}" for name, length in lengths.items() if length > positions]
    ):
        raise ValueError(
            f"{' and '.join(longer)}: the model reads at most {positions} tokens, by its table of positions. Give no "
            "more than these."
        )


def check_teacher(
    name: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    prefixes: Mapping[Pair | None, str],
) -> None:
    """Refuses a model to learn from that writes other tokens than the one to train, or reads others before sources.

    `prefixes` are what stands before sources, by the pair of languages, or None.
    """
    with explain_missing_model(name):
        teacher: Any = AutoConfig.from_pretrained(name)
    sizes = [getattr(each, "decoder_vocab_size", None) or each.vocab_size for each in (teacher, config)]
    if sizes[0] != sizes[1] or get_vocabularies(load_needed_tokenizer(name)) != get_vocabularies(tokenizer):
        raise ValueError(f"teacher_model={name} has another vocabulary: train with tokenizer_name={name}.")
    for langs, prefix in prefixes.items():
        if task is TRANSLATION and langs is None and len(known := find_directions(teacher)) > 1:
            pairs = ", ".join(map(" to ".join, known))
            raise ValueError(f"teacher_model={name} translates {pairs}: name source_lang and target_lang.")
        wanted = find_prefix(teacher, task, langs=langs)
        if wanted != prefix:
            where = "" if langs is None else f" of {' to '.join(langs)}"
            advice = f": give source_prefix={wanted!r}" if len(prefixes) == 1 else ""
            raise ValueError(
                f"teacher_model={name} wants {wanted!r} before each source{where}, and here {prefix!r} stands "
                f"there{advice}."
            )
