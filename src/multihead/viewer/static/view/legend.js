// The legend at the foot of a map: one ramp, or two where heads are compared.
import { el, NBSP, say } from '../shared/dom.js';
import { ramp } from '../shared/legend.js';
import { short } from '../shared/numbers.js';
import { state } from './permalink.js';

const least = () => state.scale === 'log' ? `≤ 0.001${NBSP}%` : '0';
const most = top => state.scale === 'linear' ? short(top) : `100${NBSP}%`;

export function legend(tops, compare) {
  const one = (lut, left, right, width) => el('span', {}, el('span', { textContent: left }), ramp(lut, width), el('span', { textContent: right }));
  const found = [one('ink', least(), most(tops.ink) + (compare || state.scale === 'linear' ? '' : ` (${say('scale.' + state.scale)})`), compare ? 60 : 128)];
  if (compare) found.push(one('apart', '−' + most(tops.apart), '+' + most(tops.apart), 60));
  return found;
}
