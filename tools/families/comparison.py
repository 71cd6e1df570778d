"""Run a tiny model with eager attention and with ours, and compare outputs, weights and the number of calls."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import multihead as mh
from multihead.errors import ModelError
from multihead.models import huggingface
from multihead.models.coverage import (
    IMPLEMENTATION_NAME,
    attention_outside_interface,
    require_attention_interface,
    uses_attention_interface,
)
from tools.families.breaking import parts_of_call, without
from tools.families.catalogue import is_part
from tools.families.detours import DETOURS, detour
from tools.families.inputs import candidates, configurations
from tools.families.overrides import WITHOUT_EAGER
from tools.families.tiny import full_configuration, sharpen, steepen, tiny_configuration, tiny_model

Outcome = Literal["equal", "no attention", "rejected", "not built", "different"]
STEPS = 3  # tokens that a model with a cache generates
PLAIN = "plain"  # the name of the attention that stands in for eager one
SHARP = 0.5  # the largest median entropy, as a share of that of an even spread
# Float32 sums are rounded differently by every kernel: how much more than eager's own error is allowed.
FACTOR, FLOOR = 16.0, 4e-5
CACHED = 1e-3  # allowed share of the mean logit in decoding, where padding overflows in float64


@dataclass
class Result:
    """The result of one model class.

    Attributes:
        family: its folder in `transformers.models`.
        name: the class.
        outcome: equal; rejected with an error of ours; not built, because it could not be built or run with eager
            attention; or different.
        reason: the error, or what differs.
        calls: attention calls of one pass.
        layers: attention layers of the model, and how many of them the pass ran.
        weights: calls whose observed weights were compared with eager ones.
        entropy: median entropy of a query's weights, as a share of that of an even spread.
        distance: largest difference of the outputs, as a share of what is allowed.
        cached: whether decoding with a cache was compared.
        features: parts of attention that the calls use: see tools/families/breaking.py.
        part: whether transformers does not export the class.
        kinds: classes of the attention layers that ran.
    """

    family: str
    name: str
    outcome: Outcome = "equal"
    reason: str = ""
    calls: int = 0
    layers: tuple[int, int] = (0, 0)
    weights: int = 0
    entropy: float = float("nan")
    distance: float = 0.0
    cached: bool = False
    features: list[str] = field(default_factory=list)
    part: bool = False
    kinds: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


class DifferentError(Exception):
    """Our attention and the eager one disagree."""


@dataclass
class Trace:
    """What the attention calls of a run had.

    Attributes:
        modules: the layer of each call.
        weights: its weights, where they are known: (batch, heads, queries, keys).
        features: parts of attention that a call used.
        exact: the same of a run in float64.
    """

    modules: list[nn.Module] = field(default_factory=list)
    weights: list[Tensor | None] = field(default_factory=list)
    features: set[str] = field(default_factory=set)
    exact: Trace | None = None


def compare(family: str, kind: Any, mutation: str | None = None) -> Result:
    """Compare one model class.

    With a mutation our attention is broken on purpose, and must differ. With a detour one layer of the model does not
    use our attention, and the model must be equal or rejected.
    """
    result = Result(family, kind.__name__, part=is_part(kind))
    torch.manual_seed(0)
    model = None
    try:
        model = tiny_model(kind, tiny_configuration(kind.config_class, kind))
        if mutation in DETOURS:
            detour(model, mutation)
        with torch.no_grad():
            _compare(model, result, None if mutation in DETOURS else mutation)
    except DifferentError as error:
        result.outcome, result.reason = "different", str(error)
    except ModelError as error:
        result.outcome, result.reason = "rejected", _refusal(model, error)
    except _NotBuiltError as error:
        result.outcome, result.reason = "not built", str(error)
    except Exception as error:  # noqa: BLE001 - every model fails in its own way, and the table names it
        result.outcome, result.reason = "not built", f"{type(error).__name__}: {error}"
    if result.outcome == "not built":
        _judge_by_structure(kind, result)
    result.reason = " ".join(result.reason.split())[:400]
    return result


def _refusal(model: Any, error: ModelError) -> str:
    """Return the first layer with attention of its own and the reason, or the error where there is none."""
    elsewhere = {} if model is None else attention_outside_interface(model)
    if not elsewhere:
        return str(error)
    name, reason = next(iter(elsewhere.items()))
    return f"{name}: {reason}" if len(elsewhere) == 1 else f"{name} (and {len(elsewhere) - 1} more): {reason}"


def _judge_by_structure(kind: Any, result: Result) -> None:
    """Judge a model that cannot be made tiny by its full size without memory: most are rejected by their layers."""
    model = None
    try:
        with torch.device("meta"):
            model = kind(full_configuration(kind.config_class, kind))
        if not any(
            uses_attention_interface(type(each)) for each in model.modules()
        ) and not attention_outside_interface(model):
            result.outcome, result.reason = "no attention", ""
        require_attention_interface(model)
    except ModelError as error:
        result.outcome, result.reason = "rejected", _refusal(model, error)
    except Exception:  # noqa: BLE001 - then the first error stands
        return


class _NotBuiltError(Exception):
    """A model could not be run with eager attention."""


def _compare(model: Any, result: Result, mutation: str | None) -> None:
    layers = {name: each for name, each in model.named_modules() if uses_attention_interface(type(each))}
    if not layers and not attention_outside_interface(model):
        result.outcome = "no attention"
        return
    with huggingface.install(model):
        pass  # raises where a model is rejected
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    inputs = _inputs(model)
    eager, exact = _sharp_runs(model, inputs, layers, result)
    trace = Trace()
    with _ours(model, trace, mutation):
        try:
            output = _run(model, inputs)
        except ModelError:
            raise
        except Exception as error:
            raise DifferentError(f"With ours, {type(error).__name__}: {error}") from error
    ran = [name for name, each in layers.items() if any(each is module for module in eager[1].modules)]
    result.calls, result.layers = len(trace.modules), (len(ran), len(layers))
    result.features = sorted(trace.features)
    result.kinds = sorted({type(layers[name]).__name__ for name in ran})
    if [id(each) for each in trace.modules] != [id(each) for each in eager[1].modules]:
        raise DifferentError(f"{len(trace.modules)} calls of ours, {len(eager[1].modules)} of eager attention.")
    result.distance = _distance(output, eager[0], exact, inputs)
    if not mutation:
        result.weights = _compare_weights(model, inputs, layers, eager[1])
    if result.distance > 1:
        raise DifferentError(f"The outputs differ by {result.distance:.3g} times what is allowed.")
    if getattr(model, "can_generate", bool)() and hasattr(model, "generate"):
        _compare_cached(model, inputs, result, mutation)


def _inputs(model: Any) -> dict[str, Any]:
    """Return the first arguments with which a model runs with eager attention."""
    first: Exception | None = None
    model.set_attn_implementation(_reference(model))
    for inputs in candidates(model):
        try:
            _run(model, inputs)
        except Exception as error:  # noqa: BLE001 - every model rejects inputs in its own way
            first = first or error
        else:
            return inputs
    raise first or _NotBuiltError("There are no inputs.")


def _sharp_runs(model: Any, inputs: dict[str, Any], layers: dict[str, nn.Module], result: Result) -> Any:
    """Run eager attention in float32 and in float64, with weights scaled until attention is sharp."""
    entropies: list[float] = []
    has_softcap = any(
        value is not None
        for each in configurations(model.config)
        for key, value in vars(each).items()
        if key.startswith("attn_logit_softcap")
    )
    while True:
        trace = Trace()
        output = _eager(model, inputs, trace)
        result.entropy = _entropy(trace.weights)
        entropies.append(result.entropy)
        stuck = len(entropies) > 4 and result.entropy > entropies[-5] * 0.97  # norms bound the scores
        if has_softcap and len(entropies) > 1 and 0.9 > result.entropy > entropies[-2]:
            for each in layers.values():
                sharpen(each, 1 / 1.4)  # more scores are at the softcap than before, and equal
            trace = Trace()
            output = _eager(model, inputs, trace)
            result.entropy = _entropy(trace.weights)
            break
        if not result.entropy > SHARP * 0.9 or len(entropies) > 24:
            break
        changed = [(steepen if stuck else sharpen)(each, 1.4) for each in layers.values()]
        if not any(changed):
            break
    trace.exact = Trace()
    try:
        exact = _eager(_double(model), doubled_precision(inputs), trace.exact)
    except Exception:  # noqa: BLE001 - some models mix in float32
        exact, trace.exact = output, trace
    model.float()
    return (output, trace), exact


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k' + bias + mask) v, for models without right eager attention in transformers."""
    heads = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scale = options.get("scaling")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if options.get("position_bias") is not None:
        scores = scores + options["position_bias"]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1).nan_to_num()  # a query without keys
    return (weights @ value).transpose(1, 2), weights


