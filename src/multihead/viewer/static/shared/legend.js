// The legend of the colours, with numbers, the choice of the scale, and what a cell of a map is.
import { colourOfTone, SCALES, sizeCanvas, toneOf } from './colour.js';
import { choiceButtons, el, NBSP, translate } from './dom.js';
import { formatExact } from './numbers.js';

export function colourRamp(lut, width, height = 10) {
  const canvas = el('canvas', { 'aria-hidden': 'true' });
  const pen = sizeCanvas(canvas, width, height);
  for (let x = 0; x < width; x++) {
    pen.fillStyle = colourOfTone(lut, x / (width - 1));
    pen.fillRect(x, 0, 1, height);
  }
  return canvas;
}

// A ramp with ticks at their positions; `top` is the end of the linear and the √ scale.
export function tickedRamp(width, scale, top) {
  const ticks = SCALES[scale].ticks(top);
  const at = w => toneOf(scale, w, top);
  // A label needs 30 pixels; the first one of the log scale is longer.
  const room = n => (n === 1 && scale === 'log' ? 90 : 30);
  const apart = ticks.filter(
    (w, n) =>
      !n ||
      n === ticks.length - 1 ||
      ((at(w) - at(ticks[n - 1])) * width > room(n) && (at(ticks.at(-1)) - at(w)) * width > 30),
  );
  return markedRamp(
    'ink',
    width,
    apart.map(w => [
      at(w) * 100,
      w === 0 ? '0' : (scale === 'log' && w === ticks[0] ? '≤ ' : '') + +(w * 100).toPrecision(3) + NBSP + '%',
    ]),
  );
}

// A ramp with marks below it, each [percent of the width, text].
export const markedRamp = (lut, width, marks) =>
  el(
    'div',
    {},
    colourRamp(lut, width),
    el(
      'div',
      { className: 'ticks' },
      ...marks.map(([left, textContent]) => {
        const mark = el('span', { textContent });
        mark.style.left = left + '%';
        return mark;
      }),
    ),
  );

// The ramp of a difference A − B, from −end to +end, which are percentages unless `form` writes them otherwise; on the
// √ scale with a mark at a quarter of its end.
export const signedRamp = (width, end, form = formatExact, scale = 'linear') =>
  markedRamp('apart', width, [
    [0, '−' + form(end)],
    ...(scale === 'root' ? [[25, '−' + form(end / 4)]] : []),
    [50, '0'],
    ...(scale === 'root' ? [[75, '+' + form(end / 4)]] : []),
    [100, '+' + form(end)],
  ]);

export function scaleChoice(chosen, choose) {
  const names = Object.keys(SCALES);
  const [words, titles] = ['scale.', 'scale.hint.'].map(key => names.map(name => translate(key + name)));
  return choiceButtons(translate('scale.label'), words, names.indexOf(chosen), n => choose(names[n]), titles);
}

// What a cell of a map is: one weight, or the mean of a block of weights [rows, columns].
export const isSingle = ([rows, columns]) => rows * columns === 1;
export const blockNote = ([rows, columns]) =>
  isSingle([rows, columns]) ? translate('cell.weight') : translate('cell.mean', { rows, columns });

// The note on one map: its cells, and where its scale ends; the log scale ends at 100 % always.
export const cellNote = (block, scale, top) =>
  [blockNote(block), ...(scale === 'log' ? [] : [translate('scale.end', { end: formatExact(top) })])].join(
    translate('join.sentences'),
  );
