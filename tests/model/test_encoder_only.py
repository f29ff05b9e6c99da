"""The encoder alone and its heads against the paper's equations: states, logits, losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from naive_transformer import Array
from tiny_single_stacks import OPTIONS, NaiveStack, make_single_stack, run
from tiny_vanilla import assert_close, make_sentences, pad


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_states(options: str, attention: str, side: str) -> None:
    model = make_single_stack("VanillaTransformerEncoderModel", attention, **OPTIONS[options])
    sentences = make_sentences([3, 6, 1])
    ids, mask = pad(sentences, side, junk=5)
    states = run(model, input_ids=ids, attention_mask=mask).last_hidden_state
    for row, sentence in enumerate(sentences):
        expected = torch.from_numpy(NaiveStack(model).encode(sentence)).float()
        assert_close(states[row, mask[row].bool()], expected)


def softmax_loss(logits: Array, labels: list[int]) -> float:
    losses = [
        math.log(sum(math.exp(score) for score in row)) - row[label]
        for row, label in zip(logits, labels, strict=True)
        if label != -100
    ]
    return sum(losses) / len(losses)


class TestHeads:
    sentences = make_sentences([3, 6, 2])

    def states(self, model: Any) -> list[Array]:
        return [NaiveStack(model.base_model).encode(sentence) for sentence in self.sentences]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_sequences(self, side: str) -> None:
        """The last token's state counts; which that is says the mask, for ids and embeddings alike."""
        model = make_single_stack("VanillaTransformerForSequenceClassification", num_labels=3)
        weight, bias = (parameter.detach().double().numpy() for parameter in model.score.parameters())
        expected = np.stack([weight @ states[-1] + bias for states in self.states(model)])
        ids, mask = pad(self.sentences, side)
        outputs = run(model, input_ids=ids, attention_mask=mask, labels=torch.tensor([2, 0, 1]))
        assert_close(outputs.logits, torch.from_numpy(expected).float())
        assert float(outputs.loss) == pytest.approx(softmax_loss(expected, [2, 0, 1]), rel=1e-5)
        by_booleans = run(model, inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask.bool())
        assert_close(by_booleans.logits, outputs.logits)

    def test_other_kinds_of_labels(self) -> None:
        """Numbers give a squared error, several labels a text binary cross-entropies, as the library decides."""
        ids, mask = pad(self.sentences)
        one, three = (make_single_stack("VanillaTransformerForSequenceClassification", num_labels=n) for n in (1, 3))
        numbers, several = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 1]])
        outputs = run(one, input_ids=ids, attention_mask=mask, labels=numbers)
        assert float(outputs.loss) == pytest.approx(float((outputs.logits[:, 0] - numbers).square().mean()), rel=1e-5)
        outputs = run(three, input_ids=ids, attention_mask=mask, labels=several)
        p = outputs.logits.sigmoid()
        losses = -(several * p.log() + (1 - several) * (1 - p).log())
        assert float(outputs.loss) == pytest.approx(float(losses.mean()), rel=1e-4)

    def test_tokens(self) -> None:
        model = make_single_stack("VanillaTransformerForTokenClassification", num_labels=3)
        weight, bias = (parameter.detach().double().numpy() for parameter in model.score.parameters())
        expected = np.concatenate([states @ weight.T + bias for states in self.states(model)])
        ids, mask = pad(self.sentences)
        labels = torch.where(mask == 1, ids % 3, -100)
        labels[1, 2] = -100
        outputs = run(model, input_ids=ids, attention_mask=mask, labels=labels)
        real = mask.bool()
        assert_close(outputs.logits[real], torch.from_numpy(expected).float())
        loss = softmax_loss(expected, labels[real].tolist())
        assert float(outputs.loss) == pytest.approx(loss, rel=1e-5)
        halved = run(model, input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=20)
        assert float(halved.loss) == pytest.approx(loss * 10 / 20, rel=1e-5)

    def test_spans(self) -> None:
        model = make_single_stack("VanillaTransformerForQuestionAnswering")
        weight, bias = (parameter.detach().double().numpy() for parameter in model.qa_outputs.parameters())
        ids, mask = pad(self.sentences)
        starts, ends = torch.tensor([0, 2, 1]), torch.tensor([1, 5, 1])
        outputs = run(model, input_ids=ids, attention_mask=mask, start_positions=starts, end_positions=ends)
        for row, states in enumerate(self.states(model)):
            logits = torch.from_numpy(states @ weight.T + bias).float()
            assert_close(outputs.start_logits[row, : len(states)], logits[:, 0])
            assert_close(outputs.end_logits[row, : len(states)], logits[:, 1])
        assert (outputs.start_logits[mask == 0] == torch.finfo(torch.float32).min).all()
        expected = [
            softmax_loss(logits.double().numpy(), labels.tolist())
            for logits, labels in ((outputs.start_logits, starts), (outputs.end_logits, ends))
        ]
        assert float(outputs.loss) == pytest.approx(sum(expected) / 2, rel=1e-5)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_spans_at_padding_do_not_count(self, side: str) -> None:
        """Nor do those outside of the text. The loss is the mean over those that do; without any it is 0."""
        model = make_single_stack("VanillaTransformerForQuestionAnswering")
        ids, mask = pad(self.sentences, side)
        padding, absent = (0 if side == "left" else 5), torch.tensor([6, -100, 99])
        starts, ends = torch.tensor([padding, 4, padding]), torch.tensor([99, 3, -100])
        outputs = run(model, input_ids=ids, attention_mask=mask, start_positions=starts, end_positions=ends)
        expected = [
            softmax_loss(logits[1:2].double().numpy(), [place])
            for logits, place in ((outputs.start_logits, 4), (outputs.end_logits, 3))
        ]
        assert float(outputs.loss) == pytest.approx(sum(expected) / 2, rel=1e-5)
        for places in (absent, absent[:, None]):
            nothing = model(input_ids=ids, attention_mask=mask, start_positions=places, end_positions=places).loss
            assert nothing.item() == 0
        nothing.backward()
        assert all(float(parameter.grad.abs().max()) == 0 for parameter in model.parameters())

    @pytest.mark.parametrize("name", ["SequenceClassification", "QuestionAnswering"])
    def test_these_heads_have_to_know_padding(self, name: str) -> None:
        model = make_single_stack(f"VanillaTransformerFor{name}")
        ids, _ = pad(self.sentences)
        for mask in (torch.ones(3, 1, 6, 6), torch.ones(3, 1, 1, 6)):
            with pytest.raises(ValueError, match=r"attention_mask must be \(B, S\).*not 4-D"):
                model(input_ids=ids, attention_mask=mask)
