"""Show the progress of slow steps on stderr: a bar on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from multihead.locale.escaping import escape_controls
from multihead.locale.texts import text

if TYPE_CHECKING:
    from rich.progress import TaskID

SECONDS_BEFORE_FIRST_LINE = 2.0
"""Seconds that a step must run before its first line is printed."""

SECONDS_BETWEEN_LINES = 10.0
"""Seconds between further lines of a running step."""


class Steps:
    """Context manager that shows the progress of a command's steps, which run one after the other.

    Without a terminal (output redirected to a file or another program), a step that takes less than
    `SECONDS_BEFORE_FIRST_LINE` seconds prints nothing. A thread prints the lines, because a step may run for minutes
    without calling `show`.

    Args:
        lang: language of the lines, "en" or "zh".
        keep: whether the bars of finished steps stay on the terminal.
    """

    def __init__(self, lang: str, *, keep: bool = False) -> None:
        from rich.console import Console

        self._lang = lang
        self._shown: _ProgressBars | _ProgressLines
        console = Console(stderr=True, highlight=False)
        self._shown = (
            _ProgressBars(console, keep=keep)
            if sys.stderr is not None and sys.stderr.isatty()
            else _ProgressLines(lang)
        )

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.end()
        self._shown.close()

    def show(self, step: str, done: float = 0, total: int | None = None, *, detail: str = "") -> None:
        """Show how much of a step is done; a step with a new name ends the previous step.

        Args:
            step: name of the step, in the language of the command.
            done: number of its parts that are done.
            total: number of its parts, or None where unknown.
            detail: text printed after the name, such as a rate.
        """
        self._shown.show(step, done, total, detail)

    def show_loading(self, model: str) -> Callable[[str], None]:
        """Show that a model is found; return a function that shows what is loaded: "tokenizer" or "weights"."""

        def show_stage(stage: str) -> None:
            self.show(text(f"look.doing.{stage}", self._lang, model=escape_controls(model)))

        show_stage("loading")
        return show_stage

    def end(self) -> None:
        """End the current step, if there is one."""
        self._shown.end()


class _ProgressBars:
    """Shows the current step as a progress bar of the library rich."""

    def __init__(self, console: Any, *, keep: bool) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        name = TextColumn("{task.description}", markup=False)
        columns = SpinnerColumn(), name, BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns, console=console, transient=not keep)
        self._keep = keep
        self._step: str | None = None
        self._task: TaskID | None = None

    def show(self, step: str, done: float, total: int | None, detail: str) -> None:
        if self._task is None or step != self._step:
            self.end()
            self._progress.start()
            self._step, self._task = step, self._progress.add_task(step, total=total)
        described = f"{step}, {detail}" if detail else step
        self._progress.update(self._task, completed=done, total=total, description=described)

    def end(self) -> None:
        if self._task is None:
            return
        if not self._keep:
            self._progress.remove_task(self._task)
            self._progress.stop()  # nothing is drawn while no step is running
        self._step, self._task = None, None

    def close(self) -> None:
        self._progress.stop()


class _ProgressLines:
    """Prints a line about the step every `SECONDS_BETWEEN_LINES` seconds, from `show` or a background thread."""

    def __init__(self, lang: str) -> None:
        self._lang = lang
        self._lock = threading.Condition()
        self._step: str | None = None
        self._done: float = 0
        self._total: int | None = None
        self._detail = ""
        self._began = self._due = 0.0
        self._printed = False
        self._thread: threading.Thread | None = None
        self._closed = False

    def show(self, step: str, done: float, total: int | None, detail: str) -> None:
        with self._lock:
            if step != self._step:
                self._end_step()
                self._step, self._began = step, time.monotonic()
                self._due = self._began + SECONDS_BEFORE_FIRST_LINE
                if self._thread is None:
                    self._thread = threading.Thread(target=self._print_periodically, daemon=True)
                    self._thread.start()
                self._lock.notify()
            self._done, self._total, self._detail = done, total, detail
            self._print_if_due()

    def end(self) -> None:
        with self._lock:
            self._end_step()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()

    def _end_step(self) -> None:
        if self._printed:  # a step with a line of progress also gets a line at its end
            self._print_line(finished=True)
        self._step, self._printed = None, False

    def _print_periodically(self) -> None:
        with self._lock:
            while not self._closed:
                self._lock.wait(None if self._step is None else max(self._due - time.monotonic(), 0.0))
                if not self._closed:
                    self._print_if_due()

    def _print_if_due(self) -> None:
        if self._step is not None and time.monotonic() >= self._due:
            self._print_line()

    def _print_line(self, *, finished: bool = False) -> None:
        now = time.monotonic()
        step = f"{self._step}, {self._detail}" if self._detail else self._step
        values = {"step": step, "seconds": f"{now - self._began:.0f}"}
        if finished:
            line = text("progress.finished", self._lang, **values)
        elif self._total is not None and self._total > 1:
            line = text("progress.counted", self._lang, done=f"{int(self._done):,}", total=f"{self._total:,}", **values)
        else:
            line = text("progress.running", self._lang, **values)
        self._printed, self._due = True, now + SECONDS_BETWEEN_LINES
        click.echo(line, err=True)
