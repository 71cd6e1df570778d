// The text of the first page, painted by the attention that each token receives.
import { paint, tone } from '../shared/colour.js';
import { $, say } from '../shared/dom.js';
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
  if (received) spans.forEach((span, p) => {
    paint(span, tone(state.scale, received[p], 1));
    span.title = text.flags[p] & PART ? say('part', { token: text.labels[p] }) : say('receives', { share: percent(received[p]) });
  });
  if (to < text.shown.length) $('text').append(' …');
  $('unfold').hidden = !long;
  $('unfold').textContent = unfolded ? say('less text') : say('whole text', { tokens: count(text.shown.length) });
  $('unfold').onclick = () => { unfolded = !unfolded; paintedText(); };
  const notes = [];
  if (received) {
    const most = received.reduce((best, w, p) => w > received[best] ? p : best, 0);
    notes.push(say('painted', { token: text.labels[most], share: percent(received[most]) }));
  }
  if (text.flags.some(flag => flag & UNKNOWN)) notes.push(say('unknown'));
  $('textnote').textContent = notes.join(say('join.sentences'));
}
