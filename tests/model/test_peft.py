"""LoRA adapters of PEFT: trained for real, saved alone, merged, and loaded by every road, the Hub's included."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from huggingface_hub import hf_api
from letters import TEXTS, TOKENIZER, logits_of, make_letters_model, train_on_letters, translate
from local_hub import LocalHub
from peft import AutoPeftModelForSeq2SeqLM, LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file
from tiny_vanilla import INPUTS, SHARING, make_model
from transformers import AutoModelForSeq2SeqLM, pipelines

from vanilla_transformer import VanillaTransformerForConditionalGeneration

pipeline: Any = pipelines.pipeline  # its types know only the tasks that the library has itself

LABELS = {"input_ids": INPUTS["input_ids"], "labels": torch.tensor([[7, 8, 9, 2]])}


class Trained(NamedTuple):
    """A model that copies letters, and an adapter that makes it reverse them."""

    base: Path
    adapter: Path
    model: Any
    losses: list[float]


def take_step(model: Any) -> torch.Tensor:
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    model(**LABELS).loss.backward()
    optimizer.step()
    return logits_of(model, **INPUTS)


def adapt(model: Any, **changes: Any) -> Any:
    settings = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    return get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, **{**settings, **changes}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    base = make_letters_model()
    train_on_letters(base, folder / "training", steps=150)
    base.save_pretrained(folder / "base")
    TOKENIZER.save_pretrained(folder / "base")

    # An adapter names the model it was made for by where that was loaded from.
    model = adapt(AutoModelForSeq2SeqLM.from_pretrained(folder / "base"))
    losses = train_on_letters(model, folder / "training", reverse=True, steps=150)
    model.eval().save_pretrained(folder / "adapter")
    return Trained(folder / "base", folder / "adapter", model, losses)


def test_training_an_adapter_lowers_the_loss_and_leaves_the_model_alone(trained: Trained) -> None:
    assert trained.losses[-1] < 0.3 * trained.losses[0]
    assert TOKENIZER.batch_decode(translate(trained.model), skip_special_tokens=True) == [text[::-1] for text in TEXTS]
    after = {
        name.replace("base_layer.", ""): tensor for name, tensor in trained.model.get_base_model().state_dict().items()
    }
    for name, tensor in load_file(trained.base / "model.safetensors").items():
        assert torch.equal(after[name], tensor), name
    trainable = [name for name, parameter in trained.model.named_parameters() if parameter.requires_grad]
    config = trained.model.config
    assert len(trainable) == 4 * (config.encoder_layers + 2 * config.decoder_layers)  # A and B for each projection
    assert len(load_file(trained.adapter / "adapter_model.safetensors")) == len(trainable)
    assert all(".q_proj.lora_" in name or ".v_proj.lora_" in name for name in trainable)
    with trained.model.disable_adapter():
        assert translate(trained.model) == translate(AutoModelForSeq2SeqLM.from_pretrained(trained.base))


def test_merging_changes_neither_logits_nor_tokens(trained: Trained, tmp_path: Path) -> None:
    model = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(trained.base), trained.adapter)
    assert torch.equal(logits_of(model), logits_of(trained.model))
    merged = model.merge_and_unload()
    assert type(merged) is VanillaTransformerForConditionalGeneration
    torch.testing.assert_close(logits_of(merged), logits_of(trained.model), atol=1e-4, rtol=0.0)
    merged.save_pretrained(tmp_path)
    for one in (merged, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
        for num_beams in (1, 3):
            assert translate(one, num_beams) == translate(trained.model, num_beams)
    assert translate(merged) != translate(AutoModelForSeq2SeqLM.from_pretrained(trained.base))


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied after merging")
@pytest.mark.parametrize("sharing", SHARING)
def test_a_merged_model_is_saved_whole_whatever_tables_it_shares(sharing: str, tmp_path: Path) -> None:
    model = adapt(make_model(**SHARING[sharing]), init_lora_weights=False)
    expected = logits_of(model, **INPUTS)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(logits_of(loaded, **INPUTS), expected, atol=1e-4, rtol=1e-4)
    assert loaded.config.tie_word_embeddings == SHARING[sharing]["tie_word_embeddings"]


# huggingface_hub's own call of httpx.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_an_adapter_is_pushed_and_pulled_by_name(trained: Trained) -> None:
    load = AutoModelForSeq2SeqLM.from_pretrained
    with LocalHub(tokens={"hf_alice": "alice"}) as hub, hub.client("hf_alice") as patch:
        patch.setenv("HF_HUB_OFFLINE", "0")  # which PEFT reads itself, and it asks the client made at import
        patch.setattr(hf_api.api, "endpoint", hub.endpoint)
        load(trained.base).push_to_hub("alice/copies")
        TOKENIZER.push_to_hub("alice/copies")
        model: Any = PeftModel.from_pretrained(load("alice/copies"), trained.adapter)
        model.peft_config["default"].base_model_name_or_path = "alice/copies"
        model.push_to_hub("alice/reverses")
        loaded = load("alice/copies")
        loaded.load_adapter("alice/reverses")
        models: list[Any] = [
            PeftModel.from_pretrained(load("alice/copies"), "alice/reverses"),
            AutoPeftModelForSeq2SeqLM.from_pretrained("alice/reverses"),
            load("alice/reverses"),
            loaded,
        ]
        translator = pipeline("translation", model="alice/reverses", device="cpu")
        translations = [result["translation_text"] for result in translator(TEXTS)]
        names = set(hub.files("alice/reverses")) - {".gitattributes"}
    expected = translate(trained.model)
    assert [translate(model) for model in models] == [expected] * 4
    assert translations == TOKENIZER.batch_decode(expected, skip_special_tokens=True)
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert names == {path.name for path in trained.adapter.iterdir()}


@pytest.mark.parametrize("sharing", ["shared-tied", "separate-tied"])
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied after merging")
def test_trainable_tokens_keep_tied_tables_one(sharing: str, tmp_path: Path) -> None:
    model = adapt(make_model(**SHARING[sharing]), trainable_token_indices=[5, 6]).train()
    expected = take_step(model)
    before = make_model(**SHARING[sharing]).get_input_embeddings().weight
    merged = model.merge_and_unload()
    rows = (merged.get_input_embeddings().weight != before).any(dim=1).nonzero().flatten()
    assert rows.tolist() == [5, 6]
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(loaded, **INPUTS), expected, atol=1e-4, rtol=1e-4)
    assert loaded.lm_head.weight is loaded.model.decoder.embed_tokens.weight


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied after merging")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer is part of the adapter")
def test_an_output_layer_trained_whole_gets_weights_of_its_own(tmp_path: Path) -> None:
    model = adapt(make_model(), modules_to_save=["lm_head"], init_lora_weights=False).train()
    expected = take_step(model)
    model.merge_and_unload().save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(loaded, **INPUTS), expected, atol=1e-4, rtol=1e-4)
    assert not loaded.config.tie_word_embeddings
    assert loaded.model.encoder.embed_tokens.weight is loaded.model.decoder.embed_tokens.weight


def test_the_loss_calls_an_adapted_output_layer() -> None:
    plain = make_model(**SHARING["separate-untied"], label_smoothing=0.1)
    model = adapt(plain, target_modules=["lm_head"], init_lora_weights=False).train()
    loss = model(**LABELS).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert len(gradients) == 2
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    torch.testing.assert_close(loss, model(**LABELS, skip_logits=False).loss)
    with model.disable_adapter():
        assert not torch.isclose(loss, model(**LABELS).loss)


@pytest.mark.parametrize("sharing", SHARING)
def test_checkpointing_gives_adapters_the_same_gradients(sharing: str) -> None:
    def gradients(use_reentrant: bool | None) -> dict[str, torch.Tensor | None]:
        model = make_model(**SHARING[sharing])
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(0)
        adapted = adapt(model, init_lora_weights=False).train()
        adapted(**LABELS, use_cache=False).loss.backward()
        return {name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad}

    expected = gradients(None)
    assert all(gradient is not None for gradient in expected.values())
    for use_reentrant in (False, True):
        for name, gradient in gradients(use_reentrant).items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)
