// Tiles of the maps: those in view are requested, nearest to the middle first; other requests are cancelled.
import { floats, headAt, Later } from './api.js';

export const SIDE = 256;  // cells a side; a cell of level k is the mean of 2^k x 2^k weights
const AT_ONCE = 4, MOST = 96 << 20;
const kept = new Map(), asked = new Map(), refused = new Map();
let wanted = [], held = 0;
export const arrived = { count: 0, trouble: '', tell: () => {} };

const nameOf = t => `${t.run} ${t.sample} ${t.l} ${t.h} ${t.level} ${t.i} ${t.j} ${t.masked}`;
export function tile(t) {
  const name = nameOf(t), found = kept.get(name);
  if (found) { kept.delete(name); kept.set(name, found); }  // the latest used is the last to go
  return found;
}

// The tiles that the view needs now, the most urgent first. What is under way and no longer needed is aborted.
export function want(list) {
  const names = new Set(list.map(nameOf));
  wanted = list.filter(t => !kept.has(nameOf(t)));
  for (const [name, control] of asked) if (!names.has(name)) { control.abort(); asked.delete(name); }
  pump();
}

function pump() {
  for (const t of wanted) {
    if (asked.size >= AT_ONCE) return;
    const name = nameOf(t);
    if (!asked.has(name) && !(refused.get(name) > performance.now())) fetchTile(t, name);
  }
}

async function fetchTile(t, name) {
  const control = new AbortController();
  asked.set(name, control);
  try {
    const { shape: [rows, cols], values } = await floats(`${headAt(t.run, t.sample, t.l, t.h)}/tile?level=${t.level}&row=${t.i}&column=${t.j}&sink=${t.masked ? 0 : 1}`, control.signal);
    keep(name, { rows, cols, values });
  } catch (error) {
    if (control.signal.aborted) return;
    refused.set(name, performance.now() + (error instanceof Later ? 1000 : 4000));
    if (error instanceof Later) setTimeout(pump, 1050);
    else { arrived.trouble = error.message; arrived.tell(); }
  } finally {
    if (asked.get(name) === control) asked.delete(name);
    wanted = wanted.filter(each => !kept.has(nameOf(each)));
    pump();
  }
}

function keep(name, found) {
  kept.set(name, found);
  held += found.values.byteLength;
  for (const [oldest, one] of kept) {
    if (held <= MOST || oldest === name) break;
    kept.delete(oldest);
    held -= one.values.byteLength;
  }
  arrived.count++;
  arrived.trouble = '';
  arrived.tell();
}

export function forget() { refused.clear(); pump(); }
