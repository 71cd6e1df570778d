// The panel "Which heads matter" on the page of all heads: each head coloured by its number, an exact effect or an
// estimate by its name, those that matter most, and what they do together.
import { paintElement, toneOf } from '../shared/colour.js';
import {
  $,
  choiceButtons,
  el,
  elementAround,
  elementIn,
  elementsIn,
  NBSP,
  takeLink,
  translate,
} from '../shared/dom.js';
import { drawHeads, fitGrid, letTabReach } from '../shared/headgrid.js';
import { root } from '../shared/host.js';
import { kindTags } from '../shared/kinds.js';
import { signedRamp } from '../shared/legend.js';
import { decimalsOf, formatSigned, isKnown, roundUp } from '../shared/numbers.js';
import { makeStatistic, withUnit } from '../shared/statistics.js';
import { thumbnailOf } from './grid.js';
import { windowSize } from './host.js';
import { saveAddress, state, toHead } from './permalink.js';

/** @import { Important, Sample } from './record.js' */
/** @import { Statistic } from '../shared/statistics.js' */

const [HIGH, LARGEST] = [420, 32]; // pixels of the grid and of a cell
/** @type {Sample} */
let record = null;
/** @type {Important} */
let chosen = null;
let lit = -1; // the head in the grid that Tab reaches: at first the most important one
let opened = null; // the grid or the list of this panel, if it opened the head that is shown
let passing = _head => true;
let goTo = _head => {};

const signed = (/** @type {Statistic} */ one, i) => (one.values[i] > 0 ? '+' : '') + one.text(i).replace('-', '−');
function withError(/** @type {Statistic} */ one, /** @type {Statistic} */ error, i) {
  const spread = error.values[i];
  const [of, by] =
    one.percentage || !(spread > 0)
      ? [signed(one, i), error.text(i)]
      : [formatSigned(one.values[i], decimalsOf(spread)), spread.toFixed(decimalsOf(spread))];
  const value = isKnown(spread) ? translate('important.error', { value: of, error: by }) : of;
  return value + (one.percentage || !one.unit ? '' : NBSP + one.unit);
}
// A bar of a number, in the colours of the grid: another one below 0.
const lengthOf = (value, top) =>
  el('i', { className: value < 0 ? 'below' : '', v: Math.abs(value) / top, 'aria-hidden': 'true' });
const isWithin = i => chosen.within[i] ?? false;
function described(i) {
  const head = record.named(i);
  if (!isKnown(chosen.shown.values[i])) return translate('important.not measured', { head });
  const value = withError(chosen.shown, chosen.error, i);
  return [
    translate('important.value', { head, name: chosen.name, value }),
    ...(isWithin(i) ? [translate('important.within')] : []),
  ].join(translate('join.comma'));
}

// Show the numbers of the heads of a record, if some were added to it.
export function showImportant(/** @type {Sample} */ of, passes, openHead) {
  if (of !== record) lit = -1;
  record = of;
  passing = passes;
  goTo = openHead;
  $('important').hidden = !record.important.length;
  if (!record.important.length) return;
  choose(record.important.find(each => each.id === state.m) ?? record.important[0]);
}

function choose(/** @type {Important} */ numbers) {
  chosen = numbers;
  state.m = numbers === record.important[0] ? '' : numbers.id;
  if (!isKnown(chosen.shown.values[lit])) lit = chosen.order[0] ?? 0;
  $('importantlead').textContent = chosen.sentence;
  $('importantabout').textContent = chosen.about;
  $('important').classList.toggle('unknown', !chosen.order.length); // a sentence alone, such as that there is no share
  switchOfNumbers();
  drawTogether(); // it decides how wide the grid is
  drawMost();
  drawGrid();
  drawLegend();
}

function switchOfNumbers() {
  $('importantchoice').hidden = record.important.length < 2;
  const several = new Set(record.important.map(each => each.of)).size > 1;
  const named = each => (several ? [each.name, each.of].join(translate('join.facts')) : each.name);
  $('importantchoice').replaceChildren(
    choiceButtons(translate('important.choice'), record.important.map(named), record.important.indexOf(chosen), n => {
      choose(record.important[n]);
      saveAddress();
    }),
  );
}

// The end of the scale: one for all numbers in a unit, so that an estimate and the exact effect compare.
function endOfScale() {
  const alike = record.important.filter(each => each.shown.unit === chosen.shown.unit);
  return roundUp(Math.max(1e-9, ...alike.flatMap(each => each.shown.values.filter(isKnown).map(Math.abs))));
}
const toneOfNumber = (value, end) => 0.5 + (Math.sign(value) * toneOf('root', Math.abs(value), end)) / 2;

