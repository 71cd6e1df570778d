// The part of the map in view, and the position of the map on the screen.
import { state } from './permalink.js';

const MIN_KEYS = 12; // keys across at the deepest zoom
const clamped = (v, min, max) => Math.max(min, Math.min(max, v));

// A map of few queries and many keys (or the reverse) would be too thin to read: its cells are drawn taller or wider.
export function aspectOf({ queries, keys }) {
  const ratio = keys / queries;
  return ratio > 4 ? ratio / 4 : ratio < 1 / 4 ? ratio * 4 : 1;
}
const widest = (/** @type {LayerDescription} */ layer) => Math.max(layer.keys, layer.queries * aspectOf(layer));

export function clampView(/** @type {LayerDescription} */ layer) {
  const aspect = aspectOf(layer);
  const max = widest(layer);
  state.n = clamped(state.n > 0 ? state.n : max, Math.min(MIN_KEYS, max), max);
  state.x = clamped(state.x, 0, Math.max(0, layer.keys - state.n));
  state.y = clamped(state.y, 0, Math.max(0, layer.queries - state.n / aspect));
  state.q = Math.floor(
    clamped(state.q >= 0 ? state.q : state.y + Math.min(layer.queries, state.n / aspect) * 0.6, 0, layer.queries - 1),
  );
}

// The part of the map in view: n keys across and as many queries as the pane is high.
export const viewOf = (/** @type {LayerDescription} */ layer) => ({
  x: state.x,
  y: state.y,
  cols: state.n,
  rows: state.n / aspectOf(layer),
});

export function zoomView(factor, /** @type {LayerDescription} */ layer, at) {
  const aspect = aspectOf(layer);
  const max = widest(layer);
  const x = at ? at[1] : state.x + state.n / 2;
  const y = at ? at[0] : state.y + state.n / aspect / 2;
  const n = clamped(state.n * factor, Math.min(MIN_KEYS, max), max);
  const g = n / state.n;
  Object.assign(state, { x: x - (x - state.x) * g, y: y - (y - state.y) * g, n });
  clampView(layer);
}

export function centreView(/** @type {LayerDescription} */ layer, query, key, n = state.n) {
  state.n = n;
  clampView(layer);
  state.x = key + 0.5 - state.n / 2;
  state.y = query + 0.5 - state.n / aspectOf(layer) / 2;
  clampView(layer);
}

export function moveView(/** @type {LayerDescription} */ layer, right, down) {
  state.x += right;
  state.y += down / aspectOf(layer);
  clampView(layer);
}

/** @typedef {ReturnType<typeof panesOf>[number]} Pane a map on the stage */

// The panes on a stage of width x height: one; or A, B and A - B in three of its four quarters; or, on a phone, A - B
// alone.
export function panesOf(/** @type {LayerDescription} */ layer, width, height, { compare, long, margins }) {
  const phone = width < 620;
  const two = compare && !phone;
  const across = two ? 2 : 1;
  const aspect = aspectOf(layer);
  const left = phone ? 44 : long ? 104 : 96;
  const gap = 24;
  const strip = !margins ? 0 : phone ? 18 : 44;
  const right = 20 + strip;
  const bottom = 22 + strip;
  const top = phone ? (compare ? 64 : 46) : two ? (long ? 104 : 64) : 84;
  const ratio = clamped(Math.min(1, (layer.queries * aspect) / layer.keys), 0.25, 1);
  const wide = (width - left - right - gap * (across - 1)) / across;
  const high = (height - across * (top + bottom)) / across;
  const px = Math.floor(Math.max(80, Math.min(wide, high / ratio)));
  const py = Math.floor(px * ratio);
  const start = Math.max(left, (width - across * px - gap * (across - 1) - left - right) / 2 + left);
  const x = px / state.n;
  const y = x * aspect;
  return (compare ? (phone ? ['d'] : ['a', 'b', 'd']) : ['a']).map(which => ({
    which,
    phone,
    two,
    top,
    x,
    y,
    left: start + (two && which === 'b' ? px + gap : 0),
    above: top + (two && which === 'd' ? py + top + bottom : 0),
    width: Math.min(px, (layer.keys - state.x) * x),
    height: Math.min(py, (layer.queries - state.y) * y),
    px,
    py,
  }));
}

// The coarsest level whose cells are still about two screen pixels wide.
export function levelFor(/** @type {LayerDescription} */ layer, cell) {
  const ratio = Math.min(2, devicePixelRatio || 1);
  let level = 0;
  while (level < layer.blocks.length - 1 && cell * layer.blocks[level][1] * ratio < 1.9) level++;
  return level;
}

export const cellAt = (pane, px, py) => {
  const key = state.x + (px - pane.left) / pane.x;
  const query = state.y + (py - pane.above) / pane.y;
  return px >= pane.left && py >= pane.above && px < pane.left + pane.width && py < pane.above + pane.height
    ? [query, key]
    : null;
};
