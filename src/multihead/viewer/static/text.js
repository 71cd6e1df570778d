// A text set as reading matter, one span a token, so that weights can paint it.
function setReading(box, text, from, to, each) {
  const parts = [];
  for (let p = from; p < to; p++) {
    if (text.gaps[p] && p > from) parts.push(text.gaps[p]);
    const flags = text.flags[p];
    const span = el('span', { className: 'tk' + (flags & 1 ? ' sp' : '') + (flags & 2 ? ' unk' : '') + (flags & 4 ? ' part' : ''), textContent: text.shown[p] });
    span.dataset.p = p;
    each?.(span, p);
    parts.push(span);
  }
  if (to === text.shown.length && text.tail) parts.push(text.tail);
  box.replaceChildren(...parts);
}

// The text of the first page, painted by what each token receives.
const FOLDED = 180;
let unfolded = false;
function paintedText() {
  const text = D.texts.main, received = D.received, long = text.shown.length > FOLDED * 1.25;
  const to = long && !unfolded ? FOLDED : text.shown.length;
  setReading($('text'), text, 0, to, (span, p) => {
    if (!received) return;
    paint(span, received[p]);
    span.title = text.flags[p] & 4 ? say('part', { token: text.labels[p] }) : say('receives', { share: percent(received[p]) });
  });
  if (to < text.shown.length) $('text').append(' …');
  $('unfold').hidden = !long;
  $('unfold').textContent = unfolded ? say('less text') : say('whole text', { tokens: text.shown.length.toLocaleString(D.lang) });
  $('unfold').onclick = () => { unfolded = !unfolded; paintedText(); };
  const notes = [];
  if (received) {
    const most = received.reduce((best, w, p) => w > received[best] ? p : best, 0);
    notes.push(say('painted', { token: text.labels[most], share: percent(received[most]) }));
  }
  if (text.flags.some(flag => flag & 2)) notes.push(say('unknown'));
  $('textnote').textContent = notes.join(say('between sentences'));
}
