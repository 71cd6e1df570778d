"""Entry points: `use` and `observe` of tiny Hugging Face models, against their eager attention in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Thread
from types import MethodType
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from multihead.errors import ModelError
from multihead.tensors.undo import Undo
from tests import oracle
from tests.fuzz.draw import Draw, Mismatch, check_error
from tests.fuzz.on_device import on_device, there

SLACK = 16  # eager attention in float32 rounds as much, at other places; some of the models amplify it


def hugging_face(draw: Draw) -> None:
    """Tiny models of ten families, their queries and keys scaled until attention is sharp."""
    from tests.families import FAMILIES, PADDED

    name = draw.pick("family", *FAMILIES)
    padding = draw.pick("padding", "none", "right", "left") if name in PADDED else "none"
    model = sharp_model(draw, name)
    batch = _batch(draw, name, padding)
    way = draw.pick("way", "use", "use", "packed", "observe", "observe", "set_attn_implementation")
    draw.notes |= {"family": name, "padding": padding, "way": way}
    before = model.config._attn_implementation
    plain = _eager(model, batch)
    exact = _exact(model, batch, plain)
    try:
        with on_device(model):
            found, seen = _ours(draw, model, batch, way)
    except ModelError:
        if way == "packed":  # not every family can
            return
        raise
    if way != "set_attn_implementation" and model.config._attn_implementation != before:
        raise Mismatch(f"the model is not restored: {model.config._attn_implementation} instead of {before}")
    rows = _rows(batch)
    _compare("output", found[rows], exact[0][rows], plain[0][rows])
    if seen is not None and padding == "none" and seen.layers[0].running_summary is None:
        _compare_weights(name, seen, exact, plain)


def gguf_file(draw: Draw) -> None:
    """A GGUF file with a drawn scaling of positions; its frequencies are computed apart, in float64."""
    import tempfile
    from pathlib import Path

    from transformers import LlamaConfig, LlamaForCausalLM

    from multihead.models.loading import load
    from tests.gguf_file import saved

    kind = draw.pick("kind", "none", "linear", "yarn", "factors", "linear and factors", "no type")
    factor, base = draw.pick("factor", 1.0, 1.5, 4.0, 32.0), draw.pick("base", 100.0, 10000.0, 500000.0)
    original, more = draw.pick("original", 32, 64, 100), draw.pick("attn_factor", 1.0, 0.5, 1.3)
    head_dim = draw.pick("head_dim", 8, 16)
    draw.notes |= {"scaling": kind, "factor": factor, "base": base, "original": original, "attn_factor": more}
    frequencies = base ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    divisors = 1 + 7 * torch.rand(head_dim // 2, generator=draw.generator("divisors")).double()
    entries: dict[str, Any] = {"attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    entries |= {"rope.freq_base": base, "attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind in ("none", "linear", "yarn"):
        entries |= {"rope.scaling.type": kind, "rope.scaling.factor": factor, "rope.scaling.attn_factor": more}
        entries["rope.scaling.original_context_length"] = original
    elif kind != "factors":
        entries["rope.scaling.factor"] = factor
    magnitude, right = more if kind in ("none", "linear", "yarn") else 1.0, frequencies
    if kind in ("linear", "linear and factors", "no type"):
        right = right / factor
    if "factors" in kind:
        right = right / divisors.float().double()
    if kind == "yarn":
        low, high = (
            head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32.0, 1.0)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
        ramp = ((torch.arange(head_dim // 2).double() - low) / (high - low if high > low else 0.001)).clamp(0, 1)
        right = frequencies * (ramp / factor + 1 - ramp)
        magnitude *= 0.1 * math.log(factor) + 1
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=64, head_dim=head_dim, num_key_value_heads=2, max_position_embeddings=256)
    )
    tensors = {"rope_freqs__weight": divisors} if "factors" in kind else {}
    with tempfile.TemporaryDirectory() as folder:
        loaded: Any = load(str(saved(Path(folder) / "model.gguf", model, "llama", entries, **tensors))).model
    rotary = loaded.rotary_emb
    off = float((rotary.inv_freq.double() / right - 1).abs().max())
    if off > 1e-5 or abs(rotary.attention_scaling / magnitude - 1) > 1e-5:
        raise Mismatch(f"rotary frequencies are {off:.2g} off, and their factor is {rotary.attention_scaling}")


def sharp_model(draw: Draw, name: str) -> Any:
    """A tiny model with parameters of this case, and scores as large as those of trained models."""
    from tests.families import family
    from tools.families.tiny import sharpen

    model, generator = family(name), draw.generator("parameters")
    factor = draw.pick("sharpened", 1.0, 2.0, 4.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
        sharpen(model, factor)
    draw.notes["sharpened"] = factor
    return model


def _batch(draw: Draw, name: str, padding: str) -> dict[str, Tensor]:
    from tests.families import VOCABULARY, batch_of

    batch = batch_of(name, padding=padding)
    for key, value in batch.items():
        if key.endswith("input_ids"):
            batch[key] = torch.randint(3, VOCABULARY, value.shape, generator=draw.generator(key))
        elif value.is_floating_point():
            batch[key] = draw.normal(key, *value.shape).float()
    return batch


def _eager(model: Any, batch: dict[str, Tensor]) -> Any:
    from tests.watched import eager

    kind = next(model.parameters()).dtype
    return eager(model, {n: e.to(kind) if e.is_floating_point() else e for n, e in batch.items()})


def _exact(model: Any, batch: dict[str, Tensor], plain: Any) -> Any:
    """Eager attention in float64; where it hides padding by overflow, the output alone by PyTorch's SDPA in float64.

    It is the result in float32 where a family has no float64.
    """
    rows, exact = _rows(batch), copy.deepcopy(model).double()
    try:
        found = _eager(exact, batch)
        if not bool(found[0][rows].isfinite().all()):
            exact.set_attn_implementation("sdpa")
            with torch.no_grad():
                found = exact(**{n: e.double() if e.is_floating_point() else e for n, e in batch.items()})
    except (RuntimeError, ValueError):
        return plain
    return found if bool(found[0][rows].isfinite().all()) else plain


def _rows(batch: dict[str, Tensor]) -> Any:
    """Return the index of the tokens that are no padding."""
    kept = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    return slice(None) if kept is None else kept.bool()


def _ours(draw: Draw, model: Any, batch: dict[str, Tensor], way: str) -> tuple[Tensor, mh.Record | None]:
    run = there(lambda **given: model(**given)[0])
    with torch.no_grad():
        if way == "observe":
            keep: Any = draw.pick("keep", "cpu", "device", "statistics", "summary")
            with mh.observe(model, keep=keep) as seen:
                return run(**batch), seen
        if way == "set_attn_implementation":
            mh.use()
            model.set_attn_implementation("multihead")
            return run(**batch), None
        with mh.use(model, packed=way == "packed"):
            return run(**batch), None


def _compare(name: str, found: Tensor, exact: Tensor, plain: Tensor) -> None:
    exact = exact.double()
    allowed = SLACK * oracle.budget(exact, plain) + 1e-3 * max(1.0, float(exact.abs().max()))
    check_error(name, oracle.difference(found, exact), allowed)


def _compare_weights(name: str, seen: mh.Record, exact: Any, plain: Any) -> None:
    from tests.watched import eager_weights

    expected, near = eager_weights(name, exact), eager_weights(name, plain)
    if len(seen.layers) != len(expected):
        raise Mismatch(f"a record has another number of layers: {len(seen.layers)} instead of {len(expected)}")
    for layer, right, close in zip(seen.layers, expected, near, strict=True):
        for index in range(layer.num_samples):
            sample = layer.sample(index)
            entropy = -torch.xlogy(right[index], right[index]).sum(-1)
            of_plain = -torch.xlogy(close[index], close[index]).sum(-1)
            n = sample.statistics["entropy"].shape[-1]
            _compare("recorded entropy", sample.statistics["entropy"], entropy[:, :n], of_plain[:, :n])
            if sample.keeps_weights:
                found = sample.weights()
                place = (index, slice(None), slice(0, found.shape[1]), slice(0, found.shape[2]))
                _compare("recorded weights", found, right[place], close[place])


# ---- models whose attention was changed by hand


def _scores(layer: Any, states: Tensor, embeddings: Any, kind: str, mask: Tensor | None) -> Tensor:
    """The attention of Llama, with something of one's own in it."""
    from transformers.models.llama import modeling_llama as llama

    shape = (*states.shape[:-1], -1, layer.head_dim)
    q, k, v = (each(states).view(shape).transpose(1, 2) for each in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = llama.apply_rotary_pos_emb(q, k, *embeddings)
    if kind == "calls eager":
        output = llama.eager_attention_forward(layer, q, k, v, mask, scaling=layer.scaling)[0]
        return layer.o_proj(output.reshape(*states.shape[:-1], -1))  # type: ignore[no-any-return]
    k, v = (llama.repeat_kv(each, layer.num_key_value_groups) for each in (k, v))
    scores = q @ k.mT * layer.scaling
    if mask is not None:
        scores = scores + mask
    if kind == "exp":
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
    else:
        weights = scores.softmax(-1)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _change(model: Any, kind: str, named: str, where: str) -> None:
    """Give one attention layer of a Llama a forward of its own."""
    from transformers.models.llama import modeling_llama as llama

    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **options: Any
    ) -> Any:
        if kind == "bias":
            options |= {"position_embeddings": position_embeddings}
            mask = None if attention_mask is None else attention_mask + 0.5 * torch.eye(hidden_states.shape[1])
            return llama.LlamaAttention.forward(self, hidden_states, attention_mask=mask, **options)
        return _scores(self, hidden_states, position_embeddings, kind, attention_mask), None

    attention = model.model.layers[1].self_attn
    if where == "instance":
        attention.forward = MethodType(forward, attention)
    else:
        attention.__class__ = type(named, (llama.LlamaAttention,), {"forward": forward})


