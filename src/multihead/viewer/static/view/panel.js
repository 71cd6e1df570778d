// The side panel: the weight, the strip along the text, the strongest keys in context, the text around the query.
import { css, hatching, paint, rgb, rootEnd, sized, tone } from '../shared/colour.js';
import { $, el, translate } from '../shared/dom.js';
import { count, exact, short } from '../shared/numbers.js';
import { phrase, setText } from '../shared/tokens.js';
import { centre } from './geometry.js';
import { shown } from './map.js';
import { state } from './permalink.js';
import { label } from './record.js';
import { row, wantRows } from './rows.js';

const STRONGEST = 9, BEFORE = 120, AFTER = 30, WHOLE = 400;
let redraw = () => {}, spans = { key: '', list: [] }, drawn = '';
export function readingPanel(onChange) {
  redraw = onChange;
  $('strip').onclick = event => {
    const { scene } = $('strip'), box = $('strip').getBoundingClientRect();
    if (!scene) return;
    centre(scene.layer, state.q, (event.clientX - box.left) / box.width * scene.layer.keys);
    redraw();
  };
}
export const forgetPanel = () => { drawn = ''; spans = { key: '', list: [] }; };

export function panel(scene, pointed) {
  const q = pointed ? pointed[0] : state.q, places = [scene.a, ...(state.compare && q < scene.otherLayer.queries ? [scene.b] : [])];
  wantRows(places, q);
  const a = row(scene.a, q), b = state.compare ? row(scene.b, q) : null;
  const here = a && (places.length < 2 || b);
  $('read').setAttribute('aria-busy', String(!here));
  if (!here) return;  // the panel stays as it is until the whole row has arrived
  const shares = summary(a, scene), now = [JSON.stringify(places), q, state.scale, state.masked, $('right').clientWidth, drawn.split(' ')[0]].join();
  valueOf(scene, q, pointed ? pointed[1] : shares.best[0] ?? -1, { a, b, shares });
  if (now !== drawn || !pointed) {
    strip(scene, q, a, shares);
    context(scene, q, a, shares);
    textAround(scene, q, a, shares);
    drawn = now;
  }
}

// Summarise a row: its strongest keys, its entropy and its colour scale (linear ends at the largest weight); a masked first
// key is left out.
function summary(a, scene) {
  const best = [];
  let entropy = 0, top = 0, sees = 0, last = -1;
  for (let j = 0; j < a.length; j++) {
    const w = a[j];
    if (w !== w) continue;
    sees++;
    last = j;
    if (w > 0) entropy -= w * Math.log(w);
    if (state.masked && j === 0) continue;
    if (w > top) top = w;
    if (best.length < STRONGEST || w > a[best.at(-1)]) {
      const at = best.findIndex(other => a[other] < w);
      best.splice(at < 0 ? best.length : at, 0, j);
      best.length = Math.min(best.length, STRONGEST);
    }
  }
  // Without the first key the others get the whole scale.
  const end = state.scale === 'linear' ? top : state.masked ? rootEnd(top, false) : 1;
  return { best, top, sees, last, keys: Math.exp(entropy), end, tone: w => tone(state.scale, w, end), causal: scene.layer.pattern === 'causal' };
}

function valueOf(scene, q, key, { a, b, shares }) {
  const side = (which, p, name) => [el('bdi', { className: 'tok', textContent: label(which, p) }), el('small', { textContent: ` ${translate(name)} ${count(p)}` })];
  const blind = !shares.sees, w = key >= 0 ? a[key] : NaN, hidden = w !== w;
  const words = blind ? translate('no keys visible') : hidden ? translate(shares.causal && key > shares.last ? 'later key' : 'masked') : exact(w);
  const notes = blind || hidden ? [] : [translate('effective keys', { n: shares.keys.toFixed(1) })];
  if (b && !blind) notes.unshift(`${scene.titles.b[0]} ${b[key] === b[key] ? exact(b[key]) : translate('absent')}`);
  const mean = blockMean(q, key);
  if (mean) notes.push(mean);
  $('read').replaceChildren(
    el('div', { className: 'q' }, ...side(scene.sides.query, q, 'query'), ...(blind ? [] : [el('br'), '→ ', ...side(scene.sides.key, key, 'key')])),
    el('div', { className: 'w' + (blind || hidden ? ' worded' : '') }, el('data', { value: hidden ? '' : String(w), textContent: words }), ...notes.map(note => el('small', { textContent: note }))));
}

// The mean of the cell under the pointer, if the cell covers more than one weight.
function blockMean(q, key) {
  const one = shown.a, level = shown.span?.level ?? 0, r = (q >> level) - (one?.r0 ?? 0), c = (key >> level) - (one?.c0 ?? 0);
  if (!one || !level || r < 0 || c < 0 || r >= one.rows || c >= one.cols) return '';
  const mean = one.values[r * one.cols + c];
  return mean >= 0 ? translate('block mean', { n: 2 ** level, share: short(mean) }) : '';
}

