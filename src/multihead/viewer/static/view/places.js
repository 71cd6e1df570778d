// The panel of pictures on the page of all heads: on the left what a head reads of a picture for a query, on the right
// the same in every head. A patch, the class token and each word can be the query; a word that the model has generated
// stands for the row that predicted it.
import { paintElement } from '../shared/colour.js';
import { $, choiceButtons, el, elementAround, elementIn, elementsIn, translate, waitingNote } from '../shared/dom.js';
import { drawHeads, widthOfLabels } from '../shared/headgrid.js';
import { HeadList } from '../shared/headlist.js';
import { root } from '../shared/host.js';
import { kindTags } from '../shared/kinds.js';
import { markedRamp } from '../shared/legend.js';
import { formatCount, formatPercent, formatShort } from '../shared/numbers.js';
import { makeChoosable, quoteToken, setText } from '../shared/tokens.js';
import { pathOfSample, requestFloats } from './api.js';
import { centreOf, drawSmall, drawView, MARKS, pictureFile, placeAt, placeBeside, toneOfTimes } from './heat.js';
import { windowSize } from './host.js';
import { KeptArrays } from './kept.js';
import { saveAddress, state, writeAddress } from './permalink.js';

/** @import { Sample } from './record.js' */
/** @import { Seen } from './heat.js' */

const LARGEST = 600; // pixels of the picture
const [LARGE, SMALL, GAP, FRAME] = [56, 40, 2, 2]; // pixels of that of a head, between two, and of its frame
const PADDING = 8; // pixels around the heads
const GROUPS = ['picture', 'class', 'prompt', 'answer words'];
const CLASSES = ['group0', 'group1', 'group2', 'group3'];
const [PICTURE, CLASS, , ANSWER] = GROUPS.keys();
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** @type {Sample} */
let record = null;
/** @type {PictureText} */
let part = null; // the text that is shown
/** @type {HeadList<LayerDescription>} */
let list = null; // the heads that read it
/** @type {Seen[]} */
let views = [];
let shown = 0; // index of the view
let cell = LARGE; // pixels of the picture of a head
let pointed = -1; // place in the view
let trouble = '';
let passing = _head => true;

const rows = new KeptArrays(
  256 << 20,
  one => one.byteLength,
  () => drawRows(),
);
// In cross-attention the queries are of another text, whose tokens have the numbers after those of the keys.
const crosses = () => part.keys < part.groups.length;
const isQuery = token => !crosses() || token >= part.keys;
const name = token =>
  token < part.keys ? record.texts[part.text].labels[token] : record.texts[part.queryText].labels[token - part.keys];
// The query whose row a token stands for, and the row that is shown: of a file the nearest one that it has.
const queryOf = token => token - Number(part.groups[token] === ANSWER);
function rowOf(token) {
  const query = queryOf(token);
  if (!part.stored || part.stored.includes(query)) return query;
  const view = views.find(each => each.at.has(token));
  const stored = part.stored.filter(each => view?.at.has(each));
  if (!stored.length) return -1;
  const [x, y] = centreOf(view, view.at.get(token));
  const far = each => {
    const [ox, oy] = centreOf(view, view.at.get(each));
    return Math.hypot(ox - x, oy - y);
  };
  return stored.reduce((best, each) => (far(each) < far(best) ? each : best));
}
const nameOf = row => `${record.run} ${record.sample} ${record.pictures.indexOf(part)} ${row}`;

