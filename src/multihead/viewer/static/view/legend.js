// The legend below a map: one ramp, or two if heads are compared.
import { el, NBSP, translate } from '../shared/dom.js';
import { colourRamp } from '../shared/legend.js';
import { formatShort } from '../shared/numbers.js';
import { state } from './permalink.js';

const minLabel = () => (state.scale === 'log' ? `≤ 0.001${NBSP}%` : '0');
const maxLabel = top => (state.scale === 'log' ? `100${NBSP}%` : formatShort(top));

export function legendOfMap(tops, compare) {
  const one = (lut, left, right, width) =>
    el('span', {}, el('span', { textContent: left }), colourRamp(lut, width), el('span', { textContent: right }));
  const found = [
    one(
      'ink',
      minLabel(),
      maxLabel(tops.ink) + (compare || state.scale === 'linear' ? '' : ` (${translate('scale.' + state.scale)})`),
      compare ? 60 : 128,
    ),
  ];
  if (compare) found.push(one('apart', '−' + maxLabel(tops.apart), '+' + maxLabel(tops.apart), 60));
  return found;
}
