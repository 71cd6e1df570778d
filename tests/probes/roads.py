"""Every part on every road: probes of one's own, the ways to a number, and the definition of each on the text alone.

A road is a way to run a model (padded, packed, with a cache, over ranks, ...) and what keeps the numbers (a record of
each kind, a file, a watch, a census). The judge is the same text alone: its q, k and v in float64, whole weights, and
`definitions.every`.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, ProbeError
from multihead.kernels.parts import PARTS, PartName
from multihead.parallel import context_parallel, parallelize, shard
from multihead.probes import PROBES as BUILT_IN
from multihead.probes import Probe, ProbeContext, tokens_mass
from multihead.probes.catalogue import needs_pictures
from tests import oracle
from tests.counting.tiny import jsonl, tokenizer
from tests.families import DECODER, ENCODER, TEXT
from tests.probes import definitions

# ---- the probes

SPECIAL, FEW, MAP_SIZE = 3, (4, 5), 4
_STATISTIC_OF_PART: dict[PartName, str] = {
    **{
        name: name for name, part in PARTS.items() if "places" not in part.needs
    },  # those are judged in test_pictures.py
    **{
        ("offset_mass", offset): name
        for offset, name in (
            *((0, "self_mass"), (-1, "previous_mass"), (1, "next_mass")),
            *((-2, "offset_minus_2_mass"), (-5, "offset_minus_5_mass"), (3, "offset_plus_3_mass")),
        )
    },
    ("first_keys_mass", 1): "first_mass",
    ("first_keys_mass", 4): "first_4_mass",
    ("tokens_mass", "special"): "special_mass",
    ("tokens_mass", "few"): "commas_mass",
}
"""Part -> what `definitions.every` calls it."""

Function: TypeAlias = Callable[[Mapping[Any, Tensor]], Tensor]


class Row(NamedTuple):
    """A statistic that is tried.

    Fields:
        probe: the probe.
        of: the same function of the parts in float64.
        label: its part.
    """

    probe: Probe
    of: Function
    label: str

    @property
    def name(self) -> str:
        return self.probe.name


def _own_rows(part: PartName) -> list[Row]:
    """Return two probes of a part: negated and scaled, and one that is not linear and not 0 where the part is 0."""

    def negated(parts: Mapping[Any, Tensor]) -> Tensor:
        return -2.5 * parts[part]

    def curved(parts: Mapping[Any, Tensor]) -> Tensor:
        return parts[part] * parts[part].abs() - 0.5

    label = part if isinstance(part, str) else f"{part[0]} {part[1]}"
    name = label.replace(" ", "_").replace("-", "minus_")
    counted, tokens = "all", None
    match part:
        case ("offset_mass", int(offset)) if offset:
            counted = f"offset {offset:+d}"
        case "duplicate_mass" | "induction_mass":
            counted = "repeated"
        case ("tokens_mass", "few"):
            tokens = frozenset(FEW)
    return [
        Row(Probe(f"{how.__name__}_{name}", how, {part}, counted=counted, tokens=tokens), how, label)
        for how in (negated, curved)
    ]


def _back(parts: Mapping[Any, Tensor]) -> Tensor:
    return parts["position"] - parts["largest_key"]


def _near_before(parts: Mapping[Any, Tensor]) -> Tensor:
    near = (torch.where(parts["position"] > -each, parts["offset_mass", each], 0) for each in (-1, -2))
    return sum(near, torch.zeros(()))


def _negated_entropy(parts: Mapping[Any, Tensor]) -> Tensor:
    return -parts["entropy"]


def _rows() -> list[Row]:
    found = [row for part in _STATISTIC_OF_PART for row in _own_rows(part)]
    found.append(Row(Probe("back", _back, {"position", "largest_key"}), _back, "position and largest_key"))
    near = frozenset({"position", ("offset_mass", -1), ("offset_mass", -2)})
    found.append(Row(Probe("near_before", _near_before, near), _near_before, "position and offset_mass"))
    for rule in ("offset +2", "offset -2", "repeated"):
        name = f"entropy_{rule}".translate(str.maketrans({" ": "_", "+": "plus_", "-": "minus_"}))
        probe = Probe(name, _negated_entropy, {"entropy"}, counted=rule)
        found.append(Row(probe, _negated_entropy, f"entropy, counted {rule}"))
    for name, probe in {**BUILT_IN, "few_mass": tokens_mass("few", FEW)}.items():
        if not needs_pictures(probe):
            found.append(Row(probe, probe.of, f"{name}, built in"))
    return found


ROWS = _rows()


Group: TypeAlias = Literal["queries", "kernel", "keys", "map", "built in"]
GROUPS: tuple[Group, ...] = get_args(Group)
_OTHER_SAMPLES = ("padded left", "padded right, unp", "cache of", "cache, window", "cross-", "generation")
_KERNEL = ("entropy", "mean_distance", "distance_spread", "largest_weight", "largest_key", "logsumexp")


def rows_of(group: Group, road: str = "") -> list[Row]:
    """Return the statistics that are tried together on a road.

    "queries" are all with a number per query. "kernel" are those of them that the kernel measures for a whole batch,
    which is a road of its own if there are no others. Statistics per key and per map are tried by themselves, because
    they may break a whole record.
    """
    match group:
        case "queries":
            found = [row for row in ROWS if row.probe.axes == "queries"]
        case "kernel" if road.startswith(_OTHER_SAMPLES):
            found = []
        case "kernel":
            found = [row for row in ROWS if row.probe.parts <= {*_KERNEL, ("offset_mass", -1), ("first_keys_mass", 1)}]
        case "built in":
            found = [row for row in ROWS if row.name in BUILT_IN and row.probe.axes != "queries"]
        case _:
            found = [row for row in ROWS if row.name not in BUILT_IN and row.probe.axes == group]
    if road.endswith((", watch", "census")):
        # A watch keeps the maximum of the built-in largest score, and the largest key is no number to average.
        found = [row for row in found if row.name not in ("largest_score", "largest_key")]
    if "equal tokens" in road:
        found = [row for row in found if "largest_key" in row.label]
    if road.startswith(("ring", "gather", "ulysses")) and group == "built in":
        found = [row for row in found if row.probe.axes != "map"]  # refused, which would hide the others
    if road == "statistics of a batch":  # the blocks of its map are those of the longest text
        found = [row for row in found if row.probe.axes != "map"]
    return found


# ---- the texts, and what is true of them

CAUSAL = masks.Causal()


@dataclass(frozen=True)
class Case:
    """Two texts and a model, small enough for whole maps.

    Fields:
        lengths: of the texts.
        window: of the roads with a window.
        chunks: how the first text is cut into calls of a cache; the second is cut alike as far as it goes.
        equal: whether all tokens and all keys are the same, so that the weights of a query are equal.
    """

    lengths: tuple[int, int] = (12, 7)
    heads: int = 4
    kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    window: int = 3
    chunks: tuple[int, ...] = (5, 1, 1, 3, 1, 1)
    seed: int = 0
    equal: bool = False

    @property
    def ids(self) -> Tensor:
        """(2, longest), some tokens more than once."""
        if self.equal:
            return torch.ones(2, max(self.lengths), dtype=torch.int64)
        made = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(7, (2, max(self.lengths)), generator=made)

    def text(self, index: int) -> Tensor:
        return self.ids[index, : self.lengths[index]]

    def near(self) -> masks.Mask:
        return CAUSAL & masks.Window(self.window)


class Reader(nn.Module):
    """A layer that reads token ids. It is turned by positions, because equal tokens would have equal weights."""

    def __init__(self, case: Case, *, turned: bool = True) -> None:
        super().__init__()
        rotary = mh.Rotary(base=50.0) if turned and not case.equal else None
        made, options = torch.Generator().manual_seed(case.seed), {"num_kv_heads": case.kv_heads, "head_dim": 4}
        self.embed = nn.Embedding(7, 16)
        self.layer = mh.MultiHeadAttention(16, case.heads, **options, sinks=True, rotary=rotary)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.5, generator=made)
            if case.equal:  # the keys of all calls are equal to the bit
                self.layer.k_proj.weight.zero_()
        self.to(case.dtype).eval()

    def forward(self, input_ids: Tensor, memory: Tensor | None = None, pack: Any = None, **options: Any) -> Tensor:
        x = self.embed(input_ids)
        if pack is not None:
            x, options["packing"] = mh.pack(x, pack)
        output: Tensor = self.layer(x, memory, **options)
        return output

    def exact(self, ids: Tensor, mask: masks.Mask, memory: Tensor | None = None) -> Text:
        """Return q, k and v of a text alone, in float64."""
        x = self.embed.weight.detach().double()[ids]
        read = x if memory is None else memory.double()
        layer = self.layer
        q, k, v = (
            (of @ each.weight.detach().double().mT + each.bias.detach().double())
            .unflatten(-1, (-1, layer.head_dim))
            .transpose(0, 1)[None]
            for of, each in ((x, layer.q_proj), (read, layer.k_proj), (read, layer.v_proj))
        )
        if layer.rotary is not None:
            q, k = _turned(q, layer.rotary.base), _turned(k, layer.rotary.base)
        assert layer.sinks is not None
        of_keys = ids if memory is None else torch.full((len(memory),), -1)
        return Text(q, k, v, mask, of_keys, layer.out_proj.weight.detach().double(), layer.sinks.detach().double())


def _turned(x: Tensor, base: float) -> Tensor:
    """Turn each pair of features (c, c + head_dim / 2) by its position: (1, heads, tokens, head_dim)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2])[:, None] * base ** -(torch.arange(half, dtype=torch.float64) / half)
    both = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([both.real, both.imag], -1)


