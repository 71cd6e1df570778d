// The panel of the text on the page of all heads, coloured by the attention that each token receives. A click on a
// token colours it by how much each token looks at that one, and lists the heads that do.
import { endOfRootScale, paintElement, toneOf } from '../shared/colour.js';
import { $, el, elementIn, NBSP, translate } from '../shared/dom.js';
import { glyphElement } from '../shared/kinds.js';
import { tickedRamp } from '../shared/legend.js';
import { formatCount, formatExact, formatPercent, formatShort } from '../shared/numbers.js';
import { isolateToken, makeChoosable, PIECE_FLAG, quoteToken, setText, UNKNOWN_FLAG } from '../shared/tokens.js';
import { pathOfSample, requestJson } from './api.js';
import { state, toCell, toHead } from './permalink.js';
import { view } from './record.js';

/** @import { Sample } from './record.js' */

const FOLDED = 180; // tokens of a long text
/** @type {Sample} */
let record = null;
let unfolded = false;
let chosen = -1;
let turn = 0;

const largest = (weights, hidden = -1) =>
  weights.reduce((best, w, p) => (p !== hidden && (best < 0 || w > weights[best]) ? p : best), -1);

export function showOpeningText(shown = record) {
  if (shown !== record) {
    unfolded = false;
    chosen = -1;
  }
  record = shown;
  turn++;
  const [text, ...others] = record.texts;
  const { received } = record;
  const shows = text && !record.pictures.length; // a text with pictures has a panel of its own
  $('sink').hidden = !shows || !received;
  $('sink').setAttribute('aria-pressed', String(state.masked));
  $('opening').hidden = !shows;
  if (!shows) return;
  const spans = layOut(text);
  const notes = received ? paintReceived(spans, text, received) : [translate('unpainted')];
  if (text.flags.some(flag => flag & UNKNOWN_FLAG)) notes.push(translate('unknown'));
  if (asks()) {
    makeChoosable($('words'), spans, translate('the text'), text.labels, chosen, p => {
      chosen = p === chosen ? -1 : p;
      showOpeningText();
      elementIn($('words'), `[data-p="${p}"]`).focus();
    });
    notes.push(translate('looks.why'));
  }
  $('textnote').textContent = notes.join(translate('join.sentences'));
  $('textnote').hidden = chosen >= 0;
  $('looking').hidden = chosen < 0;
  if (chosen >= 0) look(spans, text);
  otherText(others.find(each => each));
}

// Lay out the tokens, of a long text the first ones until it is unfolded; returns their spans.
function layOut(text) {
  const box = $('words');
  const long = text.shown.length > FOLDED;
  const to = long && !unfolded ? FOLDED : text.shown.length;
  const spans = setText(box, text, 0, to);
  if (to < text.shown.length) box.append(' …');
  box.classList.toggle('folded', long && !unfolded);
  // A text that scrolls can be reached with the keyboard.
  for (const [name, value] of Object.entries({ role: 'region', tabindex: '0', 'aria-label': translate('the text') }))
    if (long && unfolded && !asks()) box.setAttribute(name, value);
    else box.removeAttribute(name);
  $('unfold').hidden = !long;
  $('unfold').textContent = unfolded
    ? translate('less text')
    : translate('whole text', { tokens: formatCount(text.shown.length) });
  $('unfold').onclick = () => {
    unfolded = !unfolded;
    showOpeningText();
  };
  return spans;
}

// Paint each token by the attention that it receives; returns the notes on it.
function paintReceived(spans, text, received) {
  const hidden = state.masked ? 0 : -1;
  const top = largest(received, hidden);
  const end = endOfRootScale(received[top] ?? 0, false);
  spans.forEach((span, p) => {
    paintElement(span, p === hidden ? 0 : toneOf(state.scale, received[p], end));
    span.title =
      text.flags[p] & PIECE_FLAG
        ? translate('part of', { token: quoteToken(text.labels[firstPart(text, p)]) })
        : translate('receives', { share: formatPercent(received[p]) });
  });
  const notes = [];
  if (top >= 0) {
    notes.push(translate('painted', { token: quoteToken(text.labels[top]), share: formatPercent(received[top]) }));
    if (state.scale !== 'log') notes.push(translate('scale.end', { end: formatExact(end) }));
  }
  if (!hidden)
    notes.push(translate('first hidden', { token: quoteToken(text.labels[0]), share: formatPercent(received[0]) }));
  return notes;
}

