"""Time `mh.importance` against plain code of its floor, and against other tools: python -m benchmarks.every_head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from statistics import quantiles
from time import thread_time
from typing import Any

import click
import torch
from torch import Tensor

import multihead as mh
from benchmarks.machine import machine_line
from benchmarks.measure import NotMeasuredError
from benchmarks.pages import RESULTS, table, today, write_page
from benchmarks.watching import smollm
from multihead.interventions.importance import EffectsOfLayer
from multihead.interventions.predictions import token_losses

TOKENS = 96
FLOOR, PASSES, LENS, NNSIGHT = "floor", "floor without the losses", "TransformerLens", "nnsight"
PACKAGES = {LENS: ("transformer_lens", "transformer-lens"), NNSIGHT: ("nnsight", "nnsight")}
MOST_OVER_FLOOR = 1.1
TOLERANCE = 1e-5  # nats, between effects in float32

EXPLAINED = (
    "SmolLM2-135M-Instruct (4-bit weights, computed in float32) reads {tokens} tokens of Python's help, and each of "
    "its {heads} heads is switched off once; the effect is that on the mean loss. After each layer of `mh.importance` "
    "the others do the same layer in the same process, on copies of the model of their own: CPU seconds of the thread, "
    "one thread. The floor is plain code of the model with torch's attention, which no exact method can do without: "
    "for each head the output projection of its layer, the rest of that block, all later blocks, the unembedding and "
    "the losses, in batches of {heads_of_layer} copies as `mh.importance` has them. It gets the outputs of the blocks "
    "and heads with all heads on for nothing, which `mh.importance` must compute and check first. The other tools run "
    "the whole model once per head, with a hook that sets the head's output to 0 before the output projection. The "
    "difference is the largest one between two effects of the same head, in nats; the largest effect is {largest:.2f}."
)


@dataclass
class Race:
    """How long each contender took for each layer, and how far its effects are from those of `mh.importance`.

    Attributes:
        ours: CPU seconds of `mh.importance` for each layer; the first contains all that comes before it.
        others: name of a contender -> CPU seconds of each layer.
        differences: name of a contender -> the largest difference between two effects, nats.
        effects: the effects, (layers, heads).
    """

    ours: list[float] = field(default_factory=list)
    others: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    effects: Tensor = field(default_factory=lambda: torch.empty(0))

    def unmet(self) -> list[str]:
        """Return the targets that were missed."""
        ratio = sum(self.ours) / sum(self.others[FLOOR])
        found = [f"mh.importance takes {ratio:.3f} of its floor"] if ratio > MOST_OVER_FLOOR else []
        far = [(name, each) for name, each in self.differences.items() if each > TOLERANCE]
        return found + [f"an effect differs from that of {name} by {each:.1e}" for name, each in far]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table: seconds of all heads, and the time divided by ours, in all and by layer."""
        found = [("mh.importance", f"{sum(self.ours):.1f}", "", "", "")]
        for name, seconds in self.others.items():
            low, median, high = quantiles(each / mine for each, mine in zip(seconds, self.ours, strict=True))
            ratio = sum(seconds) / sum(self.ours)
            by_layer = f"{median:.2f} ({low:.2f} to {high:.2f})"
            difference = f"{self.differences[name]:.1e}" if name in self.differences else ""
            found.append((described(name), f"{sum(seconds):.1f}", f"{ratio:.2f}", by_layer, difference))
        return found


Contender = Callable[[int], Tensor]
"""Number of a layer -> the loss without each of its heads, (heads,) nats; of the floor the logits of the copies."""


def race(model: Any, ids: Tensor, contenders: dict[str, Contender], before: dict[str, float]) -> Race:
    """Switch off each head of a model, and have the contenders do each layer after `mh.importance` has done it.

    Args:
        model: a language model.
        ids: the text, (1, tokens).
        contenders: name -> contender; each has a copy of the model.
        before: name -> the loss with all heads on.
    """
    found = Race(others={name: [] for name in (FLOOR, PASSES, *contenders)}, differences=dict.fromkeys(contenders, 0.0))
    begun = thread_time()

    def follow(step: EffectsOfLayer) -> None:
        nonlocal begun
        found.ours.append(thread_time() - begun)
        for name, run_layer in contenders.items():
            begun = thread_time()
            returned = run_layer(step.layer)
            if name == FLOOR:
                found.others[PASSES].append(thread_time() - begun)
                returned = losses_of(returned, ids)
            found.others[name].append(thread_time() - begun)
            difference = returned - before[name] - step.effects[0]
            found.differences[name] = max(found.differences[name], float(difference.abs().max()))
        times = ", ".join(f"{name} {seconds[-1]:.2f} s" for name, seconds in found.others.items())
        click.echo(f"L{step.layer}: mh.importance {found.ours[-1]:.2f} s, {times}", err=True)
        begun = thread_time()

    found.effects = mh.importance(model, [ids], progress=follow).effects
    return found


