"""Glossaries: where a term stands in a source, its translation must stand in the translation.

Terms are found by words: a text is cut into runs of letters and digits, each other sign stands alone, and so does each
character of scripts without spaces. The longest term counts, from the left, and each time that it appears. What is
found is searched for with beams (`BeamSearch`, `ForcedWords`), as whole words: "Begriff" is not in "Begriffe" or
"Grundbegriff", but in "Begriff-" and "(Begriff)". Other forms of a translation are given as alternatives.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from tokenizers import Regex, pre_tokenizers
from transformers import BatchEncoding, FSMTTokenizer, GenerationMixin, PreTrainedTokenizerBase

from vanilla_transformer.data.detection import find_iso_code
from vanilla_transformer.data.lines import read_lines
from vanilla_transformer.data.vocabularies import get_vocabularies
from vanilla_transformer.files import explain_missing
from vanilla_transformer.model import pipeline_vanilla_transformer
from vanilla_transformer.model.decoding_vanilla_transformer import Phrase, TokenSet, Words
from vanilla_transformer.model.pipeline_vanilla_transformer import is_vanilla
from vanilla_transformer.model.search_vanilla_transformer import BeamSearch

from .loading import is_multilingual

Match = Literal["words", "endings", "stems"]
_LONGEST_ENDING, _SHORTEST_WORD = 3, 3  # letters that may follow a word, and that it must have for that

_AT_ONCE = 128  # tokens whose texts are read together

# Scripts that put no space between words, and Japanese marks that Unicode counts to no script.
_SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\x{30FC}\x{FF70}\x{FF9E}\x{FF9F}"
_UNITS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(pattern=Regex(r"\s+"), behavior="removed"),
        pre_tokenizers.Split(
            pattern=Regex(rf"[{_SPACELESS}]\p{{M}}*|(?:(?![{_SPACELESS}])[\p{{L}}\p{{M}}\p{{N}}])+|."),
            behavior="isolated",
        ),
    ]
)

# The stemmers of snowballstemmer by the codes of their languages (ISO 639-1).
_STEMMERS = dict(
    re.findall(
        r"(\w+) (\w+)",
        "ar arabic, hy armenian, eu basque, ca catalan, cs czech, da danish, nl dutch, en english, eo esperanto, "
        "et estonian, fi finnish, fr french, de german, el greek, hi hindi, hu hungarian, id indonesian, ga irish, "
        "it italian, lt lithuanian, ne nepali, nb norwegian, no norwegian, fa persian, pl polish, pt portuguese, "
        "ro romanian, ru russian, sr serbian, es spanish, sv swedish, ta tamil, tr turkish, yi yiddish",
    )
)


def cut(text: str) -> list[str]:
    """The words and signs of a text, in Unicode's NFC."""
    return [unit for unit, _ in _UNITS.pre_tokenize_str(unicodedata.normalize("NFC", text))]


class _Term(NamedTuple):
    units: tuple[str, ...]
    keys: tuple[str, ...]  # what each word of a text must agree with
    translations: tuple[str, ...]


