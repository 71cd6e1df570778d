// The text of the page, coloured by the attention that each token receives.
import { paint, rootEnd, tone } from '../shared/colour.js';
import { $, el, translate } from '../shared/dom.js';
import { count, exact, percent } from '../shared/numbers.js';
import { remember, remembered } from '../shared/remembered.js';
import { PART, setText, UNKNOWN } from '../shared/tokens.js';
import { state } from './grid.js';
import { D } from './record.js';

const FOLDED = 180;
let unfolded = false;

// A button that leaves the first token out of the colours: it often receives more than all others together.
export const withoutFirst = () => remembered('without first');
export const firstButton = then => el('button', {
  className: 'btn first', textContent: translate('hide first'), title: translate('hide first why'), 'aria-pressed': String(withoutFirst()),
  onclick: event => { remember('without first', !withoutFirst()); event.currentTarget.setAttribute('aria-pressed', String(withoutFirst())); then(); },
});

// Where the scale of a text ends: at 100 %, or without the first token at the largest of the others, rounded up.
export function textEnd(weights, first = 0) {
  if (!withoutFirst()) return 1;
  let top = 0;
  for (let p = 0; p < weights.length; p++) if (p !== first && weights[p] > top) top = weights[p];
  return rootEnd(top, false);
}

export function paintedText() {
  const text = D.texts.main, received = D.received, long = text.shown.length > FOLDED, box = $('text');
  const to = long && !unfolded ? FOLDED : text.shown.length, hidden = withoutFirst() ? 0 : -1;
  const spans = setText(box, text, 0, to);
  box.classList.toggle('folded', long && !unfolded);
  // A text that scrolls can be reached with the keyboard.
  for (const [name, value] of Object.entries({ role: 'region', tabindex: '0', 'aria-label': translate('the text') })) if (long && unfolded) box.setAttribute(name, value); else box.removeAttribute(name);
  const end = received && rootEnd(Math.max(...received.filter((_, p) => p !== hidden)), false);
  if (received) spans.forEach((span, p) => {
    if (p !== hidden) paint(span, tone(state.scale, received[p], end));
    span.title = text.flags[p] & PART ? translate('part', { token: text.labels[p] }) : translate('receives', { share: percent(received[p]) });
  });
  const other = D.texts.other;
  $('othertitle').hidden = $('othertext').hidden = !other;
  if (other) { setText($('othertext'), other, 0, Math.min(other.shown.length, FOLDED)); if (other.shown.length > FOLDED) $('othertext').append(' …'); }
  if (to < text.shown.length) box.append(' …');
  $('unfold').hidden = !long;
  $('unfold').textContent = unfolded ? translate('less text') : translate('whole text', { tokens: count(text.shown.length) });
  $('unfold').onclick = () => { unfolded = !unfolded; paintedText(); };
  if (received && !$('under').querySelector('.first')) $('under').prepend(firstButton(paintedText));
  $('under').querySelector('.first')?.setAttribute('aria-pressed', String(withoutFirst()));
  const notes = [];
  if (received) {
    const top = received.reduce((best, w, p) => p !== hidden && (best < 0 || w > received[best]) ? p : best, -1);
    if (top >= 0) notes.push(translate('painted', { token: text.labels[top], share: percent(received[top]) }), ...(state.scale === 'log' ? [] : [translate('scale.end', { end: exact(end) })]));
    if (!hidden) notes.push(translate('first hidden', { token: text.labels[0], share: percent(received[0]) }));
  }
  if (text.flags.some(flag => flag & UNKNOWN)) notes.push(translate('unknown'));
  $('textnote').textContent = notes.join(translate('join.sentences'));
}
