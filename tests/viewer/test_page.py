"""What a page is made of cannot become markup, and nothing of it may be missing."""

from __future__ import annotations

import json
import posixpath
import re

import jinja2
import pytest

import multihead as mh
from multihead.viewer.page import (
    bundle_script,
    hash_of_script,
    installed_version,
    json_in_script,
    list_bundled_modules,
    load_template,
    read_package_file,
)


@pytest.mark.parametrize("token", ["</script><script>alert(1)</script>", "<!--", "&amp;", "\u2028", "头 🎉", "\ud800"])
def test_data_comes_back_as_it_was_and_holds_no_markup(token: str) -> None:
    written = json_in_script({"token": token})
    assert json.loads(written) == {"token": token}
    assert written.isascii()
    assert not set("<>&") & set(written)


def test_a_template_asks_for_everything_it_shows() -> None:
    with pytest.raises(jinja2.UndefinedError):
        load_template("viewer/static/view/index.html").render()


def test_static_files_are_read_once() -> None:
    assert read_package_file("viewer/static/view/view.css") is read_package_file("viewer/static/view/view.css")


def test_the_version_is_that_of_the_package() -> None:
    assert installed_version() == mh.__version__


def test_a_script_is_named_by_its_sha_256() -> None:
    assert hash_of_script("alert(1)") == "sha256-bhHHL3z2vDgxUt0W3dWQOrprscmda2Y5pLsLg4GF+pI="


def test_a_bundle_holds_each_module_once_after_the_modules_it_imports() -> None:
    found = list_bundled_modules("viewer/static/view/main.js")
    assert found[-1] == "viewer/static/view/main.js"
    assert len(found) == len(set(found))
    for place, path in enumerate(found):
        named = re.findall(r" from '([^']+)';", read_package_file(path))
        imported = {posixpath.normpath(f"{posixpath.dirname(path)}/{each}") for each in named}
        assert imported <= set(found[:place]), path
    bundle = bundle_script("viewer/static/view/main.js")
    assert not re.search(r"^(import|export)\b", bundle, re.MULTILINE)
    assert all(bundle.count(f"modules['{path}'] = ") == 1 for path in found)


def test_a_module_can_be_given_in_place_of_its_file() -> None:
    bundle = bundle_script("viewer/static/view/main.js", replacements=(("viewer/static/view/host.js", "host"),))
    assert "modules['viewer/static/view/host.js'] = host;" in bundle
    assert "location" not in bundle.replace("location.href", "")  # the host alone reads and sets the address


def test_a_bundle_reads_imports_over_several_lines_and_leaves_out_comments_and_indentation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {
        "a/entry.js": (
            "// The entry.\nimport {\n  one,\n  two,\n} from '../b.js';\n\n/**\n * Adds.\n * @returns {number}\n */\n"
            "export function three() {\n  // why\n  return `${one}//` + two; // the address\n}\n"
        ),
        "b.js": "/** The numbers. */\nexport const one = 1;\nexport const two = 2;\n",
    }
    monkeypatch.setattr("multihead.viewer.page.read_package_file", files.__getitem__)
    assert bundle_script.__wrapped__("a/entry.js") == (
        "'use strict';\nconst modules = {};\n"
        "modules['b.js'] = (() => {\nconst one = 1;\nconst two = 2;\nreturn { one, two };\n})();\n"
        "modules['a/entry.js'] = (() => {\nconst { one, two, } = modules['b.js'];\n"
        "function three() {\nreturn `${one}//` + two; // the address\n}\nreturn { three };\n})();"
    )


def test_a_template_of_several_lines_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multihead.viewer.page.read_package_file", lambda path: "const words = `one\n  two`;\n")
    sentence = (
        "c.js: 'const words = `one' begins or ends a template of several lines, whose indentation a bundle would lose. "
        "Write \\n in a template of one line."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        bundle_script.__wrapped__("c.js")


def test_a_form_of_export_that_a_bundle_does_not_know_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multihead.viewer.page.read_package_file", lambda path: "export default 3;\n")
    sentence = (
        "a.js: 'export default 3;' cannot be bundled. Write import { name } from './file.js' or "
        "export const/function/class."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        bundle_script.__wrapped__("a.js")
