"""Arguments under the names of other libraries, and values of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, DtypeError, MaskError, MultiheadError, ProbeError

X = torch.zeros(2, 6, 16)
Q = torch.zeros(2, 4, 6, 8)
LAYER = mh.MultiHeadAttention(16, 4)
RECORD = {
    "is_causal": "mask=masks.Causal()",
    "key_padding_mask": (
        "lengths=, the number of tokens of each sample (memory_lengths= for a memory), or "
        'mask=masks.Drop(key_padding_mask, "batch keys")'
    ),
    "need_weights": "mh.observe(layer), which computes the weights",
    "attn_mask": (
        "mask=masks.Keep(t) if True may be seen, mask=masks.Drop(t) if True is hidden, bias=t if it is added to the "
        "scores"
    ),
    "attention_mask": 'lengths=attention_mask.sum(1), with padding_side="left" where the padding comes first',
    "past_key_values": "cache=mh.KeyValueCache()",
}


@pytest.mark.parametrize("name", RECORD)
def test_a_layer_names_its_own_spelling_of_an_argument_of_torch(name: str) -> None:
    message = f"MultiHeadAttention.forward has no argument {name!r}. Use {RECORD[name]}."
    for call in (LAYER, LAYER.explain):
        with pytest.raises(ArgumentError) as refusal:
            call(X, **{name: True})
        assert str(refusal.value) == message


@pytest.mark.parametrize("function", [mh.attention, mh.attention_with_logsumexp, mh.explain])
@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("is_causal", "Use mask=masks.Causal()."),
        ("dropout_p", "Use dropout=."),
        ("enable_gqa", "Use k and v with fewer heads than q; no argument is needed."),
        ("querystart", "Did you mean query_start=?"),
    ],
)
def test_a_function_names_its_own_spelling(function: Callable[..., Any], name: str, mend: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        function(Q, Q, Q, **{name: True})
    assert str(refusal.value) == f"{function.__name__} has no argument {name!r}. {mend}"


@pytest.mark.parametrize("function", [mh.attention_weights, mh.statistics])
def test_so_do_the_functions_that_take_no_values(function: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentError) as refusal:
        function(Q, Q, is_causal=True)
    assert str(refusal.value) == f"{function.__name__} has no argument 'is_causal'. Use mask=masks.Causal()."


def test_an_argument_that_no_library_has_is_answered_with_all_that_exist() -> None:
    with pytest.raises(ArgumentError) as refusal:
        mh.attention(Q, Q, Q, flavour=3)  # type: ignore[arg-type]
    assert str(refusal.value) == (
        "attention has no argument 'flavour'. Its arguments are q, k, v, mask, bias, softcap, sinks, scale, dropout, "
        "query_start, kernel."
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: mh.MultiHeadAttention(16, 4, batch_first=True),  # type: ignore[call-arg]
            (
                "MultiHeadAttention has no argument 'batch_first'. "
                "Use inputs of shape (batch, length, features); no argument is needed."
            ),
        ),
        (
            lambda: mh.MultiHeadAttention(16, 4, kdim=8),  # type: ignore[call-arg]
            "MultiHeadAttention has no argument 'kdim'. Use key_dim=.",
        ),
        (
            lambda: mh.MultiHeadAttention(32, n_heads=4),  # type: ignore[call-arg]
            "MultiHeadAttention has no argument 'n_heads'. Use num_heads=.",
        ),
        (
            lambda: mh.MultiHeadAttention(dim=32, num_heads=4),  # type: ignore[call-arg]
            "MultiHeadAttention has no argument 'dim'. Use embed_dim=.",
        ),
        (
            lambda: mh.MultiHeadAttention(d_model=32, heads=4),  # type: ignore[call-arg]
            (
                "MultiHeadAttention has no argument 'd_model' or 'heads'. For d_model: use embed_dim=. "
                "For heads: use num_heads=."
            ),
        ),
        (
            lambda: mh.MultiHeadAttention(32, 4, num_kv_head=2),  # type: ignore[call-arg]
            "MultiHeadAttention has no argument 'num_kv_head'. Did you mean num_kv_heads=?",
        ),
        (
            lambda: mh.MultiHeadAttention(16, 4, rotary=True),  # type: ignore[arg-type]
            "rotary is True. Give for example rotary=mh.Rotary(), or None.",
        ),
        (
            lambda: mh.MultiHeadAttention(16, 4, qk_norm="rms"),  # type: ignore[arg-type]
            "qk_norm is 'rms'. Give for example qk_norm=mh.QKNorm(\"rms\"), or None.",
        ),
        (
            lambda: mh.MultiHeadAttention(16, 4, position_bias="alibi"),  # type: ignore[arg-type]
            "position_bias is 'alibi'. Give for example position_bias=mh.scores.ALiBi(num_heads), or None.",
        ),
        (
            lambda: mh.MultiHeadAttention(16, 4, scale="auto"),  # type: ignore[arg-type]
            "scale is 'auto'. Give a finite number, or None for 1 / sqrt(head_dim).",
        ),
        (
            lambda: mh.MultiHeadAttention(16, 4, sinks=torch.zeros(4)),  # type: ignore[arg-type]
            "sinks is a tensor. Give sinks=True, and copy the values to layer.sinks.",
        ),
        (
            lambda: mh.MultiHeadAttention(15, 5, rotary=mh.Rotary()),
            (
                "head_dim is 3, and Rotary rotates columns in pairs. "
                "Give an even head_dim, or rotate some of the columns: Rotary(dim=2)."
            ),
        ),
        (
            lambda: mh.MultiHeadAttention(5, 5, rotary=mh.Rotary()),
            "head_dim is 1, and Rotary rotates columns in pairs. Give an even head_dim.",
        ),
        (
            lambda: mh.MultiHeadAttention(16, 4, rotary=mh.Rotary(dim=8)),
            "head_dim is 4, and Rotary rotates 8 columns of each head. Give Rotary a dim of at most 4.",
        ),
    ],
)
def test_a_layer_rejects_options_that_its_calls_could_not_use(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        make()
    assert str(refusal.value) == message


TOKENS, PACKING = mh.pack(X, (3, 2))
CACHE = mh.KeyValueCache()
LAYER(X, cache=CACHE)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LAYER(X, lengths=3), ArgumentError, "lengths is 3. Give one length per sample: 2 integers."),
        (lambda: mh.pack(X, 2.5), ArgumentError, "lengths is 2.5. Give one length per sample: 2 integers."),  # type: ignore[arg-type]
        (
            lambda: mh.pack(X.numpy(), (3, 2)),  # type: ignore[arg-type]
            DtypeError,
            "x is a ndarray, and must be a tensor. Give (batch, length, features).",
        ),
        (
            lambda: mh.unpack(TOKENS, (3, 2)),  # type: ignore[arg-type]
            ArgumentError,
            "packing is a tuple. Give the Packing that mh.pack returns.",
        ),
        (lambda: LAYER(X, packing=3), ArgumentError, "packing is a int. Give the Packing that mh.pack returns."),
        (
            lambda: LAYER(X, masks.Causal()),
            DtypeError,
            "memory is the mask Causal(), and must be a tensor. Pass it by keyword: mask=Causal().",
        ),
        (
            lambda: LAYER([1.0]),
            DtypeError,
            "x is a list, and must be a tensor. Give a tensor (batch, length, features).",
        ),
        (
            lambda: LAYER(X, cache={}),
            ArgumentError,
            "cache is a dict. Give a KeyValueCache() of this layer's own, the same in every call.",
        ),
        (
            lambda: LAYER(X, head_gates=[1.0]),
            DtypeError,
            "head_gates is a list. Give a tensor with one factor per head: (4,).",
        ),
        (
            lambda: LAYER(X, mask=masks.Documents((3, 4))),
            MaskError,
            (
                "Documents((3, 4)) has documents of 7 tokens in total, and there are 6 keys. "
                "Give lengths that add up to at most 6."
            ),
        ),
        (
            lambda: masks.Keep(torch.ones(6, 6).bool(), ("queries", "keys")),  # type: ignore[arg-type]
            MaskError,
            "Keep was given the axes ('queries', 'keys'). Name them in a string: Keep(t, \"batch keys\").",
        ),
        (lambda: CACHE.crop(1.5), ArgumentError, "length is 1.5. Give one length per sample: 2 integers."),  # type: ignore[arg-type]
        (
            lambda: CACHE.reorder("ab"),  # type: ignore[arg-type]
            ArgumentError,
            "index is 'ab'. Give integers: for each new sample, the index of the old sample.",
        ),
        (
            lambda: CACHE.extend(1, 2),  # type: ignore[arg-type]
            DtypeError,
            "k is a int, and must be a tensor. Give (batch, kv_heads, new tokens, head_dim).",
        ),
        (
            lambda: mh.split_heads(X.numpy(), 4),  # type: ignore[arg-type]
            DtypeError,
            "x is a ndarray, and must be a tensor. Convert it: torch.as_tensor(x).",
        ),
        (
            lambda: mh.attention_weights(Q, Q, logsumexp=3.0),  # type: ignore[arg-type]
            DtypeError,
            "logsumexp is a float. Give a tensor (batch, heads, queries).",
        ),
        (
            lambda: mh.attention_weights(Q, Q, heads="all"),  # type: ignore[arg-type]
            ArgumentError,
            "heads holds 'all'. Give integers from 0 to 3, or a slice.",
        ),
        (
            lambda: mh.statistics(Q, Q, probes=3),  # type: ignore[arg-type]
            ProbeError,
            'probes is 3. Give names of statistics, for example probes=("entropy", "received").',
        ),
    ],
)
def test_a_value_of_another_kind_is_rejected_with_one_that_fits(
    call: Callable[[], object], error: type[MultiheadError], message: str
) -> None:
    with pytest.raises(error) as refusal:
        call()
    assert str(refusal.value) == message


def test_one_statistic_may_be_named_without_a_list() -> None:
    assert list(mh.statistics(Q, Q, probes="entropy")) == ["entropy"]


@pytest.mark.parametrize("heads", [torch.tensor([1, 3]), range(1, 4, 2), (1, -1)])
def test_several_heads_may_be_any_integers(heads: Any) -> None:
    q = torch.randn(1, 4, 6, 8)
    assert torch.equal(mh.attention_weights(q, q, heads=heads), mh.attention_weights(q, q)[:, [1, 3]])


CHOICES = [
    (3, "queries is 3, and must be a slice of integers. Give queries=slice(3, 4)"),
    ([0, 2], "queries is [0, 2], and must be a slice of integers. Give queries=slice(3, 4)"),
    (slice(1.0, 2), "queries is slice(1.0, 2, None), and must be a slice of integers. Give queries=slice(3, 4)"),
    (None, "queries is None, and must be a slice of integers. Give queries=slice(3, 4)"),
]


@pytest.mark.parametrize(("chosen", "begin"), CHOICES)
def test_queries_and_keys_of_a_map_are_slices(chosen: Any, begin: str) -> None:
    with mh.observe(LAYER) as seen:
        LAYER(X)
    one, layer = seen.layers[0].sample(), seen.layers[0]
    message = f"{begin} for one, queries=slice(0, 64) for several in a row, and index the result for others."
    for look in (
        one.weights,
        one.visible,
        one.map,
        layer.weights,
        layer.map,
        lambda **part: mh.attention_weights(Q, Q, **part),
    ):
        for name in ("queries", "keys"):
            with pytest.raises(ArgumentError) as refusal:
                look(**{name: chosen})
            assert str(refusal.value) == message.replace("queries", name)


def test_a_map_is_not_read_backward() -> None:
    with pytest.raises(ArgumentError) as refusal:
        mh.attention_weights(Q, Q, keys=slice(4, 0, -1))
    assert str(refusal.value) == (
        "keys is slice(4, 0, -1), whose step is not positive. Give a slice with a step of 1 or more."
    )


def test_a_record_rejects_other_kinds_of_layers_samples_heads_and_sizes() -> None:
    with mh.observe(LAYER) as seen:
        LAYER(X)
    one = seen.layers[0].sample()
    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: seen[0.5],  # type: ignore[index]
            (
                "The layer is 0.5, and a record finds layers by name or number. "
                "Give record[name] or record[number], "
                "or record.layers[index] for the layers in the order they first ran."
            ),
        ),
        (lambda: seen.layers[0].sample("a"), "sample is 'a'. Give the index of one sample, an integer."),  # type: ignore[arg-type]
        (
            lambda: one.weights([0, 2]),  # type: ignore[arg-type]
            "head is [0, 2]. Give one head, an integer from 0 to 3, or None for all and index the result.",
        ),
        (
            lambda: one.map(True),
            "head is True. Give one head, an integer from 0 to 3, or None for all and index the result.",
        ),
        (lambda: one.map(0, bins=2.5), "bins is 2.5. Give an integer of at least 1."),  # type: ignore[arg-type]
        (
            lambda: one.map(0, bins=(2,)),  # type: ignore[arg-type]
            "bins is (2,). Give one number, or one for the queries and one for the keys.",
        ),
        (
            lambda: one.blocks(0, block=(1, 2, 3)),  # type: ignore[arg-type]
            "block is (1, 2, 3). Give one number, or one for the queries and one for the keys.",
        ),
        (
            lambda: one.at_offset(1.5),  # type: ignore[arg-type]
            "offset is 1.5. Give an integer, such as -1 for the key before the query.",
        ),
    ]
    for call, message in calls:
        with pytest.raises(ArgumentError) as refusal:
            call()
        assert str(refusal.value) == message


@pytest.mark.parametrize(("layers", "held"), [(-1, "-1"), (-100, "-100"), (1.5, "1.5"), (True, "True")])
def test_layers_to_observe_are_indices_or_names(layers: Any, held: str) -> None:
    with pytest.raises(ArgumentError) as refusal, mh.observe(LAYER, layers=layers):
        pytest.fail("the model could run")
    assert str(refusal.value) == f'layers holds {held}. Give indices from 0, or names such as "layer.3".'


@pytest.mark.parametrize(("kinds", "held"), [(None, "None"), (3, "a value of type int"), ("local", "a string")])
def test_kinds_of_heads_are_a_list_of_them(kinds: Any, held: str) -> None:
    message = (
        f"kinds is {held}, and must be a list of kinds of heads. Give values of multihead.kinds.Kind, or leave it out."
    )
    for call in (
        lambda: mh.observe(LAYER, kinds=kinds).__enter__(),
        lambda: mh.look("no model", "a text", kinds=kinds),
        lambda: mh.census("no model", "no texts", out="none", kinds=kinds),
    ):
        with pytest.raises(ArgumentError) as refusal:
            call()
        assert str(refusal.value) == message


def test_a_statistic_has_a_name() -> None:
    with pytest.raises(ArgumentError) as refusal:
        mh.Record().statistic(["entropy"])  # type: ignore[arg-type]
    assert str(refusal.value) == (
        'name is a list of 1 text, and must be the name of a statistic. Give one, such as "entropy".'
    )


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("valid_lens", "lengths=, the number of tokens of each sample"),
        ("seq_lens", "lengths=, the number of tokens of each sample"),
        ("encoder_hidden_states", "memory=, the tokens that give keys and values"),
        ("context", "memory=, the tokens that give keys and values"),
        ("cu_seqlens", "mask=masks.Documents(lengths)"),
    ],
)
def test_a_name_of_another_library_in_a_call_gets_its_name_here(name: str, mend: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        LAYER(X, **{name: X})
    assert str(refusal.value) == f"MultiHeadAttention.forward has no argument {name!r}. Use {mend}."


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("rope", "rotary=mh.Rotary()"),
        ("alibi", "position_bias=mh.scores.ALiBi(num_heads)"),
        ("window", "mask=masks.Causal() & masks.Window(size) in each call"),
        ("n_kv_heads", "num_kv_heads="),
        ("attn_drop", "dropout="),
    ],
)
def test_a_name_of_another_library_in_the_layer_gets_its_name_here(name: str, mend: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        mh.MultiHeadAttention(32, 4, **{name: 1})
    assert str(refusal.value) == f"MultiHeadAttention has no argument {name!r}. Use {mend}."


def test_the_arguments_of_the_book_are_those_of_a_class_of_its_own() -> None:
    with pytest.raises(ArgumentError) as refusal:
        mh.MultiHeadAttention(key_size=100, query_size=100, value_size=100, num_hiddens=100, num_heads=5)  # type: ignore[call-arg]
    assert str(refusal.value).endswith(
        "'num_hiddens'. multihead.compat.d2l.MultiHeadAttention is the class with these arguments."
    )


def test_the_state_of_pytorchs_layer_names_the_function_that_converts_it() -> None:
    state = torch.nn.MultiheadAttention(32, 4).state_dict()
    with pytest.raises(RuntimeError) as refusal:
        mh.MultiHeadAttention(32, 4).load_state_dict(state)
    assert str(refusal.value).endswith(
        "The state is that of an nn.MultiheadAttention: multihead.compat.torch_nn.from_torch(module) converts one to "
        "this layer."
    )


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("RoPE", "multihead.Rotary"),
        ("KVCache", "multihead.KeyValueCache"),
        ("Causal", "multihead.masks.Causal"),
        ("view", "Record.view() in a notebook, or the command multihead view"),
        ("compare", "before.changed(after) of two records, or the command multihead compare"),
    ],
)
def test_a_name_that_is_elsewhere_says_where(name: str, place: str) -> None:
    with pytest.raises(AttributeError) as refusal:
        getattr(mh, name)
    assert str(refusal.value) == f"module 'multihead' has no attribute {name!r}: use {place}"