function strip(scene, q, a, shares) {
  const canvas = $('strip'), width = Math.max(120, $('right').clientWidth - 32), high = 36, pen = sized(canvas, width, 58), bins = Math.min(a.length, Math.floor(width / 2));
  const size = width / bins, from = b => Math.floor(b * a.length / bins);
  canvas.scene = scene;
  canvas.setAttribute('aria-label', translate('strip label', { query: count(q) }));
  const hatch = hatching(pen, 5);
  for (let b = 0; b < bins; b++) {
    let max = NaN;
    for (let j = from(b); j < Math.max(from(b) + 1, from(b + 1)); j++) if (!(state.masked && !j) && !(a[j] <= max) && a[j] === a[j]) max = a[j];
    if (max !== max) { pen.fillStyle = hatch; pen.fillRect(b * size, 0, size + .5, high); continue; }
    const t = shares.tone(max);
    pen.fillStyle = rgb('ink', Math.max(.35, t));
    pen.fillRect(b * size, high - t * high, Math.max(1, size - (size > 3 ? 1 : .4)), t * high);
  }
  pen.fillStyle = css('line2');
  pen.fillRect(0, high, width, 1);
  pen.fillStyle = css('ink');
  pen.fillRect(state.x / a.length * width, high + 3, Math.max(3, Math.min(state.n, a.length) / a.length * width), 2);
  if (!scene.layer.crosses) { pen.fillStyle = css('mark'); pen.fillRect((q + (scene.layer.queryStart ?? 0) + .5) / a.length * width - .75, 0, 1.5, high + 2); }
  pen.fillStyle = css('faint');
  pen.font = `11px ${css('sans')}`;
  for (const [align, x, key] of [['left', 0, 0], ['right', width, a.length - 1]]) { pen.textAlign = align; pen.fillText(translate('key n', { n: count(key) }), x, 52); }
  $('rowtop').textContent = state.scale === 'log' ? translate('scale.log') : `0–${short(shares.end)}, ${translate('scale.' + state.scale)}`;
}

// List the largest weights with the text around their keys, one per line, which shows an induction head best.
function context(scene, q, a, shares) {
  const { text, from } = scene.sides.key;
  const cell = (name, ...children) => el('span', { className: name }, ...children);
  $('kwic').classList.toggle('bare', !text);
  $('kwic').replaceChildren(...shares.best.flatMap(j => {
    const word = label(scene.sides.key, j), go = el('button', {
      onclick: () => { state.q = q; centre(scene.layer, q, j, 56); redraw(); }, 'aria-label': translate('go there', { key: count(j), token: word, share: short(a[j]) }),
    }, el('bdi', { textContent: word }));
    paint(go, shares.tone(a[j]));
    return [cell('n', count(j)), cell('l', el('bdi', { textContent: text ? phrase(text, j + from - 5, j + from) : '' })), go,
      cell('r', el('bdi', { textContent: text ? phrase(text, j + from + 1, j + from + 6) : '' })), cell('p', short(a[j]))];
  }));
  if (!shares.sees) $('kwic').replaceChildren(el('p', { className: 'note', textContent: translate('no keys visible') }));
}

function textAround(scene, q, a, shares) {
  const { text, from } = scene.sides.key, box = $('text'), at = scene.layer.crosses ? shares.best[0] ?? 0 : q + (scene.layer.queryStart ?? 0), n = a.length;
  if (!text) { box.replaceChildren(el('span', { className: 'note', textContent: translate('no tokens') })); $('span').textContent = ''; spans.key = ''; return; }
  const start = n <= WHOLE ? 0 : Math.max(0, Math.min(n - BEFORE - AFTER, at - (shares.causal ? BEFORE : (BEFORE + AFTER) / 2))), end = n <= WHOLE ? n : Math.min(n, start + BEFORE + AFTER);
  const key = [scene.a.run, scene.a.sample, scene.a.l, start, end].join();
  if (key !== spans.key) {
    const list = setText(box, text, start + from, end + from);
    list.forEach((one, k) => { one.onclick = () => { const q = start + k - (scene.layer.queryStart ?? 0); if (!scene.layer.crosses && q >= 0) { state.q = q; redraw(); } }; });
    spans = { key, list };
  }
  spans.list.forEach((one, k) => {
    const j = start + k, w = a[j], hidden = w !== w;
    paint(one, hidden || (state.masked && !j) ? 0 : shares.tone(w));
    one.classList.toggle('on', !scene.layer.crosses && j === at);
    one.classList.toggle('unseen', hidden);
    one.title = hidden ? translate(shares.causal && j > shares.last ? 'later key' : 'hidden key') : `${text.labels[j + from]} ${short(w)}`;
  });
  $('span').textContent = n <= WHOLE ? '' : `${count(start)}–${count(end - 1)}`;
  const on = spans.list.find(one => one.classList.contains('on'));
  if (on && box.scrollHeight > box.clientHeight + 4) box.scrollTop = on.offsetTop - box.offsetTop - box.clientHeight * .6;
}
