"""The words of the walk in English."""

from __future__ import annotations

from multihead.lab.words import Passage, Words

__all__ = ["ENGLISH"]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


ENGLISH = Words(
    title="A walk through multi-head attention",
    intro=(
        "Samples: {batch}. Positions in each: {length}. Columns (model_dim): {model_dim}, shared by {heads_of}. "
        "The colour says which head a number belongs to, and a label beside or below it says the same."
    ),
    parts={
        "split": Passage(
            "Part 1: the split of heads",
            "The input counts 0 to {last}, so every number is its own address: follow where it goes.",
        ),
        "attention": Passage(
            "Part 2: a whole attention",
            "The same x, now carried through every step. Numbers are exact up to three decimals and rounded there.",
        ),
    },
    passages={
        "x": Passage(
            "The input",
            "One row a position, {model_dim} columns a row. Each head will take the neighbouring columns "
            "marked below the rows.",
        ),
        "grouped": Passage(
            "Cut every row into heads",
            "The last axis becomes two, heads and head_dim. Nothing moves: each block is still one position "
            "and holds a piece of every head.",
        ),
        "by_head": Passage(
            "Exchange positions and heads",
            "Now each block is one head and holds all positions: what one head needs to compare them.",
        ),
        "flat": Passage(
            "Fold the heads into the batch",
            "Heads run fastest: block [sample x {num_heads} + head]. To a matrix product these are {flat} "
            "sequences that know nothing of each other.",
        ),
        "back": Passage(
            "And back",
            "The same three moves in reverse order: unfold, exchange, join. The last tensor is x again, number "
            "for number.",
        ),
        "wrong": Passage(
            "What a reshape without the exchange would give",
            "The shape is the right one and no error is raised, yet the numbers are cut in the order they lie "
            "in memory. A block that claims to be one head then holds pieces of several heads, and one position "
            "is spread over several rows. Attention would compare these pieces as if they were positions.",
        ),
        "inputs": Passage(
            "The input, made small",
            "x divided by {smaller}, a power of ten: large numbers would drive softmax to all or nothing.",
        ),
        "projections": Passage(
            "Four projections",
            "Drawn at random (seed {seed}), few decimals so that you can check by hand; a model learns them. "
            "A head owns its columns of w_q, w_k and w_v, and its rows of w_o. No biases, to keep it short.",
        ),
        "qkv": Passage(
            "Queries, keys and values",
            "Three products of the same input, each as wide as the input. The columns of a head are marked below.",
        ),
        "qkv_heads": Passage(
            "Split into heads",
            "Steps 2 to 4 again, for q, k and v: cut, exchange, fold.",
        ),
        "scores": Passage(
            "Scores",
            "In each block, every query times every key: how well they match.",
        ),
        "scaled": Passage(
            "Scale",
            "Times 1 / sqrt(head_dim) = 1 / sqrt({head_dim}) = {scale:.3f}: the more products a score sums, the wider "
            "scores spread, and the scale takes that back (arXiv:1706.03762).",
        ),
        "bias": Passage(
            "Bias",
            "Added to the scores before softmax; here it makes far keys less likely, and each head by its own "
            "slope (in the manner of ALiBi, arXiv:2108.12409). One map a head, the same for every sample. It "
            "is optional: --bias none leaves it out.",
        ),
        "lengths": Passage(
            "Lengths, one a head",
            "Sequences of a batch are padded to one length; only the first tokens of each are real. The folded "
            "batch has {flat} rows, heads fastest, so each length is repeated {num_heads} times in a row "
            "(repeat_interleave, not repeat).",
        ),
        "masked": Passage(
            "Hide the padding",
            "A key at or beyond the length gets -inf, and e to the -inf is 0. Only keys are hidden: the rows of "
            "padded queries are computed too, and are not to be read.",
        ),
        "weights": Passage(
            "Softmax",
            "Over the keys of each query: the scores of a row become weights that sum to 1, and hidden keys get "
            "exactly 0.",
        ),
        "z": Passage(
            "The result of each head",
            "Z1 is the result of head 0, Z2 of head 1, and so on: each row is an average of the head's values, "
            "by the weights.",
        ),
        "concat": Passage(
            "Join the heads: {joined}",
            "Step 5 again: unfold, exchange, join. Each head's result lies in its own columns.",
        ),
        "output": Passage(
            "The output",
            "The last projection mixes the heads; from here on no column belongs to one head. "
            "The shape is the input's, so layers can be stacked.",
        ),
    },
    axes={
        "batch": "batch",
        "length": "length",
        "heads": "heads",
        "head_dim": "head_dim",
        "model_dim": "model_dim",
        "batch*heads": "batch*heads",
        "heads*head_dim": "heads*head_dim",
        "output_dim": "output_dim",
        "queries": "queries",
        "keys": "keys",
    },
    entries={
        "batch": "sample {}",
        "length": "position {}",
        "heads": "head {}",
        "queries": "query {}",
        "keys": "key {}",
    },
    heads_of=lambda heads, columns: f"{_counted(heads, 'head')} of {_counted(columns, 'column')}",
    by_hand="By hand: ",
    same_shape=(
        "The shape reads as before, {shape}, and means something else: there are as many heads as positions, "
        "so only the names of the axes tell the two apart."
    ),
    unmixed=(
        "Here there is only one head or one position, so there is nothing to mix: both ways give the same. "
        "Try more of both."
    ),
    mixed_legend="<- p0 h1 = this row was taken from position 0, from the columns of head 1.",
    mixed_compare="Head 0 of sample 0 should hold {right}, and would hold {wrong}.",
    empty="A query that sees no key at all gets weights of 0, and so a result of 0.",
    elided=(
        "This tensor has {count} values: of each long axis the first and the last entries are shown, as torch "
        "does, and … stands for the rest."
    ),
    elided_again="{count} values, the first and the last of each axis.",
    checked=(
        "Checked while you read: torch's scaled_dot_product_attention, on the same q, k and v, gives the same "
        "joined heads. Largest difference: {difference:.0e}."
    ),
    farewell="Go on with:",
    commands=(
        "multihead walk --heads 2",
        "multihead walk --lengths 3,0",
        "multihead walk --length 4 --model-dim 8 --heads 4 --bias none",
    ),
)
