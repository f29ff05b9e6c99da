"""The code of the notebooks' cells, once for both languages; build.py puts it between the texts.

`# %% name` begins a cell. What stands above the first is in no cell: a notebook has its exercises there instead.
"""

from tutorial.solutions import (
    add_and_norm,
    attention,
    beam_search,
    causal_mask,
    feed_forward,
    greedy_search,
    learning_rate,
    padding_mask,
    positional_encoding,
    shift_right,
    smoothed_loss,
    split_heads,
)

# isort: split
# %% setup
import math
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, BatchEncoding, pipeline, set_seed

sys.path.append("..")  # the folder scripts
from walkthrough_steps.equations import adam_update
from walkthrough_steps.task import make_corpus

from tutorial.checks import Checker
from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.visualization import collect_attention, plot_attention, plot_positions, position_table

set_seed(1)
torch.set_num_threads(1)  # two would only wait for each other: the model is very small
torch.set_printoptions(precision=2, sci_mode=False, linewidth=100)

# %% corpus
pairs = [(" ".join(source), " ".join(target)) for source, target in make_corpus()]
random.Random(0).shuffle(pairs)
held_out, training = pairs[:100], pairs[100:]
print(f"{len(training)} + {len(held_out)}")
for source, target in training[:4]:
    print(f"{source}  ->  {target}")

# %% tokenizer
tokenizer = train_tokenizer([text for pair in training for text in pair], vocab_size=340)
ids = tokenizer("a white ball and a dog")["input_ids"]
print(ids)
print(tokenizer.convert_ids_to_tokens(ids))


# %% batch
def make_batch(pairs: list[tuple[str, str]]) -> BatchEncoding:
    """`input_ids` and `attention_mask` (B, S), and `labels` (B, T), with -100 at padding."""
    sources, targets = zip(*pairs, strict=True)
    batch = tokenizer(list(sources), text_target=list(targets), padding=True, return_tensors="pt")
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == tokenizer.pad_token_id, -100)
    return batch


example = [("a white ball and a dog", "une balle blanche et un chien"), ("a green car", "une voiture verte")]
batch = make_batch(example)
for name, tensor in batch.items():
    print(name, tuple(tensor.shape), tensor, sep="\n")

# %% model
config = VanillaTransformerConfig(
    vocab_size=len(tokenizer),
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    dropout=0.0,
    label_smoothing=0.1,
    langs=["en", "fr"],
)
# "eager" attention is the paper's equation as it stands.
model: Any = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
encoder, decoder = model.get_encoder(), model.get_decoder()
start_id, pad_id, end_id = model.config.decoder_start_token_id, model.config.pad_token_id, model.config.eos_token_id
with torch.no_grad():
    models = model(**batch, output_hidden_states=True, output_attentions=True)  # what the model computes of the batch
print(f"{model.num_parameters():,}")
check = Checker("en", model)


# %% plot_positions
plot_positions(position_table(config, length=50))

# %% embed
embedding = model.get_input_embeddings().weight.detach()  # (V, D)


def embed(ids: Tensor) -> Tensor:
    """Words and their positions: from ids (B, L) to (B, L, D)."""
    return embedding[ids] * math.sqrt(config.d_model) + positional_encoding(ids.shape[1], config.d_model)


x = embed(batch["input_ids"])
is_word = batch["attention_mask"].bool()
print(x[0, :, :6])
check.compare("encoder_hidden_states[0]", x[is_word], models.encoder_hidden_states[0][is_word])


# %% multi_head
def multi_head_attention(layer: Any, states: Tensor, looked_at: Tensor, allowed: Tensor) -> Tensor:
    """MultiHead(Q, K, V) for states (B, L, D) that look at others (B, K, D): (B, L, D)."""
    query = split_heads(states @ layer.q_proj.weight.T, layer.num_heads)  # torch keeps each matrix transposed
    key = split_heads(looked_at @ layer.k_proj.weight.T, layer.num_heads)
    value = split_heads(looked_at @ layer.v_proj.weight.T, layer.num_heads)
    heads = attention(query, key, value, allowed)  # (B, H, L, d_v)
    return heads.transpose(1, 2).flatten(2) @ layer.out_proj.weight.T


