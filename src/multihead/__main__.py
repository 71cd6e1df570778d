"""Entry point of `multihead` and `python -m multihead`; names the missing packages if the command line needs some."""

from __future__ import annotations

import sys

from multihead.errors import MissingPackageError
from multihead.errors.optional import require


def main() -> None:
    """Run the command line; exit with status 1 if click or rich is not installed."""
    try:
        require("click", "rich", purpose="The command line", extra="cli")
    except MissingPackageError as error:
        sys.exit(f"error: {error}")
    from multihead.cli import main as run

    run()


if __name__ == "__main__":
    main()
