// The table of all heads: sorted by its column buttons, filtered like the grid, twelve rows at first.
import { $, el, elementIn, translate } from './dom.js';
import { LEGEND } from './kindlist.js';
import { kindCell } from './kinds.js';
import { FIRST_ROWS, moreButton } from './more.js';
import { formatCount } from './numbers.js';
import { chanceOf, withUnit } from './statistics.js';

/** @import { Statistic } from './statistics.js' */

let shown = FIRST_ROWS;
export function showAllRows(all) {
  shown = all ? Infinity : FIRST_ROWS;
}

/**
 * Show the table of all heads.
 * @param {object} shows
 * @param {string[][]} shows.kinds the kinds of each head; without any the table has no column of them
 * @param {Statistic[]} shows.statistics
 * @param {(head: number) => HTMLElement} shows.link the link to a head
 * @param {(head: number) => string} shows.path the module path of its layer
 * @param {(head: number) => boolean} shows.passes whether it passes the filter
 * @param {string} shows.order the id of a column, "-entropy" for descending, '' for the default
 * @param {(order: string) => void} shows.reorder called with a new order
 * @param {string} shows.why a sentence on a filter that cannot match, or ''
 * @param {(head: number) => HTMLElement[]} shows.marks tags after the kind of a head
 */
export function showTable(shows) {
  const again = order => showTable({ ...shows, order });
  const named = shows.kinds.some(each => each.length);
  const sorting = sortingOf(shows);
  const found = sortedHeads(shows, sorting);
  headings(shows, named, sorting, again);
  $('rows').replaceChildren(...found.slice(0, shown).map(i => rowOf(shows, named, i)));
  if (!found.length) {
    const colSpan = shows.statistics.length + 1 + Number(named);
    $('rows').append(el('tr', {}, el('td', { className: 't none', colSpan, textContent: translate('no match') })));
  }
  $('count').textContent = countOf(found.length, shows.kinds.length);
  $('why').hidden = !shows.why;
  $('why').textContent = shows.why;
  moreButton($('more'), found.length, shown, number => {
    shown = number;
    again(shows.order);
  });
}

// The column by which the rows are sorted, whether from the largest on, and the column of the default.
function sortingOf({ statistics, order }) {
  const first = statistics.find(one => one.focus)?.id ?? 'head';
  const sorting = order || first;
  return { by: sorting.replace(/^-/, ''), falling: sorting.startsWith('-'), first };
}

function headings({ statistics, reorder }, named, { by, falling, first }, again) {
  const heading = (id, label, words, note = '') => {
    const turn = () => {
      const next = (by === id ? !falling : !words && id !== first) ? '-' + id : id;
      reorder(next);
      again(next);
      elementIn($('cols'), '[aria-sort] button').focus();
    };
    const head = el(
      'th',
      { scope: 'col', className: words ? 't' : '' },
      el('button', { textContent: label, onclick: turn }),
      ...(note ? [el('small', { textContent: note })] : []),
    );
    head.dataset.label = label; // printed: a browser leaves buttons out where it repeats a heading
    if (by === id) head.setAttribute('aria-sort', falling ? 'descending' : 'ascending');
    return head;
  };
  $('cols').replaceChildren(
    heading('head', translate('head column'), true),
    ...(named ? [heading('kind', translate('kind column'), true)] : []),
    ...statistics.map(one => heading(one.id, withUnit(one), false, chanceOf(one))),
  );
}

// The heads that pass the filter, in the order of the rows.
function sortedHeads({ kinds, statistics, passes }, { by, falling }) {
  const sorted = statistics.find(one => one.id === by);
  const value = i =>
    sorted ? (sorted.values[i] ?? -Infinity) : by === 'kind' ? LEGEND.findIndex(kind => kind.id === kinds[i][0]) : i;
  return kinds
    .map((_, i) => i)
    .filter(passes)
    .sort((a, b) => (value(a) - value(b)) * (falling ? -1 : 1) || a - b);
}

function rowOf({ kinds, statistics, link, path, marks }, named, i) {
  const bar = one => el('span', { className: 'v', v: one.filled(i), textContent: one.number(i), title: one.level(i) });
  return el(
    'tr',
    {},
    el('th', { scope: 'row', title: path(i) }, link(i)),
    ...(named ? [el('td', { className: 't' }, kindCell(kinds[i]), ...marks(i))] : []),
    ...statistics.map(one => el('td', {}, bar(one))),
  );
}

function countOf(found, all) {
  if (found < all) return translate('of heads', { n: formatCount(found), all: formatCount(all) });
  return all === 1 ? translate('1 head') : translate('heads', { n: formatCount(all) });
}
