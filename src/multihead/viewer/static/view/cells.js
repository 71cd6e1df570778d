// The cells in view at one level, from their tiles; while a tile is loading, from the next coarser level that is
// loaded.
import { largestOf } from '../shared/numbers.js';
import { loadedTile, TILE_SIDE } from './tiles.js';

const AWAIT = -1; // a cell that is not loaded yet

/** @typedef {ReturnType<typeof rangeOfCells>} Span a range of cells */
/** @typedef {ReturnType<typeof cellsOf>} Cells the values of a range of cells, and whether all are loaded */

// The range of cells at a level that a view covers: rows r0 up to r0 + rows, columns c0 up to c0 + cols; a cell covers
// high x wide weights.
export function rangeOfCells(/** @type {LayerDescription} */ layer, view, level) {
  const [high, wide] = layer.blocks[level];
  const cut = (from, to, n, block) => [
    Math.max(0, Math.floor(from / block)),
    Math.min(Math.ceil(n / block), Math.ceil(to / block)),
  ];
  const [r0, r1] = cut(view.y, view.y + view.rows, layer.queries, high);
  const [c0, c1] = cut(view.x, view.x + view.cols, layer.keys, wide);
  return { level, high, wide, r0, c0, rows: Math.max(0, r1 - r0), cols: Math.max(0, c1 - c0) };
}

// The tiles of a range, those nearest to its middle first.
export function tilesOf(where, span) {
  const found = [];
  const middle = [(span.r0 + span.rows / 2) / TILE_SIDE - 0.5, (span.c0 + span.cols / 2) / TILE_SIDE - 0.5];
  for (let i = Math.floor(span.r0 / TILE_SIDE); i * TILE_SIDE < span.r0 + span.rows; i++) {
    for (let j = Math.floor(span.c0 / TILE_SIDE); j * TILE_SIDE < span.c0 + span.cols; j++)
      found.push({ ...where, level: span.level, i, j });
  }
  const far = t => Math.hypot(t.i - middle[0], t.j - middle[1]);
  return found.sort((a, b) => far(a) - far(b));
}

export function cellsOf(where, /** @type {LayerDescription} */ layer, span) {
  const values = new Float32Array(span.rows * span.cols).fill(AWAIT);
  let whole = true;
  for (const t of tilesOf(where, span)) {
    const rows = [Math.max(span.r0, t.i * TILE_SIDE), Math.min(span.r0 + span.rows, (t.i + 1) * TILE_SIDE)];
    const cols = [Math.max(span.c0, t.j * TILE_SIDE), Math.min(span.c0 + span.cols, (t.j + 1) * TILE_SIDE)];
    if (loadedTile(t)) copy(values, span, rows, cols, t, 0);
    else {
      whole = false;
      // Where a map has several levels, each halves the sides of the one below it.
      for (let level = span.level + 1; level < layer.blocks.length; level++) {
        const up = level - span.level;
        const above = { ...where, level, i: t.i >> up, j: t.j >> up };
        if (loadedTile(above)) {
          copy(values, span, rows, cols, above, up);
          break;
        }
      }
    }
  }
  return { ...span, values, whole };
}

/**
 * Copy the cells of a tile, or of one `up` levels above, into those of a span.
 * @param {number[]} rows first row and the row after the last
 * @param {number[]} cols the same of the columns
 */
function copy(out, span, rows, cols, t, up) {
  const [top, bottom] = rows;
  const [left, right] = cols;
  const from = loadedTile(t);
  const i0 = t.i * TILE_SIDE;
  const j0 = t.j * TILE_SIDE;
  for (let r = top; r < bottom; r++) {
    const row = ((r >> up) - i0) * from.cols;
    const at = (r - span.r0) * span.cols - span.c0;
    if (up) for (let c = left; c < right; c++) out[at + c] = from.values[row + (c >> up) - j0];
    else out.set(from.values.subarray(row + left - j0, row + right - j0), at + left);
  }
}

// A - B of the same range; NaN where either is absent, 0 while either is loading.
export function differenceOfCells(a, b) {
  const values = new Float32Array(a.values.length);
  for (let k = 0; k < values.length; k++)
    values[k] = a.values[k] === AWAIT || b.values[k] === AWAIT ? 0 : a.values[k] - b.values[k];
  return { ...a, values, whole: a.whole && b.whole };
}

export const largestCell = one => largestOf(one.values);
export function farthestCell(one) {
  let top = 0;
  for (const v of one.values)
    if (v > top) top = v;
    else if (-v > top) top = -v;
  return top;
}
