// The strips at the margins of a map: the attention that each key receives below it, the entropy of each query at its
// right. Long texts may have fewer values than tokens: each value then stands for a run of tokens.
import { cssVariable } from '../shared/colour.js';
import { formatPercent, largestOf } from '../shared/numbers.js';
import { pathOfHead, requestFloats } from './api.js';
import { state } from './permalink.js';

/** @import { Scene } from './head.js' */

const kept = new Map(); // address -> values, or null until they arrive
export const marginsLoaded = { notify: () => {} };

function valuesOf({ run, sample, l, h }, name) {
  const path = `${pathOfHead(run, sample, l, h)}/margins/${name}`;
  if (!kept.has(path)) {
    kept.set(path, null);
    if (kept.size > 64) kept.delete(kept.keys().next().value);
    requestFloats(path).then(
      ({ values }) => {
        kept.set(path, values);
        marginsLoaded.notify();
      },
      () => kept.delete(path),
    );
  }
  return kept.get(path);
}

// Call put(from, size, value, on) for each bar of a strip, in pixels along it: `length` tokens have the values, those
// from `start` on are in view, each `cell` pixels wide, `pixels` in all; `marked` is the token that is on.
function bars(values, { length, start, cell, pixels, marked }, put) {
  const run = Math.ceil(length / values.length);
  const step = Math.max(1, Math.floor(1 / (run * cell))); // values per bar
  for (let b = Math.floor(start / run / step) * step; b < values.length; b += step) {
    const from = (b * run - start) * cell;
    const size = run * step * cell;
    if (from >= pixels) return;
    let value = NaN;
    for (let k = b; k < Math.min(values.length, b + step); k++) if (!(values[k] <= value)) value = values[k];
    const left = Math.max(0, from);
    const gap = size > 3 ? 1 : 0;
    put(
      left + gap / 2,
      Math.max(0.5, Math.min(pixels, from + size) - left - gap),
      value,
      Math.floor(marked / run / step) * step === b,
    );
  }
}

function strip(/** @type {Scene} */ scene, name, values) {
  const { layer, record } = scene;
  const below = name === 'received';
  const most = largestOf(values);
  const top = (below ? most : Math.log(Math.max(2, layer.keys))) || 1;
  return {
    draw: (pen, pane, pointed) => {
      const high = pane.phone ? 12 : 34;
      const marked = pointed ? pointed[below ? 1 : 0] : below ? -1 : state.q;
      const along = below
        ? { length: layer.keys, start: state.x, cell: pane.x, pixels: pane.width }
        : { length: layer.queries, start: state.y, cell: pane.y, pixels: pane.height };
      bars(values, { ...along, marked }, (from, size, value, on) => {
        const long = value > 0 ? Math.max(0.5, Math.min(1, value / top) * high) : 0;
        pen.fillStyle = cssVariable(on ? 'ink' : 'bar');
        if (below) pen.fillRect(pane.left + from, pane.above + pane.height + 6, size, long);
        else pen.fillRect(pane.left + pane.width + 6, pane.above + from, long, size);
      });
      if (pane.phone) return;
      const words = (text, align, x, y) => {
        pen.textAlign = align;
        pen.fillText(text, x, y);
      };
      pen.fillStyle = cssVariable('faint');
      pen.font = `11px ${cssVariable('sans')}`;
      if (below) {
        words(record.labels.received, 'right', pane.left - 8, pane.above + pane.height + 14);
        words(formatPercent(most), 'right', pane.left - 8, pane.above + pane.height + 28);
      } else {
        words(record.labels.entropy, 'left', pane.left + pane.width + 6, pane.above - 22);
        words(`0–${top.toFixed(1)}`, 'left', pane.left + pane.width + 6, pane.above - 8);
      }
    },
  };
}

// The strips of a head that are loaded; the others are requested.
export const stripsOf = (/** @type {Scene} */ scene) =>
  scene.layer.margins
    .map(name => [name, valuesOf(scene.a, name)])
    .filter(([, values]) => values)
    .map(([name, values]) => strip(scene, name, values));
