"""Write the types that the scripts of the pages are checked with: what Python sends to them, and the elements by id.

    python -m tools.page_types            writes tools/page_types.d.ts
    python -m tools.page_types --check    fails if the file is not what would be written

The shapes of what is sent are the typed dictionaries of `multihead.viewer.page_types`, and the elements are those of
the templates. TypeScript reads the file, so that a field or an id that is renamed on one side fails `make check`.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from multihead.viewer import page_types
from multihead_lab import page_types as page_types_of_lab

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tools" / "page_types.d.ts"
TEMPLATES = sorted((ROOT / "src").rglob("*.html"))

# The function that stands before the script of the widget, see `multihead.viewer.widget.page.javascript_module`.
BUNDLE_OF_WIDGET = """declare function viewer(host: object): {
  inView(): any;
  select(chosen: any): void;
};"""


class _Ids(HTMLParser):
    """Collect id -> the tags that have it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, set[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value and "{" not in value:
                self.tags.setdefault(value, set()).add(tag)


def _type_of_tag(tag: str) -> str:
    return f"HTMLElementTagNameMap['{tag}']"


def elements_by_id() -> str:
    """Declare the element of each id of the templates; one that is another tag on another page is both."""
    ids = _Ids()
    for path in TEMPLATES:
        ids.feed(re.sub(r"\{%.*?%\}", "", path.read_text("utf-8")))
    lines = [f"  {name}: {' & '.join(map(_type_of_tag, sorted(tags)))};" for name, tags in sorted(ids.tags.items())]
    return "\n".join(["interface ElementsById {", *lines, "}"])


def sent_types() -> str:
    """Declare the typed dictionaries, each with all its fields."""
    found = [
        each
        for module in (page_types, page_types_of_lab)
        for each in vars(module).values()
        if is_typeddict(each) and each.__module__ == module.__name__
    ]
    return "\n\n".join(map(_interface, found))


def _interface(kind: Any) -> str:
    fields = []
    for name, hint in get_type_hints(kind, include_extras=True).items():
        optional = get_origin(hint) is NotRequired
        fields.append(f"  {name}{'?' if optional else ''}: {_typescript(get_args(hint)[0] if optional else hint)};")
    return "\n".join([f"/** {kind.__doc__} */", f"interface {kind.__name__} {{", *fields, "}"])


_PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", types.NoneType: "null", Any: "any"}


def _typescript(hint: Any) -> str:
    """Translate the type of a value that is sent as JSON."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if is_typeddict(hint):
        return str(hint.__name__)
    origin, of = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(map(_typescript, of))
    if origin is Literal:
        return " | ".join(f"'{each}'" for each in of)
    if origin in (dict, Mapping):
        return f"Record<string, {_typescript(of[1])}>"
    if origin is tuple and of[-1] is not Ellipsis:
        return f"[{', '.join(map(_typescript, of))}]"
    if origin in (list, tuple, Sequence):
        inner = _typescript(of[0])
        return f"({inner})[]" if " | " in inner else f"{inner}[]"
    raise TypeError(f"{hint} is no type of a value that is sent as JSON.")


def declarations() -> str:
    """Return the whole file."""
    parts = ("// Written by tools/page_types.py.", BUNDLE_OF_WIDGET, elements_by_id(), sent_types())
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the file, or compare it."""
    written = declarations()
    if "--check" not in sys.argv[1:]:
        FILE.write_text(written, "utf-8")
    elif not FILE.exists() or FILE.read_text("utf-8") != written:
        sys.exit(f"{FILE.name} is not what Python sends. Run python -m tools.page_types, and correct the scripts.")


if __name__ == "__main__":
    main()