// The weights of a head, of the mean of its layer (h is -1), on each key; null where the page does not have them.
function weightsOf({ l, h }) {
  const found = rows.get(nameOf(rowOf(state.q)));
  if (!found) return null;
  const keys = part.groups.length;
  const row = n => found.subarray(n * keys, (n + 1) * keys);
  if (found.length !== list.heads.length * keys) return h < 0 ? row(part.layers.indexOf(l)) : null;
  if (h >= 0) return row(list.index(l, h));
  const { heads } = list.numbered.get(l);
  const mean = new Float32Array(keys);
  for (let each = 0; each < heads; each++)
    for (const [k, w] of row(list.index(l, each)).entries()) mean[k] += w / heads;
  return mean;
}
// The same times an even spread over the keys that the query sees.
function timesOf(head) {
  const weights = weightsOf(head);
  const seen = weights?.reduce((number, w) => number + Number(!Number.isNaN(w)), 0);
  return weights?.map(w => w * seen) ?? null;
}
const largestKey = (values, among) =>
  among.reduce((best, key) => (best < 0 || !(values[key] <= values[best]) ? key : best), -1);
const patches = () => views.flatMap(view => view.keys);
const titleOf = ({ l, h }) => (h < 0 ? translate('picture.mean of', { layer: l }) : record.short(record.index(l, h)));

// Show the pictures of a record, if its layers have places in any.
export function showPictures(/** @type {Sample} */ of) {
  const same = of === record && part;
  record = of;
  $('places').hidden = !record.pictures.length;
  $('all').classList.toggle('pictured', record.pictures.length > 0);
  if (!record.pictures.length) return;
  if (!same) {
    const own = record.pictures.find(each => state.p && each.layers.includes(state.p.l));
    showText(own ?? record.pictures[0]);
  } else drawPanel();
}

function showText(/** @type {PictureText} */ text) {
  const known = part && text !== part && record.pictures.includes(part);
  part = text;
  list = new HeadList(record.layers.filter(layer => part.layers.includes(layer.number)));
  if (known || !(state.q >= 0)) state.q = part.opening;
  if (!state.p || !part.layers.includes(state.p.l) || state.p.h >= list.numbered.get(state.p.l).heads) state.p = null;
  views = part.views.map(view => {
    const size = record.images[view.image];
    const grey = new Image();
    grey.onload = () => drawPicture();
    if (size.source) grey.src = size.source;
    return { ...view, size, grey, at: new Map(view.keys.map((key, n) => [key, n])) };
  });
  shown = Math.max(
    0,
    views.findIndex(view => view.at.has(state.q)),
  );
  pointed = -1;
  drawPanel();
}

function drawPanel() {
  if (!(state.q >= 0 && state.q < part.groups.length && isQuery(state.q))) state.q = part.opening;
  choices();
  gridOfHeads();
  choose(state.q);
}

// Buttons for the texts of layers, and for the pictures and their views.
function choices() {
  const reader = ({ keys, groups }) =>
    keys < groups.length ? 'crosses' : groups.some(group => group > CLASS) ? 'words' : 'encoder';
  const layers = each => translate(`picture.${reader(each)} of`, { first: each.layers[0], last: each.layers.at(-1) });
  const pictures = new Set(views.map(view => view.picture)).size;
  const nameOfView = ({ picture, view }) =>
    [
      pictures > 1 ? translate('picture.number', { n: picture + 1 }) : '',
      views.some(one => one.picture === picture && one.view !== view)
        ? translate(view ? 'picture.tiles' : 'whole')
        : '',
    ].join(' ');
  const texts = record.pictures;
  $('placechoice').replaceChildren(
    ...(texts.length > 1
      ? [choiceButtons(translate('picture.texts'), texts.map(layers), texts.indexOf(part), n => showText(texts[n]))]
      : []),
    ...(views.length > 1
      ? [
          choiceButtons(translate('picture.views'), views.map(nameOfView), shown, n => {
            shown = n;
            pointed = -1;
            choices();
            drawRows();
          }),
        ]
      : []),
  );
}

// Choose a token: its row is requested, and drawn when it has arrived.
function choose(token) {
  state.q = token;
  trouble = '';
  const row = rowOf(token);
  const wanted = nameOf(row);
  rows.abortOthers(new Set([wanted]));
  if (row < 0) trouble = translate('picture.not stored', { token: quoteToken(name(token)) });
  else if (!rows.has(wanted) && !rows.requested.has(wanted)) {
    const address = `${pathOfSample(record.run, record.sample)}/pictures/${record.pictures.indexOf(part)}?query=${row}`;
    rows
      .request(wanted, async signal => (await requestFloats(address, signal)).values)
      .catch(error => {
        trouble = error.message;
        drawRows();
      });
  }
  drawRows();
  saveAddress();
}

