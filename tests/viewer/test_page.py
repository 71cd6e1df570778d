"""What a page is made of cannot become markup, and nothing of it may be missing."""

from __future__ import annotations

import json

import jinja2
import pytest

import multihead as mh
from multihead.viewer.page import allowed, json_in_script, static, template, version

PACKAGE = "multihead.viewer"


@pytest.mark.parametrize("token", ["</script><script>alert(1)</script>", "<!--", "&amp;", "\u2028", "头 🎉", "\ud800"])
def test_data_comes_back_as_it_was_and_holds_no_markup(token: str) -> None:
    written = json_in_script({"token": token})
    assert json.loads(written) == {"token": token}
    assert written.isascii()
    assert not set("<>&") & set(written)


def test_a_template_asks_for_everything_it_shows() -> None:
    with pytest.raises(jinja2.UndefinedError):
        template(PACKAGE, "report.html").render()


def test_static_files_are_read_once() -> None:
    assert static(PACKAGE, "report.css") is static(PACKAGE, "report.css")


def test_the_version_is_that_of_the_package() -> None:
    assert version() == mh.__version__


def test_a_script_is_named_by_its_sha_256() -> None:
    assert allowed("alert(1)") == "sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI="
