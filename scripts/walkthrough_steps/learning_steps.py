"""Steps 11 to 14 of the walk: the loss, one training step and many, and what the model can do then.

Shapes: B  batch, S  source length, T  target length, N  words of the targets, V  vocabulary.
"""

import random

import torch
from transformers.utils.logging import tqdm

from vanilla_transformer.training.recipe import paper_learning_rate

from .equations import adam_update, beam_score, smoothed_targets
from .task import END, PAD, SPECIAL_TOKENS, START
from .walk import Walk

BATCH_SIZE = 64
WARMUP_STEPS = 100  # the paper: 4,000
LONGEST_TRANSLATION = 12  # the paper: the source's length + 50


def compute_loss(walk: Walk, logits: torch.Tensor) -> None:
    """Step 11: label smoothing and the loss."""
    smoothing, vocab_size = walk.config.label_smoothing, walk.config.vocab_size
    labels = walk.batch["labels"]
    counted = labels != -100
    targets = smoothed_targets(labels[counted], vocab_size, smoothing)  # q, (N, V)
    log_probabilities = logits[counted].log_softmax(dim=-1)  # log p, (N, V)
    losses = -(targets * log_probabilities).sum(dim=-1)

    right = int(labels[0, 0])
    walk.out.say("loss", smoothing=smoothing, right=targets[0, right].item(), wrong=targets[0, PAD].item())
    shown = torch.cat([labels[0, :1], logits[0, 0].topk(3).indices])
    rows = torch.stack([targets[0], log_probabilities[0].exp(), -log_probabilities[0]])
    walk.out.rows(["q", "p", "-log p"], rows[:, shown], walk.vocabulary.decode(shown), digits=4)
    walk.out.say(
        "loss_sum",
        first=losses[0].item(),
        count=len(losses),
        mean=losses.mean().item(),
        floor=smallest_loss(walk),
        right=best_probability(walk),
    )
    walk.model.train()  # only then does the model smooth labels; it has no dropout
    walk.out.check("loss", losses.mean(), walk.model(**walk.batch).loss)
    walk.model.eval()


def best_probability(walk: Walk) -> float:
    """What label smoothing wants the right word to have."""
    smoothing = walk.config.label_smoothing
    return 1 - smoothing + smoothing / walk.config.vocab_size


def smallest_loss(walk: Walk) -> float:
    """The loss of a model that gives each word the smoothed probability: the entropy of q."""
    q = smoothed_targets(torch.tensor([0]), walk.config.vocab_size, walk.config.label_smoothing)
    return -(q * q.log()).sum().item()


def make_optimizer(walk: Walk) -> torch.optim.Optimizer:
    """Adam as in 5.3; its learning rate is set before each update."""
    return torch.optim.Adam(walk.model.parameters(), betas=(0.9, 0.98), eps=1e-9)


def set_learning_rate(walk: Walk, optimizer: torch.optim.Optimizer, update: int) -> float:
    """Sets equation 3's rate for an update, counted from 1, and returns it."""
    rate = paper_learning_rate(update, walk.config.d_model, WARMUP_STEPS)
    optimizer.param_groups[0]["lr"] = rate
    return rate


def update_once(walk: Walk, optimizer: torch.optim.Optimizer) -> None:
    """Step 12: one training step, taken apart."""
    walk.out.say("learning_rate", warmup_steps=WARMUP_STEPS)
    updates = [1, WARMUP_STEPS // 2, WARMUP_STEPS, 4 * WARMUP_STEPS]
    rates = [set_learning_rate(walk, optimizer, update) for update in updates]
    walk.out.align(["step_num", *updates], ["lrate", *(f"{rate:.5f}" for rate in rates)])
    walk.out.say("trainer_rate", zero=paper_learning_rate(0, walk.config.d_model, WARMUP_STEPS))

    walk.model.train()
    loss = walk.model(**walk.batch).loss
    loss.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in walk.model.parameters()])
    walk.out.say("gradient", count=len(gradients), norm=(gradients**2).sum().sqrt().item())

    weight = walk.encoder.layers[0].self_attn.q_proj.weight
    before, nothing_yet = weight.detach().clone(), torch.zeros_like(weight)
    rate = set_learning_rate(walk, optimizer, update=1)
    by_hand = adam_update(before, weight.grad, nothing_yet, nothing_yet, update=1, learning_rate=rate)
    optimizer.step()
    numbers = {name: values[0, 0].item() for name, values in by_hand._asdict().items()}
    walk.out.say("adam", **numbers, gradient=weight.grad[0, 0], before=before[0, 0], rate=rate)
    walk.out.check("encoder.layers[0].self_attn.q_proj.weight", by_hand.parameter, weight.detach(), tolerance=1e-7)
    with torch.no_grad():
        walk.out.say("adam_result", before=loss.item(), after=walk.model(**walk.batch).loss.item())


