"""replace() replaces every attention, lists them, keeps everything else, and can be undone."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multihead import observe
from multihead.compat import torch_nn
from multihead.compat.torch_nn import MultiheadAttention, replace
from multihead.compat.torch_nn.replace import replace_until_undone
from multihead.tensors.undo import Undo


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def calls_of_ours(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Count every forward of the drop-in."""
    called: list[nn.Module] = []
    forward = MultiheadAttention.forward

    def counted(self: MultiheadAttention, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        called.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(MultiheadAttention, "forward", counted)
    return called


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_in_an_encoder_the_drop_in_runs_in_every_mode(
    monkeypatch: pytest.MonkeyPatch, *, grad: bool, training: bool
) -> None:
    model, called = encoder().train(training), calls_of_ours(monkeypatch)
    x = torch.randn(2, 5, 16)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.set_grad_enabled(grad):
        expected = model(x, src_key_padding_mask=padding)
        assert called == []
        replaced = replace(model, inplace=True)
        actual = model(x, src_key_padding_mask=padding)
    assert called == [layer.self_attn for layer in model.layers]
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    replaced.restore()
    model(x)
    assert len(called) == 3


def test_in_a_decoder_and_a_whole_transformer_the_drop_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, called = nn.Transformer(16, 2, 1, 2, 32, 0.0, batch_first=True).eval(), calls_of_ours(monkeypatch)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    with torch.no_grad():
        expected = model(x, y, tgt_mask=causal, tgt_is_causal=True)
        with replace(model, inplace=True):
            actual = model(x, y, tgt_mask=causal, tgt_is_causal=True)
    assert len(called) == 1 + 2 * 2
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_an_encoder_that_packs_padded_batches_goes_on_packing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, called = nn.TransformerEncoder(layer, 2).eval(), calls_of_ours(monkeypatch)
    x, padding = torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[5], [3], [1]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        replace(model, inplace=True)
        actual = model(x, src_key_padding_mask=padding)
    assert len(called) == 2
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    assert (actual[1, 3:] == 0).all()


def by_replace() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return replace(nn.TransformerEncoder(layer, 2), inplace=True).model


def by_hand() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    layer.self_attn = MultiheadAttention(16, 2, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def by_pickle() -> nn.TransformerEncoder:
    model: nn.TransformerEncoder = pickle.loads(pickle.dumps(by_hand()))
    return model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("made", [by_replace, by_hand, by_pickle])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padding", [None, "bool", "float", "left"])
def test_no_fused_path_bypasses_a_drop_in_that_says_its_projections_are_packed(
    monkeypatch: pytest.MonkeyPatch, made: Any, context: Any, padding: str | None
) -> None:
    model, called = made().eval(), calls_of_ours(monkeypatch)
    assert model.use_nested_tensor
    assert all(layer.self_attn._qkv_same_embed_dim for layer in model.layers)
    x, hidden = torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[5], [3], [1]])
    if padding == "left":
        hidden = hidden.flip(1)
    given = hidden.float().masked_fill(hidden, -torch.inf) if padding == "float" else hidden if padding else None
    real = ~hidden if padding else torch.ones_like(hidden)
    expected = copy.deepcopy(model).train()  # every submodule is called in training
    for module in expected.modules():
        if isinstance(module, nn.Dropout | MultiheadAttention):
            module.eval()
    expected = expected(x, src_key_padding_mask=given)
    called.clear()
    spoilt = x.masked_fill(~real[..., None], torch.nan)
    with context(), observe(model) as seen:
        actual = model(spoilt, src_key_padding_mask=given)
    assert called == [layer.self_attn for layer in model.layers]
    assert [layer.name for layer in seen.layers] == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=2e-5)
    assert [[one.num_queries for one in layer.samples] for layer in seen.layers] == [real.sum(1).tolist()] * 2


def test_a_layer_saved_when_it_stated_separate_projections_states_packed_ones_after_loading() -> None:
    layer = MultiheadAttention(16, 2)
    layer._forward_pre_hooks.clear()
    layer._qkv_same_embed_dim = False
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded._qkv_same_embed_dim is True
    assert len(loaded._forward_pre_hooks) == 1
    assert MultiheadAttention(16, 2, kdim=8)._qkv_same_embed_dim is False


def test_the_list_names_what_was_replaced_and_what_was_not_and_why() -> None:
    class Special(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict({"plain": nn.MultiheadAttention(8, 2), "special": Special(8, 2), "wrapped": encoder()})
    hand_made = nn.MultiheadAttention(8, 2)
    hand_made.forward = lambda *args, **kwargs: None  # type: ignore[assignment, method-assign]
    model["by hand"] = hand_made
    replaced = replace(model, inplace=True)
    assert str(replaced).splitlines() == [
        "4 nn.MultiheadAttention were replaced.",
        "  plain",
        "  wrapped.layers.0.self_attn",
        "  wrapped.layers.1.self_attn",
        "  wrapped.layers.2.self_attn",
        "  special was not: it is a Special, whose forward may differ.",
        "  by hand was not: its forward was set on the instance.",
    ]
    assert str(replace(model, inplace=True)).startswith("No nn.MultiheadAttention was replaced.")


def test_the_model_itself_may_be_one() -> None:
    root = nn.MultiheadAttention(8, 2)
    with replace(root, inplace=True) as replaced:
        assert type(root) is MultiheadAttention
        assert str(replaced) == "1 nn.MultiheadAttention was replaced.\n  the model itself"
    assert type(root) is nn.MultiheadAttention


def test_without_inplace_the_model_stays_and_the_copy_shares_its_parameters() -> None:
    model = encoder()
    model.register_buffer("seen", torch.zeros(1))
    copied = replace(model).model
    assert not any(isinstance(module, MultiheadAttention) for module in model.modules())
    assert sum(isinstance(module, MultiheadAttention) for module in copied.modules()) == 3
    assert [id(parameter) for parameter in copied.parameters()] == [id(parameter) for parameter in model.parameters()]
    assert copied.seen is model.seen
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 5, 16)
    before = copied(x)
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(copied(x), before)


