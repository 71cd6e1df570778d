// One run and sample as the server tells it: its layers, heads, kinds, numbers and texts.
import { json, sampleAt } from './api.js';
import { known, knows, NBSP, say } from './words.js';
import { reading } from './tokens.js';

const BUILT = 6;
export const view = { version: '', lang: 'en', runs: [] };

// A kind's glyph is a small picture of its pattern, drawn on 12 x 12 units.
const GLYPHS = {
  previous: 'M0 4h4v4h4v4h-4v-4h-4z', next: 'M4 0h4v4h4v4h-4v-4h-4z', self: 'M0 0h4v4h4v4h4v4h-4v-4h-4v-4h-4z',
  first: 'M0 0h4v12h-4z', separator: 'M8 0h4v12h-4z', duplicate: 'M0 5h3v3h-3zM4.5 5h3v3h-3zM9 5h3v3h-3z',
  induction: 'M0 8h4v4h-4zM4 4h4v4h-4zM8 0h4v4h-4z', local: 'M0 0h6v3h3v3h3v6h-6v-3h-3v-3h-3z',
  broad: 'M0 0h3v3h-3zM4.5 0h3v3h-3zM9 0h3v3h-3zM0 4.5h3v3h-3zM4.5 4.5h3v3h-3zM9 4.5h3v3h-3zM0 9h3v3h-3zM4.5 9h3v3h-3zM9 9h3v3h-3z',
  mixed: 'M0 0h4v4h-4zM8 3h4v4h-4zM3 8h4v4h-4z',
};
export const KINDS = Object.keys(GLYPHS);
export const kindName = kind => knows('kind ' + kind) ? say('kind ' + kind) : kind;
export function glyph(kind) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg'), path = document.createElementNS(svg.namespaceURI, 'path');
  svg.setAttribute('viewBox', '0 0 12 12');
  svg.setAttribute('aria-hidden', 'true');
  path.setAttribute('d', Object.hasOwn(GLYPHS, kind) ? GLYPHS[kind] : GLYPHS.mixed);
  path.setAttribute('fill', 'currentColor');
  svg.append(path);
  return svg;
}

// How a unit is written: a share as a percentage; a plain name and the statistic's own name both find its words.
const WRITTEN = {
  share: { unit: '%', show: v => (v * 100).toFixed(v < .0995 ? 1 : 0), times: 100 },
  nats: { unit: 'nats', show: v => v.toFixed(2), times: 1 },
  tokens: { unit: 'tokens', show: v => v.toFixed(1), times: 1 },
  keys: { unit: '', show: v => v.toFixed(1), times: 1 },
  norm: { unit: '', show: v => String(+v.toPrecision(3)), times: 1 },
};
// A Map, because a record may have a statistic called "constructor" or "__proto__", which every object has too.
const PLAIN = new Map([['effective_keys', 'keys'], ['mean_distance', 'distance'], ['distance_spread', 'spread'], ['largest_weight', 'largest']]);
const plain = id => PLAIN.get(id) ?? id.replace(/_mass$/, '');

function metric(column, values, most) {
  const { unit, show, times } = Object.hasOwn(WRITTEN, column.unit) ? WRITTEN[column.unit] : WRITTEN.norm;
  const name = plain(column.id), found = values.filter(known);
  const full = column.unit === 'share' ? 1 : column.id === 'entropy' ? Math.log(most) : Math.max(1e-9, ...found);
  return {
    id: column.id, name, values, times, share: column.unit === 'share', unit,
    label: knows('metric ' + name) ? say('metric ' + name) : name.replaceAll('_', ' '),
    full,
    filled: i => known(values[i]) ? values[i] / (full || 1) : 0,
    number: i => known(values[i]) ? show(values[i]) : '–',
    text: i => known(values[i]) ? show(values[i]) + (column.unit === 'share' ? NBSP + '%' : '') : '–',
  };
}
export const withUnit = one => one.unit ? say('{label}, {unit}', { label: one.label, unit: one.unit === '%' ? '%' : say(one.unit) }) : one.label;

class Sample {
  constructor(run, sample, told) {
    Object.assign(this, { run, sample, layers: told.layers, kinds: told.kinds, thresholds: told.thresholds ?? {} });
    this.name = view.runs[run].name;
    this.title = view.runs[run].title || this.name;
    this.keep = view.runs[run].keep;
    // A layer is called by its number in the model everywhere, in addresses too; it is no place in the list of layers,
    // which may hold some layers only.
    this.heads = told.layers.flatMap(layer => Array.from({ length: layer.heads }, (_, h) => ({ l: layer.number, h })));
    this.numbered = new Map(told.layers.map(layer => [layer.number, layer]));
    this.first = new Map(told.layers.map(({ number }) => [number, this.heads.findIndex(head => head.l === number)]));
    this.widest = Math.max(...told.layers.map(layer => layer.heads));
    this.queries = Math.max(...told.layers.map(layer => layer.queries));
    this.keys = Math.max(...told.layers.map(layer => layer.keys));
    this.metrics = told.columns.filter(column => Object.hasOwn(told.metrics, column.id)).map(column => metric(column, told.metrics[column.id], this.keys));
    this.texts = (told.texts ?? []).map(text => reading(text.tokens, text.special));
    // Levels from 6 on are built once: until then they are not asked for.
    this.progress = { state: this.layers.some(layer => layer.levels > BUILT) ? 'unknown' : 'ready', done: 0, total: this.heads.length };
  }

  has(l, h) { return h >= 0 && h < (this.numbered.get(l)?.heads ?? 0); }
  index(l, h) { return this.has(l, h) ? this.first.get(l) + h : -1; }
  layer(i) { return this.numbered.get(this.heads[i].l); }
  short(i) { return `L${this.heads[i].l}${NBSP}H${this.heads[i].h}`; }
  long(i) { return say('layer head', { layer: this.heads[i].l, head: this.heads[i].h }); }
  told(i) { return say('{head}, {kind}', { head: this.long(i), kind: kindName(this.kinds[i]) }); }

  get coarse() { return this.progress.state === 'ready'; }
  // Whether the small maps of a layer can be had by now; heads are built one after the other.
  mapped(l) { return this.keep === 'statistics' || this.numbered.get(l).levels <= BUILT || this.coarse || this.first.get(l) + this.numbered.get(l).heads <= this.progress.done; }

  // The texts of a layer's queries and keys; position p of a side is token p + from of its text.
  sides(layer) {
    const text = n => this.texts[n] ?? null;
    return { query: { text: text(layer.queryText), from: layer.crosses ? 0 : layer.queryStart }, key: { text: text(layer.keyText), from: 0 } };
  }
}

const kept = new Map();
export function sampleOf(run, sample) {
  const key = `${run} ${sample}`;
  if (!kept.has(key)) {
    const asked = json(sampleAt(run, sample)).then(told => new Sample(run, sample, told));
    asked.catch(() => kept.delete(key));
    kept.set(key, asked);
  }
  return kept.get(key);
}

export const label = (side, p) => side.text?.labels[p + side.from] ?? String(p);
