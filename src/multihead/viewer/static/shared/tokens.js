// Lay out tokens as running text, one span per token, so that weights can colour it. tokens.py has escaped the tokens.
import { el } from './dom.js';

const MAX_CHARACTERS = 60;  // shown of one token
// Flags of a token, as in tokens.py.
export const SPECIAL = 1;
export const UNKNOWN = 2;
export const PART = 4;
export const FURTHER = '⤷';  // the name of a token that is a further part of a character

// A token joins the one before it if the text between them is empty and neither is special, as pieces of a word do.
const joins = (text, p) => p > 0 && p < text.shown.length && !text.gaps[p] && !((text.flags[p] | text.flags[p - 1]) & SPECIAL) && !/^\s|\s$/.test(text.shown[p - 1].slice(-1) + text.shown[p].slice(0, 1));

function span(text, p) {
  const flags = text.flags[p], token = text.shown[p];
  const made = el('bdi', { className: 'tk' + (flags & SPECIAL ? ' sp' : '') + (flags & UNKNOWN ? ' unk' : '') + (flags & PART ? ' part' : '') + (joins(text, p) ? ' joined' : '') + (joins(text, p + 1) ? ' joins' : ''), textContent: token.length > MAX_CHARACTERS ? token.slice(0, MAX_CHARACTERS) + '…' : token });
  made.dataset.p = p;
  return made;
}

// Fill a box with the tokens from `from` up to `to`; returns their spans.
export function setText(box, text, from, to) {
  const parts = [], spans = [];
  for (let p = from; p < to; p++) {
    if (text.gaps[p] && p > from) parts.push(text.gaps[p]);
    spans.push(span(text, p));
    parts.push(spans.at(-1));
  }
  if (to === text.shown.length && text.tail) parts.push(text.tail);
  box.replaceChildren(...parts);
  return spans;
}

// Make the tokens of a box buttons with one tab stop: choose(p) is called with the token that is clicked, or kept with Enter or
// Space; the arrow keys move. labels: the names of the tokens, because a line break has no text; chosen: the pressed one, or -1.
export function choosable(box, spans, labels, chosen, choose) {
  spans.forEach((span, p) => {
    span.classList.add('asks');
    span.classList.toggle('on', p === chosen);
    span.setAttribute('role', 'button');
    span.setAttribute('aria-label', labels[p]);
    span.setAttribute('aria-pressed', String(p === chosen));
    span.tabIndex = p === Math.max(0, chosen) ? 0 : -1;
  });
  box.onclick = event => { const span = event.target.closest('.asks'); if (span) choose(+span.dataset.p); };
  box.onkeydown = event => {
    const span = event.target.closest('.asks'), next = span && spans[spans.indexOf(span) + { ArrowRight: 1, ArrowLeft: -1 }[event.key]];
    if (next) { span.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    if (span && /^(Enter| )$/.test(event.key)) choose(+span.dataset.p);
    if (next || (span && /^(Enter| )$/.test(event.key))) { event.preventDefault(); event.stopPropagation(); }
  };
}

// Join a range of tokens into one string, for the lines of the context list.
export function phrase(text, from, to) {
  let line = '';
  for (let p = Math.max(0, from); p < Math.min(to, text.shown.length); p++) line += (line && text.gaps[p] ? ' ' : '') + text.shown[p];
  return line;
}