def _boolean_mask(**options: Any) -> Tensor | None:
    # Without causal skips: a mask that is None hides nothing.
    mask: Tensor | None = sdpa_mask(**options | {"allow_is_causal_skip": False})
    return mask


AttentionInterface.register(PLAIN, plain_attention)
AttentionMaskInterface.register(PLAIN, _boolean_mask)


def _reference(model: Any) -> str:
    return PLAIN if type(model).__name__.startswith(WITHOUT_EAGER) else "eager"


def _eager(model: Any, inputs: dict[str, Any], trace: Trace) -> dict[str, Tensor]:
    model.set_attn_implementation(_reference(model))
    with _eager_traced(trace):
        return _run(model, inputs)


@contextmanager
def _eager_traced(trace: Trace) -> Iterator[None]:
    """Record the weights that eager attention functions, and `plain_attention`, return."""
    original = AttentionInterface.get_interface

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output, weights = function(module, *args, **kwargs)
            trace.modules.append(module)
            trace.weights.append(weights.detach() if isinstance(weights, Tensor) else None)
            return output, weights

        return attend

    def get_interface(self: Any, name: str, default: Callable[..., Any]) -> Any:
        function = original(self, name, default)
        return function if name == PLAIN else traced(function)

    AttentionInterface.get_interface = get_interface
    AttentionInterface.register(PLAIN, traced(plain_attention))
    try:
        yield
    finally:
        AttentionInterface.get_interface = original
        AttentionInterface.register(PLAIN, plain_attention)


