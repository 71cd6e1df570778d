"""The command `walk`: print the split of heads and a whole attention, step by step."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from multihead.cli.console import print_sentence, wrap_words
from multihead.cli.language import lang_option
from multihead.locale.texts import section
from multihead_lab.commands import parse_whole_numbers
from multihead_lab.locale import LOCALE_PACKAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from multihead_lab.commands.tensor_view import RowNotes
    from multihead_lab.walk import Walk, WalkChapter, WalkStep

INDENT = 3
MAX_SHOWN_TERMS = 4  # longest sum that is written out

# Options of the suggested next commands, without --lang.
SUGGESTED_OPTIONS = ("--heads 2", "--lengths 3,0", "--length 4 --model-dim 8 --heads 4 --bias none")
AXIS_NAMES = ("batch", "length", "heads", "queries", "keys")  # axes whose entries have names

EXAMPLES = """
\b
Examples:
  multihead walk                 2 samples of 3 positions, 3 heads of 2
  multihead walk --lang zh       the same in Chinese
  multihead walk --part split    only the split and the merge
  multihead walk --length 4 --heads 2 --lengths 4,2
  multihead walk --lengths 3,0   a sample that is all padding
  multihead walk --bias none --seed 7
  multihead walk --batch 8 --length 64 --model-dim 512 --heads 8
