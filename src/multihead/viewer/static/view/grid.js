// The grid of all heads: layers down, heads across, in as many columns of layers as fit into the window.
import { cssVariable, endOfRootScale, hatchingPattern, sizeCanvas } from '../shared/colour.js';
import { $, el, elementIn, elementsIn, takeLink, translate } from '../shared/dom.js';
import { drawHeads, fitGrid, letTabReach } from '../shared/headgrid.js';
import { root } from '../shared/host.js';
import { glyphElement, roleName } from '../shared/kinds.js';
import { isSingle } from '../shared/legend.js';
import { isKnown, largestOf } from '../shared/numbers.js';
import { drawMap, mapPicture } from '../shared/picture.js';
import { NotReadyError, pathOfHead, pathOfSample, requestFloats } from './api.js';
import { windowSize } from './host.js';
import { state, toHead } from './permalink.js';
import { view } from './record.js';

/** @import { Sample } from './record.js' */

const maps = new Map(); // "run sample layer" -> { rows, cols, block, top, heads: [values] }, or null if there are none
let shape = { cell: 40, gap: 6 };
let seen = new Set();
let watch = null;
/** @type {Sample} */
let current = null;
let lit = -1;
export const topWeight = { value: 0, single: true }; // the largest weight or mean of the small maps
const largestSmall = () => {
  const shown = current.layers.map(({ number }) => maps.get(nameOf(current, number))).filter(Boolean);
  Object.assign(topWeight, {
    value: Math.max(0, ...shown.map(one => one.top)),
    single: shown.every(one => isSingle(one.block)),
  });
};
// Where a scale of maps ends; the log scale ends at 100 % always.
const endOf = ({ value, single }) => (state.scale === 'linear' && single ? value : endOfRootScale(value, single));
export const scaleTop = () => endOf(topWeight);
export const gridListeners = { pointed: _head => {}, arrived: (_record, _layer) => {} };

const nameOf = (/** @type {Sample} */ record, l) => `${record.run} ${record.sample} ${l}`;
function mapOf(/** @type {Sample} */ record, i) {
  const { l, h } = record.heads[i];
  const found = maps.get(nameOf(record, l));
  return found ? { rows: found.rows, cols: found.cols, block: found.block, values: found.heads[h] } : null;
}
// The weights per cell of the maps that are means.
export const mapBlocks = (/** @type {Sample} */ record) =>
  record.layers.map(({ number }) => maps.get(nameOf(record, number))?.block).filter(block => block && !isSingle(block));
export const mapsMissing = (/** @type {Sample} */ record) =>
  record.layers.some(({ number }) => maps.get(nameOf(record, number)) === null);

const queue = [];
const requested = new Set();
let busy = 0;
function fetchMaps(/** @type {Sample} */ record, l) {
  const name = nameOf(record, l);
  if (!record.numbered.get(l).maps) {
    maps.set(name, null);
    gridListeners.arrived(record, l);
    return;
  }
  if (!record.mapped(l) || maps.has(name) || requested.has(name)) return;
  requested.add(name);
  queue.push({ record, l, name });
  next();
}
async function next() {
  if (busy >= 3 || !queue.length) return;
  const { record, l, name } = queue.shift();
  busy++;
  try {
    const {
      shape: [heads, rows, cols],
      block,
      values,
    } = await requestFloats(`${pathOfSample(record.run, record.sample)}/layers/${l}/maps`);
    const top = largestOf(values);
    maps.set(name, {
      rows,
      cols,
      block,
      top,
      heads: Array.from({ length: heads }, (_, h) => values.subarray(h * rows * cols, (h + 1) * rows * cols)),
    });
    if (record === current) largestSmall();
    gridListeners.arrived(record, l);
  } catch (error) {
    if (error instanceof NotReadyError) setTimeout(() => fetchMaps(record, l), 1500);
    else {
      maps.set(name, null);
      gridListeners.arrived(record, l);
    }
  } finally {
    busy--;
    requested.delete(name);
    next();
  }
}
export function retryMaps(/** @type {Sample} */ record) {
  for (const l of seen) if (maps.get(nameOf(record, l)) === undefined) fetchMaps(record, l);
}

