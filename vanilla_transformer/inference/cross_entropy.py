"""Pairs filtered by what translation models think of them: dual conditional cross-entropy.

Junczys-Dowmunt (2018), Dual Conditional Cross-Entropy Filtering of Noisy Parallel Corpora: with H the cross-entropy of
a text given the other one, per token, pairs are good where |H_forward - H_reverse| + (H_forward + H_reverse) / 2 is
low: both models find the pair likely, and as likely as each other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vanilla_transformer.data.duplicates import CorpusRule, Flags
from vanilla_transformer.model.pipeline_vanilla_transformer import check_languages, find_directions
from vanilla_transformer.tasks import find_prefix, find_task

from .files import describe_settings
from .loading import is_multilingual, load_model_and_tokenizer, set_languages
from .losses import score_pairs


@dataclass(kw_only=True)
class DualCrossEntropyFilter(CorpusRule):
    """Keeps the pairs whose score is at most `threshold`, in nats per token, or the `share` of them that is best.

    `model` translates the source to the target, `reverse_model` back; without that one, the score is H_forward.
    `languages`, the source's and the target's, are needed by multilingual models.
    """

    model: str = ""
    reverse_model: str | None = None
    threshold: float | None = None
    share: float | None = None
    languages: Any = None
    batch_size: int = 32
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError(f"{self}: model must be given, a folder or a name on the Hub.")
        if (self.threshold is None) == (self.share is None):
            given = f"threshold is {self.threshold} and share is {self.share}"
            raise ValueError(f"{self}: {given}; one of them must be given.")
        for name in ("threshold", "share"):
            if (value := getattr(self, name)) is not None:
                self._check(name, value, 0.0, ())  # YAML takes 1e-3, without a point, for a string
        is_pair = isinstance(self.languages, list | tuple) and [*map(type, self.languages)] == [str, str]
        if self.languages is not None and not is_pair:
            raise ValueError(f"{self}: languages is {self.languages!r}; it must be two names, such as [en, de].")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"{self}: share is {self.share}; it must be above 0, and at most 1.")

    def identify(self) -> dict[str, Any]:
        """The parameters that decide, and which weights and vocabularies the models have."""
        decisive = {name: value for name, value in self.parameters.items() if name not in ("batch_size", "device")}
        return decisive | {"models": [describe_settings(*each[:2], {}) for each in self._models]}

    @cached_property
    def _models(self) -> list[tuple[Any, Any, str]]:
        """The models with their tokenizers, and with what each wants before its sources."""
        names = [self.model] if self.reverse_model is None else [self.model, self.reverse_model]
        models = []
        for name, step in zip(names, (1, -1), strict=False):
            model, tokenizer = load_model_and_tokenizer(name, device=self.device, dtype=self.dtype)
            langs = None if self.languages is None else self.languages[::step]
            if langs is not None:
                check_languages(model, *langs)
                if is_multilingual(tokenizer):
                    set_languages(tokenizer, source_lang=langs[0], target_lang=langs[1])
            elif is_multilingual(tokenizer) or len(find_directions(model.config)) > 1:
                raise ValueError(f"{self}: languages must be given, since a model knows several.")
            models.append((model, tokenizer, find_prefix(model.config, find_task(model.config), langs=langs)))
        return models

    def find_values(self, pairs: list[tuple[str, str]]) -> list[Any]:
        """The scores, the lower the better."""
        texts = [[source for source, _ in pairs], [target for _, target in pairs]]
        entropies = [
            score_pairs(
                model,
                tokenizer,
                [prefix + text for text in texts[::step][0]],
                texts[::step][1],
                batch_size=self.batch_size,
            )
            for step, (model, tokenizer, prefix) in zip((1, -1), self._models, strict=False)
        ]
        if len(entropies) == 1:
            return entropies[0]
        return [abs(one - other) + (one + other) / 2 for one, other in zip(*entropies, strict=True)]

    def decide(self, values: Iterable[npt.NDArray[Any]]) -> Iterator[Flags]:
        """Which scores are low enough; for a share, all of them are held, in up to 12 bytes each."""
        limit = self.threshold
        if self.share is not None:
            values = list(values)
            scores = np.sort(np.concatenate([*values, np.array([], dtype=np.float32)]))
            kept = round(self.share * len(scores))
            limit = float(scores[kept - 1]) if kept else -np.inf
        for part in values:
            yield part <= limit
