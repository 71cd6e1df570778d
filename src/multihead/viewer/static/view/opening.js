// The panel of the text on the page of all heads, coloured by the attention that each token receives.
import { paint, rootEnd, tone } from '../shared/colour.js';
import { $, el, translate } from '../shared/dom.js';
import { count, exact, percent } from '../shared/numbers.js';
import { PART, setText, UNKNOWN } from '../shared/tokens.js';
import { state } from './permalink.js';

const FOLDED = 180;  // tokens of a long text
let record = null, unfolded = false;

// Of the weights on the tokens: their colours (without a hidden first token), and where the scale ends.
function painted(spans, weights, hidden) {
  const end = rootEnd(weights.reduce((top, w, p) => p !== hidden && w > top ? w : top, 0), false);
  spans.forEach((span, p) => paint(span, p === hidden ? 0 : tone(state.scale, weights[p], end)));
  return end;
}

export function openingText(shown = record) {
  if (shown !== record) unfolded = false;
  record = shown;
  const { texts: [text, ...others], received } = record, box = $('words');
  $('sink').hidden = !text || !received;
  $('sink').setAttribute('aria-pressed', String(state.masked));
  $('opening').hidden = !text;
  if (!text) return;
  const long = text.shown.length > FOLDED, to = long && !unfolded ? FOLDED : text.shown.length, hidden = state.masked ? 0 : -1, spans = setText(box, text, 0, to);
  if (to < text.shown.length) box.append(' …');
  box.classList.toggle('folded', long && !unfolded);
  // A text that scrolls can be reached with the keyboard.
  for (const [name, value] of Object.entries({ role: 'region', tabindex: '0', 'aria-label': translate('the text') })) if (long && unfolded) box.setAttribute(name, value); else box.removeAttribute(name);
  $('unfold').hidden = !long;
  $('unfold').textContent = unfolded ? translate('less text') : translate('whole text', { tokens: count(text.shown.length) });
  $('unfold').onclick = () => { unfolded = !unfolded; openingText(); };
  const notes = [];
  if (received) {
    const end = painted(spans, received, hidden), top = received.reduce((best, w, p) => p !== hidden && (best < 0 || w > received[best]) ? p : best, -1);
    spans.forEach((span, p) => { span.title = text.flags[p] & PART ? translate('part of', { token: text.labels[p] }) : translate('receives', { share: percent(received[p]) }); });
    if (top >= 0) notes.push(translate('painted', { token: text.labels[top], share: percent(received[top]) }), ...(state.scale === 'log' ? [] : [translate('scale.end', { end: exact(end) })]));
    if (!hidden) notes.push(translate('first hidden', { token: text.labels[0], share: percent(received[0]) }));
  }
  if (text.flags.some(flag => flag & UNKNOWN)) notes.push(translate('unknown'));
  $('textnote').textContent = notes.join(translate('join.sentences'));
  const other = others.find(each => each);
  $('othertitle').hidden = $('othertext').hidden = !other;
  if (other) { setText($('othertext'), other, 0, Math.min(other.shown.length, FOLDED)); if (other.shown.length > FOLDED) $('othertext').append(' …'); }
}
