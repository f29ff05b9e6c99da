"""What the model of `scripts/walkthrough.py` learns: to translate a simple English into a simple French.

Shapes: B  batch, S  source length, T  target length.
"""

import itertools

import torch
from torch import nn

START, PAD, END, UNKNOWN = range(4)
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
# English noun: (French noun, whether it is feminine); colour: (masculine, feminine).
NOUNS = {
    "ball": ("balle", True),
    "car": ("voiture", True),
    "house": ("maison", True),
    "dog": ("chien", False),
    "book": ("livre", False),
    "tree": ("arbre", False),
}
COLOURS = {
    "green": ("vert", "verte"),
    "blue": ("bleu", "bleue"),
    "grey": ("gris", "grise"),
    "black": ("noir", "noire"),
    "white": ("blanc", "blanche"),
}

Pair = tuple[list[str], list[str]]

# The batch of every step of the walk: two pairs of unlike length, so that there is padding.
EXAMPLES: list[Pair] = [
    (["a", "white", "ball", "and", "a", "dog"], ["une", "balle", "blanche", "et", "un", "chien"]),
    (["a", "green", "car"], ["une", "voiture", "verte"]),
]


def make_corpus() -> list[Pair]:
    """All pairs: one noun or two, each with a colour or without."""
    phrases: list[Pair] = []
    for noun, (french, is_feminine) in NOUNS.items():
        article = "une" if is_feminine else "un"
        phrases.append((["a", noun], [article, french]))
        for colour, forms in COLOURS.items():
            phrases.append((["a", colour, noun], [article, french, forms[is_feminine]]))
    both = itertools.product(phrases, repeat=2)
    return phrases + [([*a[0], "and", *b[0]], [*a[1], "et", *b[1]]) for a, b in both]


class Vocabulary:
    """Numbers the words of both languages, behind the special tokens."""

    def __init__(self, corpus: list[Pair]) -> None:
        self.source_words = sorted({word for source, _ in corpus for word in source})
        self.target_words = sorted({word for _, target in corpus for word in target})
        self.words = [*SPECIAL_TOKENS, *self.source_words, *self.target_words]
        self.ids = {word: index for index, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentences: list[list[str]]) -> torch.Tensor:
        """Maps sentences to numbers (B, L), each with `</s>` behind it and padded to the longest."""
        rows = [torch.tensor([*(self.ids[word] for word in words), END]) for words in sentences]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)

    def decode(self, ids: torch.Tensor) -> list[str]:
        """Maps numbers (L,) to words."""
        return [self.words[index] for index in ids.tolist()]

    def make_batch(self, pairs: list[Pair]) -> dict[str, torch.Tensor]:
        """What the model takes: `input_ids` and `attention_mask` (B, S), and `labels` (B, T)."""
        input_ids = self.encode([source for source, _ in pairs])
        labels = self.encode([target for _, target in pairs])
        return {
            "input_ids": input_ids,
            "attention_mask": (input_ids != PAD).long(),
            "labels": labels.masked_fill(labels == PAD, -100),
        }
