// What the colours mean, always with numbers; and the choice of the scale.
import { rgb, SCALES, sized, tone } from './colour.js';
import { state } from './permalink.js';
import { el, NBSP, say, short } from './words.js';

function ramp(lut, width) {
  const canvas = el('canvas', { 'aria-hidden': 'true' }), pen = sized(canvas, width, 10);
  for (let x = 0; x < width; x++) { pen.fillStyle = rgb(lut, x / (width - 1)); pen.fillRect(x, 0, 1, 10); }
  return canvas;
}
const least = () => state.scale === 'log' ? `≤ 0.001${NBSP}%` : '0';
const most = top => state.scale === 'linear' ? short(top) : `100${NBSP}%`;

// For the foot of a map: one ramp, or two where heads are compared.
export function legend(tops, compare) {
  const one = (lut, left, right, width) => el('span', {}, el('span', { textContent: left }), ramp(lut, width), el('span', { textContent: right }));
  const found = [one('ink', least(), most(tops.ink) + (compare || state.scale === 'linear' ? '' : ` (${say(state.scale)})`), compare ? 60 : 128)];
  if (compare) found.push(one('apart', '−' + most(tops.apart), '+' + most(tops.apart), 60));
  return found;
}

// For the grid: a long ramp with ticks at their true places.
export function ticked(width, top) {
  const { ticks } = SCALES[state.scale], at = w => tone(state.scale, w, top), canvas = ramp('ink', width);
  const apart = ticks(top).filter((w, n, all) => !n || n === all.length - 1 || (at(w) - at(all[n - 1])) * width > 30);
  const marks = el('div', { className: 'ticks' }, ...apart.map(w => {
    const words = w === 0 ? '0' : (state.scale === 'log' && w === ticks(top)[0] ? '≤ ' : '') + +(w * 100).toPrecision(3) + NBSP + '%', mark = el('span', { textContent: words });
    mark.style.left = at(w) * 100 + '%';
    return mark;
  }));
  return el('div', {}, canvas, marks);
}

export function scaleChoice(change) {
  return el('span', { className: 'seg', role: 'group', 'aria-label': say('scale') }, ...Object.keys(SCALES).map(name => el('button', {
    textContent: say(name), 'aria-pressed': String(name === state.scale), title: say('hint ' + name), onclick: () => change(name),
  })));
}
