"""Languages of the translation pipeline: as arguments or by the task's name, for multilingual tokenizers and others."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from library_models import TEXTS, WORDS, generate_by_hand, make_m2m100, make_marian, make_nllb_tokenizer, texts_of
from tiny_vanilla import make_model as make_vanilla
from transformers import (
    GenerationConfig,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianTokenizer,
    NllbTokenizer,
    pipelines,
)

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.model.pipeline_vanilla_transformer import TranslationPipeline, parse_language_pair
from vanilla_transformer.registration import register_pipeline_tasks

pipeline: Any = pipelines.pipeline  # its types know only the tasks that the library has itself
pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture(scope="module")
def nllb() -> tuple[M2M100ForConditionalGeneration, NllbTokenizer]:
    tokenizer = make_nllb_tokenizer()
    return make_m2m100(len(tokenizer)), tokenizer


class TestLanguages:
    TEXT = "a bad cab"

    @staticmethod
    def by_hand(model: Any, tokenizer: Any, text: str, src_lang: str, target_id: int, **kwargs: Any) -> str:
        tokenizer.src_lang = src_lang
        return generate_by_hand(model, tokenizer, text, forced_bos_token_id=target_id, **kwargs)[0]

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_nllb(self, nllb: tuple[Any, Any], batch_size: int) -> None:
        model, tokenizer = nllb
        defaults = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}
        pipe = TranslationPipeline(model, tokenizer, **defaults, max_new_tokens=6, num_beams=1)
        texts = [self.TEXT, "face", "deed a bead"]
        found = {}
        for languages in ({}, {"tgt_lang": "fra_Latn"}, {"src_lang": "fra_Latn"}):
            source, target = {**defaults, **languages}.values()
            target_id = tokenizer.convert_tokens_to_ids(target)
            expected = [self.by_hand(model, tokenizer, text, source, target_id, max_new_tokens=6) for text in texts]
            found[source, target] = texts_of(pipe(texts, batch_size=batch_size, **languages))
            assert found[source, target] == expected
        assert len(set(map(tuple, found.values()))) == 3

    def test_language_arguments_come_before_the_task_name(self, nllb: tuple[Any, Any]) -> None:
        model, tokenizer = nllb
        languages = {"src_lang": "eng_Latn", "tgt_lang": "fra_Latn"}
        expected = TranslationPipeline(model, tokenizer, max_new_tokens=4)(self.TEXT, **languages)
        named = TranslationPipeline(model, tokenizer, task="translation_en_to_de", max_new_tokens=4, **languages)
        assert named(self.TEXT) == expected

    def test_a_users_generation_config_keeps_the_language(self, nllb: tuple[Any, Any]) -> None:
        model, tokenizer = nllb
        pipe = TranslationPipeline(model, tokenizer, src_lang="eng_Latn", tgt_lang="deu_Latn")
        config = GenerationConfig(max_new_tokens=5, num_beams=2)
        ids = pipe(self.TEXT, generation_config=config, return_tensors=True)[0]["translation_token_ids"]
        assert ids[1] == tokenizer.convert_tokens_to_ids("deu_Latn")
        assert config.forced_bos_token_id is None
        ids = pipe(self.TEXT, forced_bos_token_id=7, max_new_tokens=3, return_tensors=True)[0]["translation_token_ids"]
        assert ids[1] == 7

    @pytest.mark.parametrize(
        ("languages", "message"),
        [
            ({}, "requires a `src_lang` and a `tgt_lang`"),
            ({"src_lang": "eng_Latn"}, "requires a `src_lang` and a `tgt_lang`"),
            ({"src_lang": "en", "tgt_lang": "fra_Latn"}, "src_lang='en' is not a language code .* NllbTokenizer"),
            ({"src_lang": "a", "tgt_lang": "fra_Latn"}, "src_lang='a' is not a language code"),  # but a piece of words
            ({"src_lang": "eng_Latn", "tgt_lang": "b"}, "tgt_lang='b' is not a language code"),
            ({"src_lang": "eng_Latn", "tgt_lang": "xx"}, "tgt_lang='xx' is not a language code .* NllbTokenizer"),
        ],
    )
    def test_missing_and_unknown_languages(
        self, nllb: tuple[Any, Any], languages: dict[str, str], message: str
    ) -> None:
        model, tokenizer = nllb
        with pytest.raises(ValueError, match=message):
            TranslationPipeline(model, tokenizer)(self.TEXT, **languages)

    def test_m2m100_reads_the_task_name(self, tmp_path: Path) -> None:
        pieces = train_sentencepiece(tmp_path / "pieces")
        vocabulary = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        tokenizer = M2M100Tokenizer(vocab_file=tmp_path / "vocab.json", spm_file=str(tmp_path / "pieces.model"))
        model = make_m2m100(1 + max(map(tokenizer.get_lang_id, tokenizer.lang_code_to_token)))
        register_pipeline_tasks()
        pipe = pipeline("translation_en_to_de", model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=6)
        for languages in ({}, {"tgt_lang": "fr"}, {"src_lang": "zh", "tgt_lang": "en"}):
            source, target = {"src_lang": "en", "tgt_lang": "de", **languages}.values()
            ids = (source, tokenizer.get_lang_id(target))
            expected = self.by_hand(model, tokenizer, TEXTS[0], *ids, max_new_tokens=6, num_beams=4)
            assert texts_of(pipe([TEXTS[0]], **languages)) == [expected]
        with pytest.raises(ValueError, match="M2M100Tokenizer does not know the language 'xx'"):
            pipe(TEXTS[0], tgt_lang="xx")

    # The tokenizer's own advice to install another package.
    @pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
    def test_marian_tokenizer(self, tmp_path: Path) -> None:
        for side in ("source", "target"):
            pieces = train_sentencepiece(tmp_path / side)
        vocabulary = {piece: index for index, piece in enumerate(["</s>", "<unk>", *pieces, "<pad>"])}
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        files = {"source_spm": "source.model", "target_spm": "target.model", "vocab": "vocab.json"}
        paths: dict[str, Any] = {name: str(tmp_path / file) for name, file in files.items()}
        tokenizer = MarianTokenizer(**paths)
        pad = len(vocabulary) - 1
        model = make_marian(vocab_size=len(vocabulary), eos_token_id=0, pad_token_id=pad, decoder_start_token_id=pad)
        pipe = TranslationPipeline(model, tokenizer, task="translation_en_to_de", max_new_tokens=8, num_beams=2)
        expected = [generate_by_hand(model, tokenizer, text, max_new_tokens=8, num_beams=2)[0] for text in TEXTS]
        assert texts_of(pipe(TEXTS, batch_size=3)) == expected

    def test_parse_language_pair(self) -> None:
        assert parse_language_pair("translation_en_to_de") == ("en", "de")
        assert parse_language_pair("translation_zh-Hans_to_pt-BR") == ("zh-Hans", "pt-BR")
        others = ("translation", "translation_en_de", "translation_eng_Latn_to_fra_Latn", "my_translation_en_to_de")
        assert [parse_language_pair(task) for task in others] == [None] * 4


class TestDirection:
    """A model of this package that says which languages it translates is not used for others."""

    def test_other_languages_are_refused_and_its_own_accepted(self) -> None:
        model = make_vanilla(vocab_size=260, langs=["en", "de"])
        tokenizer = VanillaTransformerTokenizer()
        refused = pytest.raises(ValueError, match=r"translates en to de \(langs in its config.json\), not de to en\.")
        with refused:
            TranslationPipeline(model, tokenizer, task="translation_de_to_en")
        with refused:
            TranslationPipeline(model, tokenizer, src_lang="de", tgt_lang="en")
        pipe = TranslationPipeline(model, tokenizer, task="translation_en_to_de", max_new_tokens=2)
        with refused:
            pipe("a", src_lang="de", tgt_lang="en")
        with pytest.raises(ValueError, match=r"en to de .* not en to fr"):
            pipe("a", tgt_lang="fr")
        assert pipe("a", src_lang="en", tgt_lang="de") == pipe("a")

    def test_models_that_do_not_say_are_used_as_before(self) -> None:
        pipe = TranslationPipeline(
            make_vanilla(vocab_size=260), VanillaTransformerTokenizer(), task="translation_a_to_b"
        )
        assert pipe("a", max_new_tokens=2)


def train_sentencepiece(prefix: Path) -> list[str]:
    """Writes `prefix`.model; returns its pieces but the first three, which are special."""
    corpus = prefix.with_suffix(".txt")
    corpus.write_text("\n".join(f"{first} {second}" for first in WORDS for second in WORDS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(prefix), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    return [processor.id_to_piece(index) for index in range(3, processor.get_piece_size())]