export function drawGridOfHeads(/** @type {Sample} */ record, passes, goTo) {
  current = record;
  largestSmall();
  shape = fitGrid(record, $('gridbox').clientWidth, {
    phone: windowSize().width <= 640,
    high: windowSize().height * 1.05,
  });
  if (lit < 0 || lit >= record.heads.length) lit = firstLit(record);
  const box = $('grid');
  const held = box.contains(root.activeElement);
  drawHeads(
    box,
    record,
    shape,
    i => headCell(record, i),
    (row, layer) => {
      row.dataset.l = layer.number;
      row.firstChild.after(el('canvas', { className: 'ink', 'aria-hidden': 'true' }));
    },
  );
  box.onclick = event => {
    const link = takeLink(event);
    if (link) goTo(+link.dataset.i);
  };
  fadeHeads(passes);
  watching(record);
  if (held) focusHead(lit);
}

// The head selected at first: that of the first finding, else the most focused one.
function firstLit(/** @type {Sample} */ record) {
  if (record.findings.length) return Math.max(0, record.index(record.findings[0].layer, record.findings[0].head));
  const values = record.metrics.find(one => one.focus)?.values ?? [];
  return record.heads.reduce(
    (best, _, i) => (isKnown(values[i]) && values[i] < (values[best] ?? Infinity) ? i : best),
    0,
  );
}

function headCell(/** @type {Sample} */ record, i) {
  const { l, h } = record.heads[i];
  const entropy = record.metrics.find(one => one.id === 'entropy');
  const name =
    record.named(i) + (entropy && isKnown(entropy.values[i]) ? translate('and entropy', { n: entropy.number(i) }) : '');
  const link = el('a', {
    href: toHead(record.run, record.sample, l, h),
    tabIndex: i === lit ? 0 : -1,
    'aria-label': name,
    k: record.kinds[i],
    onmouseenter: () => point(i),
    onfocus: () => point(i),
  });
  link.dataset.i = i;
  link.classList.toggle('marked', record.aligned(i));
  return link;
}

// The number of the layer that a row of the grid has.
const numberOf = row => (row instanceof HTMLElement ? Number(row.dataset.l) : NaN);

// Only the rows near the window, and the maps of findings, are requested and drawn; a file has all of them at hand.
function watching(/** @type {Sample} */ record) {
  watch?.disconnect();
  seen = new Set();
  watch = new IntersectionObserver(
    entries => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        const l = numberOf(target);
        seen.add(l);
        watch.unobserve(target);
        if (!maps.has(nameOf(record, l))) fetchMaps(record, l);
        drawRow(l);
      }
    },
    { rootMargin: view.served ? '600px' : '100000px' },
  );
  for (const { layer } of record.findings) fetchMaps(record, layer);
  for (const { order } of record.important) for (const i of order) fetchMaps(record, record.heads[i].l);
  for (const rowOf of elementsIn($('grid'), '[data-l]')) watch.observe(rowOf);
}

let passing = _head => true;
export function fadeHeads(passes) {
  passing = passes;
  for (const link of $('grid').querySelectorAll('a')) link.classList.toggle('dim', !passes(+link.dataset.i));
  redrawRows();
}
export function redrawRows() {
  for (const l of seen) drawRow(l);
}