function drawRows() {
  if (!part || $('places').hidden) return;
  const best = () => {
    const among = patches();
    const top = head => {
      const times = timesOf(head);
      return times ? times[largestKey(times, among)] : -1;
    };
    const means = part.layers.map(l => ({ l, h: -1 }));
    const heads = list.heads.filter(head => weightsOf(head));
    return (heads.length ? heads : means).reduce((most, head) => (top(head) > top(most) ? head : most));
  };
  if (!state.p && rows.has(nameOf(rowOf(state.q)))) {
    state.p = best();
    if (!patches().includes(state.q)) {
      const most = largestKey(timesOf(state.p), patches());
      shown = views.findIndex(view => view.at.has(most));
      choices();
    }
    saveAddress();
  }
  for (const button of elementsIn($('placeheads'), 'button')) {
    markHead(button);
    drawSmall(button.firstChild, views[shown], timesOf(headIn(button)), cell - 2 * FRAME);
  }
  drawPicture();
  drawWords();
}

function drawPicture() {
  if (!part || $('places').hidden) return;
  const times = state.p && timesOf(state.p);
  const view = views[shown];
  const query = view.at.get(rowOf(state.q)) ?? -1;
  drawView($('placed'), view, { times, query, pointed }, Math.min(LARGEST, $('placed').parentElement.clientWidth));
  $('placed').dataset.drawn = String(!!times);
  read(times);
}

// The sentence at the top, and the value at the pointer.
function read(times) {
  const weights = state.p && weightsOf(state.p);
  const notes = [];
  if (weights) {
    const most = largestKey(weights, patches());
    const group = part.groups[state.q];
    const token = { token: group > CLASS ? quoteToken(name(state.q)) : name(state.q) };
    const own = name(state.q) === '[CLS]' ? 'class token' : 'own';
    const kind = group === ANSWER ? 'answer' : group === CLASS ? own : '';
    const values = {
      head: titleOf(state.p),
      token: kind ? translate('picture.' + kind, token) : token.token,
      share: formatPercent(sharesOf(weights)[PICTURE]),
      patch: name(most),
    };
    const [{ rows: high, columns }] = views;
    const pictures = new Set(views.map(view => view.picture)).size;
    const cut = pictures > 1 ? 'cut several' : views.length > 1 || !high ? 'cut' : 'cut grid';
    const sizes = { rows: high, columns, pictures, patches: formatCount(patches().length) };
    const sentences = [
      translate('picture.' + cut, sizes),
      translate('picture.reads', values),
      translate(crosses() ? 'picture.choose word' : 'picture.choose'),
    ];
    $('lead').textContent = sentences.join(translate('join.sentences'));
    const row = rowOf(state.q);
    if (row !== queryOf(state.q)) notes.push(translate('picture.nearest', { ...token, patch: name(row) }));
    if (weights.length * list.heads.length !== rows.get(nameOf(row)).length) notes.push(translate('picture.means'));
    const { l, h } = state.p;
    const layer = list.numbered.get(l);
    const place = {
      ...state,
      a: { l, h },
      q: row - (crosses() ? part.keys : layer.queryStart),
      compare: false,
      x: 0,
      y: 0,
      n: 0,
    };
    $('placetitle').replaceChildren(
      h < 0
        ? titleOf(state.p)
        : el('a', { href: writeAddress(place), title: translate('picture.open') }, record.long(record.index(l, h))),
      ...(h < 0 ? [] : [kindTags(record.allKinds[record.index(l, h)])]),
    );
  }
  const key = views[shown].keys[pointed];
  const at = { token: key === undefined ? '' : name(key), times: '', share: '' };
  if (times && key !== undefined) {
    Object.assign(at, { times: times[key].toPrecision(3), share: formatShort(weights[key]) });
    const value = translate(Number.isNaN(times[key]) ? 'picture.masked' : 'picture.value', at);
    $('placeread').replaceChildren(el('data', { value: String(times[key]), textContent: value }));
  } else $('placeread').textContent = translate('picture.keys');
  $('placenote').replaceChildren(
    ...(trouble || weights ? [[trouble, ...notes].filter(Boolean).join(translate('join.sentences'))] : [waitingNote()]),
  );
}

