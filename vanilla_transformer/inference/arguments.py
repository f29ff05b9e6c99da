"""The command-line arguments of everything that translates."""

from __future__ import annotations  # the types of methods are not imported: --help does not wait for torch

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vanilla_transformer.options import DISABLE_TQDM, option

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from vanilla_transformer.tasks import Task

_SEARCH = ("num_beams", "length_penalty", "length_penalty_type", "max_new_tokens", "cache_implementation")


@dataclass
class InferenceArguments:
    """Command-line arguments of every script that translates: the model, where it runs, and how it searches."""

    model_name_or_path: str = option("Folder or Hub name of a sequence-to-sequence model.")
    revision: str = option("Branch, tag or commit on the Hub. Default: main.", "main")
    trust_remote_code: bool = option("Let code from the checkpoint run.", False)
    device: str = option("auto (default: cuda, mps or cpu), or one such as cuda:1.", "auto")
    dtype: str = option("auto (default: as saved), float32, bfloat16 or float16.", "auto")
    num_beams: int | None = option("Beams; 1 is greedy search. Default: the model's generation config.", None)
    length_penalty: float | None = option("Above 0 favours longer translations. Default: as num_beams.", None)
    length_penalty_type: str | None = option(
        "gnmt (the paper's) or transformers (length ** length_penalty). Default: as num_beams.", None
    )
    max_new_tokens: int | None = option("Limit of a translation, in tokens. Default: as num_beams.", None)
    cache_implementation: str | None = option(
        "static: the search keeps its state in static memory, and a CUDA GPU records its step, which is then several "
        "times as fast. Default: as num_beams.",
        None,
    )
    max_source_length: int | None = option("Tokens that sources are cut to. Default: the tokenizer's limit.", None)
    batch_size: int | None = option("The most sentences of a batch. Default: --max_batch_tokens decides.", None)
    max_batch_tokens: int | None = option(
        "The most tokens of a batch: sentences * tokens of the longest source * beams. Default: 8192 (4096 for models "
        "of the library), or no limit where --batch_size is given.",
        None,
    )
    task: str | None = option(
        "What the model is to do: translation, summarization, text2text. Default: what its configuration names.", None
    )
    source_prefix: str | None = option("Put before each source. Default: what the model's configuration has.", None)
    source_lang: str | None = option("Source language, such as en or eng_Latn; must be the model's, if it says.", None)
    target_lang: str | None = option("Target language, such as de or deu_Latn, likewise.", None)
    disable_tqdm: bool = option(DISABLE_TQDM, False)

    def __post_init__(self) -> None:
        if (self.source_lang is None) != (self.target_lang is None):
            langs = f"source_lang is {self.source_lang!r} and target_lang is {self.target_lang!r}"
            raise ValueError(f"{langs}; give both or neither.")
        if self.num_beams is not None and self.num_beams < 1:
            raise ValueError(f"num_beams is {self.num_beams}; it must be at least 1, which is greedy search.")
        if self.task is not None:
            from vanilla_transformer.tasks import get_task

            get_task(self.task)

    def find_task(self, model: PreTrainedModel) -> Task:
        """The task that was given, or else the one that the model is for."""
        from vanilla_transformer.tasks import find_task, get_task

        return find_task(model.config) if self.task is None else get_task(self.task)

    def find_prefix(self, model: PreTrainedModel) -> str:
        """What to put before each source: what was given, or else what the model wants for the task."""
        from vanilla_transformer.model.pipeline_vanilla_transformer import find_directions
        from vanilla_transformer.tasks import TRANSLATION, find_prefix

        if self.source_prefix is not None:
            return self.source_prefix
        task, pairs = self.find_task(model), find_directions(model.config)
        langs = None if self.source_lang is None or self.target_lang is None else (self.source_lang, self.target_lang)
        is_unclear = len(pairs) > 1 if langs is None else bool(pairs) and langs not in pairs
        if task is TRANSLATION and is_unclear:
            known = ", ".join(map(" to ".join, pairs))
            raise ValueError(
                f"The model translates {known}: name the languages with --source_lang and --target_lang, or what it "
                "wants before each source with --source_prefix."
            )
        return find_prefix(model.config, task, langs=langs)

    @property
    def place(self) -> dict[str, Any]:
        """Where models come from, and where they go to: arguments of `load_model_and_tokenizer`."""
        return {name: getattr(self, name) for name in ("device", "dtype", "revision", "trust_remote_code")}

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
        """The model, its tokenizer, and the arguments of `generate` that were given or that the languages ask for."""
        from .loading import load_model_and_tokenizer

        model, tokenizer = load_model_and_tokenizer(self.model_name_or_path, **self.place)
        return model, tokenizer, self.collect_settings(model, tokenizer)

    def collect_settings(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The arguments of `generate` that were given or that the languages, set in the tokenizer, ask for."""
        from vanilla_transformer.model.pipeline_vanilla_transformer import check_languages

        from .loading import is_multilingual, set_languages

        check_languages(model, self.source_lang, self.target_lang)
        given = {name: getattr(self, name) for name in _SEARCH}
        generate_kwargs = {name: value for name, value in given.items() if value is not None}
        if not is_multilingual(tokenizer):
            return generate_kwargs
        if self.source_lang is not None and self.target_lang is not None:
            generate_kwargs |= set_languages(tokenizer, source_lang=self.source_lang, target_lang=self.target_lang)
        elif model.generation_config.forced_bos_token_id is None:
            raise ValueError(
                "The model knows many languages: name those of the text and of its translation with --source_lang and "
                "--target_lang."
            )
        return generate_kwargs


# Options that are without effect where another is not given.
GLOSSARY_NEEDS = {"glossary": {"glossary_match", "glossary_case", "glossary_lang"}}


@dataclass
class GlossaryArguments:
    """The command-line arguments of what translates with a glossary."""

    glossary: str | None = option(
        "UTF-8 text: a term of the source, a tab, its translation, which must appear, further tabs before alternatives "
        "of that; a term per line. Needs beam search. Default: no glossary.",
        None,
    )
    glossary_match: Literal["words", "endings", "stems"] = option(
        "What is a term: the same words; words with up to 3 more letters; or words of the same stem, which needs "
        "snowballstemmer. Default: words.",
        "words",
    )
    glossary_case: bool = option("Tell capital from small letters in terms.", False)
    glossary_lang: str | None = option(
        "Source language, for stems: such as en, or english. Default: --source_lang, or what the model says.", None
    )

    def find_glossary(self, model: Any, source_lang: str | None) -> dict[str, Any]:
        """The glossary that was named, read, as an argument of `translate`; none without one."""
        if self.glossary is None:
            return {}
        if self.glossary_lang is not None and self.glossary_match != "stems":
            raise ValueError("--glossary_lang is for --glossary_match stems.")
        from .glossary import Glossary

        langs = getattr(model.config, "langs", None) or [None]
        options: dict[str, Any] = {"match": self.glossary_match, "case_sensitive": self.glossary_case}
        options["language"] = self.glossary_lang or source_lang or langs[0]
        return {"glossary": Glossary.from_file(self.glossary, **options)}
