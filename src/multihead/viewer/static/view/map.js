// The panel of the map: panes of cells, hatching over masked cells, the pinned query, the cell under the pointer, and
// at the margins of a single pane the attention that each key receives and the entropy of each query.
import { bitmapOf, colourScheme, cssVariable, endOfRootScale, hatchingPattern, sizeCanvas } from '../shared/colour.js';
import { $, translate } from '../shared/dom.js';
import { cellsOf, differenceOfCells, farthestCell, largestCell, rangeOfCells, tilesOf } from './cells.js';
import { aspectOf, levelFor, panesOf, viewOf } from './geometry.js';
import { stripsOf } from './margins.js';
import { state } from './permalink.js';
import { drawCaptions, drawRulers, MIN_CELL_OF_TOKENS } from './rulers.js';
import { tilesArrived, wantTiles } from './tiles.js';

/** @import { Cells, Span } from './cells.js' */
/** @import { Pane } from './geometry.js' */
/** @import { Scene } from './head.js' */

/**
 * What the map shows: its panes, the range of its cells, the ends of its scales, and the cells of A, B and A − B.
 * @type {{ panes: Pane[], span: Span, tops: { ink: number, apart: number }, a: Picture, b: Picture, d: Picture }}
 * @typedef {Cells & { picture: HTMLCanvasElement }} Picture
 */
export const shown = { panes: [], span: null, tops: { ink: 1, apart: 1 }, a: null, b: null, d: null };
let before = '';

// The range of cells to draw, at the level that fits the zoom; while the coarse levels are being built, at level 5 at
// most.
function spanFor(/** @type {Scene} */ scene, view, cell) {
  const level = levelFor(scene.layer, cell);
  const usable = scene.coarse ? level : Math.min(level, 5);
  const span = rangeOfCells(scene.layer, view, usable);
  return tilesOf({}, span).length > 24 ? null : span;
}

function draw(/** @type {Scene} */ scene, pointed) {
  const stage = $('stage');
  const width = stage.clientWidth;
  const height = stage.clientHeight;
  const { layer } = scene;
  // Tokens on the rulers need more room, but only if the cells then stay large enough to be labelled.
  const strips = state.compare ? [] : stripsOf(scene);
  const fit = long =>
    panesOf(layer, width, height, { compare: state.compare, long, margins: !state.compare && layer.margins.length });
  const roomy = fit(true);
  const view = viewOf(layer);
  const boxes = scene.sides.key.text && roomy[0].x >= MIN_CELL_OF_TOKENS ? roomy : fit(false);
  // A wide map may be less high than it is wide; the rows in view follow from the pane.
  view.rows = boxes[0].py / boxes[0].y;
  view.cols = boxes[0].px / boxes[0].x;
  const span = spanFor(scene, view, boxes[0].x);
  shown.panes = boxes;
  shown.span = span;
  gather(scene, span);
  const pen = sizeCanvas($('map'), width, height);
  for (const pane of boxes) drawPane(pen, pane, scene, pointed);
  for (const strip of strips) strip.draw(pen, boxes[0], pointed);
  drawCaptions(pen, boxes[0], layer, scene.sides, strips.length && !boxes[0].phone ? 34 : strips.length && 12);
  maskedLabel(pen, boxes[0], layer);
}

// The level of the small map of the whole: the finest that is one tile; not drawn until the coarse levels are built.
const upperOf = (/** @type {LayerDescription} */ layer) => Math.max(0, layer.blocks.length - 3);
function wholeSpan(/** @type {Scene} */ scene) {
  const { layer } = scene;
  const level = upperOf(layer);
  return scene.coarse || level < 6
    ? rangeOfCells(layer, { x: 0, y: 0, rows: layer.queries, cols: layer.keys }, level)
    : null;
}

