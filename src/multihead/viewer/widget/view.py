"""The viewer as a widget in a notebook: `Record.view` returns it.

A selection that Python sets is not reported back by a view, unless Python left a part of the selection open, such as
the range of keys. Two linked views may differ in height, and so in the queries in view: if each view reported the part
of the other's selection that it shows, they would update each other forever.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import anywidget
import traitlets
from IPython.display import display

from multihead.errors import ArgumentError
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import check_language, section, text
from multihead.viewer.payload import RecordedRun
from multihead.viewer.widget import static_output
from multihead.viewer.widget.page import javascript_module, markup_of_page, stylesheet
from multihead.viewer.widget.requests import InProcessServer, shared_server

if TYPE_CHECKING:
    from multihead.observation.record import Record


class Selection(NamedTuple):
    """A head, and the part of its map in view.

    Attributes:
        layer: number of the head's layer.
        head: index of the head in the layer.
        queries: the queries in view; None before the picture is drawn.
        keys: the keys in view; None before the picture is drawn.
        query: the chosen query, whose weights the text shows; None before the picture is drawn.

    >>> Selection(17, 4, keys=slice(0, 64))
    Selection(layer=17, head=4, queries=None, keys=slice(0, 64, None), query=None)
    """

    layer: int
    head: int
    queries: slice | None = None
    keys: slice | None = None
    query: int | None = None


def _selection_to_json(selection: Selection | None, widget: object) -> dict[str, Any] | None:
    if selection is None:
        return None
    parts = selection._asdict().items()
    return {name: [each.start, each.stop] if isinstance(each, slice) else each for name, each in parts}


def _selection_from_json(found: dict[str, Any] | None, widget: object) -> Selection | None:
    if found is None:
        return None
    given: dict[str, Any] = {name: slice(*each) if isinstance(each, list) else each for name, each in found.items()}
    return Selection(**given)


class View(anywidget.AnyWidget):
    """The viewer in a notebook cell: all heads, the map of each head down to single weights, the text, comparisons.

    Its requests travel over the connection to the kernel, and no port is opened. The cell also gets a picture and a
    table, which a saved notebook shows; they are hidden as long as the widget is shown.

    Args:
        records: the records; with two or more, the same head of two of them can be compared.
        lang: the language of the page, "en" or "zh".
        height: the height of the widget in pixels; it can be dragged.
        linked: another view, whose selection is then synchronised with this view in both directions.

    Attributes:
        selection: the head and the part of its map in view, None for all heads. Setting it moves the picture: a
            `Selection`, or a tuple such as (layer, head) or (layer, head, queries, keys, query).

    Raises:
        ArgumentError: a record without layers, or an invalid argument.
    """

    _esm = traitlets.Unicode().tag(sync=True)
    _page = traitlets.Dict().tag(sync=True)
    selection = traitlets.Instance(Selection, allow_none=True).tag(
        sync=True, to_json=_selection_to_json, from_json=_selection_from_json
    )

    def __init__(
        self, *records: Record, lang: str = "en", height: int = 640, linked: View | None = None, **options: Any
    ) -> None:
        self._server: InProcessServer | None = None
        self._pending_answers: dict[str, Future[None]] = {}
        check_language(lang)
        if isinstance(height, bool) or not isinstance(height, int) or height < 240:
            raise ArgumentError(f"height is {height!r}.", "Give a number of pixels from 240 on.")
        if linked is not None and not isinstance(linked, View):
            raise ArgumentError(f"linked is {type(linked).__name__}, and must be a view.", "Give a result of view().")
        for record in records:
            if not record.layers or not record.layers[0].num_samples:
                raise ArgumentError(
                    "The record has no sample to view.",
                    'Run the model inside observe first, and keep "all" or "statistics".',
                )
        self._records = records
        self._lang = lang
        self._mark = secrets.token_hex(8)
        runs = [RecordedRun(name, record) for name, record in zip(_names_of_records(records), records, strict=True)]
        self._server = shared_server(runs, lang)
        page = {
            "html": markup_of_page(lang),
            "css": stylesheet(),
            "texts": {**section(lang, "common", "page", "viewer"), "silent": text("widget.silent", lang)},
            "lang": "zh-CN" if lang == "zh" else lang,
            "height": height,
            "mark": self._mark,
        }
        super().__init__(_esm=javascript_module(), _page=page, **options)
        self.on_msg(self._answer_message)
        if linked is not None:
            self.selection = linked.selection
            traitlets.link((self, "selection"), (linked, "selection"))

    def close(self) -> None:
        """Remove the widget and stop its computations."""
        for pending in list(self._pending_answers.values()):
            pending.cancel()
        self._server = None
        super().close()

    def __repr__(self) -> str:
        """Return the sentence that a notebook shows if it cannot run the widget."""
        return text("widget.plain", self._lang, title=escape_controls(self._records[0].title) or "a record")

    def _ipython_display_(self) -> None:
        if self._server is None:
            return  # the widget was closed
        # The page's first request takes longest, so its computation starts before the page has loaded.
        self._server.start_answering("api/runs/0/samples/0", lambda part, body: None)
        shown = self._repr_mimebundle_()
        bundle = shown[0] if isinstance(shown, tuple) else shown
        display(bundle, raw=True)
        static = static_output.static_html(self._records[0], mark=self._mark, lang=self._lang)
        display({"text/html": static, "text/plain": repr(self._records[0])}, raw=True)

    @traitlets.validate("selection")
    def _valid_selection(self, proposal: dict[str, Any]) -> Selection | None:
        chosen: Selection | None = proposal["value"]
        if chosen is None:
            return None
        layer = self._records[0][chosen.layer]
        if not 0 <= chosen.head < layer.num_heads:
            raise ArgumentError(
                f"There is no head {chosen.head} in layer {chosen.layer}.", f"Give 0 to {layer.num_heads - 1}."
            )
        one = layer.sample()
        return chosen._replace(
            queries=_checked_slice("queries", chosen.queries, one.num_queries),
            keys=_checked_slice("keys", chosen.keys, one.num_keys),
            query=None if chosen.query is None else min(max(0, chosen.query), one.num_queries - 1),
        )

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; a tuple that is assigned to `selection` becomes a `Selection`."""
        if name == "selection" and isinstance(value, tuple) and not isinstance(value, Selection):
            value = Selection(*value)
        super().__setattr__(name, value)

    def _answer_message(self, widget: object, content: dict[str, Any], buffers: Sequence[bytes]) -> None:
        """Answer a request of the page, or cancel one that the page no longer needs."""
        if "cancel" in content:
            pending = self._pending_answers.pop(content["cancel"], None)
            if pending is not None:
                pending.cancel()
            return
        key, requests = content["id"], self._server
        if requests is None:
            return

        def send_part(part: dict[str, Any], body: bytes) -> None:
            self.send({"id": key, **part}, [body])

        pending = self._pending_answers[key] = requests.start_answering(content["path"], send_part)
        # the callback runs at once if the request has ended already
        pending.add_done_callback(lambda _: self._pending_answers.pop(key, None))


def _names_of_records(records: Sequence[Record]) -> list[str]:
    """Return a name per record: its title, numbered where several have the same."""
    titles = [record.title or "record" for record in records]
    return [
        title if titles.count(title) == 1 else f"{title} {titles[: place + 1].count(title)}"
        for place, title in enumerate(titles)
    ]


def _checked_slice(name: str, chosen: slice | None, length: int) -> slice | None:
    """Return a slice with its start and stop as numbers within `length`; None stays None.

    Raises:
        ArgumentError: the slice has steps or is empty.
    """
    if chosen is None:
        return None
    start, stop, step = chosen.indices(length)
    if step != 1 or start >= stop:
        raise ArgumentError(
            f"{name} is {chosen}, and the map has {length:,} {name}.", "Give a slice without steps that is not empty."
        )
    return slice(start, stop)
