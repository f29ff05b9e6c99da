"""Steps 0 to 10 of the walk: a batch goes through the untrained model, from words to probabilities.

Shapes: B  batch, S  source length, T  target length, D  d_model, H  heads, d_k and d_v  size of one head's keys and
values, V  vocabulary.
"""

import math

import torch

from .equations import (
    decoder_layer,
    encoder_layer,
    feed_forward,
    layer_norm,
    masked_scores,
    multi_head_attention,
    positional_encoding,
    project_to_head,
)
from .task import EXAMPLES, SPECIAL_TOKENS
from .walk import Walk


def introduce(walk: Walk) -> None:
    """What this is, and the letters of shapes."""
    config = walk.config
    batch_size, source_length = walk.batch["input_ids"].shape
    walk.out.say(
        "intro",
        batch_size=batch_size,
        source_length=source_length,
        target_length=walk.batch["labels"].shape[1],
        d_model=config.d_model,
        heads=config.encoder_attention_heads,
        d_k=config.d_model // config.encoder_attention_heads,
        ffn_dim=config.encoder_ffn_dim,
        vocab_size=config.vocab_size,
    )


def present_task(walk: Walk) -> None:
    """Step 0: the task, and a batch of it."""
    source, target = EXAMPLES[0]
    walk.out.say(
        "task",
        pairs=len(walk.corpus),
        source=" ".join(source),
        target=" ".join(target),
        source_words=len(walk.vocabulary.source_words),
        target_words=len(walk.vocabulary.target_words),
        special_tokens=len(SPECIAL_TOKENS),
        vocab_size=walk.config.vocab_size,
    )
    walk.out.show("input_ids", "B, S", walk.batch["input_ids"])
    for words, ids in zip(walk.source_words, walk.batch["input_ids"], strict=True):
        walk.out.align(words, ids.tolist())
    walk.out.show("labels", "B, T", walk.batch["labels"])
    for words, ids in zip(walk.label_words, walk.batch["labels"], strict=True):
        walk.out.align(words, ids.tolist())
    walk.out.say("labels")


def embed(walk: Walk) -> torch.Tensor:
    """Step 1: from words to vectors; returns them, (B, S, D)."""
    table = walk.encoder.embed_tokens.weight  # (V, D)
    scale = math.sqrt(walk.config.d_model)
    walk.out.say("embedding", vocab_size=len(table), d_model=walk.config.d_model, scale=scale)
    embedded = table[walk.batch["input_ids"]] * scale
    walk.out.show("X", "B, S, D", embedded, walk.source_words[0], at=(0,))
    first, second = find_equal_words(walk)
    difference = (embedded[0, first] - embedded[0, second]).abs().max().item()
    walk.out.say("equal_words", word=walk.source_words[0][first], first=first, second=second, difference=difference)
    return embedded


def find_equal_words(walk: Walk) -> tuple[int, int]:
    """The first two positions of the first sentence's most frequent word."""
    words = walk.source_words[0]
    word = max(words, key=words.count)
    first = words.index(word)
    return first, words.index(word, first + 1)


def add_positions(walk: Walk, embedded: torch.Tensor) -> torch.Tensor:
    """Step 2: where each word stands; returns the sum (B, S, D) that enters the encoder's first layer."""
    d_model, length = walk.config.d_model, embedded.shape[1]
    walk.out.say("positions", d_model=d_model, by_hand=math.sin(3 / 10000 ** (4 / d_model)))
    positions = positional_encoding(length, d_model)
    walk.out.show("PE", "S, D", positions, [str(position) for position in range(length)])
    walk.out.check("encoder.embed_positions.weight", positions, walk.encoder.embed_positions.weight[:length])
    x = embedded + positions
    first, second = find_equal_words(walk)
    difference = (x[0, first] - x[0, second]).abs().max().item()
    walk.out.say("summed", word=walk.source_words[0][first], difference=difference)
    walk.out.check("encoder_hidden_states[0]", x, walk.untrained.encoder_hidden_states[0], where=walk.is_word)
    return x


