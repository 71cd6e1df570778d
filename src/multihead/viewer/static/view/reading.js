// The panels of the query that is read, the one under the pointer or the chosen one: its weight on a key, the strip
// along the text, the largest weights in context, the text around it.
import {
  colourOfTone,
  cssVariable,
  endOfRootScale,
  hatchingPattern,
  paintElement,
  sizeCanvas,
  toneOf,
} from '../shared/colour.js';
import { $, el, elementAround, translate } from '../shared/dom.js';
import { isSingle } from '../shared/legend.js';
import { formatCount, formatExact, formatPercent, formatShort, keepLargest } from '../shared/numbers.js';
import { directionOf, isolateToken, joinTokens, quoteToken, setText } from '../shared/tokens.js';
import { centreView } from './geometry.js';
import { shown } from './map.js';
import { state } from './permalink.js';
import { labelOfToken } from './record.js';
import { rowOfQuery, wantRows } from './rows.js';

/** @import { Scene } from './head.js' */

const STRONGEST = 9;
const BEFORE = 120;
const AFTER = 30;
const WHOLE = 400;
let drawn = '';

// The query that is read: its weights a, b (of the second head), what follows from them, and whether it has changed
// since it was drawn. A weight is NaN where it is masked, -1 where the page does not store it. Null until the weights
// have arrived.
export function readQuery(/** @type {Scene} */ scene, pointed) {
  const q = pointed ? pointed[0] : state.q;
  const places = [scene.a, ...(state.compare && q < scene.otherLayer.queries ? [scene.b] : [])];
  if (!scene.layer.rows) {
    $('read').setAttribute('aria-busy', 'false');
    return { q, a: null };
  }
  wantRows(places, q);
  const a = rowOfQuery(scene.a, q);
  const b = state.compare ? rowOfQuery(scene.b, q) : null;
  const here = a && (places.length < 2 || b);
  $('read').setAttribute('aria-busy', String(!here));
  if (!here) return null; // the panels stay as they are until the whole row has arrived
  const shares = summary(a, scene);
  const now = [JSON.stringify(places), q, state.scale, state.masked, $('right').clientWidth].join();
  const changed = now !== drawn || !pointed;
  drawn = now;
  return { q, a, b, shares, changed };
}

// Summarise a row: its largest weights, its entropy and its colour scale (linear ends at the largest weight); a masked
// first key is left out.
function summary(a, /** @type {Scene} */ scene) {
  const best = [];
  const weight = j => a[j];
  let entropy = 0;
  let top = 0;
  let sees = 0;
  let stored = 0;
  let total = 0;
  let last = -1;
  for (let j = 0; j < a.length; j++) {
    const w = a[j];
    if (Number.isNaN(w)) continue;
    sees++;
    last = j;
    if (w < 0) continue;
    stored++;
    total += w;
    if (w > 0) entropy -= w * Math.log(w);
    if (state.masked && j === 0) continue;
    if (w > top) top = w;
    keepLargest(best, j, weight, STRONGEST);
  }
  // Without the first key the others get the whole scale, because the reader wants to see the differences between them.
  const end = state.scale === 'linear' ? top : state.masked ? endOfRootScale(top, false) : 1;
  return {
    best,
    top,
    sees,
    stored,
    total,
    last,
    keys: Math.exp(entropy),
    end,
    tone: w => toneOf(state.scale, w, end),
    causal: scene.layer.pattern === 'causal',
  };
}
const notStored = n => translate(n === 1 ? 'not stored 1' : 'not stored', { n });

// The panels that read weights have something to show where the record or the page has single weights.
const readable = (/** @type {Scene} */ scene) => !!scene.layer.rows;
const readPanel = (box, draw, forget = () => {}) => ({
  box,
  fits: readable,
  draw: (/** @type {Scene} */ scene, _pointed, read, redraw) => {
    if (read?.changed) draw(scene, read, redraw);
  },
  forget,
});