def _double(model: Any) -> Any:
    return model.double()


def doubled_precision(value: Any) -> Any:
    """Copy inputs of a model, with their tensors, caches and videos in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value == torch.float32 else value
    if isinstance(value, dict):
        changed = copy.copy(value)  # of the same class
        changed.update({key: doubled_precision(each) for key, each in value.items()})
        return changed
    if isinstance(value, (list, tuple)):
        return type(value)(doubled_precision(each) for each in value)
    if hasattr(value, "__dict__") and type(value).__module__.startswith("transformers."):  # a cache, or a video
        changed = copy.copy(value)
        vars(changed).update(doubled_precision(vars(value)))
        return changed
    return value


@contextmanager
def _ours(model: Any, trace: Trace, mutation: str | None) -> Iterator[None]:
    """Make a model call our attention, traced and perhaps broken."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> Any:
        trace.modules.append(module)
        trace.features |= parts_of_call(query, attention_mask, options)
        if mutation is not None:
            attention_mask, options = without(mutation, attention_mask, options)
        return huggingface.transformers_attention(module, query, key, value, attention_mask, **options)

    with huggingface.install(model):
        AttentionInterface.register(IMPLEMENTATION_NAME, attend)
        try:
            yield
        finally:
            AttentionInterface.register(IMPLEMENTATION_NAME, huggingface.transformers_attention)


def _run(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)  # some models draw noise
    with patch.object(torch, "randn", noise):
        return _outputs(model(**copy.deepcopy(inputs)))


