"""Walk through the Transformer with numbers: the paper's equations by hand, beside the model's own values.

    python scripts/walkthrough.py
    python scripts/walkthrough.py --lang zh

A model with 32 dimensions learns a toy translation in about half a minute on a CPU. On the way every part is shown:
embedding, positions, masks, one attention head, residual and norm, feed-forward, logits, one training step, attention
after training, greedy and beam decoding. Read this file beside its output.

Shapes: B  batch, S  source length, T  target length, D  d_model, H  heads, d_k  size of a head, V  vocabulary.
"""

import argparse
import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import HfArgumentParser, set_seed
from transformers.hf_argparser import DataClassType
from transformers.utils.logging import tqdm
from walkthrough_texts import TEXTS

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

START, PAD, END, UNKNOWN = range(4)
SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
# English noun: (French noun, whether it is feminine); adjective: (masculine, feminine), as the toy French has them.
NOUNS = {
    "ball": ("balle", True),
    "car": ("voiture", True),
    "house": ("maison", True),
    "dog": ("chien", False),
    "book": ("livre", False),
    "tree": ("arbre", False),
}
ADJECTIVES = {
    "green": ("vert", "verte"),
    "small": ("petit", "petite"),
    "grey": ("gris", "grise"),
    "heavy": ("lourd", "lourde"),
    "black": ("noir", "noire"),
}
WARMUP_STEPS = 100
SHOWN_VALUES = 6  # of each vector


@dataclass
class WalkthroughArguments:
    """How to walk."""

    lang: str = field(default="en", metadata={"help": "Language of the text: en or zh.", "choices": list(TEXTS)})
    steps: int = field(default=400, metadata={"help": "Training steps."})
    seed: int = field(default=1, metadata={"help": "Of initial weights and batches."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bar."})

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--steps is {self.steps}; it must be at least 1.")


Pair = tuple[list[str], list[str]]


def make_corpus() -> list[Pair]:
    """All pairs: "a small ball and a dog" becomes "une balle petite et un chien"."""
    phrases: list[Pair] = []
    for noun, (french, is_feminine) in NOUNS.items():
        article = "une" if is_feminine else "un"
        phrases.append((["a", noun], [article, french]))
        for adjective, forms in ADJECTIVES.items():
            phrases.append((["a", adjective, noun], [article, french, forms[is_feminine]]))
    both = itertools.product(phrases, repeat=2)
    return phrases + [([*a[0], "and", *b[0]], [*a[1], "et", *b[1]]) for a, b in both]


class Vocabulary:
    """Numbers the words of both languages, behind the special tokens."""

    def __init__(self, corpus: list[Pair]) -> None:
        sides = [sorted({word for pair in corpus for word in pair[side]}) for side in (0, 1)]
        self.sizes = [len(words) + len(SPECIAL_TOKENS) for words in sides]
        self.words = [*SPECIAL_TOKENS, *sides[0], *sides[1]]
        self.ids = {word: index for index, word in enumerate(self.words)}

    def encode(self, sentences: list[list[str]]) -> torch.Tensor:
        """Maps sentences to numbers (B, L), each with `</s>` behind it and padded to the longest."""
        rows = [torch.tensor([*(self.ids[word] for word in words), END]) for words in sentences]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)

    def decode(self, ids: torch.Tensor) -> list[str]:
        """Maps numbers (L,) to words."""
        return [self.words[index] for index in ids.tolist()]


def batch_of(pairs: list[Pair], vocabulary: Vocabulary) -> dict[str, torch.Tensor]:
    """What the model takes: `input_ids` and `attention_mask` (B, S), and `labels` (B, T)."""
    input_ids = vocabulary.encode([source for source, _ in pairs])
    labels = vocabulary.encode([target for _, target in pairs])
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "labels": labels.masked_fill(labels == PAD, -100),
    }


