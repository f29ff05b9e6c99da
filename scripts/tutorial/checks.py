"""Checks the answers to the tutorial's exercises: what is right comes from the model, what is wrong gets a hint.

A check runs an answer on cases with inputs that the notebook has not shown. The right values are the model's own, and
for the searches those of our solutions, which the notebook then compares with the model's. A wrong value is compared
with what well-known mistakes would give, and the hint that belongs to the mistake is said, in the student's language
(the end of english.txt and chinese.txt). No hint is a solution.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from vanilla_transformer.model.attention_vanilla_transformer import MultiHeadAttention, scaled_dot_product_attention
from vanilla_transformer.model.loss_vanilla_transformer import label_smoothed_cross_entropy, shift_tokens_right
from vanilla_transformer.model.positions_vanilla_transformer import concatenated_sinusoids, interleaved_sinusoids
from vanilla_transformer.model.search_vanilla_transformer import gnmt_length_penalty
from vanilla_transformer.training.recipe import paper_learning_rate
from vanilla_transformer.visualization.paper import attention_masks

from . import solutions

LANGUAGES = {"en": "english", "zh": "chinese"}
EXERCISES = [name for name, found in vars(solutions).items() if inspect.isfunction(found)]
Predict = Callable[[torch.Tensor], torch.Tensor]
TOLERANCE = 1e-4  # in float32, and for values that another order of operations has rounded


@dataclass
class Case:
    """What an answer is called with, the right result, and by the name of a hint what a mistake would give."""

    arguments: tuple[Any, ...]
    right: Any
    mistakes: Mapping[str, Any] = field(default_factory=dict)
    judge: Callable[[Any], str | None] = lambda answer: None  # a hint for what no fixed value shows
    errors: Mapping[type[Exception], str] = field(default_factory=dict)


def read_source(language: str) -> tuple[str, dict[str, str]]:
    """The tutorial's text in a language, with `[[names]]` of cells, and what its checks say, by name."""
    path = Path(__file__).with_name(f"{LANGUAGES[language]}.txt")
    text, _, said = path.read_text(encoding="utf-8").partition("\n[[messages]]\n")
    return text, dict(line.split(": ", 1) for line in said.splitlines() if line)