class Glossary:
    """Terms and their translations.

    Args:
        terms: The translation of each term, or a list of alternatives, one of which must appear.
        match: What is a term's word: `"words"` the word itself; `"endings"` also the word with up to three more letters
            (of three letters or more); `"stems"` all words with the same stem, which needs `language` and the package
            snowballstemmer (the extra "glossary").
        case_sensitive: Whether "US" is another term than "us".
        language: The source's, for stems: a code such as `"en"`, or a name of snowballstemmer's such as `"english"`.

    Raises:
        ValueError: If it is no mapping, a term or translation has no words, or an option is unknown.

    Example:
        ```python
        glossary = Glossary({"term": ["Begriff", "Begriffe"], "neural network": "neuronales Netz"}, match="endings")
        pipeline("translation", model="out/my-model")("Two terms.", glossary=glossary, num_beams=5)
        ```
    """

    def __init__(
        self,
        terms: Mapping[str, str | Sequence[str]],
        *,
        match: Match = "words",
        case_sensitive: bool = False,
        language: str | None = None,
    ) -> None:
        if match not in get_args(Match):
            raise ValueError(f"match is {match!r}; it must be one of {', '.join(get_args(Match))}.")
        if not isinstance(terms, Mapping):
            raise ValueError(
                f"The glossary is {terms!r}; it must be a mapping of terms to translations. "
                "Glossary.from_file reads one from a file."
            )
        self.match, self.case_sensitive, self.language = match, case_sensitive, language
        self._stem = _find_stemmer(language) if match == "stems" else None
        merged: dict[tuple[str, ...], dict[str, None]] = {}  # alternatives in their order
        for term, translations in terms.items():
            alternatives = [translations] if isinstance(translations, str) else translations
            if not isinstance(term, str) or not (units := self._cut(term)):
                raise ValueError(f"The glossary's term {term!r} must be a text with at least one word.")
            if not isinstance(alternatives, Sequence) or not alternatives or not all(map(_is_text, alternatives)):
                raise ValueError(
                    f"The glossary translates {term!r} by {translations!r}; it must be a text, or a list of texts, "
                    "one of which must appear."
                )
            merged.setdefault(tuple(units), {}).update(dict.fromkeys(" ".join(each.split()) for each in alternatives))
        self._by_first: dict[str, list[_Term]] = {}
        for found, known in merged.items():
            entry = _Term(found, tuple(self._read(unit)[0] for unit in found), tuple(known))
            self._by_first.setdefault(entry.keys[0], []).append(entry)
        self.translations = list(dict.fromkeys(each for known in merged.values() for each in known))
        content = json.dumps([[*found, list(known)] for found, known in merged.items()])
        self._digest = hashlib.sha256(content.encode()).hexdigest()

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **options: Any) -> "Glossary":
        """Reads a term a line: the term, a tab, its translation, and further tabs before alternatives of that.

        `options` are those of the class. The file is UTF-8 text, `.gz`, `.bz2` and `.xz` too; empty lines do not count.
        """
        terms: dict[str, list[str]] = {}
        for number, line in enumerate(read_lines(Path(path)), start=1):
            if not line.strip():
                continue
            term, *translations = (field.strip() for field in line.split("\t"))
            if not term or not any(translations):
                raise ValueError(
                    f"{path}, line {number}: {line.strip()!r} must have a term, a tab, and what translates it."
                )
            terms.setdefault(term, []).extend(filter(None, translations))
        return cls(terms, **options)

    def __repr__(self) -> str:
        options = f"match={self.match!r}, case_sensitive={self.case_sensitive}, language={self.language!r}"
        return f"Glossary({sum(map(len, self._by_first.values()))} terms, sha256={self._digest}, {options})"

    def find(self, text: str) -> list[tuple[str, ...]]:
        """The alternatives of what must appear in the translation of a text: for each term in it, in its order."""
        units = self._cut(text)
        keys = list(map(self._read, units))
        found, place = [], 0
        while place < len(units):
            fitting = [
                term
                for key in keys[place]
                for term in self._by_first.get(key, ())
                if len(term.keys) <= len(units) - place
                and all(key in known for key, known in zip(term.keys, islice(keys, place, None), strict=False))
            ]
            if not fitting:
                place += 1
                continue
            best = max(fitting, key=lambda term: (len(term.units), _count_same(term.units, units[place:])))
            found.append(best.translations)
            place += len(best.units)
        return found

    def __len__(self) -> int:
        """The number of ways to translate its terms; 0 without terms."""
        return len(self.translations)

    def _cut(self, text: str) -> list[str]:
        return cut(text if self.case_sensitive else unicodedata.normalize("NFC", text).casefold())

    def _read(self, unit: str) -> list[str]:
        """What a term's word may be where this word stands in a text; the first is what it is as a term's word."""
        if self._stem is not None:
            return [self._stem(unit)]
        is_word = all(unicodedata.category(character)[0] in "LM" for character in unit)  # letters, and marks on them
        endings = range(1, _LONGEST_ENDING + 1 if self.match == "endings" and is_word else 1)
        return [unit, *(unit[:-count] for count in endings if len(unit) - count >= _SHORTEST_WORD)]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _count_same(units: Sequence[str], others: Sequence[str]) -> int:
    return sum(one == other for one, other in zip(units, others, strict=False))


