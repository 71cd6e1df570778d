"""The entry points that are fuzzed, each with its share of the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz import (
    calls,
    changes,
    drop_ins,
    files,
    generated,
    graphs,
    heads,
    layers,
    measures,
    models,
    ranks,
    records,
    roads,
    ways,
)
from tests.fuzz.draw import Draw


@dataclass(frozen=True)
class Entry:
    """One entry point.

    Fields:
        check: draws a case, runs it, and raises `Mismatch`, or any other error, if something is wrong.
        share: of the time, relative to those of the others; of the slow ones, in a tenth of the time.
        sample: how many cases `make test` runs.
        seconds: how long the first case takes, with its imports; those of a second and more are the slow ones, which
            run in a process of their own.
        moves: whether its calls run on the device that `--device` names.
    """

    check: Callable[[Draw], None]
    share: float
    sample: int
    seconds: float = 0.01
    moves: bool = False


ENTRIES = {
    "attention": Entry(calls.attention, 30, 100, moves=True),
    "changed": Entry(changes.changed, 6, 27),
    "statistics": Entry(measures.statistics, 14, 33, moves=True),
    "layer": Entry(layers.layer, 14, 20, moves=True),
    "texts": Entry(layers.texts, 8, 27, moves=True),
    "heads off": Entry(heads.heads_off, 6, 27, moves=True),
    "observed": Entry(records.observed, 8, 17),
    "roads": Entry(roads.statistics_on_roads, 3, 8, seconds=5.0),
    "nn.MultiheadAttention": Entry(drop_ins.torch_nn, 6, 20, moves=True),
    "tutorials": Entry(drop_ins.tutorials, 2, 13),
    "hugging face": Entry(models.hugging_face, 3, 8, seconds=5.0, moves=True),
    "changed models": Entry(models.changed_models, 1.5, 4, seconds=5.0),
    "masks that are read": Entry(models.mask_readers, 1.5, 4, seconds=5.0),
    "heads of models off": Entry(heads.heads_of_models_off, 1.5, 5, seconds=5.0, moves=True),
    "generated": Entry(generated.generated, 1.5, 3, seconds=5.0),
    "overlapping": Entry(models.overlapping, 1, 3, seconds=5.0),
    "interleaved": Entry(models.interleaved, 1.5, 5, seconds=5.0),
    "ways": Entry(ways.ways, 8, 27),
    "compiled": Entry(graphs.compiled, 2, 2, seconds=10.0),
    "exported": Entry(graphs.exported, 1.5, 1, seconds=10.0),
    "ranks": Entry(ranks.ranks, 2, 4, seconds=5.0),
    "damaged census": Entry(files.damaged_census, 1, 4, seconds=5.0),
    "text file": Entry(files.text_file, 1, 4, seconds=5.0),
    "continued census": Entry(files.continued_census, 1, 4, seconds=5.0),
    "gguf": Entry(models.gguf_file, 1, 4, seconds=5.0),
    "weights": Entry(calls.weights, 6, 40, moves=True),
}
