// Answer the page's requests from the data in the file, in place of a server: the page of a report, or of a shared view.
// A stored array has a shape and a coding, and its numbers are in the script tag that has its name:
//   float32: four planes of bytes, the byte with the exponent first
//   root16, root12, root8: weights on a square-root scale, with the number of bits in the name; code 0 is a masked cell, code 1 is zero
//   linear16: numbers from 0 to `top`
const HELD = JSON.parse(document.getElementById('held').textContent),
  has = name => Object.hasOwn(HELD.arrays, name);

async function inflated(name) {
  const text = atob(document.getElementById(name).textContent),
    raw = new Uint8Array(text.length);
  for (let i = 0; i < raw.length; i++) raw[i] = text.charCodeAt(i);
  return new Uint8Array(
    await new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream('deflate-raw'))).arrayBuffer(),
  );
}

function decoded(bytes, { coding, top }, count) {
  if (coding === 'float32') {
    const whole = new Uint8Array(count * 4);
    for (let plane = 0; plane < 4; plane++)
      for (let i = 0; i < count; i++) whole[i * 4 + 3 - plane] = bytes[plane * count + i];
    return new Float32Array(whole.buffer);
  }
  const values = new Float32Array(count),
    bits = +coding.replace(/\D/g, ''),
    steps = 2 ** bits - 2;
  for (let i = 0; i < count; i++) {
    const code =
      bits === 8
        ? bytes[i]
        : bits === 16
          ? (bytes[i] << 8) | bytes[count + i]
          : (bytes[i] << 4) | (i & 1 ? bytes[count + (i >> 1)] & 15 : bytes[count + (i >> 1)] >> 4);
    values[i] = coding === 'linear16' ? (code / 65535) * top : code ? ((code - 1) / steps) ** 2 : NaN;
  }
  return values;
}

const kept = new Map(); // the arrays that were decoded last
async function unpacked(name) {
  if (!kept.has(name)) {
    const array = HELD.arrays[name],
      count = array.shape.reduce((all, size) => all * size, 1);
    kept.set(
      name,
      inflated(name).then(bytes => decoded(bytes, array, count)),
    );
    if (kept.size > 24) kept.delete(kept.keys().next().value);
  }
  return kept.get(name);
}

// The largest weights of a head's queries: after the codes, planes of the steps from key to key.
async function largestOf(head) {
  const array = HELD.arrays[`${head} largest`],
    [queries, each] = array.shape,
    count = queries * each,
    bytes = await inflated(`${head} largest`);
  const places = new Int32Array(count),
    first = array.coding === 'root8' ? 1 : 2,
    planes = bytes.length / count;
  for (let i = 0; i < count; i++) {
    let step = 0;
    for (let plane = first; plane < planes; plane++) step = (step << 8) | bytes[plane * count + i];
    places[i] = step + (i % each ? places[i - 1] : 0);
  }
  return { each, places, values: decoded(bytes, array, count), keys: array.keys };
}

// `of` is a text of a record, such as "0/2".
const sampleAt = of => `runs/${of.replace('/', '/samples/')}`,
  layersOf = of => HELD.plain[sampleAt(of)].layers;
const layerOf = (of, number) => layersOf(of).find(layer => layer.number === +number);
const headsOf = of =>
  layersOf(of).flatMap(layer =>
    Array.from({ length: layer.heads }, (_, h) => ({ layer, h, name: `${of}/${layer.number}/${h}` })),
  );

// One query's weights, NaN = masked, -1 = not stored; null if the file holds none of them.
async function rowOf(head, layer, query) {
  if (has(head)) return (await unpacked(head)).slice(query * layer.keys, (query + 1) * layer.keys);
  if (has(`${head} largest`)) {
    const { each, places, values } = await largestOf(head),
      row = new Float32Array(layer.keys).fill(-1);
    let seen = 0;
    for (let at = query * each; at < (query + 1) * each; at++)
      if (values[at] === values[at]) {
        row[places[at]] = values[at];
        seen++;
      }
    // Every key that it sees is stored, so the others are masked; and later keys are where the mask is causal.
    const last = layer.pattern === 'causal' && !layer.crosses ? query + layer.queryStart : layer.keys;
    return row.map((w, k) => (w < 0 && (seen < each || k > last) ? NaN : w));
  }
  const near = HELD.arrays[`${head} rows`];
  if (!near) return null;
  if (query >= near.first && query < near.first + near.shape[0])
    return (await unpacked(`${head} rows`)).slice(
      (query - near.first) * layer.keys,
      (query - near.first + 1) * layer.keys,
    );
  const row = new Float32Array(layer.keys),
    i = Math.floor(query / HELD.tile);
  for (let j = 0; j * HELD.tile < layer.keys; j++) {
    const name = `${head} 0 ${i} ${j} 1`;
    if (!has(name)) return null;
    const across = HELD.arrays[name].shape[1],
      from = (query - i * HELD.tile) * across;
    row.set((await unpacked(name)).subarray(from, from + across), j * HELD.tile);
  }
  return row;
}

