// What follows the chosen place: the likeliest tokens before and after, or of an encoder the similarities of the
// sentences.
import { paintElement, toneOf } from '../shared/colour.js';
import { $, el, translate } from '../shared/dom.js';
import { formatShort, formatSigned } from '../shared/numbers.js';
import { quoteToken } from '../shared/tokens.js';
import { formatSimilarity } from './sentence.js';
import { answers, chosenPlace, state } from './state.js';
import { labelOfPlace } from './words.js';

const cell = (tag, className, textContent, more = {}) => el(tag, { className, textContent, ...more });

export function drawNext() {
  const { model, change, words } = answers;
  const encoder = model.kind === 'encoder';
  const touched = state.heads.size > 0;
  const last = chosenPlace() === words.tokens.length - 1;
  $('hn').textContent = encoder
    ? translate('similarity')
    : last
      ? translate('next token')
      : translate('token after', { token: quoteToken(labelOfPlace(chosenPlace())) });
  $('divergence').textContent =
    !encoder && touched ? translate('divergence of next', { value: change.kl.toFixed(2) }) : '';
  $('answer').replaceChildren(...(encoder ? similarities() : [tokens()]));
}

function tokens() {
  const { next, others } = answers.change;
  const touched = state.heads.size > 0;
  const row = (name, { before, after }, className) => {
    const bars = el(
      'td',
      { className: 'bars' },
      el('i', { className: 'was', v: before }),
      ...(touched ? [el('i', { className: 'is', v: after })] : []),
    );
    return el(
      'tr',
      { className },
      cell('th', 'token', name, { scope: 'row' }),
      bars,
      cell('td', '', formatShort(before)),
      ...(touched
        ? [
            cell('td', '', formatShort(after)),
            cell('td', 'by', formatSigned((after - before) * 100, Math.abs(after - before) < 0.0995 ? 1 : 0) || '0'),
          ]
        : []),
    );
  };
  const heading = [
    ['token column', 'token'],
    ['share column', 'bars'],
    touched ? ['before', ''] : ['probability', 'wide'],
    ...(touched
      ? [
          ['after', ''],
          ['points', ''],
        ]
      : []),
  ].map(([key, className]) => cell('th', className, translate(key), { scope: 'col' }));
  return el(
    'table',
    { className: 'next' },
    el('caption', { className: 'vh', textContent: translate('next caption') }),
    el('thead', {}, el('tr', {}, ...heading)),
    el(
      'tbody',
      {},
      ...next.map(one => row(quoteToken(one.token), one, '')),
      row(translate('all others'), others, 'others'),
    ),
  );
}

// The cosine similarity of each pair of sentences before, after, and the change.
function similarities() {
  const {
    words: { sentences, similarity: before },
    change: { similarity: after },
  } = answers;
  const touched = state.heads.size > 0;
  const all = after.map((row, a) => row.map((value, b) => value - before[a][b]));
  const end = Math.max(0.05, ...all.flat().map(Math.abs));
  const matrix = (key, values, write, colour) =>
    el(
      'table',
      { className: 'alike' },
      el('caption', { textContent: translate(key) }),
      el('thead', {}, el('tr', {}, el('td'), ...sentences.map((_, n) => cell('th', '', n + 1, { scope: 'col' })))),
      el(
        'tbody',
        {},
        ...values.map((row, a) =>
          el(
            'tr',
            {},
            cell('th', '', a + 1, { scope: 'row' }),
            ...row.map((value, b) => {
              const made = cell('td', '', a === b ? '' : write(value));
              if (a !== b) colour(made, value);
              return made;
            }),
          ),
        ),
      ),
    );
  const share = (made, value) => paintElement(made, toneOf('linear', value, 1));
  const apart = (made, value) => paintElement(made, 0.5 + value / end / 2, 'apart');
  const list = el(
    'ol',
    { className: 'sentences' },
    ...sentences.map(sentence => el('li', {}, el('bdi', { textContent: sentence }))),
  );
  return [
    el(
      'div',
      { className: 'matrices' },
      matrix('before', before, formatSimilarity, share),
      ...(touched
        ? [
            matrix('after', after, formatSimilarity, share),
            matrix('difference', all, value => formatSigned(value, 3) || '0', apart),
          ]
        : []),
    ),
    list,
  ];
}
