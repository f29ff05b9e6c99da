"""generate(): searches against brute force, padding and caches that change nothing, and the paper's length limit."""

from __future__ import annotations

import copy
import functools
import inspect
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny_vanilla import SHARING, TWO_VOCABULARIES, logits_of, make_model, make_sentences, pad, randomize
from transformers import EncoderDecoderCache, GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.generation import configuration_utils
from transformers.generation.configuration_utils import GenerationMode, WatermarkingConfig
from transformers.generation.logits_process import LogitsProcessorList, WatermarkLogitsProcessor
from transformers.generation.utils import (
    GENERATION_MODES_MAPPING,
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
    GenerationMixin,
)

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerGenerationMixin

Model = VanillaTransformerForConditionalGeneration

BOS, PAD, EOS = 0, 1, 2
MODELS: dict[str, dict[str, Any]] = {
    "paper": {"max_position_embeddings": 5},
    "learned-separate": {"position_embedding_type": "learned", "position_offset": 2, **SHARING["separate-untied"]},
    "pre-norm-free-widths": {"normalize_before": True, "d_k": 6, "d_v": 3, "attention": "eager", "position_offset": 1},
    "two-vocabularies": {
        "position_embedding_type": "sinusoidal_concatenated",
        "add_final_layer_norm": True,
        **TWO_VOCABULARIES["two-vocabularies-tied"],
    },
}
SOURCES = [[*sentence, EOS] for sentence in make_sentences([4, 1, 6])]
TARGETS = [[5, 9, 3, 12, 5, EOS], [7, EOS], [4, 8, 6, 10, 4, 11, 3, 9, 12, 5]]


@functools.cache
def shared_model(name: str) -> Model:
    """A model that has learned `TARGETS`: with random weights alone it would repeat one token for every source."""
    model = make_model(seed=4, scale=0.2, **MODELS[name])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.015)
    source_ids, source_mask = pad(SOURCES)
    labels, label_mask = pad(TARGETS)
    labels = labels.masked_fill(label_mask == 0, -100)
    for _ in range(45):
        model(input_ids=source_ids, attention_mask=source_mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    """Tests share these models and must not change them."""
    return shared_model(request.param)


def call_generate(model: Model, **arguments: Any) -> Any:
    # The library declares `self` as what a model and its mixin are together, which no class is.
    return cast(Any, model).generate(**arguments)


def generate(model: Model, **arguments: Any) -> Any:
    """What is generated, greedily and up to eight tokens unless `arguments` say otherwise."""
    return call_generate(model, **{"do_sample": False, "max_new_tokens": 8, **arguments})


def until_end(sequence: torch.Tensor) -> list[int]:
    tokens: list[int] = sequence.tolist()[1:]
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def log_probabilities(model: Model, source: list[int], prefix: list[int]) -> torch.Tensor:
    """Of each next token (V), computed without mask or cache."""
    inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([[BOS, *prefix]])}
    return logits_of(model, **inputs, use_cache=False)[0, -1].double().log_softmax(dim=-1)