export const valuePanel = {
  box: 'read',
  fits: () => true,
  draw: (/** @type {Scene} */ scene, pointed, read) => {
    if (!read) return;
    if (read.a) showWeight(scene, pointed, read);
    else meanOf(scene, pointed ?? [state.q, Math.min(state.q + scene.layer.queryStart, scene.layer.keys - 1)]);
  },
  forget: () => {
    drawn = '';
  },
};

const side = (which, p, name) => [
  el('bdi', { className: 'tok', textContent: labelOfToken(which, p) }),
  el('small', { textContent: ` ${translate(name)} ${formatCount(p)}` }),
];
function show(sides, words, worded, notes, value = '') {
  $('read').replaceChildren(
    el('div', { className: 'q' }, ...sides),
    el(
      'div',
      { className: 'w' + (worded ? ' worded' : '') },
      el('data', { value, textContent: words }),
      ...notes.map(note => el('small', { textContent: note })),
    ),
  );
}

function showWeight(/** @type {Scene} */ scene, pointed, { q, a, b, shares }) {
  const key = pointed && pointed[1] >= 0 ? pointed[1] : (shares.best[0] ?? -1);
  const blind = !shares.sees;
  const w = key >= 0 ? a[key] : NaN;
  const hidden = Number.isNaN(w);
  const partial = shares.stored < shares.sees;
  const words = blind
    ? translate('no keys visible')
    : hidden
      ? translate(shares.causal && key > shares.last ? 'later key' : 'masked')
      : w < 0
        ? notStored(shares.stored)
        : formatExact(w);
  const notes = blind || hidden || partial ? [] : [translate('effective keys', { n: shares.keys.toFixed(1) })];
  if (b && !blind) notes.unshift(`${scene.titles.b[0]} ${b[key] >= 0 ? formatExact(b[key]) : translate('absent')}`);
  const toKey = [el('br'), '→ ', ...side(scene.sides.key, key, 'key')];
  const mean = blockMean(q, key);
  if (mean) notes.push(mean);
  show(
    [...side(scene.sides.query, q, 'query'), ...(blind ? [] : toKey)],
    words,
    blind || hidden || w < 0,
    notes,
    hidden ? '' : String(w),
  );
}

// The cell of a map at a query and key: its mean and what it covers; null if it is not in view.
function cellOf(query, key) {
  const one = shown.a;
  const { high, wide } = shown.span ?? {};
  const r = Math.floor(query / high) - one?.r0;
  const c = Math.floor(key / wide) - one?.c0;
  return one && r >= 0 && c >= 0 && r < one.rows && c < one.cols
    ? { mean: one.values[r * one.cols + c], high, wide, r: r + one.r0, c: c + one.c0 }
    : null;
}

// The mean of the cell under the pointer, if the cell covers more than one weight.
function blockMean(query, key) {
  const cell = cellOf(query, key);
  return cell && !isSingle([cell.high, cell.wide]) && cell.mean >= 0
    ? translate('block mean', { rows: cell.high, columns: cell.wide, share: formatShort(cell.mean) })
    : '';
}

// Without single weights: the mean of a cell, and the queries and keys that it covers.
function meanOf(/** @type {Scene} */ scene, [query, key]) {
  const cell = cellOf(query, key);
  if (!cell) {
    $('read').replaceChildren();
    return;
  }
  const { mean, high, wide, r, c } = cell;
  const span = (at, block, all) =>
    block === 1 ? formatCount(at) : `${formatCount(at * block)}–${formatCount(Math.min(all, (at + 1) * block) - 1)}`;
  show(
    [
      translate('queries n', { range: span(r, high, scene.layer.queries) }),
      el('br'),
      '→ ',
      translate('keys n', { range: span(c, wide, scene.layer.keys) }),
    ],
    !Number.isNaN(mean) ? formatExact(mean) : translate('masked'),
    Number.isNaN(mean),
    !Number.isNaN(mean) && !isSingle([high, wide]) ? [translate('mean of block', { rows: high, columns: wide })] : [],
    String(mean),
  );
}

