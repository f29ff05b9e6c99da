"""Flex attention against eager attention: forward passes and searches, with padding, of all models.

The library compiles flex attention, which takes minutes for a few sizes. Here it runs as written, in torch's own eager
form: the masks, which are what a model gets wrong, are the same. On a CPU torch has no backward pass of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_single_stacks import make_single_stack
from tiny_vanilla import make_model, make_sentences, pad

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),  # the library gives it
]

SENTENCES = make_sentences([7, 3, 5])
SOURCE, MASK = pad(SENTENCES, junk=5)
# d_k is not d_v, and one number of heads is no power of two, which flex attention treats in another way.
SIZES: dict[str, Any] = {"encoder_attention_heads": 3, "d_k": 4, "d_v": 8}


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def as_flex(model: Any) -> Any:
    flex = copy.deepcopy(model)
    flex.set_attn_implementation("flex_attention")
    assert flex.config._attn_implementation == "flex_attention"
    return flex


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_equal_those_of_eager_attention(side: str) -> None:
    model = make_model("eager", **SIZES)
    ids, mask = pad(SENTENCES, side, junk=5)
    target = SOURCE[:, :4].flip(1)
    target_mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": mask}
    inputs |= {"decoder_input_ids": target, "decoder_attention_mask": target_mask}
    with torch.no_grad():
        expected, actual = (each(**inputs).logits[target_mask.bool()] for each in (model, as_flex(model)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "search",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 3, "length_penalty_type": "gnmt", "length_penalty": 0.6},
        {"num_beams": 3, "use_cache": False},
        {"do_sample": True, "num_return_sequences": 3},
    ],
    ids=["greedy", "beams", "gnmt", "no-cache", "sampling"],
)
def test_searches_find_what_eager_attention_finds(search: dict[str, Any]) -> None:
    """The beams of a sentence share its source, folded into longer queries: the mask must be that of the sentences."""
    found: list[Any] = []
    model: Any = make_model("eager", **SIZES)
    for each in (model, as_flex(model)):
        torch.manual_seed(0)
        found.append(each.generate(SOURCE, attention_mask=MASK, max_new_tokens=8, **search))
    assert found[0].shape[1] > 4
    assert found[1].equal(found[0])


def test_a_decoder_alone_continues_prompts_padded_on_the_left() -> None:
    model = make_single_stack("VanillaTransformerForCausalLM", "eager")
    prompts, mask = pad(SENTENCES, "left")
    arguments = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert as_flex(model).generate(prompts, **arguments).equal(model.generate(prompts, **arguments))


@pytest.mark.parametrize("kind", ["static", "offloaded_static"])
def test_a_static_cache_is_refused(kind: str) -> None:
    for model in (make_model("eager"), make_single_stack("VanillaTransformerForCausalLM", "eager")):
        with pytest.raises(ValueError, match=f"cache_implementation='{kind}' needs masks that are tensors"):
            as_flex(model).generate(SOURCE, attention_mask=MASK, max_new_tokens=3, cache_implementation=kind)
