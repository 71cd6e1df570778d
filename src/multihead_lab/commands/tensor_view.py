"""Draw a tensor in the terminal: labelled blocks of numbers, with each number's head shown as a colour and a label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby, starmap, zip_longest

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from torch import Tensor

from multihead_lab.walk import WalkStep

__all__ = ["Drawing", "draw_step", "format_shape_with_axes", "head_style", "number_formatter"]

# As in torch, a tensor of up to this many values is printed in full, a larger one with 3 rows and columns at each end.
MAX_VALUES_IN_FULL = 1000
ENTRIES_AT_EACH_END = (1, 1, 3, 3)  # of lines, blocks, rows and columns of a larger tensor
MAX_DECIMALS = 3
ELLIPSIS = "…"
SPACES_BETWEEN_BLOCKS = 3
HEAD_STYLES = ("cyan", "magenta", "green", "yellow", "blue")

RowNotes = Mapping[tuple[int, int], tuple[str, int]]
EntryNames = Mapping[str, Callable[[int], str]]


@dataclass(frozen=True)
class Drawing:
    """The lines of a drawn tensor, and whether some values were left out."""

    lines: list[Text]
    has_omitted_values: bool


def head_style(head: int) -> str:
    """Return the colour in which the numbers of a head are printed; head 5 has the colour of head 0 again."""
    return HEAD_STYLES[head % len(HEAD_STYLES)]


def number_formatter(tensor: Tensor) -> Callable[[float], str]:
    """Return a function that formats a tensor's values with as many decimals as they need."""
    if not tensor.is_floating_point():
        return lambda value: str(int(value))
    finite = tensor[tensor.isfinite()].double()
    fewer = range(1, MAX_DECIMALS)
    exact = (n for n in fewer if bool(((finite - finite.round(decimals=n)).abs() < 1e-9).all()))
    needed = next(exact, MAX_DECIMALS)
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    return lambda value: f"{round(value, needed) + 0.0:.{needed}f}"


