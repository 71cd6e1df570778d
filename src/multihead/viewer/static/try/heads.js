// The grid of all heads: which are off or scaled, coloured by kind, by how much their maps changed, or by their effect.
import { paint, tone } from '../shared/colour.js';
import { $, el, elementAround, elementIn, translate } from '../shared/dom.js';
import { drawHeads, fitted } from '../shared/headgrid.js';
import { root } from '../shared/host.js';
import { glyph, kindChips, kindName } from '../shared/kinds.js';
import { markedRamp, signedRamp } from '../shared/legend.js';
import { count, exact, known, percent, roundedUp, signed } from '../shared/numbers.js';
import { size } from '../view/host.js';
import { headsNamed } from './sentence.js';
import { changedHeads, commonFactor, factorOf, found, isOff, nameOf, state } from './state.js';

const COLOURS = ['kind', 'changed', 'effect'];
const HIGH = 270; // pixels
export const effects = new Map(); // index of a head -> the effect of its absence on the chosen token
export const shown = { colour: 'kind', kind: '', lit: 0 };
let cells = [];
let act = { set: _heads => {} };

// set(heads): called with the heads "layer.head" -> factor that a click asks for.
export function listen(actions) {
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
    const next = found.record.moved(+cell.dataset.i, event.key);
    if (next >= 0) cells[next].focus();
    else if (/^(Enter| )$/.test(event.key)) toggle(+cell.dataset.i, event.shiftKey);
    if (next !== undefined || /^(Enter| )$/.test(event.key)) event.preventDefault();
  };
  $('grid').onmouseleave = () => light($('grid').contains(root.activeElement) ? shown.lit : -1);
  $('factor').oninput = () => scalingNamed(+$('factor').value);
  $('factor').onchange = () => act.set(new Map([...state.heads.keys()].map(name => [name, +$('factor').value])));
}

function toggle(i, layer) {
  const { record } = found;
  const { l, h } = record.heads[i];
  if (layer) switchAll(record.heads.map((_, n) => n).filter(n => record.heads[n].l === l));
  else {
    const heads = new Map(state.heads);
    const name = nameOf({ l, h });
    if (!heads.delete(name)) heads.set(name, 0);
    act.set(heads);
  }
}

// Switch heads off, or where all are off already, on.
function switchAll(list) {
  const heads = new Map(state.heads);
  const names = list.map(i => nameOf(found.record.heads[i]));
  const off = list.every(i => isOff(found.record.heads[i]));
  for (const name of names)
    if (off) heads.delete(name);
    else heads.set(name, 0);
  act.set(heads);
}

