// The text: its tokens, under each its loss and how it changed, and the chosen place; edited in place.
import { colourOfTone, toneOf } from '../shared/colour.js';
import { $, el, translate } from '../shared/dom.js';
import { markedRamp } from '../shared/legend.js';
import { formatCount, formatSigned, isKnown, roundUp } from '../shared/numbers.js';
import { makeChoosable, SPECIAL_FLAG, setText } from '../shared/tokens.js';
import { answers, chosenPlace, state } from './state.js';

const LEAST = 0.5; // nats, the end of the scale of changes where all are smaller

/** @type {TokenLayout & { tokens: TrialToken[] } | null} */
let layout = null;
let spans = [];

// Lay out the tokens of several sentences, each on its own line.
/**
 * @param {TrialToken[]} tokens
 * @returns {TokenLayout}
 */
function laidOut(tokens) {
  const starts = p => p > 0 && tokens[p].sentence !== tokens[p - 1].sentence;
  return {
    gaps: tokens.map((one, p) => (starts(p) ? '\n' : one.gap)),
    shown: tokens.map(one => one.text),
    labels: tokens.map(one => one.text),
    flags: tokens.map(one => (one.special ? SPECIAL_FLAG : 0)),
    tail: '',
  };
}

// The layout of the text that is shown: of a language model the viewer's, of an encoder one over all sentences.
function layoutOf({ model, words: { tokens }, record } = answers) {
  if (layout?.tokens !== tokens)
    layout = { tokens, ...(model.kind !== 'encoder' && record.texts[0] ? record.texts[0] : laidOut(tokens)) };
  return layout;
}
export const labelOfPlace = p => layoutOf().labels[p];

// How the loss of each token changed; null where it is unknown.
const changesOf = ({ words: { tokens }, change } = answers) =>
  tokens.map((one, p) => (isKnown(one.loss) && isKnown(change.losses?.[p]) ? change.losses[p] - one.loss : null));

// The names of the tokens for screen readers and titles: the token, its loss, the change of its loss.
const namesOf = (/** @type {TrialToken[]} */ tokens, /** @type {(number | null)[]} */ moved) =>
  tokens.map((one, p) =>
    [
      layout.labels[p],
      isKnown(one.loss) ? translate('loss of token', { loss: one.loss.toFixed(2) }) : '',
      moved[p] && state.heads.size ? translate('change of token', { change: formatSigned(moved[p], 2) }) : '',
    ]
      .filter(Boolean)
      .join(translate('join.comma')),
  );

export function drawWords(choose) {
  const { tokens } = answers.words;
  const box = $('words');
  layoutOf();
  spans = setText(box, layout, 0, tokens.length);
  const losses = tokens.map(one => one.loss).filter(isKnown);
  const top = roundUp(Math.max(LEAST, ...losses));
  const moved = changesOf();
  const end = roundUp(Math.max(LEAST, ...moved.filter(isKnown).map(Math.abs)));
  const labels = namesOf(tokens, moved);
  makeChoosable(box, spans, translate('the text'), labels, chosenPlace(), choose);
  spans.forEach((span, p) => {
    const { loss } = tokens[p];
    span.classList.toggle('judged', isKnown(loss));
    span.style.setProperty('--loss', isKnown(loss) ? colourOfTone('ink', toneOf('linear', loss, top)) : 'transparent');
    span.style.setProperty(
      '--change',
      moved[p] && state.heads.size ? colourOfTone('apart', 0.5 - moved[p] / end / 2) : 'transparent',
    );
    span.title = labels[p];
  });
  scrollToChosen(box);
  $('length').textContent = translate('tokens n', { n: formatCount(tokens.length) });
  $('losses').hidden = !losses.length;
  $('losses').replaceChildren(...lossLegends(top, end));
}

// Of a long text, the chosen place is in sight.
function scrollToChosen(box) {
  const at = spans[chosenPlace()];
  const from = at.offsetTop - box.offsetTop;
  if (from < box.scrollTop || from > box.scrollTop + box.clientHeight - 40) box.scrollTop = from - box.clientHeight / 2;
}

// The scales of the losses, which end at `top`, and of their changes, which end at `end`.
function lossLegends(top, end) {
  const nats = value => value + ' ' + translate('nats');
  const legend = (name, marks, lut) =>
    el('div', { className: 'measure' }, el('span', { textContent: translate(name) }), markedRamp(lut, 120, marks));
  const losses = [
    [0, '0'],
    [100, nats(top)],
  ];
  const changes = [
    [0, '+' + nats(end)],
    [50, '0'],
    [100, '−' + end],
  ];
  return [legend('loss', losses, 'ink'), ...(state.heads.size ? [legend('loss changed', changes, 'apart')] : [])];
}
export const focusToken = p => spans[p]?.focus();

// Edit the text: apply(text) is called with another one, and returns whether the model read it.
export function listenToEditing(apply) {
  let leaving = false;
  const close = () => {
    $('editing').hidden = true;
    $('words').hidden = $('losses').hidden = $('edit').hidden = false;
    $('losses').hidden = !$('losses').firstChild;
  };
  const open = () => {
    $('typed').value = state.text;
    $('typed').setAttribute('aria-describedby', 'editnote');
    $('editing').hidden = false;
    $('words').hidden = $('losses').hidden = $('edit').hidden = true;
    $('typed').rows = Math.max(
      3,
      Math.min(14, Math.ceil(state.text.length / 56) + (state.text.match(/\n/g) ?? []).length),
    );
    $('typed').focus();
  };
  const done = async () => {
    if ($('editing').hidden || leaving) return;
    const text = $('typed').value;
    if (text === state.text) {
      close();
      return;
    }
    leaving = true;
    const read = await apply(text);
    leaving = false;
    if (read) close();
  };
  $('edit').onclick = open;
  $('words').ondblclick = open;
  $('editing').onsubmit = event => {
    event.preventDefault();
    done();
  };
  $('leave').onclick = () => {
    close();
    $('edit').focus();
  };
  $('leave').onpointerdown = event => event.preventDefault(); // the text is not applied because it loses the focus
  $('typed').onblur = event => {
    if (!(event.relatedTarget instanceof Node && $('editing').contains(event.relatedTarget))) done();
  };
  $('typed').onkeydown = async event => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      await done();
      if ($('editing').hidden) $('edit').focus();
    }
    if (event.key === 'Escape') {
      event.preventDefault();
      $('leave').click();
    }
  };
  return open;
}
