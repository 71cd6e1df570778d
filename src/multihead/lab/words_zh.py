"""The words of the walk in Chinese."""

from __future__ import annotations

from multihead.lab.words import Passage, Words

__all__ = ["CHINESE"]

CHINESE = Words(
    title="多头注意力：一步一步走一遍",
    intro=(
        "样本数：{batch}；序列长度：{length}；模型维度（model_dim）：{model_dim}，{heads_of}。"
        "颜色表示一个数属于哪个头，旁边或下方的标注说的是同一件事。"
    ),
    parts={
        "split": Passage(
            "第一部分：拆分成头",
            "输入是从 0 数到 {last} 的整数，每个数就是它自己的地址：盯住它，看它去了哪里。",
        ),
        "attention": Passage(
            "第二部分：完整的一次注意力",
            "还是同一个 x，这次走完注意力的每一步。数值最多写三位小数，再多的就四舍五入。",
        ),
    },
    passages={
        "x": Passage(
            "输入",
            "每行是一个位置，每行有 {model_dim} 列。每个头将取走相邻的几列，归属标在各行下方。",
        ),
        "grouped": Passage(
            "把每一行切成头",
            "最后一个轴变成两个：头和头维度。数据没有移动：每一块仍是一个位置，里面是所有头各自的一段。",
        ),
        "by_head": Passage(
            "交换位置轴与头轴",
            "现在每一块是一个头，里面是所有位置：一个头要在各位置之间作比较，需要的正是这些。",
        ),
        "flat": Passage(
            "把头并入批量",
            "头的下标变化最快：第 [样本 x {num_heads} + 头] 块。对矩阵乘法来说，这就是 {flat} 个互不相干的序列。",
        ),
        "back": Passage(
            "原路返回",
            "同样的三步倒过来做：展开、交换、拼接。最后一个张量又是 x，一个数也不差。",
        ),
        "wrong": Passage(
            "不做交换、直接变形会得到什么",
            "形状是对的，也不会报错，但数据是按内存中的顺序切开的。号称是“一个头”的一块，装的其实是好几个头的片段，"
            "同一个位置则被拆到了好几行。注意力会把这些片段当作不同的位置来比较。",
        ),
        "inputs": Passage(
            "把输入变小",
            "x 除以 {smaller}（10 的幂）：数值太大，softmax 就会非 0 即 1。",
        ),
        "projections": Passage(
            "四个投影",
            "随机抽取（种子 {seed}），小数位很少，便于手算验证；真实模型的投影是学出来的。每个头拥有 w_q、w_k、w_v 中"
            "属于它的列，以及 w_o 中属于它的行。为求简短，不加偏置项。",
        ),
        "qkv": Passage(
            "查询、键与值",
            "同一个输入的三个乘积，都与输入同宽。下方标出了每个头的列。",
        ),
        "qkv_heads": Passage(
            "拆分成头",
            "对 q、k、v 再做一遍第 2 到第 4 步：切开、交换、并入批量。",
        ),
        "scores": Passage(
            "分数",
            "在每一块里，每个查询与每个键作点积：看它们有多匹配。",
        ),
        "scaled": Passage(
            "缩放",
            "乘以 1 / sqrt(头维度) = 1 / sqrt({head_dim}) = {scale:.3f}，这就是“缩放点积”：相加的乘积越多，分数散得越开"
            "，缩放把它收回来（arXiv:1706.03762）。",
        ),
        "bias": Passage(
            "偏置",
            "在 softmax 之前加到分数上。这里的偏置让远处的键得到较小的权重，每个头有自己的斜率"
            "（仿照 ALiBi，arXiv:2108.12409）。每个头一张表，所有样本共用。这一步可有可无：--bias none 会略去它。",
        ),
        "lengths": Passage(
            "长度：每个头一份",
            "同一批的序列被填充到同样长，每个序列只有开头的若干词元是真的。并入头之后批量有 {flat} 行，"
            "头的下标变化最快，所以每个长度要连续重复 {num_heads} 次（用 repeat_interleave，而不是 repeat）。",
        ),
        "masked": Passage(
            "掩码：遮住填充",
            "位置达到或超过长度的键，分数改为 -inf，而 e 的 -inf 次方是 0。遮住的只是键：填充位置上的查询也照样算了，"
            "只是它们那几行不该去读。",
        ),
        "weights": Passage(
            "softmax",
            "对每个查询的所有键做 softmax：一行分数变成和为 1 的权重，被遮住的键恰好得 0。",
        ),
        "z": Passage(
            "每个头的结果",
            "Z1 是头 0 的结果，Z2 是头 1 的结果，依此类推：每一行都是这个头的值按权重的平均。",
        ),
        "concat": Passage(
            "拼接各个头：{joined}",
            "再做一遍第 5 步：展开、交换、拼接。每个头的结果放在自己的列里。",
        ),
        "output": Passage(
            "输出",
            "最后的投影把各个头混合起来，从这里起，没有哪一列只属于某一个头。形状与输入相同，所以层可以一层层叠起来。",
        ),
    },
    axes={
        "batch": "批量",
        "length": "序列长度",
        "heads": "头",
        "head_dim": "头维度",
        "model_dim": "模型维度",
        "batch*heads": "批量*头",
        "heads*head_dim": "头*头维度",
        "output_dim": "输出维度",
        "queries": "查询",
        "keys": "键",
    },
    entries={
        "batch": "样本 {}",
        "length": "位置 {}",
        "heads": "头 {}",
        "queries": "查询 {}",
        "keys": "键 {}",
    },
    heads_of=lambda heads, columns: f"分给 {heads} 个头，每头 {columns} 列",
    by_hand="手算：",
    same_shape=("形状看上去和上一步一样，都是 {shape}，含义却不同：这里头数恰好等于位置数，只有轴的名字能把两者分开。"),
    unmixed="这里只有一个头或一个位置，没有东西可混：两种做法结果相同。两样都多给几个再试试。",
    mixed_legend="<- p0 h1 表示：这一行取自位置 0，是头 1 的那几列。",
    mixed_compare="样本 0 的头 0 本该是 {right}，得到的却是 {wrong}。",
    empty="一个键也看不到的查询，权重全为 0，结果也就是 0。",
    elided="这个张量有 {count} 个值：与 torch 的打印方式一样，长的轴只显示开头和末尾的几项，… 代表其余。",
    elided_again="共 {count} 个值，每个轴只显示开头和末尾。",
    checked=(
        "边读边验：对同样的 q、k、v，torch 的 scaled_dot_product_attention 给出同样的拼接结果。"
        "最大差异：{difference:.0e}。"
    ),
    farewell="接着试：",
    commands=(
        "multihead walk --lang zh --heads 2",
        "multihead walk --lang zh --lengths 3,0",
        "multihead walk --lang zh --length 4 --model-dim 8 --heads 4 --bias none",
    ),
)