def greedy(model: Model, source: list[int], length: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length and EOS not in tokens:
        tokens.append(int(log_probabilities(model, source, tokens).argmax()))
    return tokens


def test_models_say_what_they_learned(model: Model) -> None:
    for source, target in zip(SOURCES, TARGETS, strict=True):
        assert greedy(model, source, length=8) == target[:8]
        assert until_end(generate(model, input_ids=torch.tensor([source]))[0]) == target[:8]


def all_hypotheses(model: Model, source: list[int], length: int) -> list[tuple[float, list[int]]]:
    """Every sequence that ends with </s> or at the limit, with its log-probability."""
    finished: list[tuple[float, list[int]]] = []
    prefixes: list[tuple[float, list[int]]] = [(0.0, [])]
    for position in range(length):
        batch = torch.tensor([[BOS, *prefix] for _, prefix in prefixes])
        sources = torch.tensor([source]).expand(len(prefixes), -1)
        logits = logits_of(model, input_ids=sources, decoder_input_ids=batch, use_cache=False)[:, -1]
        extended = [
            (score + value, [*prefix, token])
            for (score, prefix), row in zip(prefixes, logits.double().log_softmax(dim=-1).tolist(), strict=True)
            for token, value in enumerate(row)
        ]
        is_last = position == length - 1
        finished += [item for item in extended if is_last or item[1][-1] == EOS]
        prefixes = [item for item in extended if item[1][-1] != EOS]
    return finished


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beam_search_equals_brute_force(seed: int, length_penalty: float) -> None:
    """With a beam for every prefix nothing is lost: the ten best of all sequences, with their scores."""
    vocab_size, length = 6, 4
    model = make_model(seed=seed, scale=0.3, vocab_size=vocab_size)
    source = [3, 5, 4, EOS]
    hypotheses = all_hypotheses(model, source, length)
    # Probabilities of everything that can be generated sum to one, or the search space would not be whole.
    assert torch.tensor([score for score, _ in hypotheses]).exp().sum() == pytest.approx(1.0, abs=1e-6)
    ranked = sorted(((score / len(tokens) ** length_penalty, tokens) for score, tokens in hypotheses), reverse=True)
    settings: dict[str, Any] = {"num_return_sequences": 10, "length_penalty": length_penalty, "early_stopping": "never"}
    settings |= {"num_beams": vocab_size * (vocab_size - 1) ** (length - 1), "return_dict_in_generate": True}
    output = call_generate(model, input_ids=torch.tensor([source]), max_new_tokens=length, **settings)
    assert isinstance(output, GenerateBeamEncoderDecoderOutput)
    assert [until_end(sequence) for sequence in output.sequences] == [tokens for _, tokens in ranked[:10]]
    scores = cast(torch.Tensor, output.sequences_scores).tolist()
    assert scores == pytest.approx([score for score, _ in ranked[:10]], abs=1e-5)


def test_caches_change_no_sample(model: Model) -> None:
    ids, mask = pad(SOURCES)
    results = []
    for cache in ({"use_cache": False}, {"use_cache": True}, {"cache_implementation": "static"}):
        torch.manual_seed(3)
        results.append(generate(model, input_ids=ids, attention_mask=mask, do_sample=True, **cache))
    assert results[1].equal(results[0])
    assert results[2].equal(results[0])


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("cache", [{"use_cache": False}, {"use_cache": True}, {"cache_implementation": "static"}])
def test_left_padded_decoder_prompt(model: Model, cache: dict[str, Any], num_beams: int) -> None:
    prompts = [[BOS, 5], [BOS, 7, 8, 9], [BOS]]
    source_ids, source_mask = pad(SOURCES)
    prompt_ids, prompt_mask = pad(prompts, "left")
    inputs = {"input_ids": source_ids, "attention_mask": source_mask}
    prompt_inputs = {"decoder_input_ids": prompt_ids, "decoder_attention_mask": prompt_mask}
    batched = generate(model, **inputs, **prompt_inputs, num_beams=num_beams, **cache)
    for row, source, prompt in zip(batched, SOURCES, prompts, strict=True):
        inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([prompt])}
        alone = generate(model, **inputs, num_beams=num_beams)
        new = row[prompt_ids.shape[1] - 1 :]
        assert until_end(new) == until_end(alone[0, len(prompt) - 1 :])


def test_samples_are_as_frequent_as_they_are_probable() -> None:
    model, count = make_model(seed=4, scale=0.2), 4000
    settings = {"do_sample": True, "top_k": 0, "num_return_sequences": count, "max_new_tokens": 1}
    samples = generate(model, input_ids=torch.tensor(SOURCES[:1]), **settings)
    frequencies = samples[:, 1].bincount(minlength=17) / count
    probabilities = log_probabilities(model, SOURCES[0], []).exp()
    deviation = (probabilities * (1 - probabilities) / count).sqrt()
    assert ((frequencies - probabilities).abs() < 5 * deviation + 1e-3).all()


@pytest.mark.parametrize("helper", ["same weights", "other weights", "prompt"])
def test_assisted_decoding_equals_greedy(model: Model, helper: str) -> None:
    settings: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if helper != "prompt":
        settings = {"assistant_model": copy.deepcopy(model)}
    if helper == "other weights":
        randomize(settings["assistant_model"], seed=9)
    for source in SOURCES:
        inputs = {"input_ids": torch.tensor([source]), "max_new_tokens": 12}
        assert generate(model, **inputs, **settings).equal(generate(model, **inputs))


@pytest.mark.parametrize("target_size", [11, 30])
def test_rules_and_drafts_know_the_target_s_vocabulary(target_size: int) -> None:
    sizes: dict[str, Any] = {"decoder_vocab_size": target_size, "share_encoder_decoder_embeddings": False}
    model = make_model(seed=4, scale=0.6, **sizes)
    for source in SOURCES:
        inputs = {"input_ids": torch.tensor([source]), "max_new_tokens": 20, "repetition_penalty": 1.01}
        assert generate(model, **inputs, prompt_lookup_num_tokens=3).equal(generate(model, **inputs))
        watermark = WatermarkLogitsProcessor(target_size, "cpu", bias=9.0)
        settings = WatermarkingConfig(bias=9.0)
        expected = generate(model, **inputs, logits_processor=LogitsProcessorList([watermark]))
        assert generate(model, **inputs, watermarking_config=settings).equal(expected)


