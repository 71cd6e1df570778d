// Load the tiles of the maps: those in view are requested, nearest to the middle first; other requests are cancelled.
import { NotReadyError, pathOfHead, requestFloats } from './api.js';
import { KeptArrays } from './kept.js';

export const TILE_SIDE = 256; // cells per side; a cell of level k is the mean of 2^k x 2^k weights
const AT_ONCE = 4;
export const tilesArrived = { count: 0, trouble: '', notify: () => {} };
const refused = new Map();
const tiles = new KeptArrays(
  96 << 20,
  one => one.values.byteLength,
  () => {
    tilesArrived.count++;
    tilesArrived.trouble = '';
    tilesArrived.notify();
  },
);
let wanted = [];

const nameOf = t => `${t.run} ${t.sample} ${t.l} ${t.h} ${t.level} ${t.i} ${t.j} ${t.masked}`;
export const loadedTile = t => tiles.get(nameOf(t));

// Request the tiles that the view needs now, the most urgent first; requests for other tiles are aborted.
export function wantTiles(list) {
  wanted = list;
  tiles.abortOthers(new Set(list.map(nameOf)));
  pump();
}

function pump() {
  wanted = wanted.filter(t => !tiles.has(nameOf(t)));
  for (const t of wanted) {
    if (tiles.requested.size >= AT_ONCE) return;
    const name = nameOf(t);
    if (!tiles.requested.has(name) && !(refused.get(name) > performance.now())) fetchTile(t, name);
  }
}

async function fetchTile(t, name) {
  const place = `level=${t.level}&row=${t.i}&column=${t.j}&sink=${t.masked ? 0 : 1}`;
  const address = `${pathOfHead(t.run, t.sample, t.l, t.h)}/tile?${place}`;
  await tiles
    .request(name, async signal => {
      const {
        shape: [rows, cols],
        values,
      } = await requestFloats(address, signal);
      return { rows, cols, values };
    })
    .catch(error => {
      refused.set(name, performance.now() + (error instanceof NotReadyError ? 1000 : 4000));
      if (error instanceof NotReadyError) setTimeout(pump, 1050);
      else {
        tilesArrived.trouble = error.message;
        tilesArrived.notify();
      }
    });
  pump();
}

export function retryTiles() {
  refused.clear();
  pump();
}
