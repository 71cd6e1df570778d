// The page of one head: its map, the query and key under the pointer or pinned, and their weights in numbers and text.
import { bitmap, paint, tone } from '../shared/colour.js';
import { $, el, translate } from '../shared/dom.js';
import { kindNames, kindTags, roleName } from '../shared/kinds.js';
import { exact, percent } from '../shared/numbers.js';
import { blockNote, isSingle } from '../shared/legend.js';
import { setText } from '../shared/tokens.js';
import { drawMap, geometry } from './bigmap.js';
import { comparison, similar } from './compare.js';
import { endNote, headStatistics, legend, marks, state, topOf } from './grid.js';
import { openHead, rowOf, thumbs } from './maps.js';
import { addressOf, D, HEADS, kindOf, kindsOf, layerOf, longName, roleOf, shortName, tokensOf, WIDEST } from './record.js';
import { firstButton, textEnd, withoutFirst } from './text.js';

const WINDOW = 1500;  // tokens of a long text that are shown around the query
let opened = -1, view = null, pinned = 1, opening = 0;
export const shownHead = () => opened;
export function closeHead() {
  opened = -1;
  opening++;
}

// All heads as small boxes. Many layers are laid out in several columns, so that the map below stays in sight.
function navigator(i) {
  const nav = el('nav', { className: 'nav', 'aria-label': translate('all heads', { n: HEADS.length }) }), layers = D.layers.length;
  const columns = Math.ceil(layers / 10), rows = Math.ceil(layers / columns), width = Math.max(4, Math.min(15, Math.floor(420 / columns / WIDEST) - 2));
  nav.style.setProperty('--rows', rows);
  nav.style.setProperty('--navw', width + 'px');
  nav.style.setProperty('--navh', Math.max(5, Math.min(11, Math.floor(90 / rows) - 2)) + 'px');
  nav.style.gridTemplateColumns = Array(columns).fill(`repeat(${WIDEST}, var(--navw))`).join(' 6px ');
  HEADS.forEach((head, n) => {
    const link = el('a', { href: addressOf(n), 'aria-label': `${longName(n)}, ${kindNames(kindsOf(n))}`, title: `${shortName(n)}, ${kindNames(kindsOf(n))}`, tabIndex: n === i ? 0 : -1, k: kindOf(n) });
    link.style.gridRow = head.l % rows + 1;
    link.style.gridColumn = Math.floor(head.l / rows) * (WIDEST + 1) + head.h + 1;
    if (n === i) link.setAttribute('aria-current', 'page');
    nav.append(link);
  });
  return nav;
}

function headTitle(i) {
  const title = el('div', {}, el('a', { className: 'back', href: '#', textContent: '← ' + translate('all heads', { n: HEADS.length }) }), el('h1', { textContent: longName(i) }),
    el('p', { className: 'sub' }, kindTags(kindsOf(i)), ...marks(i), ...(roleOf(i) ? [el('span', { textContent: roleName(roleOf(i)) })] : []), el('span', { className: 'path', textContent: layerOf(i).name })));
  return el('div', { className: 'hh' }, title, navigator(i));
}

// Show a head; `mapState` is the reason why there is no map, choose(scale) is called for another colour scale.
export async function headPage(i, { mapState, choose }) {
  const turn = ++opening, { number, h } = HEADS[i];
  const left = el('div', { id: 'mapbox' }), pane = el('div', { className: 'pane' });
  $('head').replaceChildren(headTitle(i), el('div', { className: 'one' }, left, pane));
  const whole = [el('h2', { textContent: translate('whole head') }), headStatistics(i)];
  opened = i;
  view = null;
  if (!thumbs[i]) {
    left.append(el('p', { className: 'note state', textContent: mapState }));
    pane.append(...whole);
    return;
  }
  left.append(el('p', { className: 'note state', id: 'unpacking', textContent: translate('decompressing') }));
  const head = await openHead(i);
  if (turn !== opening) return;  // another head was opened meanwhile
  const canvas = el('canvas', { id: 'big', tabIndex: 0, role: 'application', 'aria-label': translate('map label', { layer: number, head: h }) });
  const single = isSingle([head.rowBlock, head.colBlock]), note = [blockNote([head.rowBlock, head.colBlock]), translate('map note'), ...(single ? [] : endNote())].join(translate('join.sentences'));
  const top = topOf([head.rowBlock, head.colBlock]);
  left.replaceChildren(canvas, el('div', { className: 'scale' }, ...legend(240, note, choose, top)), ...comparison(i));
  const crosses = head.layer.queryTokens.text !== head.layer.keyTokens.text, rows = head.whole || head.largest;
  pane.append(el('div', { className: 'read', id: 'read', role: 'status', 'aria-live': 'polite' }));
  if (rows && tokensOf(head.layer.keyTokens).text) pane.append(el('h2', {}, translate(crosses ? 'over the keys' : 'over the text'), firstButton(show)), el('p', { className: 'reading', id: 'keytext', dir: 'auto', tabIndex: 0 }));
  if (rows && crosses && tokensOf(head.layer.queryTokens).text) pane.append(el('h2', { textContent: translate('the queries') }), el('p', { className: 'reading', id: 'querytext', dir: 'auto', tabIndex: 0 }));
  if (rows) pane.append(el('h2', { textContent: translate('largest weights') }), el('div', { className: 'bars', id: 'bars' }), el('p', { className: 'note', id: 'keptshare', hidden: true }));
  pane.append(...similar(i), ...whole);
  pinned = Math.max(0, Math.min(pinned, head.layer.queries - 1));
  view = { head, canvas, pixels: bitmap(head.map, 'ink', state.scale, top), hover: null, crosses, texts: {} };
  listen(canvas);
  show();
}

