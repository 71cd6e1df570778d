// The rulers of a pane: tokens if a cell has at least 10.5 pixels, else round positions.
import { cssVariable } from '../shared/colour.js';
import { translate } from '../shared/dom.js';
import { formatCount, roundUp } from '../shared/numbers.js';
import { state } from './permalink.js';
import { labelOfToken } from './record.js';

export const MIN_CELL_OF_TOKENS = 10.5;
// A label above a column is drawn upright if it is a single Chinese or Japanese character or a pictogram.
const UPRIGHT =
  /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Extended_Pictographic}\u3000-\u303f\uff00-\uffef]\ufe0f?$/u;
const face = (pen, on, colour) => {
  pen.font = `${on ? 650 : 420} 11px ${cssVariable('sans')}`;
  pen.fillStyle = cssVariable(colour);
};

// Truncate a label to a width in pixels.
function clip(pen, text, max) {
  if (pen.measureText(text).width <= max) return text;
  const letters = [...text].slice(0, 60);
  while (letters.length > 1 && pen.measureText(letters.join('') + '…').width > max) letters.pop();
  return letters.join('') + '…';
}

export function drawRulers(pen, pane, /** @type {LayerDescription} */ layer, { query, key }, pointed) {
  pen.textBaseline = 'middle';
  pen.direction = 'ltr';
  if (pane.which !== 'b') left(pen, pane, layer, query, pointed);
  above(pen, pane, layer, key, pointed);
}

function left(pen, pane, /** @type {LayerDescription} */ layer, side, pointed) {
  const at = i => pane.above + (i - state.y) * pane.y;
  const end = Math.min(layer.queries, state.y + pane.height / pane.y);
  pen.textAlign = 'right';
  if (pane.y >= MIN_CELL_OF_TOKENS && side.text && !pane.phone) {
    for (let i = Math.ceil(state.y - 0.5); i + 0.5 < end; i++) {
      const kept = i === state.q;
      face(pen, kept || pointed?.[0] === i, kept ? 'mark' : pointed?.[0] === i ? 'ink' : 'soft');
      pen.fillText(clip(pen, labelOfToken(side, i), 82), pane.left - 8, at(i + 0.5));
    }
    return;
  }
  const step = roundUp(Math.max(1, 34 / pane.y));
  const half = pane.y > 4 ? 0.5 : 0; // a wide cell is labelled in its middle
  for (let i = Math.ceil(state.y / step) * step; i + half <= end; i += step) {
    pen.fillStyle = cssVariable('line2');
    pen.fillRect(pane.left - 7, at(i + half) - 0.5, 6, 1);
    face(pen, false, 'soft');
    pen.fillText(
      formatCount(i),
      pane.left - 10,
      Math.min(pane.above + pane.height - 5, Math.max(pane.above + 5, at(i + half))),
    );
  }
}

function above(pen, pane, /** @type {LayerDescription} */ layer, side, pointed) {
  const at = j => pane.left + (j - state.x) * pane.x;
  const end = Math.min(layer.keys, state.x + pane.width / pane.x);
  const room = pane.top - (pane.two ? 38 : 14);
  if (pane.x >= MIN_CELL_OF_TOKENS && side.text && !pane.phone) {
    for (let j = Math.ceil(state.x - 0.5); j + 0.5 < end; j++) {
      const words = labelOfToken(side, j);
      const level = UPRIGHT.test(words);
      const on = pointed?.[1] === j;
      face(pen, on, on ? 'ink' : 'soft');
      pen.save();
      pen.translate(at(j + 0.5), pane.above - 7);
      if (!level) pen.rotate(-Math.PI / 2);
      pen.textAlign = level ? 'center' : 'left';
      pen.fillText(clip(pen, words, room), 0, level ? -4 : 0);
      pen.restore();
    }
    return;
  }
  const step = roundUp(Math.max(1, (pane.phone ? 62 : 76) / pane.x));
  const half = pane.x > 4 ? 0.5 : 0;
  for (let j = Math.ceil(state.x / step) * step; j + half <= end; j += step) {
    const x = at(j + half);
    pen.fillStyle = cssVariable('line2');
    pen.fillRect(x - 0.5, pane.above - 7, 1, 6);
    face(pen, false, 'soft');
    pen.textAlign = x > pane.left + pane.width - 16 ? 'right' : x < pane.left + 12 ? 'left' : 'center';
    pen.fillText(formatCount(j), x, pane.above - 15);
  }
}

// The names of the axes; where tokens label an axis, and on a phone, both ranges in view in a line below the map and
// its strips; `strips` is the height of the strips in pixels.
export function drawCaptions(pen, pane, /** @type {LayerDescription} */ layer, sides, strips) {
  const worded = {
    x: pane.x >= MIN_CELL_OF_TOKENS && sides.key.text && !pane.phone,
    y: pane.y >= MIN_CELL_OF_TOKENS && sides.query.text && !pane.phone,
  };
  face(pen, false, 'faint');
  if (pane.which === 'b') return;
  const to = (from, size, n) =>
    `${formatCount(Math.ceil(from))}–${formatCount(Math.min(n, Math.floor(from + size)) - 1)}`;
  if (worded.x || worded.y || pane.phone) {
    pen.textAlign = 'left';
    pen.fillText(
      translate('ranges', {
        queries: to(state.y, pane.height / pane.y, layer.queries),
        keys: to(state.x, pane.width / pane.x, layer.keys),
      }),
      pane.left,
      pane.above + pane.height + 12 + strips,
    );
  }
  if (!worded.x && pane.which === 'a' && !pane.phone) {
    pen.textAlign = 'left';
    pen.fillText(translate('key axis'), pane.left, pane.above - (pane.two ? 30 : 34));
  }
  if (!worded.y && pane.which === 'a' && !pane.phone) {
    pen.save();
    pen.translate(pane.left - 66, pane.above + 2);
    pen.rotate(-Math.PI / 2);
    pen.textAlign = 'right';
    pen.fillText(translate('query axis'), 0, 0);
    pen.restore();
  }
}
