// The first page: findings, kinds, the grid of all heads with its inspector, the table, the definitions.
import { bitmap } from '../shared/colour.js';
import { $, el, translate } from '../shared/dom.js';
import { fits, unmatched } from '../shared/filter.js';
import { alignmentTag, glyph, kindChips, kindNames, kindTags, pathLine, roleName } from '../shared/kinds.js';
import { applied, fitted } from '../shared/layout.js';
import { blockNote, cellNote, isSingle, scaleChoice, tickedRamp } from '../shared/legend.js';
import { definitions, numberRows } from '../shared/statistics.js';
import { table } from '../shared/table.js';
import { blockOf, mapFor, scaleTop, thumbs } from './maps.js';
import { addressOf, D, ENTROPY, HEADS, indexOf, isAligned, kindOf, kindsOf, layerOf, longName, numbered, roleOf, shortName, STATISTICS, WIDEST } from './record.js';

// The current choice: one kind or all, the order of the table, the colour scale, and the head in the inspector.
export const state = { kind: '', order: '', scale: 'root', lit: 0 };
const asFiltered = i => ({ l: HEADS[i].number, h: HEADS[i].h, kinds: kindsOf(i), path: layerOf(i).name, role: roleOf(i), aligned: isAligned(i) });
const passes = i => (!state.kind || kindsOf(i).includes(state.kind)) && fits($('filter').value, STATISTICS, i, asFiltered(i));

function thumb(map, top = scaleTop.value) {
  const canvas = bitmap(map, 'ink', state.scale, top);
  canvas.className = 'map';
  canvas.setAttribute('aria-hidden', 'true');
  return canvas;
}

function frame(i, map = thumbs[i], top = scaleTop.value) {
  const box = el('span', { className: 'fr', k: kindOf(i) });
  box.append(map ? thumb(map, top) : el('span', { className: 'blank' }, glyph(kindOf(i))));
  return box;
}

// Cells wider than a pixel are drawn with hard edges; the browser averages a finer map.
function sharpen(scope) {
  for (const canvas of scope.querySelectorAll('canvas.map')) {
    canvas.style.imageRendering = canvas.clientWidth * (devicePixelRatio || 1) >= canvas.width * 1.25 ? 'pixelated' : 'auto';
  }
}

export function findings() {
  $('findsec').hidden = !D.findings.length;
  $('finds').replaceChildren(...D.findings.map(finding => {
    const i = numbered(finding.layer, finding.head);
    const words = el('p', {}, el('b', { textContent: longName(i) }), translate('join.sentences') + finding.sentence, el('small', { textContent: finding.count }));
    return el('li', {}, el('a', { href: addressOf(i) }, frame(i), words));
  }));
  sharpen($('finds'));
}

export function chips() {
  kindChips($('chips'), D.kinds, state.kind, kind => { state.kind = kind; chips(); dim(); headsTable(); });
}

function dim() {
  for (const a of $('grid').querySelectorAll('a')) a.classList.toggle('dim', !!state.kind && !kindsOf(+a.dataset.i).includes(state.kind));
}

export function grid() {
  const box = $('grid'), held = box.contains(document.activeElement), phone = innerWidth <= 640, roles = D.layers.some(layer => layer.role);
  const shape = fitted({ layers: D.layers.length, heads: WIDEST, roles }, box.parentElement.clientWidth - 8, { phone, high: innerHeight * .95 }), { cell, perColumn } = shape;
  applied(box, shape, WIDEST, roles);
  const step = cell < 17 ? 4 : 1, brief = cell < 30 || phone ? '' : 'H', rows = [];
  // Each column of layers has its own heading; screen readers read the first one.
  const heading = first => el('div', first ? { className: 'gr head', role: 'row' } : { className: 'gr head', 'aria-hidden': 'true' }, el('span', first ? { role: 'columnheader', 'aria-label': translate('layer column') } : {}),
    ...Array.from({ length: WIDEST }, (_, h) => el('span', { className: 'ax', ...(first ? { role: 'columnheader', 'aria-label': `H${h}` } : {}), textContent: h % step ? '' : brief + h })));
  D.layers.forEach((layer, l) => {
    if (l % perColumn === 0) rows.push(heading(!l));
    const row = el('div', { className: 'gr', role: 'row' }, el('span', { className: 'ax l', role: 'rowheader', title: layer.name }, (cell < 30 || phone ? '' : 'L') + layer.number, ...(layer.role ? [el('small', { textContent: roleName(layer.role) })] : [])));
    for (let h = 0; h < layer.heads; h++) {
      const i = indexOf(l, h), label = [longName(i), roleName(layer.role), kindNames(kindsOf(i)), isAligned(i) ? translate('alignment') : ''].filter(Boolean).join(', ') + (ENTROPY ? `, ${ENTROPY.label} ${ENTROPY.text(i)} ${ENTROPY.unit}` : '');
      const link = el('a', { href: addressOf(i), tabIndex: i === state.lit ? 0 : -1, 'aria-label': label, onmouseenter: () => inspect(i), onfocus: () => inspect(i) }, frame(i));
      link.dataset.i = i;
      link.classList.toggle('marked', isAligned(i));
      row.append(el('span', { role: 'gridcell' }, link));
    }
    rows.push(row);
  });
  box.replaceChildren(...rows);
  sharpen(box);
  dim();
  if (held) box.querySelector(`[data-i="${state.lit}"]`).focus();
}

