// Draw what a query reads of a picture: its weights as colours over the grey picture, times an even spread on one
// logarithmic scale from 0.1 to 100, and hatched where there is no weight: what the model or the query did not see.
import { bitmapOf, cssVariable, hatchingPattern, sizeCanvas } from '../shared/colour.js';
import { el } from '../shared/dom.js';
import { colourRamp } from '../shared/legend.js';

/**
 * A view of a picture on this page: its description, the picture, and key -> its place in the view.
 * @typedef {PictureView & { size: GreyPicture, grey: HTMLImageElement, at: Map<number, number> }} Seen
 */

const [FAINT, STRONG] = [0.25, 0.85]; // opacity on the picture of the lowest and the highest colour
const NEAR = 2.6; // cells around the pointer that have lines
export const MARKS = [
  [0, '≤ 0.1'],
  [100 / 3, '1'],
  [200 / 3, '10'],
  [100, '100'],
];

export const toneOfTimes = times => Math.max(0, Math.min(1, (Math.log10(times) + 1) / 3));

const boxOf = (/** @type {PictureView} */ view, n) => view.boxes.slice(n * 4, n * 4 + 4);
export const centreOf = (/** @type {PictureView} */ view, n) => {
  const [left, top, right, bottom] = boxOf(view, n);
  return [(left + right) / 2, (top + bottom) / 2];
};

// The place in a view at a point, in pixels of the picture; -1 where there is none.
export const placeAt = (/** @type {PictureView} */ view, x, y) =>
  view.keys.findIndex((_, n) => {
    const [left, top, right, bottom] = boxOf(view, n);
    return x >= left && x < right && y >= top && y < bottom;
  });

// The place next to another one in a direction: of those ahead the nearest, sideways counting twice; -1 at the border.
export function placeBeside(/** @type {PictureView} */ view, n, [right, down]) {
  const [x, y] = centreOf(view, n);
  let best = -1;
  let least = Infinity;
  view.keys.forEach((_, other) => {
    const [dx, dy] = centreOf(view, other).map((at, axis) => at - [x, y][axis]);
    const ahead = dx * right + dy * down;
    const aside = Math.abs(dx * down) + Math.abs(dy * right);
    if (ahead > 0.01 && aside < ahead && ahead + 2 * aside < least) {
      best = other;
      least = ahead + 2 * aside;
    }
  });
  return best;
}

// The key at each pixel of a picture that is drawn in columns x rows pixels, kept per view and size.
const pixels = new WeakMap();
function keysOfPixels(/** @type {Seen} */ view, columns, rows) {
  const kept = pixels.get(view) ?? new Map();
  pixels.set(view, kept);
  const name = `${columns} ${rows}`;
  if (!kept.has(name)) {
    const found = new Int32Array(columns * rows).fill(-1);
    view.keys.forEach((key, n) => {
      const edges = boxOf(view, n).map((edge, side) =>
        Math.round(side % 2 ? (edge / view.size.height) * rows : (edge / view.size.width) * columns),
      );
      for (let y = Math.max(0, edges[1]); y < Math.min(rows, edges[3]); y++)
        found.fill(key, y * columns + Math.max(0, edges[0]), y * columns + Math.min(columns, edges[2]));
    });
    kept.set(name, found);
  }
  return kept.get(name);
}

// The colours of a view, transparent where there is no weight. times: of each key, NaN where it is masked.
function heatOf(/** @type {Seen} */ view, times, columns, rows) {
  const tones = times.map(toneOfTimes);
  const values = Float32Array.from(keysOfPixels(view, columns, rows), key => (key < 0 ? NaN : tones[key]));
  return { values, colours: bitmapOf({ rows, cols: columns, values }, 'ink', 'linear', 1) };
}

// The same, through which the picture shows, the more the lower the weight.
function sheerHeatOf({ values, colours }) {
  const made = el('canvas', { width: colours.width, height: colours.height });
  const pen = made.getContext('2d');
  const image = colours.getContext('2d').getImageData(0, 0, made.width, made.height);
  for (const [n, tone] of values.entries()) image.data[n * 4 + 3] *= FAINT + (STRONG - FAINT) * Math.sqrt(tone || 0);
  pen.putImageData(image, 0, 0);
  return made;
}