// A tile of a head's map [values, shape]: stored, or the means over blocks of the weights that may be seen, or from the small maps.
async function tileOf(of, layer, h, { level, row, column, sink }) {
  const head = `${of}/${layer.number}/${h}`,
    name = `${head} ${level} ${row} ${column} ${level && !column ? sink : 1}`;
  if (has(name)) {
    const { shape } = HELD.arrays[name],
      values = (await unpacked(name)).slice();
    if (!level && !sink && !column) for (let k = 0; k < values.length; k += shape[1]) values[k] = NaN; // the first key is left out
    return [values, shape];
  }
  if (has(head)) return meansOf(await unpacked(head), layer, layer.blocks[level], row, column, sink);
  const small = `${sampleAt(of)}/layers/${layer.number}/maps`;
  if (layer.blocks.length !== 1 || !has(small)) return null;
  const [, rows, columns] = HELD.arrays[small].shape,
    values = await unpacked(small);
  return [values.slice(h * rows * columns, (h + 1) * rows * columns), [rows, columns]];
}

function meansOf(weights, { queries, keys }, [high, wide], row, column, sink) {
  const side = HELD.tile,
    rows = Math.min(side, Math.ceil(queries / high) - row * side),
    columns = Math.min(side, Math.ceil(keys / wide) - column * side),
    values = new Float32Array(rows * columns);
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      const top = (row * side + r) * high,
        left = (column * side + c) * wide;
      let total = 0,
        seen = 0;
      for (let q = top; q < Math.min(queries, top + high); q++) {
        for (let k = Math.max(left, sink ? 0 : 1); k < Math.min(keys, left + wide); k++) {
          const w = weights[q * keys + k];
          if (w === w) {
            total += w;
            seen++;
          }
        }
      }
      values[r * columns + c] = seen ? total / seen : NaN;
    }
  }
  return [values, [rows, columns]];
}

// The small maps of a layer: of a short text every weight.
async function smallMaps(of, layer) {
  const name = `${sampleAt(of)}/layers/${layer.number}/maps`;
  if (has(name)) return [await unpacked(name), HELD.arrays[name].shape, HELD.arrays[name].block];
  if (!has(`${of}/${layer.number}/0`)) return null;
  const size = layer.queries * layer.keys,
    values = new Float32Array(layer.heads * size);
  for (let h = 0; h < layer.heads; h++) values.set(await unpacked(`${of}/${layer.number}/${h}`), h * size);
  return [values, [layer.heads, layer.queries, layer.keys], [1, 1]];
}

const MOST_CELLS = 1 << 25; // weights compared: a second or two
function entropyOf(values, from, to, other) {
  let total = 0;
  for (let k = from; k < to; k++) {
    const w = other ? (values[k] + other[k]) / 2 : values[k];
    if (w > 0) total -= w * Math.log(w);
  }
  return total;
}

// The Jensen-Shannon divergence of two heads, nats: the mean over the queries (every `step`th) that see a key.
function divergence(one, other, { queries, keys }, step) {
  let total = 0,
    counted = 0;
  for (let q = (queries - 1) % step; q < queries; q += step) {
    const from = q * keys,
      to = from + keys;
    if (!one.subarray(from, to).some(w => w === w)) continue;
    total += entropyOf(one, from, to, other) - (entropyOf(one, from, to) + entropyOf(other, from, to)) / 2;
    counted++;
  }
  return counted ? Math.max(0, total / counted) : NaN;
}

// The heads of the same shape with the most similar weights, by the formula of Record.nearest.
async function nearest(of, layer, h, top) {
  const alike = one =>
    one.queries === layer.queries &&
    one.keys === layer.keys &&
    one.queryStart === layer.queryStart &&
    one.role === layer.role;
  const others = headsOf(of).filter(one => alike(one.layer) && !(one.layer === layer && one.h === h)),
    found = [];
  const step = Math.max(
    1,
    Math.ceil(layer.queries / Math.max(16, Math.floor(MOST_CELLS / (layer.keys * Math.max(1, others.length))))),
  );
  const mine = await unpacked(`${of}/${layer.number}/${h}`);
  for (const one of others)
    found.push({
      layer: one.layer.number,
      head: one.h,
      divergence: divergence(mine, await unpacked(one.name), layer, step),
    });
  return {
    every: step,
    heads: found
      .filter(one => one.divergence === one.divergence)
      .sort((a, b) => a.divergence - b.divergence)
      .slice(0, top),
  };
}

