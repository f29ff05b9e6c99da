"""What the page of scripts/app.py asks of a model: translations, scores, attention, and errors for people."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from chromium import PATIENCE
from letters import TOKENIZER, make_letters_model
from library_models import MODELS, make_m2m100, make_nllb_tokenizer, make_t5, make_tokenizer

from vanilla_transformer.apps.answers import MAX_BEAMS, Answer, DemoError, DemoModel, Settings, translate_text
from vanilla_transformer.tasks import TASKS, record_task

TEXT = "alpha delta echo papa"
LANGUAGES = ("eng_Latn", "deu_Latn", "fra_Latn")


def make_nllb() -> DemoModel:
    tokenizer = make_nllb_tokenizer()
    model = make_m2m100(len(tokenizer))
    model.generation_config.max_new_tokens = 6
    return DemoModel("nllb", model, tokenizer)


class TestTranslation:
    @pytest.mark.parametrize("kind", MODELS)
    @pytest.mark.parametrize("num_beams", [1, 3])
    def test_is_what_generate_gives(self, kind: str, num_beams: int) -> None:
        model, tokenizer = MODELS[kind](), make_tokenizer()
        model.generation_config.max_new_tokens = 12
        settings = Settings(num_beams=num_beams, length_penalty=0.3)
        answer = translate_text(DemoModel(kind, model, tokenizer), f" alpha {TEXT} ", settings)
        options: dict[str, Any] = {"length_penalty": 0.3} if num_beams > 1 else {}
        options |= {"num_beams": num_beams, "num_return_sequences": num_beams}
        options |= {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 12}
        with torch.no_grad():
            expected = model.generate(**tokenizer(f"alpha {TEXT}", return_tensors="pt"), **options)
        texts = tokenizer.batch_decode(expected.sequences, skip_special_tokens=True)
        assert [translation.text for translation in answer.translations] == texts
        scores: Any = [translation.score for translation in answer.translations]
        if num_beams == 1:
            assert scores == [None]
        else:
            torch.testing.assert_close(torch.tensor(scores), expected.sequences_scores)
            assert scores == sorted(scores, reverse=True)

    def test_of_a_model_without_a_limit_is_not_cut_off_after_twenty_tokens(self) -> None:
        model = make_t5()
        model.generation_config.eos_token_id = None
        answer = translate_text(DemoModel("t5", model, make_tokenizer()), TEXT, Settings(num_beams=1))
        assert len(answer.translations[0].text.split()) > 100

    def test_puts_the_prefix_before_the_text(self) -> None:
        demo = DemoModel("t5", make_t5(), make_tokenizer())
        demo.model.generation_config.max_new_tokens = 8
        assert demo.settings.source_prefix == "alpha bravo "
        with_prefix = translate_text(demo, TEXT, Settings(source_prefix="golf hotel "))
        written_out = translate_text(demo, f"golf hotel {TEXT}", Settings())
        assert with_prefix.translations == written_out.translations
        assert with_prefix.attention is not None
        assert len(with_prefix.attention.source) == len(TEXT.split()) + 3

    def test_of_a_long_text_comes_without_attention(self, monkeypatch: pytest.MonkeyPatch) -> None:
        demo = DemoModel("letters", make_letters_model(), TOKENIZER)

        def translate(most: int) -> Answer:
            monkeypatch.setattr("vanilla_transformer.apps.answers.MAX_MAP_WEIGHTS", most)
            return translate_text(demo, "abcdefg", Settings(num_beams=1))

        answer = translate(10**6)
        attention = answer.attention
        assert attention is not None
        assert attention.target_text == answer.translations[0].text
        assert "".join(attention.source).strip("▁") == "abcdefg</s>"
        size = attention.encoder.size + attention.decoder.size + attention.cross.size
        assert translate(size).attention is not None
        assert translate(size - 1).attention is None
        # Of a text far too long it is not even computed.
        monkeypatch.setattr("vanilla_transformer.apps.answers.collect_attention", None)
        assert translate(10).note == "The text is too long for its attention to be shown."

    def test_of_an_endless_text_is_refused_while_others_are_served(self) -> None:
        demo = DemoModel("letters", make_letters_model(), TOKENIZER)
        most = demo.count_most_characters()
        assert most > 20 * 100
        for text, settings in (("a", Settings(source_prefix="a" * most)), ("a" * 201, Settings(max_source_tokens=10))):
            with demo.lock, ThreadPoolExecutor(1) as pool:
                found = pool.submit(translate_text, demo, text, settings).exception(timeout=PATIENCE)
            assert isinstance(found, DemoError)
            assert "characters" in str(found)

    def test_languages_of_several_people_do_not_mix(self) -> None:
        nllb = make_nllb()
        pairs = [(source, target) for source in LANGUAGES for target in LANGUAGES]
        requests = [("xyz dog", Settings(num_beams=2, source_lang=one, target_lang=other)) for one, other in pairs]
        alone = [translate_text(nllb, *request).translations for request in requests]
        assert len(set(alone)) > len(LANGUAGES)
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda request: translate_text(nllb, *request).translations, requests))
        assert together == alone

    def test_a_model_of_several_pairs_is_told_which(self) -> None:
        prefixes = {"de": "<2de> ", "fr": "<2fr> "}
        tasks = {f"translation_en_to_{target}": {"prefix": prefix} for target, prefix in prefixes.items()}
        model = make_letters_model()
        model.config.task_specific_params = tasks
        many = DemoModel("many", model, TOKENIZER)
        assert many.languages == ["de", "en", "fr"]
        assert many.settings.source_prefix == ""
        assert (many.settings.source_lang, many.settings.target_lang) == ("en", "de")
        plain = DemoModel("plain", make_letters_model(), TOKENIZER)
        found = {}
        for target, prefix in prefixes.items():
            found[target] = translate_text(many, "abc", Settings(source_lang="en", target_lang=target)).translations
            assert found[target] == translate_text(plain, "abc", Settings(source_prefix=prefix)).translations
        assert found["de"] != found["fr"]
        with pytest.raises(DemoError, match="translates en to de, en to fr, not 'de' to 'en'"):
            translate_text(many, "abc", Settings(source_lang="de", target_lang="en"))

    def test_says_what_is_wrong_with_a_request(self) -> None:
        nllb = make_nllb()
        pair = {"source_lang": "eng_Latn", "target_lang": "deu_Latn"}
        for text, changes, message in (
            (" \n", pair, "There is no text yet"),
            ("abc", {**pair, "num_beams": 0}, f"The beam size is 0; it must be a whole number, 1 to {MAX_BEAMS}"),
            ("abc", {**pair, "num_beams": 2.5}, "The beam size is 2.5; it must be a whole number"),
            ("abc", {**pair, "length_penalty": float("nan")}, "The length penalty is nan; it must be a number"),
            ("a\ud800c", pair, "half of a character"),
            ("abc", {"source_lang": "eng_Latn"}, "many languages"),
            ("abc", {**pair, "target_lang": "klingon"}, "'klingon', which NllbTokenizer does not know"),
            ("abc", {**pair, "max_source_tokens": 4}, "has 6 tokens; 4 are the most"),
        ):
            with pytest.raises(DemoError, match=message):
                translate_text(nllb, text, Settings(**changes))

    def test_starts_with_the_models_own_settings(self) -> None:
        nllb = make_nllb()
        before = nllb.settings
        translate_text(nllb, "abc", Settings(source_lang="fra_Latn", target_lang="deu_Latn"))
        assert nllb.settings == before == Settings(source_lang="eng_Latn")
        assert nllb.languages == sorted(LANGUAGES)
        model = make_letters_model()
        model.generation_config.num_beams, model.generation_config.length_penalty = 7, 0.6
        demo = DemoModel("letters", model, TOKENIZER)
        assert (demo.settings.num_beams, demo.settings.length_penalty, demo.languages) == (7, 0.6, [])
        model.config.langs = ["en", "de"]
        size = f"{model.num_parameters():,} parameters"
        assert demo.summary == f"Model `letters`: vanilla_transformer, en to de, {size}, on cpu"
        assert demo.task is TASKS["translation"]


class TestTask:
    @pytest.fixture
    def summarizer(self) -> DemoModel:
        model = make_letters_model(max_position_embeddings=1500)
        record_task(model.config, TASKS["summarization"], prefix="ab")
        return DemoModel("letters", model, TOKENIZER)

    def test_other_than_translation_gets_the_text_as_it_is(self, summarizer: DemoModel) -> None:
        assert (summarizer.task, summarizer.settings.source_prefix) == (TASKS["summarization"], "ab")
        text = " ab\n\ncd \n"
        answer = translate_text(summarizer, text, Settings(num_beams=2, source_prefix="ab"))
        inputs = TOKENIZER(f"ab{text}", return_tensors="pt")
        assert len(inputs["input_ids"][0]) > len(TOKENIZER("abab cd")["input_ids"])
        generate: Any = summarizer.model.generate
        with torch.no_grad():
            expected = generate(**inputs, num_beams=2, num_return_sequences=2, length_penalty=1.0)
        texts = TOKENIZER.batch_decode(expected, skip_special_tokens=True)
        assert [found.text for found in answer.translations] == texts
        assert (answer.text, answer.note) == (texts[0], "")
        summarizer.task = TASKS["translation"]
        one_line = translate_text(summarizer, text, Settings(num_beams=2, source_prefix="ab"))
        assert one_line.attention is not None
        assert answer.attention is not None
        assert len(one_line.attention.source) < len(answer.attention.source)

    def test_decides_how_long_texts_may_be(self, summarizer: DemoModel) -> None:
        model = summarizer.model
        assert [summarizer.count_most_tokens(most) for most in (None, 7, 10**6)] == [1024, 7, 1500]
        assert DemoModel("letters", model, TOKENIZER, max_source_length=300).count_most_tokens() == 300
        translator = DemoModel("letters", make_letters_model(max_position_embeddings=1500), TOKENIZER)
        assert translator.count_most_tokens() == 256
        short = make_tokenizer(model_max_length=50)
        assert DemoModel("t5", make_t5(), short).count_most_tokens() == 50
        translate_text(summarizer, "abcdefgh" * 100, Settings(num_beams=1))
        with pytest.raises(DemoError, match="tokens; 256 are the most"):
            translate_text(translator, "abcdefgh" * 100, Settings(num_beams=1))


class TestMarkdown:
    """What the page shows as Markdown: an image in it would tell a stranger's server of each visitor."""

    def test_of_a_models_name_and_languages_is_escaped(self, tmp_path: Path) -> None:
        model = make_letters_model()
        model.config.langs = ["![image](http://a.example/x.png)", "<img src=http://a.example>"]
        summary = DemoModel(str(tmp_path / "a`model"), model, TOKENIZER).summary
        assert summary.startswith(
            r"Model `a'model`: vanilla_transformer, !\[image\](http://a.example/x.png) to &lt;img"
        )
        assert str(tmp_path) not in summary
        assert DemoModel("me/my-model", model, TOKENIZER).summary.startswith("Model `me/my-model`: ")

    def test_of_an_error_is_escaped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise ValueError("![image](http://a.example/x.png)")

        monkeypatch.setattr("vanilla_transformer.apps.answers.collect_attention", fail)
        answer = translate_text(DemoModel("letters", make_letters_model(), TOKENIZER), "abc", Settings(num_beams=1))
        assert answer.note == r"No attention can be shown: !\[image\](http://a.example/x.png)"