"""


@click.command(epilog=EXAMPLES, context_settings={"show_default": True})
@lang_option
@click.option(
    "--part",
    type=click.Choice(["all", "split", "attention"]),
    default="all",
    help="All, only the split of heads, or only the attention.",
)
@click.option("--batch", type=int, default=2, help="Samples.")
@click.option("--length", type=int, default=3, help="Positions of each sample.")
@click.option("--model-dim", type=int, default=6, help="Columns, shared by the heads.")
@click.option("--heads", type=int, default=3, help="Heads; they must divide --model-dim.")
@click.option(
    "--lengths",
    metavar="N,N,...",
    help="Tokens of each sample that are not padding, such as 3,2.  [default: one fewer per sample]",
)
@click.option(
    "--bias", type=click.Choice(["distance", "none"]), default="distance", help="The term added to the scores."
)
@click.option("--seed", type=int, default=1, help="Seed of the random projections.")
def walk(
    *,
    lang: str,
    part: str,
    batch: int,
    length: int,
    model_dim: int,
    heads: int,
    lengths: str | None,
    bias: Literal["distance", "none"],
    seed: int,
) -> None:
    """Walk through the split of heads and a whole attention, every value printed.

    The first part follows the numbers from (batch, length, model_dim) to heads and back, and shows
    what a reshape without the exchange of axes would mix. The second part goes from queries, keys
    and values to the output.
    """
    # Imported here, so that --help does not load torch.
    from rich.console import Console

    from multihead_lab.walk import walk as walked

    tokens = None
    if lengths is not None:
        tokens = parse_whole_numbers("lengths", lengths, "Give one number per sample, such as --lengths 3,2.")
    sizes = {"batch": batch, "length": length, "model_dim": model_dim, "num_heads": heads}
    steps = walked(**sizes, lengths=tokens, bias=bias, seed=seed)
    _WalkPrinter(steps, lang, Console(highlight=False, soft_wrap=True)).print(part)


class _WalkPrinter:
    """Print a walk in one language."""

    def __init__(self, steps: Walk, lang: str, console: Console) -> None:
        from multihead_lab.text import Phrases

        self.steps, self.lang, self.console = steps, lang, console
        phrases = Phrases(section(lang, "walk", store=LOCALE_PACKAGE))
        self.translate = phrases.translate
        self.width = max(console.width, 40)
        self.explained_elision = False
        sizes = steps.sizes
        joined = [f"Z{head + 1}" for head in range(sizes.num_heads)]
        shown = joined if len(joined) <= MAX_SHOWN_TERMS else [*joined[:2], "…", joined[-1]]
        self.fields: dict[str, Any] = {
            **asdict(sizes),
            "flat": sizes.batch_times_heads,
            "scale": sizes.scale,
            "heads_of": self.translate(
                "heads and columns",
                heads=phrases.format_count("head", sizes.num_heads),
                columns=phrases.format_count("column", sizes.head_dim),
            ),
            "last": steps["x"].tensor.numel() - 1,
            "smaller": steps["inputs"].code.rpartition(" ")[2],
            "joined": " | ".join(shown),
        }

    def print(self, part: str) -> None:
        """Print the title, the chapters of one part or of both, and the commands to try next."""
        from multihead_lab.walk import CHAPTERS

        self._print_text(self.translate("title"), style="bold")
        self._print_text(self.translate("intro", **self.fields))
        computed = {step.name for step in self.steps}
        chapters = [chapter for chapter in CHAPTERS if chapter.step_names[0] in computed]
        current = ""
        for number, chapter in enumerate(chapters, start=1):
            if part not in ("all", chapter.part):
                continue
            if chapter.part != current:
                current = chapter.part
                self.console.print()
                title = self.translate(f"part.{current}.title")
                self.console.rule(f"[bold]{title}[/bold]", align="left", style="dim")
                self._print_text(self.translate(f"part.{current}.text", **self.fields))
            self._print_chapter(number, chapter)
        self.console.print()
        self.console.rule(style="dim")
        if part != "split":
            self._print_text(self.translate("checked", difference=self.steps.sdpa_difference), style="green")
        self._print_text(self.translate("farewell"))
        command = "multihead walk" if self.lang == "en" else f"multihead walk --lang {self.lang}"
        for options in SUGGESTED_OPTIONS:
            self._print_text(f"{command} {options}", indent=INDENT)

    def _print_text(self, sentence: str, *, style: str = "", indent: int = 0) -> None:
        print_sentence(self.console, sentence, style=style, indent=indent)

    def _print_chapter(self, number: int, chapter: WalkChapter) -> None:
        title, passage = (self.translate(f"chapter.{chapter.name}.{each}", **self.fields) for each in ("title", "text"))
        self.console.print()
        self.console.print(f"{number:>2} {title}", style="bold", markup=False)
        self._print_text(passage, indent=INDENT)
        for sentence in self._remarks_on_sizes(chapter):
            self._print_text(sentence, indent=INDENT)
        for name in chapter.step_names:
            self._print_step(self.steps[name])
        if line := self._compute_by_hand(chapter.name):
            self._print_text(self.translate("by hand") + line, indent=INDENT)

    def _remarks_on_sizes(self, chapter: WalkChapter) -> list[str]:
        """Return the sentences about a chapter that hold only for some sizes of the walk."""
        sizes = self.steps.sizes
        if chapter.name == "by_head" and sizes.length == sizes.num_heads:
            return [self.translate("same shape", shape=tuple(self.steps["by_head"].tensor.shape))]
        if chapter.name == "wrong":
            if self._has_nothing_to_mix():
                return [self.translate("unmixed")]
            right, wrong = (self.steps[name].tensor[0, 0] for name in ("by_head", "wrong"))
            compared = [self.translate("mixed compare", right=right.tolist(), wrong=wrong.tolist())]
            return [*(compared if right.numel() <= 2 * MAX_SHOWN_TERMS else []), self.translate("mixed legend")]
        if chapter.name == "weights" and 0 in sizes.lengths:
            return [self.translate("empty")]
        return []

    def _print_step(self, step: WalkStep) -> None:
        """Print the code of a tensor, its shape over the names of its axes, and its values."""
        from rich.text import Text

        from multihead_lab.commands.tensor_view import draw_step, format_shape_with_axes

        self.console.print()
        # Lines of code break at operators, not within a list of arguments.
        code = f"{step.name} = {step.code}".replace(", ", ",¤")
        for number, line in enumerate(wrap_words(code, self.width - 2 * INDENT)):
            indent = " " * (2 * INDENT if number else INDENT)
            self.console.print(indent + line.replace("¤", " "), style="bold", markup=False)
        axes = tuple(self.translate(f"axis.{axis}") for axis in step.axes)
        for line in format_shape_with_axes(tuple(step.tensor.shape), axes):
            self.console.print(" " * INDENT + line, markup=False)
        entries: dict[str, Callable[[int], str]] = {axis: partial(self._entry_name, axis) for axis in AXIS_NAMES}
        if step.name in ("z", "concat"):
            entries["heads"] = lambda head: self.translate("entry.result", n=head, number=head + 1)
        drawing = draw_step(
            step,
            num_heads=self.steps.sizes.num_heads,
            entries=entries,
            width=self.width - INDENT,
            notes=self._sources_of_wrong_rows() if step.name == "wrong" and not self._has_nothing_to_mix() else None,
        )
        for row in drawing.lines:
            self.console.print(Text(" " * INDENT).append_text(row))
        if drawing.has_omitted_values:
            key = "elided again" if self.explained_elision else "elided"
            self._print_text(self.translate(key, count=f"{step.tensor.numel():,}"), indent=INDENT, style="dim")
            self.explained_elision = True

    def _entry_name(self, axis: str, index: int) -> str:
        return self.translate(f"entry.{axis}", n=index)

    def _has_nothing_to_mix(self) -> bool:
        return 1 in (self.steps.sizes.length, self.steps.sizes.num_heads)

    def _sources_of_wrong_rows(self) -> RowNotes:
        """Return the position and head that each row of the wrong reshape came from."""
        positions, heads = (self.steps[name].tensor for name in ("wrong_position", "wrong_head"))
        return {
            (block, row): (f"<- p{positions[block, row]} h{heads[block, row]}", int(heads[block, row]))
            for block, row in itertools.product(*map(range, heads.shape))
        }

    def _compute_by_hand(self, chapter: str) -> str:
        """Write out one entry of a chapter's tensor as a sum, such as a score; "" for a chapter without such a sum."""
        from multihead_lab.commands.tensor_view import number_formatter

        sizes = self.steps.sizes
        last, block = sizes.length - 1, sizes.batch_times_heads - 1
        query, key = (partial(self._entry_name, axis) for axis in ("queries", "keys"))

        def value(name: str, *index: int) -> str:
            tensor = self.steps[name].tensor
            return number_formatter(tensor)(tensor[index].item())

        if chapter == "scores" and sizes.head_dim <= MAX_SHOWN_TERMS:
            terms = [f"{value('q_heads', 0, last, n)} x {value('k_heads', 0, 0, n)}" for n in range(sizes.head_dim)]
            return f"[0] {query(last)}, {key(0)}: {' + '.join(terms)} = {value('scores', 0, last, 0)}"
        if chapter == "weights" and sizes.length <= MAX_SHOWN_TERMS and sizes.lengths[-1] > 0:
            terms = [f"e^{value('masked', block, 0, n)}" for n in range(sizes.length)]
            share = f"{terms[0]} / ({' + '.join(terms)})"
            return f"[{block}] {query(0)}, {key(0)}: {share} = {value('weights', block, 0, 0)}"
        if chapter == "z" and sizes.length <= MAX_SHOWN_TERMS:
            terms = [f"{value('weights', block, 0, n)} x {value('v_heads', block, n, 0)}" for n in range(sizes.length)]
            return f"[{block}] {query(0)}: {' + '.join(terms)} = {value('z', block, 0, 0)}"
        return ""
