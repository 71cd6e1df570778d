// Answer the requests of the viewer's page from the data in its file, in place of a server.
import { HELD } from './arrays.js';
import { headsLookingAt, nearestHeads } from './comparisons.js';
import { layerOf, marginOf, rowOf, rowsInPicture, smallMapsOf, tileOf } from './weights.js';

const answerInJson = (data, status = 200) =>
  new Response(JSON.stringify(data), { status, headers: { 'Content-Type': 'application/json' } });
/** @param {any[]} found numbers, their shape, and of maps the weights per cell */
function answerInFloats([values, shape, block]) {
  const headers = { 'X-Shape': shape.join(','), ...(block ? { 'X-Block': block.join(',') } : {}) };
  return new Response(values.slice().buffer, { headers });
}
const absent = () => answerInJson({ error: HELD.absent }, 404);

/**
 * Answer a request.
 * @param {string} path the part of the address after "api/"
 * @param {URLSearchParams} given
 */
async function answer(path, given) {
  if (Object.hasOwn(HELD.plain, path)) return answerInJson(HELD.plain[path]);
  const [, run, sample, rest] = /^runs\/(\d+)\/samples\/(\d+)\/(.+)$/.exec(path) ?? [];
  if (!rest) return absent();
  const of = `${run}/${sample}`;
  const number = (name, otherwise) => Number(given.get(name) ?? otherwise);
  if (rest === 'looking') return answerInJson(await headsLookingAt(of, number('key', 0)));
  const [, text] = /^pictures\/(\d+)$/.exec(rest) ?? [];
  if (text) {
    const rows = await rowsInPicture(of, Number(text), number('query', 0));
    return rows ? answerInFloats(rows) : absent();
  }
  const [, numberOfLayer] = /^layers\/(\d+)\/maps$/.exec(rest) ?? [];
  const [, l, h, what] = /^heads\/(\d+)\/(\d+)\/(.+)$/.exec(rest) ?? [];
  const layer = layerOf(of, numberOfLayer ?? l);
  if (what === 'nearest') return answerInJson(await nearestHeads(of, layer, Number(h), number('top', 5)));
  const found = numberOfLayer ? await smallMapsOf(of, layer) : await numbersOfHead(of, layer, Number(h), what, number);
  return found ? answerInFloats(found) : absent();
}

// The [values, shape] that a request for one head asks for; null if the file does not have them.
async function numbersOfHead(of, layer, h, what, number) {
  if (what === 'row') {
    const row = await rowOf(`${of}/${layer.number}/${h}`, layer, number('query', 0));
    return row && [row, [row.length]];
  }
  if (what === 'tile') {
    const place = { level: number('level', 0), row: number('row', 0), column: number('column', 0) };
    return tileOf(of, layer, h, { ...place, sink: number('sink', 1) });
  }
  return what?.startsWith('margins/') ? marginOf(of, layer, h, what.slice('margins/'.length)) : null;
}

// Without DecompressionStream there are no maps, and the page shows why.
function removeMaps() {
  for (const described of Object.values(HELD.plain)) {
    if (!('layers' in described)) continue;
    described.noMaps = HELD.old;
    for (const layer of described.layers) Object.assign(layer, { maps: false, blocks: [], rows: '', margins: [] });
  }
}

if (typeof DecompressionStream === 'undefined') removeMaps();
globalThis.fetch = async url => {
  const { pathname, searchParams } = new URL(url instanceof Request ? url.url : url);
  return answer(pathname.replace(/^.*\/api\//, ''), searchParams);
};
if (HELD.place && !location.hash) history.replaceState(null, '', HELD.place);
