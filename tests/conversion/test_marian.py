"""MarianMT into this package's form and back, against transformers' own MarianMT with random weights."""

import json
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from huggingface_hub.constants import HF_HUB_CACHE
from hypothesis import given, settings
from hypothesis import strategies as st
from library_vocabularies import GERMAN, SENTENCES, write_marian_vocabulary
from remote_process import RemotePython
from test_weights import Bomb
from tiny_vanilla import ALL_SHARING, assert_close, logits_of, make_model, pad, randomize
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, MarianMTModel, MarianTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.systems.marian import convert_marian, save_as_marian, to_marian
from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer
from vanilla_transformer.inference.translate import translate

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

ACTIVATIONS = ["swish", "gelu", "relu", "gelu_new", "tanh"]
SIZES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "max_position_embeddings": 40}
SIZES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20}


def make_marian(**changes: Any) -> Any:
    """A model of opus-mt's kind in which no weight is zero; the tables of positions stay sinusoids."""
    settings: dict[str, Any] = {"vocab_size": 31, **SIZES, "activation_function": "swish", "scale_embedding": True}
    settings |= {"bos_token_id": 0, "eos_token_id": 0, "forced_eos_token_id": 0, **changes}
    settings = {"pad_token_id": settings["vocab_size"] - 1, **settings}
    model = MarianMTModel(transformers.MarianConfig(**{"decoder_start_token_id": settings["pad_token_id"], **settings}))
    tables = {name: tensor.clone() for name, tensor in model.state_dict().items() if "embed_positions" in name}
    randomize(model, scale=0.5)
    model.load_state_dict(tables, strict=False)
    model.final_logits_bias.normal_()
    return model.eval()


def generate(model: Any, **inputs: Any) -> list[list[int]]:
    if isinstance(model, MarianMTModel):
        # Older versions of the library take the source's vocabulary for the target's in beam search.
        model.config.vocab_size = cast(int, model.config.decoder_vocab_size)
    return cast(list[list[int]], model.generate(**inputs).tolist())


def make_inputs(lengths: list[int], pad_token_id: int, vocab_size: int) -> dict[str, torch.Tensor]:
    sentences = [torch.randint(1, pad_token_id, (length,)).tolist() for length in lengths]
    ids, mask = pad(sentences, junk=pad_token_id)
    assert int(ids.max()) < vocab_size
    return {"input_ids": ids, "attention_mask": mask}