// The other text of cross-attention, if there is one.
function otherText(other) {
  $('othertitle').hidden = !other;
  $('othertext').hidden = !other;
  if (!other) return;
  setText($('othertext'), other, 0, Math.min(other.shown.length, FOLDED));
  if (other.shown.length > FOLDED) $('othertext').append(' …');
}

// Whether the page can answer: it has weights of layers whose keys are this text.
const asks = () => view.looking && record.layers.some(layer => layer.rows && layer.keyText === 0);

// The first token of the character that a token is a part of.
function firstPart(text, p) {
  while (p > 0 && text.flags[p] & PIECE_FLAG && !text.shown[p]) p--;
  return p;
}

// A token that looks at the chosen one, and its weight: a link to the cell, with the position of the token if the text
// has it more than once.
function looker(l, h, { text, from }, q, w) {
  const p = q + from;
  const first = text ? firstPart(text, p) : p;
  const name = text?.labels[first] ?? String(q);
  const again = text && (first !== p || text.labels.indexOf(name) !== text.labels.lastIndexOf(name));
  const cell = el(
    'a',
    {
      href: toCell(record.run, record.sample, l, h, q, chosen),
      title: `${translate('query')} ${formatCount(q)} → ${translate('key')} ${formatCount(chosen)}`,
    },
    quoteToken(name),
    ...(again ? [el('sub', { textContent: formatCount(q) })] : []),
  );
  return el('span', { className: 'looker' }, cell, NBSP + formatShort(w));
}

// Show which heads look most at the chosen token, and paint each token by how much it looks at it.
async function look(spans, text) {
  const mine = turn;
  const box = $('looking');
  box.replaceChildren(el('progress'), ' ', translate('comparing'));
  /** @type {LookingHeads & { error?: string }} */
  const { heads, tokens, error } = await requestJson(
    `${pathOfSample(record.run, record.sample)}/looking?key=${chosen}`,
  ).catch(found => ({ heads: [], tokens: [], error: found.message }));
  if (mine !== turn) return;
  const back = el('button', {
    className: 'btn',
    textContent: translate('looks.back'),
    onclick: () => {
      chosen = -1;
      showOpeningText();
    },
  });
  if (!heads.length) {
    box.replaceChildren(el('p', { className: 'note', textContent: error ?? translate('looks.none') }), back);
    return;
  }
  const end = endOfRootScale(tokens[largest(tokens)], false);
  spans.forEach((span, p) => {
    paintElement(span, toneOf(state.scale, tokens[p], end));
    span.title = `${isolateToken(text.labels[p])} ${formatShort(tokens[p])}`;
  });
  box.replaceChildren(...lookingHeads(heads, quoteToken(text.labels[firstPart(text, chosen)]), end), back);
}

// The list of the heads that look at a token, below a scale that ends at `end`.
function lookingHeads(heads, token, end) {
  const notes = [
    translate('looks.note', { token }),
    ...(state.scale === 'log' ? [] : [translate('scale.end', { end: formatExact(end) })]),
    ...(record.layers.some(layer => layer.rows === 'largest') ? [translate('looks.stored')] : []),
  ];
  return [
    el(
      'div',
      { className: 'about' },
      el('h3', { textContent: translate('looks.title', { token }) }),
      tickedRamp(220, state.scale, end),
    ),
    el('ul', {}, ...heads.map(lookingHead)),
    el('p', { className: 'note', textContent: notes.join(translate('join.sentences')) }),
  ];
}

function lookingHead(/** @type {LookingHead} */ { layer, head, share, queries }) {
  const i = record.index(layer, head);
  const side = record.sides(record.numbered.get(layer)).query;
  return el(
    'li',
    {},
    el(
      'a',
      { href: toHead(record.run, record.sample, layer, head), k: record.kinds[i] },
      glyphElement(record.kinds[i]),
      record.short(i),
    ),
    el('span', { className: 'num', textContent: formatShort(share) }),
    el(
      'small',
      {},
      translate('looks.from') + ' ',
      ...queries.flatMap(([q, w], n) => [n ? translate('join.comma') : '', looker(layer, head, side, q, w)]),
    ),
  );
}