const sharesOf = weights =>
  GROUPS.map((_, group) => weights.reduce((sum, w, k) => sum + (part.groups[k] === group && w > 0 ? w : 0), 0));

// The bar of the groups of keys, and the tokens outside of the pictures.
function drawWords() {
  const weights = state.p && weightsOf(state.p);
  const times = state.p && timesOf(state.p);
  const shares = weights ? sharesOf(weights) : [];
  const ofKeys = part.groups.slice(0, part.keys);
  const present = GROUPS.map((_, group) => group).filter(group => ofKeys.includes(group));
  $('placebar').replaceChildren(
    ...present.map(group => el('span', { className: CLASSES[group], v: shares[group] ?? 0 })),
  );
  $('placeshares').replaceChildren(
    ...present.map(group =>
      el(
        'span',
        { className: CLASSES[group] },
        `${translate('picture.' + GROUPS[group])} `,
        el('b', {
          textContent: weights ? formatPercent(shares[group]) : '–',
        }),
      ),
    ),
  );
  const placed = new Set(patches());
  const boxes = [];
  const spans = [];
  for (let from = 0; from < part.groups.length; ) {
    const drawn = placed.has(from);
    let to = from + 1;
    while (to < part.groups.length && to !== part.keys && placed.has(to) === drawn) to++;
    const box = el(
      'span',
      drawn ? { className: 'note', textContent: translate('picture.patches', { n: to - from }) } : {},
    );
    const first = from < part.keys ? 0 : part.keys;
    if (!drawn) {
      const text = record.texts[first ? part.queryText : part.text];
      for (const span of setText(box, text, from - first, to - first)) {
        span.dataset.p = String(Number(span.dataset.p) + first);
        spans.push(span);
      }
    }
    boxes.push(box, ' ');
    from = to;
  }
  const held = $('placewords').contains(root.activeElement);
  $('placewords').hidden = !spans.length;
  $('placewords').replaceChildren(...boxes);
  const tokenOf = span => Number(span.dataset.p);
  const queries = spans.filter(span => isQuery(tokenOf(span)));
  const tokens = queries.map(tokenOf);
  makeChoosable(
    $('placewords'),
    queries,
    translate('picture.words'),
    tokens.map(name),
    tokens.indexOf(state.q),
    token => {
      choose(token);
    },
  );
  for (const span of spans)
    if (times && times[tokenOf(span)] >= 0) paintElement(span, toneOfTimes(times[tokenOf(span)]));
  if (held) elementIn($('placewords'), '[tabindex="0"]')?.focus();
}

