// The grid of all heads: which are off or scaled, coloured by kind, by how much their maps changed, or by their effect.
import { paintElement, toneOf } from '../shared/colour.js';
import { $, el, elementAround, elementIn, translate } from '../shared/dom.js';
import { drawHeads, fitGrid } from '../shared/headgrid.js';
import { root } from '../shared/host.js';
import { glyphElement, kindChips, kindName } from '../shared/kinds.js';
import { markedRamp, signedRamp } from '../shared/legend.js';
import { formatCount, formatExact, formatPercent, formatSigned, isKnown, roundUp } from '../shared/numbers.js';
import { windowSize } from '../view/host.js';
import { headsNamed } from './sentence.js';
import { answers, changedHeads, commonFactor, factorOf, isOff, nameOfHead, state } from './state.js';

const COLOURS = ['kind', 'changed', 'effect'];
const HIGH = 270; // pixels
export const effectOfHead = new Map(); // index of a head -> the effect of its absence on the chosen token
export const estimatedHeads = new Set(); // those of them whose effect is a gradient's estimate
export const gridChoice = { colour: 'kind', kind: '', lit: 0 };
let cells = [];
let act = { set: _heads => {} };

// set(heads): called with the heads "layer.head" -> factor that a click asks for.
export function listenToGrid(actions) {
  act = actions;
  $('grid').onclick = event => {
    const cell = elementAround(event, '.cell');
    const label = elementAround(event, '.ax.l');
    if (cell) toggle(+cell.dataset.i, event.shiftKey);
    if (label) toggle(+elementIn(label.parentElement, '.cell').dataset.i, true);
  };
  $('grid').onkeydown = event => {
    const cell = elementAround(event, '.cell');
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    const next = answers.record.moved(+cell.dataset.i, event.key);
    if (next >= 0) cells[next].focus();
    else if (/^(Enter| )$/.test(event.key)) toggle(+cell.dataset.i, event.shiftKey);
    if (next !== undefined || /^(Enter| )$/.test(event.key)) event.preventDefault();
  };
  $('grid').onmouseleave = () => light($('grid').contains(root.activeElement) ? gridChoice.lit : -1);
  $('factor').oninput = () => scalingNamed(+$('factor').value);
  $('factor').onchange = () => act.set(new Map([...state.heads.keys()].map(name => [name, +$('factor').value])));
}

function toggle(i, layer) {
  const { record } = answers;
  const { l, h } = record.heads[i];
  if (layer) switchAll(record.heads.map((_, n) => n).filter(n => record.heads[n].l === l));
  else {
    const heads = new Map(state.heads);
    const name = nameOfHead({ l, h });
    if (!heads.delete(name)) heads.set(name, 0);
    act.set(heads);
  }
}

// Switch heads off, or where all are off already, on.
function switchAll(list) {
  const heads = new Map(state.heads);
  const names = list.map(i => nameOfHead(answers.record.heads[i]));
  const off = list.every(i => isOff(answers.record.heads[i]));
  for (const name of names)
    if (off) heads.delete(name);
    else heads.set(name, 0);
  act.set(heads);
}

export function drawGrid() {
  const { record } = answers;
  const phone = windowSize().width <= 640;
  const held = $('grid').contains(root.activeElement);
  if (gridChoice.lit >= record.heads.length) gridChoice.lit = 0;
  lit = -1;
  const shape = fitGrid(record, $('gridbox').clientWidth - 8, { phone, high: HIGH, low: 0, largest: phone ? 28 : 40 });
  cells = record.heads.map((_, i) => {
    const made = el('button', {
      className: 'cell',
      k: record.kinds[i],
      tabIndex: i === gridChoice.lit ? 0 : -1,
      onmouseenter: () => light(i),
      onfocus: () => {
        keep(i);
        light(i);
      },
      onblur: () => light(-1),
    });
    made.dataset.i = String(i);
    return made;
  });
  drawHeads($('grid'), record, shape, i => cells[i]);
  colours();
  chips();
  paintGrid();
  if (held) cells[gridChoice.lit].focus();
}

function keep(i) {
  cells[gridChoice.lit].tabIndex = -1;
  cells[i].tabIndex = 0;
  gridChoice.lit = i;
}
export const focusGrid = () => cells[gridChoice.lit].focus();

const distanceOf = i => {
  const { l, h } = answers.record.heads[i];
  return answers.change.distances.find(one => one.layer === l)?.heads[h] ?? null;
};
const shownValue = i =>
  gridChoice.colour === 'changed'
    ? distanceOf(i)
    : gridChoice.colour === 'effect'
      ? (effectOfHead.get(i) ?? null)
      : null;
const factorText = factor => String(+factor.toPrecision(2));
const effectText = value => formatSigned(value, 2) || '0';

