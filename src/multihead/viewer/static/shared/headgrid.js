// The grid of all heads without its contents: its size, a heading above each column of layers, and a row for each
// layer.
import { el, elementIn, elementsIn, translate } from './dom.js';
import { roleName } from './kinds.js';

const BETWEEN = 28; // pixels between columns
const hasRoles = list => list.layers.some(layer => layer.role);

export const widthOfLabels = list => (hasRoles(list) ? 78 : 24); // of the labels of layers, in pixels

// Choose the number of columns of layers and the size of a cell so that cells are as large as fits into the width and
// `high` pixels; a phone has one column. list: a HeadList; low: the least pixels for `high`; largest: the largest cell.
export function fitGrid(list, width, { phone, high = 0, low = 520, largest = 110 }) {
  const layers = list.layers.length;
  const heads = list.widest;
  const tall = Math.max(low, high);
  const least = phone ? 20 : 16;
  let best = { score: 0 };
  for (let columns = 1; columns <= (phone ? 1 : Math.min(4, layers)); columns++) {
    const gap = heads > 16 || phone ? 3 : 5;
    const across = ((width - (columns - 1) * BETWEEN) / columns - widthOfLabels(list) - 6) / heads - gap;
    const down = tall / Math.ceil(layers / columns) - gap;
    if (columns > 1 && across < least) break; // it would have to be scrolled
    const score = Math.min(largest, across, down);
    if (score > best.score * 1.15)
      best = { columns, gap, score, cell: Math.floor(Math.min(largest, across, Math.max(down, 40))) };
  }
  const columns = best.columns ?? 1;
  return {
    columns,
    perColumn: Math.ceil(layers / columns),
    gap: best.gap ?? 3,
    cell: Math.max(least, best.cell ?? 0),
    phone,
  };
}

// Fill a box with the heads of a HeadList. shape: of `fitted`; cell(i): the element of head i; finish(row, layer) adds
// to the row of a layer.
export function drawHeads(box, list, shape, cell, finish = (_row, _layer) => {}) {
  const { cell: size, columns, gap, perColumn, phone } = shape;
  const step = size < 17 ? 4 : 1;
  const rows = [];
  const letter = name => (size < 30 || phone ? '' : name);
  for (const [name, value] of Object.entries({
    '--cell': `${size}px`,
    '--gap': `${gap}px`,
    '--H': list.widest,
    '--rows': perColumn + 1,
    '--columns': columns,
  }))
    box.style.setProperty(name, value);
  box.classList.toggle('small', size < 30);
  box.classList.toggle('roles', hasRoles(list));
  // Each column of layers has its own heading; screen readers read the first one.
  const heading = first =>
    el(
      'div',
      first ? { className: 'gr head', role: 'row' } : { className: 'gr head', 'aria-hidden': 'true' },
      el(
        'span',
        first ? { role: 'columnheader' } : {},
        ...(first ? [el('span', { className: 'vh', textContent: translate('layer column') })] : []),
      ),
      ...Array.from({ length: list.widest }, (_, h) =>
        el('span', {
          className: 'ax',
          ...(first ? { role: 'columnheader', 'aria-label': `H${h}` } : {}),
          textContent: h % step ? '' : letter('H') + h,
        }),
      ),
    );
  list.layers.forEach((layer, place) => {
    if (place % perColumn === 0) rows.push(heading(!place));
    const role = roleName(layer.role);
    const label = el(
      'span',
      {
        className: 'ax l',
        role: 'rowheader',
        title: layer.name,
        'aria-label': ['L' + layer.number, role, layer.name].filter(Boolean).join(' '),
      },
      letter('L') + layer.number,
      ...(role ? [el('small', { textContent: role })] : []),
    );
    const row = el(
      'div',
      { className: 'gr', role: 'row' },
      label,
      ...Array.from({ length: layer.heads }, (_, h) =>
        el('span', { role: 'gridcell' }, cell(list.index(layer.number, h))),
      ),
    );
    finish(row, layer);
    rows.push(row);
  });
  box.replaceChildren(...rows);
  box.style.setProperty('--paperzoom', String(Math.min(1, 690 / box.offsetWidth))); // on A4
}

// Make one head of a grid the one that Tab reaches; returns its cell.
export function letTabReach(box, i) {
  for (const cell of elementsIn(box, 'a[tabindex="0"]')) cell.tabIndex = -1;
  const cell = elementIn(box, `[data-i="${i}"]`);
  if (cell) cell.tabIndex = 0;
  return cell;
}
