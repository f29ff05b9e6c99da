"""MarianMT, trained by transformers' own Seq2SeqTrainer: the part of shootout.py that runs in its environment.

    python shootout_marian.py train settings.json
    python shootout_marian.py translate settings.json test.src translations.txt

It needs torch, transformers and accelerate, and nothing of this package. shootout_systems.py writes the settings.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MarianConfig,
    MarianMTModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)

BOS, PAD, EOS, UNK = range(4)
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")

Pair = dict[str, list[int]]


class ProgressLines(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Prints the update's number at each log: the library's own line has none."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Prints a line, but not for the summary at the end."""
        if logs and "loss" in logs:
            print(f"update {state.global_step} of {state.max_steps}", flush=True)


def make_model(shape: dict[str, Any], vocab_size: int) -> MarianMTModel:
    """A random model.

    Args:
        shape: Fields that MarianMT's configuration shares with this package's.
        vocab_size: Of the one vocabulary, special tokens included.
    """
    config = MarianConfig(
        vocab_size=vocab_size,
        **shape,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
    return MarianMTModel(config)


def read_vocabulary(path: str) -> list[str]:
    """The special tokens, and the pieces of the file."""
    return [*SPECIAL_TOKENS, *Path(path).read_text(encoding="utf-8").splitlines()]


def read_ids(path: str, ids: dict[str, int]) -> list[list[int]]:
    """The tokens of each line, with the end mark."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [[*(ids.get(piece, UNK) for piece in line.split()), EOS] for line in lines]


def pad(sequences: list[list[int]], value: int) -> torch.Tensor:
    """Sequences as one tensor, (sequences, longest)."""
    return pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True, padding_value=value)


def make_collator(model: MarianMTModel) -> Callable[[list[Pair]], dict[str, torch.Tensor]]:
    """Pads batches, and makes the decoder's inputs: the Trainer withholds the labels where it smooths them."""

    def collate(pairs: list[Pair]) -> dict[str, torch.Tensor]:
        source = pad([pair["input_ids"] for pair in pairs], PAD)
        labels = pad([pair["labels"] for pair in pairs], -100)
        return {
            "input_ids": source,
            "attention_mask": source.ne(PAD).long(),
            "labels": labels,
            "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels),
        }

    return collate


def train(settings: dict[str, Any]) -> None:
    """Trains, and writes the model and counts.json: target tokens seen, end marks included, and parameters."""
    vocabulary = read_vocabulary(settings["vocabulary"])
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    sources, targets = (read_ids(path, ids) for path in settings["train_files"])
    pairs = [{"input_ids": source, "labels": target} for source, target in zip(sources, targets, strict=True)]
    arguments = Seq2SeqTrainingArguments(**settings["training"])
    set_seed(arguments.seed)
    model = make_model(settings["shape"], len(vocabulary))
    trainer = Seq2SeqTrainer(model, arguments, make_collator(model), pairs, callbacks=[ProgressLines()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    counts = {
        "target_tokens": round(trainer.state.epoch * sum(map(len, targets))),
        "parameters": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
    }
    Path(settings["training"]["output_dir"], "counts.json").write_text(json.dumps(counts), encoding="utf-8")


def translate(settings: dict[str, Any], input_file: str, output_file: str) -> None:
    """Translates a file, sentences of similar length together."""
    vocabulary = read_vocabulary(settings["vocabulary"])
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    model = MarianMTModel.from_pretrained(settings["training"]["output_dir"]).eval()
    sources = read_ids(input_file, ids)
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    translations = [""] * len(sources)
    size = settings["batch_size"]
    for chosen in (order[start : start + size] for start in range(0, len(order), size)):
        source = pad([sources[index] for index in chosen], PAD)
        # MarianMT's models come with this: they must be told that padding is no word.
        found = model.generate(
            source, attention_mask=source.ne(PAD).long(), bad_words_ids=[[PAD]], **settings["generation"]
        )
        for index, sequence in zip(chosen, found.tolist(), strict=True):
            translations[index] = " ".join(vocabulary[token] for token in sequence if token not in (BOS, PAD, EOS))
    Path(output_file).write_text("".join(f"{line}\n" for line in translations), encoding="utf-8")


if __name__ == "__main__":
    command, settings_file, *files = sys.argv[1:]
    content = json.loads(Path(settings_file).read_text(encoding="utf-8"))
    if command == "train":
        train(content)
    else:
        translate(content, *files)
