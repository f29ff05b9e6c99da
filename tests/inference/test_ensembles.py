"""Ensembles, against the mean of probabilities computed naively and the library's own searches over it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vanilla import make_model, make_sentences, pad
from transformers import GenerationMixin

from vanilla_transformer.commands import evaluate as evaluate_command
from vanilla_transformer.commands import translate as translate_command
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.inference.ensembles import Ensemble, load_ensemble
from vanilla_transformer.inference.translate import translate

BOS, EOS = 0, 2
SIZES: list[dict[str, Any]] = [
    {},
    {"d_model": 16, "encoder_layers": 1, "position_offset": 2},
    {"normalize_before": True, "position_embedding_type": "learned", "max_position_embeddings": 60},
]
MEMBERS = [make_model(seed=seed, scale=0.6, **sizes) for seed, sizes in enumerate(SIZES)]
ENSEMBLE: Any = Ensemble(MEMBERS)
VOCAB_SIZE = MEMBERS[0].config.vocab_size


def mean_log_probs(source: list[int], target: list[int]) -> torch.Tensor:
    """Of each next token of one sentence, (T, V), with a pass of every member over all of it."""
    inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target])}
    with torch.no_grad():
        probabilities = [member(**inputs).logits[0].double().softmax(dim=-1) for member in MEMBERS]
    return (sum(probabilities) / len(MEMBERS)).log()


class Naive(Ensemble):
    """The library's own searches over a forward pass that repeats the source and averages naively."""

    _beam_search = GenerationMixin._beam_search
    _sample = GenerationMixin._sample
    _expand_inputs_for_generation = GenerationMixin._expand_inputs_for_generation


class Quick(Ensemble):
    """One whose members must have caches of their own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a whole prefix is read again")


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99), beams=st.integers(1, 4))
@settings(max_examples=15)
def test_searches_find_what_the_library_finds_without_caches(lengths: list[int], seed: int, beams: int) -> None:
    input_ids, attention_mask = pad(make_sentences(lengths, VOCAB_SIZE, seed))
    options: Any = {"input_ids": input_ids, "attention_mask": attention_mask, "num_beams": beams, "max_new_tokens": 9}
    options |= {"length_penalty_type": "transformers", "num_return_sequences": beams}
    kinds: Any = (Quick, Naive)
    found, expected = (kind(MEMBERS).generate(**options).tolist() for kind in kinds)
    assert found == expected


def test_greedy_search_takes_the_token_of_the_largest_mean() -> None:
    for source in make_sentences([3, 7, 5], VOCAB_SIZE):
        tokens = [BOS]
        while len(tokens) < 12 and tokens[-1] != EOS:
            tokens.append(int(mean_log_probs(source, tokens)[-1].argmax()))
        found = ENSEMBLE.generate(torch.tensor([source]), num_beams=1, max_new_tokens=11)
        assert found[0].tolist() == tokens


def test_the_fewest_learned_positions_are_the_limit() -> None:
    more = make_model(position_embedding_type="learned", max_position_embeddings=80)
    any_number = make_model(max_position_embeddings=16)
    assert Ensemble([any_number, more, MEMBERS[2]]).config is MEMBERS[2].config
    assert Ensemble([more, any_number]).config is more.config
    short = make_model(position_embedding_type="learned", max_position_embeddings=9)
    for name, value, longest in (("max_new_tokens", 60, 9), ("max_length", 60, 8), ("max_new_tokens", 5, 5)):
        first = make_model()
        setattr(first.generation_config, name, value)
        ensemble: Any = Ensemble([first, short])
        found = ensemble.generate(torch.tensor([[4, 5]]), eos_token_id=None)
        assert found.shape == (1, 1 + longest)
        assert getattr(first.generation_config, name) == value


def test_the_forward_pass_gives_the_mean() -> None:
    sources, targets = make_sentences([4, 6], VOCAB_SIZE), [[BOS, 5, 6, 7], [BOS, 9, 4, 8]]
    input_ids, attention_mask = pad(sources)
    logits = ENSEMBLE(input_ids, attention_mask, torch.tensor(targets)).logits
    for row, source, target in zip(logits, sources, targets, strict=True):
        torch.testing.assert_close(row.double(), mean_log_probs(source, target), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{"do_sample": True}, {"return_dict_in_generate": True, "output_scores": True}])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_needs_every_row_works_without_caches(settings: dict[str, Any], beams: int) -> None:
    input_ids, attention_mask = pad(make_sentences([4, 6], VOCAB_SIZE))
    options: Any = {"attention_mask": attention_mask, "num_beams": beams, "max_new_tokens": 6, **settings}
    results = []
    kinds: Any = (Ensemble, Naive)
    for kind in kinds:
        torch.manual_seed(3)
        found = kind(MEMBERS).generate(input_ids, **options, length_penalty_type="transformers")
        results.append(found if isinstance(found, torch.Tensor) else found.sequences)
    assert results[0].tolist() == results[1].tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models with one tokenizer, and one with another."""
    root = tmp_path_factory.mktemp("models")
    names = ("first", "second", "stranger")
    for seed, name in enumerate(names):
        words = "a b c d e f g" if name != "stranger" else "a b c d e f h"
        tokenizer = train_tokenizer([words], model_type="wordlevel")
        make_model(seed=seed, scale=0.6, vocab_size=len(tokenizer)).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return [str(root / name) for name in names]