export function drawRow(l) {
  const made = elementIn($('grid'), `[data-l="${l}"]`);
  const found = maps.get(nameOf(current, l));
  const { cell, gap } = shape;
  if (!made || found === undefined) return;
  const canvas = made.querySelector('canvas');
  const layer = current.numbered.get(l);
  const pen = sizeCanvas(canvas, layer.heads * (cell + gap), cell);
  const inset = cell < 30 ? 1.5 : 2;
  const size = cell - inset * 2;
  const hatch = hatchingPattern(pen, 4);
  for (let h = 0; h < layer.heads; h++) {
    const i = current.index(l, h);
    const x = h * (cell + gap) + inset;
    pen.globalAlpha = passing(i) ? 1 : 0.16;
    if (!found) continue;
    pen.fillStyle = cssVariable('paper');
    pen.fillRect(x, inset, size, size);
    pen.fillStyle = hatch;
    pen.fillRect(x, inset, size, size);
    drawMap(
      pen,
      { rows: found.rows, cols: found.cols, values: found.heads[h] },
      x,
      inset,
      size,
      state.scale,
      scaleTop(),
    );
  }
  made.classList.toggle('bare', !found);
  if (!found)
    for (const link of made.querySelectorAll('a'))
      if (!link.firstChild) link.append(glyphElement(current.kinds[+link.dataset.i]));
}

// Every weight of a head, for a map of `size` pixels; null where they do not fit, or are not requested yet.
const SIDE = 256;
const whole = new Map(); // "run sample layer head" -> { rows, cols, block, values }
let requesting = null;
function everyWeight(/** @type {Sample} */ record, i, size) {
  const { l, h } = record.heads[i];
  const layer = record.layer(i);
  const name = `${nameOf(record, l)} ${h}`;
  if (layer.rows !== 'all' || Math.max(layer.queries, layer.keys) > Math.min(SIDE, size * (devicePixelRatio || 1)))
    return null;
  if (whole.has(name) || requesting?.name === name) return whole.get(name) ?? null;
  requesting?.control.abort();
  const mine = { name, control: new AbortController() };
  requesting = mine;
  requestFloats(`${pathOfHead(record.run, record.sample, l, h)}/tile?level=0&row=0&column=0`, mine.control.signal)
    .then(
      ({ shape: [rows, cols], values }) => {
        whole.set(name, { rows, cols, block: [1, 1], values });
        if (whole.size > 32) whole.delete(whole.keys().next().value);
        if (record === current && lit === i) gridListeners.pointed(i);
      },
      () => {},
    )
    .finally(() => {
      if (requesting === mine) requesting = null;
    });
  return null;
}

// The map of one head for the inspector: its picture, the weights per cell, and the end of its scale.
export function inspectedMap(/** @type {Sample} */ record, i, size) {
  const small = mapOf(record, i);
  const map = !small || isSingle(small.block) ? small : (everyWeight(record, i, size) ?? small);
  if (!map) return { picture: thumbnailOf(record, i, size), block: null };
  const single = isSingle(map.block);
  const value = single ? largestOf(map.values) : topWeight.value;
  const top = single && topWeight.single ? scaleTop() : endOf({ value, single });
  return { picture: thumbnailOf(record, i, size, map, top), block: map.block, top };
}

export function thumbnailOf(record, i, size, map = mapOf(record, i), top = scaleTop()) {
  return map
    ? mapPicture(map, size, state.scale, top)
    : el('span', { className: 'blankmap', k: record.kinds[i] }, glyphElement(record.kinds[i]));
}

function point(i) {
  lit = i;
  const cell = letTabReach($('grid'), i);
  gridListeners.pointed(i);
  return cell;
}
export const litHead = () => lit;
export const focusHead = (i, options = {}) => point(i)?.focus(options);

// Return from the page of a head: it is selected and in sight, and focused if the keyboard is in use.
export function returnToHead(i, focus) {
  const cell = point(i);
  if (focus) cell?.focus();
  else cell?.scrollIntoView({ block: 'nearest' });
}

export const headLink = (/** @type {Sample} */ record, i) =>
  el(
    'a',
    { href: toHead(record.run, record.sample, record.heads[i].l, record.heads[i].h) },
    thumbnailOf(record, i, 26),
    record.short(i),
    ...(record.layer(i).role ? [el('small', { textContent: ' ' + roleName(record.layer(i).role) })] : []),
  );
