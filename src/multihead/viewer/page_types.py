"""The types of what is sent to the scripts of the pages: the viewer's, that of a trial, of a census and of a series.

`tools/page_types.py` writes them for TypeScript, which checks the scripts with them. None stands for a number that JSON
cannot hold: NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

Numbers = list[float | None]


class TokenLayout(TypedDict):
    """Tokens as running text, see `layout_of_tokens`."""

    gaps: list[str]
    shown: list[str]
    labels: list[str]
    flags: list[int]
    tail: str


class ColumnDescription(TypedDict):
    """A statistic in the tables of a page, see `describe_column`."""

    id: str
    label: str
    unit: str
    format: str
    about: str
    focus: bool


class UnrecordedStatistic(TypedDict):
    """A statistic that was not recorded, see `columns_not_recorded`."""

    id: str
    label: str


class KindDescription(TypedDict):
    """A kind of head in the legend of a page, see `legend_of_kinds`; `noun` on the page of a series alone."""

    id: str
    label: str
    about: str
    statistic: str
    glyph: str
    colour: tuple[str, str]
    repeats: bool
    measured: bool
    noun: NotRequired[str]


class HeadsOfLayer(TypedDict):
    """What the list of heads needs of a layer."""

    number: int
    name: str
    heads: int


class LayerDescription(HeadsOfLayer):
    """A layer on one text of a record."""

    role: str
    aligned: tuple[int, ...]
    queries: int
    keys: int
    queryStart: int
    crosses: bool
    pattern: str
    hides: bool
    blind: int
    maps: bool
    blocks: list[tuple[int, int]]
    rows: Literal["all", "largest", ""]
    margins: list[str]
    queryText: int
    keyText: int


class OverTextsDescription(TypedDict):
    """What a head does on each of several texts, see `OverTexts`."""

    number: int
    having: int
    spread: float
    sentence: str


class FindingDescription(TypedDict):
    """A notable head, see `Finding`."""

    topic: str
    layer: int
    head: int
    value: float
    chance: float
    sentence: str
    count: str
    brief: str
    over_texts: OverTextsDescription | None


class GreyPicture(TypedDict):
    """A picture: its grey copy as an address of a PNG file, "" if it is unknown, and its size in its own pixels."""

    source: str
    width: float
    height: float


class PictureView(TypedDict):
    """A view of a picture: its keys, and left, top, right and bottom of each, one after the other.

    `image` is the index of the picture among those of the text; `rows` is 0 where the keys form no grid.
    """

    picture: int
    view: int
    image: int
    rows: int
    columns: int
    keys: list[int]
    boxes: list[float]


class PictureText(TypedDict):
    """A text whose keys have places in pictures, see `describe_pictures`; `stored` in a file alone.

    `text` is its index among the texts, `groups` the group of each token (0: picture, 1: class token and registers, 2:
    prompt, 3: answer): first of the `keys`, then of those of the text `queryText`, if the queries are of another text
    than the keys. `opening` the one to show at first, `stored` the keys whose rows of weights the file has.
    """

    text: int
    queryText: int
    keys: int
    layers: list[int]
    views: list[PictureView]
    groups: list[int]
    opening: int
    stored: NotRequired[list[int]]


class OffTogetherDescription(TypedDict):
    """What some heads do when all of them are off: a label, a number and its error of each of several rows."""

    sentence: str
    heads: list[int]
    rows: list[tuple[str, float, float | None]]


class HeadNumbers(TypedDict):
    """A number of each head that was measured on other texts than the record's, see `describe_head_numbers`.

    `id` is that of the column with the numbers. `name`, `of` and `most` name the method, the measure, and the list of
    the heads in `order`, the most important first. Heads are indices. `errors` is empty for a single text; `within`
    says which numbers are within two of them, and are hatched, and is empty where none has a meaning.
    """

    id: str
    name: str
    of: str
    most: str
    sentence: str
    about: str
    note: str
    errors: Numbers
    within: list[bool]
    order: list[int]
    together: OffTogetherDescription | None


class SampleDescription(TypedDict):
    """One text of a record, see `describe_sample`; `stored` and `precision` in a report alone."""

    lead: str
    facts: list[tuple[str, str]]
    pattern: str
    texts: list[TokenLayout | None]
    received: Numbers | None
    labels: dict[str, str]
    layers: list[LayerDescription]
    noMaps: str
    kinds: list[tuple[str, ...]]
    metrics: dict[str, Numbers]
    chance: dict[str, Numbers]
    columns: list[ColumnDescription]
    unrecorded: list[UnrecordedStatistic]
    findings: list[FindingDescription]
    full: Numbers
    legend: list[KindDescription]
    images: list[GreyPicture]
    pictures: list[PictureText]
    important: list[HeadNumbers]
    stored: NotRequired[str]
    precision: NotRequired[str]


class TextOfRun(TypedDict):
    """One text in the list of texts of a record."""

    number: int
    queries: int
    keys: int
    opening: str


class RunDescription(TypedDict):
    """A record, see `describe_run`."""

    name: str
    title: str
    keep: Literal["all", "statistics"]
    texts: int
    comparable: bool
    samples: list[TextOfRun]


class ViewDescription(TypedDict):
    """The page of the viewer, see `describe_view`."""

    lang: str
    runs: list[RunDescription]
    foot: str
    precision: str
    similar: bool
    looking: bool
    served: bool


class AllTextsDescription(TypedDict):
    """The heads over all texts of a record, see `describe_all_texts`."""

    texts: int
    findings: list[FindingDescription]


class NearestHead(TypedDict):
    """A head with similar weights; `queries`, which a file leaves out, is the number of queries compared."""

    layer: int
    head: int
    divergence: float | None
    queries: NotRequired[int]


class NearestHeads(TypedDict):
    """The heads with similar weights, of which every n-th query was compared; see `nearest_heads`."""

    every: int
    heads: list[NearestHead]
    error: NotRequired[str]


class LookingHead(TypedDict):
    """A head that looks at a token: its mean weight, and the queries with the largest weights."""

    layer: int
    head: int
    share: float
    queries: list[tuple[int, float]]


class LookingHeads(TypedDict):
    """The heads that look at a token, and how much each token looks at it, see `heads_looking_at`."""

    heads: list[LookingHead]
    tokens: Numbers


class StatisticChangeDescription(TypedDict):
    """A statistic of a head in two runs as text, see `StatisticChange`."""

    label: str
    before: str
    after: str


class ChangedHeadDescription(TypedDict):
    """A head that differs between two runs."""

    layer: int
    head: int
    divergence: float | None
    kinds: tuple[tuple[str, ...], tuple[str, ...]]
    change: StatisticChangeDescription | None


class ChangedHeads(TypedDict):
    """The heads that differ between two runs, or of two models the kinds of their heads, see `changed_heads`."""

    every: int
    heads: list[ChangedHeadDescription]
    kinds: NotRequired[list[tuple[str, str, str, str]]]
    sentences: NotRequired[Sequence[str]]
    all: NotRequired[int]
    sameTexts: NotRequired[bool]
    error: NotRequired[str]


class LevelsProgress(TypedDict):
    """How far the coarse levels of a text's maps are built."""

    state: Literal["none", "building", "ready"]
    done: float
    total: int
    inMemory: NotRequired[bool]
    error: NotRequired[str]