# %% look
first = encoder.layers[0].self_attn
allowed = padding_mask(batch["input_ids"], pad_id)
query, key = (split_heads(x @ linear.weight.T, first.num_heads) for linear in (first.q_proj, first.k_proj))
# Attention to the identity matrix gives the weights themselves.
weights = attention(query, key, torch.eye(x.shape[1]).expand(2, first.num_heads, -1, -1), allowed).detach()
print(weights[1, 0])
rows = is_word[:, None].expand(-1, first.num_heads, -1)
check.compare("encoder_attentions[0]", weights[rows], models.encoder_attentions[0][rows])


# %% encoder
def norm(x: Tensor, sublayer: Tensor, layer_norm: nn.LayerNorm) -> Tensor:
    """A residual connection and a norm of the model."""
    return add_and_norm(x, sublayer, layer_norm.weight, layer_norm.bias, layer_norm.eps)


def transform(x: Tensor, layer: Any) -> Tensor:
    """A feed-forward network of the model."""
    return feed_forward(x, layer.fc1.weight.T, layer.fc1.bias, layer.fc2.weight.T, layer.fc2.bias)


def encode(input_ids: Tensor) -> Tensor:
    """The encoder, Figure 1 on the left: from ids (B, S) to (B, S, D)."""
    allowed = padding_mask(input_ids, pad_id)
    x = embed(input_ids)
    for layer in encoder.layers:
        x = norm(x, multi_head_attention(layer.self_attn, x, x, allowed), layer.self_attn_layer_norm)
        x = norm(x, transform(x, layer), layer.final_layer_norm)
    return x


with torch.no_grad():
    encoded = encode(batch["input_ids"])
check.compare("encoder_last_hidden_state", encoded[is_word], models.encoder_last_hidden_state[is_word])

# %% decoder_input
decoder_input_ids = shift_right(batch["labels"], start_id, pad_id)
for read, predicted in zip(decoder_input_ids[1], batch["labels"][1], strict=True):
    print(f"{tokenizer.decode(read):>10} -> {tokenizer.decode(predicted) if predicted >= 0 else predicted}")


# %% decoder
def decode(decoder_input_ids: Tensor, encoded: Tensor, allowed: Tensor) -> Tensor:
    """The decoder, Figure 1 on the right, and the output layer: from ids (B, T) to logits (B, T, V)."""
    y = embed(decoder_input_ids)
    causal = causal_mask(y.shape[1])
    for layer in decoder.layers:
        y = norm(y, multi_head_attention(layer.self_attn, y, y, causal), layer.self_attn_layer_norm)
        y = norm(y, multi_head_attention(layer.encoder_attn, y, encoded, allowed), layer.encoder_attn_layer_norm)
        y = norm(y, transform(y, layer), layer.final_layer_norm)
    return y @ embedding.T


with torch.no_grad():
    logits = decode(decoder_input_ids, encoded, allowed)
check.compare("logits", logits, models.logits)
best = logits[0, 0].softmax(-1).topk(3)
print([(tokenizer.decode(word), round(p, 3)) for p, word in zip(*map(Tensor.tolist, best), strict=True)])

# %% rate
for step in (1, 60, 120, 240):
    print(step, f"{learning_rate(step, config.d_model, 120):.5f}")

# %% adam
weight = encoder.layers[0].fc1.weight
before, nothing_yet = weight.detach().clone(), torch.zeros_like(weight)
twin = nn.Parameter(before.clone())
optimizer = torch.optim.Adam([twin], lr=0.001, betas=(0.9, 0.98), eps=1e-9)
smoothed_loss(model(**batch, skip_logits=False).logits, batch["labels"], 0.1).backward()
twin.grad = weight.grad
optimizer.step()
mine = adam_update(before, weight.grad, nothing_yet, nothing_yet, update=1, learning_rate=0.001)
check.compare("Adam", mine.parameter, twin.detach())