// ---- the heads
// The heads of a layer, after their mean, are on as many lines as they need.
function gridOfHeads() {
  const box = $('placeheads');
  const width = box.parentElement.clientWidth - PADDING - widthOfLabels(list);
  const lines = Math.ceil((list.widest + 1) / Math.max(1, Math.floor(width / (SMALL + GAP))));
  const across = Math.ceil((list.widest + 1) / lines);
  cell = Math.min(LARGE, Math.floor(width / across) - GAP);
  const shape = {
    cell,
    columns: 1,
    gap: GAP,
    perColumn: list.layers.length,
    phone: windowSize().width <= 640,
  };
  drawHeads(
    box,
    list,
    shape,
    i => headButton(list.heads[i]),
    (row, layer) => row.firstChild.after(el('span', { role: 'gridcell' }, headButton({ l: layer.number, h: -1 }))),
  );
  box.style.setProperty('--H', String(across));
  box.style.setProperty('--lines', String(lines));
  const mean = el('span', { className: 'ax', role: 'columnheader', textContent: translate('picture.mean') });
  elementIn(box, '.head > span').after(mean);
  fadePictures(passing);
}
function headButton(head) {
  const i = head.h < 0 ? -1 : record.index(head.l, head.h);
  const label = i < 0 ? titleOf(head) : record.named(i);
  const button = el(
    'button',
    { 'aria-label': label, title: label, ...(i < 0 ? {} : { k: record.kinds[i] }) },
    el('canvas'),
  );
  button.dataset.head = `${head.l} ${head.h}`;
  return button;
}
const headIn = button => {
  const [l, h] = button.dataset.head.split(' ').map(Number);
  return { l, h };
};
function markHead(button) {
  const { l, h } = headIn(button);
  const on = state.p?.l === l && state.p.h === h;
  button.setAttribute('aria-pressed', String(on));
  button.tabIndex = on ? 0 : -1;
}
export function fadePictures(passes) {
  passing = passes;
  for (const button of elementsIn($('placeheads'), 'button')) {
    const { l, h } = headIn(button);
    button.classList.toggle('dim', h >= 0 && !passes(record.index(l, h)));
  }
}
export const kindsInPictures = () => list?.heads.map(({ l, h }) => record.allKinds[record.index(l, h)]) ?? [];

function pick(button) {
  state.p = headIn(button);
  elementsIn($('placeheads'), 'button').forEach(markHead);
  drawPicture();
  drawWords();
  saveAddress();
}
$('placeheads').onclick = event => {
  const button = elementAround(event, 'button');
  if (button) pick(button);
};
$('placeheads').onkeydown = event => {
  const button = elementAround(event, 'button');
  const step = ARROWS[event.key];
  if (!button || !step) return;
  const lines = elementsIn($('placeheads'), '.gr:not(.head)').map(line => elementsIn(line, 'button'));
  const line = lines.findIndex(each => each.includes(button));
  const to = lines[line + step[1]]?.[Math.min(lines[line].indexOf(button) + step[0], lines[line + step[1]].length - 1)];
  event.preventDefault();
  if (!to || to === button) return;
  pick(to);
  to.focus();
};

// ---- the picture
const canvas = $('placed');
function point(place) {
  if (place === pointed) return;
  pointed = place;
  drawPicture();
}
const placeOf = event => {
  const { left, top, width, height } = canvas.getBoundingClientRect();
  const { size } = views[shown];
  return placeAt(
    views[shown],
    ((event.clientX - left) / width) * size.width,
    ((event.clientY - top) / height) * size.height,
  );
};
canvas.onpointermove = event => point(placeOf(event));
canvas.onpointerleave = () => point(-1);
function chooseAt(place) {
  const key = views[shown].keys[place];
  if (place >= 0 && isQuery(key)) choose(key);
}
canvas.onclick = event => chooseAt(placeOf(event));
canvas.onkeydown = event => {
  const view = views[shown];
  if (/^(Enter| )$/.test(event.key) && pointed >= 0) chooseAt(pointed);
  else if (ARROWS[event.key]) {
    const next = pointed < 0 ? (view.at.get(state.q) ?? 0) : placeBeside(view, pointed, ARROWS[event.key]);
    if (next >= 0) point(next);
  } else return;
  event.preventDefault();
};
$('placesave').onclick = () => {
  const caption = [titleOf(state.p), name(state.q)].join(' · ');
  const file = `${titleOf(state.p)} ${name(state.q)}`.replace(/[^\p{L}\p{N}]+/gu, '-');
  el('a', { href: pictureFile(canvas, caption, translate('picture.legend')), download: `${file}.png` }).click();
};
export function drawLegendOfPictures() {
  $('placescale').replaceChildren(
    markedRamp('ink', 220, MARKS),
    el('p', { className: 'note', textContent: translate('picture.legend') }),
  );
}