def noise(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Draw the same numbers for every dtype: torch draws others in float64."""
    return _RANDN(*size, dtype=torch.float32, **options).to(dtype or torch.float32)


_RANDN = torch.randn


def _outputs(output: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors of a model's output, without its caches."""
    found: dict[str, Tensor] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                found[name] = value.detach()
        elif isinstance(value, dict):
            for key, each in value.items():
                if not re.search("past_key_values|cache|attentions", str(key)):
                    collect(f"{name}.{key}", each)
        elif isinstance(value, (list, tuple)):
            for index, each in enumerate(value):
                collect(f"{name}.{index}", each)

    collect("", output)
    if not found:
        raise _NotBuiltError("The model returns no floating-point tensor.")
    return found


def _distance(ours: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], inputs: Any) -> float:
    """Return the largest difference between ours and exact outputs, as a share of what is allowed."""
    if ours.keys() != eager.keys():
        raise DifferentError(f"Ours returns {sorted(ours)}, eager attention {sorted(eager)}.")
    largest = 0.0
    for name, value in ours.items():
        outputs = (value, eager[name], exact[name].to(value.device))
        mine, theirs, true = (_compared(each, inputs).double() for each in outputs)
        if mine.shape != theirs.shape:
            raise DifferentError(f"Output {name} has shape {tuple(mine.shape)}, and {tuple(theirs.shape)} with eager.")
        true = torch.where(true.isfinite(), true, theirs)  # some models overflow in float64
        defined = theirs.isfinite() & (theirs.abs() < 1e20)  # without what stands for minus infinity
        if theirs.numel() and not bool(defined.any()):
            raise _NotBuiltError(f"Output {name} of eager attention is not finite.")
        if not bool((mine.isfinite() | ~defined).all()):
            raise DifferentError(f"Output {name} is not finite.")
        mine, theirs, true = mine[defined], theirs[defined], true[defined]
        if not true.numel():
            continue
        size = float(true.abs().mean())
        error = float((theirs - true).abs().max())
        if error > 0.02 * size:
            raise _NotBuiltError(f"Eager attention in float32 differs from float64 by {error / max(size, 1e-30):.2g}.")
        found = float((mine - true).abs().max())
        largest = max(largest, found / (FACTOR * error + FLOOR * size + 1e-12))
    return largest


