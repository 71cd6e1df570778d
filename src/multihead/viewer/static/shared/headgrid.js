// The grid of all heads without its contents: a heading above each column of layers, and a row for each layer.
import { el, translate } from './dom.js';
import { roleName } from './kinds.js';
import { applied } from './layout.js';

// Fill a box. layers: number, name and heads, and the role of those that have one; shape: of `fitted`; cell(layer, h, place): the
// element of a head; finish(row, layer) adds to the row of a layer.
export function drawHeads(box, layers, shape, cell, finish = () => {}) {
  const { cell: size, perColumn, phone } = shape, widest = Math.max(...layers.map(layer => layer.heads)), step = size < 17 ? 4 : 1, rows = [];
  const letter = name => size < 30 || phone ? '' : name;
  applied(box, shape, widest, layers.some(layer => layer.role));
  // Each column of layers has its own heading; screen readers read the first one.
  const heading = first => el('div', first ? { className: 'gr head', role: 'row' } : { className: 'gr head', 'aria-hidden': 'true' }, el('span', first ? { role: 'columnheader', 'aria-label': translate('layer column') } : {}),
    ...Array.from({ length: widest }, (_, h) => el('span', { className: 'ax', ...(first ? { role: 'columnheader', 'aria-label': `H${h}` } : {}), textContent: h % step ? '' : letter('H') + h })));
  layers.forEach((layer, place) => {
    if (place % perColumn === 0) rows.push(heading(!place));
    const role = roleName(layer.role), label = el('span', { className: 'ax l', role: 'rowheader', title: layer.name, 'aria-label': ['L' + layer.number, role, layer.name].filter(Boolean).join(' ') }, letter('L') + layer.number, ...(role ? [el('small', { textContent: role })] : []));
    const row = el('div', { className: 'gr', role: 'row' }, label, ...Array.from({ length: layer.heads }, (_, h) => el('span', { role: 'gridcell' }, cell(layer, h, place))));
    finish(row, layer);
    rows.push(row);
  });
  box.replaceChildren(...rows);
}