// Paint every cell anew: a head that is off is a crossed hollow cell, a scaled one has its number.
export function paintGrid() {
  const { record } = answers;
  const values = record.heads.map((_, i) => shownValue(i));
  const end = roundUp(Math.max(gridChoice.colour === 'effect' ? 0.1 : 0.01, ...values.filter(isKnown).map(Math.abs)));
  record.heads.forEach((head, i) => {
    const cell = cells[i];
    const factor = factorOf(head);
    const value = values[i];
    const off = factor === 0;
    cell.className = [
      'cell',
      gridChoice.colour,
      off ? 'off' : factor !== 1 || state.heads.has(nameOfHead(head)) ? 'scaled' : '',
      gridChoice.colour !== 'kind' && !isKnown(value) ? 'none' : '',
      gridChoice.colour === 'effect' && estimatedHeads.has(i) ? 'estimated' : '',
      gridChoice.kind && !record.allKinds[i].includes(gridChoice.kind) ? 'dim' : '',
    ]
      .filter(Boolean)
      .join(' ');
    cell.style.background = cell.style.color = '';
    if (!off && isKnown(value)) {
      if (gridChoice.colour === 'effect') paintElement(cell, 0.5 + value / end / 2, 'apart');
      else paintElement(cell, toneOf('linear', value, end));
    }
    cell.replaceChildren(
      ...(off
        ? []
        : factor !== 1 || state.heads.has(nameOfHead(head))
          ? [factorText(factor)]
          : gridChoice.colour === 'kind'
            ? [glyphElement(record.kinds[i])]
            : []),
    );
    cell.setAttribute('aria-pressed', String(state.heads.has(nameOfHead(head))));
    cell.setAttribute('aria-label', described(i));
  });
  $('howmany').textContent = state.heads.size
    ? translate('changed of', { n: formatCount(changedHeads().length), all: formatCount(record.heads.length) })
    : translate('all n on', { n: formatCount(record.heads.length) });
  legend(end, values);
  light(lit);
  scaling();
  kindOff();
}

const nameOfEffect = i =>
  `its ${estimatedHeads.has(i) ? 'estimate' : 'effect'}${answers.model.kind === 'encoder' ? ' on similarity' : ''}`;
function described(i) {
  const { record } = answers;
  const factor = factorOf(record.heads[i]);
  const distance = distanceOf(i);
  const effect = effectOfHead.get(i);
  return [
    record.named(i),
    factor === 0
      ? translate('is off')
      : factor !== 1
        ? translate('is scaled', { factor: factorText(factor) })
        : translate('is on'),
    isKnown(effect) ? translate(nameOfEffect(i), { value: effectText(effect) }) : '',
    isKnown(distance) && state.heads.size ? translate('its maps', { value: formatPercent(distance) }) : '',
  ]
    .filter(Boolean)
    .join(translate('join.comma'));
}
// Describe the head that is pointed at or has the focus, without one (-1) how to use the grid.
let lit = -1;
function light(i) {
  lit = i;
  $('lit').textContent = i < 0 ? translate('grid hint') : described(i);
}

function colours() {
  $('colours').replaceChildren(
    ...COLOURS.map(name =>
      el('button', {
        textContent: translate(
          'colour.' + (name === 'effect' && answers.model.kind === 'encoder' ? 'similarity' : name),
        ),
        'aria-pressed': String(name === gridChoice.colour),
        onclick: () => {
          colourBy(name);
          elementIn($('colours'), '[aria-pressed=true]').focus();
        },
      }),
    ),
  );
}
export function colourBy(name) {
  gridChoice.colour = name;
  colours();
  paintGrid();
}

function legend(end, values) {
  const some = values.some(isKnown);
  const width = Math.min(240, $('gridbox').clientWidth - 8);
  const note = key => el('div', { className: 'note', textContent: translate(key) });
  const encoder = answers.model.kind === 'encoder';
  $('scale').replaceChildren(
    ...{
      kind: () => [],
      changed: () =>
        some && state.heads.size
          ? [
              markedRamp('ink', width, [
                [0, '0'],
                [100, formatExact(end)],
              ]),
              note('changed legend'),
            ]
          : [note('changed none')],
      effect: () =>
        some
          ? [
              signedRamp(width, end, String),
              note(encoder ? 'effect legend similarity' : 'effect legend'),
              ...(estimatedHeads.size ? [note('estimate legend')] : []),
            ]
          : [note('effect none')],
    }[gridChoice.colour](),
  );
}

function chips() {
  if (!answers.record.legend.some(kind => kind.id === gridChoice.kind)) gridChoice.kind = '';
  kindChips($('chips'), answers.record.allKinds, gridChoice.kind, kind => {
    gridChoice.kind = kind;
    chips();
    paintGrid();
  });
}
function kindOff() {
  const { record } = answers;
  const list = record.heads.map((_, i) => i).filter(i => record.allKinds[i].includes(gridChoice.kind));
  $('kindoff').hidden = !gridChoice.kind;
  $('kindoff').textContent = translate(list.every(i => isOff(record.heads[i])) ? 'kind on' : 'kind off', {
    n: formatCount(list.length),
    kind: gridChoice.kind && kindName(gridChoice.kind),
  });
  $('kindoff').onclick = () => switchAll(list);
}

// The slider of the changed heads; their common factor, or that of the last one.
function scaling() {
  $('scaling').hidden = !state.heads.size;
  if (!state.heads.size) return;
  $('factor').value = String(commonFactor() ?? [...state.heads.values()].at(-1));
  scalingNamed(commonFactor());
}
function scalingNamed(factor) {
  $('scaled').textContent = translate('output of', {
    heads: headsNamed(),
    factor: factor === null ? translate('different') : factor.toFixed(2),
  });
  $('factor').setAttribute('aria-valuetext', factor === null ? translate('different') : factor.toFixed(2));
}
