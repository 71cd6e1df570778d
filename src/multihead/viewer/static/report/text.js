// The text of the page, coloured by the attention that each token receives.
import { paint, rootEnd, tone } from '../shared/colour.js';
import { $, translate } from '../shared/dom.js';
import { count, percent } from '../shared/numbers.js';
import { PART, setText, UNKNOWN } from '../shared/tokens.js';
import { state } from './grid.js';
import { D } from './record.js';

const FOLDED = 180;
let unfolded = false;
export function paintedText() {
  const text = D.texts.main, received = D.received, long = text.shown.length > FOLDED * 1.25;
  const to = long && !unfolded ? FOLDED : text.shown.length;
  const spans = setText($('text'), text, 0, to);
  const end = received && rootEnd(Math.max(...received), false);
  if (received) spans.forEach((span, p) => {
    paint(span, tone(state.scale, received[p], end));
    span.title = text.flags[p] & PART ? translate('part', { token: text.labels[p] }) : translate('receives', { share: percent(received[p]) });
  });
  const other = D.texts.other;
  $('othertitle').hidden = $('othertext').hidden = !other;
  if (other) { setText($('othertext'), other, 0, Math.min(other.shown.length, FOLDED)); if (other.shown.length > FOLDED) $('othertext').append(' …'); }
  if (to < text.shown.length) $('text').append(' …');
  $('unfold').hidden = !long;
  $('unfold').textContent = unfolded ? translate('less text') : translate('whole text', { tokens: count(text.shown.length) });
  $('unfold').onclick = () => { unfolded = !unfolded; paintedText(); };
  const notes = [];
  if (received) {
    const top = received.reduce((best, w, p) => w > received[best] ? p : best, 0);
    notes.push(translate('painted', { token: text.labels[top], share: percent(received[top]) }));
  }
  if (text.flags.some(flag => flag & UNKNOWN)) notes.push(translate('unknown'));
  $('textnote').textContent = notes.join(translate('join.sentences'));
}