def test_members_have_weights_of_one_type() -> None:
    half: Any = copy.deepcopy(MEMBERS[0]).bfloat16()
    with pytest.raises(ValueError, match=r"torch.float32 in the first, torch.bfloat16 in number 2.*--dtype"):
        Ensemble([MEMBERS[0], half])


def test_the_commands_take_several_models(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["a b c", "d e f g a", "b"]
    source = tmp_path / "source.txt"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    loaded: Any = load_ensemble(folders[:2], device="cpu")
    ensemble, tokenizer = loaded
    search: Any = {"num_beams": 3, "length_penalty": 1.0, "length_penalty_type": "transformers", "max_new_tokens": 7}
    expected = translate(ensemble, tokenizer, lines, **search, progress=False)
    assert expected != translate(load_ensemble(folders[:1])[0], tokenizer, lines, **search, progress=False)

    options = ["--device", "cpu", *(word for name, value in search.items() for word in (f"--{name}", str(value)))]
    translate_command.main(["--model_name_or_path", *folders[:2], "--input_file", str(source), *options])
    assert capsys.readouterr().out.splitlines() == expected
    words = ["--model_name_or_path", *folders[:2], "--test_file", str(source), str(source), *options]
    evaluate_command.main([*words, "--output_dir", str(tmp_path / "scored")])
    metrics = json.loads((tmp_path / "scored" / "metrics.json").read_text(encoding="utf-8"))
    assert (tmp_path / "scored" / "hypotheses.txt").read_text(encoding="utf-8").splitlines() == expected
    assert [each["model_name_or_path"] for each in metrics["ensemble"]] == folders[:2]
    assert metrics["parameters"] == sum(member.num_parameters() for member in ensemble.members)
    rows = [tokenizer(line)["input_ids"] for line in lines]
    total = 0.0
    for row in rows:
        with torch.no_grad():
            log_probs = ensemble(torch.tensor([row]), decoder_input_ids=torch.tensor([[BOS, *row[:-1]]])).logits[0]
        total -= float(log_probs[range(len(row)), row].sum())
    assert metrics["loss"] == pytest.approx(total / sum(map(len, rows)), rel=1e-5)


def test_the_commands_refuse_strangers(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ([*folders[1:]], "stranger has another vocabulary than"),
        (
            [*folders[:2], "--engine", "ctranslate2"],
            "--engine ctranslate2 takes one model; --model_name_or_path names 2",
        ),
        ([folders[0], "no/where/at/all"], "no/where/at/all"),
    ):
        with pytest.raises(SystemExit):
            translate_command.main(["--model_name_or_path", *words, "--device", "cpu"])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "at least one model"),
        ([MEMBERS[0], torch.nn.Linear(2, 2)], "Member 2 of the ensemble is a Linear"),
        ([MEMBERS[0], make_model(vocab_size=29)], "vocab_size is 17 in the first and 29 in number 2"),
        (
            [make_model(langs=["en", "de"]), MEMBERS[0], make_model(langs=["de", "en"])],
            "the same languages, not en to de and de to en .number 3",
        ),
    ],
)
def test_what_cannot_vote_together_is_refused(members: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ensemble(members)


def test_it_is_not_saved_and_takes_no_cache() -> None:
    with pytest.raises(NotImplementedError, match="save its members"):
        Ensemble(MEMBERS).save_pretrained("folder")
    cache = MEMBERS[0](torch.tensor([[4]]), decoder_input_ids=torch.tensor([[0]]), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="takes no past_key_values"):
        ENSEMBLE.generate(torch.tensor([[4, 5]]), past_key_values=cache)