def train(walk: Walk, optimizer: torch.optim.Optimizer, steps: int, disable_tqdm: bool) -> None:
    """Step 13, first half: the remaining training steps, and how well the model translates then."""
    walk.out.say("training", more=steps - 1, batch_size=BATCH_SIZE)
    walk.model.train()
    order = random.Random(walk.seed)
    for update in tqdm(range(2, steps + 1), unit="step", disable=disable_tqdm):
        set_learning_rate(walk, optimizer, update)
        optimizer.zero_grad()
        walk.model(**walk.vocabulary.make_batch(order.sample(walk.training, BATCH_SIZE))).loss.backward()
        optimizer.step()
    with torch.no_grad():
        loss = walk.model(**walk.vocabulary.make_batch(walk.held_out)).loss.item()
    walk.model.eval()
    found = translate(walk, [source for source, _ in walk.held_out])
    right = sum(translation == target for translation, (_, target) in zip(found, walk.held_out, strict=True))
    walk.out.say("trained", steps=steps, loss=loss, floor=smallest_loss(walk), right=right, total=len(found))


def translate(walk: Walk, sentences: list[list[str]]) -> list[list[str]]:
    """Translates greedily, all at once."""
    input_ids = walk.vocabulary.encode(sentences)
    mask = (input_ids != PAD).long()
    output = walk.model.generate(input_ids=input_ids, attention_mask=mask, max_new_tokens=LONGEST_TRANSLATION)
    return [[word for word in walk.vocabulary.decode(row) if word not in SPECIAL_TOKENS] for row in output]


def align(walk: Walk, steps: int) -> None:
    """Step 13, second half: what the decoder looks at now."""
    walk.out.say("alignment", heads=walk.config.decoder_attention_heads, steps=steps)
    weights = walk.model(**walk.batch, output_attentions=True).cross_attentions[-1].mean(dim=1)  # (B, T, S)
    predicted, words = walk.label_words[0], walk.source_words[0]
    notes = [f"-> {words[int(row.argmax())]}" for row in weights[0]]
    walk.out.show("cross_attentions[-1].mean(1)", "B, T, S", weights, predicted, at=(0,), columns=words, notes=notes)
    walk.out.say("alignment_notes")


def decode_greedily(walk: Walk) -> None:
    """Step 14, first half: greedy decoding."""
    walk.out.say("greedy")
    source = walk.first_source()
    encoded = walk.encoder(**source)
    fed, lines = torch.tensor([[START]]), []
    while fed[0, -1] != END and fed.shape[1] <= LONGEST_TRANSLATION:
        logits = walk.model(
            encoder_outputs=encoded, attention_mask=source["attention_mask"], decoder_input_ids=fed
        ).logits
        probabilities = logits[0, -1].softmax(dim=-1)
        lines.append(f"{' '.join(walk.vocabulary.decode(fed[0]))}  ->  {walk.list_best(probabilities)}")
        fed = torch.cat([fed, probabilities.argmax().view(1, 1)], dim=1)
    walk.out.lines(lines)
    walk.out.say("greedy_notes", right=best_probability(walk))


def decode_with_beams(walk: Walk, beams: int = 4, alpha: float = 0.6) -> None:
    """Step 14, second half: beam search, and its scores by hand."""
    walk.out.say("beam", beams=beams, alpha=alpha)
    source = walk.first_source()
    found = walk.model.generate(
        **source,
        max_new_tokens=LONGEST_TRANSLATION,
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=alpha,
        length_penalty_type="gnmt",
        output_scores=True,
        return_dict_in_generate=True,
    )
    scores = []
    table: list[list[object]] = [["", "log p", "n", walk.out.texts["score"]]]
    for sequence in found.sequences:
        ended = (sequence == END).nonzero()
        ids = sequence[: ended[0, 0] + 1] if len(ended) else sequence  # without padding
        log_p = walk.model(**source, decoder_input_ids=ids[None, :-1]).logits[0].log_softmax(dim=-1)
        total = log_p.gather(1, ids[1:, None]).sum().item()
        length = len(ids) - 1  # `</s>` counts, `<s>` does not
        scores.append(beam_score(total, length, alpha))
        words = " ".join(walk.vocabulary.decode(ids[1:]))
        table.append([words, f"{total:.4f}", length, f"{scores[-1]:.4f}"])
    walk.out.align(*table)
    walk.out.check("sequences_scores", torch.tensor(scores), found.sequences_scores)