def print_rows(rows: list[str], matrix: torch.Tensor, columns: list[str] | None = None, digits: int = 2) -> None:
    """Prints a matrix (rows, columns) with a word before each row."""
    first = max(map(len, rows)) + 2
    width = max([digits + 5, *(len(column) + 2 for column in columns or [])])
    if columns:
        print(" " * first + "".join(column.rjust(width) for column in columns))
    rounded = matrix.round(decimals=digits) + 0.0  # no -0.00
    for name, values in zip(rows, rounded.tolist(), strict=True):
        print(name.rjust(first) + "".join(f"{value:{width}.{digits}f}" for value in values))


class Walk:
    """The walk: a small model, its corpus, and one method for each step, in their order."""

    def __init__(self, arguments: WalkthroughArguments) -> None:
        self.arguments = arguments
        self.corpus = make_corpus()
        random.Random(arguments.seed).shuffle(self.corpus)
        self.held_out, self.pairs = self.corpus[:100], self.corpus[100:]
        self.vocabulary = Vocabulary(self.corpus)
        self.config = VanillaTransformerConfig(
            vocab_size=len(self.vocabulary.words),
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            dropout=0.0,
            label_smoothing=0.1,
            max_position_embeddings=32,
        )
        self.model = VanillaTransformerForConditionalGeneration._from_config(
            self.config,
            attn_implementation="eager",  # which returns its weights
        ).eval()
        self.encoder: Any = self.model.model.encoder
        example: Pair = (["a", "small", "ball", "and", "a", "dog"], ["une", "balle", "petite", "et", "un", "chien"])
        shorter: Pair = (["a", "green", "car"], ["une", "voiture", "verte"])
        self.example, self.batch = example, batch_of([example, shorter], self.vocabulary)
        self.source_words = [*example[0], "</s>"]

    def say(self, name: str, **values: Any) -> None:
        """Prints a text in the chosen language."""
        print(TEXTS[self.arguments.lang][name].format(**values))

    @torch.no_grad()
    def embed(self) -> torch.Tensor:
        """Steps 0 to 2: from words to vectors; returns those of the first source sentence, (S, D)."""
        config, (source, target) = self.config, self.example
        sizes = dict(zip(("source_size", "target_size"), self.vocabulary.sizes, strict=True))
        pairs = {"pairs": len(self.corpus), "source": " ".join(source), "target": " ".join(target)}
        self.say("corpus", **pairs, **sizes, vocab_size=config.vocab_size)
        print("input_ids", self.batch["input_ids"].tolist())
        print("labels   ", self.batch["labels"].tolist())

        self.say("embedding", vocab_size=config.vocab_size, d_model=config.d_model, scale=math.sqrt(config.d_model))
        embedded = self.encoder.embed_tokens.weight[self.batch["input_ids"][0]] * math.sqrt(config.d_model)
        print(f"{tuple(embedded.shape)}:")
        print_rows(self.source_words, embedded[:, :SHOWN_VALUES])

        table = self.encoder.embed_positions.weight
        by_hand = math.sin(3 / 10000 ** (4 / config.d_model))
        self.say("positions", d_model=config.d_model, by_hand=by_hand, in_table=table[3, 4].item())
        positions = table[: len(embedded)]
        print_rows([str(position) for position in range(len(positions))], positions[:, :SHOWN_VALUES])
        return embedded + positions

    def show_masks(self) -> None:
        """Step 3: who may look at whom."""
        self.say("masks")
        self.say("mask_source")
        for source, mask in zip(self.batch["input_ids"], self.batch["attention_mask"], strict=True):
            print("   ", mask.tolist(), " ".join(self.vocabulary.decode(source)))
        self.say("mask_target")
        fed = ["<s>", *self.example[1]]
        print_rows(fed, torch.ones(len(fed), len(fed)).tril(), fed, digits=0)

    @torch.no_grad()
    def attend(self, states: torch.Tensor) -> None:
        """Steps 4 to 6: the encoder's first layer by hand, from its input (S, D)."""
        layer, attention = self.encoder.layers[0], self.encoder.layers[0].self_attn
        heads, d_k = self.config.encoder_attention_heads, attention.q_proj.out_features // 2
        self.say("head", heads=heads, d_k=d_k)
        query, key, value = (
            (states @ projection.weight.T).view(len(states), heads, d_k).transpose(0, 1)  # (H, S, d_k)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        scores = query @ key.transpose(1, 2) / math.sqrt(d_k)  # (H, S, S)
        weights = scores.softmax(dim=-1)
        self.say("head_scores")
        print_rows(self.source_words, scores[0], self.source_words)
        self.say("head_weights")
        print_rows(self.source_words, weights[0], self.source_words)
        alone = {name: self.batch[name][:1] for name in ("input_ids", "attention_mask")}
        encoded = self.encoder(**alone, output_attentions=True, output_hidden_states=True)
        self.say("head_check", difference=(encoded.attentions[0][0] - weights).abs().max().item())

        context = (weights @ value).transpose(0, 1).flatten(1)  # heads side by side, (S, D)
        summed = states + context @ attention.out_proj.weight.T
        normed = self.normalize(summed, layer.self_attn_layer_norm)
        self.say("residual", d_model=self.config.d_model)
        self.say("residual_rows")
        statistics = [f(x, -1) for x in (summed, normed) for f in (torch.mean, lambda x, dim: x.std(dim, correction=0))]
        print_rows(self.source_words, torch.stack(statistics, dim=1), ["mean", "std", "mean'", "std'"])

        inner = (normed @ layer.fc1.weight.T + layer.fc1.bias).relu()
        result = self.normalize(normed + inner @ layer.fc2.weight.T + layer.fc2.bias, layer.final_layer_norm)
        sizes = {"d_model": self.config.d_model, "ffn_dim": self.config.encoder_ffn_dim}
        difference = (encoded.hidden_states[1][0] - result).abs().max().item()
        self.say("feed_forward", **sizes, alive=(inner > 0).float().mean().item(), difference=difference)

    @staticmethod
    def normalize(states: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
        """LayerNorm by hand: (x - mean) / sqrt(variance + epsilon) * gain + bias."""
        mean = states.mean(dim=-1, keepdim=True)
        variance = states.var(dim=-1, keepdim=True, correction=0)
        return (states - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias

    @torch.no_grad()
    def predict(self) -> None:
        """Step 7: the probabilities of the first target word."""
        self.say("logits", chance=1 / self.config.vocab_size)
        logits = self.model(**self.batch).logits
        print(f"logits {tuple(logits.shape)}")
        self.print_best(logits[0, 0].softmax(dim=-1))

    def print_best(self, probabilities: torch.Tensor, count: int = 3) -> None:
        """Prints the most probable words of (V,)."""
        best = probabilities.topk(count)
        words = self.vocabulary.decode(best.indices)
        print("   ", "   ".join(f"{word} {p:.3f}" for word, p in zip(words, best.values.tolist(), strict=True)))

    def train(self) -> None:
        """Step 8: one training step, looked at closely, and then many."""
        config, smoothing = self.config, self.config.label_smoothing
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)

        def rate(step: int) -> float:  # counted from 0
            return config.d_model**-0.5 * min((step + 1) ** -0.5, (step + 1) * WARMUP_STEPS**-1.5)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        rates = ", ".join(f"{rate(step - 1):.5f} ({step})" for step in (1, WARMUP_STEPS // 2, WARMUP_STEPS, 400))
        wrong = smoothing / config.vocab_size
        right = 1 - smoothing + wrong
        self.say("step", smoothing=smoothing, right=right, wrong=wrong, rates=rates)
        order = random.Random(self.arguments.seed)
        batch = batch_of(order.sample(self.pairs, 64), self.vocabulary)
        self.model.train()

        def update(batch: dict[str, torch.Tensor]) -> float:
            loss = self.model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            return float(loss.detach())

        before = update(batch)
        with torch.no_grad():
            self.say("step_result", before=before, after=float(self.model(**batch).loss))
        self.say("training", steps=self.arguments.steps)
        loss = before
        for _ in tqdm(range(self.arguments.steps), unit="step", disable=self.arguments.disable_tqdm):
            loss = update(batch_of(order.sample(self.pairs, 64), self.vocabulary))
        self.model.eval()
        floor = -right * math.log(right) - (config.vocab_size - 1) * wrong * math.log(wrong)
        translated = self.translate([source for source, _ in self.held_out])
        correct = sum(found == target for found, (_, target) in zip(translated, self.held_out, strict=True))
        self.say("trained", loss=loss, floor=floor, right=correct, total=len(self.held_out))

    def translate(self, sentences: list[list[str]]) -> list[list[str]]:
        """Translates greedily, all at once."""
        input_ids = self.vocabulary.encode(sentences)
        output = self.model.generate(input_ids=input_ids, attention_mask=(input_ids != PAD).long())
        return [[word for word in self.vocabulary.decode(row) if word not in SPECIAL_TOKENS] for row in output]

    @torch.no_grad()
    def align(self) -> None:
        """Step 9: what the decoder looks at."""
        self.say("cross", heads=self.config.decoder_attention_heads)
        attentions = self.model(**self.batch, output_attentions=True).cross_attentions
        target_words = [*self.example[1], "</s>"]
        length = len(self.source_words)
        print_rows(target_words, attentions[-1][0, :, :, :length].mean(dim=0), self.source_words)

    @torch.no_grad()
    def decode(self, limit: int = 12) -> None:
        """Step 10: greedy decoding, by hand."""
        self.say("greedy")
        source = {name: self.batch[name][:1] for name in ("input_ids", "attention_mask")}
        encoded = self.encoder(**source)
        fed = torch.tensor([[START]])
        while fed[0, -1] != END and fed.shape[1] <= limit:
            logits = self.model(
                encoder_outputs=encoded, attention_mask=source["attention_mask"], decoder_input_ids=fed
            ).logits
            probabilities = logits[0, -1].softmax(dim=-1)
            print("   ", " ".join(self.vocabulary.decode(fed[0])), end=" ->")
            self.print_best(probabilities)
            fed = torch.cat([fed, probabilities.argmax().view(1, 1)], dim=1)

    def search(self, beams: int = 4, alpha: float = 0.6) -> None:
        """Step 11: beam search, and its score by hand."""
        self.say("beam", beams=beams, alpha=alpha)
        source = {name: self.batch[name][:1] for name in ("input_ids", "attention_mask")}
        found: Any = self.model.generate(
            **source,
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=alpha,
            length_penalty_type="gnmt",
            output_scores=True,
            return_dict_in_generate=True,
        )
        for ids, score in zip(found.sequences, found.sequences_scores.tolist(), strict=True):
            words = [word for word in self.vocabulary.decode(ids[1:]) if word != "<pad>"]
            print(f"    {score:8.4f}  {' '.join(words)}")
        best = found.sequences[0][found.sequences[0] != PAD]
        with torch.no_grad():
            logits = self.model(**source, decoder_input_ids=best[None, :-1]).logits[0]
        total = logits.log_softmax(dim=-1)[torch.arange(len(best) - 1), best[1:]].sum().item()
        length = len(best) - 1
        self.say("beam_check", total=total, length=length, score=total / ((5 + length) / 6) ** alpha)


def run(arguments: WalkthroughArguments) -> None:
    """Walk."""
    set_seed(arguments.seed)
    walk = Walk(arguments)
    walk.say("intro")
    states = walk.embed()
    walk.show_masks()
    walk.attend(states)
    walk.predict()
    walk.train()
    walk.align()
    walk.decode()
    walk.search()
    walk.say("outro")


def make_parser() -> HfArgumentParser:
    """The command line's parser."""
    return HfArgumentParser(
        DataClassType(WalkthroughArguments), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's) and walk."""
    parser = make_parser()
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
    except ValueError as error:
        parser.error(str(error))
    run(arguments)


if __name__ == "__main__":
    main()