def changed_models(draw: Draw) -> None:
    """A Llama with attention of its own in one layer: refused in a sentence, or as with eager attention (O4)."""
    kind = draw.pick("kind", "softmax", "calls eager", "exp", "bias")
    named = draw.pick("named", "Outside", "OutsideAttention", "MixerAttention")
    where = draw.pick("where", "class", "class", "instance")
    way = draw.pick("way", "use", "observe", "set_attn_implementation")
    draw.notes |= {"kind": kind, "named": named, "where": where, "way": way}
    model = sharp_model(draw, "llama")
    batch = _batch(draw, "llama", draw.pick("padding", "none", "right", "left"))
    _change(model, kind, named, where)
    plain = _eager(model, batch)
    exact = _exact(model, batch, plain)
    try:
        found, _ = _ours(draw, model, batch, way)
    except (ModelError, RuntimeError, TypeError):
        return  # refused
    rows: Any = batch["attention_mask"].bool() if "attention_mask" in batch else slice(None)
    _compare(f"output of a model with attention of its own ({kind})", found[rows], exact[0][rows], plain[0][rows])


def _bias_or(hidden: Tensor, bias: Tensor) -> Tensor:
    """The bias of visible cells, and the lowest number in hidden ones, as eager attention takes them."""
    return torch.where(hidden, torch.finfo(bias.dtype).min, bias)


