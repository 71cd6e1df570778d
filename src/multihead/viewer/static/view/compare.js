// The largest differences in view, as a table next to the three maps.
import { $, el, translate } from '../shared/dom.js';
import { isSingle } from '../shared/legend.js';
import { formatCount, formatShort, keepLargest } from '../shared/numbers.js';
import { isolateToken } from '../shared/tokens.js';
import { centreView } from './geometry.js';
import { shown } from './map.js';
import { state } from './permalink.js';
import { labelOfToken } from './record.js';

/** @import { Scene } from './head.js' */

// Find the indices of the largest |values|, without sorting all of them.
function farthestPlaces(values, most) {
  const best = [];
  const distance = k => Math.abs(values[k]);
  for (let k = 0; k < values.length; k++) if (distance(k) > 0) keepLargest(best, k, distance, most);
  return best;
}

const signed = d => (d < 0 ? '−' : '+') + formatShort(Math.abs(d));

export function showDifferences(/** @type {Scene} */ scene, redraw) {
  const box = $('differ');
  const pane = shown.panes.find(one => one.which === 'd');
  box.hidden = !state.compare || !pane?.two || !shown.d;
  if (box.hidden) return;
  const { high, wide } = shown.span;
  const max = Math.max(3, Math.floor(pane.py / 30) - 3);
  const rows = farthestPlaces(shown.d.values, max).map(k => rowOf(scene, k, redraw));
  if (!rows.length) rows.push(el('tr', {}, el('td', { colSpan: 4, textContent: translate('no difference') })));
  const heads = [
    translate('query to key'),
    scene.runs ? 'A' : scene.titles.a[0],
    scene.runs ? 'B' : scene.titles.b[0],
    'A − B',
  ].map(words => el('th', { scope: 'col', textContent: words }));
  const blocks = isSingle([high, wide]) ? '' : translate('in blocks', { rows: high, columns: wide });
  box.replaceChildren(
    el(
      'table',
      {},
      el('caption', { textContent: translate('largest differences') + blocks }),
      el('thead', {}, el('tr', {}, ...heads)),
      el('tbody', {}, ...rows),
    ),
  );
  Object.assign(box.style, {
    left: `${pane.left + pane.px + 24}px`,
    top: `${pane.above - 44}px`,
    width: `${pane.px}px`,
    maxHeight: `${pane.py + 44}px`,
  });
}

// The row of cell k: a button that shows the cell, and its values in both maps.
function rowOf(/** @type {Scene} */ scene, k, redraw) {
  const { a, b, d } = shown;
  const { high, wide } = shown.span;
  const { query: queries, key: keys } = scene.sides;
  const query = (d.r0 + Math.floor(k / d.cols)) * high;
  const key = (d.c0 + (k % d.cols)) * wide;
  const token = (side, p) =>
    isSingle([high, wide]) && side.text ? el('bdi', { textContent: labelOfToken(side, p) }) : formatCount(p);
  const place = isSingle([high, wide]) && queries.text ? [el('small', { textContent: ` ${formatCount(query)}` })] : [];
  const show = () => {
    state.q = query;
    centreView(scene.layer, query, key, Math.min(state.n, 56 * wide));
    redraw();
  };
  const go = el('button', { onclick: show }, token(queries, query), ...place, ' → ', token(keys, key));
  const [from, to] = [isolateToken(labelOfToken(queries, query)), isolateToken(labelOfToken(keys, key))];
  go.title = `${from} ${formatCount(query)} → ${to} ${formatCount(key)}`;
  const values = [formatShort(a.values[k]), formatShort(b.values[k]), signed(d.values[k])];
  return el('tr', {}, el('th', { scope: 'row' }, go), ...values.map(textContent => el('td', { textContent })));
}