def test_generation_continues_from_a_cache(model: Model) -> None:
    """The library feeds only what is new if a mask of the target says that all of it is given."""
    ids, mask = pad(SOURCES)
    inputs = {"input_ids": ids, "attention_mask": mask, "suppress_tokens": [EOS]}
    expected = generate(model, **inputs)
    first = generate(model, **inputs, max_new_tokens=4, return_dict_in_generate=True)
    assert isinstance(first, GenerateEncoderDecoderOutput)
    cache = cast(EncoderDecoderCache, first.past_key_values)
    assert cache.get_seq_length() == 4
    known = {"decoder_input_ids": first.sequences, "decoder_attention_mask": torch.ones_like(first.sequences)}
    rest = generate(model, **inputs, **known, max_new_tokens=4, past_key_values=cache)
    assert rest.equal(expected)
    assert cache.get_seq_length() == 8


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("side", ["left", "right"])
def test_batched_equals_one_by_one(model: Model, side: str, num_beams: int) -> None:
    """An empty source too, and beside a row of nothing but padding."""
    sources = [*SOURCES, [EOS]]
    ids, mask = pad([*sources, [PAD]], side)
    mask[-1] = 0
    batched = generate(model, input_ids=ids, attention_mask=mask, num_beams=num_beams)
    assert ((batched >= 0) & (batched < model.config.target_vocab_size)).all()
    for row, source in zip(batched, sources, strict=False):
        alone = generate(model, input_ids=torch.tensor([source]), num_beams=num_beams)
        assert until_end(row) == until_end(alone[0])


def new_tokens(model: Model, source_length: int, **arguments: Any) -> int:
    ids = torch.tensor(make_sentences([source_length]))
    prompt = arguments.get("decoder_input_ids", torch.tensor([[BOS]]))
    output = call_generate(model, input_ids=ids, suppress_tokens=[EOS], **arguments)
    return output.shape[1] - prompt.shape[1]


@pytest.mark.parametrize("search", [{}, {"num_beams": 2}, {"do_sample": True}, {"cache_implementation": "static"}])
def test_default_limit_is_the_paper_s(search: dict[str, Any]) -> None:
    """Section 6.1: input length + 50, though the table of sinusoids ends long before."""
    model = shared_model("paper")
    assert new_tokens(model, source_length=3, **search) == 53
    assert new_tokens(model, source_length=11, **search) == 61


def test_default_limit_counts_padding_embeddings_and_encoder_outputs() -> None:
    """However the source is given, the output is the same; a prompt does not count."""
    model = shared_model("paper")
    ids, mask = pad(make_sentences([2, 7]))
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)
        embeddings = model.get_input_embeddings()(ids)
    for search in ({"num_beams": 1}, {"num_beams": 3}):
        outputs = [
            call_generate(model, **source, attention_mask=mask, suppress_tokens=[EOS], **search)
            for source in (
                {"input_ids": ids},
                {"inputs_embeds": embeddings},
                {"encoder_outputs": encoded},
                {"encoder_outputs": encoded.to_tuple()},
            )
        ]
        whole = {"inputs_embeds": embeddings, "attention_mask": mask.bool()[:, None, None]}
        # A mask of another form is not counted: all may be as long as the longest.
        assert call_generate(model, **whole, suppress_tokens=[EOS], **search).shape == outputs[0].shape
        assert outputs[0].shape == (2, 1 + 57)
        assert all(outputs[0].equal(each) for each in outputs[1:])
    assert new_tokens(model, source_length=3, decoder_input_ids=torch.tensor([[BOS, 4, 5]])) == 53


def test_without_an_end_what_is_behind_a_limit_is_padding() -> None:
    """Sentences have limits of their own; no tokenizer can decode a number below 0."""
    ids, mask = pad(make_sentences([2, 7]))
    found = call_generate(shared_model("paper"), input_ids=ids, attention_mask=mask, num_beams=2, eos_token_id=None)
    assert found.shape == (2, 1 + 57)
    assert (found[0, 1 + 52 :] == PAD).all()


def test_layers_that_keep_nothing_for_gradients_search_as_others(model: Model) -> None:
    ids, mask = pad(SOURCES)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "num_beams": 3, "max_new_tokens": 9}
    expected = call_generate(model, **inputs)
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.dropout = model.config.attention_dropout = model.config.activation_dropout = 0.0
    model.train()
    model.gradient_checkpointing_enable()
    assert call_generate(model, **inputs).equal(expected)


