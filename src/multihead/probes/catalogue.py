"""The built-in statistics, each with its definition, label, unit, number format and source.

`first_mass` counts the first key that any query of the sample may see, not key 0, which may be padding.

By default `observe` measures the cheap statistics: those that the native kernel computes in the same pass as the
output. Attention received, maps and norms need a second pass, so they are measured only if they are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from torch import Tensor

from multihead.errors import ProbeError
from multihead.errors.given import reject_given
from multihead.kernels.parts import NEAR_REACH, PART_FAMILIES, PartName, part_named
from multihead.probes.head_statistic import HeadStatistic
from multihead.probes.probe import SHARE_FORMAT, PartValues, Probe, Statistic


def _probe_of_single_part(part: PartName, name: str = "", **options: Any) -> Probe:
    """Return the probe of a statistic that equals one part; by default the statistic has the name of the part."""
    return Probe(name or str(part), itemgetter(part), {part}, **options)


def _share_probe(part: PartName, name: str = "", **options: Any) -> Probe:
    """Return the probe of a statistic that equals one part, and is shown as a share of a query's weights."""
    return _probe_of_single_part(part, name, number_format=SHARE_FORMAT, **options)


# Functions with a name, not lambdas: a record is pickled with its probes.
def _effective_keys(parts: PartValues) -> Tensor:
    return parts["entropy"].exp()


def _largest_score(parts: PartValues) -> Tensor:
    return parts["logsumexp"] + parts["largest_weight"].log()


def _separator_mass(parts: PartValues) -> Tensor:
    return (parts["tokens_mass", "special"] - parts["first_special_mass"]).clamp(min=0)


def _coverage_of_parts(parts: PartValues) -> Tensor:
    return parts["received"].clamp(max=1)


_OFFSET_SOURCES = {-1: "arXiv:1905.09418, 2209.11895", 1: "arXiv:1906.04341, section 3.1"}


def _offset_mass_probe(offset: int, name: str, label: str, short_label: str = "") -> Probe:
    places = {0: "the query's own position", -1: "the position before", 1: "the position after"}
    return _share_probe(
        ("offset_mass", offset),
        name,
        label=label,
        short_label=short_label,
        source=_OFFSET_SOURCES.get(offset, ""),
        default=abs(offset) <= 1,
        about=f"p_ij at {places.get(offset, f'position_i {offset:+d}')}",
        counted=f"offset {offset:+d}" if offset else "all",
    )


def _first_keys_mass_probe(count: int, name: str, label: str) -> Probe:
    return _share_probe(
        ("first_keys_mass", count),
        name,
        label=label,
        source="attention sinks, arXiv:2309.17453",
        default=count == 1,
        about="p_ij at the first key of the text" if count == 1 else f"Σ p_ij over the first {count} keys of the text",
    )


def _token_set_mass_probe(name: str, tokens: frozenset[int] | None = None) -> Probe:
    special = name == "special"
    return _share_probe(
        ("tokens_mass", name),
        f"{name}_mass",
        label=name.replace("_", " "),
        short_label="spec." if special else "",
        tokens=tokens,
        source="arXiv:1906.04341, section 3.2",
        default=special,
        about=f"Σ p_ij over the {'special keys, such as separators' if special else f'keys of the set {name}'}",
    )


