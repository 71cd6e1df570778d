"""Train a small ViT that names one of four digits, the one that a cue points to, and find the head that reads the cue.

A picture is a collage of four digits of scikit-learn's, two by two, under a row of four marks, of which one is white
and says which digit to name. `make demo-image` installs scikit-learn for its file of digits, and runs this.

    python examples/cued_digits.py [--seed 0] [--steps 1500] [--out digits.html] [--browser]
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import sys
import time
import webbrowser
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification

import multihead as mh

PATCH = 4
LAYERS, HEADS = 2, 4
# Spread of the random weights. Heads begin with patterns of their own, of which training sharpens one that reads the
# cue; with the usual 0.02 all begin even, and training takes four times as long and finds other ways in some seeds.
SPREAD = 0.2
CUE_PATCHES = 4  # the first row of patches
HELD_OUT = 1000  # collages that are classified
WATCHED = 100  # collages whose weights are read
LEAST_ACCURACY, LEAST_SHARE, LEAST_COST = 0.95, 0.50, 0.10


class Collages(NamedTuple):
    """Pictures of four digits under a cue.

    Attributes:
        pictures: (collages, 1, 20, 16), from 0 to 1.
        labels: (collages,) int64, the digit that the cue points to.
        cued: (collages,) int64, its number: 0 and 1 above, 2 and 3 below.
    """

    pictures: Tensor
    labels: Tensor
    cued: Tensor


class Cost(NamedTuple):
    """What the class token of a head reads, and what switching the head off costs.

    Attributes:
        layer: its layer.
        head: its index.
        cue: share of the class token's weight on the cue row.
        quadrant: share of the class token's weight on the digit that the cue points to.
        by_zero: accuracy that is lost where the head's output is 0.
        by_mean: accuracy that is lost where it is its mean over other collages.
    """

    layer: int
    head: int
    cue: float
    quadrant: float
    by_zero: float
    by_mean: float


def read_digits() -> tuple[Tensor, Tensor]:
    """Read scikit-learn's 1,797 digits, without importing it: (digits, 8, 8) from 0 to 1, and (digits,) int64."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        sys.exit("The digits are in scikit-learn, which is not installed: pip install --no-deps scikit-learn.")
    file = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(file, "rt") as opened:
        table = torch.tensor([list(map(float, line.split(","))) for line in opened.read().split()])
    return table[:, :64].reshape(-1, 8, 8) / 16, table[:, 64].long()


def draw_collages(digits: Tensor, labels: Tensor, number: int, random: torch.Generator) -> Collages:
    """Draw collages of random digits, (digits, 8, 8)."""
    chosen = torch.randint(len(digits), (number, 4), generator=random)
    cued = torch.randint(4, (number,), generator=random)
    pictures = torch.zeros(number, 1, 20, 16)
    for place in range(4):
        top, left = PATCH + 8 * (place // 2), 8 * (place % 2)
        pictures[:, 0, top : top + 8, left : left + 8] = digits[chosen[:, place]]
        pictures[cued == place, 0, :PATCH, PATCH * place : PATCH * (place + 1)] = 1
    return Collages(pictures, labels[chosen[torch.arange(number), cued]], cued)


def build_model() -> ViTForImageClassification:
    """Build a ViT of random weights: 5 x 4 patches."""
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=(20, 16),
            patch_size=PATCH,
            num_channels=1,
            num_labels=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=SPREAD,
        )
    )


