"""What the walk says in Chinese; `printing.py` tells how these texts are written."""

CHINESE: dict[str, str] = {
    "comma": "，",
    "colon": "：",
    "part": "取 [{indices}]",
    "first_rows": "前 {shown} 行（共 {total} 行）",
    "first_columns": "前 {shown} 列（共 {total} 列）",
    "check": "手算结果与模型自己的值（{name}）最大相差 {difference:.1e}。",
    "intro": """
# 跟着数字读《Attention Is All You Need》（Vaswani 等，2017）

这里的模型小到每个数都可以打印出来看。论文中的每个公式，我们都先“手算”一遍，也就是用几行 torch
代码照着公式写出来（见 scripts/walkthrough_steps/equations.py），再和模型自己算出的值对照。括号里是论文的章节号。
张量的形状用下列字母表示：

    B  一个批次的句数            {batch_size}
    S  源句长度                  {source_length}
    T  目标句长度                {target_length}
    D  每个词的维数（d_model）   {d_model}
    H  注意力头数                {heads}
    d_k、d_v  每个头的维数       {d_k}
    d_ff  前馈网络的宽度         {ffn_dim}
    V  词表大小                  {vocab_size}

编号从 0 开始：X[0] 是 X 中属于第一句的部分，Q[1, 0] 是第二句的第一个头。
""",
    "task": """
# 0  任务

把简化的英语译成简化的法语。模型需要自己发现一条规律：法语里颜色词放在名词后面，词形还要随名词的阴阳性变化。
语料共 {pairs} 个句对，例如

    {source}
    {target}

{source_words} 个英语词、{target_words} 个法语词和 {special_tokens} 个特殊词元统一编号，组成大小为
{vocab_size} 的共享词表。下面取两个句对作为一个批次。</s> 表示句子结束，<pad> 把较短的句子补到同样长度。
""",
    "labels": """
labels 是解码器要预测的内容。-100 不是词的编号：计算损失时会跳过这些位置，所以填充部分不影响训练。
""",
    "embedding": """
# 1  词嵌入（3.4 节）

表 E（{vocab_size} x {d_model}）为每个词存了一行数。用词的编号取出对应的一行，再乘以
sqrt(d_model) = {scale:.2f}。源语言和目标语言共用这张表，第 10 步预测词的时候用的也是它。

    X = E[input_ids] * sqrt(d_model)
""",
    "equal_words": """
位置 {first} 和位置 {second} 上都是 {word}，两行完全一样（最大相差
{difference:.2f}）。光看这些数，分不清哪个 {word} 跟着 ball、哪个跟着
dog，也看不出词的先后次序。所以还需要位置信息。
""",
    "positions": """
# 2  位置编码（3.5 节）

给每个词的向量加上它所在位置的编码：

    PE(pos, 2i)   = sin(pos / 10000^(2i/d_model))
    PE(pos, 2i+1) = cos(pos / 10000^(2i/d_model))

例如 PE(3, 4) = sin(3 / 10000^(4/{d_model})) = {by_hand:.4f}。靠前的列逐词变化，靠后的列变化极慢，
要到长文本的首尾才看得出差别。
""",
    "summed": """
x = X + PE 就是编码器的输入。现在两个 {word} 不一样了，最大相差
{difference:.2f}。论文在训练时还使用 dropout（5.4 节）：在这里以及每个子层的输出处，
随机把十分之一的数置零，并相应放大其余的数，使模型不会过分依赖个别数值。本模型不用
dropout，好让每个数都能核对。
""",
    "head": """
# 3  一个注意力头（3.2.1 节）

注意力让每个词从所有词那里收集信息。为此每个词都有三个向量：查询（Query）表示它想找什么，键（Key）
表示别的词凭什么找到它，值（Value）是它提供给对方的内容。三者都由 x 乘以可学习的矩阵得到：

    Q = x W^Q      K = x W^K      V = x W^V
    scores = Q K^T / sqrt(d_k)
    A = softmax(scores)
    Attention(Q, K, V) = A V

编码器每层有 {heads} 个头。这里看第一层的第一个头，三个矩阵的大小都是 {d_model} x {d_k}。
""",
    "head_scores": """
每个查询与每个键做内积，再除以 sqrt({d_k})，免得数值随 d_k 变大。左边的词看上方的词，
分数越高，说明查询与键越匹配：
""",
    "head_weights": """
逐行做 softmax，得到一组和为 1 的正数，这就是注意力权重。模型还没有训练，这些权重暂时没有意义：
""",
    "head_context": """
以每行的权重对所有词的值做加权平均，就是这个词收集到的信息：
""",
    "padding_mask": """
# 4  填充掩码

第二句比较短，末尾的填充（padding）没有内容，谁都不应该看。掩码标出了哪些位置可以看（1）、哪些不可以（0）：
""",
    "padding_scores": """
凡是掩码为 0 的位置，在 softmax 之前把分数改成 -inf。还是同一个头，现在看第二句
（只列出真正的词所在的行，填充位置上算出的结果不会被用到）：
""",
    "padding_weights": """
因为 exp(-inf) = 0，这些位置的权重恰好是 0，每行的和仍是 1，全部落在真正的词上：
""",
    "multi_head": """
# 5  多头注意力（3.2.2 节）

每个头有自己的一组矩阵，可以各找各的信息。每个头为每个词给出 {d_v} 个数，把各个头的结果并排拼接，
再用一个矩阵把它们混合起来：

    MultiHead = Concat(head_1, ..., head_h) W^O

这里 h = {heads}，拼接后有 {heads} * {d_v} = {width} 个数，乘以 W^O 后是 {d_model} 个数。
""",
    "residual": """
# 6  残差连接与层归一化（3.1 节）

每个子层的输出都与它的输入相加，原来的信息因此不会丢失；相加之后再做归一化：

    LayerNorm(x + Sublayer(x))

每个词的 {d_model} 个数变成均值为 0、标准差为 1，然后乘以增益、加上偏置。增益和偏置也是学出来的，初值分别是
1 和 0。下面是第一句在归一化前后的均值和标准差：
""",
    "mean": "均值",
    "deviation": "标准差",
    "mean_after": "-> 均值",
    "deviation_after": "标准差",
    "feed_forward": """
# 7  前馈网络，以及整个编码器（3.3 节）

第二个子层对每个位置单独计算：先把 {d_model} 个数扩展成 {ffn_dim} 个，把其中的负数置零，再变回
{d_model} 个：

    FFN(x) = max(0, x W1 + b1) W2 + b2

这里 {alive:.0%} 的中间值大于零。再做一次残差连接和层归一化，编码器的第一层就算完了：
""",
    "encoded": """
编码器共有 {layers} 层（论文是 6 层），后一层以前一层的输出为输入。最后每个源词对应一个向量，
它不仅代表这个词，也包含了上下文的信息：
""",
    "decoder": """
# 8  解码器，以及它的自注意力（3.1、3.2.3 节）

编码器负责读源句，解码器负责写目标句。解码器的输入是已经写出的词：把 labels 右移一位，开头补上
<s>，再像第 1、2 步那样做词嵌入、加位置编码。在每个位置上，它要预测下面一行对应的词：
""",
    "causal_scores": """
解码器的每一层有三个子层，第一个是目标句的自注意力。所有位置是同时计算的，而后面的词正是要预测的答案，
不能偷看。办法同样是 -inf，这一次放在对角线的上方：
""",
    "causal_weights": """
下面是模型自己算出的权重，对角线上方的最大值是 {above}：
""",
    "cross": """
# 9  解码器对源句的注意力（3.2.3 节）

第二个子层的查询来自解码器，键和值来自编码器的输出，源句的信息就是从这里进入目标句的。其余算法不变，
掩码用源句的填充掩码。
""",
    "cross_weights": """
以第二句为例：左边是刚刚输入的词，上方是它所看的源词。
""",
    "decoded": """
第三个子层又是前馈网络。每个子层外面都有残差连接和层归一化。解码器共 {layers} 层，最后一层的输出是：
""",
    "logits": """
# 10  logits 与 softmax（3.4 节）

解码器最后一层的输出乘以词嵌入表 E 的转置，在每个位置上为 {vocab_size} 个词各算出一个数，称为 logit：

    logits = 解码器的输出 E^T          p = softmax(logits)
""",
    "first_word": """
未经训练的模型对第一句目标句首词的预测，列出概率最大的三个词（随机猜测时每词概率为 {chance:.3f}）：
""",
    "loss": """
# 11  带标签平滑的损失（5.4 节）

目标分布 q 给正确的词的概率不是 1，而是 {right:.4f}，其余每个词各得 {wrong:.4f}（epsilon 取
{smoothing}）。损失是 q 与模型的预测 p 之间的交叉熵，对所有不是 -100 的 N 个位置取平均：

    q(正确的词) = 1 - epsilon + epsilon / V
    q(其余的词) = epsilon / V
    loss        = - 1/N sum_n sum_v q_n(v) log p_n(v)

看第一句目标句的首词，列出正确的词和模型最看好的三个词：
""",
    "loss_sum": """
这个位置上对全部词求和得 {first:.4f}，{count} 个位置的平均值是 {mean:.4f}。任何模型的损失都不会低于
{floor:.4f}，那是 p = q 时的值：有了标签平滑，给正确的词的概率超过 {right:.3f} 反而受罚。
""",
    "learning_rate": """
# 12  一个训练步（5.3 节）

学习率先逐步升高（预热，这里是 {warmup_steps} 步，论文是 4000 步），然后与步数的平方根成反比下降：

    lrate = d_model^-0.5 * min(step_num^-0.5, step_num * warmup_steps^-1.5)
""",
    "trainer_rate": """
这里和论文一样，步数从 1 数起。本项目的训练程序（scripts/train.py）用的是 transformers 的学习率调度，
步数从 0 数起：第 1 步的学习率是 {zero:g}，参数不变；第 2 步才用这里第 1 步的学习率，依此类推。
""",
    "gradient": """
反向传播求出损失对全部 {count} 个参数的梯度。梯度的范数（各分量平方和的平方根）是
{norm:.4f}。有人在梯度过大时做裁剪，论文没有这样做。

Adam 维护梯度 g 的滑动平均 m 和 g 平方的滑动平均 v，用前者除以后者的平方根。以一个参数
theta 为例，取编码器第一层矩阵 W^Q 的第一个数：
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

第一步里 m_hat = g、v_hat = g^2，所以凡是有梯度的参数，不论梯度大小，移动的距离都等于学习率。
""",
    "adam_result": """
更新之前，这个批次的损失是 {before:.4f}；更新之后是 {after:.4f}。
""",
    "training": """
# 13  训练，以及训练带来的变化

接着再训练 {more} 步，每步换 {batch_size} 个句对。
""",
    "trained": """
训练到第 {steps} 步，在留出的 {total} 个句对中译对 {right} 个。这些句对从不参与训练，
模型在它们上面的损失是 {loss:.4f}，而理论上的最小值是 {floor:.4f}。
""",
    "alignment": """
预测左边的词时，解码器在看哪个源词？下面是第 {steps} 步之后最后一层的权重，取 {heads}
个头的平均；右边列出每行权重最大的源词：
""",
    "alignment_notes": """
要选对法语的冠词，必须知道名词的阴阳性，而英语里这个名词在后面才出现。模型可以直接看那个名词，但也不一定：
在编码器里，每个词都已经从别的词那里收集过信息，名词的阴阳性在别的位置上也可能读得到。换一个随机种子
（--seed），模型可能学会另一种看法。
""",
    "greedy": """
# 14  解码：贪心搜索与束搜索（6.1 节）

翻译新句子时没有现成的目标句。贪心搜索每一步取概率最大的词，把它接到输入后面，直到出现
</s>。左边是已有的输入，右边是下一个词的三个最大概率：
""",
    "greedy_notes": """
模型就算十分肯定，给出的概率也只有 {right:.2f} 左右：这正是标签平滑之下的最佳概率（见第 11 步）。
""",
    "beam": """
束搜索每一步保留得分最高的 {beams} 个候选前缀，而不是只留一个。译文每多一个词，概率就会更小，
所以要把对数概率除以长度惩罚，否则短的译文总占便宜。取 alpha = {alpha}，n 为译文的词元数（</s> 也算一个）：

    score = log p / ((5 + n) / 6)^alpha
""",
    "score": "score",
    "outro": """
# 接下来

同样的模型，换成论文的规模就是 VanillaTransformerConfig.from_preset("base")。README 的“The paper in this code”
一节列出了每个公式在代码中的位置；vanilla_transformer/model/modeling_vanilla_transformer.py 则从上到下与论文第 3
节对应。加上 --steps 1，可以在第 13、14 步看到一个几乎什么都没学到的模型。
""",
}
