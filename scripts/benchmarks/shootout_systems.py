"""The systems of shootout.py: what each needs installed, how it is set up, trained and asked to translate.

All of them get the same shape (`SHAPE`), the same pieces as vocabulary and the same `Settings`. A system makes
commands, and reads what its training left behind. It runs nothing by itself.
"""

import json
import re
import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

LAYERS, D_MODEL, FFN, HEADS, DROPOUT, SMOOTHING = 4, 128, 256, 4, 0.3, 0.1
BETAS = (0.9, 0.98)
LONGEST = 1024  # positions, where a system wants to know how many
BEAMS, LENGTH_PENALTY, TRANSLATION_BATCH, MAX_NEW_TOKENS = 5, 1.0, 64, 128
# What MarianMT's configuration and this package's have in common.
SHAPE: dict[str, Any] = {
    "d_model": D_MODEL,
    **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": FFN for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    "dropout": DROPOUT,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "scale_embedding": True,
    "max_position_embeddings": LONGEST,
}
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Settings:
    """How every system is trained.

    Args:
        updates: Number of updates.
        batch_tokens: The most tokens of a batch, of each side, padding included.
        pairs_per_batch: Sentence pairs of a batch on average, for a system that cannot count tokens.
        unsorted_batch_tokens: The limit of tokens at which batches of unsorted pairs have as many pairs.
        warmup_steps: Updates over which the learning rate grows to `learning_rate`.
        learning_rate: The highest rate.
        logging_steps: Updates between two lines of the log.
    """

    updates: int
    batch_tokens: int
    pairs_per_batch: int
    unsorted_batch_tokens: int
    warmup_steps: int
    learning_rate: float
    logging_steps: int


@dataclass(frozen=True)
class Run:
    """One training: `data` has train.src, train.tgt, test.src, ..., vocabulary.txt; `folder` is the run's own."""

    data: Path
    folder: Path
    python: Path
    settings: Settings
    seed: int

    def file(self, name: str) -> str:
        """A file of the run's folder."""
        return str(self.folder / name)


@dataclass(frozen=True)
class Command:
    """A command line, and files for its standard input and output; without the latter it prints into the log."""

    words: list[str]
    stdin: Path | None = None
    stdout: Path | None = None


@dataclass(frozen=True)
class Counts:
    """What was trained: target tokens seen, end marks included, padding not; parameters that are learned."""

    target_tokens: int
    parameters: int


class System(ABC):
    """A system: `distribution` is what its version is looked up by, `update` finds the update's number in a log."""

    title: str
    distribution: str
    update: re.Pattern[str]

    @abstractmethod
    def list_requirements(self) -> list[list[str]]:
        """The arguments of each `pip install`, one after the other."""

    @abstractmethod
    def prepare(self, run: Run) -> None:
        """Writes the files of settings into the run's folder."""

    @abstractmethod
    def train(self, run: Run) -> Command:
        """What trains."""

    @abstractmethod
    def translate(self, run: Run, source: Path, output: Path) -> Command:
        """What translates a file with the last weights of the training."""

    @abstractmethod
    def count(self, run: Run, log: str) -> Counts:
        """Counts from what the training wrote."""


def _pin(name: str) -> str:
    """The version of what is installed here, so that all systems have the same; a CPU build counts as any other."""
    return f"{name}=={version(name).partition('+')[0]}"


def _write_yaml(path: str, content: dict[str, Any]) -> None:
    """Writes settings without aliases: systems change sections of theirs, and another must not change with one."""
    Path(path).write_text(yaml.safe_dump(json.loads(json.dumps(content))), encoding="utf-8")


