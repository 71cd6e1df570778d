"""Write the table of a command as JSON and CSV files, or print one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from multihead.files import write_atomically


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json and --csv to a command, which `table_files` checks and `write_tables` writes."""
    for form in ("csv", "json"):
        help_text = f"Write the whole table as {form.upper()} too; - prints it and nothing else."
        command = click.option(f"--{form}", f"{form}_file", metavar="FILE", help=help_text)(command)
    return command


def table_files(json_file: str | None, csv_file: str | None) -> list[str]:
    """Return which of the two output files are real files; "-" is standard output and can be given once.

    Raises:
        UsageError: both files are "-".
    """
    if json_file == csv_file == "-":
        raise click.UsageError(
            "--json - and --csv - both print to standard output, which can hold one of them. "
            "Give one a file: --csv FILE."
        )
    return [target for target in (json_file, csv_file) if target not in (None, "-")]


def write_tables(rows: Sequence[Mapping[str, Any]], *, json_file: str | None, csv_file: str | None) -> None:
    """Write rows as JSON and as CSV; the file "-" prints them, None skips the format."""
    # Imported here, so that --help does not load torch.
    from multihead.viewer.downloads import table_csv, table_json

    for target, write in ((json_file, table_json), (csv_file, table_csv)):
        if target == "-":
            click.echo(b"".join(write(rows)), nl=False)
        elif target is not None:
            write_atomically(target, b"".join(write(rows)))
