r"""Check converted models against the systems that they come from: logits, and translations of greedy and beam search.

    python scripts/benchmarks/check_conversion.py
    python scripts/benchmarks/check_conversion.py --systems joeynmt --steps 50

Each system trains tiny models with a command of its own, one for each configuration, and translates with them; their
checkpoints are converted and translate the same sentences. The table tells the largest difference of logits, as a
fraction of the largest logit, how many translations are the same, and how many of the original's are right. A system
that is not installed is named with the reason. OpenNMT-py and JoeyNMT pin older versions of torch and of others:
install them in an environment of their own, with --no-deps, and then what their imports miss.
"""

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.conversion.converted import Batch, ConvertedModel, check_logits, compare_with
from vanilla_transformer.conversion.systems.joeynmt import convert_joeynmt, read_settings, read_symbols
from vanilla_transformer.conversion.systems.opennmt_py import SPECIAL_TOKENS, convert_opennmt_py, read_opennmt_py
from vanilla_transformer.conversion.tokenizers.vocabularies import align_special_tokens
from vanilla_transformer.data.vocabularies import get_vocabularies

BEAMS, LONGEST = 4, 20
SIDES = ("src", "tgt")
WORDS = [f"w{index}" for index in range(12)]
# What each system calls the number of updates, and how often it does something.
STEPS = {
    "joeynmt": ("updates", "epochs", "logging_freq", "validation_freq"),
    "opennmt_py": ("train_steps", "save_checkpoint_steps"),
}


@dataclass(frozen=True)
class Row:
    """What was found of one configuration.

    Args:
        system: The system and its version.
        configuration: What is special about the model.
        difference: Of the logits, as a fraction of the largest.
        same: For each search, by its number of beams: how many translations are the same.
        right: How many of the original's are right, in beam search.
        sentences: How many there are.
    """

    system: str
    configuration: str
    difference: float
    same: dict[int, int]
    right: int
    sentences: int

    def __str__(self) -> str:
        counts = " | ".join(f"{count} of {self.sentences}" for count in (*self.same.values(), self.right))
        return f"| {self.system} | {self.configuration} | {self.difference:.1e} | {counts} |"


@dataclass(frozen=True)
class Corpus:
    """A toy language pair: each word has a translation, and they come in the opposite order."""

    folder: Path
    vocabulary: Path
    sources: list[str]
    targets: list[str]

    @classmethod
    def write(cls, folder: Path, num_test: int) -> "Corpus":
        """Writes train.src, train.tgt and so on, and vocabulary.txt with the words of both languages."""
        random.seed(0)
        for name, size in (("train", 1000), ("dev", 10), ("test", num_test)):
            sources = [random.choices(WORDS, k=random.randint(2, 7)) for _ in range(size)]
            targets = [[word.upper() for word in reversed(words)] for words in sources]
            for side, sentences in zip(SIDES, (sources, targets), strict=True):
                lines = "".join(f"{' '.join(words)}\n" for words in sentences)
                (folder / f"{name}.{side}").write_text(lines, encoding="utf-8")
        vocabulary = folder / "vocabulary.txt"
        vocabulary.write_text("".join(f"{word}\n{word.upper()}\n" for word in WORDS), encoding="utf-8")
        tests = [(folder / f"test.{side}").read_text(encoding="utf-8").splitlines() for side in SIDES]
        return cls(folder, vocabulary, *tests)