def test_what_a_call_says_counts_after_a_training_with_generation() -> None:
    """`Seq2SeqTrainer` writes the library's defaults into the model's settings; those of a call may be the same."""
    model = make_model(seed=4)
    model.generation_config.update(num_beams=4)
    model.generation_config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    greedy = copy.deepcopy(model.generation_config)
    greedy.num_beams = 1
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[5, 6, 7]]), "return_dict_in_generate": True}
    for _ in range(2):  # nothing is changed on the way
        assert "Beam" not in type(call_generate(model, **inputs, generation_config=greedy)).__name__
        assert "Beam" in type(call_generate(model, **inputs)).__name__
    assert (greedy.num_beams, greedy.min_length, greedy.length_penalty) == (1, 0, 1.0)


def test_the_default_type_of_tensors_may_be_another() -> None:
    model, inputs = make_model(seed=4), {"input_ids": torch.tensor([[5, 6, 7]]), "num_beams": 3, "max_new_tokens": 9}
    expected = call_generate(model, **inputs)
    for dtype in (torch.bfloat16, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            assert call_generate(model, **inputs).equal(expected)
        finally:
            torch.set_default_dtype(torch.float32)


def test_explicit_limits_win() -> None:
    model = make_model(seed=4)
    for limit, count in (({"max_new_tokens": 5}, 5), ({"max_new_tokens": 70}, 70), ({"max_length": 5}, 4)):
        assert new_tokens(model, source_length=3, **limit) == count
    special = {"decoder_start_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}
    for limit, count in (({"max_new_tokens": 6}, 6), ({"max_length": 20}, 19)):
        assert new_tokens(model, source_length=3, generation_config=GenerationConfig(**special, **limit)) == count
    assert new_tokens(model, source_length=3, generation_config=GenerationConfig(**special)) == 53
    own = model.generation_config
    own.max_length = 9
    assert new_tokens(model, source_length=3) == 8
    assert new_tokens(model, source_length=3, max_new_tokens=5) == 5
    own.max_length, own.max_new_tokens = None, 7
    assert new_tokens(model, source_length=3) == 7
    own.max_new_tokens = None
    assert new_tokens(model, source_length=3) == 53


def test_greedy_search_asked_of_a_model_for_beam_search_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library warns of a length penalty without beams, but not if one is the model's and the other the call's."""
    warnings: list[str] = []
    monkeypatch.setattr(configuration_utils.logger, "warning_once", warnings.append)
    model = make_model(seed=4)
    model.generation_config.update(num_beams=4, length_penalty=0.6)
    assert new_tokens(model, source_length=3, num_beams=1) == 53
    assert new_tokens(model, source_length=3, num_beams=1, length_penalty_type="gnmt") == 53
    assert not warnings
    new_tokens(model, source_length=3, num_beams=1, length_penalty=0.6)
    assert "['length_penalty']" in warnings[0]


def test_minimum_lengths() -> None:
    model = make_model(seed=4, lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[EOS] = 100.0
    ids = torch.tensor(SOURCES[:1])
    assert until_end(generate(model, input_ids=ids)[0]) == [EOS]
    for minimum in ({"min_new_tokens": 3}, {"min_length": 4}):
        tokens = until_end(generate(model, input_ids=ids, **minimum)[0])
        assert (len(tokens), tokens[-1]) == (4, EOS)
    # Without a limit of its own the call keeps the paper's, and the minimum still holds.
    tokens = until_end(call_generate(model, input_ids=ids, min_new_tokens=3)[0])
    assert len(tokens) == 4


@pytest.mark.parametrize("search", [{}, {"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("prompt", [[BOS], [BOS, 4, 5]], ids=["start", "prompt"])
def test_default_limit_ends_with_learned_positions(prompt: list[int], search: dict[str, Any]) -> None:
    model = make_model(seed=4, position_embedding_type="learned", max_position_embeddings=14, position_offset=2)
    asked: list[int] = []
    table = model.get_decoder().embed_positions
    table.register_forward_pre_hook(lambda _, arguments: asked.append(int(arguments[0].max())))
    prompt_ids = torch.tensor([prompt])
    count = new_tokens(model, source_length=3, decoder_input_ids=prompt_ids, **search)
    # 12 positions hold the prompt and all that is generated but the last token, which is not fed back.
    assert count == 12 - len(prompt) + 1
    assert max(asked) == 11
    with pytest.raises(ValueError, match="A sequence of 13 tokens is too long for learned positions"):
        new_tokens(model, source_length=3, decoder_input_ids=prompt_ids, max_new_tokens=count + 1, **search)


def test_many_and_few_learned_positions() -> None:
    for count, prompt, expected in ((200, [BOS], 53), (4, [BOS, 4, 5, 6], 1)):
        model = make_model(seed=4, position_embedding_type="learned", max_position_embeddings=count)
        assert new_tokens(model, source_length=3, decoder_input_ids=torch.tensor([prompt])) == expected


# The library's hooks

HOOKS = {
    *("_prepare_generation_config", "_expand_inputs_for_generation", "_prepare_cache_for_generation", "_sample"),
    *("_prepare_generated_length", "_beam_search", "compute_transition_scores"),
    *("_get_logits_processor", "_get_candidate_generator"),
}


def test_overridden_hooks_are_the_library_s() -> None:
    own = vars(VanillaTransformerGenerationMixin).items()
    overridden = {name for name, value in own if inspect.isfunction(value) and hasattr(GenerationMixin, name)}
    assert overridden == HOOKS, "list in HOOKS what VanillaTransformerGenerationMixin overrides"
    for name in HOOKS:
        advice = f"transformers moved GenerationMixin.{name}: override what took its place, for old versions too"
        hook = getattr(GenerationMixin, name, None)
        assert hook is not None, advice
        # Without `self`, which one of them lacks in some versions.
        theirs, ours = (list(inspect.signature(each).parameters) for each in (hook, getattr(Model, name)))
        passes_on = ours[1:] == ["args", "kwargs"]
        assert passes_on or [item for item in theirs if item != "self"] == ours[1:], advice
    source = inspect.getsource(GenerationMixin.generate)
    for name in ("generation_config", "generated_length", "cache_for_generation"):
        assert f"self._prepare_{name}(" in source, f"generate() no longer calls _prepare_{name}"
    assert "self._expand_inputs_for_generation(" in source, "generate() repeats the source for each beam on its own"
    # What BeamSearch and its decoders call.
    called = ("_has_unfinished_sequences", "_prefill", "_update_model_kwargs_for_generation")
    for name in (*called, "_valid_auto_compile_criteria"):
        assert hasattr(GenerationMixin, name)
    assert GENERATION_MODES_MAPPING[GenerationMode.BEAM_SEARCH] == "_beam_search"
    assert "GENERATION_MODES_MAPPING[" in source, "generate() no longer looks up how to search by name"


class TestAfterTheLibrarysTrainer:
    """`Seq2SeqTrainer` writes the library's default of 20 tokens into the generation config of what it evaluates."""

    def evaluate(self, model: Model, folder: Path) -> torch.Tensor:
        row = {"input_ids": [5] * 9 + [EOS], "labels": [6] * 9 + [EOS]}
        settings: dict[str, Any] = {"per_device_eval_batch_size": 1, "report_to": [], "disable_tqdm": True}
        arguments = Seq2SeqTrainingArguments(str(folder), predict_with_generate=True, use_cpu=True, **settings)
        trainer = Seq2SeqTrainer(model, arguments, data_collator=pad_rows)
        return torch.as_tensor(trainer.predict(cast(Any, [row, row])).predictions)

    def make_endless(self) -> Any:
        model = make_model(seed=4)
        model.generation_config.eos_token_id = None
        return model

    def test_no_output_is_cut_off(self, tmp_path: Path) -> None:
        model, source = self.make_endless(), torch.tensor([[5] * 9 + [EOS]])
        expected = model.generate(source)
        assert expected.shape == (1, 1 + 10 + 50)
        first, second = self.evaluate(model, tmp_path)
        assert torch.equal(first, second), "batches after the first are cut off"
        # A folder that the Trainer wrote before is read so too, also by a pipeline, which has a copy of the settings.
        model.generation_config.save_pretrained(tmp_path)
        settings = GenerationConfig.from_pretrained(tmp_path)
        assert settings.max_length == 20
        assert torch.equal(model.generate(source, generation_config=settings), expected)
        model.save_pretrained(tmp_path)
        assert GenerationConfig.from_pretrained(tmp_path).max_length is None
        assert torch.equal(cast(Any, Model.from_pretrained(tmp_path)).generate(source), expected)

    @pytest.mark.parametrize("limit", [20, 30])
    def test_a_limit_of_ones_own_stays(self, tmp_path: Path, limit: int) -> None:
        model = self.make_endless()
        model.generation_config.max_length = limit
        if limit != 20:
            self.evaluate(model, tmp_path)
        model.save_pretrained(tmp_path)
        saved: Any = Model.from_pretrained(tmp_path)
        assert saved.generate(torch.tensor([[5] * 9 + [EOS]])).shape == (1, limit)


def pad_rows(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
