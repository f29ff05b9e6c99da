"""What is read when a model is loaded, that nothing in it runs, and what is said of files that cannot be loaded."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_vanilla import make_config, make_model
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.model.modeling_vanilla_transformer import VanillaTransformerEncoder
from vanilla_transformer.model.pretrained_vanilla_transformer import VanillaTransformerPreTrainedModel, WeightsFileError
from vanilla_transformer.training.averaging import average_checkpoints

TEXTS = ["a man rides a horse", "two dogs"]
WEIGHTS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 52324\n"

Copy: TypeAlias = Callable[..., Path]


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = train_tokenizer(TEXTS * 3, vocab_size=275, show_progress=False)
    make_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "model"
    AutoModelForSeq2SeqLM.from_pretrained(saved).save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Copy:
    def copy_folder(source: Path = saved, **fields: Any) -> Path:
        folder = Path(shutil.copytree(source, tmp_path / "model"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        return folder

    return copy_folder


def refusal(load: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...] = WeightsFileError) -> str:
    with pytest.raises(kind) as caught:
        load()
    return str(caught.value)


def write_cache(cache: Path, folder: Path, absent: list[str]) -> None:
    """Writes the cache as it is after a download of someone/something: what it has, and what it is known to lack."""
    repository, commit = cache / "models--someone--something", "0" * 40
    shutil.copytree(folder, repository / "snapshots" / commit)
    files = {"refs/main": commit, **{f".no_exist/{commit}/{name}": "" for name in absent}}
    for path, text in files.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)


class TestNothingIsUnpickled:
    @pytest.fixture
    def mark(self, tmp_path: Path) -> Path:
        return tmp_path / "trapped"

    @pytest.fixture
    def trapped(self, copy: Copy, mark: Path) -> Path:
        """A folder whose weights are a trap; without a dtype in the configuration the library looks for one in them."""
        folder = copy(dtype=None)
        (folder / WEIGHTS).unlink()
        torch.save({"model.shared.weight": Trap(mark)}, folder / PICKLE)
        return folder

    def test_by_no_way_of_loading(self, trapped: Path, saved: Path, mark: Path, tmp_path: Path) -> None:
        make_pipeline: Any = pipeline
        classes: tuple[Any, ...] = (VanillaTransformerModel, AutoModel, AutoModelForSeq2SeqLM)
        for load in (
            *(model_class.from_pretrained for model_class in classes),
            lambda folder: make_pipeline("translation", model=str(folder), device="cpu"),
        ):
            # pipeline() makes a ValueError of it.
            message = refusal(lambda load=load: load(trapped), (WeightsFileError, ValueError))  # type: ignore[misc]
            said = f"Weights in a pickle ({PICKLE}) are not read"
            assert [
                part for part in (str(trapped), said, "use_safetensors=False", "save_pretrained") if part not in message
            ] == []
        assert len(AutoTokenizer.from_pretrained(trapped)) == 275
        with pytest.raises(ValueError, match="there are no weights"):
            average_checkpoints([saved, trapped], tmp_path / "average")
        # Asked for, torch reads tensors and nothing else.
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            AutoModelForSeq2SeqLM.from_pretrained(trapped, use_safetensors=False)
        assert not mark.exists()
        torch.load(trapped / PICKLE, weights_only=False)
        assert mark.exists()

    def test_a_pickle_beside_the_weights_is_left_alone(self, copy: Copy, mark: Path) -> None:
        folder = copy()
        for name in (PICKLE, "training_args.bin", "optimizer.pt"):
            torch.save(Trap(mark), folder / name)
        AutoModelForSeq2SeqLM.from_pretrained(folder)
        assert not mark.exists()

    def test_the_advice_works(self, copy: Copy, saved: Path, tmp_path: Path) -> None:
        folder = copy()
        original = VanillaTransformerForConditionalGeneration.from_pretrained(saved)
        torch.save(original.state_dict(), folder / PICKLE)
        (folder / WEIGHTS).unlink()
        AutoModelForSeq2SeqLM.from_pretrained(folder, use_safetensors=False).save_pretrained(tmp_path / "converted")
        assert (tmp_path / "converted" / WEIGHTS).read_bytes() == (saved / WEIGHTS).read_bytes()

    @pytest.mark.parametrize("known_to_lack_safetensors", [False, True])
    def test_nor_from_the_hub(self, trapped: Path, mark: Path, tmp_path: Path, known_to_lack_safetensors: bool) -> None:
        write_cache(tmp_path / "cache", trapped, [WEIGHTS, INDEX] if known_to_lack_safetensors else [])
        load = AutoModelForSeq2SeqLM.from_pretrained
        message = refusal(lambda: load("someone/something", cache_dir=tmp_path / "cache"))
        assert "someone/something" in message
        assert "Weights in a pickle" in message
        assert not mark.exists()

    def test_nor_in_an_adapter(self, copy: Copy, mark: Path, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        base, adapter, name = copy(), tmp_path / "adapter", "adapter_model.safetensors"
        model = VanillaTransformerForConditionalGeneration.from_pretrained(base)
        model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], r=2, base_model_name_or_path=str(base)))
        model.save_pretrained(adapter)
        assert AutoModelForSeq2SeqLM.from_pretrained(adapter).active_adapters() == ["default"]
        whole = (adapter / name).read_bytes()
        (adapter / name).write_bytes(whole[:-4])
        message = refusal(lambda: AutoModelForSeq2SeqLM.from_pretrained(adapter))
        assert f"{adapter / name} is cut off" in message
        (adapter / name).unlink()
        torch.save({"x": Trap(mark)}, adapter / "adapter_model.bin")
        write_cache(tmp_path / "cache", adapter, [name])
        load = VanillaTransformerForConditionalGeneration.from_pretrained
        message = refusal(lambda: load("someone/something", cache_dir=tmp_path / "cache"))
        assert "adapter_model.bin is not a safetensors file" in message
        assert not mark.exists()


class TestNothingRuns:
    def test_code_beside_a_checkpoint(self, copy: Copy, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        mark = tmp_path / "trapped"
        entry = {"impl": "evil.Evil", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
        auto = ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM", "AutoTokenizer")
        folder = copy(
            auto_map=dict.fromkeys(auto, "evil.Evil"),
            custom_pipelines={"translation": entry, "translation_en_to_de": entry},
            attn_implementation="evil/kernel",
            _attn_implementation="kernels-community/flash-attn2",
        )
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        code = f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\n"
        (folder / "custom_generate").mkdir()
        own = [path.name for path in folder.glob("*.py")]
        for name in ("evil.py", "custom_generate/generate.py", "__init__.py", "sitecustomize.py", *own):
            (folder / name).write_text(code)
        assert AutoConfig.from_pretrained(folder)._attn_implementation is None
        assert "attn_implementation='evil/kernel' of the file is ignored" in caplog.text
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder)
        AutoModel.from_pretrained(folder)
        make_pipeline: Any = pipeline
        for task in ("translation", "translation_en_to_de"):
            make_pipeline(task, model=str(folder), device="cpu")("two dogs", max_new_tokens=3)
        model.generate(**tokenizer("two dogs", return_tensors="pt"), max_new_tokens=3)
        assert not mark.exists()


class TestDamagedFiles:
    @pytest.mark.parametrize(
        ("damage", "complaint"),
        [
            (lambda whole: whole[:-4], "cut off or damaged ("),
            (lambda whole: whole[:5], "cut off or damaged ("),
            (lambda whole: b"", "cut off or damaged ("),
            (lambda whole: b"<!DOCTYPE html><html>", "cut off or damaged ("),
            (lambda whole: LFS_POINTER, "a pointer of git-lfs and not the weights: run `git lfs pull`"),
        ],
        ids=["cut off", "header cut off", "empty", "a page", "a pointer"],
    )
    @pytest.mark.parametrize("dtype", ["float32", None])  # without one the library looks for it in the weights
    def test_are_named(
        self, copy: Copy, damage: Callable[[bytes], bytes], complaint: str, dtype: str | None, tmp_path: Path
    ) -> None:
        folder, load = copy(dtype=dtype), AutoModelForSeq2SeqLM.from_pretrained
        (folder / WEIGHTS).write_bytes(damage((folder / WEIGHTS).read_bytes()))
        message = refusal(lambda: load(folder))
        assert f"{folder / WEIGHTS} is {complaint}" in message
        assert "download them again" in message
        write_cache(tmp_path / "cache", folder, [])
        message = refusal(lambda: load("someone/something", cache_dir=tmp_path / "cache"))
        assert f"{WEIGHTS} is {complaint}" in message

    def test_shards(self, sharded: Path, copy: Copy) -> None:
        """All that is damaged is said at once; the library names a file that is missing."""
        folder = copy(sharded)
        first, second, third, *_ = sorted(folder.glob("*.safetensors"))
        first.write_bytes(b"")
        second.write_bytes(LFS_POINTER)
        message = refusal(lambda: AutoModelForSeq2SeqLM.from_pretrained(folder))
        assert f"{first} is cut off" in message
        assert f"{second} is a pointer of git-lfs" in message
        shutil.rmtree(folder)
        copy(sharded)
        third.unlink()
        assert third.name in refusal(lambda: AutoModelForSeq2SeqLM.from_pretrained(folder), OSError)

    @pytest.mark.parametrize("text", ["{", LFS_POINTER.decode()])
    def test_an_index(self, sharded: Path, copy: Copy, text: str) -> None:
        folder = copy(sharded)
        (folder / INDEX).write_text(text)
        assert f"{folder / INDEX} is " in refusal(lambda: AutoModelForSeq2SeqLM.from_pretrained(folder))

    @pytest.mark.parametrize(
        ("cut", "message"),
        [
            (lambda text: text[: len(text) // 2], "is cut off or damaged"),
            (lambda text: "[]", "must be a JSON object, and is a list"),
            (lambda text: "null", "must be a JSON object, and is a NoneType"),
        ],
    )
    def test_settings_for_generate(self, copy: Copy, cut: Any, message: str) -> None:
        """The library would take others without a word: greedy search, say, instead of a beam of four."""
        folder = copy()
        file = folder / "generation_config.json"
        file.write_text(cut(file.read_text(encoding="utf-8")), encoding="utf-8")
        with pytest.raises(OSError, match=f"{re.escape(str(file))} {message}"):
            AutoModelForSeq2SeqLM.from_pretrained(folder)

    def test_other_failures_keep_their_errors(self, saved: Path, copy: Copy) -> None:
        with pytest.raises(TypeError, match="no_such_argument"):
            AutoModelForSeq2SeqLM.from_pretrained(saved, no_such_argument=1)
        folder = copy()
        (folder / WEIGHTS).unlink()
        assert WEIGHTS in refusal(lambda: AutoModelForSeq2SeqLM.from_pretrained(folder), OSError)
        load: Any = VanillaTransformerForConditionalGeneration.from_pretrained
        assert "someone/nothing" in refusal(lambda: load("someone/nothing", config=make_config()), OSError)


class WithNewHead(VanillaTransformerPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = VanillaTransformerModel(config)
        self.classifier = nn.Linear(config.d_model, 3)
        self.post_init()


class TestDisagreement:
    def test_each_wrong_shape_is_listed(self, saved: Path) -> None:
        message = refusal(
            lambda: AutoModelForSeq2SeqLM.from_pretrained(saved, decoder_ffn_dim=30, vocab_size=270), RuntimeError
        )
        for name, found, wanted in (
            ("model.decoder.layers.{0, 1}.fc1.weight", [20, 16], [30, 16]),
            ("model.decoder.layers.{0, 1}.fc1.bias", [20], [30]),
            ("model.decoder.layers.{0, 1}.fc2.weight", [16, 20], [16, 30]),
            ("model.shared.weight", [275, 16], [270, 16]),
        ):
            assert re.search(rf"{re.escape(name)} .*{re.escape(str(found))}.*{re.escape(str(wanted))}", message)
        assert message.count("MISMATCH") == 4

    @pytest.mark.parametrize("model_class", [AutoModel, AutoModelForSeq2SeqLM])
    @pytest.mark.parametrize(
        ("fields", "missing", "unexpected"),
        [
            ({"encoder_layers": 3}, "encoder.layers.{1, 2}.fc1.weight", None),
            ({"decoder_layers": 1}, None, "decoder.layers.1.encoder_attn.q_proj.weight"),
            ({"attention_bias": True}, "decoder.layers.{0, 1}.self_attn.q_proj.bias", None),
            ({"ffn_bias": False}, None, "encoder.layers.0.fc2.bias"),
            ({"normalize_before": True}, "decoder.layer_norm.weight", None),
            ({"position_embedding_type": "learned"}, "encoder.embed_positions.weight", None),
            ({"share_encoder_decoder_embeddings": False}, "decoder.embed_tokens.weight", "shared.weight"),
        ],
    )
    def test_names(
        self, saved: Path, model_class: Any, fields: dict[str, Any], missing: str | None, unexpected: str | None
    ) -> None:
        message = refusal(lambda: model_class.from_pretrained(saved, **fields), RuntimeError)
        for name, status in ((missing, "MISSING"), (unexpected, "UNEXPECTED")):
            assert (status in message) == (name is not None)
            assert name is None or re.search(rf"(model\.)?{re.escape(name)} *\| {status}", message)
        # As in the library, the user may want it so.
        anew = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = model_class.from_pretrained(saved, **fields, **anew)
        assert bool(info["missing_keys"]) == (missing is not None)
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())

    def test_a_model_of_its_own_class_must_be_whole(self, saved: Path) -> None:
        """Untied in the configuration only, the output layer would be random."""
        message = refusal(lambda: AutoModelForSeq2SeqLM.from_pretrained(saved, tie_word_embeddings=False), RuntimeError)
        assert re.search(r"lm_head\.weight *\| MISSING", message)

    def test_weights_of_something_else(self, saved: Path, copy: Copy) -> None:
        folder = copy()
        save_file({"bert.pooler.weight": torch.zeros(2)}, folder / WEIGHTS, metadata={"format": "pt"})
        message = refusal(lambda: AutoModel.from_pretrained(folder), RuntimeError)
        assert re.search(r"bert\.pooler\.weight *\| UNEXPECTED", message)
        # Names in a file begin with "model.encoder", so none of them is this class's.
        refusal(lambda: VanillaTransformerEncoder.from_pretrained(saved), RuntimeError)

    @pytest.mark.parametrize("tied", [True, False])
    def test_new_and_unused_parts_are_as_in_the_library(self, tied: bool, tmp_path: Path) -> None:
        make_model(tie_word_embeddings=tied).save_pretrained(tmp_path / "whole")

        def load(model_class: Any, folder: str) -> tuple[Any, set[str], set[str]]:
            model, info = model_class.from_pretrained(tmp_path / folder, output_loading_info=True)
            return model, info["missing_keys"], info["unexpected_keys"]

        output_layer = set() if tied else {"lm_head.weight"}
        base, *names = load(VanillaTransformerModel, "whole")
        assert names == [set(), output_layer]
        base.save_pretrained(tmp_path / "base")
        assert load(VanillaTransformerForConditionalGeneration, "base")[1:] == (output_layer, set())
        for folder in ("whole", "base"):
            assert load(WithNewHead, folder)[1] == {"classifier.weight", "classifier.bias"}
        refusal(lambda: WithNewHead.from_pretrained(tmp_path / "base", encoder_layers=2), RuntimeError)

    @pytest.mark.parametrize("kept", ["model.shared.weight", "lm_head.weight", "model.decoder.embed_tokens.weight"])
    def test_one_name_of_a_tied_weight_is_enough(self, saved: Path, copy: Copy, kept: str) -> None:
        folder = copy()
        tensors = load_file(folder / WEIGHTS)
        tensors[kept] = tensors.pop("model.shared.weight")
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        load = VanillaTransformerForConditionalGeneration.from_pretrained
        loaded, original = (load(each).state_dict() for each in (folder, saved))
        torch.testing.assert_close(loaded, original, rtol=0, atol=0)

    def test_other_ways_of_loading(self, saved: Path) -> None:
        """A state dict and a configuration; `test_placement` has number formats and devices."""
        original = VanillaTransformerForConditionalGeneration.from_pretrained(saved)
        load = VanillaTransformerForConditionalGeneration.from_pretrained
        state: dict[str, Any] = {"pretrained_model_name_or_path": None, "state_dict": original.state_dict()}
        folder: dict[str, Any] = {"pretrained_model_name_or_path": saved}
        ids = torch.tensor([[5, 6, 7, 2]])
        expected = original(input_ids=ids, decoder_input_ids=ids).logits
        wrong = make_config(vocab_size=275, encoder_layers=2)
        for way in (state, folder):
            found = load(**way, config=original.config).eval()(input_ids=ids, decoder_input_ids=ids).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for way in (state, {**folder, "device_map": "auto"}, {**folder, "dtype": torch.bfloat16}):
            with pytest.raises(RuntimeError, match=r"encoder\.layers\.1\.fc1"):
                load(**way, config=wrong)
