// Lay out tokens as running text, one span per token, so that weights can colour it. tokens.py has escaped the tokens.
import { el, elementAround, translate } from './dom.js';

const MAX_CHARACTERS = 60; // shown of one token
// Flags of a token, as in tokens.py.
export const SPECIAL_FLAG = 1;
export const UNKNOWN_FLAG = 2;
export const PIECE_FLAG = 4;
export const CONTINUATION_MARK = '⤷'; // the name of a token that is a further part of a character

// The direction of words is that of their first letter.
const LETTER = /\p{L}/u;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;
export const directionOfWords = words => (RIGHT_TO_LEFT.test(LETTER.exec(words)?.[0] ?? '') ? 'rtl' : 'ltr');
const NAMED_CHARACTERS = /U\+[0-9A-F]{4}|<0x[0-9A-F]{2}>/g; // written by tokens.py, in Latin letters
// The direction of a whole text, without its special tokens; a part of it has the same.
export function directionOf(/** @type {TokenLayout & { direction?: string }} */ text) {
  text.direction ??= directionOfWords(
    text.shown
      .find((token, p) => !(text.flags[p] & SPECIAL_FLAG) && LETTER.test(token.replace(NAMED_CHARACTERS, '')))
      ?.replace(NAMED_CHARACTERS, '') ?? '',
  );
  return text.direction;
}

// A token for a title or a sentence: one that runs from right to left does not reorder the words around it.
export const isolateToken = token => (RIGHT_TO_LEFT.test(token) ? `\u2068${token}\u2069` : token);
export const quoteToken = token => translate('quoted', { token: isolateToken(token) });

// A token joins the one before it if the text between them is empty and neither is special, as pieces of a word do.
const joins = (/** @type {TokenLayout} */ text, /** @type {number} */ p) =>
  p > 0 &&
  p < text.shown.length &&
  !text.gaps[p] &&
  !((text.flags[p] | text.flags[p - 1]) & SPECIAL_FLAG) &&
  !/^\s|\s$/.test(text.shown[p - 1].slice(-1) + text.shown[p].slice(0, 1));

// A special token is no part of the sentence around it; the others are ordered as the text is, so that the words of a
// sentence in the other direction, and the pieces of a number, stay in their order.
function span(/** @type {TokenLayout} */ text, /** @type {number} */ p) {
  const flags = text.flags[p];
  const token = text.shown[p];
  const made = el(flags & SPECIAL_FLAG ? 'bdi' : 'span', {
    className:
      'tk' +
      (flags & SPECIAL_FLAG ? ' sp' : '') +
      (flags & UNKNOWN_FLAG ? ' unk' : '') +
      (flags & PIECE_FLAG ? ' part' : '') +
      (joins(text, p) ? ' joined' : '') +
      (joins(text, p + 1) ? ' joins' : ''),
    textContent: token.length > MAX_CHARACTERS ? token.slice(0, MAX_CHARACTERS) + '…' : token,
  });
  made.dataset.p = String(p);
  return made;
}

// Fill a box with the tokens from `from` up to `to`, in the direction of the whole text; returns their spans.
export function setText(box, /** @type {TokenLayout} */ text, from, to) {
  box.dir = directionOf(text);
  const parts = [];
  const spans = [];
  for (let p = from; p < to; p++) {
    if (text.gaps[p] && p > from) parts.push(text.gaps[p]);
    spans.push(span(text, p));
    parts.push(spans.at(-1));
  }
  if (to === text.shown.length && text.tail) parts.push(text.tail);
  box.replaceChildren(...parts);
  return spans;
}

// Make a box a list of its tokens with one tab stop, of which one may be chosen: choose(p) is called with the token
// that is clicked, or kept with Enter or Space; the arrow keys, Home and End move. label: the name of the list; labels:
// the names of the tokens, because a line break has no text; chosen: the chosen one, or -1.
export function makeChoosable(box, spans, label, labels, chosen, choose) {
  for (const [name, value] of Object.entries({
    role: 'listbox',
    'aria-orientation': 'horizontal',
    'aria-label': label,
  }))
    box.setAttribute(name, value);
  spans.forEach((span, p) => {
    span.classList.add('asks');
    span.classList.toggle('on', p === chosen);
    span.setAttribute('role', 'option');
    span.setAttribute('aria-label', labels[p]);
    span.setAttribute('aria-selected', String(p === chosen));
    span.tabIndex = p === Math.max(0, chosen) ? 0 : -1;
  });
  box.onclick = event => {
    const span = elementAround(event, '.asks');
    if (span) choose(+span.dataset.p);
  };
  box.onkeydown = event => {
    const span = elementAround(event, '.asks');
    const place = spans.indexOf(span);
    const next =
      span &&
      spans[
        {
          ArrowRight: place + 1,
          ArrowLeft: place - 1,
          ArrowDown: place + 1,
          ArrowUp: place - 1,
          Home: 0,
          End: spans.length - 1,
        }[event.key]
      ];
    if (next) {
      span.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
    if (span && /^(Enter| )$/.test(event.key)) choose(+span.dataset.p);
    if (next || (span && /^(Enter| )$/.test(event.key))) {
      event.preventDefault();
      event.stopPropagation();
    }
  };
}

// Join a range of tokens into one string, for the lines of the context list.
export function joinTokens(text, from, to) {
  let line = '';
  for (let p = Math.max(0, from); p < Math.min(to, text.shown.length); p++)
    line += (line && text.gaps[p] ? ' ' : '') + text.shown[p];
  return line;
}
