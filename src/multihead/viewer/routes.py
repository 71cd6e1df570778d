"""The routes of the viewer's server: records, statistics of heads, and any part of any attention map."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from starlette.routing import Route

from multihead.probes.choices import MARGINS_OF_MAP
from multihead.record.analysis.similar import describe_layer_numbers
from multihead.viewer import downloads
from multihead.viewer.levels import (
    FINEST_STORED_LEVEL,
    MAX_LEVEL_BYTES_IN_MEMORY,
    Array,
    LayerMapLevels,
    MemoryBudget,
    number_of_levels,
)
from multihead.viewer.page_types import LookingHeads, SampleDescription
from multihead.viewer.payload import (
    RecordedRun,
    changed_heads,
    describe_all_texts,
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
from multihead.viewer.pictures import rows_of_tokens
from multihead.viewer.pyramid import LevelBuilder, SampleMapLevels, describe_building_progress
from multihead.viewer.query_params import NotFoundError, NotReadyError, parse_flag, parse_number, parse_range
from multihead.viewer.responses import download_response, floats_response, page_response
from multihead.viewer.security import json_response
from multihead.viewer.share import MAX_SHARED_BYTES, SharedHead, name_shared_file, shared_page
from multihead.viewer.site import WebSite
from multihead.viewer.tiles import (
    ArrayCache,
    IsCancelled,
    WorkerThreads,
    as_float32,
    fine_tile,
    maps_of_all_heads,
    tiles_per_side,
    weights_of_queries,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

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
        self.workers = WorkerThreads(run_background_step=self.builder.build_strip)
        self.slow_workers = WorkerThreads(1)  # for computations that take seconds, so that no tile waits for them
        super().__init__(self.workers, self.slow_workers)
        self.array_cache = ArrayCache()
        self.memory_budget = MemoryBudget(MAX_LEVEL_BYTES_IN_MEMORY)
        self._described: dict[tuple[RecordedRun, int], SampleDescription] = {}
        self._of_all_texts: dict[RecordedRun, dict[str, Any]] = {}

    def routes(self) -> list[Route]:
        """Return the routes, relative to the token."""
        sample = "/api/runs/{run}/samples/{sample}"
        head = f"{sample}/heads/{{layer}}/{{head}}"
        return [
            Route("/", self.send_page),
            Route("/static/{folder}/{name}", self.send_static_file),
            Route("/api/view", self.send_records),
            Route("/api/runs/{run}/texts", self.send_all_texts),
            Route(sample, self.send_sample),
            Route(f"{sample}/levels", self.send_building_progress),
            Route(f"{sample}/layers/{{layer}}/maps", self.send_small_maps),
            Route(f"{sample}/table.{{form}}", self.send_table),
            Route(f"{sample}/changed/{{other}}", self.send_changed_heads),
            Route(f"{sample}/looking", self.send_looking_heads),
            Route(f"{sample}/pictures/{{text}}", self.send_weights_in_pictures),
            Route(f"{sample}/share", self.send_shared_page),
            Route(f"{head}/tile", self.send_tile),
            Route(f"{head}/row", self.send_weights_of_query),
            Route(f"{head}/margins/{{name}}", self.send_margin),
            Route(f"{head}/weights.{{form}}", self.send_weights),
            Route(f"{head}/nearest", self.send_nearest_heads),
        ]

    async def send_page(self, request: Request) -> Response:
        """Return the page."""
        return page_response(self.lang)

    async def send_records(self, request: Request) -> Response:
        """Describe the viewer and its records."""
        return json_response(describe_view([describe_run(run) for run in self.runs], self.lang, served=True))

    async def send_sample(self, request: Request) -> Response:
        """Describe a sample and start building its coarse levels."""
        run, sample = self._requested_sample(request)
        if run.keeps_weights(sample):
            self._start_building_levels(run, sample)
        if (run, sample) not in self._described:
            await self.compute_in_thread(request, self.slow_workers, lambda _: self._cached_description(run, sample))
        return json_response(self._described[run, sample])

    async def send_all_texts(self, request: Request) -> Response:
        """Describe the heads over all texts of a record."""
        run = self.runs[parse_number("run", request.path_params["run"], below=len(self.runs))]
        if run not in self._of_all_texts:
            found = await self.compute_in_thread(
                request, self.slow_workers, lambda _: describe_all_texts(run, self.lang)
            )
            self._of_all_texts[run] = found
        return json_response(self._of_all_texts[run])

    def _cached_description(self, run: RecordedRun, sample: int) -> SampleDescription:
        # The description is stored even if the request was cancelled, so that loading the page again is faster.
        if (run, sample) not in self._described:
            self._described[run, sample] = describe_sample(run, sample, self.lang)
        return self._described[run, sample]

    async def send_building_progress(self, request: Request) -> Response:
        """Return the progress of a sample's coarse levels."""
        run, sample = self._requested_sample(request)
        pyramid = self._start_building_levels(run, sample) if run.keeps_weights(sample) else None
        return json_response(describe_building_progress(pyramid))

    async def send_small_maps(self, request: Request) -> Response:
        """Return the small maps of all heads of a layer."""
        run, sample = self._requested_sample(request)
        layer, one = self._find_layer(run, sample, request.path_params["layer"])
        maps = await self._cached_or_computed(
            request, lambda is_cancelled: self._small_maps(run, sample, layer, is_cancelled)
        )
        return floats_response(maps, weights_per_cell(one))

    def _small_maps(self, run: RecordedRun, sample: int, layer: int, is_cancelled: IsCancelled) -> Array:
        """Return the small maps of a layer, (heads, rows, columns), given the layer's index in the record."""
        one = run.record.layers[layer].sample(sample)
        pooled, level = stored_small_maps(one), small_map_level(one)
        if pooled is not None:
            return as_float32(pooled)
        _require_map(one)
        if level < FINEST_STORED_LEVEL:
            return maps_of_all_heads(one, level, cancelled=is_cancelled)
        heads = range(one.num_heads)
        levels = self._built_levels(run, sample, layer, heads)
        return np.stack([levels.block_means(head, level) for head in heads])

    async def send_tile(self, request: Request) -> Response:
        """Return a tile of a head's map."""
        run, sample, layer, head, one = self._requested_head(request)
        params = request.query_params
        pooled = stored_small_maps(one)
        if pooled is not None and not one.keeps_weights:  # the record stores only this level of the map, in one tile
            return floats_response(as_float32(pooled[head]))
        _require_map(one)
        depth = number_of_levels(one.num_queries, one.num_keys)
        level = parse_number("level", params.get("level"), below=depth)
        row = parse_number("row of tiles", params.get("row"), below=tiles_per_side(one.num_queries, level))
        column = parse_number("column of tiles", params.get("column"), below=tiles_per_side(one.num_keys, level))
        sink = parse_flag("sink", params.get("sink"), default=True)
        if depth > FINEST_STORED_LEVEL:
            self._start_building_levels(run, sample).move_heads_to_front((layer, head))

        def compute_tile(is_cancelled: IsCancelled) -> Array:
            return self._tiles_of_head(run, sample, layer, head, is_cancelled)(level, row, column, sink=sink)

        if level >= FINEST_STORED_LEVEL:  # the tile is read from the stored levels
            return floats_response(compute_tile(lambda: False))
        return floats_response(await self._cached_or_computed(request, compute_tile))

    def _tiles_of_head(
        self, run: RecordedRun, sample: int, layer: int, head: int, is_cancelled: IsCancelled
    ) -> Callable[..., Array]:
        """Return a function that reads or computes a tile of a head's map, given level, row, column and sink=."""
        one = run.record.layers[layer].sample(sample)

        def tile(level: int, row: int, column: int, *, sink: bool) -> Array:
            if level >= FINEST_STORED_LEVEL:
                return self._built_levels(run, sample, layer, [head]).tile(head, level, row, column, sink=sink)
            return fine_tile(one, head, level, row=row, column=column, sink=sink, cancelled=is_cancelled)

        return tile

    async def send_weights_of_query(self, request: Request) -> Response:
        """Return the attention weights of one query."""
        *_, head, one = self._requested_head(request)
        _require_map(one)
        query = parse_number("query", request.query_params.get("query"), below=one.num_queries)
        queries = slice(query, query + 1)
        weights = await self.compute_in_thread(request, self.workers, lambda _: weights_of_queries(one, head, queries))
        return floats_response(weights[0])

    async def send_weights_in_pictures(self, request: Request) -> Response:
        """Return the weights of the query at a token, in all heads of the layers that read a text with pictures."""
        run, sample = self._requested_sample(request)

        def rows(is_cancelled: IsCancelled) -> Array:
            parts = self._cached_description(run, sample)["pictures"]
            part = parts[parse_number("text with pictures", request.path_params["text"], below=len(parts))]
            token = parse_number("query", request.query_params.get("query"), below=len(part["groups"]))
            ones = [self._find_layer(run, sample, str(number))[1] for number in part["layers"]]
            return as_float32(rows_of_tokens(ones, [token])[:, 0])

        return floats_response(await self._cached_or_computed(request, rows))

    async def send_margin(self, request: Request) -> Response:
        """Return a statistic per key or per query, which is drawn at a margin of a head's map."""
        *_, head, one = self._requested_head(request)
        name = request.path_params["name"]
        if name not in MARGINS_OF_MAP or name not in one.statistics:
            raise NotFoundError(
                f"The record has no statistic {name[:40]!r} per token.", f"Request {' or '.join(MARGINS_OF_MAP)}."
            )
        return floats_response(margin_of_map(one, head, name).numpy())

    async def send_table(self, request: Request) -> Response:
        """Return the statistics of every head as a CSV or JSON file."""
        run, sample = self._requested_sample(request)
        form, write = _requested_format(request, downloads.TABLE_WRITERS)
        rows = await self.compute_in_thread(request, self.slow_workers, lambda _: table_rows_of_heads(run, sample))
        return download_response(write(rows), f"heads-{sample}", form)

    async def send_changed_heads(self, request: Request) -> Response:
        """Return the heads that differ most from those of another record."""
        run, sample = self._requested_sample(request)
        other = self.runs[parse_number("record", request.path_params["other"], below=len(self.runs))]
        top = _requested_number_of_heads(request, default=12)
        return await self._slow_response(
            request, lambda is_cancelled: changed_heads(run, other, sample, top, is_cancelled, lang=self.lang)
        )

    async def send_looking_heads(self, request: Request) -> Response:
        """Return the heads that look most at a token of the main text."""
        run, sample = self._requested_sample(request)
        longest = max(layer.sample(sample).num_keys for layer in run.record.layers)
        key = parse_number("key", request.query_params.get("key"), below=longest)

        def find_heads(is_cancelled: IsCancelled) -> LookingHeads:
            layers = self._cached_description(run, sample)["layers"]
            return heads_looking_at(run, sample, key, layers, is_cancelled)

        return await self._slow_response(request, find_heads)

    async def send_weights(self, request: Request) -> Response:
        """Return the weights in a part of a head's map as a CSV or JSON file."""
        _, sample, _, head, one = self._requested_head(request)
        form, write = _requested_format(request, downloads.WEIGHT_WRITERS)
        _require_map(one)
        queries = parse_range("queries", request.query_params.get("queries"), one.num_queries)
        keys = parse_range("keys", request.query_params.get("keys"), one.num_keys)
        downloads.check_download_size(queries, keys)
        text = write(one, head, queries=queries, keys=keys)
        return download_response(text, f"weights-{sample}-L{int(request.path_params['layer'])}H{head}", form)

    async def send_nearest_heads(self, request: Request) -> Response:
        """Return the heads whose weights are most similar to those of one head."""
        run, sample, _, head, one = self._requested_head(request)
        _require_map(one)
        number, top = int(request.path_params["layer"]), _requested_number_of_heads(request, default=5)
        return await self._slow_response(request, lambda _: nearest_heads(run, sample, number, head, top))

    async def send_shared_page(self, request: Request) -> Response:
        """Return the page with the view of one head, or of two compared heads, as one file of at most `most` bytes."""
        run, sample = self._requested_sample(request)
        params = request.query_params
        other = self._requested_second_run(params.get("run"), run, sample)
        most = parse_number("size", params.get("most"), minimum=1, below=MAX_SHARED_BYTES + 1, default=MAX_SHARED_BYTES)
        shown = list(dict.fromkeys([run, other]))

        def write_page(is_cancelled: IsCancelled) -> tuple[str, bytes]:
            def find_head(run: RecordedRun, address: str) -> SharedHead:
                """Find a head given as "layer.head"."""
                layer, _, head = address.partition(".")
                index, one = self._find_layer(run, sample, layer)
                _require_map(one)
                which = parse_number("head", head, below=one.num_heads)
                tile = self._tiles_of_head(run, sample, index, which, is_cancelled)
                return SharedHead(shown.index(run), int(layer), which, one, tile)

            def maps_if_built(place: int, layer: int) -> tuple[Array, tuple[int, int]] | None:
                index, one = self._find_layer(shown[place], sample, str(layer))
                try:
                    return self._small_maps(shown[place], sample, index, is_cancelled), weights_per_cell(one)
                except NotReadyError:
                    return None  # the levels are not built yet: the file shows glyphs instead of small maps

            heads = [find_head(run, params.get("a", ""))]
            if params.get("b"):
                heads.append(find_head(other, params["b"]))
            runs = [describe_run(each) for each in shown]
            page = shared_page(
                heads,
                runs=[one | {"samples": [one["samples"][sample]]} for one in runs],
                samples=[self._cached_description(each, sample) for each in shown],
                small_maps_of_layer=maps_if_built,
                fragment=params.get("place", ""),
                lang=self.lang,
                max_bytes=most,
            )
            return name_shared_file(str(runs[0]["title"] or runs[0]["name"]), heads), page

        name, page = await self.compute_in_thread(request, self.slow_workers, write_page)
        return download_response(iter([page]), name, "html")

    def _requested_sample(self, request: Request) -> tuple[RecordedRun, int]:
        """Return the requested run, and the index of the requested sample."""
        run = self.runs[parse_number("run", request.path_params["run"], below=len(self.runs))]
        return run, parse_number("sample", request.path_params["sample"], below=run.num_samples)

    def _requested_second_run(self, given: str | None, run: RecordedRun, sample: int) -> RecordedRun:
        """Return the run that is compared with `run`, which is the default; the run has the sample too."""
        other = run if given is None else self.runs[parse_number("record", given, below=len(self.runs))]
        parse_number("sample", str(sample), below=other.num_samples)
        return other

    def _find_layer(self, run: RecordedRun, sample: int, number: str) -> tuple[int, SampleRecord]:
        """Find a layer by its number: returns its index in the record, and its record of the sample."""
        layers = run.record.layers
        numbers = [layer.number for layer in layers]
        chosen = parse_number("layer", number, below=max(numbers) + 1)
        if chosen not in numbers:
            raise NotFoundError(
                f"There is no layer {chosen} in this record.", f"Give {describe_layer_numbers(numbers)}."
            )
        return numbers.index(chosen), layers[numbers.index(chosen)].sample(sample)

    def _requested_head(self, request: Request) -> tuple[RecordedRun, int, int, int, SampleRecord]:
        """Return the requested run, the indices of sample, layer and head, and the layer's record of the sample."""
        run, sample = self._requested_sample(request)
        layer, one = self._find_layer(run, sample, request.path_params["layer"])
        return run, sample, layer, parse_number("head", request.path_params["head"], below=one.num_heads), one

    def _start_building_levels(self, run: RecordedRun, sample: int) -> SampleMapLevels:
        """Return the levels of a sample that kept q and k, and start building them."""
        pyramid = self.builder.queue_sample(
            (run, sample), lambda: SampleMapLevels(run.record, sample, run.levels_folder, self.memory_budget)
        )
        self.workers.announce_background_work()
        return pyramid

    def _built_levels(self, run: RecordedRun, sample: int, layer: int, heads: Sequence[int]) -> LayerMapLevels:
        """Return the levels of a layer, in which those of `heads` are built.

        Raises:
            NotReadyError: the levels of one of the heads are not built yet.
            NotFoundError: they could not be built.
        """
        pyramid = self._start_building_levels(run, sample)
        if all(pyramid.is_built(layer, head) for head in heads):
            return pyramid.levels_of_layer(layer)
        if pyramid.failure is not None:
            raise NotFoundError(
                f"The coarse levels could not be built: {pyramid.failure}", "Zoom in: finer levels do not need them."
            )
        share = int(100 * pyramid.num_built_heads / max(1, pyramid.num_heads))
        raise NotReadyError(f"The coarse levels are being built, {share} % are done.", "Try again in a second.")

    async def _cached_or_computed(self, request: Request, compute: Callable[[IsCancelled], Array]) -> Array:
        """Return the array of a request from the cache, or compute it in a worker thread and cache it."""
        address = str(request.url)

        def compute_and_cache(is_cancelled: IsCancelled) -> Array:
            made = compute(is_cancelled)
            self.array_cache.put(address, made)  # before the job ends, or a request in between would compute it again
            return made

        found = self.array_cache.get(address)
        return await self.compute_in_thread(request, self.workers, compute_and_cache) if found is None else found

    async def _slow_response(self, request: Request, compute: Callable[[IsCancelled], object]) -> Response:
        """Return as JSON the result of a computation that takes seconds."""
        return json_response(await self.compute_in_thread(request, self.slow_workers, compute))


def _require_map(sample: SampleRecord) -> None:
    if not sample.keeps_weights:
        raise NotFoundError(
            "The record has no q and k, so there is no map.", 'Save the record with keep="all" to see its maps.'
        )


def _requested_number_of_heads(request: Request, *, default: int) -> int:
    return parse_number("count of heads", request.query_params.get("top"), minimum=1, below=101, default=default)


def _requested_format(request: Request, forms: Mapping[str, Writer]) -> tuple[str, Writer]:
    form = request.path_params["form"]
    if form not in forms:
        raise NotFoundError(f"There is no export in the format {form[:40]!r}.", f"Request {' or '.join(forms)}.")
    return form, forms[form]