export const stripPanel = readPanel('along', (/** @type {Scene} */ scene, { q, a, shares }, redraw) => {
  const canvas = $('strip');
  const width = Math.max(120, $('right').clientWidth - 32);
  const high = 36;
  const pen = sizeCanvas(canvas, width, 58);
  const bins = Math.min(a.length, Math.floor(width / 2));
  const size = width / bins;
  const from = b => Math.floor((b * a.length) / bins);
  canvas.onclick = event => {
    const box = canvas.getBoundingClientRect();
    centreView(scene.layer, state.q, ((event.clientX - box.left) / box.width) * scene.layer.keys);
    redraw();
  };
  canvas.setAttribute('aria-label', translate('strip label', { query: formatCount(q) }));
  const hatch = hatchingPattern(pen, 5);
  for (let b = 0; b < bins; b++) {
    let max = NaN;
    for (let j = from(b); j < Math.max(from(b) + 1, from(b + 1)); j++)
      if (!(state.masked && !j) && !(a[j] <= max) && !Number.isNaN(a[j])) max = a[j];
    if (Number.isNaN(max)) {
      pen.fillStyle = hatch;
      pen.fillRect(b * size, 0, size + 0.5, high);
      continue;
    }
    const t = shares.tone(max);
    pen.fillStyle = colourOfTone('ink', Math.max(0.35, t));
    pen.fillRect(b * size, high - t * high, Math.max(1, size - (size > 3 ? 1 : 0.4)), t * high);
  }
  pen.fillStyle = cssVariable('line2');
  pen.fillRect(0, high, width, 1);
  pen.fillStyle = cssVariable('ink');
  pen.fillRect(
    (state.x / a.length) * width,
    high + 3,
    Math.max(3, (Math.min(state.n, a.length) / a.length) * width),
    2,
  );
  if (!scene.layer.crosses) {
    pen.fillStyle = cssVariable('mark');
    pen.fillRect(((q + scene.layer.queryStart + 0.5) / a.length) * width - 0.75, 0, 1.5, high + 2);
  }
  pen.fillStyle = cssVariable('faint');
  pen.font = `11px ${cssVariable('sans')}`;
  for (const [align, x, key] of [
    ['left', 0, 0],
    ['right', width, a.length - 1],
  ]) {
    pen.textAlign = align;
    pen.fillText(translate('key n', { n: formatCount(key) }), x, 52);
  }
  $('rowtop').textContent =
    state.scale === 'log'
      ? translate('scale.log')
      : `0–${formatShort(shares.end)}, ${translate('scale.' + state.scale)}`;
});

// List the largest weights with the text around their keys, one per line, which shows an induction head best.
export const contextPanel = readPanel('context', (/** @type {Scene} */ scene, { q, a, shares }, redraw) => {
  const { text, from } = scene.sides.key;
  const cell = (name, ...children) => el('span', { className: name }, ...children);
  const dir = text ? directionOf(text) : 'ltr';
  const around = (start, stop) =>
    el('bdi', { dir, textContent: text ? joinTokens(text, start + from, stop + from) : '' });
  $('kwic').classList.toggle('bare', !text);
  $('kwic').dir = dir;
  $('kwic').replaceChildren(
    ...shares.best.flatMap(j => {
      const word = labelOfToken(scene.sides.key, j);
      const go = el(
        'button',
        {
          onclick: () => {
            state.q = q;
            centreView(scene.layer, q, j, 56);
            redraw();
          },
          'aria-label': translate('go there', {
            key: formatCount(j),
            token: quoteToken(word),
            share: formatShort(a[j]),
          }),
        },
        el('bdi', { textContent: word }),
      );
      paintElement(go, shares.tone(a[j]));
      return [
        cell('n', formatCount(j)),
        cell('l', around(j - 5, j)),
        go,
        cell('r', around(j + 1, j + 6)),
        cell('p', formatShort(a[j])),
      ];
    }),
  );
  if (!shares.sees)
    $('kwic').replaceChildren(el('p', { className: 'note', textContent: translate('no keys visible') }));
  $('keptshare').hidden = shares.stored === shares.sees;
  $('keptshare').textContent = translate(shares.stored === 1 ? 'stored share 1' : 'stored share', {
    n: shares.stored,
    share: formatPercent(Math.min(1, shares.total)),
  });
});

