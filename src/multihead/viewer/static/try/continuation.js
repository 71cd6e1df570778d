// The continuation of the text, with and without the heads: greedy tokens side by side, the words that differ marked.
import { $, el, elementIn, translate } from '../shared/dom.js';
import { directionOfWords } from '../shared/tokens.js';
import { requestLines } from '../view/api.js';
import { changeNamed } from './sentence.js';
import { answers, queryOfState, state } from './state.js';

const LAST = 4; // words
const SIDES = /** @type {const} */ (['before', 'after']);
let control = null;
let near = false;
let wanted = '';
let begun = '';

export function stopContinuation() {
  control?.abort();
  if (control) begun = '';
  control = null;
}

// The words of a text with the spaces before them.
const wordsOf = text => text.match(/\s*\S+/g) ?? [];

// Return which words of each side are not part of the longest sequence that both have.
function differing(a, b) {
  const same = (x, y) => x.trim() === y.trim();
  const table = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      table[i][j] = same(a[i], b[j]) ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
  const only = [new Set(a.keys()), new Set(b.keys())];
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (same(a[i], b[j])) {
      only[0].delete(i++);
      only[1].delete(j++);
    } else if (table[i + 1][j] >= table[i][j + 1]) i++;
    else j++;
  }
  return only;
}

// The last words of the text, which the continuation follows.
const ending = () => '… ' + wordsOf(state.text).slice(-LAST).join('').trim();

function show(before, after, whole) {
  const sides = [before, after].map(tokens => wordsOf(tokens.join('')));
  const only = whole && state.heads.size ? differing(...sides) : [new Set(), new Set()];
  SIDES.forEach((id, side) => {
    $(id).replaceChildren(
      el('span', { textContent: ending() }),
      ...sides[side].flatMap((word, n) =>
        only[side].has(n) ? [/^\s*/.exec(word)[0], el('mark', { textContent: word.trim() })] : [word],
      ),
    );
  });
  for (const id of SIDES) $(id).dir = directionOfWords(state.text);
  elementIn($('further'), '.both').classList.toggle('alone', !state.heads.size);
}

// Ask for the continuation of the state when its place is near the window.
export function drawContinuation() {
  $('further').hidden = answers.model.kind === 'encoder';
  if ($('further').hidden) return;
  $('aftername').textContent = state.heads.size ? changeNamed() : '';
  wanted = String(queryOfState());
  if (wanted !== begun) {
    show([], [], false);
    $('going').textContent = translate('continuation note');
  }
  ask();
}

async function ask() {
  if (!near || begun === wanted) return;
  stopContinuation();
  const mine = new AbortController();
  control = mine;
  const sides = { before: [], after: [] };
  begun = wanted;
  $('going').textContent = translate('continuation now');
  try {
    await requestLines(`api/continuation?${queryOfState()}`, mine.signal, (/** @type {ContinuationLine} */ line) => {
      if (mine !== control) return;
      sides.before.push(...(line.before ?? []));
      sides.after.push(...(line.after ?? []));
      show(sides.before, sides.after, !!line.done);
    });
    if (mine === control) $('going').textContent = translate('continuation note');
  } catch (error) {
    if (mine === control) $('going').textContent = error.message;
  } finally {
    if (mine === control) control = null;
  }
}

export function watchContinuation() {
  new IntersectionObserver(([{ isIntersecting }]) => {
    near = isIntersecting;
    if (near && wanted) ask();
  }).observe($('further'));
}