class Text(NamedTuple):
    """One text alone: q, k, v (1, heads, tokens, features) in float64, and what else probes read."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: masks.Mask
    ids: Tensor
    output_weight: Tensor
    sinks: Tensor | None = None
    scale: float | None = None
    special: tuple[int, ...] = (SPECIAL,)

    @cache  # noqa: B019 - a few texts of a test
    def even(self) -> Text:
        """Return the text with even weights over the visible keys, which lead to the level of chance."""
        return self._replace(q=torch.zeros_like(self.q), sinks=None)

    @cache  # noqa: B019 - a few texts of a test
    def parts(self) -> dict[PartName, Tensor]:
        """Return every part, (heads, ...), by its definition."""
        sizes = (1, self.q.shape[1], self.q.shape[2], self.k.shape[2])
        seen = oracle.shown(self.mask, sizes)
        dense = oracle.attend(self.q, self.k, self.v, seen, sinks=self.sinks, scale=self.scale)
        ids = self.ids[None]
        few = torch.isin(ids, torch.tensor(FEW))
        special = torch.isin(ids, torch.tensor(self.special))
        known = definitions.Known([0], special, few, few, ids, self.v, self.output_weight, self.sinks, MAP_SIZE)
        found = definitions.every(dense, seen, known)
        found["logsumexp"] = dense.logsumexp
        if bool((self.k == self.k[:, :, :1]).all()):  # the first of equal weights, which may differ by rounding
            found["largest_key"] = seen.int().argmax(-1)
        found["position"] = torch.arange(sizes[2], dtype=torch.float64).expand(sizes[:3])
        return {part: found[name][0] for part, name in _STATISTIC_OF_PART.items() if name in found}

    @cache  # noqa: B019 - a few texts of a test
    def is_unclear(self) -> bool:
        """Whether rounding may decide which key has the largest weight."""
        if self.k.shape[2] == 1 or bool((self.k == self.k[:, :, :1]).all()):
            return False
        sizes = (1, self.q.shape[1], self.q.shape[2], self.k.shape[2])
        weights = oracle.attend(self.q, self.k, self.v, oracle.shown(self.mask, sizes), scale=self.scale).weights
        first, second = weights.topk(2).values.unbind(-1)
        return bool((first - second < 1e-5 * first).any())

    def counted(self, rule: str) -> Tensor:
        """Return which queries count by a rule: (queries,) bool."""
        place, keys = torch.arange(self.q.shape[2]), self.k.shape[2]
        if rule == "repeated":
            return torch.tensor([int(each) in self.ids[:at].tolist() for at, each in enumerate(self.ids)])
        if rule == "all":
            return torch.ones_like(place, dtype=torch.bool)
        other = place + int(rule.removeprefix("offset "))
        return (other >= 0) & (other < keys)


# ---- what was found

Cells: TypeAlias = dict[tuple[str, str], str]
"""(label of a part, what was read) -> what is wrong with it; "" if it is right."""

SUMMARIES = ("mean", "median", "p95", "max")


@dataclass
class Found:
    """What a road led to; in place of what could not be read stands the exception.

    Fields:
        values: of each text, name -> (heads, ...); None if they are not kept.
        summaries: "mean", ... -> name -> (heads,).
        chance: name -> (heads,), the mean for even weights; None if it is unknown.
        copies: the same, from a file of the record.
    """

    values: list[dict[str, Tensor]] | Exception | None = None
    summaries: dict[str, dict[str, Tensor] | Exception] = field(default_factory=dict)
    chance: dict[str, Tensor] | Exception | None = None
    copies: dict[str, Found | Exception] = field(default_factory=dict)


def _attempt(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - the cell that needs it fails with it
        return error


def of_record(record: mh.Record) -> Found:
    """Read a record of one layer: values, summaries, and a table."""
    (layer,) = record.layers
    chosen = SUMMARIES[:2] if layer.running_summary is None else SUMMARIES
    found = Found(summaries={of: _attempt(lambda of=of: dict(layer.summary(of))) for of in chosen})
    shown = _attempt(lambda: record.table(kinds=False).rows)
    means = found.summaries["mean"]
    if isinstance(shown, Exception):
        found.summaries["mean"] = shown
    elif not isinstance(means, Exception) and not means.keys() <= shown[0].keys():
        found.summaries["mean"] = AssertionError("the table lacks a statistic of the summary")
    if layer.running_summary is None:
        found.values = _attempt(lambda: [dict(sample.statistics) for sample in layer.samples])
    return found


# ---- the ways to run a model

Calls: TypeAlias = Callable[[nn.Module, Case], None]


@dataclass(frozen=True)
class Way:
    """A way to run a model on the texts of a case.

    Fields:
        run: calls the model.
        texts: returns each text alone.
        model: returns the model.
        lacks: the inputs of probes that are unknown on this way.
        equal: whether all tokens are the same.
    """

    run: Callable[[Any, Case], Any]
    texts: Callable[[Any, Case], list[Text]]
    model: Callable[[Case], nn.Module] = Reader
    lacks: frozenset[str] = frozenset()
    equal: bool = False


def _alone(mask: Callable[[Case], masks.Mask]) -> Callable[[Any, Case], list[Text]]:
    return lambda model, case: [model.exact(case.text(index), mask(case)) for index in (0, 1)]


def _causal(_: Case) -> masks.Mask:
    return CAUSAL


def _prefix(_: Case) -> masks.Mask:
    return CAUSAL | masks.Prefix(3)


def _each_alone(model: Any, case: Case) -> None:
    for index in (0, 1):
        model(case.text(index)[None], mask=CAUSAL)


def _padded(mask: Callable[[Case], masks.Mask], side: Any) -> Callable[[Any, Case], None]:
    def run(model: Any, case: Case) -> None:
        ids = torch.full_like(case.ids, 6)
        for index, length in enumerate(case.lengths):
            ids[index, slice(0, length) if side == "right" else slice(ids.shape[1] - length, None)] = case.text(index)
        model(ids, mask=mask(case), lengths=case.lengths, padding_side=side)

    return run


def _packed(model: Any, case: Case) -> None:
    model(case.ids, pack=case.lengths, mask=CAUSAL)


def _cached(mask: Callable[[Case], masks.Mask], **options: Any) -> Callable[[Any, Case], None]:
    def run(model: Any, case: Case) -> None:
        size = {"window": case.window} if "window" in options else options
        for index, length in enumerate(case.lengths):
            cache, edges = mh.KeyValueCache(**size), [sum(case.chunks[:n]) for n in range(len(case.chunks) + 1)]
            for first, stop in pairwise(min(each, length) for each in edges):
                if first < stop:
                    model(case.text(index)[None, first:stop], mask=mask(case), cache=cache)

    return run


def _cached_batch(mask: Callable[[Case], masks.Mask], window: bool) -> Callable[[Any, Case], None]:
    """Both texts at once: prompts that are padded on the left, and then one token of each at a time."""

    def run(model: Any, case: Case) -> None:
        cache = mh.KeyValueCache(window=case.window) if window else mh.KeyValueCache()
        steps = min(case.lengths) - 1
        prompts = [length - steps for length in case.lengths]
        ids = torch.full((2, max(prompts)), 6)
        for index, length in enumerate(prompts):
            ids[index, max(prompts) - length :] = case.text(index)[:length]
        model(ids, mask=mask(case), cache=cache, lengths=prompts, padding_side="left")
        for step in range(steps):
            next_ids = torch.stack([case.text(index)[length + step] for index, length in enumerate(prompts)])
            model(next_ids[:, None], mask=mask(case), cache=cache)

    return run


def _memory(case: Case) -> list[Tensor]:
    made = torch.Generator().manual_seed(case.seed + 2)
    return [torch.randn(keys, 16, generator=made).to(case.dtype) for keys in (9, 5)]


def _crossed(model: Any, case: Case) -> None:
    memory = torch.zeros(2, 9, 16, dtype=case.dtype)
    for index, each in enumerate(_memory(case)):
        memory[index, : len(each)] = each
    model(case.ids, memory, mask=masks.Full(), lengths=case.lengths, memory_lengths=(9, 5))


def _crossed_alone(model: Any, case: Case) -> list[Text]:
    full, memory = masks.Full(), _memory(case)
    return [model.exact(case.text(index), full, memory[index]) for index in (0, 1)]


# ---- Hugging Face models


def bert(case: Case) -> Any:
    torch.manual_seed(case.seed)
    sizes = {**ENCODER, "num_hidden_layers": 1}
    return hf.BertModel(hf.BertConfig(**sizes, vocab_size=44)).to(case.dtype).eval()


def mistral(case: Case) -> Any:
    torch.manual_seed(case.seed)
    config = hf.MistralConfig(**{**DECODER, "num_hidden_layers": 1}, **TEXT, sliding_window=case.window)
    return hf.MistralForCausalLM(config).to(case.dtype).eval()


def captured(model: Any, ids: Tensor, mask: masks.Mask) -> Text:
    """Run a copy of a model on a text alone, in float64, and return what its one layer passes to its attention."""
    held: list[Any] = []

    def capture(module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, scaling: float, **__: Any) -> tuple[Tensor, None]:
        held[:] = q, k, v, scaling
        return q.transpose(1, 2), None  # no layer reads it

    hf.AttentionInterface.register("captured", capture)
    double = copy.deepcopy(model).double()
    double.set_attn_implementation("captured")
    with torch.no_grad():
        double(input_ids=ids[None], attention_mask=torch.ones(1, len(ids), dtype=torch.int64))
    q, k, v, scale = held
    ends = ".self_attn.o_proj.weight", ".attention.output.dense.weight"
    (weight,) = (each.detach() for name, each in double.named_parameters() if name.endswith(ends))
    return Text(q, k, v, mask, ids, weight, None, scale)


def _bert_texts(case: Case) -> list[Tensor]:
    return [torch.cat([torch.tensor([1]), case.text(index) + 2, torch.tensor([2])]) for index in (0, 1)]


def _pad(texts: list[Tensor], side: str) -> dict[str, Tensor]:
    ids, mask = torch.zeros(2, len(texts), max(map(len, texts)), dtype=torch.int64)
    for index, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(ids.shape[1] - len(text), None)
        ids[index, place], mask[index, place] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def _read_padded(model: Any, case: Case) -> None:
    model(**_pad(_bert_texts(case), "right"))


def _read_alone(model: Any, case: Case) -> list[Text]:
    return [captured(model, ids, masks.Full()) for ids in _bert_texts(case)]


def _generate(model: Any, case: Case) -> list[Tensor]:
    """Generate after prompts of two lengths; return the tokens of each text that the model read."""
    prompts = [case.text(index)[:-3] + 3 for index in (0, 1)]  # 0 is padding, whose embedding is 0
    found = model.generate(**_pad(prompts, "left"), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    return [ids[len(ids) - len(prompt) - 6 : -1] for ids, prompt in zip(found, prompts, strict=True)]


def _generated_alone(model: Any, case: Case) -> list[Text]:
    return [captured(model, ids, case.near()) for ids in _generate(model, case)]


_TOKENS = frozenset({"ids", "special_keys"})
WAYS: dict[str, Way] = {
    "one by one": Way(_each_alone, _alone(_causal)),
    "padded right": Way(_padded(_causal, "right"), _alone(_causal)),
    "padded left": Way(_padded(_causal, "left"), _alone(_causal)),
    # A prefix is no matter of distances, so that the attention runs on the padded batch.
    "padded right, unpacked": Way(_padded(_prefix, "right"), _alone(_prefix)),
    "padded left, unpacked": Way(_padded(_prefix, "left"), _alone(_prefix)),
    "packed": Way(_packed, _alone(_causal)),
    "cache": Way(_cached(_causal), _alone(_causal)),
    "cache, window": Way(_cached(Case.near, window=True), _alone(Case.near)),
    "cache of a batch": Way(_cached_batch(_causal, window=False), _alone(_causal), lacks=_TOKENS),
    "cache of a batch, window": Way(_cached_batch(Case.near, window=True), _alone(Case.near), lacks=_TOKENS),
    "equal tokens": Way(_each_alone, _alone(_causal), equal=True),
    "equal tokens, cache": Way(_cached(_causal), _alone(_causal), equal=True),
    "cross-attention": Way(_crossed, _crossed_alone, partial(Reader, turned=False), _TOKENS),
    "hugging face": Way(_read_padded, _read_alone, bert, frozenset({"sinks"})),
    "generation, window": Way(_generate, _generated_alone, mistral, frozenset({"sinks"})),
}

# ---- what keeps the numbers

Keeper: TypeAlias = Callable[[Way, Any, Case, list[Row]], Found]


def observed(way: Way, model: Any, case: Case, rows: list[Row], keep: Any) -> mh.Record:
    # Naming the special tokens cuts a batch into samples at once, which is left to the summaries where none is counted.
    special = (SPECIAL,) if any("special_keys" in row.probe.needs for row in rows) else ()
    options: Any = {"probes": [row.probe for row in rows], "special_ids": special, "map_size": MAP_SIZE}
    with torch.no_grad(), mh.observe(model, keep=keep, **options) as record:
        way.run(model, case)
    return record


def _recorded(keep: str) -> Keeper:
    def read(way: Way, model: Any, case: Case, rows: list[Row]) -> Found:
        record = observed(way, model, case, rows, keep)
        found = of_record(record)
        if keep == "statistics":
            found.chance = _attempt(lambda: dict(record.profiles()[0].chance))
        if keep == "cpu" and any("special_keys" in row.probe.needs or row.probe.axes != "queries" for row in rows):
            for kept in ("all", "statistics"):
                found.copies[f"file of {kept}"] = _attempt(lambda kept=kept: _saved(record, kept))
        return found

    return read


def _saved(record: mh.Record, keep: Any) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.safetensors"
        record.save(file, keep=keep)
        return of_record(mh.Record.load(file, mapped=False))


def _watched(way: Way, model: Any, case: Case, rows: list[Row]) -> Found:
    watch = mh.Watch(model, every=1, probes=[row.probe for row in rows])
    with watch, torch.no_grad():
        way.run(model, case)
    series = watch.series
    means = {name: torch.from_numpy(series.values(name, layer=0)[-1]) for name in series.statistics}
    return Found(summaries={"mean": means})


KEEPERS: dict[str, Keeper] = {
    **{keep: _recorded(keep) for keep in ("cpu", "device", "statistics", "summary")},
    "watch": _watched,
}

# ---- the other roads


def _counted(case: Case, rows: list[Row]) -> tuple[Found, list[Text]]:
    """A census of a file of two texts."""
    model, texts = bert(case), [[1, *(4 + case.text(index)).tolist(), 2] for index in (0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        words = [" ".join(f"w{token - 4}" for token in text[1:-1]) for text in texts]
        file, out = jsonl(Path(folder) / "texts.jsonl", words), Path(folder) / "out"
        options: Any = {"tokenizer": tokenizer(), "threads": 1, "examples": 1}
        census = mh.census(model, file, out=out, probes=[row.probe for row in rows], **options)
        (layer,) = census.layers
        summaries = {of: dict(layer.summary(of)) for of in SUMMARIES}
        rows_of_heads = census.table().rows
    names = [name for name in summaries["mean"] if f"{name}_chance" in rows_of_heads[0]]
    chance = {name: torch.tensor([head[f"{name}_chance"] for head in rows_of_heads]) for name in names}
    alone = [captured(model, torch.tensor(text), masks.Full())._replace(special=(0, 1, 2, 3)) for text in texts]
    return Found(summaries=summaries, chance=chance), alone


def _context(text: Text) -> ProbeContext:
    special = torch.isin(text.ids, torch.tensor(text.special))[None]
    return ProbeContext(special, text.ids[None], output_weight=text.output_weight, map_size=MAP_SIZE)


def _measured(case: Case, rows: list[Row]) -> tuple[Found, list[Text]]:
    """`mh.statistics` of each text."""
    texts = _alone(_causal)(Reader(case), case)
    found = []
    for text in texts:
        q, k, v, sinks = (each.to(case.dtype) for each in (text.q, text.k, text.v, text.sinks) if each is not None)
        options: Any = {"probes": [row.probe for row in rows], "context": _context(text)}
        measured = mh.statistics(q, k, v=v, sinks=sinks, mask=CAUSAL, **options)
        found.append({name: value[0] for name, value in measured.items()})
    return Found(found), texts


def _measured_in_a_batch(case: Case, rows: list[Row]) -> tuple[Found, list[Text]]:
    """`mh.statistics` of a batch that is padded on the right."""
    model, longest = Reader(case), max(case.lengths)
    texts, whole = _alone(_causal)(model, case), [model.exact(ids, CAUSAL) for ids in case.ids]
    q, k, v = (torch.cat([text[at] for text in whole]).to(case.dtype) for at in range(3))
    real = torch.arange(longest) < torch.tensor(case.lengths)[:, None]
    mask = CAUSAL & masks.Lengths(case.lengths) & masks.Keep(real, "batch queries")
    sinks = texts[0].sinks
    assert sinks is not None
    context = ProbeContext(case.ids == SPECIAL, case.ids, output_weight=texts[0].output_weight)
    probes = [row.probe for row in rows]
    measured = mh.statistics(q, k, v=v, sinks=sinks.to(case.dtype), mask=mask, probes=probes, context=context)
    found = [{name: each[at, :, :n] for name, each in measured.items()} for at, n in enumerate(case.lengths)]
    return Found(found), texts


class Split(NamedTuple):
    """How a batch is split over two ranks, by heads or by tokens."""

    strategy: str
    layout: Any = ""
    window: bool = False
    equal: bool = False
    groups: tuple[Group, ...] = ("queries", "keys", "built in")
    keeps: tuple[str, ...] = ("cpu",)

    def mask(self, case: Case) -> masks.Mask:
        return case.near() if self.window else CAUSAL


RANKS: dict[str, Split] = {
    "ring": Split("ring", "contiguous", groups=GROUPS, keeps=("cpu", "summary")),
    "ring, balanced": Split("ring", "balanced"),
    "ring, window": Split("ring", "contiguous", window=True),
    "ring, equal tokens": Split("ring", "balanced", equal=True, groups=("kernel",)),
    "gather": Split("gather", "contiguous"),
    "ulysses": Split("ulysses", "balanced"),
    "heads": Split("heads", groups=GROUPS, keeps=("cpu", "summary")),
}


def _observed_by_a_rank(group: Any, case: Case, name: str, rows: Group, keep: str) -> mh.Record:
    split, model, ids = RANKS[name], Reader(case), case.ids
    context: AbstractContextManager[None] = nullcontext()
    if split.strategy == "heads":
        parallelize(model, DeviceMesh.from_group(group, "cpu"))
    else:
        context = context_parallel(group, strategy=split.strategy, layout=split.layout)
        ids = shard(group, layout=split.layout, ids=ids)["ids"]
    way = Way(lambda model, case: model(ids, mask=split.mask(case), lengths=case.lengths), _alone(_causal))
    with context:
        return observed(way, model, case, rows_of(rows, f"{name}, {keep}"), keep)


# ---- the roads, and the judge

Road: TypeAlias = Callable[[Case, list[Row]], "tuple[Found, list[Text]]"]


@cache
def _texts(way: Way, case: Case) -> list[Text]:
    return way.texts(way.model(case), case)


def _road(way: Way, keeper: Keeper) -> Road:
    def run(case: Case, rows: list[Row]) -> tuple[Found, list[Text]]:
        case = replace(case, equal=way.equal)
        model = way.model(case)
        return keeper(way, model, case, rows), _texts(way, case)

    return run


ROADS: dict[str, Road] = {
    "statistics": _measured,
    "statistics of a batch": _measured_in_a_batch,
    **{
        f"{name}, {keep}": _road(way, keeper)
        for name, way in WAYS.items()
        for keep, keeper in KEEPERS.items()
        if keep != "device" or name == "padded right"  # here it is the same memory
    },
    "census": _counted,
}


def unknown_inputs(road: str) -> frozenset[str]:
    """Return the inputs of probes that are unknown on a road, so that it leaves out the probes that need them."""
    way = WAYS.get(road.rpartition(", ")[0])
    lacks = frozenset({"sinks"}) if road == "census" else frozenset() if way is None else way.lacks
    return lacks | {"special_keys"} if road.endswith(", watch") else lacks


def judged(road: str, group: Group, case: Case = Case()) -> Cells:
    """Run a road with the statistics of one group, and judge each."""
    rows = rows_of(group, road)
    try:
        found, texts = ROADS[road](case, rows) if rows else (Found(), [])
    except Exception as error:  # noqa: BLE001 - each cell fails with it
        return judge(error, [], rows)
    return judge(found, texts, rows, unknown_inputs(road))


def judge(found: Found | Exception, texts: list[Text], rows: list[Row], lacks: frozenset[str] = frozenset()) -> Cells:
    """Compare what a road led to with the definitions on each text alone."""
    if isinstance(found, (ProbeError, ArgumentError)) and all(row.probe.axes != "queries" for row in rows):
        return {}  # refused
    if isinstance(found, Exception):
        return {(row.label, "values"): _words(found) for row in rows}
    known = [row for row in rows if not row.probe.needs & lacks]
    if any(text.is_unclear() for text in texts):
        known = [row for row in known if "largest_key" not in row.label]
    if "ids" in lacks:
        known = [row for row in known if row.probe.counted != "repeated"]
    wrong = _compare(found, known, texts)
    for name, copy_of_it in found.copies.items():
        of_copy = (
            judge(copy_of_it, [], rows) if isinstance(copy_of_it, Exception) else _compare(copy_of_it, known, texts)
        )
        wrong |= {(label, f"{reading}, {name}"): words for (label, reading), words in of_copy.items()}
    return wrong


def _compare(found: Found, rows: list[Row], texts: list[Text]) -> Cells:
    exact = [text.parts() for text in texts]
    even = [text.even().parts() for text in texts] if found.chance is not None else []
    cells: Cells = {}
    for row in rows:
        counted = [text.counted(row.probe.counted) for text in texts]
        right = [row.of(parts).double() for parts in exact]
        wrong: dict[str, list[str]] = {}
        if found.values is not None:
            wrong["values"] = _wrong_values(row, found.values, right)
        for of, summary in found.summaries.items():
            reading = "means" if of == "mean" else "quantiles"
            wrong[reading] = wrong.get(reading, []) + _wrong_summary(row, of, summary, right, counted)
        if found.chance is not None and row.probe.chance and not row.probe.needs & {"values", "sinks"}:
            level = [row.of(parts).double() for parts in even]
            wrong["chance"] = _wrong_summary(row, "mean", found.chance, level, counted)
        for reading, words in wrong.items():
            before = cells.get((row.label, reading), "")
            cells[row.label, reading] = before or "".join(words[:1])
    return cells


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _wrong_values(row: Row, found: list[dict[str, Tensor]] | Exception, right: list[Tensor]) -> list[str]:
    if isinstance(found, Exception):
        return [_words(found)]
    if len(found) != len(right):
        return [f"{len(found)} texts"]
    wrong = []
    for at, (values, exact) in enumerate(zip(found, right, strict=True)):
        value = values.get(row.name)
        if value is None and row.probe.axes == "map" and BUILT_IN["pooled_map"].name not in values:
            continue  # a map over several calls is left out where the built-in one is
        if value is None:
            wrong.append(f"{row.name} of text {at} is missing")
        elif value.shape != exact.shape:
            wrong.append(f"{row.name} of text {at} has shape {tuple(value.shape)}, not {tuple(exact.shape)}")
        elif (off := oracle.difference(value, exact)) > _allowed(row, exact):
            wrong.append(f"{row.name} of text {at} is off by {off:.3g}")
    return wrong


def _allowed(row: Row, exact: Tensor) -> float:
    # The square root in a standard deviation makes a rounding of float32 larger near 0.
    return (3e-3 if "spread" in row.label else 2e-4) * max(1.0, float(torch.nan_to_num(exact).abs().max()))


def _wrong_summary(
    row: Row, of: str, found: dict[str, Tensor] | Exception, right: list[Tensor], counted: list[Tensor]
) -> list[str]:
    if isinstance(found, Exception):
        return [_words(found)]
    if row.probe.axes != "queries" or row.name == "largest_key":  # no number per query, or no number
        return [f"the {of} of {row.name} is over its {row.probe.axes}"] if row.name in found else []
    if row.name not in found:
        return [f"the {of} of {row.name} is missing"]
    values = torch.cat([exact[:, some] for exact, some in zip(right, counted, strict=True)], 1)
    if not values.shape[1]:
        return []
    value, ordered, allowed = found[row.name].double(), values.sort(-1).values, _allowed(row, values)
    if of == "mean":
        low = high = values.mean(-1)
    else:
        place = {"median": 0.5, "p95": 0.95, "max": 1.0}[of] * (values.shape[1] - 1)
        low, high = ordered[:, int(place)], ordered[:, min(int(place) + 1, values.shape[1] - 1)]
        allowed = allowed + 0.01 * torch.maximum(low.abs(), high.abs())
    off = torch.maximum(low - value, value - high) - allowed
    return (
        [f"the {of} of {row.name} is {value[off > 0].tolist()}, not {low[off > 0].tolist()}"]
        if bool((~(off <= 0)).any())
        else []
    )


def judged_by_ranks(
    group: Any, rank: int, case: Case, name: str, folder: str, groups: tuple[Group, ...] | None = None
) -> dict[tuple[str, Group], Cells]:
    """Observe the texts over two ranks, and judge the joined record, and the record that their files hold together."""
    found: dict[tuple[str, Group], Cells] = {}
    split = RANKS[name]
    case = replace(case, equal=split.equal)
    texts = [Reader(case).exact(case.text(index), split.mask(case)) for index in (0, 1)]
    for rows in groups or split.groups:
        for keep in split.keeps:
            reads: dict[str, Any] = {}
            record = _attempt(lambda keep=keep, rows=rows: _observed_by_a_rank(group, case, name, rows, keep))
            reads[keep] = record
            if isinstance(record, mh.Record):
                joined = _attempt(lambda record=record: record.reduce(group, to=None))
                reads[keep] = of_record(joined) if isinstance(joined, mh.Record) else joined
                if keep == "cpu":
                    file = Path(folder) / f"{name}, {rows}"
                    record.save(f"{file}.{rank}.safetensors")
                    dist.barrier(group)
                    reads["files"] = _attempt(lambda file=file: of_record(mh.Record.load(f"{file}.*.safetensors")))
            for how, read in reads.items():
                road = f"{name}, {how}"
                found[road, rows] = judge(read, texts, rows_of(rows, road))
    return found


def what_is_wrong(road: str, group: Group, cells: Cells) -> list[str]:
    """Return what is wrong in the cells of a road."""
    return [f"{road} [{group}]: {label}, {reading}: {words}" for (label, reading), words in cells.items() if words]