// The query and key shown: those under the pointer, or the pinned query and its largest weight.
function place() {
  const { head, hover } = view;
  const q = hover ? hover.q : pinned, row = rowOf(head, q);
  let c = hover?.c;
  if (c === undefined) {
    let best = -1;
    for (let k = 0; k < row.length; k++) if (row[k] >= 0 && (best < 0 || row[k] > row[best])) best = k;
    if (best < 0) best = Math.min(q, row.length - 1);  // no key is visible
    c = head.whole || head.largest ? Math.floor(best / head.colBlock) : Math.min(Math.floor(q / head.rowBlock), head.map.cols - 1);
  }
  return { q, row, c, r: Math.floor(q / head.rowBlock) };
}

let waiting = 0;
export function show() { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(showNow); }
function showNow() {
  if (!view || !view.canvas.isConnected) return;
  const at = place(), { head } = view;
  // The map and its legend end above the fold; on a phone they are as wide as the page.
  const above = view.canvas.getBoundingClientRect().top + scrollY, legendHeight = view.canvas.nextElementSibling.offsetHeight + 16;
  view.g = geometry(head, $('mapbox').clientWidth, innerHeight - above - legendHeight);
  drawMap(view.canvas, head, view.pixels, view.g, at);
  readOut(at);
  if ($('keytext')) textUnder('keytext', head.layer.keyTokens, head.layer.keys, view.crosses ? -1 : at.q + head.layer.queryStart, at.row);
  if ($('querytext')) textUnder('querytext', head.layer.queryTokens, head.layer.queries, at.q, null);
  if ($('bars')) strongestKeys(at);
}

function readOut({ q, row, r, c }) {
  const { head } = view, queries = tokensOf(head.layer.queryTokens), keys = tokensOf(head.layer.keyTokens);
  const small = words => el('small', { textContent: words }), span = (from, block, all) => `${from}–${Math.min(from + block, all) - 1}`;
  let sides, number, foot;
  if (head.whole) {
    const w = row[c], blind = row.every(v => v !== v);
    let entropy = 0;
    for (const v of row) if (v > 0) entropy -= v * Math.log(v);
    sides = [[queries.label(q), ` ${translate('query')} ${q}`], [keys.label(c), ` ${translate('key')} ${c}`]];
    number = blind ? translate('no keys visible') : w !== w ? translate('masked') : exact(w);
    foot = blind ? '' : translate('effective keys', { n: Math.exp(entropy).toFixed(1) });
  } else {
    const w = head.map.values[r * head.map.cols + c], only = head.rowBlock * head.colBlock === 1;
    sides = [[translate('queries'), ' ' + span(r * head.rowBlock, head.rowBlock, head.layer.queries)], [translate('keys'), ' ' + span(c * head.colBlock, head.colBlock, head.layer.keys)]];
    number = w !== w ? translate('masked') : exact(w);
    foot = only || w !== w ? '' : translate('mean of block', { rows: head.rowBlock, columns: head.colBlock });
  }
  const side = ([word, rest]) => [el('b', { textContent: word }), small(rest)];
  const target = number === translate('no keys visible') ? [] : [el('br'), '→ ', ...side(sides[1])];
  $('read').replaceChildren(el('div', { className: 'q' }, ...side(sides[0]), ...target),
    el('div', { className: 'w' + (/\d/.test(number) && number.length < 9 ? '' : ' words') }, number, small(foot)));
}

