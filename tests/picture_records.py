"""Small records of models that read pictures: an image encoder, and a language model that wrote an answer."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as hf

import multihead as mh
from multihead.observation.record import Record
from multihead.record.texts import Text
from tests.picture_families import LANGUAGE_MODELS, random_pictures

_ANSWER = {40: "the", 41: "cat", 42: "sits"}


@cache
def encoder(layers: int = 3, heads: int = 2) -> Record:
    """A ViT that reads 2 x 3 patches and a class token, with heads of 8 features."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": 8 * heads}
    sizes["intermediate_size"] = 16
    model = hf.ViTModel(hf.ViTConfig(**sizes, image_size=(8, 12), patch_size=4, initializer_range=0.5)).eval()
    with torch.no_grad(), mh.observe(model) as seen:
        model(pixel_values=torch.randn(1, 3, 8, 12))
    assert seen.texts[0].boxes is not None  # places are measured at the first read, by the model
    return seen


def reader() -> hf.VisionEncoderDecoderModel:
    """A ViT of 2 x 3 patches and a decoder that attends to them, both of two layers of two heads."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = hf.ViTConfig(**sizes, image_size=(8, 12), patch_size=4, initializer_range=0.5)
    words = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "bos_token_id": 0, "eos_token_id": 1}
    decoder = hf.GPT2Config(**words, n_positions=32, add_cross_attention=True, initializer_range=0.5)
    both = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    both.decoder_start_token_id, both.pad_token_id = 0, 1
    return hf.VisionEncoderDecoderModel(both).eval()


class _Words:
    """A tokenizer of which every token of a prompt is called "word"."""

    all_special_ids = (1,)

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return "word" if isinstance(ids, int) else ["word"] * len(ids)

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(["word"] * (1 if isinstance(ids, int) else len(ids)))


@cache
def generated() -> Record:
    """A LLaVA that read two pictures in a prompt of 40 tokens and wrote "the cat sits"."""
    torch.manual_seed(0)
    one = LANGUAGE_MODELS["LLaVA, two pictures"]()
    with torch.no_grad():
        for name, each in one.model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                each.mul_(20)  # sharp enough to tell heads apart
    images = random_pictures(one.sizes)
    with torch.no_grad(), mh.observe(one.model, processor=one.processor, images=images, tokenizer=_Words()) as seen:
        one.model.generate(**one.process(images), max_new_tokens=4, do_sample=False, pad_token_id=0)
    text = seen.layers[-1].sample().text
    assert text.tokens is not None
    tokens = [_ANSWER.get(place, token) for place, token in enumerate(text.tokens)]
    seen.name_text(Text(text.ids, tokens, text.special))
    return seen


@cache
def written() -> Record:
    """What `reader` wrote about a picture: three words after the start."""
    model, processor = reader(), hf.ViTImageProcessorPil(size={"height": 8, "width": 12})
    with torch.no_grad(), mh.observe(model, processor=processor, tokenizer=_Words()) as seen:
        pixels = processor(images=random_pictures(((30, 20),)), return_tensors="pt")["pixel_values"]
        model.generate(pixel_values=pixels, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    return seen