ENTROPY = _probe_of_single_part(
    "entropy",
    unit="nats",
    number_format=".2f",
    source="Shannon",
    default=True,
    about="H_i = -Σ_j p_ij ln p_ij; 0 is one key, ln(keys) all of them evenly; the weight of a sink is left out",
)
EFFECTIVE_KEYS = Probe(
    "effective_keys",
    _effective_keys,
    {"entropy"},
    short_label="eff. keys",
    number_format=".1f",
    source="perplexity",
    default=True,
    about="exp(H_i): over how many keys a query spreads, as if evenly",
)
MEAN_DISTANCE = _probe_of_single_part(
    "mean_distance",
    label="distance",
    short_label="dist.",
    unit="tokens",
    number_format=".1f",
    source="arXiv:2010.11929, in one dimension",
    default=True,
    about="Σ_j p_ij |position_i - j| / Σ_j p_ij",
)
DISTANCE_SPREAD = _probe_of_single_part(
    "distance_spread",
    label="spread",
    unit="tokens",
    number_format=".1f",
    default=True,
    about="the standard deviation of that distance; 0 is all weight at one distance",
)
SELF_MASS = _offset_mass_probe(0, "self_mass", "self")
PREVIOUS_MASS = _offset_mass_probe(-1, "previous_mass", "previous", "prev.")
NEXT_MASS = _offset_mass_probe(1, "next_mass", "next")
NEAR_MASS = _share_probe(
    "near_mass",
    label="near",
    default=True,
    about=f"Σ p_ij over the keys at most {NEAR_REACH} tokens from the query",
)
FIRST_MASS = _first_keys_mass_probe(1, "first_mass", "first")
SPECIAL_MASS = _token_set_mass_probe("special")
SEPARATOR_MASS = Probe(
    "separator_mass",
    _separator_mass,
    {("tokens_mass", "special"), "first_special_mass"},
    label="separator",
    number_format=SHARE_FORMAT,
    source="arXiv:1906.04341, section 3.2",
    default=True,
    about="Σ p_ij over the special keys after the first key of the text, such as separators",
)
LARGEST_WEIGHT = _share_probe(
    "largest_weight",
    label="largest",
    short_label="max",
    source='"confidence", arXiv:1905.09418',
    default=True,
    about="max_j p_ij",
)
LARGEST_KEY = _probe_of_single_part(
    "largest_key",
    number_format=".0f",
    default=True,
    about="the index of the first key that has it; -1 where a query sees no key",
    chance=False,
)
SINK_MASS = _share_probe(
    "sink_mass",
    label="learned sink",
    short_label="sink",
    source="GPT-OSS, arXiv:2508.10925",
    default=True,
    about="exp(sink - L_i) = 1 - Σ_j p_ij: the weight that a learned sink takes from the keys",
    chance=False,
)
LARGEST_SCORE = Probe(
    "largest_score",
    _largest_score,
    {"logsumexp", "largest_weight"},
    number_format=".1f",
    source="QK-clip, arXiv:2507.20534",
    about="max_j s_ij = L_i + ln max_j p_ij: the largest score before the softmax",
    chance=False,
)
DUPLICATE_MASS = _share_probe(
    "duplicate_mass",
    label="duplicate",
    source="arXiv:2211.00593",
    about="Σ p_ij over earlier keys that are the query's own token",
    counted="repeated",
)
INDUCTION_MASS = _share_probe(
    "induction_mass",
    label="induction",
    source="prefix matching, arXiv:2209.11895",
    about="Σ p_ij over the keys right after those",
    counted="repeated",
)
CONTRIBUTION = _probe_of_single_part(
    "contribution",
    source="arXiv:2004.10102",
    about="Σ_j p_ij ‖W_O^h v_j‖: what the keys contribute before it cancels, in units of the layer's output",
    chance=False,
)
OUTPUT_NORM = _probe_of_single_part(
    "output_norm",
    source="arXiv:2004.10102",
    about="‖Σ_j p_ij W_O^h v_j‖: the norm of what a head adds to the layer's output; at most the contribution",
    chance=False,
)
RECEIVED = _probe_of_single_part(
    "received",
    unit="queries",
    source="column sums",
    about="Σ_i p_ij; 1 is as much as one query has to give",
    chance=False,
)
COVERAGE = Probe(
    "coverage",
    _coverage_of_parts,
    {"received"},
    number_format=SHARE_FORMAT,
    source="arXiv:1609.08144, equation 14",
    about="min(1, Σ_i p_ij): whether a key was attended to at all",
    chance=False,
)
POOLED_MAP = _share_probe(
    "pooled_map",
    label="map",
    about="the mean of each block over its visible cells, or the largest weight; NaN where no cell is visible",
    chance=False,
)