// Show a text coloured by a query's weights; of a long text only the part around the query.
function textUnder(id, source, length, on, row) {
  const box = $(id), { text, from } = tokensOf(source), centre = from + Math.max(0, on);
  const held = view.texts[id];
  if (!held || (centre < held.from + (held.from > from ? 100 : 0)) || centre >= held.to - (held.to < from + length ? 100 : 0)) {
    const start = length > 2 * WINDOW ? Math.max(from, centre - WINDOW) : from, stop = length > 2 * WINDOW ? Math.min(from + length, centre + WINDOW) : from + length;
    view.texts[id] = { from: start, to: stop, spans: setText(box, text, start, stop) };
    const pick = event => { const p = event.target.closest?.('.tk')?.dataset.p; return p === undefined ? null : +p - from - (id === 'keytext' && !view.crosses ? view.head.layer.queryStart : 0); };
    const selectable = id === 'querytext' || !view.crosses, fits = q => q !== null && q >= 0 && q < view.head.layer.queries;
    box.onmouseover = event => { const q = pick(event); if (selectable && fits(q)) { view.hover = { q }; view.still = id; show(); } };
    box.onclick = event => { const q = pick(event); if (selectable && fits(q)) { pinned = q; view.hover = null; view.still = id; show(); } };
    box.onmouseleave = () => { view.hover = null; show(); };
  }
  const alone = D.store.number === 1 ? ' 1' : '', hidden = row && withoutFirst() ? 0 : -1, end = row ? textEnd(row) : 1;
  for (const span of view.texts[id].spans) {
    const p = span.dataset.p - from, w = row ? row[p] : 0;
    span.classList.toggle('on', p === on);
    if (!row) continue;
    span.classList.toggle('no', w !== w);
    paint(span, w !== w || p === hidden ? 0 : tone(state.scale, w, end));
    span.title = w !== w ? translate('masked') : w < 0 ? translate(`not stored${alone}`, { n: D.store.number }) : exact(w);
  }
  const mark = view.texts[id].spans.find(span => span.classList.contains('on'));
  if (mark && view.still !== id && box.scrollHeight > box.clientHeight) box.scrollTop = mark.offsetTop - box.clientHeight / 2;
}

function strongestKeys({ q, row }) {
  const keys = tokensOf(view.head.layer.keyTokens), best = [];
  for (let k = withoutFirst() ? 1 : 0; k < row.length; k++) {
    if (!(row[k] >= 0) || (best.length === 6 && row[k] <= row[best[5]])) continue;
    const at = best.findIndex(other => row[other] < row[k]);
    best.splice(at < 0 ? best.length : at, 0, k);
    best.length = Math.min(best.length, 6);
  }
  $('bars').replaceChildren(...best.flatMap(k => [
    el('span', {}, keys.text ? keys.label(k) + ' ' : '', el('small', { textContent: k })), el('span', {}, el('i', { v: row[k] / textEnd(row) })),
    el('span', { textContent: exact(row[k]) })]));
  if (!best.length) $('bars').replaceChildren(el('span', { textContent: translate('no keys visible') }));
  if (view.head.largest && best.length) {
    const held = row.filter(w => w >= 0);
    $('keptshare').hidden = false;
    $('keptshare').textContent = `${keys.text && !view.crosses ? keys.label(q + view.head.layer.queryStart) + ', ' : ''}${translate('query')} ${q}: ` + translate(`stored share${D.store.number === 1 ? ' 1' : ''}`, { n: held.length, share: percent(Math.min(1, held.reduce((sum, w) => sum + w, 0))) });
  }
}

function listen(canvas) {
  const { head } = view, rows = head.map.rows, cols = head.map.cols;
  // A block holds many queries: the pinned one if it is inside, else the middle one.
  const queryIn = r => Math.floor(pinned / head.rowBlock) === r ? pinned : Math.min(head.layer.queries - 1, r * head.rowBlock + Math.floor(head.rowBlock / 2));
  const cellAt = event => {
    const box = canvas.getBoundingClientRect(), g = view.g;
    const r = Math.floor((event.clientY - box.top - g.top) / g.y), c = Math.floor((event.clientX - box.left - g.left) / g.x);
    return r >= 0 && c >= 0 && r < rows && c < cols ? { q: queryIn(r), c } : null;
  };
  const look = hover => { view.hover = hover; view.still = ''; show(); };
  canvas.onpointermove = event => { if (view.g) look(cellAt(event)); };
  canvas.onpointerleave = event => { if (event.pointerType === 'mouse') look(null); };
  canvas.onclick = event => { const cell = cellAt(event); if (cell) { pinned = cell.q; look(cell); } };
  canvas.onkeydown = event => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (step) {
      const at = place(), r = Math.max(0, Math.min(rows - 1, at.r + step[0]));
      look({ q: r === at.r ? at.q : queryIn(r), c: Math.max(0, Math.min(cols - 1, at.c + step[1])) });
    } else if (event.key === 'Enter' && view.hover) pinned = view.hover.q;
    else if (event.key === 'Escape') { canvas.blur(); look(null); } else return;
    event.preventDefault();
    event.stopPropagation();
  };
}
