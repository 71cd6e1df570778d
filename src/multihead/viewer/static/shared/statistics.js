// The statistics of every head: their labels, units and number formats, and the definitions of statistics and kinds.
import { el, hasText, NBSP, translate } from './dom.js';
import { glyphElement } from './kinds.js';
import { markedRamp } from './legend.js';
import { formatShare, isKnown } from './numbers.js';

// Return a function that formats numbers: "share", ".2f" (decimals) or ".3g" (significant digits, no exponent).
function writer(format) {
  const [, digits, form] = /^\.(\d)([fg])$/.exec(format) ?? [];
  if (form === 'f') return v => v.toFixed(+digits);
  return form === 'g'
    ? v => v.toLocaleString('en', { maximumSignificantDigits: +digits, useGrouping: false })
    : formatShare;
}

/**
 * A statistic of all heads: its numbers as text, and how far its bars are filled.
 * @typedef {ReturnType<typeof makeStatistic>} Statistic
 */

/**
 * One statistic.
 * @param {Omit<ColumnDescription, 'focus'> & { focus?: boolean }} column
 * @param {(number | null)[]} values per head
 * @param {(head: number) => number} [full] the largest value possible for a head
 * @param {(number | null)[]} [chance] what an even spread over the visible keys gives, per head
 */
export function makeStatistic({ id, label, unit, format, about, focus = false }, values, full, chance = []) {
  const show = writer(format);
  const percentage = format === 'share';
  const max = Math.max(1e-9, ...values.filter(isKnown));
  const top = percentage ? () => 1 : (full ?? (() => max));
  return {
    id,
    label,
    about,
    focus,
    values,
    unit,
    times: percentage ? 100 : 1,
    percentage,
    filled: i => (isKnown(values[i]) ? values[i] / (top(i) || 1) : 0),
    number: i => (isKnown(values[i]) ? show(values[i]) : '–'),
    text: i => (isKnown(values[i]) ? show(values[i]) + (percentage ? NBSP + '%' : '') : '–'),
    tick: value => +(value * (percentage ? 100 : 1)).toPrecision(3) + (percentage ? ' %' : ''),
    chance: chance.map(value => (isKnown(value) ? show(value) : '')),
    level: i =>
      isKnown(chance[i]) ? translate('chance', { n: show(chance[i]) + (percentage ? NBSP + '%' : '') }) : '',
  };
}
export const withUnit = one =>
  one.unit ? translate('label and unit', { label: one.label, unit: one.unit }) : one.label;

// The scale of a statistic below a grid: a ramp with marks, and a note after the name of the statistic.
export const statisticScale = (one, lut, marks, note) => [
  markedRamp(lut, 320, marks),
  el('div', { className: 'note', textContent: [withUnit(one), note].join(translate('join.parts')) }),
];

// The chance of a column: one number, or the range over layers whose masks differ.
export function chanceOf(one) {
  const found = [...new Set(one.chance.filter(Boolean))].sort((a, b) => a - b);
  return found.length ? translate('chance', { n: found.length > 1 ? `${found[0]}–${found.at(-1)}` : found[0] }) : '';
}

// The rows of a head's small table: label, bar, number, chance.
export const numberRows = (statistics, i) => [
  ...(statistics.some(one => one.chance[i])
    ? [
        el(
          'tr',
          { className: 'head' },
          el('td'),
          el('td'),
          el('td'),
          el('td', { className: 'level', textContent: translate('chance', { n: '' }).trim() }),
        ),
      ]
    : []),
  ...statistics.map(one =>
    el(
      'tr',
      { title: one.level(i) },
      el('th', { scope: 'row', textContent: one.percentage ? one.label : withUnit(one) }),
      el('td', { className: 'b' }, el('i', { v: one.filled(i) })),
      el('td', { textContent: one.text(i) }),
      el('td', { className: 'level', textContent: one.chance[i] ?? '' }),
    ),
  ),
];

// The small table of a head.
export const numbersTable = (statistics, i) =>
  el(
    'table',
    { className: 'numbers' },
    el('caption', { className: 'vh', textContent: translate('head statistics') }),
    el('tbody', {}, ...numberRows(statistics, i)),
  );

// [label, definition] of the statistics that have one: in the texts of the page, or as their own text.
export const definedStatistics = (/** @type {Pick<ColumnDescription, 'id' | 'label' | 'about'>[]} */ statistics) =>
  statistics
    .map(({ id, label, about }) => [label, hasText('definition.' + id) ? translate('definition.' + id) : about])
    .filter(([, words]) => words);

// Fill a box with the definitions of statistics, and of the kinds of a legend that were measured.
export function showDefinitions(box, statistics, /** @type {KindDescription[]} */ legend) {
  const entry = (title, words, kind) =>
    el(
      'div',
      kind ? { k: kind } : {},
      el('dt', {}, ...(kind ? [glyphElement(kind)] : []), title[0].toLocaleUpperCase() + title.slice(1)),
      el('dd', { textContent: words }),
    );
  box.replaceChildren(
    ...definedStatistics(statistics).map(([label, words]) => entry(label, words)),
    ...legend.filter(kind => kind.measured).map(kind => entry(kind.label, kind.about, kind.id)),
  );
}
