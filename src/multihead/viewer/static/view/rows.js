// Load one query's weights on all keys; a newer request cancels the older one.
import { pathOfHead, requestFloats } from './api.js';
import { KeptArrays } from './kept.js';

export const rowsLoaded = { notify: () => {} };
const rows = new KeptArrays(
  32 << 20,
  values => values.byteLength,
  () => rowsLoaded.notify(),
);

const nameOf = (where, q) => `${where.run} ${where.sample} ${where.l} ${where.h} ${q}`;
export const rowOfQuery = (where, q) => rows.get(nameOf(where, q));

// Request the rows of these heads, all of query q.
export function wantRows(places, q) {
  rows.abortOthers(new Set(places.map(where => nameOf(where, q))));
  for (const where of places) {
    const name = nameOf(where, q);
    const address = `${pathOfHead(where.run, where.sample, where.l, where.h)}/row?query=${q}`;
    if (rows.has(name) || rows.requested.has(name)) continue;
    rows
      .request(name, async signal => (await requestFloats(address, signal)).values)
      .catch(error => console.warn(`query ${q}: ${error.message}`));
  }
}
