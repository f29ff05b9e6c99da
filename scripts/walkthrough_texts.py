"""What `scripts/walkthrough.py` says between its numbers, in English and in Chinese."""

TEXTS: dict[str, dict[str, str]] = {
    "en": {
        "intro": """
A walk through "Attention Is All You Need" (Vaswani et al., 2017), with a model so small that its numbers can be
read. It translates a toy English into a toy French, in which adjectives follow their nouns and agree with their
gender.""",
        "corpus": """
0  The task.  {pairs} pairs such as
       {source}
    -> {target}
{source_size} source words and {target_size} target words, special tokens included, are numbered in one
vocabulary of {vocab_size} tokens. The source ends with </s>; the decoder is fed the target behind <s>, and is
to predict the target and </s>.""",
        "embedding": """
1  Embedding (section 3.4).  Each token's number picks a row of a table, {vocab_size} x {d_model}; the row is
multiplied by sqrt(d_model) = {scale:.2f}. The same table embeds source and target, and predicts the next word
in the end.""",
        "positions": """
2  Positions (section 3.5).  Nothing so far tells the order of the words. PE(pos, 2i) = sin(pos /
10000^(2i/d_model)) and PE(pos, 2i+1) = cos(...) are added. By hand, PE(3, 4) = sin(3 / 10000^(4/{d_model})) =
{by_hand:.4f}; the model's table has {in_table:.4f} there.""",
        "masks": """
3  Masks.  Sentences of a batch are padded to one length, and nobody may look at padding; nor may the decoder
look at the words that it is to predict. 1: may be looked at, a row for each position that looks.""",
        "mask_source": "source (one row serves all positions that look):",
        "mask_target": "target, each position sees itself and what is before it:",
        "head": """
4  One head of attention (section 3.2).  Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V, for the first of the
encoder's {heads} heads, d_k = {d_k}. Q = X W_Q and so on, X being the sum of embeddings and positions.""",
        "head_scores": "Q K^T / sqrt(d_k), the word in front looking at the words on top:",
        "head_weights": "softmax of each row; it is untrained, so that the weights mean nothing yet:",
        "head_check": "The model's own attention weights differ from these by {difference:.1e} at the most.",
        "residual": """
5  Residual connection and norm (section 3.1).  Each sub-layer computes LayerNorm(x + Sublayer(x)): each word's
{d_model} numbers get the mean 0 and the standard deviation 1 (then a gain and a bias, which begin as 1 and 0).""",
        "residual_rows": "word, mean and deviation of x + Sublayer(x), and after the norm:",
        "feed_forward": """
6  Feed-forward (section 3.3).  FFN(x) = max(0, x W1 + b1) W2 + b2, at each position alone, {d_model} ->
{ffn_dim} -> {d_model}. Of the {ffn_dim} inner values {alive:.0%} are above zero here. By hand and by the model
the encoder's first layer differs by {difference:.1e}.""",
        "logits": """
7  Output (section 3.4).  The decoder's last states, times the embedding table, give a logit for each word;
softmax makes them probabilities. What the untrained model thinks comes first in the target (by chance
{chance:.3f} each):""",
        "step": """
8  One training step (sections 5.3 and 5.4).  With label smoothing {smoothing} the target distribution is
{right:.3f} at the right word and {wrong:.4f} at each of the others; the loss is the cross-entropy to it. The
learning rate is d_model^-0.5 * min(step^-0.5, step * warmup^-1.5): {rates}.""",
        "step_result": "Loss of one batch before the step: {before:.3f}; after it: {after:.3f} nats per word.",
        "training": """
   Now {steps} such steps.""",
        "trained": """Loss: {loss:.3f} (with smoothing it cannot fall below {floor:.3f}).
Held-out pairs translated right: {right} of {total}.""",
        "cross": """
9  Attention from target to source, trained (section 3.2.3).  A row for each word as it is predicted; the
weights are the mean of the {heads} heads of the last layer. The adjective finds its source word; an article
needs the gender of its noun, and reads it at the noun, or where the encoder has noted it.""",
        "greedy": """
10 Greedy decoding.  At each step the most probable word is taken and fed back, until </s>.""",
        "beam": """
11 Beam search (section 6.1).  The {beams} best beginnings are kept at each step. Log-probabilities are divided
by ((5 + length) / 6)^alpha, alpha = {alpha}, or short translations would win.""",
        "beam_check": "By hand for the first: log-probability {total:.4f} of {length} tokens -> {score:.4f}.",
        "outro": """
The same model with other sizes is `VanillaTransformerConfig.from_preset("base")`. To read on: the README's
section "The paper in this code", and vanilla_transformer/modeling_vanilla_transformer.py, which follows
section 3 from top to bottom.""",
    },
    "zh": {
        "intro": """
逐步走读 "Attention Is All You Need"（Vaswani 等，2017）。模型很小，小到每个数字都能看清。
任务是把玩具英语译成玩具法语：法语的形容词放在名词后面，并与名词的阴阳性一致。""",
        "corpus": """
0  任务。共 {pairs} 个句对，例如
       {source}
    -> {target}
源语言 {source_size} 个词、目标语言 {target_size} 个词（含特殊符号）统一编号，组成 {vocab_size} 个词的共享词表。
源句以 </s> 结尾；解码器的输入是 <s> 加目标句，要预测的是目标句加 </s>。""",
        "embedding": """
1  词嵌入（3.4 节）。每个词的编号从 {vocab_size} x {d_model} 的表中取出一行，再乘以 sqrt(d_model) = {scale:.2f}。
源语言、目标语言和最后的输出层共用这一张表。""",
        "positions": """
2  位置编码（3.5 节）。到此为止模型还不知道词序。于是加上 PE(pos, 2i) = sin(pos / 10000^(2i/d_model)) 和
PE(pos, 2i+1) = cos(...)。手算 PE(3, 4) = sin(3 / 10000^(4/{d_model})) = {by_hand:.4f}；
模型的表中是 {in_table:.4f}。""",
        "masks": """
3  掩码。一个批次里的句子补齐到同样长度，补齐的位置谁也不能看；解码器也不能偷看它要预测的词。
1 表示可以看，每一行是一个正在"看"的位置。""",
        "mask_source": "源句（所有位置共用一行）：",
        "mask_target": "目标句，每个位置只能看自己和前面的词：",
        "head": """
4  一个注意力头（3.2 节）。Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V。这里取编码器 {heads} 个头中的第一个，
d_k = {d_k}。Q = X W_Q，其余类推；X 是词嵌入与位置编码之和。""",
        "head_scores": "Q K^T / sqrt(d_k)，行首的词看列首的词：",
        "head_weights": "每行做 softmax；模型还没有训练，权重暂无意义：",
        "head_check": "与模型自己算出的注意力权重相比，最大差 {difference:.1e}。",
        "residual": """
5  残差连接与层归一化（3.1 节）。每个子层计算 LayerNorm(x + Sublayer(x))：每个词的 {d_model} 个数变为均值 0、
标准差 1（再乘增益、加偏置，初值分别为 1 和 0）。""",
        "residual_rows": "词，x + Sublayer(x) 的均值与标准差，以及归一化之后：",
        "feed_forward": """
6  前馈网络（3.3 节）。FFN(x) = max(0, x W1 + b1) W2 + b2，每个位置单独计算，{d_model} -> {ffn_dim} -> {d_model}。
{ffn_dim} 个中间值里有 {alive:.0%} 大于零。手算与模型的编码器第一层输出相差 {difference:.1e}。""",
        "logits": """
7  输出（3.4 节）。解码器最后的状态乘以词嵌入表，得到每个词的 logit，softmax 之后成为概率。
未训练的模型认为目标句的第一个词是（随机猜测各为 {chance:.3f}）：""",
        "step": """
8  一步训练（5.3 与 5.4 节）。标签平滑为 {smoothing} 时，目标分布在正确的词上是 {right:.3f}，
在其余每个词上是 {wrong:.4f}；损失是与它的交叉熵。
学习率为 d_model^-0.5 * min(step^-0.5, step * warmup^-1.5)：{rates}。""",
        "step_result": "一个批次的损失，更新之前：{before:.3f}；更新之后：{after:.3f}（每词，单位 nat）。",
        "training": """
   再这样训练 {steps} 步。""",
        "trained": "损失：{loss:.3f}（有标签平滑，不可能低于 {floor:.3f}）；未见过的句对译对 {right} / {total}。",
        "cross": """
9  训练之后，目标句对源句的注意力（3.2.3 节）。每一行是正被预测的一个词，权重是最后一层 {heads} 个头的平均。
形容词找到自己的源词；冠词需要名词的阴阳性，或者直接看名词，或者看编码器记下它的位置。""",
        "greedy": """
10 贪心解码。每一步取概率最大的词，再喂回解码器，直到 </s>。""",
        "beam": """
11 束搜索（6.1 节）。每一步保留最好的 {beams} 个开头。对数概率要除以 ((5 + 长度) / 6)^alpha，alpha = {alpha}，
否则短的译文总会占便宜。""",
        "beam_check": "手算第一个：{length} 个词的对数概率 {total:.4f} -> {score:.4f}。",
        "outro": """
同样的模型，换成论文的大小：`VanillaTransformerConfig.from_preset("base")`。
接下来可以读 README 的 "The paper in this code" 一节，以及 vanilla_transformer/modeling_vanilla_transformer.py，
它从上到下与论文第 3 节对应。""",
    },
}