# %% train
STEPS, WARMUP, BATCH_SIZE = 240, 120, 32
optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
order = random.Random(0)
model.train()
for step in range(1, STEPS + 1):
    optimizer.param_groups[0]["lr"] = learning_rate(step, config.d_model, WARMUP)
    inputs = make_batch(order.sample(training, BATCH_SIZE))
    labels = inputs.pop("labels")
    read = shift_right(labels, start_id, pad_id)
    loss = smoothed_loss(model(**inputs, decoder_input_ids=read).logits, labels, config.label_smoothing)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0 or step == 1:
        print(f"{step:4} {loss.item():.3f}")
model.eval()

# %% held_out
sources = tokenizer([source for source, _ in held_out], padding=True, return_tensors="pt")
translations = tokenizer.batch_decode(model.generate(**sources, max_new_tokens=24), skip_special_tokens=True)
right = sum(found == target for found, (_, target) in zip(translations, held_out, strict=True))
print(f"{right} / {len(held_out)}")
for (source, _), found in list(zip(held_out, translations, strict=True))[:4]:
    print(f"{source}  ->  {found}")


# %% predict
def make_predict(sentence: str) -> Callable[[Tensor], Tensor]:
    """What the trained model makes of a sentence: from beginnings (N, L) to log-probabilities (N, V)."""
    source = tokenizer(sentence, return_tensors="pt")

    def predict(beginnings: Tensor) -> Tensor:
        copies = {name: tensor.expand(len(beginnings), -1) for name, tensor in source.items()}
        with torch.no_grad():
            return model(**copies, decoder_input_ids=beginnings).logits[:, -1].log_softmax(-1)

    return predict


sentence = "a white ball and a dog"
predict = make_predict(sentence)
best = predict(torch.tensor([[start_id]]))[0].exp().topk(3)
print([(tokenizer.decode(word), round(p, 3)) for p, word in zip(*map(Tensor.tolist, best), strict=True)])

# %% greedy
ids = greedy_search(predict, start_id, end_id, 24)
found = model.generate(**tokenizer(sentence, return_tensors="pt"), max_new_tokens=24)[0, 1:]
print(tokenizer.decode(ids), tokenizer.decode(found), sep="\n")

# %% beams
paper = {"num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt", "max_new_tokens": 24}
ids, score = beam_search(predict, start_id, end_id, 4, 0.6, 24)
found = model.generate(
    **tokenizer(sentence, return_tensors="pt"), **paper, output_scores=True, return_dict_in_generate=True
)
print(tokenizer.decode(ids), f"{score:.4f}")
print(tokenizer.decode(found.sequences[0, 1:]), f"{found.sequences_scores[0]:.4f}")
check.compare("sequences_scores", torch.tensor([score]), found.sequences_scores)

# %% see
seen = collect_attention(model, tokenizer, sentence)
for word, row in zip(seen.target, seen.cross[-1].mean(0), strict=True):
    print(f"{word:>10} <- {seen.source[row.argmax()]}")
plot_attention(seen, layers=[-1])

# %% save
model.generation_config.update(**paper)
model.save_pretrained("out/model")
tokenizer.save_pretrained("out/model")
translate = pipeline("translation", model="out/model")
print(translate(["a grey tree and a green house", "a blue book"]))

# %% export
page = Path("out/page")
shutil.rmtree(page, ignore_errors=True)
try:
    from vanilla_transformer.export.web import export_web

    export_web(model, page, tokenizer=tokenizer, node_modules="node_modules", examples=[sentence, "a blue book"])
    print(f"{sum(file.stat().st_size for file in page.rglob('*') if file.is_file()) / 1e6:.1f} MB")
    print(f"python -m http.server --bind 127.0.0.1 --directory {page}")
except (ImportError, FileNotFoundError) as missing:
    print(missing)

# %% summary
check.summary()