export function headStatistics(i) {
  return el('table', { className: 'numbers' }, el('caption', { className: 'vh', textContent: translate('head statistics') }), el('tbody', {}, ...numberRows(STATISTICS, i)));
}

export const marks = i => isAligned(i) ? [alignmentTag()] : [];
let inspected = 0;
export async function inspect(i) {
  const turn = ++inspected;
  state.lit = i;
  for (const a of $('grid').querySelectorAll('a')) a.tabIndex = +a.dataset.i === i ? 0 : -1;
  const { map, block } = await mapFor(i, ($('insp').clientWidth || 300) * (devicePixelRatio || 1));
  if (turn !== inspected) return;  // another head was chosen meanwhile
  const top = topOf(block), note = map ? [el('p', { className: 'note', textContent: cellNote(block, state.scale, top) })] : [];
  $('insp').replaceChildren(frame(i, map, top), ...note, el('h3', {}, longName(i), kindTags(kindsOf(i))), ...marks(i), pathLine(roleOf(i), layerOf(i).name), headStatistics(i));
  sharpen($('insp'));
}

// Where the scale of a map with cells of this size ends: single weights share one scale on every page, means theirs.
export const topOf = block => isSingle(block) ? 1 : scaleTop.value;

// What the legend of means says about the end of their scale.
export const endNote = () => state.scale === 'log' ? [] : [translate('scale.by means')];

export function legend(width, note, choose, top = scaleTop.value) {
  return [tickedRamp(width, state.scale, top), scaleChoice(state.scale, choose), el('div', { className: 'note' }, note)];
}

export function gridNote() {
  const notes = thumbs.length ? [translate('one scale')] : [], means = thumbs.length ? D.layers.map(blockOf).filter(block => !isSingle(block)) : [];
  if (means.length) notes.push(...new Set(means.map(blockNote)), ...endNote());
  if (thumbs.length || D.sight.hides) notes.push(D.sight.hides ? translate(D.sight.later ? 'hidden later' : 'hidden') : translate('nothing hidden'));
  if (HEADS.some((_, i) => isAligned(i))) notes.push(translate('alignment note'));
  if (D.sight.blind) notes.push(D.sight.blind === 1 ? translate('blind queries in 1 layer') : translate('blind queries', { layers: D.sight.blind }));
  return notes.join(translate('join.sentences'));
}

export function headsTable() {
  const why = unmatched($('filter').value, STATISTICS, D.unrecorded, HEADS.map((_, i) => asFiltered(i)));
  const link = i => el('a', { href: addressOf(i) }, ...(thumbs[i] ? [thumb(thumbs[i])] : []), shortName(i), ...(roleOf(i) ? [el('small', { textContent: ' ' + roleName(roleOf(i)) })] : []));
  table({ kinds: D.kinds, statistics: STATISTICS, link, path: i => layerOf(i).name, passes, order: state.order, reorder: order => { state.order = order; }, why, marks });
  sharpen($('rows'));
}

export function defined() {
  const listed = STATISTICS.map(one => [one.id, one.label]);
  if (D.received) listed.push(['received', D.labels.received]);
  definitions($('defs'), listed, D.legend);
}