def run(*command: str, **settings: Any) -> str:
    """Runs a Python module of another system and returns what it prints."""
    # Their own loading code asks torch for more than weights. The files are those that were just written.
    environment = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **settings,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def change(settings: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Sets options, whose names may lead through sections: "model.encoder.layer_norm"."""
    for name, value in options.items():
        *sections, last = name.split(".")
        section = settings
        for each in sections:
            section = section[each]
        section[last] = value


def measure(
    distribution: str,
    configuration: str,
    converted: ConvertedModel,
    compute: Callable[[Batch], torch.Tensor],
    corpus: Corpus,
    translations: dict[int, list[str]],
    **search: Any,
) -> Row:
    """Compares a converted model with the original.

    Args:
        distribution: The name under which the system is installed.
        configuration: What is special about the model.
        converted: The converted model.
        compute: Computes the original's logits (B, T, V) of a batch of `draw_batch`.
        corpus: Whose test sentences were translated.
        translations: The original's translations, by number of beams.
        **search: Settings of the search that the converted model lacks.

    Returns:
        A row of the table.
    """
    tokenizer: Any = converted.tokenizer
    model: Any = converted.model
    logits = compare_with(compute, model)
    difference = check_logits(*logits, f"The converted model computes something else than {converted.source}")
    batch = tokenizer(corpus.sources, padding=True, return_tensors="pt")
    same = {}
    for num_beams, expected in translations.items():
        found = tokenizer.batch_decode(model.generate(**batch, **search, num_beams=num_beams), skip_special_tokens=True)
        same[num_beams] = sum(one == other for one, other in zip(expected, found, strict=True))
    right = sum(one == other for one, other in zip(translations[BEAMS], corpus.targets, strict=True))
    system = f"{distribution} {version(distribution)}"
    return Row(system, configuration, difference, same, right, len(corpus.sources))


JOEYNMT = """
name: check
use_cuda: false
data: {dataset_type: plain, src: {lang: src, level: word}, trg: {lang: tgt, level: word}}
model:
  encoder: {type: transformer, num_layers: 2, num_heads: 2, hidden_size: 32, ff_size: 64, layer_norm: post}
  decoder: {type: transformer, num_layers: 2, num_heads: 2, hidden_size: 32, ff_size: 64, layer_norm: post}
training: {optimizer: adam, scheduling: noam, learning_rate_factor: 1, learning_rate_warmup: 100, batch_size: 50}
testing: {beam_alpha: 1.0}
"""
JOEYNMT_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "pre-LN, tied softmax": {
        "model.tied_softmax": True,
        "model.encoder.layer_norm": "pre",
        "model.decoder.layer_norm": "pre",
    },
    "post-LN, nothing tied, gelu": {"model.encoder.activation": "gelu", "model.decoder.activation": "gelu"},
    "post-LN, all tied, swish, 1 + 3 layers, embeddings not scaled": {
        "model.tied_softmax": True,
        "model.tied_embeddings": True,
        "model.encoder.embeddings.scale": False,
        "model.encoder.activation": "swish",
        "model.decoder.activation": "swish",
        "model.encoder.num_layers": 1,
        "model.decoder.num_layers": 3,
    },
}


def check_joeynmt(corpus: Corpus, steps: int) -> Iterator[Row]:
    """Checks JoeyNMT's Transformers."""
    import_module("joeynmt.model")
    for configuration, options in JOEYNMT_CONFIGURATIONS.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            settings = yaml.safe_load(JOEYNMT)
            for stack in ("encoder", "decoder"):
                change(settings, {f"model.{stack}.embeddings": {"embedding_dim": 32, "scale": True}})
            change(settings, {f"data.{part}": str(corpus.folder / part) for part in ("train", "dev")})
            change(settings, {f"training.{each}": steps for each in STEPS["joeynmt"]})
            change(settings, {"model_dir": str(folder / "model"), "testing.max_output_length": LONGEST, **options})
            if options.get("model.tied_embeddings"):  # takes one vocabulary for both sides
                change(settings, {f"data.{side}.voc_file": str(corpus.vocabulary) for side in ("src", "trg")})
            files = {num_beams: folder / f"{num_beams}.yaml" for num_beams in (1, BEAMS)}
            for num_beams, file in files.items():
                change(settings, {"testing.beam_size": num_beams})
                file.write_text(yaml.safe_dump(settings), encoding="utf-8")
            run("joeynmt", "train", str(files[BEAMS]), "--skip-test")
            text = "".join(f"{line}\n" for line in corpus.sources)
            translations = {
                num_beams: run("joeynmt", "translate", str(file), input=text).splitlines()
                for num_beams, file in files.items()
            }
            converted = convert_joeynmt(folder / "model")
            compute = load_joeynmt(folder / "model", converted)
            yield measure("joeynmt", configuration, converted, compute, corpus, translations)


def load_joeynmt(folder: Path, converted: ConvertedModel) -> Callable[[Batch], torch.Tensor]:
    """Returns what computes the logits of JoeyNMT's own model, the only checkpoint's in a folder."""
    modeling, vocabulary = import_module("joeynmt.model"), import_module("joeynmt.vocabulary")
    settings = read_settings(folder / "config.yaml")
    tokenizer: Any = converted.tokenizer
    vocabularies = [sorted(vocab, key=lambda token: vocab[token]) for vocab in get_vocabularies(tokenizer)]
    source, target = (vocabulary.Vocabulary(tokens, read_symbols(settings)) for tokens in vocabularies)
    original = modeling.build_model(settings["model"], src_vocab=source, trg_vocab=target).eval()
    checkpoint = next(folder / name for name in ("best.ckpt", "latest.ckpt") if (folder / name).is_file())
    original.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["model_state"])

    def compute(batch: Batch) -> torch.Tensor:
        mask = batch["attention_mask"].bool()
        sources = {"src": batch["input_ids"], "src_length": mask.sum(dim=1), "src_mask": mask[:, None]}
        hidden, *_ = original(return_type="encode", **sources)
        targets = batch["decoder_input_ids"]
        logits, *_ = original(
            return_type="decode",
            encoder_output=hidden,
            encoder_hidden=None,
            src_mask=mask[:, None],
            trg_input=targets,
            unroll_steps=targets.shape[1],
            trg_mask=torch.ones_like(targets)[:, None].bool(),
        )
        return logits

    return compute


