"""The command `view`: show every head of saved records in the browser, down to single weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from multihead.cli.language import lang_option
from multihead.cli.model_options import import_option, server_options
from multihead.cli.progress import Steps
from multihead.errors import InputError
from multihead.errors.optional import require
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multihead.observation.record import Record
    from multihead.viewer.payload import RecordedRun

EXAMPLES = """
\b
Examples:
  multihead view run.safetensors
  multihead view before.safetensors after.safetensors  two runs, side by side
  multihead view run.*.safetensors                  the ranks of a run, joined
  multihead view run.safetensors --no-browser --port 8000
  multihead view run.safetensors --sample 3 --lang zh
  multihead view run.safetensors --import my_masks  masks of your own

RECORD is a file written by `seen.save("run.safetensors")`, after `with multihead.observe(model) as seen`.
Coarse levels of long texts are built once and stored next to it, in RECORD.levels.
"""

REQUIRED_PACKAGES = ("jinja2", "starlette", "uvicorn", "safetensors")


@click.command(epilog=EXAMPLES)
@click.argument("records", metavar="RECORD...", nargs=-1, required=True)
@server_options
@click.option("--sample", type=click.IntRange(min=0), metavar="N", default=0, help="Which text to open.  [default: 0]")
@lang_option
@import_option
def view(*, records: tuple[str, ...], port: int | None, browser: bool, sample: int, lang: str) -> None:
    """Show every head of one or more saved records in the browser.

    The page has a grid and a table of all heads, the attention map of each head, from the whole text to single
    weights, and comparisons of two heads or two runs. Only this machine can open it.
    """
    require(*REQUIRED_PACKAGES, purpose="The viewer", extra="view")
    # Imported here, so that --help does not load the server.
    from multihead.cli.serving import serve_in_browser
    from multihead.viewer.routes import Viewer

    with Steps(lang) as steps:
        steps.show(text("view.opening", lang, names=", ".join(map(escape_controls, records))))
        runs = _load_records(records)
    for run in runs:
        if not run.num_samples:
            raise InputError(
                f"{run.name} has no single samples, only sums over all of them.",
                'Observe with keep="cpu", or print its table in Python.',
            )
        if sample >= run.num_samples:
            raise InputError(
                f"There is no sample {sample} in {run.name}, which has {run.num_samples}.",
                "Leave out --sample."
                if run.num_samples == 1
                else f"Give --sample a number from 0 to {run.num_samples - 1}.",
            )

    with Steps(lang) as steps:

        def show_progress(done: float, total: int) -> None:
            """Show for how many heads the coarse attention maps of long texts have been built."""
            if done < total:
                steps.show(text("view.bar", lang), done, total)
            else:
                steps.end()

        serve_in_browser(
            Viewer(runs, lang=lang, progress=show_progress),
            names=", ".join(escape_controls(run.name) for run in runs),
            fragment=f"t={sample}" if sample else "",
            port=port,
            browser=browser,
            lang=lang,
        )


def _load_records(files: Sequence[str]) -> list[RecordedRun]:
    from multihead.observation.record import Record
    from multihead.viewer.payload import RecordedRun

    groups = _join_ranks([(Path(file), Record.load(file, mapped=False)) for file in files])
    names = [path.name for path, _ in groups]
    return [
        # Records whose files have the same name are shown with the full path.
        RecordedRun(path.name if names.count(path.name) == 1 else str(path), record, _levels_cache_folder(path, record))
        for path, record in groups
    ]


def _join_ranks(records: list[tuple[Path, Record]]) -> list[tuple[Path, Record]]:
    """Join the records of single ranks (sequence or tensor parallelism) to one; return complete records unchanged."""
    from multihead.observation.record import Record

    parts = [record for _, record in records if record.is_part]
    if not parts:
        return records
    if len(parts) < len(records):
        raise InputError(
            "Some of the records are from single ranks, and others are complete.",
            'Give the ranks of one run as a pattern: multihead view "run.*.safetensors" other.safetensors.',
        )
    return [(records[0][0], Record.joined(parts))]


def _levels_cache_folder(path: Path, record: Record) -> Path:
    """Return the folder that caches the coarse attention maps of a record: next to its file, or its first file."""
    name = path.name if path.exists() else f"{record.id}.safetensors"
    return path.with_name(f"{name}.levels")