def _compared(value: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Return the part of an output that does not come from padding.

    Of an output per token these are the tokens that are no padding. Any other output may be made of the first token of
    a sample (or compare samples with each other), so samples whose first token is padding are left out.
    """
    for key in ("attention_mask", "decoder_attention_mask"):
        mask = inputs.get(key)
        if isinstance(mask, Tensor) and value.shape[:2] == mask.flatten(0, -2).shape:
            return value[mask.flatten(0, -2).bool()]
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and value.dim() and len(value) == len(mask):
        kept = mask[:, 0].nonzero()[:, 0].to(value.device)
        for axis in [axis for axis, size in enumerate(value.shape) if size == len(mask)]:
            value = value.index_select(axis, kept)
    return value


def _entropy(weights: list[Tensor | None]) -> float:
    """Return the median entropy of all queries that see two keys or more, as a share of that of an even spread."""
    shares: list[Tensor] = []
    for each in weights:
        if each is None or each.dim() != 4:
            continue
        visible = (each > 0).sum(-1)
        entropy = -torch.xlogy(each, each).sum(-1)
        share = entropy / visible.clamp(min=2).log()
        shares.append(share[visible > 1].double())
    flat = torch.cat(shares) if shares else torch.empty(0)
    return float(flat.median()) if flat.numel() else float("nan")


def _compare_weights(model: Any, inputs: dict[str, Any], layers: dict[str, nn.Module], eager: Trace) -> int:
    """Compare observed weights with those of eager attention; return how many calls were compared."""
    try:
        with mh.observe(model) as seen:
            _run(model, inputs)
    except Exception as error:
        raise DifferentError(f"Observed, {type(error).__name__}: {error}") from error
    names = {id(each): name for name, each in layers.items()}
    expected: dict[str, list[Tensor | None]] = {}
    errors: dict[str, float] = {}
    exact = eager.exact.weights if eager.exact is not None else eager.weights
    for module, weights, true in zip(eager.modules, eager.weights, exact, strict=True):
        name = names.get(id(module), "")
        expected.setdefault(name, []).append(weights)
        errors[name] = float((weights - true).abs().max()) if weights is not None and true is not None else 0.0
    compared = 0
    for layer in seen.layers:
        calls = expected.get(layer.name, [])
        if len(calls) != 1 or calls[0] is None or calls[0].dim() != 4 or layer.num_samples != calls[0].shape[0]:
            continue
        for sample in range(layer.num_samples):
            found, theirs = layer.weights(sample=sample).float(), calls[0][sample].float()
            differences = [
                float(((found - each) * (found.sum(-1, keepdim=True) > 0)).abs().max()) if found.numel() else 0.0
                for each in _recorded_parts(theirs, found.shape, sample, inputs)
            ]  # eager spreads the weight of a query without keys over all keys
            if not differences:
                raise DifferentError(f"Layer {layer.name}: observed weights have shape {tuple(found.shape)}.")
            if min(differences) > FACTOR * errors[layer.name] + FLOOR:
                raise DifferentError(f"Layer {layer.name}: observed weights differ by {min(differences):.2g}.")
        compared += 1
    return compared


def _recorded_parts(weights: Tensor, shape: Any, sample: int, inputs: dict[str, Any]) -> list[Tensor]:
    """Return the parts of eager weights (heads, queries, keys) that a record of some shape may hold.

    A record leaves padding out, and keys at the end that no query sees.
    """
    parts = [weights]
    for axis in (1, 2):
        size, kept = weights.shape[axis], shape[axis]
        places = [torch.arange(start, start + kept) for start in range(size - kept + 1)]
        for mask in inputs.values():
            if isinstance(mask, Tensor) and mask.dim() in (2, 3) and mask.shape[-1] and size % mask.shape[-1] == 0:
                row = mask.flatten(0, -2)[sample % mask[..., 0].numel()].bool()
                tokens = row.repeat_interleave(size // len(row)).nonzero()[:, 0]
                places += [tokens[:kept]] if len(tokens) >= kept else []
        parts = [part.index_select(axis, place) for part in parts for place in places]
    return parts


def _compare_cached(model: Any, inputs: dict[str, Any], result: Result, mutation: str | None) -> None:
    """Compare the logits of some generated tokens, each computed from a cache."""
    kept = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    if (
        isinstance(mask := kept.get("attention_mask"), Tensor)
        and "input_ids" in kept
        and "decoder_input_ids" not in inputs
    ):
        # A model continues at the end of its text, so the padding is at the start only.
        mask = mask.clone()
        mask[2] = 1
        kept["attention_mask"] = mask
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "pad_token_id": 0, "num_beams": 1}
    try:
        model.set_attn_implementation(_reference(model))
        eager = model.generate(**kept, **options)
    except Exception:  # noqa: BLE001 - what a model needs besides to generate is not built here
        return
    if getattr(eager, "logits", None) is None:
        return
    with _ours(model, Trace(), mutation):
        try:
            ours = model.generate(**kept, **options)
        except Exception as error:
            raise DifferentError(f"Generating with ours, {type(error).__name__}: {error}") from error
    if not torch.equal(ours.sequences, eager.sequences):
        raise DifferentError("Decoding with a cache, other tokens are generated.")
    distance = 0.0
    for mine, theirs in zip(ours.logits, eager.logits, strict=True):
        defined = theirs.isfinite() & (theirs.abs() < 1e20)
        largest = float((mine - theirs)[defined].abs().max()) if bool(defined.any()) else 0.0
        distance = max(distance, largest / (CACHED * float(theirs[defined].abs().mean()) + 1e-12))
    result.distance, result.cached = max(result.distance, distance), True
    if distance > 1:
        raise DifferentError(f"Decoding with a cache, the logits differ by {distance:.3g} times what is allowed.")
