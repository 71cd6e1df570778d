// Comparisons of heads, computed from the weights in the file: those with similar weights, and those that look at a
// token.
import { decodeArray } from './arrays.js';
import { columnOf, headsOf, layersOf } from './weights.js';

const MAX_CELLS = 1 << 25; // weights compared: a second or two
const MIN_QUERIES = 16;
const MAX_LOOKING_HEADS = 8;
const MAX_LOOKING_QUERIES = 3;

/**
 * The heads of the same shape with the most similar weights, by the formula of Record.nearest.
 * @param {string} of
 * @param {LayerDescription} layer
 * @param {number} h
 * @param {number} top
 */
export async function nearestHeads(of, layer, h, top) {
  const others = headsOf(of).filter(one => hasSameQueries(one.layer, layer) && !(one.layer === layer && one.h === h));
  const affordable = Math.floor(MAX_CELLS / (layer.keys * Math.max(1, others.length)));
  const every = Math.max(1, Math.ceil(layer.queries / Math.max(MIN_QUERIES, affordable)));
  const mine = await decodeArray(`${of}/${layer.number}/${h}`);
  const found = [];
  for (const one of others) {
    const apart = divergence(mine, await decodeArray(one.name), layer, every);
    if (!Number.isNaN(apart)) found.push({ layer: one.layer.number, head: one.h, divergence: apart });
  }
  return { every, heads: found.sort((a, b) => a.divergence - b.divergence).slice(0, top) };
}

const hasSameQueries = (one, other) =>
  one.queries === other.queries &&
  one.keys === other.keys &&
  one.queryStart === other.queryStart &&
  one.role === other.role;

// The Jensen-Shannon divergence of two heads, nats: the mean over the queries (every `step`th) that see a key.
function divergence(one, other, { queries, keys }, step) {
  let total = 0;
  let counted = 0;
  for (let q = (queries - 1) % step; q < queries; q += step) {
    const from = q * keys;
    const to = from + keys;
    if (!one.subarray(from, to).some(w => !Number.isNaN(w))) continue;
    total += entropyOfMean(one, other, from, to) - (entropy(one, from, to) + entropy(other, from, to)) / 2;
    counted++;
  }
  return counted ? Math.max(0, total / counted) : NaN;
}

// Two loops, because one with a choice inside takes longer.
function entropy(values, from, to) {
  let total = 0;
  for (let k = from; k < to; k++) if (values[k] > 0) total -= values[k] * Math.log(values[k]);
  return total;
}

function entropyOfMean(one, other, from, to) {
  let total = 0;
  for (let k = from; k < to; k++) {
    const w = (one[k] + other[k]) / 2;
    if (w > 0) total -= w * Math.log(w);
  }
  return total;
}

/**
 * The heads that look most at a token of the main text, as `heads_looking_at` lists them. A weight that is not
 * stored is 0.
 * @param {string} of
 * @param {number} key
 */
export async function headsLookingAt(of, key) {
  const found = [];
  const tokens = new Float64Array(layersOf(of)[0].keys);
  let heads = 0;
  for (const { layer, h, name } of headsOf(of)) {
    if (layer.keyText !== 0 || !layer.rows || key >= layer.keys) continue;
    const column = await columnOf(name, layer, key);
    const looks = summaryOfColumn(column);
    if (looks) found.push({ layer: layer.number, head: h, ...looks });
    if (layer.crosses || layer.keys !== tokens.length) continue;
    column.forEach((w, q) => {
      if (w > 0) tokens[q + layer.queryStart] += w;
    });
    heads++;
  }
  return {
    heads: found.sort((a, b) => b.share - a.share).slice(0, MAX_LOOKING_HEADS),
    tokens: [...tokens].map(w => w / Math.max(1, heads)),
  };
}

// The mean weight of the queries that see a key, and the queries with the largest; null if all weights are 0.
function summaryOfColumn(column) {
  const best = [];
  let total = 0;
  let seen = 0;
  column.forEach((w, q) => {
    if (Number.isNaN(w)) return;
    seen++;
    total += w;
    if (w > 0) best.push([q, w]);
  });
  const queries = best.sort((a, b) => b[1] - a[1]).slice(0, MAX_LOOKING_QUERIES);
  return best.length ? { share: total / seen, queries } : null;
}