// Collect the cells of each pane, again only when tiles arrived, the view moved or the colours changed.
function gather(/** @type {Scene} */ scene, span) {
  const places = [scene.a, ...(state.compare ? [scene.b] : [])];
  if (!span) {
    wantTiles([]);
    Object.assign(shown, { a: null, b: null, d: null });
    before = '';
    return;
  }
  const overview = wholeSpan(scene);
  const top = overview ? tilesOf(scene.a, overview) : [];
  const below =
    state.compare && scene.coarse
      ? tilesOf(scene.b, rangeOfCells(scene.otherLayer, viewOf(scene.layer), upperOf(scene.otherLayer)))
      : [];
  wantTiles([
    ...top,
    ...places.flatMap((where, p) => tilesOf(where, p ? within(scene.otherLayer, span) : span)),
    ...below,
  ]);
  const key = [
    JSON.stringify(span),
    JSON.stringify(places),
    state.scale,
    tilesArrived.count,
    colourScheme.matches,
  ].join();
  if (key === before) return;
  before = key;
  const a = cellsOf(scene.a, scene.layer, span);
  const b = state.compare ? stretched(cellsOf(scene.b, scene.otherLayer, within(scene.otherLayer, span)), span) : null;
  const d = b && differenceOfCells(a, b);
  shown.tops = {
    ink: endOf(Math.max(largestCell(a), b ? largestCell(b) : 0), span),
    apart: endOf(d ? farthestCell(d) : 0, span),
  };
  for (const [name, one] of [
    ['a', a],
    ['b', b],
    ['d', d],
  ]) {
    shown[name] = one && {
      ...one,
      picture: bitmapOf(one, name === 'd' ? 'apart' : 'ink', state.scale, shown.tops[name === 'd' ? 'apart' : 'ink']),
    };
  }
}

const endOf = (largest, { high, wide }) =>
  state.scale === 'linear' ? largest : endOfRootScale(largest, high * wide === 1);

// Another run may have fewer tokens, or no cells of this size: cells outside of it are absent.
function within(/** @type {LayerDescription} */ layer, span) {
  const [high, wide] = layer.blocks[span.level] ?? [];
  const has = high === span.high && wide === span.wide;
  const cut = (size, n, block, from) => (has ? Math.max(0, Math.min(size, Math.ceil(n / block) - from)) : 0);
  return {
    ...span,
    rows: cut(span.rows, layer.queries, high, span.r0),
    cols: cut(span.cols, layer.keys, wide, span.c0),
  };
}
function stretched(one, span) {
  if (one.rows === span.rows && one.cols === span.cols) return one;
  const values = new Float32Array(span.rows * span.cols).fill(NaN);
  for (let r = 0; r < one.rows; r++) values.set(one.values.subarray(r * one.cols, (r + 1) * one.cols), r * span.cols);
  return { ...span, values, whole: one.whole };
}

function drawPane(pen, pane, /** @type {Scene} */ scene, pointed) {
  const { left, above, width, height } = pane;
  const one = shown[pane.which];
  const ratio = devicePixelRatio || 1;
  const x = j => left + (j - state.x) * pane.x;
  const y = i => above + (i - state.y) * pane.y;
  const snap = v => Math.round(v * ratio) / ratio;
  pen.save();
  pen.beginPath();
  pen.rect(left, above, width, height);
  pen.clip();
  pen.fillStyle = cssVariable('paper');
  pen.fillRect(left, above, width, height);
  if (one) {
    const { high, wide } = shown.span;
    const x0 = snap(x(one.c0 * wide));
    const y0 = snap(y(one.r0 * high));
    pen.fillStyle = hatchingPattern(pen);
    pen.fillRect(left, above, width, height);
    pen.imageSmoothingEnabled = Math.min(pane.x * wide, pane.y * high) * ratio < 1;
    pen.drawImage(
      one.picture,
      x0,
      y0,
      snap(x(Math.min(scene.layer.keys, (one.c0 + one.cols) * wide))) - x0,
      snap(y(Math.min(scene.layer.queries, (one.r0 + one.rows) * high))) - y0,
    );
  }
  if (scene.a.masked && state.x < 1) line(pen, 'mark', [x(1), above, x(1), above + height], [3, 3]);
  outlineRow(pen, pane, y, state.q, 'mark', 1.25);
  if (pointed) crosshair(pen, pane, x, y, pointed);
  pen.restore();
  pen.strokeStyle = cssVariable('line2');
  pen.lineWidth = 1;
  pen.strokeRect(left - 0.5, above - 0.5, width + 1, height + 1);
  if (state.compare) title(pen, pane, scene);
  drawRulers(pen, pane, scene.layer, pane.which === 'b' ? scene.otherSides : scene.sides, pointed);
}

function line(pen, colour, [x1, y1, x2, y2], dash = []) {
  pen.strokeStyle = cssVariable(colour);
  pen.lineWidth = 1.25;
  pen.setLineDash(dash);
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
  pen.setLineDash([]);
}