def attend_with_one_head(walk: Walk, x: torch.Tensor) -> None:
    """Step 3: the first head of the encoder's first layer, for the first sentence."""
    attention, words = walk.encoder.layers[0].self_attn, walk.source_words[0]
    heads = walk.config.encoder_attention_heads
    d_k = walk.config.d_model // heads
    walk.out.say("head", heads=heads, d_model=walk.config.d_model, d_k=d_k)
    query = x[0] @ attention.q_proj.weight[:d_k].T  # (S, D) times (D, d_k)
    key = x[0] @ attention.k_proj.weight[:d_k].T
    value = x[0] @ attention.v_proj.weight[:d_k].T
    walk.out.show("Q", "S, d_k", query, words)
    walk.out.show("K", "S, d_k", key)
    walk.out.show("V", "S, d_v", value)

    scores = query @ key.T / math.sqrt(d_k)
    walk.out.say("head_scores", d_k=d_k)
    walk.out.show("scores", "S, S", scores, words, columns=words)
    weights = scores.softmax(dim=-1)
    walk.out.say("head_weights")
    walk.out.show("A", "S, S", weights, words, columns=words)
    walk.out.check("encoder_attentions[0][0, 0]", weights, walk.untrained.encoder_attentions[0][0, 0])
    walk.out.say("head_context")
    walk.out.show("A V", "S, d_v", weights @ value, words)


def mask_padding(walk: Walk, x: torch.Tensor) -> None:
    """Step 4: the same head for the second sentence, whose padding nobody may look at."""
    mask, words = walk.batch["attention_mask"], walk.source_words[1]
    walk.out.say("padding_mask")
    walk.out.show("attention_mask", "B, S", mask)
    walk.out.align(words, mask[1].tolist())

    walk.out.say("padding_scores")
    query, key, _ = project_to_head(walk.encoder.layers[0].self_attn, 0, x, x)
    scores = masked_scores(query, key, walk.is_word[:, None])
    rows = words[: int(mask[1].sum())]
    walk.out.show("scores", "B, S, S", scores, rows, at=(1,), columns=words)
    weights = scores.softmax(dim=-1)
    walk.out.say("padding_weights")
    walk.out.show("A", "B, S, S", weights, rows, at=(1,), columns=words)
    by_model = walk.untrained.encoder_attentions[0][:, 0]
    walk.out.check("encoder_attentions[0][:, 0]", weights, by_model, where=walk.is_word)


def attend_with_all_heads(walk: Walk, x: torch.Tensor) -> torch.Tensor:
    """Step 5: the heads side by side, and W^O; returns the sub-layer's output (B, S, D)."""
    config, attention = walk.config, walk.encoder.layers[0].self_attn
    heads, d_v = config.encoder_attention_heads, config.d_model // config.encoder_attention_heads
    walk.out.say("multi_head", heads=heads, d_v=d_v, width=heads * d_v, d_model=config.d_model)
    result = multi_head_attention(attention, x, x, walk.is_word[:, None])
    walk.out.show("A", "B, H, S, S", result.weights)
    walk.out.show("Concat", "B, S, H d_v", result.concatenated)
    walk.out.show("W^O", "H d_v, D", attention.out_proj.weight.T)
    walk.out.show("Concat W^O", "B, S, D", result.output, walk.source_words[0], at=(0,))
    by_hand, by_model = result.weights.transpose(1, 2), walk.untrained.encoder_attentions[0].transpose(1, 2)
    walk.out.check("encoder_attentions[0]", by_hand, by_model, where=walk.is_word)
    return result.output


