"""Run the command line, or list the packages it needs: `multihead` and `python -m multihead`."""

from __future__ import annotations

import sys

from multihead.errors import MissingPackageError
from multihead.errors.optional import require


def main() -> None:
    """Run the command line; exit with 1 if the packages that it is built on are not installed."""
    try:
        require("click", "rich", purpose="The command line", extra="cli")
    except MissingPackageError as error:
        sys.exit(f"error: {error}")
    from multihead.cli import main as run

    run()


if __name__ == "__main__":
    main()
