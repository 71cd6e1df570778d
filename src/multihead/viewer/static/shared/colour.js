// Two colour ramps, three scales, and fast bitmaps of many cells. `top` is the weight at which a scale ends.
import { frame, scheme } from './host.js';
import { roundUp } from './numbers.js';

export const colourScheme = scheme;
const RAMPS = {
  ink: {
    light: '#FBFAF7 #BFDFF1 #86C2E6 #54A3DA #387FCA #325AB4 #32388E #281E5E #150D2C',
    dark: '#101317 #1C2C4C #26477B #2966A2 #2B88C0 #30ADC8 #57CFC4 #A9E9B6 #FBF9CE',
  },
  apart: {
    // orange: more in B; paper: equal; blue: more in A
    light: '#7F3203 #C7692C #EEB88C #FBFAF7 #98CCEB #458ACE #2D4498',
    dark: '#FEC677 #C16E2D #613521 #101317 #274172 #338FC7 #91E0EE',
  },
};
const MIN_WEIGHT = 1e-5; // the log scale runs from 0.001 % to 100 %, the same at every zoom
export const SCALES = {
  linear: { at: (w, top) => (top > 0 ? w / top : 0), ticks: top => [0, top / 4, top / 2, (top * 3) / 4, top] },
  root: {
    at: (w, top) => (top > 0 ? Math.sqrt(w / top) : 0),
    ticks: top => [0, 0.01, 0.1, 0.25, 0.5, 1].map(share => share * top),
  },
  log: { at: w => (w <= MIN_WEIGHT ? 0 : 1 + Math.log10(w) / 5), ticks: () => [MIN_WEIGHT, 1e-4, 1e-3, 0.01, 0.1, 1] },
};

// The end of the √ scale: 100 % for single weights, so that all maps compare; for means the largest one in view,
// rounded up to 1, 2 or 5 times a power of ten, because a mean over many weights is never near 100 %.
export function endOfRootScale(largest, single) {
  return single || !(largest > 0) ? 1 : Math.min(1, roundUp(largest));
}
const luts = { ink: new Uint8ClampedArray(768), apart: new Uint8ClampedArray(768) };
let paper = 0;
let turn = 0; // counts the palettes, so that tables made for an old one are rebuilt

export function updatePalette() {
  turn++;
  for (const [name, ramps] of Object.entries(RAMPS)) {
    const stops = ramps[colourScheme.matches ? 'dark' : 'light']
      .split(' ')
      .map(hex => [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16)));
    for (let i = 0; i < 256; i++) {
      const place = (i / 255) * (stops.length - 1);
      const a = Math.min(stops.length - 2, Math.floor(place));
      for (let c = 0; c < 3; c++) luts[name][i * 3 + c] = stops[a][c] + (stops[a + 1][c] - stops[a][c]) * (place - a);
    }
  }
  paper = pixel('ink', 0);
  roles.clear();
}

const roles = new Map();
export function cssVariable(role) {
  if (!roles.has(role))
    roles.set(
      role,
      getComputedStyle(frame)
        .getPropertyValue('--' + role)
        .trim(),
    );
  return roles.get(role);
}

const place = t => Math.round(255 * Math.max(0, Math.min(1, t))) * 3;
const pixel = (lut, t) => {
  const k = place(t);
  const c = luts[lut];
  return ((255 << 24) | (c[k + 2] << 16) | (c[k + 1] << 8) | c[k]) >>> 0;
};
export const colourOfTone = (lut, t) => {
  const k = place(t);
  const c = luts[lut];
  return `rgb(${c[k]},${c[k + 1]},${c[k + 2]})`;
};
export const toneOf = (scale, w, top) => (w > 0 ? Math.max(0, Math.min(1, SCALES[scale].at(w, top))) : 0);

// Black or white text, whichever has a contrast of 4.5 : 1 on this tone: the border is at relative luminance .179.
function inkOn(lut, t) {
  const luminance = [0.2126, 0.7152, 0.0722].reduce((sum, weight, c) => {
    const v = luts[lut][place(t) + c] / 255;
    return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  return luminance > 0.179 ? '#000' : '#fff';
}

export function paintElement(span, t, lut = 'ink') {
  const shown = lut !== 'ink' || t > 0.02;
  span.style.background = shown ? colourOfTone(lut, t) : '';
  span.style.color = shown ? inkOn(lut, t) : '';
}

// A colour for each possible upper half of a float: sign, exponent and nine bits of the fraction. One step is smaller
// than a tone, so a cell costs one look-up instead of a logarithm.
const SHIFT = 14;
const tables = new Map();
function table(lut, scale, top) {
  const key = scale === 'log' ? `${lut} log` : `${lut} ${scale} ${top}`;
  const kept = tables.get(key);
  if (kept?.turn === turn) return kept.colours;
  const half = 1 << (31 - SHIFT);
  const bits = new Uint32Array(half);
  const colours = new Uint32Array(half * 2);
  for (let i = 0; i < half; i++) bits[i] = ((i << SHIFT) | (1 << (SHIFT - 1))) >>> 0;
  const values = new Float32Array(bits.buffer);
  const infinite = 0x7f800000 >>> SHIFT;
  for (let i = 0; i < infinite; i++) {
    const t = toneOf(scale, values[i], top);
    colours[i] = lut === 'ink' ? pixel('ink', t) : pixel('apart', 0.5 + t / 2);
    colours[half + i] = lut === 'ink' ? paper : pixel('apart', 0.5 - t / 2);
  }
  if (tables.size > 5) tables.delete(tables.keys().next().value);
  tables.set(key, { turn, colours });
  return colours;
}

// Draw cells as pixels, one each. A masked cell (NaN) is transparent, so that the hatching below it shows.
export function bitmapOf({ rows, cols, values }, lut, scale, top) {
  const canvas = document.createElement('canvas');
  canvas.width = Math.max(1, cols);
  canvas.height = Math.max(1, rows);
  const pen = canvas.getContext('2d');
  const image = pen.createImageData(canvas.width, canvas.height);
  const out = new Uint32Array(image.data.buffer);
  const colours = table(lut, scale, top);
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  for (let i = 0; i < rows * cols; i++) out[i] = colours[bits[i] >>> SHIFT];
  pen.putImageData(image, 0, 0);
  return canvas;
}

// Set the size of a canvas in CSS pixels, sharp on any screen; returns its 2D context.
export function sizeCanvas(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = width + 'px';
  canvas.style.height = height + 'px';
  const pen = canvas.getContext('2d');
  pen.scale(ratio, ratio);
  pen.textBaseline = 'middle';
  return pen;
}

export function hatchingPattern(pen, size = 7) {
  const ratio = devicePixelRatio || 1;
  const tile = document.createElement('canvas');
  const side = Math.round(size * ratio);
  tile.width = tile.height = side;
  const line = tile.getContext('2d');
  line.strokeStyle = cssVariable('hatch');
  line.lineWidth = ratio;
  for (const at of [-side, 0, side]) {
    line.beginPath();
    line.moveTo(at - 1, side + 1);
    line.lineTo(at + side + 1, -1);
    line.stroke();
  }
  const pattern = pen.createPattern(tile, 'repeat');
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}