def _spell(value: Any) -> str:
    """A value as `--config_overrides` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _find_number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    if found is None:
        raise ValueError(f"The log of the training has no {pattern!r}.")
    return int(found[1])


class JoeyNMT(System):
    """JoeyNMT, whose batches are not sorted by length."""

    title = "JoeyNMT"
    distribution = "joeynmt"
    update = re.compile(r"Epoch\s+\d+, Step:\s+(\d+),")

    def list_requirements(self) -> list[list[str]]:
        """JoeyNMT pins an older protobuf and asks for linters: only what its imports need is installed beside it."""
        needed = ["datasets", "importlib_metadata", "matplotlib", "numpy", "packaging", "pandas", "plotly", "pyyaml"]
        needed += ["sacrebleu", "sacremoses", "sentencepiece", "subword-nmt", "tensorboard"]
        return [[_pin("torch"), *needed], ["--no-deps", "joeynmt==2.3.0"]]

    def prepare(self, run: Run) -> None:
        """One file to train; another one to translate, which names the checkpoint."""
        vocabulary = str(run.data / "vocabulary.txt")
        sides = {"src": "src", "trg": "tgt"}
        embeddings = {"embedding_dim": D_MODEL, "scale": True, "dropout": DROPOUT}
        stack = {"type": "transformer", "num_layers": LAYERS, "num_heads": HEADS, "embeddings": embeddings}
        stack |= {"hidden_size": D_MODEL, "ff_size": FFN, "dropout": DROPOUT, "layer_norm": "post"}
        settings = run.settings
        content: dict[str, Any] = {
            "name": "shootout",
            "model_dir": run.file("model"),
            "use_cuda": False,
            "random_seed": run.seed,
            "data": {
                "dataset_type": "plain",
                "train": str(run.data / "train"),
                "dev": str(run.data / "valid"),
                **{side: {"lang": name, "level": "word", "voc_file": vocabulary} for side, name in sides.items()},
            },
            "model": {"encoder": dict(stack), "decoder": dict(stack), "tied_embeddings": True, "tied_softmax": True},
            "training": {
                "optimizer": "adam",
                "adam_betas": list(BETAS),
                "label_smoothing": SMOOTHING,
                "scheduling": "warmupinversesquareroot",
                "learning_rate": settings.learning_rate,
                "learning_rate_warmup": settings.warmup_steps,
                "learning_rate_min": 0.0,
                "normalization": "tokens",
                "batch_size": settings.unsorted_batch_tokens,
                "batch_type": "token",
                "updates": settings.updates,
                "epochs": settings.updates,
                "logging_freq": settings.logging_steps,
                # Never: the last weights are saved anyway. It must be a multiple of the line above.
                "validation_freq": (settings.updates // settings.logging_steps + 1) * settings.logging_steps,
            },
            "testing": {
                "beam_size": BEAMS,
                "beam_alpha": LENGTH_PENALTY,
                "batch_size": TRANSLATION_BATCH,
                "batch_type": "sentence",
                "max_output_length": MAX_NEW_TOKENS,
            },
        }
        _write_yaml(run.file("train.yaml"), content)
        content["testing"]["load_model"] = run.file("model/latest.ckpt")
        _write_yaml(run.file("translate.yaml"), content)

    def train(self, run: Run) -> Command:
        """The command of the system."""
        return Command([str(run.python), "-m", "joeynmt", "train", run.file("train.yaml"), "--skip-test"])

    def translate(self, run: Run, source: Path, output: Path) -> Command:
        """From standard input to standard output: its option for an output file fails."""
        words = [str(run.python), "-m", "joeynmt", "translate", run.file("translate.yaml")]
        return Command(words, stdin=source, stdout=output)

    def count(self, run: Run, log: str) -> Counts:
        """The checkpoint has the tokens; only its own environment need be able to read it."""
        code = "import sys, torch; print(torch.load(sys.argv[1], weights_only=False)['stats_state']['total_tokens'])"
        words = [str(run.python), "-c", code, run.file("model/latest.ckpt")]
        printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return Counts(int(printed), _find_number(r"Total params: (\d+)", log))


class OpenNMTPy(System):
    """OpenNMT-py, whose layers are normalised before, not after."""

    title = "OpenNMT-py"
    distribution = "OpenNMT-py"
    update = re.compile(r"Step\s+(\d+)/\s*\d+; acc:")

    def list_requirements(self) -> list[list[str]]:
        """OpenNMT-py pins an older torch; what its imports need is installed beside it."""
        needed = ["configargparse", "ctranslate2", "fasttext-wheel", "numpy", "pyahocorasick", "pyonmttok", "pyyaml"]
        needed += ["rapidfuzz", "sacrebleu", "six", "spacy", "tensorboard"]
        return [[_pin("torch"), *needed], ["--no-deps", "OpenNMT-py==3.5.1"]]

    def prepare(self, run: Run) -> None:
        """The rate of its schedule "noam" is a factor."""
        settings = run.settings
        vocabulary = str(run.data / "vocabulary.txt")
        paths = {f"path_{side}": str(run.data / f"train.{side}") for side in ("src", "tgt")}
        content = {
            "data": {"corpus": {**paths, "transforms": [], "weight": 1}},
            **{f"{side}_vocab": vocabulary for side in ("src", "tgt")},
            **{f"{side}_vocab_size": 10**6 for side in ("src", "tgt")},  # all that the file has
            "vocab_size_multiple": 1,
            **dict.fromkeys(("share_vocab", "share_embeddings", "share_decoder_embeddings"), True),
            "save_model": run.file("model"),
            "seed": run.seed,
            **dict.fromkeys(("encoder_type", "decoder_type"), "transformer"),
            "position_encoding": True,
            "layers": LAYERS,
            **dict.fromkeys(("hidden_size", "word_vec_size"), D_MODEL),
            "heads": HEADS,
            "transformer_ff": FFN,
            **dict.fromkeys(("add_qkvbias", "add_ffnbias"), True),
            "dropout": [DROPOUT],
            "attention_dropout": [0.0],
            "label_smoothing": SMOOTHING,
            "param_init": 0.0,
            "param_init_glorot": True,
            "optim": "adam",
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "max_grad_norm": 0,
            "decay_method": "noam",
            "warmup_steps": settings.warmup_steps,
            "learning_rate": settings.learning_rate * (D_MODEL * settings.warmup_steps) ** 0.5,
            "normalization": "tokens",
            "batch_type": "tokens",
            "batch_size": settings.batch_tokens,
            "batch_size_multiple": 1,
            # As many pairs are read ahead and sorted; its default keeps several copies of a small corpus in memory.
            "bucket_size": len((run.data / "train.src").read_text(encoding="utf-8").splitlines()),
            "num_workers": 0,
            "train_steps": settings.updates,
            "save_checkpoint_steps": settings.updates,
            "report_every": settings.logging_steps,
        }
        _write_yaml(run.file("train.yaml"), content)

    def train(self, run: Run) -> Command:
        """The command of the system."""
        return Command([str(run.python), "-m", "onmt.bin.train", "-config", run.file("train.yaml")])

    def translate(self, run: Run, source: Path, output: Path) -> Command:
        """The length penalty is GNMT's, and no ratio of lengths ends a translation."""
        words = [str(run.python), "-m", "onmt.bin.translate", "-src", str(source), "-output", str(output)]
        words += ["-model", run.file(f"model_step_{run.settings.updates}.pt"), "-beam_size", str(BEAMS)]
        words += ["-length_penalty", "wu", "-alpha", str(LENGTH_PENALTY), "-batch_size", str(TRANSLATION_BATCH)]
        return Command([*words, "-max_length", str(MAX_NEW_TOKENS), "-max_length_ratio", "0"])

    def count(self, run: Run, log: str) -> Counts:
        """The log has the mean number of target tokens of the batches since the line before."""
        lines = re.findall(r"Step\s+(\d+)/.*?bsz:\s*\d+/\s*(\d+)/", log)
        if not lines:
            raise ValueError("The log of the training has no sizes of batches.")
        tokens = last = 0
        for update, mean in ((int(update), int(mean)) for update, mean in lines):
            tokens, last = tokens + (update - last) * mean, update
        return Counts(tokens, _find_number(r"number of parameters:\s*(\d+)", log))


