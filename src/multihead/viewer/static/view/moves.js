// What the buttons and keys of a head's page do to the part of the map in view, and to the chosen cell.
import { centreView, moveView, zoomView } from './geometry.js';
import { pointAt, pointedNow, redraw, sceneNow } from './head.js';
import { shown } from './map.js';
import { state } from './permalink.js';
import { rowOfQuery } from './rows.js';

export const zoomBy = factor => {
  zoomView(factor, sceneNow().layer, null);
  redraw();
};
export const zoomWhole = () => {
  Object.assign(state, { x: 0, y: 0, n: 0 });
  redraw();
};
export function zoomOne() {
  const weights = rowOfQuery(sceneNow().a, state.q);
  const { layer } = sceneNow();
  let best = -1;
  if (weights)
    for (let j = layer.keys > 1 ? 1 : 0; j < weights.length; j++)
      if (weights[j] >= 0 && (best < 0 || weights[j] > weights[best])) best = j;
  centreView(layer, state.q, best < 0 ? Math.min(state.q, layer.keys - 1) : best, 56);
  redraw();
}
export function panView(right, down) {
  moveView(sceneNow().layer, (right * state.n) / 8, (down * state.n) / 8);
  redraw();
}
// Shift and an arrow move the selected cell, by a block where a cell is a block; Enter pins its query.
export function stepCell(right, down) {
  const { layer } = sceneNow();
  const [high, wide] = layer.blocks[shown.span?.level ?? 0];
  const from = pointedNow() ?? [state.q, Math.floor(state.x + state.n / 2)];
  const query = clampTo(from[0] + down * high, layer.queries);
  const key = clampTo(from[1] + right * wide, layer.keys);
  const [pane] = shown.panes;
  const outside = (p, start, size) => p < start || p >= start + size;
  if (outside(query, state.y, pane.py / pane.y) || outside(key, state.x, state.n)) centreView(layer, query, key);
  pointAt([query, key]);
}
const clampTo = (p, length) => Math.max(0, Math.min(length - 1, p));

export function pinQuery() {
  if (!pointedNow()) return;
  state.q = pointedNow()[0];
  redraw();
}