def train(
    model: ViTForImageClassification, digits: Tensor, labels: Tensor, *, steps: int, random: torch.Generator
) -> None:
    """Train the model on new collages in every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, step / 100) * max(0.02, 1 - step / steps)
        batch = draw_collages(digits, labels, 128, random)
        loss = cross_entropy(model(batch.pictures).logits, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 500 == 0:
            print(f"step {step + 1:,} of {steps:,}: loss {float(loss.detach()):.3f}", flush=True)
    model.eval()


@torch.no_grad()
def accuracy(model: ViTForImageClassification, test: Collages) -> float:
    """Return the share of collages whose digit is named."""
    return float((model(test.pictures).logits.argmax(-1) == test.labels).double().mean())


@torch.no_grad()
def measure_heads(model: ViTForImageClassification, test: Collages, reference: Tensor) -> list[Cost]:
    """Measure what each head reads for the class token, and what it costs to switch it off."""
    whole = accuracy(model, test)
    watched, cued = test.pictures[:WATCHED], test.cued[:WATCHED]
    with mh.observe(model) as seen:
        model(watched)
    row, column = torch.arange(5)[:, None], torch.arange(4)
    quadrant_of_patch = torch.where(row > 0, (row - 1) // 2 * 2 + column // 2, -1).flatten()  # (patches,)
    found = []
    for layer in seen.layers:
        read = torch.stack([layer.weights(sample=one, queries=slice(0, 1))[:, 0, 1:] for one in range(len(watched))])
        on_cue = read[:, :, :CUE_PATCHES].sum(-1).mean(0)
        is_cued = quadrant_of_patch == cued[:, None]  # (collages, patches)
        on_quadrant = (read * is_cued[:, None]).sum(-1).mean(0)
        for head in range(HEADS):
            with mh.ablate(model, (layer.number, head)):
                by_zero = whole - accuracy(model, test)
            with mh.ablate(model, (layer.number, head), by="mean", reference=[reference]):
                by_mean = whole - accuracy(model, test)
            found.append(Cost(layer.number, head, float(on_cue[head]), float(on_quadrant[head]), by_zero, by_mean))
    return found


def find_cue_head(costs: list[Cost]) -> Cost:
    """Return the first-layer head whose class token has most of its weight on the cue row."""
    return max((cost for cost in costs if cost.layer == 0), key=lambda cost: cost.cue)


def describe(cost: Cost) -> str:
    """Return a sentence about a head."""
    return (
        f"L{cost.layer} H{cost.head}: {cost.cue:.0%} of what [CLS] reads is the cue row, {cost.quadrant:.0%} the digit "
        f"it points to; off, it costs {100 * cost.by_zero:.1f} points (by its mean {100 * cost.by_mean:.1f})"
    )


def main() -> int:
    """Train, measure, print, and write the page of one collage; return 0 if the cue head is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", default="digits.html", help="the page of one collage")
    parser.add_argument("--browser", action="store_true", help="open the page")
    options = parser.parse_args()
    began, random = time.monotonic(), torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    digits, labels = read_digits()
    order = torch.randperm(len(digits), generator=random)
    known, held_out = order[:1400], order[1400:]
    model = build_model()
    train(model, digits[known], labels[known], steps=options.steps, random=random)
    test = draw_collages(digits[held_out], labels[held_out], HELD_OUT, random)
    reference = draw_collages(digits[known], labels[known], 256, random).pictures
    whole = accuracy(model, test)
    print(f"Of collages of digits that it has never seen, it names {whole:.1%}.\n")
    costs = measure_heads(model, test, reference)
    for cost in costs:
        print(describe(cost))
    cue_head = find_cue_head(costs)
    readers = [cost for cost in costs if cost.quadrant > LEAST_SHARE]
    reader = min(readers or costs[HEADS:], key=lambda cost: cost.by_zero)
    print(f"\nThe cue head is L{cue_head.layer} H{cue_head.head}.")
    print(
        f"L{reader.layer} H{reader.head} reads the digit itself, with {reader.quadrant:.0%} of its weight, and costs "
        f"{100 * reader.by_zero:.1f} points: where a head looks is not what it is needed for."
    )
    with torch.no_grad(), mh.observe(model) as seen:
        model(test.pictures[:1])
    seen.title = f"A ViT that names digit {int(test.cued[0]) + 1} of 4"
    page = seen.report(options.out)
    print(f"\nThe page of one collage: {page}")
    print(f"{time.monotonic() - began:.0f} s, {time.process_time():.0f} s of CPU time")
    if options.browser:
        webbrowser.open(Path(options.out).resolve().as_uri())
    lost = min(cue_head.by_zero, cue_head.by_mean)
    found = whole > LEAST_ACCURACY and cue_head.cue > LEAST_SHARE and lost > LEAST_COST
    if not found:
        print(
            f"Expected: over {LEAST_ACCURACY:.0%}, and a first-layer head with over {LEAST_SHARE:.0%} on the cue row "
            f"that costs over {100 * LEAST_COST:.0f} points."
        )
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
