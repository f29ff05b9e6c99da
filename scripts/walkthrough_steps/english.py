"""What the walk says in English; `printing.py` tells how these texts are written."""

ENGLISH: dict[str, str] = {
    "comma": ", ",
    "colon": ":",
    "part": "at [{indices}]",
    "first_rows": "first {shown} of {total} rows",
    "first_columns": "first {shown} of {total} columns",
    "check": "By hand and by the model ({name}): at most {difference:.1e} apart.",
    "intro": """
# A walk through "Attention Is All You Need" (Vaswani et al., 2017)

The model is so small that its numbers can be read. Each of the paper's equations is computed by hand, which means in
a few lines of torch (scripts/walkthrough_steps/equations.py), and compared with what the model itself has computed. In
brackets are the paper's sections. Shapes are written with these letters:

    B  sentences in the batch       {batch_size}
    S  words in the source          {source_length}
    T  words in the target          {target_length}
    D  numbers per word (d_model)   {d_model}
    H  attention heads              {heads}
    d_k, d_v  numbers per head      {d_k}
    d_ff  feed-forward's width      {ffn_dim}
    V  words in the vocabulary      {vocab_size}

Counting begins at 0: X[0] is what X holds of the first sentence, Q[1, 0] the first head of the second.
""",
    "task": """
# 0  The task

The model is to translate simple English into simple French. There is one thing to find out: in French, colours stand
behind their noun and agree with its gender. {pairs} pairs such as

    {source}
    {target}

{source_words} English words, {target_words} French words and {special_tokens} special tokens are numbered in one
vocabulary of {vocab_size}. Two pairs make a batch. </s> ends a sentence; <pad> fills up the shorter one.
""",
    "labels": """
The labels are what the decoder is to predict. -100 is no word: the loss leaves out positions that have this label, so
that padding costs nothing.
""",
    "embedding": """
# 1  Embedding (3.4)

A table E ({vocab_size} x {d_model}) has a row of numbers for each word. The word's id picks its row, which is then
multiplied by sqrt(d_model) = {scale:.2f}. The same table embeds both languages, and in step 10 it predicts words.

    X = E[input_ids] * sqrt(d_model)
""",
    "equal_words": """
The two "{word}", at positions {first} and {second}, have equal rows (largest difference {difference:.2f}). Nothing here
says which of them belongs to the ball and which to the dog, nor in which order the words stand. That takes positions.
""",
    "positions": """
# 2  Positions (3.5)

To each word's numbers are added those of its position:

    PE(pos, 2i)   = sin(pos / 10000^(2i/d_model))
    PE(pos, 2i+1) = cos(pos / 10000^(2i/d_model))

For example, PE(3, 4) = sin(3 / 10000^(4/{d_model})) = {by_hand:.4f}. The first columns change from word to word, the
last so slowly that they tell the beginning from the end of a long text.
""",
    "summed": """
x = X + PE is what enters the encoder. The two "{word}" now differ, by up to {difference:.2f}. In the paper's training,
dropout (5.4) sets a tenth of the numbers to zero here and behind each sub-layer, at random, and scales up the others,
so that the model relies on no single number. This model does without, and every value can be checked.
""",
    "head": """
# 3  One head of attention (3.2.1)

In attention, each word gathers information from all words. It has a query (what it is looking for), a key (what it can
be found by) and a value (what it passes on to those who find it), all three of them products of x and learned matrices:

    Q = x W^Q      K = x W^K      V = x W^V
    scores = Q K^T / sqrt(d_k)
    A = softmax(scores)
    Attention(Q, K, V) = A V

The encoder has {heads} heads per layer. For the first head of the first layer, each matrix is {d_model} x {d_k}.
""",
    "head_scores": """
Each query times each key, divided by sqrt({d_k}) so that the products do not grow with d_k. The word on the left looks
at the words on top; the higher the score, the better key and query match.
""",
    "head_weights": """
The softmax of each row: positive weights that add up to 1. The model is untrained, and they mean nothing yet.
""",
    "head_context": """
What each word gets is the values of all words, averaged with its row of weights:
""",
    "padding_mask": """
# 4  The padding mask

The second sentence is shorter. Its padding means nothing, and nobody may look at it: a mask says so.
""",
    "padding_scores": """
Where the mask is 0, the score becomes -inf before the softmax. The same head, looking at the second sentence (only the
rows of words: what is computed at padding is never used):
""",
    "padding_weights": """
Since exp(-inf) = 0, the weights there are exactly 0. Each row still adds up to 1, all of it on words:
""",
    "multi_head": """
# 5  All heads (3.2.2)

Each head has matrices of its own and may look for something else. Their results, {d_v} numbers per word each, are laid
side by side, and one more matrix mixes them:

    MultiHead = Concat(head_1, ..., head_h) W^O

Here h = {heads}, so that {heads} * {d_v} = {width} numbers become {d_model}.
""",
    "residual": """
# 6  Residual connection and layer normalization (3.1)

Each sub-layer's output is added to its input, which therefore is not lost, and the sum is normalized:

    LayerNorm(x + Sublayer(x))

Each word's {d_model} numbers get the mean 0 and the standard deviation 1, and then a learned gain and bias, which begin
as 1 and 0. The first sentence, before and after the norm:
""",
    "mean": "mean",
    "deviation": "std",
    "mean_after": "-> mean",
    "deviation_after": "std",
    "feed_forward": """
# 7  Feed-forward, and the whole encoder (3.3)

The second sub-layer works at each position alone. It widens {d_model} numbers to {ffn_dim}, sets the negative ones to
zero, and narrows the result to {d_model}:

    FFN(x) = max(0, x W1 + b1) W2 + b2

Here {alive:.0%} of the inner numbers are above zero. A second residual connection and norm complete the layer.
""",
    "encoded": """
The encoder has {layers} such layers (the paper's has 6), each working on the output of the one before. It ends with one
vector per source word, which now tells of the word and its surroundings:
""",
    "decoder": """
# 8  The decoder, and its attention to itself (3.1, 3.2.3)

The encoder has read the source; the decoder writes the target. It is fed the target words before the one to predict:
the labels moved to the right by one, behind <s>, embedded and with positions added as in steps 1 and 2. At each
position it is to predict the word below:
""",
    "causal_scores": """
A decoder layer has three sub-layers. The first is self-attention over the target, in which no position may see what
comes after it, for that is the answer. All positions are computed at once, and again -inf does it, above the diagonal:
""",
    "causal_weights": """
These are the weights that the model itself has used. The largest above the diagonal: {above}.
""",
    "cross": """
# 9  The decoder's attention to the source (3.2.3)

In the second sub-layer the queries come from the decoder, keys and values from the encoder's output. It is here that
the source enters the target. Everything else is as before, with the padding mask of the source.
""",
    "cross_weights": """
The second sentence: the word on the left, which has just been fed, looks at the source words on top.
""",
    "decoded": """
The third sub-layer is a feed-forward network again; around each are a residual connection and a norm. This is the
output of the last of {layers} layers:
""",
    "logits": """
# 10  Logits and softmax (3.4)

The decoder's output times the embedding table E, the other way round, is a number for each of the {vocab_size} words at
each position, its logit:

    logits = decoder output E^T          p = softmax(logits)
""",
    "first_word": """
The most probable first words of the first target, to the untrained model (a pure guess would give each
{chance:.3f}):
""",
    "loss": """
# 11  The loss, with label smoothing (5.4)

The target distribution q gives the right word not 1 but {right:.4f}, and each other word {wrong:.4f} (epsilon is
{smoothing}). The loss is the cross-entropy between q and the model's p, averaged over all N labels that are not -100:

    q(right word)  = 1 - epsilon + epsilon / V
    q(other words) = epsilon / V
    loss           = - 1/N sum_n sum_v q_n(v) log p_n(v)

At the first position of the first target, the right word and the model's favourites:
""",
    "loss_sum": """
The sum over all words is {first:.4f} at this position, and the mean of all {count} positions {mean:.4f}. No model can
have less than {floor:.4f}, the loss where p = q: with label smoothing, more confidence than {right:.3f} is punished.
""",
    "learning_rate": """
# 12  One training step (5.3)

The learning rate grows for some steps (here {warmup_steps}, in the paper 4000) and then falls with the square root:

    lrate = d_model^-0.5 * min(step_num^-0.5, step_num * warmup_steps^-1.5)
""",
    "trainer_rate": """
Here steps are counted from 1, as the paper does. The trainer of this package (scripts/train.py) uses the schedule of
transformers, which counts from 0: step 1 has the rate {zero:g} there and changes nothing, step 2 the rate given here
for step 1, and so on.
""",
    "gradient": """
Back-propagation finds the gradient of the loss: how it changes with each of the {count} parameters. The gradient's
norm, the square root of the sum of squares, is {norm:.4f}; some clip it where it is large, the paper does not.

Adam keeps a running mean m of the gradient g and a running mean v of its square, and divides one by the root of the
other. For one parameter theta, the first number of the matrix W^Q in the encoder's first layer:
""",
    "adam": """
    g                                 {gradient:.6f}
    m     = 0.9 * 0 + 0.1 * g         {mean:.6f}
    v     = 0.98 * 0 + 0.02 * g^2     {variance:.3e}
    m_hat = m / (1 - 0.9^1)           {corrected_mean:.6f}
    v_hat = v / (1 - 0.98^1)          {corrected_variance:.3e}
    theta                             {before:.6f}
    theta - {rate:.6f} * m_hat / (sqrt(v_hat) + 1e-9)
                                      {parameter:.6f}

In the first step m_hat = g and v_hat = g^2: each parameter that has a gradient moves by the learning rate, be the
gradient large or small.
""",
    "adam_result": """
The loss of this batch was {before:.4f} before the step and is {after:.4f} after it.
""",
    "training": """
# 13  Training, and what it has changed

{more} more steps like this one, each with {batch_size} other pairs.
""",
    "trained": """
After step {steps}, the model translates {right} of {total} held-out pairs without any mistake. It has never been
trained on them; its loss on them is {loss:.4f}, and the smallest possible one {floor:.4f}.
""",
    "alignment": """
At which source word does the decoder look, when it predicts the word on the left? These are the weights of the last
layer after step {steps}, averaged over its {heads} heads, and on the right the source word with the largest one:
""",
    "alignment_notes": """
To choose the French article, the model must know the gender of a noun that comes later in English. It may
look at the noun itself, but need not: in the encoder each word has gathered information from the others, so that a
noun's gender can be read at other words too. Other seeds (--seed) find other ways.
""",
    "greedy": """
# 14  Decoding: greedy and beam search (6.1)

In use there is no target to feed. Greedy decoding takes the most probable word, feeds it back and goes on until </s>.
On the left is what is fed, on the right the three most probable next words:
""",
    "greedy_notes": """
Even a model that is sure gives about {right:.2f} and no more: label smoothing has made this the best probability
(step 11).
""",
    "beam": """
Beam search keeps the {beams} best beginnings instead of one. Since each further word makes a translation less probable,
log-probabilities are divided by a length penalty, or short translations would win. With alpha = {alpha} and n words,
</s> included:

    score = log p / ((5 + n) / 6)^alpha
""",
    "score": "score",
    "outro": """
# From here

The same model in the paper's size is VanillaTransformerConfig.from_preset("base"). The README's section "The paper in
this code" says where each equation is, and vanilla_transformer/model/modeling_vanilla_transformer.py follows section
3 from top to bottom. With --steps 1, steps 13 and 14 show a model that has hardly learnt anything.
""",
}
