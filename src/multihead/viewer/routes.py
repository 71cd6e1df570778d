"""The routes of the viewer's server: records, statistics of heads, and any part of any attention map."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from starlette.routing import Route

from multihead.probes.blocks import CancelledError
from multihead.record.analysis.similar import describe_layer_numbers
from multihead.viewer import downloads
from multihead.viewer.levels import FINEST_STORED_LEVEL, MAX_BYTES_IN_MEMORY, Array, MemoryBudget, number_of_levels
from multihead.viewer.payload import (
    MARGIN_STATISTICS,
    RecordedRun,
    changed_heads,
    describe_run,
    describe_sample,
    describe_view,
    heads_looking_at,
    margin_of_map,
    nearest_heads,
    small_map_level,
    stored_small_maps,
    table_rows_of_heads,
    weights_per_cell,
)
from multihead.viewer.pyramid import LevelBuilder, SampleMapLevels, describe_building_progress
from multihead.viewer.query_params import NotFoundError, NotReadyError, parse_flag, parse_number, parse_range
from multihead.viewer.responses import download_response, floats_response, page_response
from multihead.viewer.security import json_response
from multihead.viewer.share import MAX_BYTES, SharedHead, name_shared_file, shared_page
from multihead.viewer.site import WebSite
from multihead.viewer.tiles import (
    ArrayCache,
    WorkerThreads,
    fine_tile,
    maps_of_all_heads,
    tiles_per_side,
    weights_of_query,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from multihead.errors import MultiheadError
    from multihead.record.sample import SampleRecord

Writer = TypeVar("Writer")


class Viewer(WebSite):
    """Handles the requests of the page for some records.

    Args:
        runs: the records.
        lang: the page's language, "en" or "zh".
        progress: called with (heads done, total heads) while coarse levels are built.
    """

    def __init__(self, runs: Sequence[RecordedRun], *, lang: str, progress: Callable[[float, int], None]) -> None:
        self.runs = runs
        self.lang = lang
        self.builder = LevelBuilder(progress)
        self.workers = WorkerThreads(idle=self.builder.build_strip)
        self.slow_workers = WorkerThreads(1)  # for computations that take seconds, so that no tile waits for them
        super().__init__(self.workers, self.slow_workers)
        self.array_cache = ArrayCache()
        self.memory_budget = MemoryBudget(MAX_BYTES_IN_MEMORY)
        self._described: dict[tuple[int, int], dict[str, Any]] = {}

    def routes(self) -> list[Route]:
        """Return the routes, relative to the token."""
        sample = "/api/runs/{run}/samples/{sample}"
        head = f"{sample}/heads/{{layer}}/{{head}}"
        return [
            Route("/", self.index),
            Route("/static/{folder}/{name}", self.static),
            Route("/api/view", self.list_records),
            Route(sample, self.sample),
            Route(f"{sample}/levels", self.levels),
            Route(f"{sample}/layers/{{layer}}/maps", self.maps),
            Route(f"{sample}/table.{{form}}", self.table),
            Route(f"{sample}/changed/{{other}}", self.list_changed_heads),
            Route(f"{sample}/looking", self.list_looking_heads),
            Route(f"{sample}/share", self.share),
            Route(f"{head}/tile", self.tile),
            Route(f"{head}/row", self.weights_of_query),
            Route(f"{head}/margins/{{name}}", self.margin),
            Route(f"{head}/weights.{{form}}", self.weights),
            Route(f"{head}/nearest", self.list_nearest_heads),
        ]

    async def index(self, request: Request) -> Response:
        """Return the page."""
        return page_response(self.lang)

    async def list_records(self, request: Request) -> Response:
        """Describe the viewer and its records."""
        return json_response(describe_view([describe_run(run) for run in self.runs], self.lang, served=True))

    async def sample(self, request: Request) -> Response:
        """Describe a sample and start building its coarse levels."""
        place = run, sample = self._requested_sample(request)
        self._start_building_levels(*place)

        if place not in self._described:
            await self._compute_in_worker(
                request, ("sample", *place), lambda _: self._cached_description(run, sample), by=self.slow_workers
            )
        return json_response(self._described[place])

    def _cached_description(self, run: int, sample: int) -> dict[str, Any]:
        # The description is stored even if the request was cancelled, so that loading the page again is faster.
        if (run, sample) not in self._described:
            self._described[run, sample] = describe_sample(self.runs[run], sample, self.lang)
        return self._described[run, sample]

    async def levels(self, request: Request) -> Response:
        """Return the progress of a sample's coarse levels."""
        place = self._requested_sample(request)
        return json_response(
            describe_building_progress(self._start_building_levels(*place), self.builder.building_error(place))
        )

    async def maps(self, request: Request) -> Response:
        """Return the small maps of all heads of a layer."""
        place = run, sample, layer, one = self._requested_layer(request)

        def compute_maps(cancelled: Callable[[], bool]) -> Array:
            return self._small_maps(run, sample, layer, cancelled)

        return floats_response(
            await self._cached_or_computed(request, ("maps", *place[:3]), compute_maps), weights_per_cell(one)
        )

    def _small_maps(self, run: int, sample: int, layer: int, cancelled: Callable[[], bool]) -> Array:
        """Return the small maps of a layer, (heads, rows, columns), given the layer's index in the record."""
        one = self.runs[run].record.layers[layer].sample(sample)
        pooled, level = stored_small_maps(one), small_map_level(one)
        if pooled is not None:
            values: Array = pooled.float().numpy()
            return values
        _require_map(one)
        if level < FINEST_STORED_LEVEL:
            return maps_of_all_heads(one, level, cancelled=cancelled)
        pyramid = self._require_levels(run, sample)
        if not all(pyramid.is_built(layer, head) for head in range(one.num_heads)):
            raise self._missing_levels_error(run, sample)
        levels = pyramid.levels_of_layer(layer)
        return np.stack([levels.block_means(head, level) for head in range(one.num_heads)])

    async def tile(self, request: Request) -> Response:
        """Return a tile of a head's map."""
        run, sample, layer, head, one = self._requested_head(request)
        params = request.query_params
        pooled = stored_small_maps(one)
        if pooled is not None and not one.keeps_weights:  # the record stores only this level of the map, in one tile
            return floats_response(pooled[head].float().numpy())
        _require_map(one)
        level = parse_number("level", params.get("level"), below=number_of_levels(one.num_queries, one.num_keys))
        row = parse_number("row of tiles", params.get("row"), below=tiles_per_side(one.num_queries, level))
        column = parse_number("column of tiles", params.get("column"), below=tiles_per_side(one.num_keys, level))
        sink = parse_flag("sink", params.get("sink"), default=True)
        if number_of_levels(one.num_queries, one.num_keys) > FINEST_STORED_LEVEL:
            self._require_levels(run, sample).move_to_front((layer, head))
        if level >= FINEST_STORED_LEVEL:
            pyramid = self._require_levels(run, sample)
            if not pyramid.is_built(layer, head):
                raise self._missing_levels_error(run, sample)
            return floats_response(pyramid.levels_of_layer(layer).tile(head, level, row, column, sink=sink))
        return floats_response(
            await self._cached_or_computed(
                request,
                ("tile", run, sample, layer, head, level, row, column, sink),
                lambda cancelled: fine_tile(one, head, level, row=row, column=column, sink=sink, cancelled=cancelled),
            )
        )

    async def weights_of_query(self, request: Request) -> Response:
        """Return the attention weights of one query."""
        *place, one = self._requested_head(request)
        _require_map(one)
        query = parse_number("query", request.query_params.get("query"), below=one.num_queries)
        return floats_response(
            await self._compute_in_worker(
                request, ("row", *place, query), lambda _: weights_of_query(one, place[-1], query)
            )
        )

    async def margin(self, request: Request) -> Response:
        """Return a statistic per key or per query, which is drawn at a margin of a head's map."""
        *_, head, one = self._requested_head(request)
        name = request.path_params["name"]
        if name not in MARGIN_STATISTICS or name not in one.statistics:
            raise NotFoundError(
                f"The record has no statistic {name[:40]!r} per token.", f"Request {' or '.join(MARGIN_STATISTICS)}."
            )
        return floats_response(margin_of_map(one, head, name).numpy())

    async def table(self, request: Request) -> Response:
        """Return the statistics of every head as a CSV or JSON file."""
        run, sample = self._requested_sample(request)
        form, write = _requested_format(request, downloads.TABLE_WRITERS)
        rows = await self._compute_in_worker(
            request, ("table", run, sample), lambda _: table_rows_of_heads(self.runs[run], sample), by=self.slow_workers
        )
        return download_response(write(rows), f"heads-{sample}", form)

    async def list_changed_heads(self, request: Request) -> Response:
        """Return the heads that differ most from those of another record."""
        run, sample = self._requested_sample(request)
        other = parse_number("record", request.path_params["other"], below=len(self.runs))
        parse_number("sample", str(sample), below=self.runs[other].num_samples)
        top = parse_number("count of heads", request.query_params.get("top"), minimum=1, below=101, default=12)

        def rank_heads_by_change(cancelled: Callable[[], bool]) -> dict[str, Any]:
            stop = partial(_raise_if, cancelled)
            return changed_heads(self.runs[run], self.runs[other], sample, top, lang=self.lang, progress=stop)

        return json_response(
            await self._compute_in_worker(
                request, ("changed", run, sample, other, top), rank_heads_by_change, by=self.slow_workers
            )
        )

    async def list_looking_heads(self, request: Request) -> Response:
        """Return the heads that look most at a token of the main text."""
        run, sample = self._requested_sample(request)
        longest = max(layer.sample(sample).num_keys for layer in self.runs[run].record.layers)
        key = parse_number("key", request.query_params.get("key"), below=longest)

        def find_heads(cancelled: Callable[[], bool]) -> dict[str, Any]:
            layers = self._cached_description(run, sample)["layers"]
            return heads_looking_at(self.runs[run], sample, key, layers, partial(_raise_if, cancelled))

        found = await self._compute_in_worker(request, ("looking", run, sample, key), find_heads, by=self.slow_workers)
        return json_response(found)

    async def weights(self, request: Request) -> Response:
        """Return the weights in a part of a head's map as a CSV or JSON file."""
        run, sample, layer, head, one = self._requested_head(request)
        form, write = _requested_format(request, downloads.WEIGHT_WRITERS)
        _require_map(one)
        queries = parse_range("queries", request.query_params.get("queries"), one.num_queries)
        keys = parse_range("keys", request.query_params.get("keys"), one.num_keys)
        downloads.check_download_size(queries, keys)
        text = write(
            one, head, queries=queries, keys=keys, query_tokens=one.query_text.tokens, key_tokens=one.text.tokens
        )
        return download_response(text, f"weights-{sample}-L{self._number_of_layer(run, layer)}H{head}", form)

    async def list_nearest_heads(self, request: Request) -> Response:
        """Return the heads whose weights are most similar to those of one head."""
        run, sample, layer, head, one = self._requested_head(request)
        _require_map(one)
        top = parse_number("count of heads", request.query_params.get("top"), minimum=1, below=101, default=5)
        found = await self._compute_in_worker(
            request,
            ("nearest", run, sample, layer, head, top),
            lambda _: nearest_heads(self.runs[run], sample, self._number_of_layer(run, layer), head, top),
            by=self.slow_workers,
        )
        return json_response(found)

    async def share(self, request: Request) -> Response:
        """Return the page with the view of one head, or of two compared heads, as one file of at most `most` bytes."""
        run, sample = self._requested_sample(request)
        params = request.query_params
        other = parse_number("record", params.get("run"), below=len(self.runs), default=run)
        parse_number("sample", str(sample), below=self.runs[other].num_samples)
        most = parse_number("size", params.get("most"), minimum=1, below=MAX_BYTES + 1, default=MAX_BYTES)
        shown = [run] if other == run else [run, other]

        def write_page(cancelled: Callable[[], bool]) -> tuple[str, bytes]:
            heads = [self._find_shared_head(run, sample, 0, params.get("a"), cancelled)]
            if params.get("b"):
                heads.append(self._find_shared_head(other, sample, len(shown) - 1, params.get("b"), cancelled))

            def maps_if_built(place: int, layer: int) -> tuple[Array, tuple[int, int]] | None:
                index = self._layer_index_by_number(shown[place])[layer]
                block = weights_per_cell(self.runs[shown[place]].record.layers[index].sample(sample))
                try:
                    return self._small_maps(shown[place], sample, index, cancelled), block
                except NotReadyError:
                    return None  # the levels are not built yet: the file shows glyphs instead of small maps

            runs = [describe_run(self.runs[each]) for each in shown]
            page = shared_page(
                heads,
                runs=[one | {"samples": [one["samples"][sample]]} for one in runs],
                samples=[self._cached_description(each, sample) for each in shown],
                small=maps_if_built,
                place=params.get("place", ""),
                lang=self.lang,
                max_bytes=most,
            )
            return name_shared_file(str(runs[0]["title"] or runs[0]["name"]), heads), page

        name, page = await self._compute_in_worker(
            request, ("share", run, sample, str(params)), write_page, by=self.slow_workers
        )
        return download_response(iter([page]), name, "html")

    def _find_shared_head(
        self, run: int, sample: int, place: int, given: str | None, cancelled: Callable[[], bool]
    ) -> SharedHead:
        """Find a head given as "layer.head", for a file in which the head's record has the index `place`."""
        layer, _, head = (given or "").partition(".")
        numbers = self._layer_index_by_number(run)
        chosen = parse_number("layer", layer, below=max(numbers) + 1)
        if chosen not in numbers:
            raise NotFoundError(
                f"There is no layer {chosen} in this record.", f"Give {describe_layer_numbers(list(numbers))}."
            )
        index = numbers[chosen]
        one = self.runs[run].record.layers[index].sample(sample)
        _require_map(one)
        which = parse_number("head", head, below=one.num_heads)

        def compute_tile(level: int, row: int, column: int, *, sink: bool) -> Array:
            if level < FINEST_STORED_LEVEL:
                return fine_tile(one, which, level, row=row, column=column, sink=sink, cancelled=cancelled)
            pyramid = self._require_levels(run, sample)
            if not pyramid.is_built(index, which):
                raise self._missing_levels_error(run, sample)
            return pyramid.levels_of_layer(index).tile(which, level, row, column, sink=sink)

        return SharedHead(place, chosen, which, one, compute_tile)

    def _layer_index_by_number(self, run: int) -> dict[int, int]:
        """Return the index of each layer in the record, by its number."""
        return {layer.number: index for index, layer in enumerate(self.runs[run].record.layers)}

    def _requested_sample(self, request: Request) -> tuple[int, int]:
        run = parse_number("run", request.path_params["run"], below=len(self.runs))
        return run, parse_number("sample", request.path_params["sample"], below=self.runs[run].num_samples)

    def _requested_layer(self, request: Request) -> tuple[int, int, int, SampleRecord]:
        """Return the requested indices of run, sample and layer, and the layer's record of the sample."""
        run, sample = self._requested_sample(request)
        layers, places = self.runs[run].record.layers, self._layer_index_by_number(run)
        chosen = parse_number("layer", request.path_params["layer"], below=max(places) + 1)
        if chosen not in places:
            raise NotFoundError(
                f"There is no layer {chosen} in this record.", f"Give {describe_layer_numbers(list(places))}."
            )
        return run, sample, places[chosen], layers[places[chosen]].sample(sample)

    def _number_of_layer(self, run: int, place: int) -> int:
        return self.runs[run].record.layers[place].number

    def _requested_head(self, request: Request) -> tuple[int, int, int, int, SampleRecord]:
        run, sample, layer, one = self._requested_layer(request)
        return run, sample, layer, parse_number("head", request.path_params["head"], below=one.num_heads), one

    def _start_building_levels(self, run: int, sample: int) -> SampleMapLevels | None:
        """Return a sample's levels and start building them; None if q and k were not kept."""
        shown = self.runs[run]
        if not shown.keeps_weights(sample):
            return None
        pyramid = self.builder.queue_sample(
            (run, sample), lambda: SampleMapLevels(shown.record, sample, shown.folder, self.memory_budget)
        )
        self.workers.announce_background_work()
        return pyramid

    def _require_levels(self, run: int, sample: int) -> SampleMapLevels:
        pyramid = self._start_building_levels(run, sample)
        assert pyramid is not None  # not None, because callers check that q and k were kept
        return pyramid

    def _missing_levels_error(self, run: int, sample: int) -> MultiheadError:
        failure = self.builder.building_error((run, sample))
        if failure is not None:
            return NotFoundError(
                f"The coarse levels could not be built: {failure}", "Zoom in: finer levels do not need them."
            )
        progress = describe_building_progress(self._start_building_levels(run, sample))
        share = int(100 * progress["done"] / max(1, progress["total"]))
        return NotReadyError(f"The coarse levels are being built, {share} % are done.", "Try again in a second.")

    async def _cached_or_computed(
        self, request: Request, key: Hashable, compute: Callable[[Callable[[], bool]], Array]
    ) -> Array:
        """Return the array of a key from the cache, or compute it in a worker thread and cache it."""

        def compute_and_cache(cancelled: Callable[[], bool]) -> Array:
            made = compute(cancelled)
            self.array_cache.put(key, made)
            return made

        cached = self.array_cache.get(key)
        return (
            cached
            if cached is not None
            else cast("Array", await self._compute_in_worker(request, key, compute_and_cache))
        )

    async def _compute_in_worker(
        self,
        request: Request,
        key: Hashable,
        compute: Callable[[Callable[[], bool]], object],
        *,
        by: WorkerThreads | None = None,
    ) -> Any:
        """Run a computation in the threads for maps, or in `by`; it is cancelled when the client disconnects."""
        return await self.compute(request, by or self.workers, key, compute)


def _raise_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise CancelledError


def _require_map(sample: SampleRecord) -> None:
    if not sample.keeps_weights:
        raise NotFoundError(
            "The record has no q and k, so there is no map.", 'Save the record with keep="all" to see its maps.'
        )


def _requested_format(request: Request, forms: Mapping[str, Writer]) -> tuple[str, Writer]:
    form = request.path_params["form"]
    if form not in forms:
        raise NotFoundError(f"There is no export in the format {form[:40]!r}.", f"Request {' or '.join(forms)}.")
    return form, forms[form]