export function drawGrid() {
  const { record } = found;
  const phone = size().width <= 640;
  const held = $('grid').contains(root.activeElement);
  if (shown.lit >= record.heads.length) shown.lit = 0;
  lit = -1;
  const shape = fitted(record, $('gridbox').clientWidth - 8, { phone, high: HIGH, low: 0, largest: phone ? 28 : 40 });
  cells = record.heads.map((_, i) => {
    const made = el('button', {
      className: 'cell',
      k: record.kinds[i],
      tabIndex: i === shown.lit ? 0 : -1,
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
  if (held) cells[shown.lit].focus();
}

function keep(i) {
  cells[shown.lit].tabIndex = -1;
  cells[i].tabIndex = 0;
  shown.lit = i;
}
export const focusGrid = () => cells[shown.lit].focus();

const distanceOf = i => {
  const { l, h } = found.record.heads[i];
  return found.change.distances.find(one => one.layer === l)?.heads[h] ?? null;
};
const shownValue = i =>
  shown.colour === 'changed' ? distanceOf(i) : shown.colour === 'effect' ? (effects.get(i) ?? null) : null;
const factorText = factor => String(+factor.toPrecision(2));
const effectText = value => signed(value, 2) || '0';

// Paint every cell anew: a head that is off is a crossed hollow cell, a scaled one has its number.
export function paintGrid() {
  const { record } = found;
  const values = record.heads.map((_, i) => shownValue(i));
  const end = roundedUp(Math.max(shown.colour === 'effect' ? 0.1 : 0.01, ...values.filter(known).map(Math.abs)));
  record.heads.forEach((head, i) => {
    const cell = cells[i];
    const factor = factorOf(head);
    const value = values[i];
    const off = factor === 0;
    cell.className = [
      'cell',
      shown.colour,
      off ? 'off' : factor !== 1 || state.heads.has(nameOf(head)) ? 'scaled' : '',
      shown.colour !== 'kind' && !known(value) ? 'none' : '',
      shown.kind && !record.allKinds[i].includes(shown.kind) ? 'dim' : '',
    ]
      .filter(Boolean)
      .join(' ');
    cell.style.background = cell.style.color = '';
    if (!off && known(value)) {
      if (shown.colour === 'effect') paint(cell, 0.5 + value / end / 2, 'apart');
      else paint(cell, tone('linear', value, end));
    }
    cell.replaceChildren(
      ...(off
        ? []
        : factor !== 1 || state.heads.has(nameOf(head))
          ? [factorText(factor)]
          : shown.colour === 'kind'
            ? [glyph(record.kinds[i])]
            : []),
    );
    cell.setAttribute('aria-pressed', String(state.heads.has(nameOf(head))));
    cell.setAttribute('aria-label', described(i));
  });
  $('howmany').textContent = state.heads.size
    ? translate('changed of', { n: count(changedHeads().length), all: count(record.heads.length) })
    : translate('all n on', { n: count(record.heads.length) });
  legend(end, values);
  light(lit);
  scaling();
  kindOff();
}

function described(i) {
  const { record } = found;
  const factor = factorOf(record.heads[i]);
  const distance = distanceOf(i);
  const effect = effects.get(i);
  return [
    record.named(i),
    factor === 0
      ? translate('is off')
      : factor !== 1
        ? translate('is scaled', { factor: factorText(factor) })
        : translate('is on'),
    known(effect)
      ? translate(found.model.kind === 'encoder' ? 'its effect on similarity' : 'its effect', {
          value: effectText(effect),
        })
      : '',
    known(distance) && state.heads.size ? translate('its maps', { value: percent(distance) }) : '',
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
        textContent: translate('colour.' + (name === 'effect' && found.model.kind === 'encoder' ? 'similarity' : name)),
        'aria-pressed': String(name === shown.colour),
        onclick: () => {
          colourBy(name);
          elementIn($('colours'), '[aria-pressed=true]').focus();
        },
      }),
    ),
  );
}
export function colourBy(name) {
  shown.colour = name;
  colours();
  paintGrid();
}

function legend(end, values) {
  const some = values.some(known);
  const width = Math.min(240, $('gridbox').clientWidth - 8);
  const note = key => el('div', { className: 'note', textContent: translate(key) });
  const encoder = found.model.kind === 'encoder';
  $('scale').replaceChildren(
    ...{
      kind: () => [],
      changed: () =>
        some && state.heads.size
          ? [
              markedRamp('ink', width, [
                [0, '0'],
                [100, exact(end)],
              ]),
              note('changed legend'),
            ]
          : [note('changed none')],
      effect: () =>
        some
          ? [signedRamp(width, end, String), note(encoder ? 'effect legend similarity' : 'effect legend')]
          : [note('effect none')],
    }[shown.colour](),
  );
}

function chips() {
  if (!found.record.legend.some(kind => kind.id === shown.kind)) shown.kind = '';
  kindChips($('chips'), found.record.allKinds, shown.kind, kind => {
    shown.kind = kind;
    chips();
    paintGrid();
  });
}
function kindOff() {
  const { record } = found;
  const list = record.heads.map((_, i) => i).filter(i => record.allKinds[i].includes(shown.kind));
  $('kindoff').hidden = !shown.kind;
  $('kindoff').textContent = translate(list.every(i => isOff(record.heads[i])) ? 'kind on' : 'kind off', {
    n: count(list.length),
    kind: shown.kind && kindName(shown.kind),
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
