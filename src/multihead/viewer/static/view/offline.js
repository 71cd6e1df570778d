// Answer the page's requests from the data in the file, in place of a server: the page of a shared view.
const HELD = JSON.parse(document.getElementById('held').textContent);

async function unpacked({ shape, data }) {
  const text = atob(data), raw = new Uint8Array(text.length);
  for (let i = 0; i < raw.length; i++) raw[i] = text.charCodeAt(i);
  const planes = new Uint8Array(await new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream('deflate-raw'))).arrayBuffer());
  const count = shape.reduce((all, size) => all * size, 1), bytes = new Uint8Array(count * 4);
  for (let plane = 0; plane < 4; plane++) for (let i = 0; i < count; i++) bytes[i * 4 + 3 - plane] = planes[plane * count + i];
  return new Float32Array(bytes.buffer);
}

// One query's weights: stored, or put together from tiles of single weights; null if the file holds neither.
async function rowOf(head, query) {
  const near = HELD.arrays[`${head} rows`], keys = HELD.keys[head];
  if (!near) return null;
  if (query >= near.first && query < near.first + near.shape[0]) return (await unpacked(near)).slice((query - near.first) * keys, (query - near.first + 1) * keys);
  const row = new Float32Array(keys), i = Math.floor(query / HELD.tile);
  for (let j = 0; j * HELD.tile < keys; j++) {
    const tile = HELD.arrays[`${head} 0 ${i} ${j} 1`];
    if (!tile) return null;
    const [, across] = tile.shape, from = (query - i * HELD.tile) * across;
    row.set((await unpacked(tile)).subarray(from, from + across), j * HELD.tile);
  }
  return row;
}

const json = (data, status = 200) => new Response(JSON.stringify(data), { status, headers: { 'Content-Type': 'application/json' } });
const floats = (values, shape, block) => new Response(values.buffer, { headers: { 'X-Shape': shape.join(','), ...(block ? { 'X-Block': block.join(',') } : {}) } });

async function answer(path, given) {
  if (Object.hasOwn(HELD.plain, path)) return json(HELD.plain[path]);
  const number = (name, otherwise) => Number(given.get(name) ?? otherwise);
  const [, run, layer, h, what] = /^runs\/(\d+)\/samples\/0\/heads\/(\d+)\/(\d+)\/(tile|row)$/.exec(path) ?? [], head = `${run}/${layer}/${h}`;
  if (what === 'row') {
    const row = await rowOf(head, number('query', 0));
    if (row) return floats(row, [row.length]);
  }
  if (what === 'tile') {
    const [level, i, j] = [number('level', 0), number('row', 0), number('column', 0)], sink = j > 0 ? 1 : number('sink', 1), tile = HELD.arrays[`${head} ${level} ${i} ${j} ${level ? sink : 1}`];
    if (tile) {
      const values = await unpacked(tile);
      if (!level && !sink) for (let k = 0; k < values.length; k += tile.shape[1]) values[k] = NaN;  // single weights: the first key's are left out
      return floats(values, tile.shape);
    }
  }
  if (Object.hasOwn(HELD.arrays, path)) return floats(await unpacked(HELD.arrays[path]), HELD.arrays[path].shape, HELD.arrays[path].block);
  return json({ error: HELD.absent }, 404);
}

globalThis.fetch = async url => {
  const { pathname, searchParams } = new URL(url);
  return answer(pathname.replace(/^.*\/api\//, ''), searchParams);
};
if (!location.hash) history.replaceState(null, '', HELD.place);