function drawGrid() {
  const box = $('importantgrid');
  const held = box.contains(root.activeElement);
  const phone = windowSize().width <= 640;
  const shape = fitGrid(record, $('importantbox').clientWidth - 8, { phone, high: HIGH, low: 0, largest: LARGEST });
  const end = endOfScale();
  drawHeads(box, record, shape, i => cellOf(i, end));
  if (held) focusLit();
  read(-1);
}
function cellOf(i, end) {
  const value = chosen.shown.values[i];
  const { l, h } = record.heads[i];
  const cell = el('a', {
    className: 'cell',
    href: toHead(record.run, record.sample, l, h),
    tabIndex: i === lit ? 0 : -1,
    'aria-label': described(i),
    onmouseenter: () => read(i),
    onmouseleave: () => read(-1),
    onfocus: () => light(i),
    onblur: () => read(-1),
  });
  cell.dataset.i = String(i);
  if (isKnown(value)) paintElement(cell, toneOfNumber(value, end), 'apart');
  cell.classList.toggle('unmeasured', !isKnown(value));
  cell.classList.toggle('within', isWithin(i));
  cell.classList.toggle('dim', !passing(i));
  return cell;
}
const cellAt = i => elementIn($('importantgrid'), `[data-i="${i}"]`);
function light(i) {
  lit = i;
  letTabReach($('importantgrid'), i);
  read(i);
}
const focusLit = () => cellAt(lit)?.focus({ preventScroll: true });

// The number of the head that is pointed at; without one (-1) of the head that has the focus, or how to use the grid.
function read(i) {
  const shown = i < 0 && $('importantgrid').contains(root.activeElement) ? lit : i;
  $('importantread').textContent = shown < 0 ? translate('important.hint') : described(shown);
}

export function fadeImportant(passes) {
  passing = passes;
  for (const cell of elementsIn($('importantgrid'), 'a')) cell.classList.toggle('dim', !passes(Number(cell.dataset.i)));
}

// Return from the page of a head that this panel opened to its cell or its place in the list. Returns
// whether it was this panel.
export function returnToImportant(i, focus) {
  const link = opened?.isConnected ? elementIn(opened, `[data-i="${i}"]`) : null;
  opened = null;
  if (!link || $('important').hidden) return false;
  link.scrollIntoView({ block: 'nearest' });
  if (focus) link.focus({ preventScroll: true });
  return true;
}

$('important').onclick = event => {
  const link = takeLink(event);
  if (!link) return;
  opened = $('mostheads').contains(link) ? $('mostheads') : $('importantgrid');
  goTo(Number(link.dataset.i));
};
$('importantgrid').onkeydown = event => {
  const cell = elementAround(event, 'a');
  if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
  const next = record.moved(Number(cell.dataset.i), event.key);
  if (next === undefined) return;
  event.preventDefault();
  if (next >= 0) cellAt(next).focus();
};

function drawLegend() {
  const end = endOfScale();
  const form = chosen.shown.tick;
  const width = Math.min(320, $('importantbox').clientWidth - 40);
  const label = withUnit({ label: chosen.name, unit: chosen.shown.unit });
  $('importantscale').replaceChildren(
    signedRamp(width, end, form, 'root'),
    el('div', { className: 'note' }, el('b', { textContent: label }), translate('join.sentences'), chosen.note),
  );
}

// The heads that matter most, with their small maps, which arrive later.
export function drawMost() {
  if (!record?.important.length) return;
  const top = Math.max(...chosen.order.map(i => Math.abs(chosen.shown.values[i])));
  $('mosttitle').textContent = chosen.most;
  $('mostheads').replaceChildren(
    ...chosen.order.map(i => {
      const { l, h } = record.heads[i];
      const words = el(
        'p',
        {},
        el('b', { textContent: record.short(i) }),
        kindTags(record.allKinds[i]),
        el('small', { className: 'num', textContent: withError(chosen.shown, chosen.error, i) }),
        lengthOf(chosen.shown.values[i], top),
      );
      const link = el(
        'a',
        { href: toHead(record.run, record.sample, l, h) },
        el('span', { className: 'framed', k: record.kinds[i] }, thumbnailOf(record, i, 40)),
        words,
      );
      link.dataset.i = String(i);
      return el('li', {}, link);
    }),
  );
}

function drawTogether() {
  const { together } = chosen;
  $('together').hidden = !together;
  $('important').classList.toggle('paired', together !== null);
  if (!together) return;
  const numbers = makeStatistic(
    { ...chosen.column, about: '' },
    together.rows.map(([, value]) => value),
  );
  const errors = makeStatistic(
    { ...chosen.errorColumn, about: '' },
    together.rows.map(([, , error]) => error),
  );
  const top = Math.max(...together.rows.map(([, value]) => Math.abs(value)));
  const heads = together.heads.map(i => record.short(i)).join(translate('join.comma'));
  $('togethernote').textContent = [together.sentence, translate('important.together.heads', { heads })].join(
    translate('join.sentences'),
  );
  $('togetherrows').replaceChildren(
    ...together.rows.map(([label, value], n) =>
      el(
        'tr',
        {},
        el('th', { scope: 'row' }, label, lengthOf(value, top)),
        el('td', { textContent: withError(numbers, errors, n) }),
      ),
    ),
  );
}
