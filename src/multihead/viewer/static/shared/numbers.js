// Format numbers.
import { NBSP } from './dom.js';
import { frame } from './host.js';

export const isKnown = value => value !== null && value !== undefined && Number.isFinite(value);
// The end of a scale: a value rounded up to 1, 2 or 5 times a power of ten.
export function roundUp(value) {
  const ten = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find(m => m * ten >= value * 0.999) * ten;
}

/**
 * The largest of some numbers, at least 0; NaN, such as a masked cell, is left out.
 * @param {Iterable<number>} values
 */
export function largestOf(values) {
  let top = 0;
  for (const value of values) if (value > top) top = value;
  return top;
}

// Add an index to `best`, the indices of the `most` largest values so far, the largest first.
export function keepLargest(best, index, valueAt, most) {
  if (best.length === most && !(valueAt(index) > valueAt(best.at(-1)))) return;
  const at = best.findIndex(other => valueAt(other) < valueAt(index));
  best.splice(at < 0 ? best.length : at, 0, index);
  best.length = Math.min(best.length, most);
}

export const formatCount = n => Math.round(n).toLocaleString(frame.lang);

// A number with its sign, + or −; none where it is rounded to 0.
export function formatSigned(value, digits) {
  const shown = Math.abs(value).toFixed(digits);
  return (+shown === 0 ? '' : value < 0 ? '−' : '+') + shown;
}

// The decimals of a number whose standard error is shown with two digits.
export const decimalsOf = error => Math.max(0, 1 - Math.floor(Math.log10(error)));

// A share in per cent for tables: one decimal below ten, none above.
export const formatShare = w => (w * 100).toFixed(Math.abs(w) < 0.0995 ? 1 : 0);
export const formatPercent = w => formatShare(w) + NBSP + '%';

// A weight in per cent with about two digits; below 0.001 % as a power of ten.
export function formatShort(w) {
  if (!(w > 0)) return w === 0 ? '0' : '–';
  const p = w * 100;
  if (p >= 0.001)
    return (p >= 9.95 ? p.toFixed(0) : p >= 0.0995 ? p.toFixed(1) : String(+p.toPrecision(1))) + NBSP + '%';
  const [digit, power] = p.toExponential(0).split('e-');
  return `${digit}·10⁻${[...power].map(d => '⁰¹²³⁴⁵⁶⁷⁸⁹'[d]).join('')}${NBSP}%`;
}

// A weight in per cent with three digits.
export function formatExact(w) {
  const p = w * 100;
  return p >= 0.001 || p === 0 ? +p.toPrecision(3) + NBSP + '%' : formatShort(w);
}
