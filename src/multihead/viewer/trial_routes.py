"""The routes of the server of `multihead try`: for texts, changes of heads, maps, sweeps and continuations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from starlette.responses import StreamingResponse
from starlette.routing import Route

from multihead.errors import ArgumentError, InputError
from multihead.locale.texts import check_language
from multihead.viewer.page_types import SweepEstimates, TrialChange
from multihead.viewer.query_params import NotFoundError, parse_number
from multihead.viewer.responses import floats_response, page_response
from multihead.viewer.security import json_response
from multihead.viewer.site import WebSite, WriteLine
from multihead.viewer.tiles import IsCancelled, WorkerThreads
from multihead.viewer.trial import MAX_TOKENS, TextRun, Trial, parse_head_factors

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from multihead.viewer.levels import Array


class TrialSite(WebSite):
    """Handles the requests of the page of `multihead try`.

    Args:
        trial: the model and its texts. One thread runs the model.
        lang: the language of the page, unless its address has another one.
    """

    def __init__(self, trial: Trial, lang: str = "en") -> None:
        self.trial, self.lang = trial, lang
        self.model_thread = WorkerThreads(1)
        super().__init__(self.model_thread)

    def routes(self) -> list[Route]:
        """Return the routes, relative to the token."""
        return [
            Route("/", self.send_page),
            Route("/static/{folder}/{name}", self.send_static_file),
            Route("/api/model", self.send_model),
            Route("/api/text", self.send_text),
            Route("/api/change", self.send_change),
            Route("/api/maps", self.send_maps),
            Route("/api/estimates", self.send_estimates),
            Route("/api/sweep", self.send_sweep),
            Route("/api/continuation", self.send_continuation),
        ]

    async def send_page(self, request: Request) -> Response:
        """Return the page."""
        return page_response(self._requested_language(request), "try")

    async def send_model(self, request: Request) -> Response:
        """Describe the model, and the text to begin with."""
        return json_response(self.trial.describe_model(self._requested_language(request)))

    async def send_text(self, request: Request) -> Response:
        """Read a text with all heads on."""
        lang = self._requested_language(request)
        return json_response(await self._compute_on_text(request, lambda run, _: self.trial.describe_text(run, lang)))

    async def send_change(self, request: Request) -> Response:
        """Compare the model with some heads off with the model as it is."""
        factors, place = parse_head_factors(request.query_params.get("heads", "")), _requested_token(request)
        lang = self._requested_language(request)

        def compare(run: TextRun, is_cancelled: IsCancelled) -> TrialChange:
            return self.trial.change_heads(run, factors, place, is_cancelled, lang=lang)

        return json_response(await self._compute_on_text(request, compare))

    async def send_maps(self, request: Request) -> Response:
        """Return a head's map before and after a change."""
        params = request.query_params
        factors = parse_head_factors(params.get("heads", ""))
        layer, head, row = (
            parse_number(name, params.get(name), below=1 << 16, default=default)
            for name, default in (("layer", None), ("head", None), ("sentence", 0))
        )

        def compute_maps(run: TextRun, is_cancelled: IsCancelled) -> Array:
            return self.trial.maps_before_and_after(run, factors, layer, head, row, is_cancelled)

        return floats_response(await self._compute_on_text(request, compute_maps))

    async def send_estimates(self, request: Request) -> Response:
        """Estimate the effect of every head by a gradient."""
        place = _requested_token(request)

        def estimate(run: TextRun, is_cancelled: IsCancelled) -> SweepEstimates:
            return self.trial.estimate_effects(run, place, is_cancelled)

        return json_response(await self._compute_on_text(request, estimate))

    async def send_sweep(self, request: Request) -> Response:
        """Switch off every head once, and write a line for each layer as soon as it is done."""
        place = _requested_token(request)

        def read(run: TextRun, is_cancelled: IsCancelled) -> TextRun:
            self.trial.check_token(run, place)  # raises errors before the streamed response begins
            return run

        run = await self._compute_on_text(request, read)

        def write_layers(is_cancelled: IsCancelled, write: WriteLine) -> None:
            for line in self.trial.sweep(run, place, is_cancelled):
                write(line)

        return _lines_response(self.stream_lines(self.model_thread, write_layers))

    async def send_continuation(self, request: Request) -> Response:
        """Continue the text with all heads on and with some off, and write each token as soon as it is known."""
        factors = parse_head_factors(request.query_params.get("heads", ""))
        run = await self._compute_on_text(request)
        self.trial.check_continuation(run, factors)  # raises errors before the streamed response begins

        def write_tokens(is_cancelled: IsCancelled, write: WriteLine) -> None:
            self.trial.continue_text(run, factors, lambda side, tokens: write({side: tokens}), is_cancelled)
            write({"done": True})

        return _lines_response(self.stream_lines(self.model_thread, write_tokens))

    def _requested_language(self, request: Request) -> str:
        lang = request.query_params.get("lang", self.lang)
        check_language(lang)
        return lang

    async def _compute_on_text(
        self, request: Request, compute: Callable[[TextRun, IsCancelled], object] = lambda run, _: run
    ) -> Any:
        """Let the model read the requested text, and return the result of `compute` on it: by default what it read."""
        text = request.query_params.get("text", "")

        def read_and_compute(is_cancelled: IsCancelled) -> object:
            try:
                run = self.trial.read_text(text, is_cancelled)
            except InputError as error:  # the text is a part of the request, so it is not the server that failed
                raise ArgumentError(error.finding, error.mend) from error
            return compute(run, is_cancelled)

        return await self.compute_in_thread(request, self.model_thread, read_and_compute)


def _requested_token(request: Request) -> int | None:
    """Return the index of the chosen token; None for the last one."""
    given = request.query_params.get("at")
    try:
        return None if given is None else parse_number("token", given, below=MAX_TOKENS)
    except NotFoundError as error:
        raise ArgumentError(error.finding, error.mend) from error


def _lines_response(lines: AsyncIterator[bytes]) -> Response:
    """Return newline-delimited JSON, streamed."""
    return StreamingResponse(lines, media_type="application/x-ndjson")