def _with_cells(mask: Tensor, cells: Any, value: Any) -> Tensor:
    mask = mask.clone()
    mask[cells] = value
    return mask


def _drop(mask: Tensor, drop: Tensor, low: float) -> Tensor:
    """Hide cells as models do that support both kinds of masks."""
    return mask & ~drop if mask.dtype == torch.bool else mask.masked_fill(drop, low)


# what a layer may do with its additive mask, given the mask, a bias and a Boolean mask of cells to hide, each
# (queries, keys), and the lowest number
_READS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "lt": lambda mask, bias, drop, low: _bias_or(mask < -1, bias),
    "ne": lambda mask, bias, drop, low: _bias_or(mask != 0, bias),
    "eq": lambda mask, bias, drop, low: _bias_or(~(mask == 0), bias),
    "ge tensor": lambda mask, bias, drop, low: _bias_or(~torch.ge(mask, torch.zeros(1)), bias),
    "gt of other": lambda mask, bias, drop, low: _bias_or(torch.full_like(bias, -1) > mask, bias),
    "lt in place": lambda mask, bias, drop, low: _bias_or(mask.clone().lt_(-1).bool(), bias),
    "lt of one query": lambda mask, bias, drop, low: mask + _bias_or(mask[..., -1:, :] < -1, bias),
    "signbit": lambda mask, bias, drop, low: _bias_or(torch.signbit(mask), bias),
    "max": lambda mask, bias, drop, low: _bias_or(mask < mask.max(), bias),
    "amin": lambda mask, bias, drop, low: _bias_or(mask <= mask.amin(-1, keepdim=True).clamp(max=-1), bias),
    "item": lambda mask, bias, drop, low: bias if mask[0, 0, 0, -1].item() == 0 else mask,
    "equal": lambda mask, bias, drop, low: bias if torch.equal(mask, torch.zeros(mask.shape)) else mask,
    "add": lambda mask, bias, drop, low: mask + bias,
    "half": lambda mask, bias, drop, low: mask * 0.5,
    "masked_fill": lambda mask, bias, drop, low: mask.masked_fill(drop, low),
    "setitem": lambda mask, bias, drop, low: _with_cells(mask, (..., 0), 0.0),
    "setitem low": lambda mask, bias, drop, low: _with_cells(mask, (..., drop), low),
    "pad": lambda mask, bias, drop, low: torch.nn.functional.pad(mask, (0, 1))[..., 1:],
    "zeros_like": lambda mask, bias, drop, low: torch.zeros_like(mask).masked_fill(drop, low),
    "full_like": lambda mask, bias, drop, low: torch.full_like(mask, low).masked_fill(~drop, 0.0),
    "both kinds": lambda mask, bias, drop, low: _drop(mask, drop, low),
    "cut": lambda mask, bias, drop, low: mask[:, :, -drop.shape[0] :, : drop.shape[1]].clone(),
}


