"""The decoder alone as a language model: logits, losses, caches and generation."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import torch
from tiny_single_stacks import OPTIONS, NaiveStack, make_single_stack, run
from tiny_vanilla import assert_close, make_sentences, pad
from torch import nn


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits(options: str, attention: str, side: str) -> None:
    """A padded batch against loops over one sentence, one head and one position at a time."""
    model = make_single_stack("VanillaTransformerForCausalLM", attention, **OPTIONS[options])
    sentences = make_sentences([3, 6, 1])
    ids, mask = pad(sentences, side, junk=5)
    logits = run(model, input_ids=ids, attention_mask=mask).logits
    for row, sentence in enumerate(sentences):
        expected = torch.from_numpy(NaiveStack(model).next_token_logits(sentence)).float()
        assert_close(logits[row, mask[row].bool()], expected)


def test_language_model_is_torchs_encoder_with_a_causal_mask() -> None:
    model = make_single_stack("VanillaTransformerForCausalLM", attention_bias=True)
    config = model.config
    layer = nn.TransformerEncoderLayer(
        config.d_model, config.decoder_attention_heads, config.decoder_ffn_dim, dropout=0.0, batch_first=True
    )
    torchs = nn.TransformerEncoder(layer, config.decoder_layers, enable_nested_tensor=False).eval()
    for ours, theirs in zip(model.get_decoder().layers, torchs.layers, strict=True):
        attention = ours.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        theirs.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat([each.weight for each in projections]),
                "self_attn.in_proj_bias": torch.cat([each.bias for each in projections]),
                **{f"self_attn.out_proj.{name}": each for name, each in attention.out_proj.named_parameters()},
                **{f"linear1.{name}": each for name, each in ours.fc1.named_parameters()},
                **{f"linear2.{name}": each for name, each in ours.fc2.named_parameters()},
                **{f"norm1.{name}": each for name, each in ours.self_attn_layer_norm.named_parameters()},
                **{f"norm2.{name}": each for name, each in ours.final_layer_norm.named_parameters()},
            }
        )
    ids = torch.tensor(make_sentences([7, 7]))
    table = model.get_input_embeddings().weight
    angles = torch.arange(7)[:, None] / 10000 ** (torch.arange(0, config.d_model, 2) / config.d_model)
    positions = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
    with torch.no_grad():
        embedded = table[ids] * math.sqrt(config.d_model) + positions
        expected = torchs(embedded, mask=nn.Transformer.generate_square_subsequent_mask(7), is_causal=True) @ table.T
    assert_close(run(model, input_ids=ids).logits, expected)


class TestLanguageModelLoss:
    sentences = make_sentences([4, 7, 1])

    @pytest.fixture
    def model(self) -> Any:
        return make_single_stack("VanillaTransformerForCausalLM", label_smoothing=0.2, lm_head_bias=True)

    @pytest.fixture
    def batch(self) -> dict[str, torch.Tensor]:
        ids, mask = pad(self.sentences)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def naive(self, model: Any, smoothing: float) -> float:
        """Each token is predicted from those before it, the first from none: it is not predicted at all."""
        losses = []
        for sentence in self.sentences:
            for row, label in zip(NaiveStack(model).next_token_logits(sentence), sentence[1:], strict=False):
                log_probabilities = [score - math.log(sum(math.exp(each) for each in row)) for score in row]
                uniform = sum(log_probabilities) / len(log_probabilities)
                losses.append(-(1 - smoothing) * log_probabilities[label] - smoothing * uniform)
        assert len(losses) == 3 + 6
        return sum(losses) / len(losses)

    def test_evaluation_is_not_smoothed(self, model: Any, batch: dict[str, torch.Tensor]) -> None:
        outputs = run(model.eval(), **batch)
        assert float(outputs.loss) == pytest.approx(self.naive(model, 0.0), rel=1e-5)
        assert_close(outputs.logits, run(model, **{**batch, "labels": None}).logits)
        assert outputs.past_key_values is None

    def test_training_is_smoothed(self, model: Any, batch: dict[str, torch.Tensor]) -> None:
        outputs = run(model.train(), **batch)
        assert float(outputs.loss) == pytest.approx(self.naive(model, 0.2), rel=1e-5)
        assert_close(outputs.logits, run(model.eval(), **batch).logits)
        skipped = run(model.train(), **batch, skip_logits=True)
        assert skipped.logits is None
        assert float(skipped.loss) == pytest.approx(float(outputs.loss), rel=1e-5)

    def test_what_the_loss_is_divided_by(self, model: Any, batch: dict[str, torch.Tensor]) -> None:
        for count in (36, torch.tensor(36)):
            loss = run(model.eval(), **batch, num_items_in_batch=count).loss
            assert float(loss) == pytest.approx(self.naive(model, 0.0) * 9 / 36, rel=1e-5)

    def test_labels_that_a_collator_shifted(self, model: Any, batch: dict[str, torch.Tensor]) -> None:
        shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        loss = run(model.eval(), **batch, shift_labels=shifted).loss
        assert float(loss) == pytest.approx(self.naive(model, 0.0), rel=1e-5)

    @pytest.mark.parametrize("kept", [2, torch.tensor([0, 3])])
    def test_logits_to_keep(self, model: Any, batch: dict[str, torch.Tensor], kept: int | torch.Tensor) -> None:
        everything = run(model.eval(), **batch)
        rows = slice(-kept, None) if isinstance(kept, int) else kept
        for inputs in (batch, {**batch, "labels": None}):
            assert_close(run(model, **inputs, logits_to_keep=kept).logits, everything.logits[:, rows])
        assert torch.equal(run(model, **batch, logits_to_keep=kept).loss, everything.loss)


class TestGeneration:
    @pytest.fixture(params=["paper", "pre-LN", "learned"])
    def model(self, request: pytest.FixtureRequest) -> Any:
        return make_single_stack("VanillaTransformerForCausalLM", seed=1, **OPTIONS[request.param])

    def greedy(self, model: Any, prompt: list[int], length: int) -> list[int]:
        """The oracle: the likeliest next token, again and again."""
        naive, tokens = NaiveStack(model), list(prompt)
        while len(tokens) < len(prompt) + length and tokens[-1] != 2:
            tokens.append(int(naive.next_token_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    @pytest.mark.parametrize("cache", [None, "static"])
    def test_greedy(self, model: Any, cache: str | None) -> None:
        """A batch padded on the left gives what each prompt gives alone, and that is what the equations give."""
        prompts = [[0, *sentence] for sentence in make_sentences([1, 4, 2], seed=4)]
        ids, mask = pad(prompts, "left")
        found = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, cache_implementation=cache)
        expected = [self.greedy(model, prompt, 6) for prompt in prompts]
        assert len({tuple(tokens) for tokens in expected}) > 1, "prompts must matter"
        for row, tokens in zip(found[:, ids.shape[1] :].tolist(), expected, strict=True):
            assert row[: len(tokens)] == tokens
            assert set(row[len(tokens) :]) <= {1}

    def test_layers_that_are_computed_again_keep_no_tokens(self) -> None:
        model: Any = make_single_stack("VanillaTransformerForCausalLM", seed=1, dropout=0.0)
        arguments: Any = {"inputs": torch.tensor([[0, 5, 6]]), "max_new_tokens": 8, "do_sample": False}
        arguments["eos_token_id"] = None
        expected = model.generate(**arguments)
        model.train().gradient_checkpointing_enable()
        assert torch.equal(model.generate(**arguments), expected)

    def test_beams_are_the_best_of_all(self, model: Any) -> None:
        prompt = [0, 5]
        size = model.config.vocab_size
        naive = NaiveStack(model)
        totals = {}
        for pair in itertools.product(range(size), repeat=2):
            logits = naive.next_token_logits([*prompt, pair[0]])[1:]
            totals[pair] = sum(
                row[token] - math.log(sum(math.exp(each) for each in row))
                for row, token in zip(logits, pair, strict=True)
            )
        search = {"num_beams": size, "max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
        search |= {"eos_token_id": None, "length_penalty": 0.0, "num_return_sequences": 3}
        found = model.generate(torch.tensor([prompt]), **search)
        best = sorted(totals, key=lambda pair: -totals[pair])[:3]
        assert [tuple(row) for row in found[:, 2:].tolist()] == best

    def test_other_ways_to_the_same_text(self, model: Any) -> None:
        ids = torch.tensor([[0, 5, 6, 7]])
        settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        expected = model.generate(ids, **settings)
        drafting = make_single_stack("VanillaTransformerForCausalLM", seed=2)
        assert torch.equal(model.generate(ids, assistant_model=drafting, **settings), expected)
        assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **settings), expected)
        embedded = model.get_input_embeddings()(ids)
        assert torch.equal(model.generate(inputs_embeds=embedded, **settings), expected[:, 4:])
        begun = model.generate(ids, return_dict_in_generate=True, **{**settings, "max_new_tokens": 4})
        assert begun.past_key_values.get_seq_length() == 7
        rest = {**settings, "max_new_tokens": 6}
        assert torch.equal(model.generate(begun.sequences, past_key_values=begun.past_key_values, **rest), expected)


@pytest.mark.parametrize("begins_with", [0, 2])
def test_prompts_that_have_ended_are_told_of(begins_with: int, caplog: pytest.LogCaptureFixture) -> None:
    """Once; and `</s>` that begins a text, as in fairseq's models, ends none."""
    model = make_single_stack("VanillaTransformerForCausalLM", decoder_start_token_id=begins_with)
    assert model.config.bos_token_id == begins_with
    settings = {"max_new_tokens": 1, "do_sample": False}

    def count() -> int:
        return sum("ends with eos_token_id=2" in message for message in caplog.messages)

    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # the library's own
    fine, _ = pad([[begins_with], [begins_with, 4, 5]], "left")
    for prompts in ({"inputs": fine}, {"input_ids": fine}, {"inputs": fine[:1, -1:]}, {}):
        model.generate(**prompts, **settings)
    assert count() == 0
    ended, mask = pad([[begins_with, 4, 2], [begins_with, 4]], "left")
    for prompts in ({"inputs": ended}, {"input_ids": ended}):
        model.generate(**prompts, attention_mask=mask, **settings)
    assert count() == 1
    model.config.eos_token_id = None
    model.generate(ended, attention_mask=mask, **settings)


