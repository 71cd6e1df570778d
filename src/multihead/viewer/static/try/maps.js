// The map of the head that was changed last, and those of later layers that changed most: each before, after, and the
// difference.
import { endOfRootScale } from '../shared/colour.js';
import { $, el, elementsIn, translate } from '../shared/dom.js';
import { glyphElement } from '../shared/kinds.js';
import { signedRamp, tickedRamp } from '../shared/legend.js';
import { formatPercent, largestOf } from '../shared/numbers.js';
import { mapPicture } from '../shared/picture.js';
import { requestFloats } from '../view/api.js';
import { answers, chosenPlace, queryOfState, state } from './state.js';

const SIDE = 96; // pixels, and the most cells of a map
let kept = []; // what is shown: { rows, cols, before, after, apart } per head

const split = ({ shape: [, rows, cols], values }) => {
  const before = values.slice(0, rows * cols);
  const after = values.slice(rows * cols);
  return { rows, cols, before, after, apart: after.map((w, n) => w - before[n]) };
};
const largest = (maps, of) => largestOf(maps.map(one => largestOf(of(one).map(Math.abs))));

function row([layer, head, distance]) {
  const { record } = answers;
  const i = record.index(layer, head);
  const made = el(
    'div',
    { className: 'change', role: 'row' },
    el(
      'div',
      { role: 'rowheader', className: 'name', k: record.kinds[i], title: record.named(i) },
      el('b', { textContent: record.short(i) }),
      glyphElement(record.kinds[i]),
    ),
    ...['before', 'after', 'difference'].map(name =>
      el('div', { role: 'cell', className: 'place', 'aria-label': translate('map ' + name, { head: record.long(i) }) }),
    ),
    el('div', { role: 'cell', className: 'num', textContent: formatPercent(distance) }),
  );
  return made;
}

function paint() {
  const rows = elementsIn($('changes'), '.change:not(.heading)');
  const single = answers.words.tokens.length <= SIDE;
  const end = endOfRootScale(
    largest(kept, one => one.before),
    single,
  );
  const apart = endOfRootScale(
    largest(kept, one => one.apart),
    false,
  );
  kept.forEach((map, n) => {
    const { rows: high, cols } = map;
    const [before, after, difference] = rows[n].querySelectorAll('.place');
    const show = (box, values, lut) =>
      box.replaceChildren(mapPicture({ rows: high, cols, values }, SIDE, 'root', lut === 'ink' ? end : apart, lut));
    show(before, map.before, 'ink');
    show(after, map.after, 'ink');
    show(difference, map.apart, 'apart');
  });
  $('mapscale').hidden = !kept.length;
  if (kept.length)
    $('mapscale').replaceChildren(
      tickedRamp(200, 'root', end),
      signedRamp(200, apart),
      el('div', { className: 'note', textContent: translate('maps legend') }),
    );
}
export const repaintMaps = () => {
  if (kept.length) paint();
};

// The head that was changed last, and how much its own map changed: not at all without changed heads in layers before.
function changedLast() {
  const [layer, head] = [...state.heads.keys()].at(-1).split('.').map(Number);
  return [layer, head, answers.change.distances.find(one => one.layer === layer)?.heads[head] ?? 0];
}

// Show the rows at once, and each map as it arrives.
export async function drawMaps(signal) {
  const own = state.heads.size ? [changedLast()] : [];
  const others = answers.change.changed.filter(([l, h]) => own.every(([layer, head]) => l !== layer || h !== head));
  const list = own.length ? [...own, ...others] : [];
  const encoder = answers.model.kind === 'encoder';
  const { sentence } = answers.words.tokens[chosenPlace()];
  $('hm').textContent = translate(encoder && list.length ? 'maps changed of' : 'maps changed', { n: sentence + 1 });
  kept = [];
  $('mapscale').hidden = true;
  if (!list.length) {
    $('changes').replaceChildren(el('p', { className: 'note', textContent: translate('maps none') }));
    return;
  }
  const heading = hidden =>
    el(
      'div',
      { className: 'change heading', ...(hidden ? { 'aria-hidden': 'true' } : { role: 'row' }) },
      ...['head column', 'before', 'after', 'difference', 'distance column'].map(key =>
        el('div', { ...(hidden ? {} : { role: 'columnheader' }), textContent: translate(key) }),
      ),
    );
  $('changes').setAttribute('role', 'table');
  $('changes').setAttribute('aria-labelledby', 'hm');
  $('changes').replaceChildren(heading(false), ...(list.length > 1 ? [heading(true)] : []), ...list.map(row));
  for (const [layer, head] of list) {
    const map = await requestFloats(
      `api/maps?${queryOfState({ layer, head, ...(encoder ? { sentence } : {}) })}`,
      signal,
    );
    if (signal.aborted) return;
    kept.push(split(map));
    paint();
  }
}