def format_shape_with_axes(shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[str, str]:
    """Format a shape in two lines: the sizes, and below each size the name of its axis."""
    sizes = [str(size) for size in shape]
    widths = [max(cell_len(size), cell_len(axis)) for size, axis in zip(sizes, axes, strict=True)]
    lines = []
    for row in (sizes, axes):
        # One axis keeps its comma, as in Python: (6,).
        cells = [f"{entry}," for entry in row[:-1]] + [row[-1] if len(row) > 1 else f"{row[0]},"]
        padded = [set_cell_size(cell, width + 2) for cell, width in zip(cells, widths, strict=True)]
        lines.append(f"({''.join(padded).rstrip()})")
    return lines[0], lines[1]


def draw_step(
    step: WalkStep,
    *,
    num_heads: int,
    entries: EntryNames,
    width: int,
    notes: RowNotes | None = None,
) -> Drawing:
    """Draw one step's tensor.

    Args:
        step: the tensor, with its axes and heads.
        num_heads: number of blocks per sample in a folded batch.
        entries: by the name of an axis, a function from an index to the name of the entry.
        width: columns of the terminal.
        notes: for (block, row), a word printed next to the row and the head whose colour it gets.
    """
    return _TensorPainter(step, num_heads, entries, width, notes or {}).draw()


def _indices_at_both_ends(size: int, edge: int) -> list[int | None]:
    """List the indices of an axis that are shown, at most `edge` at each end; None stands for those between them."""
    if size <= 2 * edge + 1:
        return list(range(size))
    return [*range(edge), None, *range(size - edge, size)]


class _TensorPainter:
    """Draw one tensor, reshaped to four axes: lines of blocks of rows of columns.

    Attributes:
        tensor: (lines, blocks, rows, columns).
        axes: the name of each axis, or None if the step's tensor has no such axis.
        head_axis: index of the axis along which heads vary, or None.
        splits_batch_axis: whether lines and blocks are one axis of the step's tensor.
    """

    def __init__(self, step: WalkStep, num_heads: int, names: EntryNames, width: int, notes: RowNotes) -> None:
        self.head_of_entry, self.entry_names, self.width, self.row_notes = step.head_of_entry, names, width, notes
        tensor, axes, head_axis = step.tensor, step.axes, step.head_axis
        self.splits_batch_axis = axes[0] == "batch*heads"
        if self.splits_batch_axis:
            tensor = tensor.reshape(-1, num_heads, *tensor.shape[1:])
            axes, head_axis = ("batch", "heads", *axes[1:]), 1
        before = 1 if len(axes) == 1 else 0 if self.splits_batch_axis else 4 - len(axes)
        after = 4 - before - len(axes)
        self.tensor = tensor.reshape(*[1] * before, *tensor.shape, *[1] * after)
        self.axes = (*[None] * before, *axes, *[None] * after)
        self.head_axis = None if head_axis is None else before + head_axis
        is_large = tensor.numel() > MAX_VALUES_IN_FULL
        self.lines, self.blocks, self.rows, self.columns = (
            _indices_at_both_ends(size, edge if is_large else size)
            for size, edge in zip(self.tensor.shape, ENTRIES_AT_EACH_END, strict=True)
        )
        labels = [self._entry_name(0, index) for index in self.lines if index is not None]
        labels += [f" {self._entry_name(2, index)}" for index in self.rows if index is not None]
        self.row_label_width = max(cell_len(label) for label in labels) + 2
        self._fit_columns()

    def _entry_name(self, place: int, index: int) -> str:
        axis = self.axes[place]
        if axis == "heads*head_dim" and place == self.head_axis == 2:
            axis, index = "heads", self.head_of_entry[index]
        return self.entry_names[axis](index) if axis and axis in self.entry_names else ""

    def _fit_columns(self) -> None:
        """Choose the width of a cell, and drop columns from the middle of a block until it fits into the terminal."""
        size = self.tensor.shape[3]
        for edge in range(ENTRIES_AT_EACH_END[3] if None in self.columns else size, 0, -1):
            self.columns = _indices_at_both_ends(size, edge)
            shown = self._shown_values()
            self.format_number = number_formatter(shown)
            self.cell_width = max(len(self.format_number(value)) for value in shown.flatten().tolist())
            self.cell_width = max(self.cell_width, self._column_label_width())
            if self.row_label_width + self._block_width() <= self.width:
                return

    def _shown_values(self) -> Tensor:
        shown = self.tensor
        for place, indices in enumerate((self.lines, self.blocks, self.rows, self.columns)):
            kept = [index for index in indices if index is not None]
            shown = shown.index_select(place, shown.new_tensor(kept).long())
        return shown

    def _column_label_width(self) -> int:
        """Return the width of a cell that the names of keys above the columns, or of heads below them, need."""
        if self.axes[3] == "keys":
            return max(cell_len(self._entry_name(3, column)) for column in self.columns if column is not None)
        if self.head_axis != 3:
            return 0
        labels = ((cell_len(self.entry_names["heads"](head)), columns) for head, columns in self._columns_by_head())
        return max(-(-(width - (columns - 1)) // columns) for width, columns in labels)

    def _columns_by_head(self) -> list[tuple[int, int]]:
        """Return (head, number of columns) for each run of shown columns of one head, left to right."""
        groups = groupby(self.columns, lambda column: None if column is None else self.head_of_entry[column])
        return [(head, len(list(columns))) for head, columns in groups if head is not None]

    def _join_cells(self, draw_cell: Callable[[int], Text]) -> Text:
        """Join the cells of the shown columns, with a line between the columns of two heads."""
        line = Text()
        heads = [
            None if column is None or self.head_axis != 3 else self.head_of_entry[column] for column in self.columns
        ]
        for number, column in enumerate(self.columns):
            if number:
                before, head = heads[number - 1 : number + 1]
                line.append(" " if None in (before, head) or before == head else " │ ", style="dim")
            line.append_text(Text(ELLIPSIS, style="dim") if column is None else draw_cell(column))
        return line

    def _block_width(self) -> int:
        note = max((cell_len(word) + 1 for word, _ in self.row_notes.values()), default=0)
        title = max(cell_len(self._block_title(line, block)) for line in self.lines for block in self.blocks)
        return max(self._join_cells(lambda column: Text(" " * self.cell_width)).cell_len + note, title)

    def _block_title(self, line: int | None, block: int | None) -> str:
        if block is None or line is None:
            return ELLIPSIS
        title = self._entry_name(1, block)
        return f"[{line * self.tensor.shape[1] + block}] {title}" if self.splits_batch_axis else title

    def _align_right(self, written: str, style: str) -> Text:
        """Align a number or a label to the right of a cell."""
        return Text(" " * (self.cell_width - cell_len(written)) + written, style=style)

    def _draw_cell(self, line: int, block: int, row: int, column: int) -> Text:
        place = (line, block, row, column)
        written = self.format_number(self.tensor[place].item())
        if written == "-inf":
            return self._align_right(written, "dim")
        if (block, row) in self.row_notes:
            return self._align_right(written, head_style(self.row_notes[block, row][1]))
        return self._align_right(
            written, "" if self.head_axis is None else head_style(self.head_of_entry[place[self.head_axis]])
        )

    def _draw_block(self, line: int, block: int) -> list[Text]:
        """Draw one block: its title, the names of the keys, its rows, and the heads below their columns."""
        place = self.head_axis
        painted = []
        if self._entry_name(1, block):
            style = f"bold {head_style(self.head_of_entry[block])}" if place == 1 else "bold"
            painted.append(Text(self._block_title(line, block), style=style))
        if self.axes[3] == "keys":
            painted.append(self._join_cells(lambda key: self._align_right(self._entry_name(3, key), "dim")))
        for row in self.rows:
            if row is None:
                painted.append(self._align_right(ELLIPSIS, "dim"))
                continue
            text = self._join_cells(partial(self._draw_cell, line, block, row))
            if (block, row) in self.row_notes:
                word, head = self.row_notes[block, row]
                text.append(f" {word}", style=head_style(head))
            painted.append(text)
        if place == 3:
            painted.append(Text("   ").join(starmap(self._draw_head_label, self._columns_by_head())))
        return painted

    def _draw_head_label(self, head: int, columns: int) -> Text:
        """Write the name of a head in the middle below its columns."""
        name, width = self.entry_names["heads"](head), columns * (self.cell_width + 1) - 1
        centred = " " * (max(width - cell_len(name), 0) // 2) + name
        return Text(set_cell_size(centred, width), style=f"bold {head_style(head)}")

    def draw(self) -> Drawing:
        """Draw the blocks of each line side by side, as many as fit into the width."""
        width = self._block_width()
        across = max(1, (self.width - self.row_label_width + SPACES_BETWEEN_BLOCKS) // (width + SPACES_BETWEEN_BLOCKS))
        painted: list[Text] = []
        for line in self.lines:
            if line is None:
                painted.append(Text(ELLIPSIS, style="dim"))
                continue
            chosen = self._shown_blocks(line)
            for start in range(0, len(chosen), across):
                blocks = chosen[start : start + across]
                if blocks == [None]:
                    painted.append(Text(" " * self.row_label_width + ELLIPSIS, style="dim"))
                else:
                    painted += self._draw_line_of_blocks(line, blocks, width)
        shown = (self.lines, self.blocks, self.rows, self.columns)
        return Drawing(painted, has_omitted_values=any(None in indices for indices in shown))

    def _shown_blocks(self, line: int) -> list[int | None]:
        """Choose the shown blocks of a line; at the ends of a large tensor these are the outermost blocks."""
        last = self.tensor.shape[0] - 1
        if last == 0 or None not in self.blocks or line not in (0, last):
            return self.blocks
        return self.blocks[:2] if line == 0 else self.blocks[-2:]

    def _draw_line_of_blocks(self, line: int, blocks: list[int | None], width: int) -> list[Text]:
        labels = self._draw_row_labels(line)
        gap = [Text(ELLIPSIS, style="dim")]
        columns = [labels, *(gap if block is None else self._draw_block(line, block) for block in blocks)]
        widths = [self.row_label_width, *(width + SPACES_BETWEEN_BLOCKS for _ in blocks)]
        joined = []
        for cells in zip_longest(*columns, fillvalue=Text()):
            text = Text()
            for cell, wide in zip(cells, widths, strict=True):
                text.append_text(cell)
                text.append(" " * (wide - cell.cell_len))
            text.rstrip()
            joined.append(text)
        return joined

    def _draw_row_labels(self, line: int) -> list[Text]:
        """Draw the labels at the left of a line of blocks: the name of the line, then one label per row."""
        titled = bool(self._entry_name(1, 0))
        labels = [Text(self._entry_name(0, line), style="bold")] if titled else []
        if self.axes[3] == "keys":
            labels.append(Text())
        for row in self.rows:
            style = head_style(self.head_of_entry[row]) if self.head_axis == 2 and row is not None else "dim"
            labels.append(Text(f" {ELLIPSIS if row is None else self._entry_name(2, row)}", style=style))
        return labels
