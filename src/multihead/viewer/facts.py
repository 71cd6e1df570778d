"""The sentences and facts about a record at the top of its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from multihead.locale.texts import section, text
from multihead.record.analysis.roles import roles
from multihead.record.profiles import LayerProfile
from multihead.viewer.columns import legend_of_kinds

if TYPE_CHECKING:
    from multihead.observation.record import Record


def facts_of_record(
    record: Record, profiles: Sequence[LayerProfile], lengths: Sequence[int], *, sample: int, lang: str
) -> list[tuple[str, str]]:
    """Return the (label, value) pairs in the row under the page's title.

    Args:
        record: the record.
        profiles: the result of `Record.profiles`.
        lengths: numbers of tokens of the main text and of the other texts.
        sample: index of the text in the record.
        lang: the language of the page.
    """
    words = section(lang, "viewer")
    heads = [len(one.kinds) for one in profiles]
    if len(set(heads)) == 1:
        found = [(words["fact.grid"], f"{len(heads)} × {heads[0]}")]
    else:
        found = [(words["fact.layers"], str(len(heads))), (words["fact.heads"], str(sum(heads)))]
    found.append((words["fact.tokens"], f"{lengths[0]:,}"))
    label = "fact.decoder tokens" if "decoder" in roles(record.layers, sample=sample) else "fact.keys"
    found += [(words[label], f"{length:,}") for length in lengths[1:]]
    found.append((words["fact.attention"], name_masks(profiles, lang)))
    kinds = {kind for one in profiles for named in one.kinds for kind in named}
    possible = sum(each["measured"] for each in legend_of_kinds(record.all_kinds, profiles, lang))
    found.append((words["fact.kinds"], words["kinds present"].format(kinds=len(kinds), all=possible)))
    return found


def lead_sentence(record: Record, profiles: Sequence[LayerProfile], tokens: int, *, sample: int, lang: str) -> str:
    """Return the sentence under the page's title, with the numbers of heads and of tokens or patches.

    Of several texts it names the number of the text.
    """
    heads = sum(len(one.kinds) for one in profiles)
    texts = max((layer.num_samples for layer in record.layers), default=0)
    values = {"heads": f"{heads:,}", "tokens": f"{tokens:,}", "number": f"{sample + 1:,}", "texts": f"{texts:,}"}
    crossing = [layer.sample(sample) for layer in record.layers if layer.sample(sample).cross_attention]
    key = "lead" if heads > 1 and tokens > 1 else "lead one"
    if crossing and "encoder" in roles(record.layers, sample=sample):
        key = "lead two"
        values |= {"keys": f"{crossing[0].num_keys:,}", "queries": f"{crossing[0].num_queries:,}"}
    elif (boxes := record.layers[0].sample(sample).text.boxes) is not None and boxes.grid is not None:
        key = "lead image"
        values |= {"rows": str(boxes.grid[0]), "columns": str(boxes.grid[1])}
    elif texts > 1 and key == "lead":
        return text("viewer.lead text", lang, **values)
    found = text(f"viewer.{key}", lang, **values)
    number = text("viewer.sample of", lang, **values)
    return found if texts == 1 else found + text("common.join.sentences", lang) + number


def name_masks(profiles: Sequence[LayerProfile], lang: str) -> str:
    """Name the masks of the layers, the most common first."""
    words = section(lang, "common", "page", "viewer")

    def name_mask(one: LayerProfile) -> str:
        seen = one.visibility
        name = "cross" if one.cross_attention and seen.pattern == "full" else seen.pattern
        return words[f"pattern.{name}"].format(tokens=seen.before, before=seen.before, after=seen.after)

    patterns = Counter(name_mask(one) for one in profiles)
    if len(patterns) == 1:
        return next(iter(patterns))
    parts = [
        words["pattern in 1 layer" if layers == 1 else "pattern in layers"].format(pattern=name, layers=layers)
        for name, layers in patterns.most_common()
    ]
    return words["join.parts"].join(parts)


def readable_size(num_bytes: int, lang: str) -> str:
    """Write a size in MB, or in kB below 1 MB."""
    if num_bytes < 1_000_000:
        return text("viewer.kilobytes", lang, n=f"{num_bytes / 1e3:.0f}")
    return text("viewer.megabytes", lang, n=f"{num_bytes / 1e6:.1f}".removesuffix(".0"))