PATCH_DISTANCE = _probe_of_single_part(
    "patch_distance",
    short_label="patch dist.",
    unit="patches",
    number_format=".1f",
    source="arXiv:2010.11929",
    about="mean distance between the centres of the query's patch and a key's of its view, under p_ij / Σ_j p_ij",
    counted="placed",
)
NEIGHBOUR_MASS = _share_probe(
    "neighbour_mass",
    label="neighbours",
    about="Σ p_ij over the query's patch and the eight around it",
    counted="placed",
)
ONE_WAY_MASS = _share_probe(
    "one_way_mass",
    label="one way",
    about="p_ij at the patch at one step in rows and columns: the head's commonest in the text, not 0",
    counted="placed",
)
PICTURE_MASS = _share_probe(
    ("tokens_mass", "picture"), "picture_mass", label="picture", about="Σ p_ij over the parts of pictures"
)
CLASS_MASS = _share_probe(
    ("tokens_mass", "class"),
    "class_mass",
    label="class, registers",
    short_label="class",
    about="Σ p_ij over the model's own tokens, such as [CLS]",
)
WORDS_MASS = _share_probe(("tokens_mass", "words"), "words_mass", label="words", about="Σ p_ij over the words")
PICTURE_PROBES = (PATCH_DISTANCE, NEIGHBOUR_MASS, ONE_WAY_MASS, PICTURE_MASS, CLASS_MASS, WORDS_MASS)
"""Statistics of calls whose keys have places in pictures."""

# The order is that of tables and of the documentation. Default statistics cost next to nothing: the native kernel
# measures them in one pass, and the mass of the learned sink follows from the logsumexp.
_BUILT_IN_PROBES = (
    ENTROPY,
    EFFECTIVE_KEYS,
    MEAN_DISTANCE,
    DISTANCE_SPREAD,
    SELF_MASS,
    PREVIOUS_MASS,
    NEXT_MASS,
    NEAR_MASS,
    FIRST_MASS,
    SPECIAL_MASS,
    SEPARATOR_MASS,
    LARGEST_WEIGHT,
    LARGEST_KEY,
    SINK_MASS,
    LARGEST_SCORE,
    DUPLICATE_MASS,
    INDUCTION_MASS,
    CONTRIBUTION,
    OUTPUT_NORM,
    *PICTURE_PROBES,
    RECEIVED,
    COVERAGE,
    POOLED_MAP,
)
POSITION_PROBES = frozenset(
    probe.name
    for probe in _BUILT_IN_PROBES
    if probe is not SELF_MASS and any(part_named(part).uses_positions for part in probe.parts)
)
"""Names of statistics of positions in a text, which mean little between the patches of a picture."""

PROBES: dict[str, Probe] = {probe.name: probe for probe in _BUILT_IN_PROBES}
"""The built-in probes by name."""

DEFAULT = tuple(probe.name for probe in _BUILT_IN_PROBES if probe.default)
"""Names of the probes that are computed by default."""

REPEAT_PROBES = {
    "repeated_induction": INDUCTION_MASS,
    "repeated_duplicate": DUPLICATE_MASS,
    "repeated_previous": PREVIOUS_MASS,
    "repeated_first": FIRST_MASS,
}
"""Name of a statistic on repeated random tokens -> its probe, see `observation.textbook`."""

_STATISTICS_BY_NAME: dict[str, Statistic] = {
    **PROBES,
    **{
        name: Statistic(name, label=f"{probe.label} on random repeats", number_format=SHARE_FORMAT)
        for name, probe in REPEAT_PROBES.items()
    },
}


def statistic(name: str, custom: Mapping[str, Statistic] | None = None) -> Statistic:
    """Return a built-in statistic by name, else the statistic in `custom`, else one that is labelled by its name.

    >>> statistic("entropy").heading, statistic("late_mass").heading
    ('entropy (nats)', 'late mass')
    """
    if not isinstance(name, str):
        reject_given("name", name, "the name of a statistic", 'Give one, such as "entropy".')
    return _STATISTICS_BY_NAME.get(name) or (custom or {}).get(name) or Statistic(name)


def statistic_of_heads(
    what: str, measure: str, unit: str, by: str, *, more_is_better: bool | None = None
) -> HeadStatistic:
    """Return the statistic of what heads do for a measure of a model's output, see `multihead.importance`.

    Args:
        what: one of `HEAD_NUMBERS`, which begins the name.
        measure: name of the measure.
        unit: unit of the measure; "%" for a share.
        by: what replaces the output of a head.
        more_is_better: whether more of the measure is better; None for neither.

    >>> statistic_of_heads("effect", "loss", "nats", "zero").heading
    'effect on loss by zero (nats)'
    """
    return HeadStatistic(
        f"{what}_{measure}_{by}",
        label=f"{what} on {measure} by {by}".replace("_", " "),
        unit=unit,
        number_format=SHARE_FORMAT if unit == "%" else ".3g",
        what=what,
        measure=measure,
        by=by,
        better={True: "more", False: "less", None: ""}[more_is_better],
    )