def make_opus(folder: Path) -> None:
    """Writes a model in the files that opus-mt models had at first: a pickle with tables, settings in config.json."""
    folder.mkdir(exist_ok=True)
    size, _ = write_marian_vocabulary(folder)
    model = make_marian(vocab_size=size)
    torch.save(dict(model.state_dict()), folder / "pytorch_model.bin")
    config = json.loads(model.config.to_json_string())
    config |= {"bad_words_ids": [[size - 1]], "max_length": 24, "num_beams": 4, "extra_pos_embeddings": size}
    config |= {"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False}
    config |= {"add_bias_logits": False, "static_position_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture(scope="module")
def opus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opus") / "opus-mt-en-de"
    make_opus(folder)
    return folder


@pytest.fixture(scope="module")
def converted(opus: Path) -> Path:
    model = convert_marian(str(opus))
    assert model.check() is not None
    return model.save(opus.parent / "converted")


class TestIn:
    @settings(max_examples=10)
    @given(data=st.data())
    def test_any_model_translates_the_same(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        draw = data.draw
        shared = draw(st.booleans(), label="shared")
        vocab_size = draw(st.integers(8, 30), label="vocab_size")
        decoder_vocab_size = vocab_size if shared else draw(st.integers(8, 30), label="decoder_vocab_size")
        pad_token_id = min(vocab_size, decoder_vocab_size) - 1
        sizes = {"vocab_size": vocab_size, "decoder_vocab_size": decoder_vocab_size, "pad_token_id": pad_token_id}
        marian = make_marian(
            share_encoder_decoder_embeddings=shared,
            tie_word_embeddings=draw(st.booleans(), label="tied"),
            activation_function=draw(st.sampled_from(ACTIVATIONS)),
            **{"scale_embedding": draw(st.booleans()), "bos_token_id": draw(st.sampled_from([None, 0])), **sizes},
            **{f"{side}_layers": draw(st.integers(1, 2)) for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": draw(st.sampled_from([1, 2, 8])) for side in ("encoder", "decoder")},
        )
        num_beams = draw(st.sampled_from([1, 4, 6]), label="num_beams")
        if num_beams > 1:
            search: dict[str, Any] = {"length_penalty": [0.6, 1.0, 2.0], "early_stopping": [False, True, "never"]}
            marian.generation_config.update(**{name: draw(st.sampled_from(each)) for name, each in search.items()})
        marian.generation_config.update(
            num_beams=num_beams,
            max_length=draw(st.integers(2, 12), label="max_length"),
            forced_eos_token_id=draw(st.sampled_from([None, 0])),
            bad_words_ids=draw(st.sampled_from([None, [[pad_token_id]], [[pad_token_id], [2, 3]]])),
            renormalize_logits=draw(st.booleans()),
        )
        folder = tmp_path_factory.mktemp("marian")
        marian.save_pretrained(folder)
        found = convert_marian(str(folder))
        assert found.tokenizer is None
        assert found.check() is not None  # within 1e-5
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        inputs = make_inputs(lengths, pad_token_id, vocab_size)
        # In float64, so that no two translations are as good as equal.
        assert generate(found.model.double(), **inputs) == generate(marian.double(), **inputs)

    def test_the_files_of_an_old_model_give_the_same_model(self, opus: Path, converted: Path) -> None:
        marian: Any = MarianMTModel.from_pretrained(opus)
        model = AutoModelForSeq2SeqLM.from_pretrained(converted)
        assert isinstance(model, VanillaTransformerForConditionalGeneration)
        assert model.config.langs == ["en", "de"]
        settings = model.generation_config
        assert (settings.num_beams, settings.max_length, settings.forced_eos_token_id) == (4, 24, 0)
        assert settings.bad_words_ids == [[marian.config.pad_token_id]]
        assert settings.decoder_start_token_id == marian.config.pad_token_id
        inputs = make_inputs([9, 4, 1], marian.config.pad_token_id, marian.config.vocab_size)
        assert generate(model, **inputs) == generate(marian, **inputs)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_the_type_of_the_weights_is_kept(self, tmp_path: Path, dtype: torch.dtype) -> None:
        marian = make_marian(max_position_embeddings=512).to(dtype)
        torch.save(marian.state_dict(), tmp_path / "pytorch_model.bin")  # with the tables, rounded to this type
        marian.config.save_pretrained(tmp_path)
        found = convert_marian(str(tmp_path))
        assert found.model.dtype == dtype
        assert found.check() is not None  # within 1e-5

    def test_settings_that_the_library_only_warns_of_can_be_saved_again(self, opus: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(opus, tmp_path / "model")
        strange = {"num_beams": 1, "length_penalty": 0.6, "max_length": 9, "decoder_start_token_id": 5}
        (folder / "generation_config.json").write_text(json.dumps(strange))
        try:
            MarianMTModel.from_pretrained(folder).save_pretrained(tmp_path / "again")
        except ValueError:
            pytest.skip("older versions of the library save no such settings")
        saved = convert_marian(str(folder)).save(tmp_path / "converted")
        found = GenerationConfig.from_pretrained(saved)
        assert {name: getattr(found, name) for name in strange} == strange

    def test_a_name_on_the_hub_is_as_good_as_a_folder(self, opus: Path) -> None:
        """Without network it is found in the cache, where an earlier download left it."""
        repository = Path(HF_HUB_CACHE) / "models--helsinki--opus-mt-en-de"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "v1").write_text("0" * 40)
        shutil.copytree(opus, repository / "snapshots" / ("0" * 40))
        found = convert_marian("helsinki/opus-mt-en-de", revision="v1")
        assert isinstance(found.tokenizer, MarianTokenizer)
        assert found.source == "the MarianMT model helsinki/opus-mt-en-de"
        assert found.check() is not None
        with pytest.raises(ConversionError, match="helsinki/opus-mt-en-de cannot be read as a MarianMT model"):
            convert_marian("helsinki/opus-mt-en-de", revision="v2")

    def test_notes_name_what_does_not_come_along(self, tmp_path: Path) -> None:
        make_marian(encoder_layerdrop=0.1).save_pretrained(tmp_path)
        notes = convert_marian(str(tmp_path)).notes
        for part, note in zip(("r_layerdrop=0.1", "max_length", str(tmp_path)), notes, strict=True):
            assert part in note


class TestTokenizer:
    def test_it_gives_the_same_ids_through_auto_tokenizer(self, opus: Path, converted: Path) -> None:
        original, ours = (AutoTokenizer.from_pretrained(folder) for folder in (opus, converted))
        assert isinstance(ours, MarianTokenizer)
        texts = [*SENTENCES, "", "ein ☃ mann", "a b   c"]
        assert ours(texts, text_target=GERMAN + texts[:3]) == original(texts, text_target=GERMAN + texts[:3])
        ids = [[*row, original.pad_token_id] for row in original(texts)["input_ids"]]
        for skip in (False, True):
            decoded = [tokenizer.batch_decode(ids, skip_special_tokens=skip) for tokenizer in (original, ours)]
            assert decoded[0] == decoded[1]
        assert (ours.source_lang, ours.target_lang, ours.model_max_length) == ("en", "de", original.model_max_length)

    def test_pipelines_and_batch_translation_use_it(self, opus: Path, converted: Path) -> None:
        theirs, their_tokenizer = MarianMTModel.from_pretrained(opus), AutoTokenizer.from_pretrained(opus)
        tokens = [generate(theirs, **their_tokenizer(text, return_tensors="pt"))[0] for text in SENTENCES]
        expected = their_tokenizer.batch_decode(tokens, skip_special_tokens=True)
        assert len(set(expected)) > 1
        for task in ("translation", "translation_en_to_de"):
            make: Any = transformers.pipeline
            found = make(task, model=str(converted), device="cpu")(SENTENCES)
            assert [result["translation_text"] for result in found] == expected
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(converted), AutoTokenizer.from_pretrained(converted)
        assert translate(model, tokenizer, SENTENCES, progress=False) == expected

    def test_two_vocabularies_stay_two(self, tmp_path: Path) -> None:
        folder = tmp_path / "separate"
        folder.mkdir()
        sizes = write_marian_vocabulary(folder, separate=True)
        separate = {"vocab_size": sizes[0], "decoder_vocab_size": sizes[1], "share_encoder_decoder_embeddings": False}
        make_marian(**separate).save_pretrained(folder)
        saved = convert_marian(str(folder)).save(tmp_path / "converted")
        original, ours = (AutoTokenizer.from_pretrained(path) for path in (folder, saved))
        assert ours.separate_vocabs
        batch = original(SENTENCES, text_target=GERMAN)
        assert ours(SENTENCES, text_target=GERMAN) == batch
        assert batch["labels"] != original(GERMAN)["input_ids"]
        assert ours.batch_decode(batch["labels"]) == original.batch_decode(batch["labels"])

    def test_without_sentencepiece_the_extra_is_named(self, opus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sentencepiece", None)
        message = r"sentencepiece for MarianMT.*pip install 'vanilla-transformer\[convert\]'"
        with pytest.raises(ImportError, match=message):
            convert_marian(str(opus))

    def test_a_tokenizer_of_another_kind_comes_along_too(self, tmp_path: Path) -> None:
        tokenizer = train_tokenizer(SENTENCES, vocab_size=300)
        model = make_model(vocab_size=len(tokenizer))
        folder = save_as_marian(model, tokenizer, tmp_path / "marian")
        found = convert_marian(str(folder)).tokenizer
        assert found is not None
        assert found(SENTENCES)["input_ids"] == tokenizer(SENTENCES)["input_ids"]


class TestRefusals:
    def test_all_unsupported_features_are_named_at_once(self, tmp_path: Path) -> None:
        changes = {"normalize_before": True, "normalize_embedding": True, "static_position_embeddings": False}
        config = {**make_marian().config.to_dict(), **changes, "dropout": 1.0}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConversionError) as caught:
            convert_marian(str(tmp_path))
        assert all(f"{name} is {value}" in str(caught.value) for name, value in changes.items())
        assert "dropout must be in [0, 1), not 1.0" in str(caught.value)

    def test_all_weights_that_do_not_fit_are_named_at_once(self, opus: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(opus, tmp_path / "model")
        weights = torch.load(folder / "pytorch_model.bin")
        del weights["model.encoder.layers.1.fc1.bias"]
        weights["model.encoder.layers.0.fc2.bias"] = torch.zeros(3)
        weights["model.encoder.layer_norm.weight"] = torch.zeros(16)
        torch.save(weights, folder / "pytorch_model.bin")
        with pytest.raises(ConversionError) as caught:
            convert_marian(str(folder))
        assert "model.encoder.layers.1.fc1.bias is missing" in str(caught.value)
        assert "model.encoder.layers.0.fc2.bias has the shape (3,) instead of (16,)" in str(caught.value)
        assert "model.encoder.layer_norm.weight is no weight of the model" in str(caught.value)

    def test_another_kind_of_model_is_refused(self, converted: Path, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match=r"model_type in its config\.json is 'vanilla_transformer'"):
            convert_marian(str(converted))
        with pytest.raises(ConversionError, match=r"it has no config\.json"):
            convert_marian(str(tmp_path))
        for path in (tmp_path / "absent", converted / "config.json"):
            with pytest.raises(ConversionError, match=f"{re.escape(str(path))} is no folder"):
                convert_marian(str(path))
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ConversionError, match="not a valid JSON file"):
            convert_marian(str(tmp_path))

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
    def test_truncated_weights_are_refused(self, tmp_path: Path, name: str) -> None:
        marian = make_marian()
        marian.save_pretrained(tmp_path)
        if name.endswith(".bin"):
            torch.save(marian.state_dict(), tmp_path / name)
            (tmp_path / "model.safetensors").unlink()
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ConversionError, match="is missing, truncated or of another kind"):
            convert_marian(str(tmp_path))
        (tmp_path / name).write_bytes(whole)
        for content in ("{", "[]"):
            (tmp_path / "generation_config.json").write_text(content)
            with pytest.raises(ConversionError, match="cannot be read as a MarianMT model"):
                convert_marian(str(tmp_path))

    def test_a_pickle_that_runs_code_is_refused(self, opus: Path, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        folder = shutil.copytree(opus, tmp_path / "model")
        torch.save({"weight": Bomb()}, folder / "pytorch_model.bin", pickle_module=pickle)
        with pytest.raises(ConversionError, match=r"holds more than weights: it needs \w+\.mkdir"):
            convert_marian(str(folder))
        assert not Path("exploded").exists()

    def test_a_vocabulary_of_another_model_or_not_whole_is_refused(self, opus: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(opus, tmp_path / "model")
        vocabulary = json.loads((folder / "vocab.json").read_text())
        (folder / "vocab.json").write_text(json.dumps({**vocabulary, "more": len(vocabulary)}))
        message = f"the source vocabulary has the id {len(vocabulary)}, and the model {len(vocabulary)} tokens"
        with pytest.raises(ConversionError, match=message):
            convert_marian(str(folder))
        for name in ("source.spm", "vocab.json"):
            (folder / name).unlink()
        with pytest.raises(ConversionError, match=r"  - source\.spm is missing\n  - vocab\.json is missing"):
            convert_marian(str(folder))


class TestOut:
    @pytest.mark.parametrize("sharing", ALL_SHARING)
    @pytest.mark.parametrize(
        "changes",
        [
            {"encoder_attention_heads": 2},
            {"position_embedding_type": "sinusoidal_concatenated", "activation_function": "gelu"},
            {"attention_bias": True, "lm_head_bias": True, "scale_embedding": False},
            {"d_k": 4, "d_v": 4, "decoder_attention_heads": 4},
        ],
    )
    def test_there_and_back_the_function_is_the_same(self, tmp_path: Path, sharing: str, changes: Any) -> None:
        model = make_model(**{**ALL_SHARING[sharing], **changes})
        model.generation_config.max_length = 9
        marian = to_marian(model)
        ids, mask = pad([[4, 5, 6, 7, 8, 2], [9, 10, 2], [2]])
        batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": torch.randint(4, 13, (3, 7))}
        expected = logits_of(model, **batch)
        with torch.no_grad():
            assert_close(marian(**batch).logits, expected)
        marian.save_pretrained(tmp_path)
        back = convert_marian(str(tmp_path))
        assert_close(logits_of(back.model, **batch), expected)
        search: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "num_beams": 3}
        found = [generate(side, **search) for side in (model, marian, back.model)]
        assert found[0] == found[1] == found[2]

    def test_a_model_that_marian_cannot_be_is_refused_with_all_reasons(self) -> None:
        settings: dict[str, Any] = {"position_embedding_type": "learned", "position_offset": 1, "d_k": 4}
        settings |= {"normalize_before": True, "normalize_embedding": True, "layer_norm_eps": 1e-6, "ffn_bias": False}
        with pytest.raises(ConversionError) as caught:
            to_marian(make_model(**settings))
        assert all(f"\n  - {name} is {value!r}" in str(caught.value) for name, value in settings.items())

    def test_settings_that_marian_has_are_taken_over(self, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
        model = make_model()
        settings = GenerationConfig(num_beams=3, length_penalty=0.6, no_repeat_ngram_size=2, decoder_start_token_id=0)
        settings.update(length_penalty_type="gnmt", allow_custom_entries=True)
        model.generation_config = settings
        marian = to_marian(model)
        assert "length_penalty_type='gnmt' is left out" in caplog.text
        marian.save_pretrained(tmp_path)
        found = GenerationConfig.from_pretrained(tmp_path)
        assert (found.num_beams, found.length_penalty, found.no_repeat_ngram_size) == (3, 0.6, 2)
        assert found.max_length == model.config.max_position_embeddings
        assert not hasattr(found, "length_penalty_type")
        assert settings.length_penalty_type == "gnmt", "the model's own settings stay as they were"  # type: ignore[attr-defined]

    def test_tasks_and_their_prefixes_go_there_and_back(self, tmp_path: Path) -> None:
        model: Any = make_model()
        tasks = {"translation_en_to_de": {"prefix": "<de> "}, "translation_en_to_fr": {"prefix": "<fr> "}}
        model.config.task_specific_params = tasks
        to_marian(model).save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["task_specific_params"] == tasks
        assert convert_marian(str(tmp_path)).model.config.task_specific_params == tasks

    def test_a_longer_translation_than_the_table_gets_a_longer_table(self) -> None:
        model: Any = make_model(max_position_embeddings=8, lm_head_bias=True)
        model.generation_config.max_length = 20
        model.generation_config.eos_token_id = None
        ids = torch.tensor([[4, 5, 2]])
        assert generate(to_marian(model), input_ids=ids) == generate(model, input_ids=ids)
        marian = to_marian(model.to(torch.bfloat16))
        assert {tensor.dtype for tensor in marian.state_dict().values()} == {torch.bfloat16}

    def test_added_tokens_that_the_librarys_tokenizer_would_write_otherwise_are_refused(self, tmp_path: Path) -> None:
        tokenizer = train_tokenizer(SENTENCES, vocab_size=300)
        tokenizer.add_tokens(["<2de>", "größe"])
        model = make_model(vocab_size=len(tokenizer))
        with pytest.raises(ConversionError, match=r"its added token 'größe' would be written as 'gr.*e'$"):
            save_as_marian(model, tokenizer, tmp_path / "model")
        assert not list(tmp_path.iterdir())
        tokenizer = train_tokenizer(SENTENCES, vocab_size=300)
        tokenizer.add_tokens(["<2de>"])
        save_as_marian(model, tokenizer, tmp_path / "model")

    def test_two_vocabularies_of_ours_are_refused_before_anything_is_written(self, tmp_path: Path) -> None:
        tokenizer = train_separate_tokenizer(SENTENCES, GERMAN, vocab_size=300)
        with pytest.raises(ConversionError, match="separate_vocabs=True"):
            save_as_marian(make_model(), tokenizer, tmp_path / "model")
        assert not list(tmp_path.iterdir())


def test_a_process_without_the_package_translates_the_same(
    converted: Path, tmp_path: Path, without_the_package: RemotePython
) -> None:
    """A converted model with the code that travels with it, and a model of ours saved as MarianMT without any code."""
    tokenizer = train_tokenizer(SENTENCES + GERMAN, vocab_size=320)
    model = make_model(vocab_size=len(tokenizer), position_embedding_type="sinusoidal")
    model.generation_config.update(max_length=12, num_beams=3)
    ours = save_as_marian(model, tokenizer, tmp_path / "marian")
    assert not list(ours.glob("*.py"))
    tokens = generate(model, **tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    expected = {str(ours): [tokens, tokenizer.batch_decode(tokens, skip_special_tokens=True)]}
    opus_model, opus_tokenizer = (kind.from_pretrained(converted) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    tokens = generate(opus_model, **opus_tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    expected[str(converted)] = [tokens, opus_tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    program = """
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=trust)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
tokens = model.generate(**tokenizer(sentences, padding=True, return_tensors="pt"))
[tokens.tolist(), tokenizer.batch_decode(tokens, skip_special_tokens=True)]
"""
    for folder, found in expected.items():
        names = {"folder": folder, "trust": folder == str(converted), "sentences": SENTENCES}
        assert without_the_package.run(program, **names) == found