class TestPositionIds:
    """What trainers that pack texts (`SFTConfig(packing=True)`) give instead of a mask."""

    @pytest.mark.parametrize("told_by", ["positions", "positions and a cache", "float mask", "bool mask"])
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("options", ["paper", "learned"])
    def test_packed_texts_do_not_see_each_other(self, options: str, attention: str, told_by: str) -> None:
        """Each gives what it gives alone, from position 0 on; a mask is (B, 1, T, T)."""
        model = make_single_stack("VanillaTransformerForCausalLM", attention, **OPTIONS[options])
        rows = [make_sentences([3, 5, 2]), make_sentences([4, 6])]
        ids = torch.tensor([[*itertools.chain(*sentences)] for sentences in rows])
        positions = torch.tensor([[*itertools.chain(*(range(len(each)) for each in row))] for row in rows])
        known: dict[str, Any] = {"position_ids": positions, "use_cache": told_by == "positions and a cache"}
        if "mask" in told_by:
            blocks = [torch.block_diag(*(torch.ones(len(each), len(each)) for each in row)) for row in rows]
            allowed = torch.stack(blocks)[:, None].tril().bool()
            floats = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
            known = {"attention_mask": allowed if told_by == "bool mask" else floats}
        logits = run(model, input_ids=ids, **known).logits
        for row, sentences in zip(logits, rows, strict=True):
            expected = [run(model, input_ids=torch.tensor([sentence])).logits[0] for sentence in sentences]
            assert_close(row, torch.cat(expected))

    def test_they_replace_the_positions_that_the_mask_gives(self) -> None:
        """Also beyond the table of sinusoids, and with a cache."""
        model = make_single_stack("VanillaTransformerForCausalLM")
        ids, mask = pad(make_sentences([6, 4]), "left")
        expected = run(model, input_ids=ids, attention_mask=mask).logits[:, -1]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        found = run(model, input_ids=ids, attention_mask=mask, position_ids=positions)
        assert_close(found.logits[:, -1], expected)
        first = run(model, input_ids=ids[:, :3], attention_mask=mask[:, :3], position_ids=positions[:, :3])
        rest = {"input_ids": ids[:, 3:], "position_ids": positions[:, 3:], "past_key_values": first.past_key_values}
        assert_close(run(model, attention_mask=mask, **rest).logits[:, -1], expected)
        far = positions + model.config.max_position_embeddings
        assert not found.logits.allclose(run(model, input_ids=ids, attention_mask=mask, position_ids=far).logits)
        learned = make_single_stack("VanillaTransformerForCausalLM", position_embedding_type="learned")
        with pytest.raises(ValueError, match="A sequence of 30 tokens is too long for learned positions"):
            run(learned, input_ids=ids, attention_mask=mask, position_ids=far)