def _find_stemmer(language: str | None) -> Callable[[str], str]:
    with explain_missing("Stems need snowballstemmer and Babel", extra="glossary", packages="snowballstemmer Babel"):
        import snowballstemmer

        name = None if language is None else _STEMMERS.get(find_iso_code(language), language)
    if name not in snowballstemmer.algorithms():
        legal = ", ".join([*_STEMMERS, *sorted(snowballstemmer.algorithms())])
        raise ValueError(f"Stems need the source's language; it is {language!r}, and must be one of {legal}.")
    stem: Callable[[str], str] = snowballstemmer.stemmer(name).stemWord
    return stem


# What a tokenizer makes of the translations


class TargetTerms:
    """How a tokenizer writes terms of the target, with a space before them or not, and between which tokens.

    What stands beside a token is read off the texts that the tokenizer decodes, so that any way to mark spaces, or the
    rest of a word, will do.

    Args:
        tokenizer: The model's.
        num_tokens: The model's, of the target.
        ends: The tokens that end a translation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_tokens: int, ends: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.num_tokens = num_tokens
        self.ends = ends
        self._phrases: dict[str, list[Phrase]] = {}
        self._sets: dict[tuple[int, bool], TokenSet | None] = {}  # by the way to write a term, and the side

    def write(self, terms: Iterable[str]) -> dict[str, list[Phrase]]:
        """Returns the phrases of each term, one of which must appear.

        Raises:
            ValueError: If the tokenizer cannot write a term.
        """
        new = [term for term in terms if term not in self._phrases]
        quote = self._encode(['"'])[0]
        plain, spaced, quoted = (self._encode([mark + term for term in new]) for mark in ("", " ", '"'))
        behind = [ids[len(quote) :] if ids[: len(quote)] == quote else [] for ids in quoted]
        for term, *ways in zip(new, plain, spaced, behind, strict=True):
            self._phrases[term] = self._write(term, ways)
        return self._phrases

    def _write(self, term: str, ways: Sequence[Sequence[int]]) -> list[Phrase]:
        found: dict[tuple[int, ...], Phrase] = {}
        text, *others = self._decode([ways[0], *([*ways[0], *ids] for ids in ways)])
        for way, (ids, both) in enumerate(zip(ways, others, strict=True)):
            is_same = both in (text.rstrip() + text, f"{text.rstrip()} {text.lstrip()}")
            if not ids or self.tokenizer.unk_token_id in ids or not is_same:
                continue
            before = self._find_set(way, ids, is_behind=False) if _is_in_word(term[0]) else None
            after = self._find_set(way, ids, is_behind=True) if _is_in_word(term[-1]) else None
            found[tuple(ids)] = Phrase(tuple(ids), before, after)
        if not found:
            raise ValueError(
                f"The tokenizer cannot write the glossary's translation {term!r}: it has no tokens for some of it."
            )
        return list(found.values())

    def _find_set(self, way: int, ids: Sequence[int], is_behind: bool) -> TokenSet | None:
        """The tokens that may stand beside a word that is written in this way; `None` if all may."""
        if (way, is_behind) not in self._sets:
            known = range(min(self.num_tokens, max(get_vocabularies(self.tokenizer)[1].values()) + 1))
            word, nothing = (text.strip() for text in self._decode([ids, [*ids, *ids]]))
            nothing = nothing[len(word) : -len(word)]
            has_text, members = torch.zeros(2, self.num_tokens, dtype=torch.bool)
            for token, between in enumerate(self._read_between(word, ids, known)):
                # A token without text, unless it ends the translation, keeps apart nothing.
                has_text[token] = between != nothing
                beside = between[:1] if is_behind else between[-1:]
                members[token] = between != nothing and not _is_in_word(beside)
            is_any = bool(members[has_text].all())
            members[list(self.ends)] = True
            self._sets[way, is_behind] = None if is_any else TokenSet(members)
        return self._sets[way, is_behind]

    def _read_between(self, word: str, ids: Sequence[int], tokens: Sequence[int]) -> Iterator[str]:
        """What is between two places of a word with each of these tokens between them; many are read at once."""
        for start in range(0, len(tokens), _AT_ONCE):
            part = tokens[start : start + _AT_ONCE]
            found = self._decode([list(chain(ids, *([token, *ids] for token in part)))])[0].split(word)[1:-1]
            if len(found) == len(part):
                yield from found
            elif len(part) == 1:  # the word is in the token, too
                yield word.join(found)
            else:
                half = len(part) // 2
                yield from self._read_between(word, ids, part[:half])
                yield from self._read_between(word, ids, part[half:])

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if isinstance(self.tokenizer, FSMTTokenizer):  # its __call__ knows the source's vocabulary only
            vocabulary, unknown = get_vocabularies(self.tokenizer)[1], self.tokenizer.unk_token_id
            pieces = [self.tokenizer.tokenize(text) for text in texts]
            return [[vocabulary.get(piece, unknown) for piece in each] for each in pieces]
        if not texts:
            return []
        # Multilingual ones have one way for all languages, and may not know yet which is the target's.
        side = "text" if is_multilingual(self.tokenizer) else "text_target"
        found: list[list[int]] = self.tokenizer(**{side: texts}, add_special_tokens=False)["input_ids"]
        return found

    def _decode(self, ids: list[Any]) -> list[str]:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return self.tokenizer.batch_decode(ids, **options)


@cache
def _is_in_word(character: str) -> bool:
    """Whether letters beside this character are in the same word; so they may be beside a part of a character."""
    if not character:
        return False
    if character == "\N{REPLACEMENT CHARACTER}":
        return True
    # Those of scripts without spaces are units by themselves.
    return unicodedata.category(character)[0] in "LMN" and len(cut("a" + character)) == 1


# The search


@dataclass
class SourceWords:
    """What must appear in the translation of one text; a class, for pipelines take lists and tuples apart."""

    words: Words


class ModelGlossary:
    """A glossary for a model and its tokenizer.

    Raises:
        ValueError: If the tokenizer cannot write a translation, or the model does not search with torch.
    """

    def __init__(
        self, glossary: Glossary | Mapping[str, Any], model: Any, tokenizer: PreTrainedTokenizerBase, terms: Any = None
    ) -> None:
        if not isinstance(model, GenerationMixin):
            raise ValueError(
                f"A glossary needs a model that searches with torch, and this is a {type(model).__name__}: load the "
                "model itself (--engine transformers), not what was exported."
            )
        self.model: Any = model
        self.tokenizer = tokenizer
        self.glossary = glossary if isinstance(glossary, Glossary) else Glossary(glossary)
        self.phrases = (terms or make_terms(model, tokenizer)).write(self.glossary.translations)

    def find(self, text: str, token_ids: Any = (), all_ids: Any = ()) -> SourceWords:
        """What must appear in the translation of a text; of one that was truncated, of the part that is translated.

        That is told by its tokens, and by all that it had. A prefix may be in front of both.
        """
        if len(token_ids) < len(all_ids):
            reader = getattr(self.tokenizer, "source_tokenizer", self.tokenizer)
            kept, whole = (len(reader.decode(ids, skip_special_tokens=True)) for ids in (token_ids, all_ids))
            text = text[: max(len(text) - (whole - kept), 0)]
        found = self.glossary.find(text)
        return SourceWords([[phrase for each in texts for phrase in self.phrases[each]] for texts in found])

    def make_arguments(self, sources: Sequence[SourceWords]) -> dict[str, Any]:
        """The arguments of `generate` by which translations have what they must; none if that is nothing."""
        return force_words(self.model, [source.words for source in sources])


def force_words(model: Any, words: Sequence[Words]) -> dict[str, Any]:
    """The arguments by which `generate` finds translations with the words of each source sentence.

    For all encoder-decoders of the library, which do not know `force_words_ids_per_sentence`, too. Words are lists of
    alternatives, each a `Phrase`. Without any, there are no arguments.
    """
    if not any(words):
        return {}
    if is_vanilla(model):
        return {"force_words_ids_per_sentence": words}
    return {"custom_generate": partial(_search, words=words)}


def make_terms(model: Any, tokenizer: PreTrainedTokenizerBase) -> TargetTerms:
    """What writes terms for a model."""
    num_tokens = getattr(model.config, "target_vocab_size", None) or model.get_output_embeddings().weight.shape[0]
    ends = model.generation_config.eos_token_id
    return TargetTerms(tokenizer, num_tokens, [] if ends is None else [ends] if isinstance(ends, int) else ends)


def check_beams(num_beams: int | None, do_sample: bool | None = None) -> None:
    """Refuses searches in which no words can be made to appear, whether or not this text has any."""
    if (num_beams or 1) < 2 or do_sample:
        raise ValueError(
            "A glossary needs beam search: set num_beams (--num_beams) to 2 or more, 5 or more is better, and "
            f"do_sample=False; here are num_beams={num_beams} and do_sample={bool(do_sample)}."
        )


def _search(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    *,
    words: Sequence[Words],
    **model_kwargs: Any,
) -> Any:
    """Beam search of this package for other models of the library, as their `generate` calls it."""
    check_beams(generation_config.num_beams, generation_config.do_sample)
    rules = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria, "synced_gpus": synced_gpus}
    rules |= {"generation_config": generation_config, "model_kwargs": model_kwargs, "words": words}
    return BeamSearch(model, input_ids, **rules).run()


class TranslationPipeline(pipeline_vanilla_transformer.TranslationPipeline):
    """As the pipeline that travels with models (see there), and with glossaries, which need this package.

    The constructor and each call take `glossary`, a `Glossary`, or the translation of each term, `{"term": "Begriff"}`,
    or its alternatives. A call's takes the place of the constructor's; `{}` is none. It needs `num_beams` of 2 or more.

    Example:
        >>> pipeline("translation", model="out/my-model")("A term.", glossary={"term": "Begriff"}, num_beams=5)
        [{'translation_text': 'Ein Begriff.'}]
    """

    _terms: TargetTerms | None = None

    def _sanitize_parameters(  # type: ignore[override]  # always called by keyword
        self, glossary: Glossary | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        if glossary is not None:
            found: dict[str, Any] = {"glossary": None}  # instead of the constructor's
            if len(glossary):
                self._terms = self._terms or make_terms(self.model, self.tokenizer)
                found = {"glossary": ModelGlossary(glossary, self.model, self.tokenizer, self._terms)}
            preprocess, forward = preprocess | found, forward | found
        return preprocess, forward, postprocess

    def preprocess(  # type: ignore[override]
        self, text: Any, truncation: Any = False, glossary: ModelGlossary | None = None, **languages: Any
    ) -> BatchEncoding:
        """Tokenizes one text, and finds its terms."""
        inputs = super().preprocess(text, truncation, **languages)
        if glossary is not None:
            ids, limit = inputs["input_ids"][0], self._truncation_limit(truncation)
            is_cut = limit is not None and len(ids) >= limit
            inputs["forced"] = glossary.find(
                text, ids, self._tokenize(text, **languages)["input_ids"] if is_cut else ()
            )
        return inputs

    def _forward(  # type: ignore[override]
        self, input_tensors: Any, glossary: ModelGlossary | None = None, **forward_parameters: Any
    ) -> Any:
        if glossary is not None:
            known = self._known_settings(self._generation_settings(forward_parameters, {}))
            check_beams(known.get("num_beams"), known.get("do_sample"))
            input_tensors = dict(input_tensors)
            sources = input_tensors.pop("forced")  # batching makes a list of them
            forward_parameters |= glossary.make_arguments(sources if isinstance(sources, list) else [sources])
        return super()._forward(input_tensors, **forward_parameters)