class Checker:
    """Decorates answers: says whether they are right, and gives back a function to go on with, theirs or ours."""

    def __init__(self, language: str, model: Any) -> None:
        self.messages = read_source(language)[1]
        self.model = model
        self.solved: dict[str, bool] = {}

    def __call__(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Checks an answer, whose name is that of the exercise, and prints what is to be said about it."""
        name = getattr(answer, "__name__", repr(answer))
        if name not in EXERCISES:
            raise ValueError(f"{name} is no exercise; these are: {', '.join(EXERCISES)}.")
        verdict = self.judge(name, answer)
        self.solved[name] = verdict is None
        number = EXERCISES.index(name) + 1
        if verdict is None:
            print("✓", self.messages["right"].format(number=number))
            return answer
        print("✗", self.messages["wrong"].format(number=number, hint=verdict))
        solution: Callable[..., Any] = getattr(solutions, name)
        return solution

    def judge(self, name: str, answer: Callable[..., Any]) -> str | None:
        """What is wrong with an answer, or `None`."""
        # As random as any, and the same each time, without a trace in the notebook's own random numbers.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            results: list[tuple[Any, Case]] = []
            stopped = None
            for case in _CASES[name](self.model):
                try:
                    found = answer(*copy.deepcopy(case.arguments))
                except NotImplementedError:
                    return self.messages["todo"]
                except Exception as error:
                    hints = [hint for kind, hint in case.errors.items() if isinstance(error, kind)]
                    said = {"kind": type(error).__name__, "error": error}
                    stopped = self.messages[hints[0] if hints else "error"].format(**said)
                    break
                results.append((_as_kind(found, case.right), case))
        return self._find_hint(results) or stopped

    def _find_hint(self, results: list[tuple[Any, Case]]) -> str | None:
        """What to say of results: the mistake that explains all of them, else one that explains the first wrong one."""
        wrong = next(((found, case) for found, case in results if _differs(found, case.right)), None)
        if wrong is None:
            return None
        found, case = wrong
        hints = [hint for hint, mistake in case.mistakes.items() if not _differs(found, mistake)]
        for hint in hints:
            if all(not _differs(found, case.mistakes.get(hint, case.right)) for found, case in results):
                return self.messages[hint]
        if special := hints[0] if hints else case.judge(found):
            return self.messages[special]
        kind, values = _differs(found, case.right) or ("", {})
        return self.messages[kind].format(**values)

    def compare(self, name: str, yours: torch.Tensor, models: torch.Tensor) -> None:
        """Prints by how much two tensors of one shape differ; a ValueError if rounding does not explain it."""
        difference = (yours - models).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, models.abs().max().item()):  # "not", because of NaN
            advice = "If the model has been trained since, run the notebook from its first cell."
            raise ValueError(f"{name}: yours and the model's differ by {difference}. {advice}")
        print(self.messages["compared"].format(name=name, difference=difference))

    def summary(self) -> None:
        """Prints which exercises are solved."""
        for number, name in enumerate(EXERCISES, start=1):
            print("✓" if self.solved.get(name) else "·", number, name)
        print(self.messages["summary"].format(solved=sum(self.solved.values()), total=len(EXERCISES)))


def _as_kind(found: Any, right: Any) -> Any:
    """Takes a tensor for the number or the list that is asked for: that is no mistake worth a word."""
    if isinstance(found, torch.Tensor) and isinstance(right, float | list):
        return found.tolist()
    if isinstance(found, tuple) and isinstance(right, tuple) and len(found) == len(right):
        return tuple(map(_as_kind, found, right))
    return float(found) if type(found) is int and isinstance(right, float) else found


def _differs(found: Any, right: Any) -> tuple[str, dict[str, Any]] | None:
    """The message that says how a result differs, and what is to be filled into it; `None` if it does not."""
    if not isinstance(found, type(right)) or (isinstance(right, tuple) and len(found) != len(right)):
        return "type", {"yours": type(found).__name__, "wanted": type(right).__name__}
    if isinstance(right, tuple):
        return next((problem for problem in map(_differs, found, right) if problem), None)
    if isinstance(right, float) and not math.isclose(found, right, rel_tol=TOLERANCE, abs_tol=1e-12):
        return "value", {"yours": found, "wanted": right}
    if isinstance(right, list) and found != right:
        return "value", {"yours": found, "wanted": right}
    return _tensors_differ(found, right) if isinstance(right, torch.Tensor) else None


def _tensors_differ(found: torch.Tensor, right: torch.Tensor) -> tuple[str, dict[str, Any]] | None:
    if found.shape != right.shape:
        return "shape", {"yours": tuple(found.shape), "wanted": tuple(right.shape)}
    if found.is_floating_point() != right.is_floating_point() or (found.dtype == torch.bool) != (
        right.dtype == torch.bool
    ):
        return "dtype", {"yours": found.dtype, "wanted": right.dtype}
    wrong = (~found.double().isclose(right.double(), rtol=0, atol=TOLERANCE, equal_nan=True)).nonzero()
    if len(wrong) == 0:
        return None
    if found.isnan().any():
        return "nan", {}
    place = tuple(wrong[0].tolist())
    return "values", {"place": list(place), "yours": found[place].item(), "wanted": right[place].item()}


# The cases of each exercise


def _positions(model: Any) -> Iterator[Case]:
    for length, width in ((7, model.config.d_model), (40, 6)):
        places, column = torch.arange(length, dtype=torch.float64), torch.arange(width)
        right = interleaved_sinusoids(places, width)
        mistakes = {
            "positions.exchanged": right.unflatten(1, (-1, 2)).flip(2).flatten(1),
            "positions.halves": concatenated_sinusoids(places, width),
            "positions.from_one": interleaved_sinusoids(places + 1, width),
            "positions.own_exponent": _sinusoids(places, column / width),
            "positions.doubled_exponent": _sinusoids(places, column // 2 * 4 / width),
            "positions.not_doubled": _sinusoids(places, column // 2 / width),
            "positions.not_divided": _sinusoids(places, column // 2 * 2),
        }
        yield Case((length, width), right.float(), mistakes)


def _sinusoids(places: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    angles = places[:, None] / 10000.0 ** exponents.double()
    return torch.where(torch.arange(len(exponents)) % 2 == 0, angles.sin(), angles.cos())


def _attention(model: Any) -> Iterator[Case]:
    some = (torch.arange(5)[:, None] + torch.arange(6)) % 3 > 0  # in each row and in each column
    for allowed in (some, torch.ones(2, 1, 1, 6, dtype=torch.bool)):
        query, key, value = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 7)
        right = scaled_dot_product_attention(nn.Module(), query, key, value, allowed, scaling=0.5)[0].transpose(1, 2)
        scores = query @ key.mT / 2
        masked = scores.masked_fill(~allowed, -torch.inf)
        weights = {
            "attention.scale": (2 * masked).softmax(-1),
            "attention.square": (masked / 2).softmax(-1),
            "attention.width": (masked * 2 / 6**0.5).softmax(-1),
            "attention.axis": masked.softmax(-2),
            "attention.inverted": scores.masked_fill(allowed, -torch.inf).softmax(-1),
            "attention.unmasked": scores.softmax(-1),
            "attention.masked_late": scores.softmax(-1) * allowed,
            "attention.zero": scores.masked_fill(~allowed, 0).softmax(-1),
            "attention.scores": masked.masked_fill(~allowed, 0),
        }
        mistakes = {name: each @ value for name, each in weights.items()} | {"attention.weights": masked.softmax(-1)}
        yield Case((query, key, value, allowed), right, mistakes)


def _heads(model: Any) -> Iterator[Case]:
    for heads, length in ((model.config.encoder_attention_heads, 5), (4, 7)):
        states = torch.randn(2, length, 8 * heads)
        right = MultiHeadAttention.split_heads(SimpleNamespace(num_heads=heads), states)  # type: ignore[arg-type]
        mistakes = {
            "heads.view": states.reshape(right.shape),
            "heads.order": right.transpose(1, 2),
            "heads.interleaved": states.unflatten(-1, (-1, heads)).movedim(-1, 1),
            "heads.sizes": states.unflatten(-1, (-1, heads)).transpose(1, 2),
        }
        yield Case((states, heads), right, mistakes)


def _padding(model: Any) -> Iterator[Case]:
    ids = torch.tensor([[5, 6, 7, 2, 1], [4, 8, 2, 1, 1], [9, 5, 6, 7, 2]])
    for each, pad in ((ids, model.config.pad_token_id), (ids.flip(1), 7)):
        right = (each != pad)[:, None, None]
        mistakes = {
            "padding.inverted": ~right,
            "padding.axes": right[:, 0, 0],
            "padding.end": right & (each != 2)[:, None, None],
            "padding.number": (each != 1)[:, None, None],
        }
        yield Case((each, pad), right, mistakes)


def _residual(model: Any) -> Iterator[Case]:
    layer, width = model.get_encoder().layers[0], model.config.d_model
    for epsilon in (1e-5, 0.5):
        x, sublayer, gain, bias = (
            torch.randn(2, 5, width),
            torch.randn(2, 5, width),
            torch.rand(width),
            torch.rand(width),
        )
        norm = nn.LayerNorm(width, eps=epsilon)
        norm.weight.copy_(gain)
        norm.bias.copy_(bias)
        total = x + sublayer
        centered, variance = total - total.mean(-1, keepdim=True), total.var(-1, keepdim=True, correction=0)
        deviation = (variance + epsilon).sqrt()
        by_position = (total - total.mean(1, keepdim=True)) / (
            total.var(1, keepdim=True, correction=0) + epsilon
        ).sqrt()
        mistakes = {
            "residual.missing": norm(sublayer),
            "residual.outside": x + norm(sublayer),
            "residual.variance": centered / (total.var(-1, keepdim=True) + epsilon).sqrt() * gain + bias,
            "residual.epsilon": centered / (variance.sqrt() + epsilon) * gain + bias,
            "residual.epsilon_missing": centered / variance.sqrt() * gain + bias,
            "residual.square_root": centered / (variance + epsilon) * gain + bias,
            "residual.axis": by_position * gain + bias,
            "residual.gain": centered / deviation,
            "residual.bias": centered / deviation * gain,
            "residual.mean": total / deviation * gain + bias,
        }
        right = layer.residual(x, lambda _, sublayer=sublayer: sublayer, norm)
        yield Case((x, sublayer, gain, bias, epsilon), right, mistakes)


def _feed_forward(model: Any) -> Iterator[Case]:
    layer = copy.deepcopy(model.get_encoder().layers[0])
    for parameter in (layer.fc1.bias, layer.fc2.bias):
        parameter.copy_(torch.randn_like(parameter))
    w1, b1, w2, b2 = (
        each.detach().clone() for linear in (layer.fc1, layer.fc2) for each in (linear.weight.T, linear.bias)
    )
    x = torch.randn(2, 5, len(w1))
    inner = x @ w1 + b1
    mistakes = {
        "feed_forward.linear": inner @ w2 + b2,
        "feed_forward.late": (inner @ w2 + b2).clamp(min=0),
        "feed_forward.early": ((x @ w1).clamp(min=0) + b1) @ w2 + b2,
        "feed_forward.bias": inner.clamp(min=0) @ w2,
        "feed_forward.inner": inner.clamp(min=0),
        "feed_forward.other": nn.functional.gelu(inner) @ w2 + b2,
        "feed_forward.residual": x + layer.feed_forward(x),
    }
    yield Case((x, w1, b1, w2, b2), layer.feed_forward(x), mistakes)


def _shift(model: Any) -> Iterator[Case]:
    labels = torch.tensor([[5, 6, 7, 8, 2], [9, 4, 2, -100, -100]])
    own = (model.config.decoder_start_token_id, model.config.pad_token_id)
    for start, pad in (own, (7, 3)):
        prepare = model.prepare_decoder_input_ids_from_labels
        right = prepare(labels) if (start, pad) == own else shift_tokens_right(labels, pad, start)
        filled, first = labels.masked_fill(labels == -100, pad), torch.full((2, 1), start)
        mistakes = {
            "shift.not": filled,
            "shift.not_filled": labels,
            "shift.left": nn.functional.pad(filled[:, 1:], (0, 1), value=pad),
            "shift.kept": torch.cat([first, labels[:, :-1]], 1),
            "shift.longer": torch.cat([first, filled], 1),
            "shift.start_missing": filled[:, :-1],
            "shift.around": filled.roll(1, 1),
            "shift.twice": torch.cat([first, first, filled[:, :-2]], 1),
        }
        yield Case((labels, start, pad), right, mistakes)


def _causal(model: Any) -> Iterator[Case]:
    for length in (5, 1, 8):
        right = torch.tensor(attention_masks([length], [length])["decoder"][0])
        mistakes = {
            "causal.transposed": right.T,
            "causal.inverted": ~right,
            "causal.strict": right.tril(-1),
            "causal.one_more": torch.ones(length, length).tril(1).bool(),
        }
        yield Case((length,), right, mistakes)


def _loss(model: Any) -> Iterator[Case]:
    labels = torch.tensor([[5, 6, 7, 2], [4, 2, -100, -100]])
    counted = labels != -100
    for epsilon in (0.0, 0.1, 0.4):
        logits = 2 * torch.randn(2, 4, 9)
        right = label_smoothed_cross_entropy(logits, labels, epsilon)
        log_p = logits[counted].log_softmax(-1)
        target = nn.functional.one_hot(labels[counted], 9) * 1.0
        smoothed = target * (1 - epsilon) + epsilon / 9
        cross_entropies = {
            "loss.plain": (target, log_p),
            "loss.others": (target * (1 - epsilon) + epsilon / 8 * (1 - target), log_p),
            "loss.mass": (target * (1 - epsilon) + epsilon / 9 * (1 - target), log_p),
            "loss.too_much": (target + epsilon / 9, log_p),
            "loss.exchanged": (target * epsilon + (1 - epsilon) / 9, log_p),
            "loss.axis": (smoothed, logits.log_softmax(1)[counted]),
            "loss.logits": (smoothed, logits[counted]),
            "loss.probabilities": (smoothed, log_p.exp()),
        }
        total = right * counted.sum()
        mistakes = {
            "loss.sign": -right,
            "loss.sum": total,
            "loss.padding": total / labels.numel(),
            "loss.sentences": total / len(labels),
        } | {name: -(q * each).sum(-1).mean() for name, (q, each) in cross_entropies.items()}
        yield Case((logits, labels, epsilon), right, mistakes)


def _rate(model: Any) -> Iterator[Case]:
    for step, width, warmup in ((1, 512, 4000), (4000, 512, 4000), (50, 32, 100), (900, 32, 100)):
        rise, fall, scale = step * warmup**-1.5, step**-0.5, width**-0.5
        mistakes = {
            "rate.maximum": scale * max(rise, fall),
            "rate.no_width": min(rise, fall),
            "rate.width": width**0.5 * min(rise, fall),
            "rate.no_warmup": scale * fall,
            "rate.never_falls": scale * rise,
            "rate.one_late": paper_learning_rate(step - 1, width, warmup),
            "rate.one_early": paper_learning_rate(step + 1, width, warmup),
        }
        errors: dict[type[Exception], str] = {ZeroDivisionError: "rate.one_late"}
        yield Case((step, width, warmup), paper_learning_rate(step, width, warmup), mistakes, errors=errors)
    yield Case((0, 512, 4000), 0.0, errors={ZeroDivisionError: "rate.zero"})


START, END, MOST = 0, 2, 8


def make_predictor(seed: int, vocabulary: int = 7) -> Predict:
    """A language model for checks: what comes next depends on the whole beginning, in no way that can be guessed."""
    table = 1.5 * torch.randn(97, vocabulary, generator=torch.Generator().manual_seed(seed))
    table[:, START] = -torch.inf  # no text has it twice
    log_p = table.log_softmax(-1)

    def predict(beginnings: torch.Tensor) -> torch.Tensor:
        if beginnings.ndim != 2:
            raise ValueError(f"predict takes beginnings (N, L), and got {tuple(beginnings.shape)}.")
        factors = torch.arange(beginnings.shape[1]) * 11 + 5
        likely = log_p[(beginnings * factors).sum(1) % len(log_p)]
        # What has ended could go on at no cost: a search that lets it must be noticed.
        has_ended = (beginnings == END).any(1, keepdim=True) & (torch.arange(vocabulary) == END)
        return likely.masked_fill(has_ended, -0.001)

    return predict


def _greedy(model: Any) -> Iterator[Case]:
    search = solutions.greedy_search
    for seed in range(6):
        predict = make_predictor(seed)
        right = search(predict, START, END, MOST)

        def forget(ids: torch.Tensor, predict: Predict = predict) -> torch.Tensor:
            return predict(ids[:, -1:])

        def negate(ids: torch.Tensor, predict: Predict = predict) -> torch.Tensor:
            return -predict(ids)

        # Each mistake is the right search with another question.
        mistakes = {
            "search.start": [START, *right],
            "search.end_missing": right[:-1],
            "search.endless": search(predict, START, -1, MOST),
            "search.one_more": search(predict, START, END, MOST + 1),
            "search.one_less": search(predict, START, END, MOST - 1),
            "greedy.last_only": search(forget, START, END, MOST),
            "greedy.least": search(negate, START, END, MOST),
        }
        yield Case((predict, START, END, MOST), right, mistakes)


def _beams(model: Any) -> Iterator[Case]:
    for seed in range(40):
        predict, beams = make_predictor(seed), 2 + seed % 2
        right = solutions.beam_search(predict, START, END, beams, 0.6, MOST)
        yield Case((predict, START, END, beams, 0.6, MOST), right, judge=partial(_judge_beams, predict, beams))


def _judge_beams(predict: Predict, beams: int, found: Any) -> str | None:
    """Names the mistake that an answer's own tokens and score give away."""
    ids, score = found if isinstance(found, tuple) and len(found) == 2 else ([], 0.0)
    if not (isinstance(ids, list) and ids and isinstance(score, float)):
        return None
    every = [START, *ids]
    problems = {
        "search.start": ids[0] == START,
        "search.endless": END in ids[:-1],
        "search.one_more": len(ids) > MOST,
    }
    for hint, is_so in problems.items():
        if is_so:
            return hint
    log_p = sum(float(predict(torch.tensor([every[:end]]))[0, every[end]]) for end in range(1, len(every)))
    penalty = partial(gnmt_length_penalty, alpha=0.6)
    scores = {
        "beam.multiplied": log_p * penalty(len(ids)),
        "beam.length": log_p / penalty(len(ids) - 1),
        "beam.start_counted": log_p / penalty(len(ids) + 1),
        "beam.library": log_p / len(ids) ** 0.6,
        "beam.unpenalized": log_p,
    }
    if not math.isclose(score, log_p / penalty(len(ids)), rel_tol=TOLERANCE):
        return next((name for name, each in scores.items() if math.isclose(score, each, rel_tol=TOLERANCE)), None)
    # The right score of a translation that is not the best.
    others = {
        "beam.greedy": solutions.greedy_search(predict, START, END, MOST),
        "beam.chosen_before": solutions.beam_search(predict, START, END, beams, 0.0, MOST)[0],
    }
    return next((name for name, each in others.items() if each == ids), "beam.other")


_CASES: dict[str, Callable[[Any], Iterator[Case]]] = dict(
    zip(
        EXERCISES,
        (
            *(_positions, _attention, _heads, _padding, _residual, _feed_forward),
            *(_shift, _causal, _loss, _rate, _greedy, _beams),
        ),
        strict=True,
    )
)
