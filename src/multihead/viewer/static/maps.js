// Unpack the maps that the page holds: base64 in script tags, raw deflate, planes of bytes.
const cache = new Map();  // the unpacked heads last looked at
let thumbs = [];          // a small map of every head: { rows, cols, values }, NaN = forbidden; undefined where there is none

async function unpack(id) {
  const text = atob($(id).textContent), raw = new Uint8Array(text.length);
  for (let i = 0; i < raw.length; i++) raw[i] = text.charCodeAt(i);
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Code 0 is a forbidden cell, code 1 is zero; the rest is a share on a square-root scale.
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
  return { rows: layer.queries, cols: layer.keys, values: weightsFrom(await unpack(`w${l}.${h}`), layer.queries * layer.keys, D.store.bits) };
}

async function largestWeights(i) {
  const { l, h } = HEADS[i], layer = D.layers[l], each = Math.min(D.store.number, layer.keys), count = layer.queries * each;
  const bytes = await unpack(`k${l}.${h}`), wide = bytes.length / count - 2;  // bytes a key step takes
  const keys = new Int32Array(count), values = weightsFrom(bytes, count, 16);
  for (let i = 0; i < count; i++) {
    let step = 0;
    for (let b = 0; b < wide; b++) step = step << 8 | bytes[count * (2 + b) + i];
    keys[i] = step + (i % each ? keys[i - 1] : 0);
  }
  return { each, keys, values };
}

async function loadThumbs() {
  if (D.store.mode === 'none') return;
  await Promise.all(D.layers.map(async (layer, l) => {
    if (layer.direct) {
      for (let h = 0; h < layer.heads; h++) thumbs[indexOf(l, h)] = await everyWeight(indexOf(l, h));
    } else if ($(`m${l}`)) {
      const size = layer.rows * layer.cols, values = weightsFrom(await unpack(`m${l}`), size * layer.heads, 16);
      for (let h = 0; h < layer.heads; h++) thumbs[indexOf(l, h)] = { rows: layer.rows, cols: layer.cols, values: values.subarray(h * size, (h + 1) * size) };
    }
  }));
}

// All that is known of one head: its map (every weight, or blocks), its largest weights, its margin strips.
async function openHead(i) {
  if (cache.has(i)) return cache.get(i);
  const { l, h } = HEADS[i], layer = D.layers[l], head = { layer, map: thumbs[i], whole: false };
  if (thumbs.length && D.store.mode === 'whole') {
    head.map = layer.direct ? thumbs[i] : await everyWeight(i);
    head.whole = true;
  }
  if (thumbs.length && D.store.mode === 'largest') head.largest = await largestWeights(i);
  if (thumbs.length && layer.strips) {
    const bytes = await unpack(`s${l}`), numbers = at => (bytes[at] << 8 | bytes[bytes.length / 2 + at]) / 65535;
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

// One query's weights over all keys: NaN = may not be seen, -1 = not kept on this page.
function rowOf(head, query) {
  const keys = head.layer.keys;
  if (head.whole) return head.map.values.subarray(query * keys, (query + 1) * keys);
  const row = new Float32Array(keys).fill(-1);
  if (head.largest) {
    const { each, keys: places, values } = head.largest;
    let seen = 0;
    for (let at = query * each; at < (query + 1) * each; at++) if (values[at] === values[at]) { row[places[at]] = values[at]; seen++; }
    if (seen < each) for (let k = 0; k < keys; k++) if (row[k] < 0) row[k] = NaN;  // all it sees is kept, so the rest is forbidden
  }
  return row;
}
