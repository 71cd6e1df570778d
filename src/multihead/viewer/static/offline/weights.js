// The weights of heads from the arrays of the file: rows, columns, tiles and small maps. A masked weight is NaN.
import { decodeArray, decodeLargest, HELD, hasArray } from './arrays.js';

// `of` is a text of a record, such as "0/2".
const sampleAt = of => `runs/${of.replace('/', '/samples/')}`;
const nameOfMaps = (of, layer) => `${sampleAt(of)}/layers/${layer.number}/maps`;
const isCausal = layer => layer.pattern === 'causal' && !layer.crosses;

/** @returns {LayerDescription[]} */
export const layersOf = of => HELD.plain[sampleAt(of)]?.layers ?? [];
export const layerOf = (of, number) => layersOf(of).find(layer => layer.number === Number(number));
export const headsOf = of =>
  layersOf(of).flatMap(layer =>
    Array.from({ length: layer.heads }, (_, h) => ({ layer, h, name: `${of}/${layer.number}/${h}` })),
  );

/**
 * The weights of one query, -1 where they are not stored; null if the file holds none of them.
 * @param {string} head
 * @param {LayerDescription} layer
 * @param {number} query
 */
export async function rowOf(head, layer, query) {
  if (hasArray(head)) return (await decodeArray(head)).slice(query * layer.keys, (query + 1) * layer.keys);
  if (hasArray(`${head} largest`)) return rowOfLargest(head, layer, query);
  const near = HELD.arrays[`${head} rows`];
  if (!near) return null;
  const at = query - near.first;
  if (at < 0 || at >= near.shape[0]) return rowOfTiles(head, layer, query);
  return (await decodeArray(`${head} rows`)).slice(at * layer.keys, (at + 1) * layer.keys);
}

// Where every key that the query sees is stored, the others are masked; and later keys are where the mask is causal.
async function rowOfLargest(head, layer, query) {
  const { each, places, values } = await decodeLargest(head);
  const row = new Float32Array(layer.keys).fill(-1);
  let seen = 0;
  for (let at = query * each; at < (query + 1) * each; at++) {
    if (Number.isNaN(values[at])) continue;
    row[places[at]] = values[at];
    seen++;
  }
  const last = isCausal(layer) ? query + layer.queryStart : layer.keys;
  return row.map((w, k) => (w < 0 && (seen < each || k > last) ? NaN : w));
}

async function rowOfTiles(head, layer, query) {
  const row = new Float32Array(layer.keys);
  const i = Math.floor(query / HELD.tile);
  for (let j = 0; j * HELD.tile < layer.keys; j++) {
    const name = `${head} 0 ${i} ${j} 1`;
    if (!hasArray(name)) return null;
    const across = HELD.arrays[name].shape[1];
    const from = (query - i * HELD.tile) * across;
    row.set((await decodeArray(name)).subarray(from, from + across), j * HELD.tile);
  }
  return row;
}

/**
 * The weights of the query at a token of a text with pictures, in all heads that read it, or as means over the heads of
 * each layer [values, shape]; null if the file holds none of them.
 * @param {string} of
 * @param {number} text
 * @param {number} token
 */
export async function rowsInPicture(of, text, token) {
  const name = `${of} pictures ${text} ${token}`;
  if (hasArray(name)) return [await decodeArray(name), HELD.arrays[name].shape];
  const { layers, groups } = HELD.plain[sampleAt(of)].pictures[text];
  const found = [];
  for (const number of layers) {
    const layer = layerOf(of, number);
    for (let h = 0; h < layer.heads; h++) {
      const row = hasArray(`${of}/${number}/${h}`)
        ? await rowOf(`${of}/${number}/${h}`, layer, token - (layer.crosses ? layer.keys : layer.queryStart))
        : null;
      if (!row) return null;
      found.push(row);
    }
  }
  const values = new Float32Array(found.length * groups.length).fill(NaN); // after the keys there may be queries
  for (const [n, row] of found.entries()) values.set(row, n * groups.length);
  return [values, [found.length, groups.length]];
}

/**
 * The weights of all queries on a key.
 * @param {string} head
 * @param {LayerDescription} layer
 * @param {number} key
 */
