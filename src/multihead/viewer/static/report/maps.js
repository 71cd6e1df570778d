// Decode the maps stored in the page: base64 in script tags, raw deflate, planes of bytes.
import { rootEnd } from '../shared/colour.js';
import { $ } from '../shared/dom.js';
import { isSingle } from '../shared/legend.js';
import { D, HEADS, indexOf, layerOf } from './record.js';

const cache = new Map();  // the most recently opened heads
export const scaleTop = { value: 1 };  // where the colour scale of the small maps ends
export const thumbs = [];  // a small map per head: { rows, cols, values }, NaN = masked; undefined if there is none

async function decompressed(id) {
  const text = atob($(id).textContent), raw = new Uint8Array(text.length);
  for (let i = 0; i < raw.length; i++) raw[i] = text.charCodeAt(i);
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Code 0 is a masked cell, code 1 is zero; the others are shares on a square-root scale.
function weightsFrom(bytes, count, bits) {
  const values = new Float32Array(count), steps = 2 ** bits - 2;
  for (let i = 0; i < count; i++) {
    const low = bits === 16 ? bytes[count + i] : i & 1 ? bytes[count + (i >> 1)] & 15 : bytes[count + (i >> 1)] >> 4;
    const code = bits === 16 ? bytes[i] << 8 | low : bytes[i] << 4 | low;
    values[i] = code ? ((code - 1) / steps) ** 2 : NaN;
  }
  return values;
}

async function everyWeight(i) {
  const { l, h } = HEADS[i], layer = D.layers[l];
  return { rows: layer.queries, cols: layer.keys, values: weightsFrom(await decompressed(`w${l}.${h}`), layer.queries * layer.keys, D.store.bits) };
}

async function largestWeights(i) {
  const { l, h } = HEADS[i], layer = D.layers[l], each = Math.min(D.store.number, layer.keys), count = layer.queries * each;
  const bytes = await decompressed(`k${l}.${h}`), wide = bytes.length / count - 2;  // bytes per key step
  const keys = new Int32Array(count), values = weightsFrom(bytes, count, 16);
  for (let i = 0; i < count; i++) {
    let step = 0;
    for (let b = 0; b < wide; b++) step = step << 8 | bytes[count * (2 + b) + i];
    keys[i] = step + (i % each ? keys[i - 1] : 0);
  }
  return { each, keys, values };
}

export async function loadThumbs() {
  await Promise.all(D.layers.map(async (layer, l) => {
    if (layer.direct) {
      for (let h = 0; h < layer.heads; h++) thumbs[indexOf(l, h)] = await everyWeight(indexOf(l, h));
    } else if ($(`m${l}`)) {
      const size = layer.rows * layer.cols, values = weightsFrom(await decompressed(`m${l}`), size * layer.heads, 16);
      for (let h = 0; h < layer.heads; h++) thumbs[indexOf(l, h)] = { rows: layer.rows, cols: layer.cols, values: values.subarray(h * size, (h + 1) * size) };
    }
  }));
  scaleThumbs();
}

// The small maps hold single weights, or means over blocks; all of them share one colour scale.
export const blockOf = layer => layer.direct ? [1, 1] : [layer.rowBlock, layer.colBlock];
function scaleThumbs() {
  let largest = 0;
  for (const map of thumbs) for (const w of map?.values ?? []) if (w > largest) largest = w;
  scaleTop.value = rootEnd(largest, D.layers.every(layer => isSingle(blockOf(layer))));
}

// The map of a head for a canvas of `pixels` a side: every weight if they are on the page and fit, else the small map.
export async function mapFor(i, pixels) {
  const layer = layerOf(i), block = blockOf(layer);
  if (!thumbs[i] || isSingle(block) || D.store.mode !== 'whole' || Math.max(layer.queries, layer.keys) > pixels) return { map: thumbs[i], block };
  return { map: (await openHead(i)).map, block: [1, 1] };
}

// Load everything stored of one head: its map (every weight, or blocks), its largest weights, its margin strips.
export async function openHead(i) {
  if (cache.has(i)) return cache.get(i);
  const { l, h } = HEADS[i], layer = D.layers[l], head = { layer, map: thumbs[i], whole: false };
  if (thumbs.length && D.store.mode === 'whole') {
    head.map = layer.direct ? thumbs[i] : await everyWeight(i);
    head.whole = true;
  }
  if (thumbs.length && D.store.mode === 'largest') head.largest = await largestWeights(i);
  if (thumbs.length && layer.strips) {
    const bytes = await decompressed(`s${l}`), numbers = at => (bytes[at] << 8 | bytes[bytes.length / 2 + at]) / 65535;
    let at = 0;
    for (const strip of layer.strips) {
      if (h < layer.heads) head[strip.id] = Float32Array.from({ length: strip.bins }, (_, b) => numbers(at + h * strip.bins + b) * strip.top);
      at += layer.heads * strip.bins;
    }
  }
  if (head.map) {
    head.rowBlock = head.whole ? 1 : layer.rowBlock;
    head.colBlock = head.whole ? 1 : layer.colBlock;
  }
  cache.set(i, head);
  if (cache.size > 6) cache.delete(cache.keys().next().value);
  return head;
}

// One query's weights over all keys: NaN = masked, -1 = not stored on this page.
export function rowOf(head, query) {
  const keys = head.layer.keys;
  if (head.whole) return head.map.values.subarray(query * keys, (query + 1) * keys);
  const row = new Float32Array(keys).fill(-1);
  if (head.largest) {
    const { each, keys: places, values } = head.largest;
    let seen = 0;
    for (let at = query * each; at < (query + 1) * each; at++) if (values[at] === values[at]) { row[places[at]] = values[at]; seen++; }
    if (seen < each) for (let k = 0; k < keys; k++) if (row[k] < 0) row[k] = NaN;  // every key it sees is stored, so the others are masked
  }
  return row;
}
