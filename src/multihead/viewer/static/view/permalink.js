// The state of the page, and the address that restores it: #a=L17H4&b=L16H0&v=ab&x=3400&y=3400&n=120&q=3440&c=log&s=0.
// Also: r and t, the run and the text (sample); rb, the run of B; f, k and o, the filter, the kind and the order of the
// table; on the page of all heads m, the numbers of the panel of important heads, and p and q, the head, or the mean of
// a layer (L17), and the token of a picture's panel.
import { remembered } from '../shared/remembered.js';
import { markSaved, place } from './host.js';

export const state = {
  run: 0,
  sample: 0,
  a: null,
  b: null,
  compare: false,
  x: 0,
  y: 0,
  n: 0,
  q: -1,
  p: null,
  m: '',
  scale: '',
  usual: '',
  masked: false,
  filter: '',
  kind: '',
  order: '',
};

const CELL_PART = 56; // keys across, as where the page shows a single weight
const headIn = text => {
  const found = /^L(\d+)H(\d+)$/.exec(text ?? '');
  return found && { l: +found[1], h: +found[2] };
};
const headOrMean = text => headIn(text) ?? (/^L\d+$/.test(text ?? '') ? { l: +text.slice(1), h: -1 } : null);
const number = (text, otherwise) => (text !== null && text !== '' && Number.isFinite(+text) ? +text : otherwise);
const name = ({ l, h }) => `L${l}H${h}`;

export function readAddress(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ''));
  const run = Math.floor(number(given.get('r'), 0));
  const b = headIn(given.get('b'));
  return {
    run,
    sample: Math.floor(number(given.get('t'), 0)),
    a: headIn(given.get('a')),
    b: b && { r: Math.floor(number(given.get('rb'), run)), ...b },
    compare: given.get('v') === 'ab',
    x: number(given.get('x'), 0),
    y: number(given.get('y'), 0),
    n: number(given.get('n'), 0),
    q: Math.floor(number(given.get('q'), -1)),
    p: headOrMean(given.get('p')),
    m: given.get('m') ?? '',
    scale: ['linear', 'log', 'root'].find(name => name === given.get('c')) ?? '',
    masked: given.has('s') ? given.get('s') === '1' : remembered('without first'),
    filter: given.get('f') ?? '',
    kind: given.get('k') ?? '',
    order: given.get('o') ?? '',
  };
}

export function writeAddress(st = state) {
  /** @type {Record<string, string | number>} */
  const out = {};
  if (st.run) out.r = st.run;
  if (st.sample) out.t = st.sample;
  if (!st.a) {
    if (st.filter) out.f = st.filter;
    if (st.kind) out.k = st.kind;
    if (st.order) out.o = st.order;
    if (st.m) out.m = st.m;
    if (st.p) Object.assign(out, { p: st.p.h < 0 ? `L${st.p.l}` : name(st.p), q: st.q });
    if (st.scale !== st.usual) out.c = st.scale;
  } else {
    out.a = name(st.a);
    if (st.compare) {
      out.b = name(st.b);
      out.v = 'ab';
      if (st.b.r !== st.run) out.rb = st.b.r;
    }
    Object.assign(out, {
      x: Math.round(st.x),
      y: Math.round(st.y),
      n: Math.round(st.n),
      q: st.q,
      c: st.scale,
      s: +st.masked,
    });
  }
  return '#' + new URLSearchParams(Object.entries(out).map(([name, value]) => [name, String(value)]));
}

// The address of a head's whole map, or of all heads, keeping the other choices.
export const toHead = (run, sample, l, h) =>
  writeAddress({ ...state, run, sample, a: { l, h }, compare: false, x: 0, y: 0, n: 0, q: -1 }).replace(
    /&x=0&y=0&n=0&q=-1/,
    '',
  );
// The address of one cell of a head's map, in the middle of a part of it.
export const toCell = (run, sample, l, h, query, key) =>
  writeAddress({
    ...state,
    run,
    sample,
    a: { l, h },
    compare: false,
    x: Math.max(0, key - CELL_PART / 2),
    y: Math.max(0, query - CELL_PART / 2),
    n: CELL_PART,
    q: query,
  });
// The address of a head compared with the same head of another run.
export const toBoth = (run, sample, l, h, other) =>
  writeAddress({
    ...state,
    run,
    sample,
    a: { l, h },
    b: { r: other, l, h },
    compare: true,
    x: 0,
    y: 0,
    n: 0,
    q: -1,
  }).replace(/&x=0&y=0&n=0&q=-1/, '');
export const toAll = () => writeAddress({ ...state, a: null });

// The address follows 120 ms after the last change; until then the page is marked as not saved.
let timer = 0;
export function markUnsaved() {
  markSaved(false);
}
export function saveAddress() {
  markUnsaved();
  clearTimeout(timer);
  timer = setTimeout(saveAddressNow, 120);
}
export function saveAddressNow() {
  clearTimeout(timer);
  if (writeAddress() !== place.read()) place.replace(writeAddress());
  markSaved(true);
}
