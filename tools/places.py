"""Judge the places of picture tokens in every family of `tests/picture_families.py`, by pixels that change.

    python -m tools.places              all families
    python -m tools.places Qwen Swin    those whose name contains one of these

For each family it prints how many of 20 changed pixels were right in all layers, what was wrong, and the time.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch
from rich.console import Console

import multihead as mh


def main(parts: list[str]) -> int:
    """Print a line per family; return 1 if any pixel is wrong."""
    from tests.picture_families import ENCODERS, LANGUAGE_MODELS, random_pictures
    from tests.picture_oracle import judge_places

    console, failed = Console(highlight=False, soft_wrap=True), 0
    for name, build in {**ENCODERS, **LANGUAGE_MODELS}.items():
        if parts and not any(part in name for part in parts):
            continue
        torch.manual_seed(0)
        family, start = build(), time.perf_counter()
        images = random_pictures(family.sizes)
        inputs = family.process(images)
        torch.manual_seed(0)
        tables = mh.places(family.model, inputs, family.processor, family.nest(images))
        seconds = time.perf_counter() - start
        right, of, wrong = judge_places(family, tables)
        failed += right != of
        console.print(f"{name}: {right} of {of} pixels, {seconds:.1f} s", markup=False)
        for each in wrong:
            console.print(f"    {each}", markup=False)
    return int(failed > 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