class TestLines:
    def test_are_sentences_of_their_own_and_come_back_as_lines(self) -> None:
        model = make_letters_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.4 * torch.randn_like(parameter))  # so that sources matter
        demo, settings = DemoModel("letters", model, TOKENIZER), Settings(num_beams=2)
        alone = [translate_text(demo, text, settings) for text in ("abc", "de", "a")]
        assert len({answer.text for answer in alone}) > 1
        for separator in ("\n", "\r\n", "\r"):
            answer = translate_text(demo, separator.join(["", "abc", " ", "de ", "a", ""]), settings)
            assert answer.text == "\n".join(["", alone[0].text, "", alone[1].text, alone[2].text, ""])
        assert [each.text for each in answer.translations] == [each.text for each in alone[0].translations]
        assert answer.note == "The list and the attention are of the first line."
        assert answer.attention is not None
        assert alone[0].attention is not None
        assert answer.attention.target == alone[0].attention.target
        assert alone[0].note == ""

    def test_have_one_limit_together(self) -> None:
        demo = DemoModel("letters", make_letters_model(), TOKENIZER)
        settings = Settings(num_beams=1, max_source_tokens=12)
        assert translate_text(demo, "abc\nabc", settings).text
        with pytest.raises(DemoError, match=r"The text has \d+ tokens; 12 are the most"):
            translate_text(demo, "a\n" * 20, settings)
