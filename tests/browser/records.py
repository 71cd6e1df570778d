"""The records that are looked at: small, of every sort, and the same each time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import multihead as mh
from multihead import masks
from multihead.kernels.parts import PartName
from multihead.observation.record import Record
from multihead.probes import DEFAULT, Probe
from multihead.record.repeated import RepeatedTokens
from multihead.record.texts import Text
from tests.families import batch_of, family
from tests.head_numbers import add_together, found, record
from tests.viewer.watching import watch

LENGTH, LAYERS, HEADS = 700, 4, 3
WORDS = ["the", "sea", "was", "grey", "and", "no", "ship", "came", "into", "the", "harbour", "before", "dark"]

IMAGE = "<img src=x onerror='window.broken=1'>"
SCRIPT = "</script><script>window.broken=1</script>"
TURNED = "\u202eturned round"
LONG = "long" * 200
HOSTILE = ["<s>", IMAGE, SCRIPT, TURNED, LONG, "&lt;b&gt;", "\u200b", "\n", "字", "", "'\"`"]


def named(record: Record, tokens: list[str], special: list[bool] | None = None) -> Record:
    record.set_text(Text(None, tokens, special))
    return record


def words(length: int) -> list[str]:
    return ["<s>"] + [WORDS[place * 7 % len(WORDS)] for place in range(length - 1)]


@cache
def causal() -> Record:
    """A causal text long enough for three levels."""
    seen = watch(LENGTH, mask=masks.Causal(), heads=HEADS, layers=LAYERS)
    return named(seen, words(LENGTH), [place == 0 for place in range(LENGTH)])


@cache
def other_run() -> Record:
    """The same text, read by other layers."""
    return named(watch(LENGTH, mask=masks.Causal(), heads=HEADS, layers=LAYERS, seed=1), words(LENGTH))


@cache
def hostile() -> Record:
    """A text whose tokens try to be more than text."""
    tokens = (HOSTILE * 5)[:50]
    return named(watch(len(tokens), heads=2, layers=2), tokens, [token == "<s>" for token in tokens])


@cache
def statistics_only() -> Record:
    """What is left without q and k."""
    return named(watch(40, mask=masks.Causal(), heads=2, layers=2, keep="statistics"), words(40))


@cache
def translating() -> Record:
    """Queries that read another text, and many fewer of them than keys."""
    return watch(12, memory=90, heads=2, layers=2)


@cache
def repeated() -> Record:
    """Heads that were measured on repeated random tokens too; layer 1 head 0 is an induction head."""
    seen = watch(60, mask=masks.Causal(), heads=2, layers=2)
    for layer in seen.layers:
        share = 0.9 if layer.number else 0.02
        shares = torch.tensor([[share, 0.01]] * 4, dtype=torch.float64)
        level = {"repeated_induction": torch.full((2,), 0.012, dtype=torch.float64)}
        layer.repeated = RepeatedTokens(64, 3, True, {"repeated_induction": shares}, level)
    previous = torch.full((2, 60), 0.04)
    previous[0] = 0.8
    seen.layers[1].samples[0].set_statistics(seen.layers[1].samples[0].statistics | {"previous_mass": previous})
    return named(seen, words(60))


@cache
def important() -> Record:
    """A record with the exact effects of its heads, estimates of them, and what two heads do together."""
    seen = record()
    for each in (found(), found("gradient")):
        seen.add(each)
    add_together(seen, found())
    return seen


@cache
def whole() -> Record:
    """Six small layers."""
    return watch(30, heads=2, layers=6)


@cache
def deep() -> Record:
    """Twenty small layers."""
    return watch(12, heads=2, layers=20)


@cache
def painted() -> Record:
    """A text of which the attention that each token receives was recorded too."""
    seen = watch(240, mask=masks.Causal(), heads=2, layers=2, probes=("entropy", "received"))
    return named(seen, words(240), [place == 0 for place in range(240)])


@cache
def medium() -> Record:
    """A text whose single weights fit into the inspector, and not into the grid."""
    return watch(150, mask=masks.Causal(), heads=2)


@cache
def encoder_decoder() -> Record:
    """An encoder-decoder model that reads twelve tokens and writes twelve, with an alignment head."""
    batch = batch_of("t5")
    with torch.no_grad(), mh.observe(model := family("t5")) as seen:
        model(input_ids=batch["input_ids"][:1], decoder_input_ids=batch["input_ids"][:1].flip(1))
    for letter, ids in (("e", batch["input_ids"][0]), ("d", batch["input_ids"][0].flip(0))):
        seen.name_text(Text(ids, [f"{letter}{place}" for place in range(12)], [False] * 12))
    seen.layers[3].alignment_heads = (1,)
    return seen


@cache
def partial() -> Record:
    """Two layers of six."""
    return watch(30, heads=2, layers=6, layers_kept=[2, 5])


@cache
def inherited() -> Record:
    """Statistics and layers with names that every JavaScript object has."""
    seen = watch(20, heads=2, probes=("entropy",))
    (layer,) = seen.layers
    layer.name = "__proto__"
    names = ("entropy", "constructor", "__proto__", "toString", "hasOwnProperty")
    layer.samples[0].set_statistics(dict.fromkeys(names, layer.samples[0].statistics["entropy"]))
    return seen


TEXTS = {
    "en": [
        "the",
        "keeper",
        "wrote",
        "a",
        "letter",
        "to",
        "his",
        "sister",
        "and",
        "his",
        "sister",
        "read",
        "it",
        "twice",
    ],
    "ar": ["القطة", "جلست", "على", "السجادة", "في", "البيت", "حتى", "الصباح"],
    "zh": list("猫坐在垫子上，狗坐在门口。"),
}


@cache
def several(texts: int = 3) -> Record:
    """Several texts of different lengths, in English, Arabic and Chinese in turn."""
    read = [list(TEXTS.values())[place % 3] for place in range(texts)]
    seen = watch(20, heads=3, layers=2, lengths=[len(each) + 1 for each in read], probes=(*DEFAULT, "received"))
    for sample, each in enumerate(read):
        seen.set_text(Text(None, ["<s>", *each], [True, *[False] * len(each)]), sample=sample)
    return seen


OWN_KEY: PartName = ("offset_mass", 0)


@cache
def of_a_script() -> Record:
    """Statistics that a script defines, in a record that was saved and opened again."""
    other = Probe("other_mass", lambda parts: 1 - parts[OWN_KEY], {OWN_KEY}, label="other keys", number_format="share")
    spread = Probe(
        "relative_spread",
        lambda parts: parts["distance_spread"] / parts["mean_distance"].clamp(min=1),
        {"mean_distance", "distance_spread"},
        label="relative <b>spread</b>",
        unit="per token",
        number_format=".3g",
    )
    seen = watch(30, mask=masks.Causal(), heads=2, layers=2, probes=("entropy", other, spread))
    with TemporaryDirectory() as folder:
        seen.save(Path(folder) / "run.safetensors")
        return Record.load(Path(folder) / "run.safetensors", mapped=False)
