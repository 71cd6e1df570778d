// The table of all heads: sorted by its column buttons, filtered like the grid, twelve rows at first.
import { $, el, translate } from './dom.js';
import { kindCell } from './kinds.js';
import { LEGEND } from './kindlist.js';
import { FIRST, moreButton } from './more.js';
import { count } from './numbers.js';
import { chanceOf, withUnit } from './statistics.js';

let shown = FIRST;
export function showRows(all) {
  shown = all ? Infinity : FIRST;
}

// kinds and statistics per head, without kinds no column of them; link(i) and path(i): the link to a head and the module path of its layer; marks(i): tags after its kind; passes(i):
// whether it passes the filter; order: a column's id, "-entropy" for descending, '' for the default; reorder(order): called
// with a new order; why: a sentence on a filter that cannot match, or ''.
export function table({ kinds, statistics, link, path, passes, order, reorder, why, marks }) {
  const again = order => table({ kinds, statistics, link, path, passes, order, reorder, why, marks });
  const first = statistics.find(one => one.focus)?.id ?? 'head',
    sorting = order || first,
    falling = sorting.startsWith('-'),
    by = sorting.replace(/^-/, '');
  const heading = (id, label, words, note = '') => {
    const turn = () => {
      const next = (by === id ? !falling : !words && id !== first) ? '-' + id : id;
      reorder(next);
      again(next);
      $('cols').querySelector('[aria-sort] button').focus();
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
  const named = kinds.some(each => each.length);
  $('cols').replaceChildren(
    heading('head', translate('head column'), true),
    ...(named ? [heading('kind', translate('kind column'), true)] : []),
    ...statistics.map(one => heading(one.id, withUnit(one), false, chanceOf(one))),
  );

  const sorted = statistics.find(one => one.id === by),
    value = i =>
      sorted ? (sorted.values[i] ?? -Infinity) : by === 'kind' ? LEGEND.findIndex(kind => kind.id === kinds[i][0]) : i;
  const found = kinds
    .map((_, i) => i)
    .filter(passes)
    .sort((a, b) => (value(a) - value(b)) * (falling ? -1 : 1) || a - b);
  $('rows').replaceChildren(
    ...found
      .slice(0, shown)
      .map(i =>
        el(
          'tr',
          {},
          el('th', { scope: 'row', title: path(i) }, link(i)),
          ...(named ? [el('td', { className: 't' }, kindCell(kinds[i]), ...marks(i))] : []),
          ...statistics.map(one =>
            el(
              'td',
              {},
              el('span', { className: 'v', v: one.filled(i), textContent: one.number(i), title: one.level(i) }),
            ),
          ),
        ),
      ),
  );
  if (!found.length)
    $('rows').append(
      el(
        'tr',
        {},
        el('td', { className: 't none', colSpan: statistics.length + 1 + named, textContent: translate('no match') }),
      ),
    );

  const all = kinds.length,
    n = found.length;
  $('count').textContent =
    n < all
      ? translate('of heads', { n: count(n), all: count(all) })
      : all === 1
        ? translate('1 head')
        : translate('heads', { n: count(all) });
  $('why').hidden = !why;
  $('why').textContent = why;
  moreButton($('more'), n, shown, number => {
    shown = number;
    again(order);
  });
}