// The heads that look most at a token of the main text, as `heads_looking_at` lists them; weights that are not stored are 0.
async function looking(of, key) {
  const found = [],
    tokens = new Float64Array(layersOf(of)[0].keys);
  let heads = 0;
  for (const { layer, h, name } of headsOf(of)) {
    if (layer.keyText !== 0 || !layer.rows || key >= layer.keys) continue;
    const column = await columnOf(name, layer, key),
      best = [];
    let total = 0,
      seen = 0;
    column.forEach((w, q) => {
      if (w !== w) return;
      seen++;
      total += w;
      if (w > 0) best.push([q, w]);
    });
    if (best.length)
      found.push({
        layer: layer.number,
        head: h,
        share: total / seen,
        queries: best.sort((a, b) => b[1] - a[1]).slice(0, 3),
      });
    if (layer.crosses || layer.keys !== tokens.length) continue;
    column.forEach((w, q) => {
      if (w > 0) tokens[q + layer.queryStart] += w;
    });
    heads++;
  }
  return {
    heads: found.sort((a, b) => b.share - a.share).slice(0, 8),
    tokens: [...tokens].map(w => w / Math.max(1, heads)),
  };
}

// The weights of all queries on a key.
async function columnOf(head, layer, key) {
  const column = new Float32Array(layer.queries);
  if (has(head)) {
    const weights = await unpacked(head);
    return column.map((_, q) => weights[q * layer.keys + key]);
  }
  const { each, places, values } = await largestOf(head);
  for (let i = 0; i < places.length; i++)
    if (places[i] === key && values[i] > 0) column[Math.floor(i / each)] = values[i];
  return layer.pattern === 'causal' && !layer.crosses
    ? column.map((w, q) => (q + layer.queryStart < key ? NaN : w))
    : column;
}

const json = (data, status = 200) =>
  new Response(JSON.stringify(data), { status, headers: { 'Content-Type': 'application/json' } });
const floats = (values, shape, block) =>
  new Response(values.slice().buffer, {
    headers: { 'X-Shape': shape.join(','), ...(block ? { 'X-Block': block.join(',') } : {}) },
  });

async function answer(path, given) {
  if (Object.hasOwn(HELD.plain, path)) return json(HELD.plain[path]);
  const number = (name, otherwise) => Number(given.get(name) ?? otherwise);
  const [, run, sample, rest] = /^runs\/(\d+)\/samples\/(\d+)\/(.+)$/.exec(path) ?? [],
    of = `${run}/${sample}`;
  if (!rest) return json({ error: HELD.absent }, 404);
  const [, ofLayer] = /^layers\/(\d+)\/maps$/.exec(rest) ?? [];
  if (ofLayer) {
    const found = await smallMaps(of, layerOf(of, ofLayer));
    if (found) return floats(...found);
  }
  if (rest === 'looking') return json(await looking(of, number('key', 0)));
  const [, l, h, what] = /^heads\/(\d+)\/(\d+)\/(.+)$/.exec(rest) ?? [],
    layer = l && layerOf(of, l),
    head = `${of}/${l}/${h}`;
  if (what === 'row') {
    const row = await rowOf(head, layer, number('query', 0));
    if (row) return floats(row, [row.length]);
  }
  if (what === 'tile') {
    const found = await tileOf(of, layer, +h, {
      level: number('level', 0),
      row: number('row', 0),
      column: number('column', 0),
      sink: number('sink', 1),
    });
    if (found) return floats(...found);
  }
  if (what === 'nearest') return json(await nearest(of, layer, +h, number('top', 5)));
  const margin = what?.startsWith('margins/') ? `${of}/${l} ${what.slice(8)}` : '';
  if (has(margin)) {
    const bins = HELD.arrays[margin].shape[1];
    return floats((await unpacked(margin)).subarray(+h * bins, (+h + 1) * bins), [bins]);
  }
  return json({ error: HELD.absent }, 404);
}

// Without DecompressionStream there are no maps, and the page shows why.
if (typeof DecompressionStream === 'undefined') {
  for (const described of Object.values(HELD.plain)) {
    if (!described.layers) continue;
    described.noMaps = HELD.old;
    for (const layer of described.layers) Object.assign(layer, { maps: false, blocks: [], rows: '', margins: [] });
  }
}
globalThis.fetch = async url => {
  const { pathname, searchParams } = new URL(url);
  return answer(pathname.replace(/^.*\/api\//, ''), searchParams);
};
if (HELD.place && !location.hash) history.replaceState(null, '', HELD.place);
