"""The verb `walk`: print the split of heads and a whole attention, step by step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import click

from multihead.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from multihead.cli.tensor_view import Notes
    from multihead.lab.walk import Step, Walk
    from multihead.lab.words import Chapter, Words

INDENT = 3
# A line by hand is read only while it is short.
MOST_TERMS = 4

EXAMPLES = """
\b
Examples:
  multihead walk                                  2 samples of 3 positions, 3 heads of 2
  multihead walk --lang zh                        the same in Chinese
  multihead walk --part split                     only the split and its way back
  multihead walk --length 4 --heads 2 --lengths 4,2
  multihead walk --lengths 3,0                    a sample with nothing to see
  multihead walk --bias none --seed 7
  multihead walk --batch 8 --length 64 --model-dim 512 --heads 8
"""


@click.command(epilog=EXAMPLES)
@click.option("--lang", type=click.Choice(["en", "zh"]), default="en", show_default=True, help="The language to speak.")
@click.option(
    "--part",
    type=click.Choice(["all", "split", "attention"]),
    default="all",
    show_default=True,
    help="All, only the split of heads, or only the attention.",
)
@click.option("--batch", type=int, default=2, show_default=True, help="Samples.")
@click.option("--length", type=int, default=3, show_default=True, help="Positions of each sample.")
@click.option("--model-dim", type=int, default=6, show_default=True, help="Columns, shared by the heads.")
@click.option("--heads", type=int, default=3, show_default=True, help="Heads; they must divide --model-dim.")
@click.option(
    "--lengths",
    metavar="N,N,...",
    help="Tokens of each sample that are no padding, such as 3,2.  [default: one fewer a sample]",
)
@click.option(
    "--bias",
    type=click.Choice(["distance", "none"]),
    default="distance",
    show_default=True,
    help="What is added to the scores.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="What the projections are drawn with.")
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
    # Imported here, so that --help need not load torch.
    from rich.console import Console

    from multihead.lab.walk import walk as walked
    from multihead.lab.words_en import ENGLISH
    from multihead.lab.words_zh import CHINESE

    steps = walked(
        batch=batch,
        length=length,
        model_dim=model_dim,
        num_heads=heads,
        lengths=None if lengths is None else _parsed(lengths),
        bias=bias,
        seed=seed,
    )
    words = {"en": ENGLISH, "zh": CHINESE}[lang]
    _Teller(steps, words, Console(highlight=False, soft_wrap=True)).tell(part)


def _parsed(lengths: str) -> tuple[int, ...]:
    try:
        return tuple(int(entry) for entry in lengths.replace("，", ",").split(","))
    except ValueError:
        raise ArgumentError(
            f"lengths is {lengths!r}, and must be whole numbers with commas between them.",
            "Give one a sample, such as --lengths 3,2.",
        ) from None


class _Teller:
    """Print a walk in the words of one language."""

    def __init__(self, steps: Walk, words: Words, console: Console) -> None:
        self.steps, self.words, self.console = steps, words, console
        self.width = max(console.width, 40)
        self.said_elided = False
        sizes = steps.sizes
        joined = [f"Z{head + 1}" for head in range(sizes.num_heads)]
        shown = joined if len(joined) <= MOST_TERMS else [*joined[:2], "…", joined[-1]]
        self.fields: dict[str, Any] = {
            **asdict(sizes),
            "flat": sizes.flat,
            "scale": sizes.scale,
            "heads_of": words.heads_of(sizes.num_heads, sizes.head_dim),
            "last": steps["x"].tensor.numel() - 1,
            "smaller": steps["inputs"].code.rpartition(" ")[2],
            "joined": " | ".join(shown),
        }

    def tell(self, part: str) -> None:
        """Print the title, the chapters of one part or of both, and where to go on."""
        from multihead.lab.words import CHAPTERS

        self._say(self.words.title, style="bold")
        self._say(self.words.intro.format(**self.fields))
        told = {step.name for step in self.steps}
        current = ""
        for number, chapter in enumerate((chapter for chapter in CHAPTERS if chapter.steps[0] in told), start=1):
            if part not in ("all", chapter.part):
                continue
            if chapter.part != current:
                current = chapter.part
                self._open_part(current)
            self._tell_chapter(number, chapter)
        self.console.print()
        self.console.rule(style="dim")
        if part != "split":
            self._say(self.words.checked.format(difference=self.steps.sdpa_difference), style="green")
        self._say(self.words.farewell)
        for command in self.words.commands:
            self._say(command, indent=INDENT)

    def _say(self, sentence: str, *, style: str = "", indent: int = 0) -> None:
        from multihead.cli.tensor_view import wrap

        for line in wrap(sentence, min(self.width, 100) - indent):
            self.console.print(" " * indent + line, style=style, markup=False)

    def _open_part(self, part: str) -> None:
        passage = self.words.parts[part]
        self.console.print()
        self.console.rule(f"[bold]{passage.title}[/bold]", align="left", style="dim")
        self._say(passage.text.format(**self.fields))

    def _tell_chapter(self, number: int, chapter: Chapter) -> None:
        passage = self.words.passages[chapter.name]
        self.console.print()
        self.console.print(f"{number:>2} {passage.title.format(**self.fields)}", style="bold", markup=False)
        self._say(passage.text.format(**self.fields), indent=INDENT)
        for sentence in self._asides(chapter):
            self._say(sentence, indent=INDENT)
        for name in chapter.steps:
            self._show(self.steps[name])
        for line in self._by_hand(chapter.name):
            self._say(f"{self.words.by_hand}{line}", indent=INDENT)

    def _asides(self, chapter: Chapter) -> list[str]:
        """What is worth saying only at these sizes."""
        sizes, words = self.steps.sizes, self.words
        if chapter.name == "by_head" and sizes.length == sizes.num_heads:
            return [words.same_shape.format(shape=tuple(self.steps["by_head"].tensor.shape))]
        if chapter.name == "wrong":
            if self._nothing_to_mix():
                return [words.unmixed]
            right, wrong = (self.steps[name].tensor[0, 0] for name in ("by_head", "wrong"))
            said = [words.mixed_compare.format(right=right.tolist(), wrong=wrong.tolist())]
            return [*(said if right.numel() <= 2 * MOST_TERMS else []), words.mixed_legend]
        if chapter.name == "weights" and 0 in sizes.lengths:
            return [words.empty]
        return []

    def _show(self, step: Step) -> None:
        """Print the code of a tensor, its shape over the names of its axes, and its values."""
        from rich.text import Text

        from multihead.cli.tensor_view import draw, shape_lines, wrap

        words = self.words
        self.console.print()
        # Break code at an operator, not within a list of arguments.
        code = f"{step.name} = {step.code}".replace(", ", ",¤")
        for number, line in enumerate(wrap(code, self.width - 2 * INDENT)):
            self.console.print(
                " " * (2 * INDENT if number else INDENT) + line.replace("¤", " "), style="bold", markup=False
            )
        shape, axes = shape_lines(tuple(step.tensor.shape), tuple(words.axes[axis] for axis in step.axes))
        self.console.print(" " * INDENT + shape, markup=False)
        self.console.print(" " * INDENT + axes, markup=False)
        drawing = draw(
            step,
            num_heads=self.steps.sizes.num_heads,
            entries=words.entries,
            width=self.width - INDENT,
            notes=self._mixed() if step.name == "wrong" and not self._nothing_to_mix() else None,
            head_label=f"Z{{1}} {words.entries['heads'].replace('{}', '{0}')}"
            if step.name in ("z", "concat")
            else None,
        )
        for row in drawing.lines:
            self.console.print(Text(" " * INDENT).append_text(row))
        if drawing.elided:
            sentence = words.elided_again if self.said_elided else words.elided
            self._say(sentence.format(count=f"{step.tensor.numel():,}"), indent=INDENT, style="dim")
            self.said_elided = True

    def _nothing_to_mix(self) -> bool:
        return 1 in (self.steps.sizes.length, self.steps.sizes.num_heads)

    def _mixed(self) -> Notes:
        """Where each row of the wrong reshape was taken from."""
        positions = self.steps["wrong_position"].tensor.tolist()
        heads = self.steps["wrong_head"].tensor.tolist()
        return {
            (block, row): (f"<- p{position} h{head}", head)
            for block, (row_positions, row_heads) in enumerate(zip(positions, heads, strict=True))
            for row, (position, head) in enumerate(zip(row_positions, row_heads, strict=True))
        }

    def _by_hand(self, chapter: str) -> list[str]:
        """Write one entry of a chapter out as its sum."""
        from multihead.cli.tensor_view import numbers

        sizes, steps = self.steps.sizes, self.steps
        last = sizes.length - 1
        block = sizes.flat - 1

        def written(name: str, *index: int) -> str:
            return numbers(steps[name].tensor)(steps[name].tensor[index].item())

        query, key = (self.words.entries[axis] for axis in ("queries", "keys"))
        if chapter == "scores" and sizes.head_dim <= MOST_TERMS:
            terms = [
                f"{written('q_heads', 0, last, column)} x {written('k_heads', 0, 0, column)}"
                for column in range(sizes.head_dim)
            ]
            where = f"[0] {query.format(last)}, {key.format(0)}"
            return [f"{where}: {' + '.join(terms)} = {written('scores', 0, last, 0)}"]
        if chapter == "weights" and sizes.length <= MOST_TERMS and sizes.lengths[-1] > 0:
            powers = [f"e^{written('masked', block, 0, entry)}" for entry in range(sizes.length)]
            where = f"[{block}] {query.format(0)}, {key.format(0)}"
            return [f"{where}: {powers[0]} / ({' + '.join(powers)}) = {written('weights', block, 0, 0)}"]
        if chapter == "z" and sizes.length <= MOST_TERMS:
            terms = [
                f"{written('weights', block, 0, entry)} x {written('v_heads', block, entry, 0)}"
                for entry in range(sizes.length)
            ]
            return [f"[{block}] {query.format(0)}: {' + '.join(terms)} = {written('z', block, 0, 0)}"]
        return []