OPENNMT_PY = """
data: {corpus: {transforms: [], weight: 1}}
encoder_type: transformer
decoder_type: transformer
position_encoding: true
layers: 2
hidden_size: 32
word_vec_size: 32
heads: 2
transformer_ff: 64
param_init: 0.0
param_init_glorot: true
optim: adam
learning_rate: 1.0
decay_method: noam
warmup_steps: 100
batch_size: 50
batch_type: sents
bucket_size: 1000
num_workers: 0
"""
OPENNMT_PY_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "no biases, nothing tied": {},
    "biases, gelu, tied output, 1 + 3 layers": {
        "add_qkvbias": True,
        "add_ffnbias": True,
        "pos_ffn_activation_fn": "gelu",
        "share_decoder_embeddings": True,
        "layers": -1,
        "enc_layers": 1,
        "dec_layers": 3,
    },
    "all tied, concatenated sinusoids, norm_eps 1e-5": {
        "share_vocab": True,
        "share_embeddings": True,
        "share_decoder_embeddings": True,
        "position_encoding_type": "SinusoidalConcat",
        "norm_eps": 1e-5,
    },
    "saved as safetensors": {"save_format": "safetensors", "add_ffnbias": True},
}


def check_opennmt_py(corpus: Corpus, steps: int) -> Iterator[Row]:
    """Checks OpenNMT-py's Transformers."""
    import_module("onmt.model_builder")
    for configuration, options in OPENNMT_PY_CONFIGURATIONS.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            file, model = folder / "settings.yaml", folder / f"model_step_{steps}.pt"
            settings = yaml.safe_load(OPENNMT_PY)
            change(settings, {f"data.corpus.path_{side}": str(corpus.folder / f"train.{side}") for side in SIDES})
            change(settings, {f"{side}_vocab": str(folder / f"{side}.txt") for side in SIDES})
            change(settings, {"save_data": str(folder / "samples"), "save_model": str(folder / "model")})
            change(settings, dict.fromkeys(STEPS["opennmt_py"], steps) | options)
            file.write_text(yaml.safe_dump(settings), encoding="utf-8")
            run("onmt.bin.build_vocab", "-config", str(file), "-n_sample", "-1")
            run("onmt.bin.train", "-config", str(file))
            for weights in folder.glob("model_*.safetensors"):  # saved under another name than it is looked for
                weights.rename(weights.with_suffix(".00.safetensors"))
            translations = {}
            for num_beams in (1, BEAMS):
                output = folder / f"{num_beams}.txt"
                files = ["-model", str(model), "-src", str(corpus.folder / "test.src"), "-output", str(output)]
                # Without a length penalty, because OpenNMT-py's counts the start symbol as well.
                search = ["-beam_size", str(num_beams), "-length_penalty", "none", "-max_length_ratio", "0"]
                run("onmt.bin.translate", *files, *search, "-max_length", str(LONGEST))
                translations[num_beams] = output.read_text(encoding="utf-8").splitlines()
            search_settings = {"length_penalty": 0.0, "max_new_tokens": LONGEST}
            converted = convert_opennmt_py(model)
            compute = load_opennmt_py(model, converted)
            yield measure("OpenNMT-py", configuration, converted, compute, corpus, translations, **search_settings)


