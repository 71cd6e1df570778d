// The page's data, its words, and the small tools every part uses. Text goes in by textContent alone.
'use strict';
const D = JSON.parse(document.getElementById('data').textContent);
const $ = id => document.getElementById(id);

// A sentence of the page with its {holes} filled.
function say(key, given = {}) {
  return (Object.hasOwn(D.words, key) ? D.words[key] : key).replace(/\{(\w+)\}/g, (hole, name) => Object.hasOwn(given, name) ? String(given[name]) : hole);
}

function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === 'k') made.style.setProperty('--k', `var(--${value})`);
    else if (name === 'v') made.style.setProperty('--v', Number.isFinite(value) ? Math.max(0, Math.min(1, value)).toFixed(4) : 0);
    else if (name in made && !name.startsWith('aria')) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Every head of every layer in one list; layers may differ in heads. A layer is found by its place l in the list; it is
// shown by its number in the model, which differs where only some layers were recorded.
const HEADS = D.layers.flatMap((layer, l) => Array.from({ length: layer.heads }, (_, h) => ({ l, h, number: layer.number })));
const FIRST = D.layers.map((_, l) => HEADS.findIndex(head => head.l === l));
const WIDEST = Math.max(...D.layers.map(layer => layer.heads));
const indexOf = (l, h) => l < D.layers.length && h >= 0 && h < D.layers[l].heads ? FIRST[l] + h : -1;
const numbered = (number, h) => HEADS.findIndex(head => head.number === number && head.h === h);
const layerOf = i => D.layers[HEADS[i].l];
const kindOf = i => D.kinds[i];
const shortName = i => `L${HEADS[i].number} H${HEADS[i].h}`;
const longName = i => say('layer head', { layer: HEADS[i].number, head: HEADS[i].h });
const address = i => `#L${HEADS[i].number}H${HEADS[i].h}`;

// Tokens of the queries and the keys of a layer: a run of one of the page's texts, or bare positions.
function tokensOf(source) {
  const text = D.texts[source.text];
  return { text, from: source.from, label: p => text ? text.labels[p + source.from] : String(p) };
}

const NBSP = '\u00a0';
const known = value => value !== null && Number.isFinite(value);
const percentNumber = w => known(w) ? (w * 100).toFixed(w < .0995 ? 1 : 0) : '–';
const percent = w => percentNumber(w) + NBSP + '%';
const exactPercent = w => (w * 100).toFixed(2) + NBSP + '%';

// The statistics a page shows, in the order of its columns; `share` ones are percentages.
const METRICS = [
  { id: 'entropy', unit: 'nats', show: v => v.toFixed(2), full: i => D.top[i] },
  { id: 'keys', unit: '', show: v => v.toFixed(1), full: i => layerOf(i).keys },
  { id: 'distance', unit: 'tokens', show: v => v.toFixed(1) },
  { id: 'spread', unit: 'tokens', show: v => v.toFixed(1) },
  ...['self', 'previous', 'next', 'first', 'separator', 'largest'].map(id => ({ id, unit: '%', share: true, show: percent, full: () => 1 })),
].filter(metric => D.metrics[metric.id]);
for (const metric of METRICS) {
  metric.values = D.metrics[metric.id];
  metric.label = say(metric.id, { separator: D.separator });
  const most = Math.max(...metric.values.filter(known), 1e-9);
  metric.full ??= () => most;
  metric.filled = i => metric.values[i] / (metric.full(i) || 1);
  metric.text = i => known(metric.values[i]) ? metric.show(metric.values[i]) : '–';
}

const withUnit = metric => metric.unit ? say('{label}, {unit}', { label: metric.label, unit: metric.share ? '%' : say(metric.unit) }) : metric.label;

// A kind's glyph is a small picture of its pattern, drawn on 12 x 12 units.
const GLYPHS = {
  previous: 'M0 4h4v4h4v4h-4v-4h-4z', next: 'M4 0h4v4h4v4h-4v-4h-4z', self: 'M0 0h4v4h4v4h4v4h-4v-4h-4v-4h-4z',
  first: 'M0 0h4v12h-4z', separator: 'M8 0h4v12h-4z', duplicate: 'M0 5h3v3h-3zM4.5 5h3v3h-3zM9 5h3v3h-3z',
  induction: 'M0 8h4v4h-4zM4 4h4v4h-4zM8 0h4v4h-4z', local: 'M0 0h6v3h3v3h3v6h-6v-3h-3v-3h-3z',
  broad: 'M0 0h3v3h-3zM4.5 0h3v3h-3zM9 0h3v3h-3zM0 4.5h3v3h-3zM4.5 4.5h3v3h-3zM9 4.5h3v3h-3zM0 9h3v3h-3zM4.5 9h3v3h-3zM9 9h3v3h-3z',
  mixed: 'M0 0h4v4h-4zM8 3h4v4h-4zM3 8h4v4h-4z',
};
const KINDS = Object.keys(GLYPHS);
const kindName = kind => say('kind ' + kind);
const countOf = kind => D.kinds.filter(k => k === kind).length;
function glyph(kind) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg'), path = document.createElementNS(svg.namespaceURI, 'path');
  svg.setAttribute('viewBox', '0 0 12 12');
  svg.setAttribute('aria-hidden', 'true');
  path.setAttribute('d', GLYPHS[kind]);
  path.setAttribute('fill', 'currentColor');
  svg.append(path);
  return svg;
}
const kindTag = i => el('span', { className: 'kind', k: kindOf(i) }, glyph(kindOf(i)), kindName(kindOf(i)));