def losses_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean loss of each text, (texts,) float64, of logits (texts, tokens, words) and ids (1, tokens)."""
    return token_losses(logits, ids.expand(len(logits), -1)).mean(1)


@torch.no_grad()
def floor_of(model: Any, ids: Tensor) -> Contender:
    """Return the floor of a Llama as plain code: each head off in a copy of the text, from the output projection on."""
    network, heads = model.model, model.config.num_attention_heads
    states: list[Tensor] = []  # what each block reads, (1, tokens, features)
    outputs: list[Tensor] = []  # of all heads of each block
    hooks = []
    for each in network.layers:
        projection = each.self_attn.o_proj
        hooks += [
            each.register_forward_pre_hook(lambda _, given: states.append(given[0])),
            projection.register_forward_pre_hook(lambda _, given: outputs.append(given[0])),
        ]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    angles = network.rotary_emb(states[0], torch.arange(ids.shape[1])[None])

    @torch.no_grad()
    def logits_without(layer: int) -> Tensor:
        split = outputs[layer].repeat(heads, 1, 1).unflatten(2, (heads, -1))  # (copies, tokens, heads, features)
        split[range(heads), :, range(heads)] = 0
        block = network.layers[layer]
        x = states[layer] + block.self_attn.o_proj(split.flatten(2))
        x = x + block.mlp(block.post_attention_layernorm(x))
        for later in network.layers[layer + 1 :]:
            x = later(x, attention_mask=None, position_embeddings=angles)
        logits: Tensor = model.lm_head(network.norm(x))
        return logits

    return logits_without


def lens_of(model: Any, ids: Tensor, tokenizer: Any) -> Contender:
    """Return TransformerLens, which sets the `hook_z` of a head to 0."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers("model", hf_model=model, tokenizer=tokenizer, device="cpu").eval()

    @torch.no_grad()
    def losses_without(layer: int) -> Tensor:
        def loss(head: int) -> Tensor:
            def off(z: Tensor, hook: object) -> Tensor:
                z = z.clone()  # (texts, tokens, heads, features)
                z[:, :, head] = 0
                return z

            hooks = [(f"blocks.{layer}.attn.hook_z", off)]
            return losses_of(bridge.run_with_hooks(ids, return_type="logits", fwd_hooks=hooks), ids)

        return torch.cat([loss(head) for head in range(model.config.num_attention_heads)])

    return losses_without


def nnsight_of(model: Any, ids: Tensor) -> Contender:
    """Return nnsight, which sets the slice of a head in the input of `o_proj` to 0."""
    from nnsight import NNsight

    wrapped, config = NNsight(model), model.config

    @torch.no_grad()
    def losses_without(layer: int) -> Tensor:
        found = []
        for head in range(config.num_attention_heads):
            first = head * config.head_dim
            with wrapped.trace(ids):
                wrapped.model.layers[layer].self_attn.o_proj.input[..., first : first + config.head_dim] = 0
                logits = wrapped.lm_head.output.save()
            found.append(losses_of(logits, ids))
        return torch.cat(found)

    return losses_without


def measure(tokens: int, names: Sequence[str]) -> Race:
    """Race SmolLM2 against its floor and some other tools."""
    missing = [name for module, name in (PACKAGES[each] for each in names) if find_spec(module) is None]
    if missing:
        raise NotMeasuredError(f"pip install {' '.join(missing)}")
    model, ids, tokenizer = smollm.loaded(tokens)
    with torch.no_grad():
        loss = float(losses_of(model(ids).logits, ids))
    contenders = {FLOOR: floor_of(copy.deepcopy(model), ids)}
    if LENS in names:
        contenders[LENS] = lens_of(copy.deepcopy(model), ids, tokenizer)
    if NNSIGHT in names:
        contenders[NNSIGHT] = nnsight_of(copy.deepcopy(model), ids)
    return race(model, ids, contenders, dict.fromkeys(contenders, loss))


def described(name: str) -> str:
    """Return a contender's name with its version."""
    return f"{name} {version(PACKAGES[name][1])}" if name in PACKAGES else name


def page(found: Race, tokens: int) -> list[str]:
    """Return the lines of the page."""
    layers, heads = found.effects.shape
    sizes = {"tokens": tokens, "heads": layers * heads, "heads_of_layer": heads}
    explained = EXPLAINED.format(**sizes, largest=float(found.effects.abs().max()))
    lines = [f"# Every head switched off once, {today()}", "", machine_line(), "", explained, ""]
    head = ("", "CPU seconds", "time / ours", "by layer, quartiles", "difference")
    return lines + table(head, found.rows())


@click.command()
@click.option("--tools", is_flag=True, help="TransformerLens and nnsight too; a venv of their own can have them.")
@click.option("--tokens", type=click.IntRange(2), default=TOKENS, show_default=True, help="Tokens of the text.")
@click.option("--save/--no-save", default=True, help="Write the page in benchmarks/results/.")
def main(*, tools: bool, tokens: int, save: bool) -> None:
    """Time every head of SmolLM2 once, in 2 minutes, with --tools in 6; fails above 1.1 of the floor."""
    torch.set_num_threads(1)
    try:
        found = measure(tokens, tuple(PACKAGES) if tools else ())
    except NotMeasuredError as missing:
        raise click.ClickException(f"Not everything is installed: {missing}") from missing
    lines = page(found, tokens)
    print("\n".join(lines))
    if save:
        write_page(RESULTS, "every-head", lines)
    if unmet := found.unmet():
        raise click.ClickException("; ".join(unmet) + ".")


if __name__ == "__main__":
    main()