class StoredArray(TypedDict):
    """An array in the file of a page, see `PackedArrays`."""

    shape: Sequence[int]
    coding: str
    top: NotRequired[float]
    first: NotRequired[int]
    block: NotRequired[Sequence[int]]
    keys: NotRequired[int]


class OfflineData(TypedDict):
    """What a page in one file answers its requests from, see `offline_page`."""

    plain: Mapping[str, Any]
    arrays: dict[str, StoredArray]
    tile: int
    place: str
    absent: str
    old: str


class TrialModel(TypedDict):
    """The model of a trial, see `Trial.describe_model`."""

    title: str
    name: str
    version: str
    lang: str
    kind: Literal["language", "encoder"]
    text: str
    most_tokens: int
    dtype: str


class TrialToken(TypedDict):
    """A token of the text of a trial."""

    text: str
    gap: str
    special: bool
    sentence: int
    loss: float | None


class TrialText(TypedDict):
    """A text that the model of a trial has read, see `Trial.describe_text`."""

    sentences: list[str]
    similarity: list[list[float]] | None
    tokens: list[TrialToken]
    grid: SampleDescription
    kinds: dict[str, list[tuple[int, int]]]
    sweep_seconds: float
    seconds: float
    replay: bool


class NextToken(TypedDict):
    """A token that may follow, and its probability before and after a change of heads."""

    id: int
    token: str
    before: float
    after: float