export async function columnOf(head, layer, key) {
  const column = new Float32Array(layer.queries);
  if (hasArray(head)) {
    const weights = await decodeArray(head);
    return column.map((_, q) => weights[q * layer.keys + key]);
  }
  const { each, places, values } = await decodeLargest(head);
  for (let i = 0; i < places.length; i++)
    if (places[i] === key && values[i] > 0) column[Math.floor(i / each)] = values[i];
  return isCausal(layer) ? column.map((w, q) => (q + layer.queryStart < key ? NaN : w)) : column;
}

/**
 * A tile of a head's map [values, shape]: stored, or the means over blocks of the weights that may be seen, or from the
 * small maps; null if the file holds none of them. Without `sink` the first key is left out.
 * @param {string} of
 * @param {LayerDescription} layer
 * @param {number} h
 * @param {{ level: number, row: number, column: number, sink: number }} place
 */
export async function tileOf(of, layer, h, { level, row, column, sink }) {
  const head = `${of}/${layer.number}/${h}`;
  const name = `${head} ${level} ${row} ${column} ${level && !column ? sink : 1}`;
  if (hasArray(name)) {
    const { shape } = HELD.arrays[name];
    const values = (await decodeArray(name)).slice();
    if (!level && !sink && !column) for (let k = 0; k < values.length; k += shape[1]) values[k] = NaN;
    return [values, shape];
  }
  if (hasArray(head)) return meansOf(await decodeArray(head), layer, layer.blocks[level], row, column, sink);
  const small = nameOfMaps(of, layer);
  if (layer.blocks.length !== 1 || !hasArray(small)) return null;
  const [, rows, columns] = HELD.arrays[small].shape;
  const values = await decodeArray(small);
  return [values.slice(h * rows * columns, (h + 1) * rows * columns), [rows, columns]];
}

// The means of a tile: of the weights in each block of high x wide weights, those that the mask hides left out.
function meansOf(weights, { queries, keys }, [high, wide], row, column, sink) {
  const side = HELD.tile;
  const rows = Math.min(side, Math.ceil(queries / high) - row * side);
  const columns = Math.min(side, Math.ceil(keys / wide) - column * side);
  const values = new Float32Array(rows * columns);
  for (let r = 0; r < rows; r++) {
    const top = (row * side + r) * high;
    for (let c = 0; c < columns; c++) {
      const left = (column * side + c) * wide;
      const right = Math.min(keys, left + wide);
      const block = { top, bottom: Math.min(queries, top + high), left: Math.max(left, sink ? 0 : 1), right };
      values[r * columns + c] = meanOfBlock(weights, keys, block);
    }
  }
  return [values, [rows, columns]];
}

function meanOfBlock(weights, keys, { top, bottom, left, right }) {
  let total = 0;
  let seen = 0;
  for (let q = top; q < bottom; q++) {
    for (let k = left; k < right; k++) {
      const w = weights[q * keys + k];
      if (Number.isNaN(w)) continue;
      total += w;
      seen++;
    }
  }
  return seen ? total / seen : NaN;
}

/**
 * The small maps of a layer [values, shape, weights per cell], of a short text every weight; null if there are none.
 * @param {string} of
 * @param {LayerDescription} layer
 */
export async function smallMapsOf(of, layer) {
  const name = nameOfMaps(of, layer);
  if (hasArray(name)) return [await decodeArray(name), HELD.arrays[name].shape, HELD.arrays[name].block];
  if (!hasArray(`${of}/${layer.number}/0`)) return null;
  const size = layer.queries * layer.keys;
  const values = new Float32Array(layer.heads * size);
  for (let h = 0; h < layer.heads; h++) values.set(await decodeArray(`${of}/${layer.number}/${h}`), h * size);
  return [values, [layer.heads, layer.queries, layer.keys], [1, 1]];
}

/**
 * The strip of numbers at a margin of a head's map; null if it is not stored.
 * @param {string} of
 * @param {LayerDescription} layer
 * @param {number} h
 * @param {string} statistic
 */
export async function marginOf(of, layer, h, statistic) {
  const name = `${of}/${layer.number} ${statistic}`;
  if (!hasArray(name)) return null;
  const bins = HELD.arrays[name].shape[1];
  return [(await decodeArray(name)).subarray(h * bins, (h + 1) * bins), [bins]];
}
