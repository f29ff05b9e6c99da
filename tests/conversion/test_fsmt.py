"""FSMT into this package's form, against transformers' own FSMT with random weights."""

import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_vocabularies import SENTENCES, write_fsmt_vocabulary
from tiny_vanilla import assert_close, logits_of, pad, randomize
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, FSMTConfig, FSMTForConditionalGeneration

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.systems.fsmt import convert_fsmt

PAD, END = 1, 2
ENDLESS: dict[str, Any] = {"num_beams": 1, "max_length": 9, "eos_token_id": None, "forced_eos_token_id": None}


def make_fsmt(**changes: Any) -> Any:
    """A model of wmt19's kind in which no weight is zero; the tables of positions stay sinusoids."""
    settings: dict[str, Any] = {"langs": ["en", "de"], "src_vocab_size": 31, "tgt_vocab_size": 23, "max_length": 14}
    settings |= {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "max_position_embeddings": 40}
    settings |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2}
    settings |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 20, **changes}
    model = FSMTForConditionalGeneration(FSMTConfig(**settings))
    tables = {name: tensor.clone() for name, tensor in model.state_dict().items() if "embed_positions" in name}
    randomize(model, scale=0.5)
    model.load_state_dict(tables, strict=False)
    # FSMT takes a padding token that it has generated for padding, which ours does not; trained models generate none.
    model.generation_config.bad_words_ids = [[PAD]]
    return model.eval()


def generate(model: Any, **inputs: Any) -> list[list[int]]:
    return cast(list[list[int]], model.generate(**inputs).tolist())


