// The table of every number: sorted by its column buttons, filtered with the grid, twelve rows first.
import { kindTag, thumb } from './grid.js';
import { save, state, toHead } from './permalink.js';
import { KINDS, withUnit } from './record.js';
import { $, count, el, say } from './words.js';

const FIRST = 12, MORE = 500;
let rowsShown = FIRST;

// The order is kept in the address: "entropy" ascending, "-entropy" descending.
function orderOf(record) {
  const asked = state.order || (record.metrics.some(one => one.id === 'entropy') ? 'entropy' : 'head'), down = asked.startsWith('-');
  return { by: asked.replace(/^-/, ''), down };
}

function columnHead(record, id, label, words, again) {
  const { by, down } = orderOf(record), turn = () => {
    state.order = (by === id ? !down : !words && id !== 'entropy') ? '-' + id : id;
    save();
    again();
    $('cols').querySelector('[aria-sort] button').focus();
  };
  const head = el('th', { scope: 'col', className: words ? 't' : '' }, el('button', { textContent: label, onclick: turn }));
  if (by === id) head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  return head;
}

function tableRow(record, i) {
  const { l, h } = record.heads[i], link = el('a', { href: toHead(record.run, record.sample, l, h) }, thumb(record, i, 26), record.short(i));
  return el('tr', {}, el('th', { scope: 'row', title: record.layer(i).name }, link), el('td', { className: 't' }, kindTag(record, i)),
    ...record.metrics.map(one => el('td', {}, el('span', { className: 'v', v: one.filled(i), textContent: one.number(i) }))));
}

export function table(record, passes) {
  const again = () => table(record, passes), { by, down } = orderOf(record), sorted = record.metrics.find(one => one.id === by);
  $('cols').replaceChildren(columnHead(record, 'head', say('head column'), true, again), columnHead(record, 'kind', say('kind column'), true, again),
    ...record.metrics.map(one => columnHead(record, one.id, withUnit(one), false, again)));
  const value = i => sorted ? sorted.values[i] ?? -Infinity : by === 'kind' ? KINDS.indexOf(record.kinds[i]) : i;
  const found = record.heads.map((_, i) => i).filter(passes).sort((a, b) => (value(a) - value(b)) * (down ? -1 : 1) || a - b);
  $('rows').replaceChildren(...found.slice(0, rowsShown).map(i => tableRow(record, i)));
  if (!found.length) $('rows').append(el('tr', {}, el('td', { className: 't none', colSpan: record.metrics.length + 2, textContent: say('no match') })));
  $('scroll').setAttribute('aria-label', say('table label'));
  const all = record.heads.length, n = found.length;
  $('count').textContent = n < all ? say('of heads', { n: count(n), all: count(all) }) : say(all === 1 ? '1 head' : 'heads', { n: count(all) });
  const more = $('more'), left = n > rowsShown;
  more.hidden = n <= FIRST;
  more.textContent = !left ? say('show fewer') : n <= rowsShown + MORE ? say('show all', { n: count(n) }) : say('show more', { n: MORE });
  more.onclick = () => { rowsShown = left ? rowsShown + MORE : FIRST; again(); };
}