const shownParts = new Map(); // box of a text -> the part of the text that is in it
const resting = new Set(); // boxes whose text must not move, because the pointer is on it

// A text of which the part around a token is shown; a word of it that is pointed at or clicked is the query, if it is
// one.
function partOfText(box, { text, from }, length, at, before) {
  const start = length <= WHOLE ? 0 : Math.max(0, Math.min(length - BEFORE - AFTER, at - before));
  const end = length <= WHOLE ? length : Math.min(length, start + BEFORE + AFTER);
  const held = shownParts.get(box);
  if (resting.has(box) && held?.text === text && at >= held.start && at < held.end) return held;
  if (held?.text === text && held.start === start && held.end === end) return held;
  const part = { text, start, end, list: setText(box, text, start + from, end + from) };
  shownParts.set(box, part);
  return part;
}
function selectable(box, queryOf, queries, { point, redraw }) {
  const query = event => {
    const p = elementAround(event, '.tk')?.dataset.p;
    const q = p === undefined ? -1 : queryOf(+p);
    return q >= 0 && q < queries ? q : -1;
  };
  box.onmouseover = event => {
    const q = query(event);
    if (q >= 0) {
      resting.add(box);
      point(q);
    }
  };
  box.onmouseleave = () => {
    point(-1);
    resting.delete(box);
  };
  box.onclick = event => {
    const q = query(event);
    if (q >= 0) {
      state.q = q;
      redraw();
    }
  };
}
function scrollToMark(box, list) {
  const on = list.find(one => one.classList.contains('on'));
  if (on && !resting.has(box) && box.scrollHeight > box.clientHeight + 4)
    box.scrollTop = on.offsetTop - box.offsetTop - box.clientHeight * 0.6;
}

export const pointing = { point: _query => {} }; // show a query as if it were pointed at, -1 for none
export const textPanel = {
  ...readPanel('over', (/** @type {Scene} */ scene, { q, a, shares }, redraw) => {
    const { layer, sides } = scene;
    const { text, from } = sides.key;
    const box = $('text');
    const n = a.length;
    const at = layer.crosses ? (shares.best[0] ?? 0) : q + layer.queryStart;
    $('span').textContent = '';
    $('queries').hidden = !layer.crosses || !sides.query.text;
    if (!$('queries').hidden) {
      const { list, start } = partOfText($('querytext'), sides.query, layer.queries, q, BEFORE / 2);
      for (const [k, one] of list.entries()) one.classList.toggle('on', start + k === q);
      selectable($('querytext'), p => p - sides.query.from, layer.queries, { ...pointing, redraw });
      scrollToMark($('querytext'), list);
    }
    if (!text) {
      shownParts.delete(box);
      box.replaceChildren(el('span', { className: 'note', textContent: translate('no tokens') }));
      return;
    }
    const { list, start, end } = partOfText(box, sides.key, n, at, shares.causal ? BEFORE : (BEFORE + AFTER) / 2);
    selectable(box, p => (layer.crosses ? -1 : p - from - layer.queryStart), layer.queries, {
      ...pointing,
      redraw,
    });
    list.forEach((one, k) => {
      const j = start + k;
      const w = a[j];
      const hidden = Number.isNaN(w);
      paintElement(one, hidden || (state.masked && !j) ? 0 : shares.tone(w));
      one.classList.toggle('on', !layer.crosses && j === at);
      one.classList.toggle('unseen', hidden);
      one.title = hidden
        ? translate(shares.causal && j > shares.last ? 'later key' : 'masked')
        : `${isolateToken(text.labels[j + from])} ${w < 0 ? notStored(shares.stored) : formatShort(w)}`;
    });
    $('span').textContent = n <= WHOLE ? '' : `${formatCount(start)}–${formatCount(end - 1)}`;
    scrollToMark(box, list);
  }),
  forget: () => shownParts.clear(),
};