// Outline the cells of query i; where they are small, draw a line through them.
function outlineRow(pen, pane, y, i, colour, lineWidth) {
  Object.assign(pen, { lineWidth, strokeStyle: cssVariable(colour) });
  if (pane.y > 3) pen.strokeRect(pane.left - 2, y(i), pane.width + 4, pane.y);
  else line(pen, colour, [pane.left, y(i + 0.5), pane.left + pane.width, y(i + 0.5)]);
}

function crosshair(pen, pane, x, y, [i, j]) {
  pen.globalAlpha = 0.5;
  outlineRow(pen, pane, y, i, 'ink', 1);
  if (j >= 0 && pane.x > 3) pen.strokeRect(x(j), pane.above - 2, pane.x, pane.height + 4);
  else if (j >= 0) line(pen, 'ink', [x(j + 0.5), pane.above, x(j + 0.5), pane.above + pane.height]);
  pen.globalAlpha = 1;
}

function title(pen, pane, /** @type {Scene} */ scene) {
  const y = pane.above - pane.top + 14;
  const [name, kind] = scene.titles[pane.which];
  pen.textBaseline = 'middle';
  pen.font = `600 13px ${cssVariable('sans')}`;
  pen.fillStyle = cssVariable('ink');
  pen.textAlign = 'left';
  pen.fillText(name, pane.left, y);
  const used = pen.measureText(name).width;
  pen.font = `12px ${cssVariable('sans')}`;
  pen.fillStyle = cssVariable('faint');
  pen.textAlign = 'right';
  if (used + pen.measureText(kind).width + 12 < pane.px) pen.fillText(kind, pane.left + pane.px, y);
}

// Label the hatched triangle of a causal map, where it is wide enough.
function maskedLabel(pen, pane, /** @type {LayerDescription} */ layer) {
  if (!shown.a || pane.phone || layer.pattern !== 'causal') return;
  const key = state.x + state.n * 0.74;
  const query = state.y + (pane.py / pane.y) * 0.2;
  if (key <= query + (layer.queryStart ?? 0) + state.n * 0.2 || key > layer.keys || query > layer.queries) return;
  const words = translate('later keys');
  const x = pane.left + (key - state.x) * pane.x;
  const y = pane.above + (query - state.y) * pane.y;
  pen.font = `12px ${cssVariable('sans')}`;
  pen.textAlign = 'center';
  const wide = pen.measureText(words).width;
  if (wide > pane.width * 0.45) return;
  pen.fillStyle = cssVariable('paper');
  pen.fillRect(x - wide / 2 - 6, y - 10, wide + 12, 20);
  pen.fillStyle = cssVariable('faint');
  pen.fillText(words, x, y);
}

// Draw a small map of the whole, with a frame around the part in view.
export function drawMiniMap(/** @type {Scene} */ scene) {
  const canvas = $('mini');
  const { layer } = scene;
  const aspect = aspectOf(layer);
  const span = wholeSpan(scene);
  const scale = 184 / Math.max(layer.keys, layer.queries * aspect);
  const width = Math.max(8, layer.keys * scale);
  const height = Math.max(8, layer.queries * aspect * scale);
  const pen = sizeCanvas(canvas, width, height);
  pen.fillStyle = cssVariable('paper');
  pen.fillRect(0, 0, width, height);
  if (span) {
    const one = cellsOf(scene.a, layer, span);
    pen.fillStyle = hatchingPattern(pen, 5);
    pen.fillRect(0, 0, width, height);
    pen.imageSmoothingEnabled = (width / one.cols) * (devicePixelRatio || 1) < 1;
    pen.drawImage(
      bitmapOf(one, 'ink', state.scale, endOf(largestCell(one), span)),
      0,
      0,
      one.cols * span.wide * scale,
      one.rows * span.high * scale * aspect,
    );
  }
  pen.strokeStyle = cssVariable('line2');
  pen.strokeRect(0.5, 0.5, width - 1, height - 1);
  const box = (from, size, max) => {
    const s = Math.min(max - 2, Math.max(size, 9));
    return [Math.min(max - s - 1, Math.max(1, from - (s - size) / 2)), s];
  };
  const [x, w] = box(state.x * scale, state.n * scale, width);
  const [y, h] = box(state.y * scale * aspect, state.n * scale, height);
  pen.strokeStyle = cssVariable('mark');
  pen.lineWidth = 2;
  pen.strokeRect(x, y, w, h);
  return { scale, aspect };
}

export const mapPanel = { box: 'stage', fits: () => true, draw, forget: () => {} };