def offset_mass(offset: int) -> Probe:
    """Return the probe that measures the weight on the key at an offset from the query's own position.

    The weight is 0 where that key is hidden or does not exist; means leave out queries without such a key.

    Raises:
        ProbeError: the offset is not an integer.

    >>> offset_mass(-5)
    Probe(name='offset_minus_5_mass')
    >>> offset_mass(-1)
    Probe(name='previous_mass')
    """
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ProbeError(f"offset_mass was given {offset!r}.", "Give an integer: -1 is the key before the query.")
    named = {0: SELF_MASS, -1: PREVIOUS_MASS, 1: NEXT_MASS}
    return named.get(offset) or _offset_mass_probe(
        offset, f"offset_{'minus' if offset < 0 else 'plus'}_{abs(offset)}_mass", f"offset {offset:+d}"
    )


def first_keys_mass(count: int) -> Probe:
    """Return the probe that measures the weight on the first `count` keys that any query of the text may see.

    Raises:
        ProbeError: the count is not an integer of at least 1.

    >>> first_keys_mass(4)
    Probe(name='first_4_mass')
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ProbeError(f"first_keys_mass was given {count!r}.", "Give an integer of at least 1.")
    return FIRST_MASS if count == 1 else _first_keys_mass_probe(count, f"first_{count}_mass", f"first {count}")


def probe_of_part(part: PartName, tokens: Iterable[int] | None = None) -> Probe:
    """Return the probe that measures a part with an argument, such as ("offset_mass", -5).

    >>> probe_of_part(("first_keys_mass", 4)), probe_of_part(("tokens_mass", "digits"), (3, 4))
    (Probe(name='first_4_mass'), Probe(name='digits_mass'))
    """
    part_named(part)
    match part:
        case ("offset_mass", int(offset)):
            return offset_mass(offset)
        case ("first_keys_mass", int(count)):
            return first_keys_mass(count)
        case ("tokens_mass", str(name)):
            return SPECIAL_MASS if part in SPECIAL_MASS.parts else tokens_mass(name, tokens)
    raise ProbeError(f"{part!r} is a part without an argument.", f"Give one of a family: {', '.join(PART_FAMILIES)}.")


def tokens_mass(name: str, ids: Iterable[int] | None = None) -> Probe:
    """Return the probe that measures the weight on the keys of a set of tokens.

    Args:
        name: name of the set; the statistic is called `{name}_mass`.
        ids: token ids in the set; None if `ProbeContext.sets[name]` has the keys.

    Raises:
        ProbeError: the name is not a Python identifier or is already used, or the ids are not integers.

    >>> tokens_mass("punctuation", ids=(11, 13))
    Probe(name='punctuation_mass')
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ProbeError(
            f"tokens_mass was given the name {name!r}.", 'Give a Python identifier, such as "punctuation".'
        )
    if f"{name}_mass" in PROBES or name.startswith(("offset_", "first_")):
        raise ProbeError(f"{name}_mass is the name of another statistic.", "Give the set another name.")
    tokens = None if ids is None else frozenset(ids)
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in tokens or ()):
        raise ProbeError(
            f"tokens_mass({name!r}) was given ids that are no integers.", "Give token ids, such as [11, 13]."
        )
    return _token_set_mass_probe(name, tokens)


def needs_pictures(probe: Probe) -> bool:
    """Whether a probe needs the places of tokens in pictures, or the set of keys that follow from them."""
    return "places" in probe.needs or probe.name in {each.name for each in PICTURE_PROBES}


def reject_unknown_set(probe: Probe) -> None:
    """Raise a ProbeError if a probe needs the keys of a set of tokens, which only a `ProbeContext` has, and no ids."""
    if "sets" in probe.needs and not needs_pictures(probe):
        name = min(str(part[1]) for part in probe.parts - SPECIAL_MASS.parts if part[0] == "tokens_mass")
        raise ProbeError(f"{probe.name} needs a set of tokens.", f"Give their ids: probes.tokens_mass({name!r}, ids).")
