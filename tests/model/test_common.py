"""The library's own common tests of models and tokenizers, run on ours.

They are in the library's source distribution only. `scripts/test` unpacks that of the installed version into the
environment; where it is not, these tests are skipped. Nothing of them is in this repository.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from tiny_vanilla import make_config

import vanilla_transformer as package
from vanilla_transformer.data.tokenizer_training import train_tokenizer

FOLDER = Path(sys.prefix) / "library_tests" / f"transformers-{transformers.__version__}" / "tests"


def load(name: str) -> Any:
    """A module of the library's tests, in which those that the distribution lacks are empty."""
    pytest.importorskip("parameterized", reason="the library's own tests need it")
    if not FOLDER.is_dir():
        pytest.skip(f"{FOLDER} is missing: run scripts/test", allow_module_level=True)
    absent = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
    for path in ("", *(part for each in absent for part in (each.partition(".")[0], each))):
        full = f"library_tests.{path}".rstrip(".")
        if full not in sys.modules:
            sys.modules[full] = types.ModuleType(full)
            vars(sys.modules[full]).update(__path__=[] if path else [str(FOLDER)])
        if path in absent:
            setattr(sys.modules[full], absent[path], type(absent[path], (), {}))
    return importlib.import_module(f"library_tests.{name}")


MODELS, TOKENIZERS = load("test_modeling_common"), load("test_tokenization_common")


pytestmark = pytest.mark.filterwarnings("ignore")  # they cause some themselves


class ModelMaker:
    """Makes what the common tests ask for."""

    batch_size, seq_length, is_training = 3, 7, True
    num_hidden_layers, num_attention_heads, hidden_size = 1, 4, 16

    def __init__(self, parent: Any) -> None:
        self.parent = parent

    def get_config(self) -> Any:
        return make_config(
            vocab_size=99,
            encoder_layers=1,
            decoder_layers=1,
            decoder_attention_heads=4,
            is_encoder_decoder=self.parent.side is None,
            is_decoder=self.parent.side == "decoder",
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = torch.randint(4, 99, (self.batch_size, self.seq_length))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.parent.side is None:
            inputs |= {"decoder_input_ids": ids.flip(0), "decoder_attention_mask": torch.ones_like(ids)}
        return self.get_config(), inputs


NOT_OURS = {
    "test_bc_torch_dtype": "a name of an argument that the library reads itself; slow",
    "test_generation_tester_mixin_inheritance": "the library's distribution lacks its tests of generate()",
    "test_model_weights_reload_no_missing_tied_weights": "a file without the weights is refused, and not filled",
    "test_resize_position_vector_embeddings": "it asks for one learned table; see test_position_tables_are_resized",
}
# Of the comparisons of eager attention with SDPA those that a CPU tells apart, in float32: all of them take a minute.
NOT_OURS |= {
    name: "float32 with a mask is enough, and a CPU has one kernel"
    for name in dir(MODELS.ModelTesterMixin)
    if name.startswith("test_eager_matches_sdpa_inference_")
    and ("_fp32_" not in name or name.endswith(("_kernels", "_no_attn_mask")))
}


def skip(reason: str) -> Any:
    return unittest.skip(reason)(lambda _: None)


Skipped: Any = type("Skipped", (), {name: skip(reason) for name, reason in NOT_OURS.items()})


class CommonModelTests(Skipped, MODELS.ModelTesterMixin):  # type: ignore[name-defined]
    side: str | None = None

    def setUp(self: Any) -> None:
        self.model_tester = ModelMaker(self)
        headless = tuple(each.__name__ for each in self.all_model_classes if "For" not in each.__name__)
        # Where it looks up which models have no loss.
        self.enterContext(patch.dict(MODELS.MODEL_MAPPING_NAMES, vanilla_transformer=headless))


class TestEncoderDecoder(CommonModelTests, unittest.TestCase):
    is_encoder_decoder = True
    all_model_classes = (package.VanillaTransformerModel, package.VanillaTransformerForConditionalGeneration)


class TestEncoderOnly(CommonModelTests, unittest.TestCase):
    side = "encoder"
    all_model_classes = (
        package.VanillaTransformerEncoderModel,
        package.VanillaTransformerForSequenceClassification,
        package.VanillaTransformerForTokenClassification,
        package.VanillaTransformerForQuestionAnswering,
    )


class TestDecoderOnly(CommonModelTests, unittest.TestCase):
    side = "decoder"
    all_model_classes = (package.VanillaTransformerDecoderModel, package.VanillaTransformerForCausalLM)


class TestTokenizer(TOKENIZERS.TokenizerTesterMixin, unittest.TestCase):  # type: ignore[name-defined]
    tokenizer_class = rust_tokenizer_class = package.VanillaTransformerTokenizer

    @unittest.skip("ready tokenizers are arguments, but no settings that can be saved")
    def test_tokenizer_store_full_signature(self) -> None: ...

    @classmethod
    def setUpClass(cls: Any) -> None:
        cls._data = "A man rides a horse.\nHe was born in 92000, and this is falsé. 生活的真谛是\n"
        cls.tmpdirname = tempfile.mkdtemp()
        texts = [cls._data, "This is a test of lower and newer words, hello world"] * 5
        train_tokenizer(texts, vocab_size=400, show_progress=False).save_pretrained(cls.tmpdirname)
        cls.from_pretrained_id = [cls.tmpdirname]
        cls.tokenizers_list = [(cls.tokenizer_class, cls.tmpdirname, {})]