class Marian(System):
    """MarianMT by `Seq2SeqTrainer`, whose batches are numbers of pairs, sorted by the source's length."""

    title = "MarianMT, Seq2SeqTrainer"
    distribution = "transformers"
    update = re.compile(r"^update (\d+) of")

    def list_requirements(self) -> list[list[str]]:
        """The library as it is here."""
        return [[_pin("torch"), _pin("transformers"), _pin("accelerate")]]

    def prepare(self, run: Run) -> None:
        """Settings for shootout_marian.py."""
        settings = run.settings
        content = {
            "train_files": [str(run.data / f"train.{side}") for side in ("src", "tgt")],
            "vocabulary": str(run.data / "vocabulary.txt"),
            "shape": SHAPE,
            "training": {
                "output_dir": run.file("model"),
                "seed": run.seed,
                "max_steps": settings.updates,
                "per_device_train_batch_size": settings.pairs_per_batch,
                "train_sampling_strategy": "group_by_length",
                "label_smoothing_factor": SMOOTHING,
                "learning_rate": settings.learning_rate,
                "lr_scheduler_type": "inverse_sqrt",
                "warmup_steps": settings.warmup_steps,
                "adam_beta1": BETAS[0],
                "adam_beta2": BETAS[1],
                "weight_decay": 0.0,
                "max_grad_norm": 0.0,
                "logging_steps": settings.logging_steps,
                "save_strategy": "no",
                "report_to": [],
                "disable_tqdm": True,
                "use_cpu": True,
                "dataloader_pin_memory": False,
            },
            "generation": {"num_beams": BEAMS, "length_penalty": LENGTH_PENALTY, "max_new_tokens": MAX_NEW_TOKENS},
            "batch_size": TRANSLATION_BATCH,
        }
        Path(run.file("settings.json")).write_text(json.dumps(content), encoding="utf-8")

    def train(self, run: Run) -> Command:
        """The other script, in the environment."""
        return Command([*self._script(run), "train", run.file("settings.json")])

    def translate(self, run: Run, source: Path, output: Path) -> Command:
        """The other script, in the environment."""
        return Command([*self._script(run), "translate", run.file("settings.json"), str(source), str(output)])

    def count(self, run: Run, log: str) -> Counts:
        """The script has written them."""
        return Counts(**json.loads(Path(run.file("model/counts.json")).read_text(encoding="utf-8")))

    @staticmethod
    def _script(run: Run) -> list[str]:
        return [str(run.python), str(Path(__file__).with_name("shootout_marian.py"))]


