"""Judge the places of picture tokens in every family of `tests/picture_families.py`, by pixels that change.

    python -m tools.places              all families
    python -m tools.places Qwen Swin    those whose name contains one of these
    python -m tools.places --time 14    the time of places of 14 x 14 patches in a ViT of 12 layers, and the live memory

For each family it prints how many of 20 changed pixels were right in all layers, what was wrong, and the time; at the
end the families whose tokens have no places, with the reasons.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console

import multihead as mh

WITHOUT_PLACES = {
    "they compute attention themselves, without transformers' AttentionInterface": (
        "AIMv2 with its pooling head, BLIP, CvT, Data2Vec, Donut, GIT's language model, GLPN, GOT-OCR 2, GroupViT, "
        "Janus, LeViT, MaskFormer's Swin, MobileViT, PVT, PVT v2, SAM, SwiftFormer, Swin v2, ViLT, ViTDet"
    ),
    "their patches overlap, so that each token is computed from parts of several": "Florence-2, SegFormer, ViTPose",
    "they have no attention": "ConvNeXT, FocalNet and other networks of convolutions",
    "pixels are replaced by codes of a table": "ImageGPT",
    "the picture reaches the language model by attention alone; the image encoder has places": (
        "Aria, BLIP-2, Idefics 2, InstructBLIP, Kosmos-2"
    ),
    "convolutions or linear attention of the language model mix its tokens; the image encoder has places": (
        "LFM2-VL, Qwen3.5"
    ),
    "they read videos": "TimeSformer, VideoMAE, ViViT, X-CLIP",
    "a package that they need is not installed here, so they were not tried": (
        "DETR and others with timm, DiNAT (natten), EoMT (scipy)"
    ),
}
"""reason -> the families whose tokens have no places; families of transformers that are not named were not tried"""


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
    for reason, names in (WITHOUT_PLACES if not parts else {}).items():
        console.print(f"Without places, because {reason}: {names}.")
    return int(failed > 0)


def time_places(side: int, rounds: int = 7) -> None:
    """Print CPU time and live memory of places of `side` x `side` patches, as parts of those of a forward pass."""
    from transformers import ViTConfig, ViTModel

    from tests.live_bytes import live_bytes

    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(1)
    for width in (192, 384):
        sizes = {"hidden_size": width, "num_attention_heads": width // 64, "intermediate_size": 4 * width}
        model = ViTModel(ViTConfig(**sizes, image_size=16 * side)).eval()
        inputs = {"pixel_values": torch.randn(1, 3, 16 * side, 16 * side)}

        def seconds(run: Callable[[], object]) -> float:
            start = time.process_time()
            run()
            return time.process_time() - start

        def forward(model: ViTModel = model, inputs: dict[str, torch.Tensor] = inputs) -> None:
            with torch.no_grad():
                model(**inputs)

        def places(model: ViTModel = model, inputs: dict[str, torch.Tensor] = inputs) -> None:
            mh.places(model, inputs)

        forward()
        ratios = [seconds(places) / seconds(forward) for _ in range(rounds)]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        with live_bytes() as unobserved:
            forward()
        with torch.no_grad(), live_bytes() as observed, mh.observe(model) as seen:
            model(**inputs)
        with live_bytes() as measured:
            assert seen.texts[0].boxes is not None
        most = (observed.kept + measured.peak) / (unobserved.peak + observed.kept)
        console.print(
            f"{side} x {side} patches, width {width}: {middle:.2f} forward passes (quartiles {low:.2f} to {high:.2f}); "
            f"live memory {most:.2f} of the forward pass's and the record's"
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--time"]:
        time_places(int(sys.argv[2]))
        sys.exit()
    sys.exit(main(sys.argv[1:]))
