// The largest differences in view, as a table next to the three maps.
import { $, el, translate } from '../shared/dom.js';
import { count, keepLargest, short } from '../shared/numbers.js';
import { isolated } from '../shared/tokens.js';
import { centre } from './geometry.js';
import { shown } from './map.js';
import { state } from './permalink.js';
import { label } from './record.js';

// Find the indices of the largest |values|, without sorting all of them.
function farthestPlaces(values, most) {
  const best = [],
    distance = k => Math.abs(values[k]);
  for (let k = 0; k < values.length; k++) if (distance(k) > 0) keepLargest(best, k, distance, most);
  return best;
}

const signed = d => (d < 0 ? '−' : '+') + short(Math.abs(d));

export function differences(scene, redraw) {
  const box = $('differ'),
    pane = shown.panes.find(one => one.which === 'd'),
    { a, b, d } = shown;
  box.hidden = !state.compare || !pane?.two || !d;
  if (box.hidden) return;
  const { high, wide } = shown.span,
    single = high * wide === 1,
    max = Math.max(3, Math.floor(pane.py / 30) - 3);
  const named = (side, p, where) =>
    single && side.text
      ? [el('bdi', { textContent: label(side, p) }), where ? el('small', { textContent: ` ${count(p)}` }) : '']
      : [count(p)];
  const rows = farthestPlaces(d.values, max).map(k => {
    const query = (d.r0 + Math.floor(k / d.cols)) * high,
      key = (d.c0 + (k % d.cols)) * wide;
    const go = el(
      'button',
      {
        onclick: () => {
          state.q = query;
          centre(scene.layer, query, key, Math.min(state.n, 56 * wide));
          redraw();
        },
      },
      ...named(scene.sides.query, query, true),
      ' → ',
      ...named(scene.sides.key, key, false),
    );
    go.title = `${isolated(label(scene.sides.query, query))} ${count(query)} → ${isolated(label(scene.sides.key, key))} ${count(key)}`;
    return el(
      'tr',
      {},
      el('th', { scope: 'row' }, go),
      ...[short(a.values[k]), short(b.values[k]), signed(d.values[k])].map(words => el('td', { textContent: words })),
    );
  });
  if (!rows.length) rows.push(el('tr', {}, el('td', { colSpan: 4, textContent: translate('no difference') })));
  const heads = [
    translate('query to key'),
    scene.runs ? 'A' : scene.titles.a[0],
    scene.runs ? 'B' : scene.titles.b[0],
    'A − B',
  ].map(words => el('th', { scope: 'col', textContent: words }));
  box.replaceChildren(
    el(
      'table',
      {},
      el('caption', {
        textContent:
          translate('largest differences') + (single ? '' : translate('in blocks', { rows: high, columns: wide })),
      }),
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
