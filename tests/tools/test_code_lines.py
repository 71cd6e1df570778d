"""Lines of code are counted without what explains them."""

from __future__ import annotations

from tools import code_lines

SOURCE = '''"""A file
of two lines."""

import os
from pathlib import (
    Path,
)

WORDS = """text
that is code"""
"""What WORDS is."""


class A:
    """A class."""

    def f(self) -> Path:  # a comment
        """A method."""
        import sys

        # a comment
        return Path(
            os.fspath(sys.prefix),
        )
'''


def test_docstrings_comments_blank_lines_and_imports_do_not_count() -> None:
    assert code_lines.code_lines(SOURCE) == 2 + 1 + 1 + 3


def test_a_package_is_the_sum_of_its_files() -> None:
    assert code_lines.by_package(
        {
            "multihead/a/x.py": "x = 1\n",
            "multihead/a/b/y.py": "y = 1\n",
            "multihead/z.py": "\n",
            "beside/w.py": "w = 1\n",
        }
    ) == {"a": 2, "z.py": 0, "beside": 1}


def test_a_commit_and_the_checkout_are_read_alike() -> None:
    here, committed = code_lines.sources_here(), code_lines.sources_of("HEAD")
    assert "multihead/kernels/choose.py" in here
    assert committed["multihead/kernels/choose.py"].startswith('"""')