def mask_readers(draw: Draw) -> None:
    """A Llama whose layer compares its mask, adds to it or selects by it: refused, or as with eager attention."""
    from transformers.models.llama import modeling_llama as llama

    read, where = draw.pick("read", *_READS), draw.pick("where", "class", "instance", "hook")
    way = draw.pick("way", "use", "observe", "set_attn_implementation")
    draw.notes |= {"read": read, "where": where, "way": way}
    model = sharp_model(draw, "llama")
    batch = _batch(draw, "llama", draw.pick("padding", "none", "right", "left"))
    length = batch["input_ids"].shape[1]
    bias = draw.normal("bias", length, length)
    drop = torch.ones(length, length).triu(1).bool() | (draw.normal("drop", length, length) > 1)
    drop &= ~torch.eye(length, dtype=torch.bool)  # no query loses all keys

    def changed(mask: Tensor, states: Tensor) -> Tensor:
        return _READS[read](mask, bias.to(states.dtype), drop, torch.finfo(states.dtype).min)

    def forward(self: Any, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
        options["attention_mask"] = changed(attention_mask, hidden_states)
        return llama.LlamaAttention.forward(self, hidden_states, *args, **options)

    def change_arguments(_: Any, args: Any, options: dict[str, Any]) -> Any:
        states = args[0] if args else options["hidden_states"]
        return args, options | {"attention_mask": changed(options["attention_mask"], states)}

    attention = model.model.layers[1].self_attn
    if where == "class":
        attention.__class__ = type("OutsideAttention", (llama.LlamaAttention,), {"forward": forward})
    elif where == "instance":
        attention.forward = MethodType(forward, attention)
    else:
        attention.register_forward_pre_hook(change_arguments, with_kwargs=True)
    plain = _eager(model, batch)
    exact = _exact(model, batch, plain)
    try:
        found, _ = _ours(draw, model, batch, way)
    except ModelError:
        return  # refused
    rows: Any = batch["attention_mask"].bool() if "attention_mask" in batch else slice(None)
    _compare(f"output of a model whose layer reads its mask ({read})", found[rows], exact[0][rows], plain[0][rows])


def overlapping(draw: Draw) -> None:
    """Two `observe` or `use` of one model that overlap: both record everything, and the model is restored (S6)."""
    model = sharp_model(draw, "llama")
    batch = _batch(draw, "llama", "none")
    before = model.config._attn_implementation
    kinds: list[Callable[[], Any]] = [lambda: mh.observe(model), lambda: mh.use(model)]
    one, other = (draw.pick(f"context {n}", *kinds)() for n in range(2))
    calls = draw.pick("calls", 1, 2)
    with torch.no_grad():
        try:
            one.__enter__()
            seen = other.__enter__()
        except ModelError:
            return  # a second one may be refused
        model(**batch)
        one.__exit__(None, None, None)
        for _ in range(calls):
            model(**batch)
        other.__exit__(None, None, None)
    if model.config._attn_implementation != before:
        raise Mismatch(f"the model is not restored: {model.config._attn_implementation} instead of {before}")
    if isinstance(seen, mh.Record) and seen.layers[0].num_samples != 2 * (1 + calls):
        raise Mismatch(f"a record has {seen.layers[0].num_samples} texts instead of {2 * (1 + calls)}")


def interleaved(draw: Draw) -> None:
    """A pass in whose middle another thread enters and leaves contexts computes what it computes without them."""
    from tests.families import FAMILIES, PADDED

    name = draw.pick("family", *FAMILIES)
    model = sharp_model(draw, name)
    batch = _batch(draw, name, draw.pick("padding", "none", "right", "left") if name in PADDED else "none")
    plain = _eager(model, batch)
    exact = _exact(model, batch, plain)
    mh.use()
    with suppress(ValueError):  # not every family has sdpa
        model.set_attn_implementation(draw.pick("implementation", "sdpa", "eager", "multihead"))
    configuration, before = model.config, model.config._attn_implementation
    steps: dict[int, list[Callable[[], Any]]] = {}
    last = sum(1 for _ in model.modules()) + 1
    for number in range(draw.pick("contexts", 1, 2, 3)):
        kind: Any = draw.pick(f"context {number}", mh.observe, partial(mh.ablate, heads="L0 H0"), _LateUse)
        context = kind(model)
        enter, leave = sorted(draw.stream(f"order {number}").sample(range(last + 1), 2))
        steps.setdefault(enter, []).append(context.__enter__)
        steps.setdefault(leave, []).append(partial(context.__exit__, None, None, None))
    draw.notes |= {"family": name, "implementation": before, "steps": sorted(steps)}
    calls = count(1)
    with torch.no_grad(), Undo() as undo:
        _in_another_thread(steps.pop(0, []))
        for module in model.modules():
            undo.hook_before_forward(module, lambda *_: _in_another_thread(steps.pop(next(calls), [])))
        found = model(**batch)[0]
    for step in sorted(steps):
        _in_another_thread(steps[step])
    rows = _rows(batch)
    _compare("output", found[rows], exact[0][rows], plain[0][rows])
    if model.config is not configuration or model.config._attn_implementation != before:
        raise Mismatch(f"the model is not restored: {model.config._attn_implementation} instead of {before}")


class _LateUse:
    """`mh.use` that begins when its block begins."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.used = mh.use(self.model)

    def __exit__(self, *_: object) -> None:
        self.used.undo()


def _in_another_thread(steps: list[Callable[[], object]]) -> None:
    """Run steps one after the other in another thread; a context in which nothing ran in its thread may say so."""

    def run() -> None:
        for step in steps:
            with suppress(ModelError):
                step()

    thread = Thread(target=run)
    thread.start()
    thread.join()