class OtherTokens(TypedDict):
    """The probability of all tokens that are not listed, before and after a change of heads."""

    before: float
    after: float


class PredictionChange(TypedDict):
    """What a change of heads changes in the predictions of a model; an encoder has similarities alone."""

    losses: Numbers | None
    predictions: int | None
    worse: int | None
    at: int | None
    kl: float | None
    next: list[NextToken] | None
    others: OtherTokens | None
    similarity: list[list[float]] | None


class DistancesOfLayer(TypedDict):
    """How far the maps of the heads of a layer changed."""

    layer: int
    heads: list[float]


class TrialChange(PredictionChange):
    """The model of a trial with other heads, see `Trial.change_heads`."""

    changed: list[tuple[int, int, float]]
    distances: list[DistancesOfLayer]
    seconds: float
    layers: list[int] | None
    whole: bool
    why_whole: str | None


class SweepEffects(TypedDict):
    """The effect of each head of a layer."""

    effects: Numbers
    losses: Numbers | None


class SweepOfLayer(SweepEffects):
    """A line of a sweep, see `Trial.sweep`: the effect of each head of a layer."""

    layer: int
    done: int
    total: int


class SweepEstimates(TypedDict):
    """The effect of each head as gradients estimate it, before a sweep; None where there is no gradient."""

    effects: Numbers | None
    seconds: float


class SweepEnd(TypedDict):
    """The last line of a sweep."""

    seconds: float
    peak_mib: int | None


class ContinuationLine(TypedDict):
    """A line of a continuation: tokens of one side, or that both are complete."""

    before: NotRequired[list[str]]
    after: NotRequired[list[str]]
    done: NotRequired[bool]


class CensusFinding(TypedDict):
    """A notable head of a census."""

    layer: int
    head: int
    statistic: str
    sentence: str
    count: str


class NamedHead(TypedDict):
    """One of the heads with the largest shares of a kind."""

    layer: int
    head: int
    share: str


class HeadsOfKind(TypedDict):
    """The heads of a kind in a census."""

    kind: str
    number: int
    chance: str
    best: list[NamedHead]


class CensusRun(TypedDict):
    """One census of the page; the lists have an item per head, layer after layer."""

    label: str
    command: list[str]
    numbers: dict[str, dict[str, Numbers]]
    bars: dict[str, list[Numbers | None]]
    chance: dict[str, Numbers]
    kinds: list[tuple[str, ...]]
    found: list[HeadsOfKind]


CensusExample = tuple[float | None, str, int, int, int, int, list[int], Numbers]
"""Value, "SHARD:TEXT", position, key, its token, first position, tokens, values; tokens are indices of the words."""


class CensusExamples(TypedDict):
    """The strongest examples per census, statistic and head."""

    examples: list[dict[str, list[list[CensusExample]]]]
    words: list[str]
    special: list[int]


class CensusSummary(TypedDict):
    """What the page of a census has besides its examples."""

    title: str
    nats: str
    columns: list[ColumnDescription]
    layers: list[HeadsOfLayer]
    legend: list[KindDescription]
    divergence: NotRequired[dict[str, Numbers]]
    axes: dict[str, list[Numbers]]
    own: list[str]
    findings: list[CensusFinding]
    runs: list[CensusRun]


class CensusData(CensusSummary, CensusExamples):
    """The data of the page of a census; `kept` is the number of examples per head and statistic."""

    kept: int


class KindChangeDescription(TypedDict):
    """When a head became a kind or ceased to be one; `at` is the index of the first step of the page that shows it."""

    layer: int
    head: int
    kind: str
    gained: bool
    step: int
    at: int


class SeriesKinds(TypedDict):
    """The kinds of the heads of a series: `kinds` has the index of each head's combination at each step."""

    legend: list[KindDescription]
    combinations: list[tuple[str, ...]]
    kinds: list[list[int]]
    changes: list[KindChangeDescription]


class SeriesNumbers(TypedDict):
    """The statistics of the heads of a series at each step."""

    steps: list[int]
    layers: list[HeadsOfLayer]
    columns: list[ColumnDescription]
    ends: dict[str, tuple[float, float]]
    values: dict[str, list[Numbers]]


class SeriesData(SeriesNumbers, SeriesKinds):
    """The data of the page of a series."""