class Ours(System):
    """This package, as its own command trains."""

    title = "vanilla_transformer"
    distribution = "vanilla-transformer"
    update = re.compile(r"^step ([\d,]+) of")

    def list_requirements(self) -> list[list[str]]:
        """The checkout that this script is part of, with the same versions of the libraries as the other systems."""
        return [[_pin("torch"), _pin("transformers"), _pin("accelerate"), "--editable", f"{_ROOT}[train]"]]

    def prepare(self, run: Run) -> None:
        """Arguments of `vanilla-transformer train`."""
        settings = run.settings
        pieces = (run.data / "vocabulary.txt").read_text(encoding="utf-8").splitlines()
        content = {
            "preset": "base",
            # Biases everywhere, as the other systems have.
            "config_overrides": ",".join(f"{name}={_spell(value)}" for name, value in self.list_overrides().items()),
            "tokenizer_type": "wordlevel",
            "vocab_size": len(pieces) + 4,  # and the special tokens
            "train_file": [str(run.data / f"train.{side}") for side in ("src", "tgt")],
            "output_dir": run.file("model"),
            "seed": run.seed,
            "max_steps": settings.updates,
            "max_source_tokens": settings.batch_tokens,
            "max_target_tokens": settings.batch_tokens,
            "learning_rate": settings.learning_rate,
            "warmup_steps": settings.warmup_steps,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "max_grad_norm": 0.0,
            "logging_steps": settings.logging_steps,
            "eval_strategy": "no",
            "save_strategy": "no",
            "report_to": ["none"],
            "disable_tqdm": True,
            "use_cpu": True,
        }
        _write_yaml(run.file("train.yaml"), content)

    @staticmethod
    def list_overrides() -> dict[str, Any]:
        """The fields of the configuration in which the model differs from the preset."""
        return {**SHAPE, "attention_bias": True, "label_smoothing": SMOOTHING, "initializer_gain": 0.5}

    def train(self, run: Run) -> Command:
        """The package's command."""
        return Command([str(run.python), "-m", "vanilla_transformer", "train", run.file("train.yaml")])

    def translate(self, run: Run, source: Path, output: Path) -> Command:
        """The package's command; the length penalty of its models is GNMT's."""
        words = [str(run.python), "-m", "vanilla_transformer", "translate", "--model_name_or_path", run.file("model")]
        words += ["--input_file", str(source), "--output_file", str(output), "--overwrite", "--disable_tqdm"]
        words += ["--device", "cpu", "--num_beams", str(BEAMS), "--length_penalty", str(LENGTH_PENALTY)]
        return Command([*words, "--batch_size", str(TRANSLATION_BATCH), "--max_new_tokens", str(MAX_NEW_TOKENS)])

    def count(self, run: Run, log: str) -> Counts:
        """They are in metrics.json."""
        content = json.loads(Path(run.file("model/metrics.json")).read_text(encoding="utf-8"))
        return Counts(content["tokens_seen"]["target"], content["parameters"])


SYSTEMS: dict[str, System] = {"joeynmt": JoeyNMT(), "opennmt_py": OpenNMTPy(), "marian": Marian(), "ours": Ours()}