def decode_greedily(fsmt: Any, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """Greedy search without a cache, eight tokens for each source: the whole target is decoded at each step."""
    targets = torch.full((len(inputs["input_ids"]), 1), END)
    for _ in range(8):
        with torch.no_grad():
            logits = fsmt(**inputs, decoder_input_ids=targets, use_cache=False).logits[:, -1]
        logits[:, PAD] = -torch.inf
        targets = torch.cat([targets, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return cast(list[list[int]], targets.tolist())


@functools.cache
def fsmt_searches_well() -> bool:
    """Whether FSMT's own `generate` is an oracle: older versions give each token in the cache the first position."""
    fsmt, inputs = make_fsmt(), make_inputs([5], 31)
    found = fsmt.generate(**inputs, **ENDLESS, output_logits=True, return_dict_in_generate=True)
    with torch.no_grad():
        logits = fsmt(**inputs, decoder_input_ids=found.sequences, use_cache=False).logits[:, :-1]
    return torch.allclose(torch.stack(found.logits, dim=1), logits, atol=1e-3)


needs_search = pytest.mark.skipif("not fsmt_searches_well()", reason="FSMT's own search is wrong in this version")


def make_inputs(lengths: list[int], vocab_size: int, side: str = "right") -> dict[str, torch.Tensor]:
    sentences = [torch.randint(3, vocab_size, (length,)).tolist() for length in lengths]
    ids, mask = pad([[*sentence[1:], END] for sentence in sentences], side=side, junk=PAD)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def wmt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the files that wmt19 models have: a pickle without tables, settings in config.json."""
    pytest.importorskip("sacremoses")
    folder = tmp_path_factory.mktemp("wmt") / "wmt19-en-de"
    folder.mkdir()
    sizes = write_fsmt_vocabulary(folder)
    model = make_fsmt(src_vocab_size=sizes[0], tgt_vocab_size=sizes[1])
    weights = {name: tensor for name, tensor in model.state_dict().items() if "embed_positions" not in name}
    torch.save(weights, folder / "pytorch_model.bin")
    config = json.loads(model.config.to_json_string())
    config |= {"bad_words_ids": [[PAD]], "early_stopping": True, "length_penalty": 1.1, "num_hidden_layers": 2}
    config |= {"decoder": {"bos_token_id": 2, "model_type": "fsmt_decoder", "vocab_size": sizes[1]}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def converted(wmt: Path) -> Path:
    model = convert_fsmt(str(wmt))
    assert model.check() is not None  # within 1e-5
    return model.save(wmt.parent / "converted")


class TestModel:
    @settings(max_examples=8)
    @given(data=st.data())
    def test_any_model_translates_the_same(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        draw = data.draw
        tied = draw(st.booleans(), label="tied")
        source_size = draw(st.integers(8, 30), label="src_vocab_size")
        fsmt = make_fsmt(
            src_vocab_size=source_size,
            tgt_vocab_size=source_size if tied else draw(st.integers(8, 30), label="tgt_vocab_size"),
            tie_word_embeddings=tied,
            activation_function=draw(st.sampled_from(["relu", "swish", "gelu"])),
            scale_embedding=draw(st.booleans()),
            **{f"{side}_layers": draw(st.integers(1, 2)) for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": draw(st.sampled_from([1, 2, 8])) for side in ("encoder", "decoder")},
        )
        fsmt.generation_config.update(
            num_beams=draw(st.sampled_from([2, 5]), label="num_beams"),
            max_length=draw(st.integers(2, 12), label="max_length"),
            forced_eos_token_id=draw(st.sampled_from([None, END])),
            length_penalty=draw(st.sampled_from([0.6, 1.0, 1.1])),
            early_stopping=draw(st.sampled_from([False, True, "never"])),
        )
        folder = tmp_path_factory.mktemp("fsmt")
        fsmt.save_pretrained(folder)
        found = convert_fsmt(str(folder))
        assert found.tokenizer is None
        assert found.check() is not None  # within 1e-5
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        # Both take their positions from tokens alone, so that padding may be on either side.
        inputs = make_inputs(lengths, source_size, side=draw(st.sampled_from(["right", "left"])))
        assert generate(found.model, **inputs, **ENDLESS) == decode_greedily(fsmt, inputs)
        if fsmt_searches_well():
            # In float64, so that no two translations are as good as equal.
            assert generate(found.model.double(), **inputs) == generate(fsmt.double(), **inputs)

    @needs_search
    def test_the_files_of_an_old_model_give_the_same_model(self, wmt: Path, converted: Path) -> None:
        fsmt: Any = FSMTForConditionalGeneration.from_pretrained(wmt)
        model = AutoModelForSeq2SeqLM.from_pretrained(converted)
        assert isinstance(model, VanillaTransformerForConditionalGeneration)
        assert model.config.langs == ["en", "de"]
        settings = model.generation_config
        assert (settings.num_beams, settings.max_length, settings.length_penalty) == (5, 14, 1.1)
        assert (settings.early_stopping, settings.forced_eos_token_id, settings.decoder_start_token_id) == (True, 2, 2)
        inputs = make_inputs([9, 4, 1], fsmt.config.src_vocab_size)
        assert generate(model, **inputs) == generate(fsmt, **inputs)

    @pytest.mark.parametrize("pad_token_id", [0, 5])
    def test_positions_begin_behind_the_padding_token(self, tmp_path: Path, pad_token_id: int) -> None:
        make_fsmt(pad_token_id=pad_token_id).save_pretrained(tmp_path)
        found = convert_fsmt(str(tmp_path))
        assert found.model.config.position_offset == pad_token_id + 1
        assert found.check() is not None  # within 1e-5

    def test_padded_targets_give_the_logits_of_the_tokens(self, tmp_path: Path) -> None:
        """FSMT hides the padding of targets, which ours never looks at before the last token."""
        fsmt = make_fsmt()
        fsmt.save_pretrained(tmp_path)
        model = convert_fsmt(str(tmp_path)).model
        ids, mask = pad([[2, 7, 8, 9], [2, 5]], junk=PAD)
        batch = {**make_inputs([6, 3], 31), "decoder_input_ids": ids}
        with torch.no_grad():
            expected = fsmt(**batch, use_cache=False).logits
        assert_close(logits_of(model, **batch)[mask.bool()], expected[mask.bool()])


class TestTokenizer:
    def test_it_gives_the_same_ids_through_auto_tokenizer(self, wmt: Path, converted: Path) -> None:
        original, ours = (AutoTokenizer.from_pretrained(folder) for folder in (wmt, converted))
        assert type(ours) is type(original)
        texts = [*SENTENCES, "", "the sun's shining", "für ☃", "a  b; c&d"]
        assert ours(texts) == original(texts)
        ids = [[*range(4, 20), END, PAD], [40, 41, END]]
        for skip in (False, True):
            decoded = [tokenizer.batch_decode(ids, skip_special_tokens=skip) for tokenizer in (original, ours)]
            assert decoded[0] == decoded[1]
        assert (ours.src_lang, ours.tgt_lang, ours.model_max_length) == ("en", "de", 1024)

    def test_what_the_library_s_tokenizer_makes_of_targets_is_told(self, wmt: Path) -> None:
        converted = convert_fsmt(str(wmt))
        tokenizer: Any = converted.tokenizer
        # The note is needed as long as the library does that.
        assert tokenizer("a", text_target="two dogs")["labels"] == tokenizer("two dogs")["input_ids"]
        assert any("text_target with the source's vocabulary" in note for note in converted.notes)


class TestRefusals:
    def test_all_unsupported_features_are_named_at_once(self, tmp_path: Path) -> None:
        config = make_fsmt().config.to_dict() | {"normalize_before": True, "langs": ["en", ""], "pad_token_id": None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConversionError) as caught:
            convert_fsmt(str(tmp_path))
        for words in ("normalize_before is True", "langs must be", "pad_token_id is None"):
            assert words in str(caught.value)

    def test_a_table_that_is_not_the_sinusoids_is_refused(self, tmp_path: Path) -> None:
        fsmt = make_fsmt()
        with torch.no_grad():
            fsmt.model.encoder.embed_positions.weight[5, 3] += 0.01
        fsmt.save_pretrained(tmp_path)
        with pytest.raises(ConversionError, match=r"encoder\.embed_positions\.weight is not .* position 5 differs"):
            convert_fsmt(str(tmp_path))

    def test_another_model_s_vocabulary_is_refused(self, wmt: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(wmt, tmp_path / "model")
        vocabulary = json.loads((folder / "vocab-tgt.json").read_text())
        (folder / "vocab-tgt.json").write_text(json.dumps({**vocabulary, "more": len(vocabulary)}))
        with pytest.raises(ConversionError, match=f"the target vocabulary has the id {len(vocabulary)}"):
            convert_fsmt(str(folder))

    def test_without_sacremoses_the_extra_is_named(self, wmt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "sacremoses", None)
        with pytest.raises(ImportError, match=r"pip install 'vanilla-transformer\[convert\]'"):
            convert_fsmt(str(wmt))

    def test_damaged_files_are_refused(self, wmt: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(wmt, tmp_path / "model")
        settings = ("config.json", "tokenizer_config.json", "generation_config.json", "vocab-src.json")
        cases = [(name, content, str(folder)) for name in settings for content in ("[1]", "[" * 200_000)]
        for name in ("vocab-src.json", "vocab-tgt.json"):
            cases += [(name, '{"b": 3, "a": [7]}', rf"{name} is no vocabulary.*\n.*'a' has the id \[7\]")]
            cases += [(name, content, f"{name} is no vocabulary.*an id for each token") for content in ("[1]", "{")]
        for name, content, message in cases:
            whole = (folder / name).read_text() if (folder / name).exists() else "{}"
            (folder / name).write_text(content)
            with pytest.raises(ConversionError, match=message):
                convert_fsmt(str(folder))
            (folder / name).write_text(whole)