def add_and_normalize(walk: Walk, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Step 6: residual connection and layer normalization; returns their result (B, S, D)."""
    walk.out.say("residual", d_model=walk.config.d_model)
    summed = x + attended
    normed = layer_norm(summed, walk.encoder.layers[0].self_attn_layer_norm)
    before = [summed[0].mean(dim=-1), summed[0].std(dim=-1, correction=0)]
    after = [normed[0].mean(dim=-1), normed[0].std(dim=-1, correction=0)]
    columns = [walk.out.texts[name] for name in ("mean", "deviation", "mean_after", "deviation_after")]
    walk.out.show("LayerNorm(x + Sublayer(x))", "B, S, D", normed)
    walk.out.rows(walk.source_words[0], torch.stack([*before, *after], dim=-1), columns)
    return normed


def feed_forward_and_encode(walk: Walk, normed: torch.Tensor) -> torch.Tensor:
    """Step 7: the feed-forward network, and with it the whole encoder; returns its output (B, S, D)."""
    layers, config = walk.encoder.layers, walk.config
    output, inner = feed_forward(normed, layers[0])
    alive = (inner > 0).float().mean().item()
    walk.out.say("feed_forward", d_model=config.d_model, ffn_dim=config.encoder_ffn_dim, alive=alive)
    walk.out.show("max(0, x W1 + b1)", "B, S, d_ff", inner)
    walk.out.show("FFN(x)", "B, S, D", output)
    encoded = layer_norm(normed + output, layers[0].final_layer_norm)
    by_model = walk.untrained.encoder_hidden_states[1]
    walk.out.check("encoder_hidden_states[1]", encoded, by_model, where=walk.is_word)

    for layer in layers[1:]:
        encoded = encoder_layer(layer, encoded, walk.is_word[:, None])
    walk.out.say("encoded", layers=len(layers))
    walk.out.show("encoder_last_hidden_state", "B, S, D", encoded, walk.source_words[0], at=(0,))
    by_model = walk.untrained.encoder_last_hidden_state
    walk.out.check("encoder_last_hidden_state", encoded, by_model, where=walk.is_word)
    return encoded


def make_causal_mask(length: int) -> torch.Tensor:
    """Each position may look at itself and at those before it, (1, T, T)."""
    return torch.ones(1, length, length, dtype=torch.bool).tril()


def mask_the_future(walk: Walk) -> torch.Tensor:
    """Step 8: the decoder's input, and its attention to itself; returns its first sub-layer's result (B, T, D)."""
    ids, words = walk.decoder_input_ids, walk.fed_words[0]
    walk.out.say("decoder")
    walk.out.show("decoder_input_ids", "B, T", ids)
    walk.out.align(["decoder_input_ids", *words], ["labels", *walk.label_words[0]])

    length, d_model = ids.shape[1], walk.config.d_model
    y = walk.decoder.embed_tokens.weight[ids] * math.sqrt(d_model) + positional_encoding(length, d_model)
    layer, causal = walk.decoder.layers[0], make_causal_mask(length)
    query, key, _ = project_to_head(layer.self_attn, 0, y, y)
    walk.out.say("causal_scores")
    walk.out.show("scores", "B, T, T", masked_scores(query, key, causal), words, at=(0,), columns=words)
    by_model = walk.untrained.decoder_attentions[0]
    walk.out.say("causal_weights", above=by_model.triu(diagonal=1).max().item())
    walk.out.show("decoder_attentions[0]", "B, H, T, T", by_model, words, at=(0, 0), columns=words)
    result = multi_head_attention(layer.self_attn, y, y, causal)
    walk.out.check("decoder_attentions[0]", result.weights, by_model)
    return layer_norm(y + result.output, layer.self_attn_layer_norm)


def attend_to_source(walk: Walk, y: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
    """Step 9: attention to the encoder's output, and the decoder's other layers; returns its output (B, T, D)."""
    layers, is_source_word = walk.decoder.layers, walk.is_word[:, None]
    walk.out.say("cross")
    query, key, value = project_to_head(layers[0].encoder_attn, 0, y, encoded)
    walk.out.show("Q", "B, T, d_k", query)
    walk.out.show("K", "B, S, d_k", key)
    walk.out.show("V", "B, S, d_v", value)
    walk.out.say("cross_weights")
    result = multi_head_attention(layers[0].encoder_attn, y, encoded, is_source_word)
    rows = walk.fed_words[1][: len(EXAMPLES[1][1]) + 1]
    walk.out.show("A", "B, H, T, S", result.weights, rows, at=(1, 0), columns=walk.source_words[1])
    walk.out.check("cross_attentions[0]", result.weights, walk.untrained.cross_attentions[0])

    walk.out.say("decoded", layers=len(layers))
    y = layer_norm(y + result.output, layers[0].encoder_attn_layer_norm)
    y = layer_norm(y + feed_forward(y, layers[0])[0], layers[0].final_layer_norm)
    for layer in layers[1:]:
        y = decoder_layer(layer, y, encoded, make_causal_mask(y.shape[1]), is_source_word)
    walk.out.show("decoder_hidden_states[-1]", "B, T, D", y, walk.fed_words[0], at=(0,))
    walk.out.check("decoder_hidden_states[-1]", y, walk.untrained.decoder_hidden_states[-1])
    return y


def predict(walk: Walk, decoded: torch.Tensor) -> torch.Tensor:
    """Step 10: a probability for each word of the vocabulary; returns the logits (B, T, V)."""
    table = walk.decoder.embed_tokens.weight
    walk.out.say("logits", vocab_size=len(table))
    logits = decoded @ table.T
    walk.out.show("logits", "B, T, V", logits)
    walk.out.check("logits", logits, walk.untrained.logits)
    walk.out.say("first_word", chance=1 / len(table))
    walk.out.lines([walk.list_best(logits[0, 0].softmax(dim=-1))])
    return logits