// The width and height of a view whose longer side has a size.
const fit = (/** @type {Seen} */ { size: { width, height } }, most) => {
  const scale = most / Math.max(width, height);
  return [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
};

// The picture of a head, in a square of `size` pixels; hatched if its weights are unknown (null).
export function drawSmall(canvas, /** @type {Seen} */ view, times, size) {
  const pen = sizeCanvas(canvas, size, size);
  const [width, height] = fit(view, size);
  const [left, top] = [(size - width) / 2, (size - height) / 2];
  pen.fillStyle = hatchingPattern(pen, 4);
  pen.fillRect(left, top, width, height);
  if (!times) return;
  // A finer view is drawn with a pixel per cell and made smaller by the browser.
  const [columns, rows] = fit(view, Math.max(size * (devicePixelRatio || 1), view.rows, view.columns));
  pen.drawImage(heatOf(view, times, columns, rows).colours, left, top, width, height);
}

/**
 * Draw a view on a canvas at most `most` pixels wide and high.
 * @param {HTMLCanvasElement} canvas
 * @param {Seen} view
 * @param {{ times: Float32Array | null, query: number, pointed: number }} shown the weights; the places of the query
 *   and of the pointer, -1 without one
 * @param {number} most
 */
export function drawView(canvas, view, { times, query, pointed }, most) {
  const [width, height] = fit(view, most);
  const pen = sizeCanvas(canvas, width, height);
  const across = width / view.size.width;
  const outline = (n, colour, thick, inset = 0) => {
    const [left, top, right, bottom] = boxOf(view, n).map(edge => Math.round(edge * across));
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    pen.strokeRect(left + inset, top + inset, right - left - 2 * inset, bottom - top - 2 * inset);
  };
  pen.fillStyle = cssVariable('paper');
  pen.fillRect(0, 0, width, height);
  pen.imageSmoothingEnabled = view.grey.naturalWidth * 3 > width; // a tiny picture shows its pixels
  if (view.grey.complete && view.grey.naturalWidth) pen.drawImage(view.grey, 0, 0, width, height);
  if (times) {
    const heat = heatOf(view, times, canvas.width, canvas.height);
    const hatched = el('canvas');
    const lines = sizeCanvas(hatched, width, height);
    lines.fillStyle = cssVariable('paper');
    lines.globalAlpha = 0.5;
    lines.fillRect(0, 0, width, height);
    lines.globalAlpha = 1;
    lines.fillStyle = hatchingPattern(lines);
    lines.fillRect(0, 0, width, height);
    lines.globalCompositeOperation = 'destination-out';
    lines.drawImage(heat.colours, 0, 0, width, height);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(sheerHeatOf(heat), 0, 0, width, height);
    pen.drawImage(hatched, 0, 0, width, height);
  }
  if (pointed >= 0) {
    const [x, y] = centreOf(view, pointed);
    const [left, top, right, bottom] = boxOf(view, pointed);
    view.keys.forEach((_, n) => {
      const [dx, dy] = centreOf(view, n).map((at, axis) => at - [x, y][axis]);
      const far = Math.hypot(dx / (right - left), dy / (bottom - top));
      pen.globalAlpha = Math.max(0, 1 - far / NEAR);
      if (far < NEAR) outline(n, cssVariable('faint'), 1);
    });
    pen.globalAlpha = 1;
    outline(pointed, cssVariable('ink'), 1.5);
  }
  if (query >= 0) outline(query, cssVariable('mark'), 2.5, 0.5);
}

// The picture on a canvas as a PNG file with a caption and its legend; returns its data: address.
export function pictureFile(/** @type {HTMLCanvasElement} */ canvas, caption, legend) {
  const [width, height] = [canvas.offsetWidth, canvas.offsetHeight];
  const made = el('canvas');
  const pen = sizeCanvas(made, Math.max(width, 320), height + 76);
  pen.fillStyle = cssVariable('paper');
  pen.fillRect(0, 0, made.width, made.height);
  pen.drawImage(canvas, 0, 0, width, height);
  pen.fillStyle = cssVariable('ink');
  pen.font = '13px system-ui, sans-serif';
  pen.fillText(caption, 8, height + 16, Math.max(width, 320) - 16);
  pen.drawImage(colourRamp('ink', 160), 8, height + 32, 160, 10);
  pen.font = '11px system-ui, sans-serif';
  for (const [left, words] of MARKS) pen.fillText(words, 8 + (Number(left) / 100) * 150, height + 54);
  pen.fillText(legend, 184, height + 38, Math.max(width, 320) - 192);
  return made.toDataURL('image/png');
}
