"""What every self-contained page shares: its files, its template, and data that cannot become markup."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any

from multihead.optional import require

if TYPE_CHECKING:
    import jinja2


def json_in_script(data: dict[str, Any]) -> str:
    r"""Write JSON that is safe inside a script tag: no `<`, `>` or `&`, nothing beyond ASCII.

    >>> json_in_script({"token": "</script>"})
    '{"token":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def allowed(script: str) -> str:
    """Name a script by its hash, so that the page's policy lets it run and nothing else."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


@cache
def static(package: str, name: str) -> str:
    """Read a file of a package's folder `static`."""
    return (resources.files(package) / "static" / name).read_text("utf-8")


@cache
def template(package: str, name: str) -> jinja2.Template:
    """Read a template of a package's folder `static`; what is put into it is escaped, and nothing may be missing."""
    require("jinja2", purpose="Writing a page", extra="view")
    import jinja2

    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(static(package, name))


def version() -> str:
    """Return the version that is installed, for the foot of a page."""
    try:
        return metadata.version("multihead")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"
