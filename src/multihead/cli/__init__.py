"""The command line `multihead`: one file per command, imported only when the command runs.

Other packages add commands through the entry point group `multihead.commands`.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from keyword import iskeyword
from typing import Any, NoReturn, TextIO

import click

from multihead.errors import MultiheadError
from multihead.locale.escaping import escape_controls

__all__ = ["COMMANDS", "Commands", "main"]

# Name of a command -> its line in `multihead --help`. A file of the same name in this folder defines the command;
# that of "try", a word of Python, is "try_".
COMMANDS = {
    "look": "Every head of a model on a text: a table, highlights, and one page.",
    "view": "Every head of a saved record in the browser, from the whole map to single weights.",
    "census": "What every head of a model does over a whole corpus: sums, distributions, strongest examples.",
    "compare": "The heads of two saved records, ranked by how much their attention changed.",
    "ablate": "What heads are for: how much worse a language model predicts texts without them.",
    "importance": "Which heads matter: each switched off once, and the most important ones together.",
    "try": "Heads off by a click in the browser: what a model expects next, with and without them.",
    "doctor": "Which kernels run here, and why the others do not.",
}

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
OUTPUT_ERRNOS = (errno.EPIPE, errno.ENOSPC, errno.EIO)


class Commands(click.Group):
    """A command group that imports a command when it runs and prints an error as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands: the built-in COMMANDS, then the commands added by other packages."""
        return [*COMMANDS, *_plugin_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command and return it; None if there is no such command.

        Raises:
            click.UsageError: there is no such command, but one with a similar name.
        """
        if cmd_name in COMMANDS:
            name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
            command: click.Command = getattr(import_module(f"multihead.cli.{name}"), name)
            return command
        added = _plugin_commands()
        if cmd_name not in added and (similar := get_close_matches(cmd_name, [*COMMANDS, *added], n=1)):
            raise click.UsageError(f"No such command {cmd_name!r}. Did you mean {similar[0]!r}?", ctx)
        return added.get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for `multihead --help`, without importing the built-in ones."""
        added = {name: command.get_short_help_str(limit=200) for name, command in _plugin_commands().items()}
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items(), *added.items()])

    def main(  # type: ignore[override]  # click returns if standalone_mode is False; this method always exits
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        **extra: Any,
    ) -> NoReturn:
        """Run the command line and exit; a wrong argument or input is one line on stderr and exit status 2."""
        _connect_closed_streams_to_null()
        for stream in (sys.stdout, sys.stderr):
            _replace_unencodable_characters(stream)
        extra["standalone_mode"] = False
        try:
            status = super().main(args, prog_name, complete_var, **extra)
        except MultiheadError as error:
            _exit_with_error(str(error))
        except click.Abort:
            sys.exit(EXIT_INTERRUPTED)
        except click.UsageError as error:
            help_command = f"{error.ctx.command_path} --help" if error.ctx else "multihead --help"
            _exit_with_error(f"{error.format_message()} See `{help_command}`.")
        except click.ClickException as error:
            _exit_with_error(error.format_message())
        except OSError as error:
            if error.errno not in OUTPUT_ERRNOS:
                raise
            _exit_on_output_error(error)
        try:
            _flush_if_open(sys.stdout)
        except OSError as error:
            _exit_on_output_error(error)
        sys.exit(status if isinstance(status, int) else 0)


@cache
def _plugin_commands() -> dict[str, click.Command]:
    """Return the commands that other packages add, by name; entry points of uninstalled packages are skipped."""
    found: dict[str, click.Command] = {}
    for entry in sorted(entry_points(group="multihead.commands")):
        if find_spec(entry.module.partition(".")[0]) is not None:
            found[entry.name] = entry.load()
    return found


def _exit_with_error(sentence: str) -> NoReturn:
    """Print an error as one line and exit with status 2."""
    click.echo(f"error: {escape_controls(' '.join(sentence.split()))}", err=True)
    sys.exit(EXIT_BAD_INPUT)


def _connect_closed_streams_to_null() -> None:
    """Open the null device in place of each standard stream that is closed.

    Otherwise the next opened file gets the file descriptor of the closed stream, and the output of a library is written
    into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor is the closed one


def _flush_if_open(stream: TextIO | None) -> None:
    if stream is not None and not stream.closed:
        stream.flush()


def _exit_on_output_error(error: OSError) -> NoReturn:
    """Exit because standard output cannot be written: silently if its reader has exited, else with an error."""
    for stream in (sys.stdout, sys.stderr) if error.errno == errno.EPIPE else (sys.stdout,):
        # Buffered output would fail again when Python flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if error.errno == errno.EPIPE:
        sys.exit(1)
    _exit_with_error(f"The output cannot be written: {error.strerror}. Redirect it to another file or device.")


def _replace_unencodable_characters(stream: TextIO | None) -> None:
    """Print a question mark for a character that the terminal's encoding lacks, instead of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="multihead", message="multihead %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Look into multi-head attention, head by head.

    `multihead COMMAND --help` lists the options of a command and shows examples.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
