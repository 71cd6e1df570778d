// Other heads of the same shape: those with similar weights, and one chosen head with the difference of the two.
import { bitmap, rootEnd } from '../shared/colour.js';
import { $, el, translate } from '../shared/dom.js';
import { glyph, kindName, kindNames } from '../shared/kinds.js';
import { isSingle, signedRamp } from '../shared/legend.js';
import { state, topOf } from './grid.js';
import { openHead } from './maps.js';
import { addressOf, D, HEADS, kindOf, kindsOf, layerOf, shortName } from './record.js';

const NEAREST = 5, MOST_CELLS = 1 << 25;  // weights compared: a second or two
let second = -1, turn = 0;

const alike = i => {
  const one = layerOf(i), same = layer => layer.queries === one.queries && layer.keys === one.keys && layer.queryStart === one.queryStart && layer.role === one.role;
  return HEADS.map((_, j) => j).filter(j => j !== i && same(layerOf(j)));
};

const entropyOf = (values, from, to, other) => {
  let total = 0;
  for (let k = from; k < to; k++) {
    const w = other ? (values[k] + other[k]) / 2 : values[k];
    if (w > 0) total -= w * Math.log(w);
  }
  return total;
};

// The Jensen-Shannon divergence of two heads, nats: the mean over the queries (every `step`th) that see a key.
function divergence(one, other, step) {
  const { rows, cols } = one;
  let total = 0, counted = 0;
  for (let q = (rows - 1) % step; q < rows; q += step) {
    const from = q * cols, to = from + cols;
    if (!one.values.subarray(from, to).some(w => w === w)) continue;
    total += entropyOf(one.values, from, to, other.values) - (entropyOf(one.values, from, to) + entropyOf(other.values, from, to)) / 2;
    counted++;
  }
  return counted ? Math.max(0, total / counted) : NaN;
}

// The list of similar heads; it needs every weight, so a page that stores only some of them has none.
export function similar(i) {
  const others = alike(i), box = el('div', { id: 'nearest' });
  if (D.store.mode !== 'whole' || !others.length) return [];
  const find = async () => {
    const mine = ++turn, { map } = await openHead(i), step = Math.max(1, Math.ceil(map.rows / Math.max(16, Math.floor(MOST_CELLS / (map.cols * others.length))))), found = [];
    box.replaceChildren(el('p', { className: 'note', role: 'status', textContent: translate('comparing') }));
    for (const j of others) {
      found.push([j, divergence(map, (await openHead(j)).map, step)]);
      if (mine !== turn) return;
    }
    const nearest = found.filter(([, d]) => d === d).sort((a, b) => a[1] - b[1]).slice(0, NEAREST);
    box.replaceChildren(el('ul', { className: 'near' }, ...nearest.map(([j, d]) => el('li', {}, el('a', { href: addressOf(j), k: kindOf(j) }, glyph(kindOf(j)), shortName(j), el('small', { textContent: kindName(kindOf(j)) }), el('span', { className: 'num', textContent: d.toFixed(3) }))))),
      el('p', { className: 'note', textContent: step > 1 ? translate('divergence every', { n: step }) : translate('divergence') }));
  };
  box.append(el('button', { className: 'btn', textContent: translate('find nearest'), onclick: find }));
  return [el('h2', { textContent: translate('nearest') }), box];
}

// The choice of a second head, and below it the second map and the difference, drawn on one scale each.
export function comparison(i) {
  const others = alike(i), choice = el('select', { id: 'second', 'aria-label': translate('compare with') }), box = el('div', { className: 'second' });
  if (!others.length) return [];
  choice.append(el('option', { value: '-1', textContent: translate('compare with') + ' …' }), ...others.map(j => el('option', { value: j, textContent: `${shortName(j)}, ${kindNames(kindsOf(j))}` })));
  choice.value = others.includes(second) ? second : -1;
  const show = async () => {
    const mine = second = +choice.value;
    if (mine < 0) { box.replaceChildren(); return; }
    const [a, b] = [await openHead(i), await openHead(mine)];
    if (mine !== second || !a.map || !b.map) return;
    const { rows, cols } = a.map, values = a.map.values.map((w, k) => w - b.map.values[k]), single = isSingle([a.rowBlock, a.colBlock]);
    const end = state.scale === 'log' ? 1 : rootEnd(values.reduce((top, d) => Math.abs(d) > top ? Math.abs(d) : top, 0), false);
    const picture = (map, lut, top, name) => {
      const canvas = bitmap(map, lut, state.scale, top);
      canvas.className = 'map';
      canvas.setAttribute('role', 'img');
      canvas.setAttribute('aria-label', name);
      return el('figure', {}, el('figcaption', { textContent: name }), canvas);
    };
    box.replaceChildren(picture(b.map, 'ink', topOf([a.rowBlock, a.colBlock]), shortName(mine)), picture({ rows, cols, values }, 'apart', end, `${shortName(i)} − ${shortName(mine)}`),
      el('div', { className: 'scale' }, signedRamp(180, end), el('p', { className: 'note', textContent: translate(single ? 'difference note' : 'difference note means') })));
  };
  choice.onchange = show;
  if (second >= 0) show();
  return [choice, box];
}