def load_opennmt_py(path: Path, converted: ConvertedModel) -> Callable[[Batch], torch.Tensor]:
    """Returns what computes the logits of OpenNMT-py's own model, with the target's tokens in the converted order."""
    building, parsing = import_module("onmt.model_builder"), import_module("onmt.utils.parse")
    inputting = import_module("onmt.inputters.inputter")
    content = read_opennmt_py(path)
    opt = parsing.ArgumentParser.ckpt_model_opts(content["opt"])
    config = converted.model.config
    opt.add_qkvbias, opt.add_ffnbias = config.attention_bias, config.ffn_bias
    original = building.build_base_model(opt, inputting.dict_to_vocabs(content["vocab"])).eval()
    torch.nn.Module.load_state_dict(original, content["weights"])  # its own method empties the dictionary
    tokens, target_tokens = content["vocab"]["src"], content["vocab"]["tgt"]
    rows = torch.tensor(align_special_tokens(tokens, target_tokens, tuple(SPECIAL_TOKENS.values())))

    def compute(batch: Batch) -> torch.Tensor:
        targets = rows[batch["decoder_input_ids"]]
        targets = torch.cat([targets, targets[:, :1]], dim=1)  # the last one is for the loss only
        lengths = batch["attention_mask"].sum(dim=1)
        hidden, _ = original(batch["input_ids"][..., None], targets[..., None], lengths)
        return original.generator(hidden)[..., rows]

    return compute


# Each raises ImportError where the system is not installed.
SYSTEMS: dict[str, Callable[[Corpus, int], Iterator[Row]]] = {"joeynmt": check_joeynmt, "opennmt_py": check_opennmt_py}


@dataclass
class CheckArguments:
    """What to check, and how long the models are trained."""

    systems: list[str] = field(
        default_factory=lambda: list(SYSTEMS),
        metadata={"help": "Which systems. Default: all.", "choices": list(SYSTEMS)},
    )
    steps: int = field(default=300, metadata={"help": "Updates of each model. Default: 300."})
    sentences: int = field(default=100, metadata={"help": "Number of sentences to translate. Default: 100."})


make_parser = partial(make_argument_parser, CheckArguments, __doc__)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    (arguments,) = make_parser().parse_args_into_dataclasses(argv)
    torch.manual_seed(0)
    missing = []
    print(f"| system | configuration | logits | greedy: same | beam {BEAMS}: same | right |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus.write(Path(folder), arguments.sentences)
        for name in arguments.systems:
            try:
                for row in SYSTEMS[name](corpus, arguments.steps):
                    print(row, flush=True)
            except ImportError as error:
                missing.append(f"{name} was not checked: it is not installed here ({error}).")
    print(*missing, sep="\n")


if __name__ == "__main__":
    main()
