// Load one query's weights on all keys; a newer request cancels the older one.
import { floats, headAt } from './api.js';

const MAX_BYTES = 32 << 20;
const kept = new Map();
let requested = new Map(), held = 0;
export const loaded = { notify: () => {} };

const nameOf = (where, q) => `${where.run} ${where.sample} ${where.l} ${where.h} ${q}`;
export function row(where, q) {
  const name = nameOf(where, q), found = kept.get(name);
  if (found) { kept.delete(name); kept.set(name, found); }
  return found;
}

// Request the rows of these heads, all of query q.
export function wantRows(places, q) {
  const names = new Set(places.map(where => nameOf(where, q)));
  for (const [name, control] of requested) if (!names.has(name)) { control.abort(); requested.delete(name); }
  for (const where of places) {
    const name = nameOf(where, q);
    if (!kept.has(name) && !requested.has(name)) fetchRow(where, q, name);
  }
}

async function fetchRow(where, q, name) {
  const control = new AbortController();
  requested.set(name, control);
  try {
    const { values } = await floats(`${headAt(where.run, where.sample, where.l, where.h)}/row?query=${q}`, control.signal);
    kept.set(name, values);
    held += values.byteLength;
    for (const [oldest, one] of kept) {
      if (held <= MAX_BYTES || oldest === name) break;
      kept.delete(oldest);
      held -= one.byteLength;
    }
    loaded.notify();
  } catch (error) {
    if (!control.signal.aborted) console.warn(`query ${q}: ${error.message}`);
  } finally {
    if (requested.get(name) === control) requested.delete(name);
  }
}
