// The statistics of every head: their labels, units and number formats, and what they and the kinds mean.
import { el, knows, NBSP, say } from './dom.js';
import { glyph, KINDS, kindName } from './kinds.js';
import { known, share } from './numbers.js';

const UNITS = {
  share: { unit: '%', show: share, times: 100 },
  nats: { unit: 'nats', show: v => v.toFixed(2), times: 1 },
  tokens: { unit: 'tokens', show: v => v.toFixed(1), times: 1 },
  keys: { unit: '', show: v => v.toFixed(1), times: 1 },
  number: { unit: '', show: v => String(+v.toPrecision(3)), times: 1 },
};

// One statistic: values per head; full(i), if given, is the largest value possible for head i.
export function statistic(column, values, full) {
  const { unit, show, times } = Object.hasOwn(UNITS, column.unit) ? UNITS[column.unit] : UNITS.number;
  const percentage = column.unit === 'share', most = Math.max(1e-9, ...values.filter(known)), top = percentage ? () => 1 : full ?? (() => most);
  return {
    id: column.id, name: column.statistic, label: column.label, values, unit, times, percentage,
    filled: i => known(values[i]) ? values[i] / (top(i) || 1) : 0,
    number: i => known(values[i]) ? show(values[i]) : '–',
    text: i => known(values[i]) ? show(values[i]) + (percentage ? NBSP + '%' : '') : '–',
  };
}
export const withUnit = one => one.unit ? say('label and unit', { label: one.label, unit: one.unit === '%' ? '%' : say('unit.' + one.unit) }) : one.label;

// The rows of a head's small table: label, bar, number.
export const numberRows = (statistics, i) => statistics.map(one => el('tr', {}, el('th', { scope: 'row', textContent: one.percentage ? one.label : withUnit(one) }),
  el('td', { className: 'b' }, el('i', { v: one.filled(i) })), el('td', { textContent: one.text(i) })));

// What the statistics [name, label] and the kinds mean, as far as there is a text.
export function definitions(box, statistics, kinds, thresholds, bound = false) {
  const entry = (title, words, kind) => el('div', kind ? { k: kind } : {}, el('dt', {}, ...(kind ? [glyph(kind)] : []), title[0].toLocaleUpperCase() + title.slice(1)), el('dd', { textContent: words }));
  const percents = Object.fromEntries(Object.entries(thresholds).map(([name, value]) => [name, name === 'reach' ? value : share(value) + NBSP + '%']));
  box.replaceChildren(
    ...statistics.filter(([name]) => knows('definition.' + name)).map(([name, label]) => entry(label, say('definition.' + name))),
    ...KINDS.filter(kind => kinds.includes(kind)).map(kind => entry(kindName(kind), say(bound && kind === 'local' ? 'local bound' : 'kind definition.' + kind, percents), kind)));
}