def test_everything_else_stays_as_it_was() -> None:
    model = encoder().eval().double()
    attention = model.layers[0].self_attn
    attention.in_proj_weight.requires_grad_(requires_grad=False)
    fired: list[str] = []
    handle = attention.register_forward_hook(lambda *_: fired.append("before"))
    kept = {**vars(attention)}
    parameters = list(model.parameters())
    replaced = replace(model, inplace=True)
    assert model.layers[0].self_attn is attention
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert not attention.in_proj_weight.requires_grad
    assert not attention.training
    later = attention.register_forward_hook(lambda *_: fired.append("after"))
    model(torch.randn(1, 3, 16).double())
    handle.remove()
    replaced.restore()
    model(torch.randn(1, 3, 16).double())
    assert fired == ["before", "after", "after"]
    later.remove()
    assert vars(attention) == kept


def test_separate_projections_are_restored_to_what_they_were() -> None:
    model = nn.MultiheadAttention(8, 2, kdim=4)
    replace(model, inplace=True).restore()
    assert model._qkv_same_embed_dim is False
    model(torch.randn(3, 8), torch.randn(2, 4), torch.randn(2, 8))


def test_a_replaced_model_can_be_copied_pickled_and_its_state_loaded_either_way() -> None:
    original = encoder().eval()
    ours = replace(original).model
    x = torch.randn(2, 5, 16)
    expected = ours(x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other.layers[0].self_attn) is MultiheadAttention
        assert torch.equal(other(x), expected)
    fresh = encoder().eval()
    fresh.load_state_dict(ours.state_dict())
    replace(encoder(), inplace=True).model.load_state_dict(original.state_dict())
    torch.testing.assert_close(fresh(x), expected, rtol=0, atol=2e-5)


class Tagger(nn.Module):
    """A stranger's model: it knows nothing of this project."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.encoder(self.embedding(tokens), mask=causal, src_key_padding_mask=(tokens == 0).float() * -1e30)
        return self.out(hidden)


def test_a_strangers_training_goes_the_same_way_after_replace() -> None:
    curves = []
    for exchanged in (False, True):
        torch.manual_seed(0)
        model = Tagger()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        if exchanged:
            replace(model, inplace=True)
        losses = []
        for _ in range(30):
            tokens = torch.randint(1, 11, (8, 9))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    assert curves[0][-1] < curves[0][0] - 0.1
    torch.testing.assert_close(curves[1], curves[0], rtol=0, atol=1e-4)


def test_uses_that_overlap_keep_the_drop_in_until_the_last_one_ends() -> None:
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    one, other = Undo(), Undo()
    replace_until_undone(one, model)
    replace_until_undone(other, model)
    assert type(model.self_attn) is MultiheadAttention
    one.close()
    assert (type(model.self_attn), len(model.self_attn._forward_pre_hooks)) == (MultiheadAttention, 1)
    other.close()
    assert (type(model.self_attn), len(model.self_attn._forward_pre_hooks)) == (nn.MultiheadAttention, 0)


def test_a_drop_in_of_the_user_stays_after_a_use() -> None:
    model = replace(nn.TransformerEncoderLayer(8, 2)).model
    with Undo() as undo:
        replace_until_undone(undo, model)
    assert (type(model.self_attn), len(model.self_attn._forward_pre_hooks)) == (MultiheadAttention, 1)


def trained(classes: ModuleType, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    """Train a small encoder whose classes are imported from one place or another."""
    torch.manual_seed(0)
    layer = classes.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **options)
    model = nn.Sequential(classes.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        x = torch.randn(4, 6, 16)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), (x[..., 0] > x.mean(1)[:, :1]).long().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, torch.tensor(losses)


def attentions(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules() if isinstance(module, nn.MultiheadAttention)]


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_strangers_training_goes_the_same_way_after_changing_its_import(*, norm_first: bool) -> None:
    theirs, expected = trained(nn, norm_first=norm_first)
    ours, actual = trained(torch_nn, norm_first=norm_first)
    assert attentions(ours) == [torch_nn.MultiheadAttention] * 2
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert expected[-1] < expected[0] - 0.05
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_an_encoder_of_ours_packs_padded_batches_without_a_warning_at_its_making() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = torch_nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        ours = torch_nn.TransformerEncoder(layer, 2).eval()
    assert type(layer.self_attn) is torch_nn.MultiheadAttention
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    theirs.load_state_dict(ours.state_dict())
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [2]])
    with torch.no_grad():
        actual, expected = (model(x, src_key_padding_mask=padding) for model in (ours, theirs))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


def test_decoder_and_transformer_are_the_originals_with_our_attention() -> None:
    torch.manual_seed(1)
    theirs = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
    torch.manual_seed(1)
    ours = torch_nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
    assert attentions(ours) == [torch_nn.MultiheadAttention] * 3
    x, y = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    torch.testing.assert_close(ours(x, y), theirs(x, y), rtol=0, atol=2e-5)
    layer = torch_nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    decoder = torch_nn.TransformerDecoder(layer, 2)
    assert attentions(decoder) == [torch_nn.MultiheadAttention] * 4
    assert decoder(y, x).shape == y.shape
