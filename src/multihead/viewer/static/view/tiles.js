// Load the tiles of the maps: those in view are requested, nearest to the middle first; other requests are cancelled.
import { floats, headAt, Later } from './api.js';

export const SIDE = 256;  // cells per side; a cell of level k is the mean of 2^k x 2^k weights
const AT_ONCE = 4, MAX_BYTES = 96 << 20;
const kept = new Map(), requested = new Map(), refused = new Map();
let wanted = [], held = 0;
export const arrived = { count: 0, trouble: '', notify: () => {} };

const nameOf = t => `${t.run} ${t.sample} ${t.l} ${t.h} ${t.level} ${t.i} ${t.j} ${t.masked}`;
export function tile(t) {
  const name = nameOf(t), found = kept.get(name);
  if (found) { kept.delete(name); kept.set(name, found); }  // least recently used first
  return found;
}

// Request the tiles that the view needs now, the most urgent first; requests for other tiles are aborted.
export function want(list) {
  const names = new Set(list.map(nameOf));
  wanted = list.filter(t => !kept.has(nameOf(t)));
  for (const [name, control] of requested) if (!names.has(name)) { control.abort(); requested.delete(name); }
  pump();
}

function pump() {
  for (const t of wanted) {
    if (requested.size >= AT_ONCE) return;
    const name = nameOf(t);
    if (!requested.has(name) && !(refused.get(name) > performance.now())) fetchTile(t, name);
  }
}

async function fetchTile(t, name) {
  const control = new AbortController();
  requested.set(name, control);
  try {
    const { shape: [rows, cols], values } = await floats(`${headAt(t.run, t.sample, t.l, t.h)}/tile?level=${t.level}&row=${t.i}&column=${t.j}&sink=${t.masked ? 0 : 1}`, control.signal);
    keep(name, { rows, cols, values });
  } catch (error) {
    if (control.signal.aborted) return;
    refused.set(name, performance.now() + (error instanceof Later ? 1000 : 4000));
    if (error instanceof Later) setTimeout(pump, 1050);
    else { arrived.trouble = error.message; arrived.notify(); }
  } finally {
    if (requested.get(name) === control) requested.delete(name);
    wanted = wanted.filter(each => !kept.has(nameOf(each)));
    pump();
  }
}

function keep(name, found) {
  kept.set(name, found);
  held += found.values.byteLength;
  for (const [oldest, one] of kept) {
    if (held <= MAX_BYTES || oldest === name) break;
    kept.delete(oldest);
    held -= one.values.byteLength;
  }
  arrived.count++;
  arrived.trouble = '';
  arrived.notify();
}

export function forget() { refused.clear(); pump(); }
