// The page of one head: the distributions of its statistics, and its strongest examples painted over their texts.
import { paintElement, toneOf } from '../shared/colour.js';
import { $, el, NBSP, translate } from '../shared/dom.js';
import { kindTags } from '../shared/kinds.js';
import { isKnown } from '../shared/numbers.js';
import { withUnit } from '../shared/statistics.js';
import { CONTINUATION_MARK, PIECE_FLAG, quoteToken, SPECIAL_FLAG, setText } from '../shared/tokens.js';
import { CENSUS, columnOfStatistic, HEADS, IS_COMPARISON, kindsOf, summaryOf } from './record.js';

const writer = id =>
  columnOfStatistic(id).format === 'share'
    ? value => +(value * 100).toFixed(1) + NBSP + '%'
    : value => String(+value.toPrecision(3));

// The bars of a distribution. Their heights follow the square root of the share, so that rare values can be seen.
export function histogram(id, i, run) {
  const shares = CENSUS.runs[run].bars[id][i];
  if (!shares) return el('div', { className: 'bins' });
  const top = Math.max(...shares, 1e-9);
  return el(
    'div',
    { className: run ? 'bins b' : 'bins', 'aria-hidden': 'true' },
    ...shares.map(share => el('i', { v: Math.sqrt(share / top) })),
  );
}

export function distribution(id, i) {
  const ends = CENSUS.axes[id][i];
  const write = writer(id);
  return [
    ...CENSUS.runs.map((_, run) => histogram(id, i, run)),
    el('div', { className: 'ends' }, ...ends.map(end => el('span', { textContent: write(end) }))),
  ];
}

function card(id, i, opened, choose) {
  const one = summaryOf(id, 0, 'mean');
  const rest = ['median', 'p95', 'max'].map(of => translate(`of short.${of}`, { n: summaryOf(id, 0, of).text(i) }));
  const chance = new Set(CENSUS.runs.map((_, run) => summaryOf(id, run, 'mean').level(i)).filter(Boolean));
  const values = CENSUS.runs.map((_, run) => summaryOf(id, run, 'mean').text(i)).join(' → ');
  return el(
    'button',
    { className: 'card', 'aria-pressed': String(opened === id), onclick: () => choose(id) },
    el('b', {}, el('span', { textContent: withUnit(one) }), el('span', { textContent: values })),
    ...distribution(id, i),
    el('small', { textContent: [...chance, ...rest].join(translate('join.comma')) }),
  );
}

async function copy(command, box) {
  const code = el('code', { textContent: command });
  box.replaceChildren(code);
  try {
    await navigator.clipboard.writeText(command);
    box.append(el('span', { className: 'note', role: 'status', textContent: translate('copied') }));
  } catch {
    // a browser without a clipboard for files: the command is selected
    getSelection().selectAllChildren(code);
    box.append(el('span', { className: 'note', role: 'status', textContent: translate('select and copy') }));
  }
}

// One example: [value, place, position, key, token of the key, start, tokens, values].
function example([value, place, position, key, keyToken, start, tokens, values], id, run, i, rank) {
  const parts = tokens.map(token => CENSUS.words[token]);
  const special = tokens.map(token => CENSUS.special.includes(token));
  const one = summaryOf(id, run);
  const end = one.percentage ? 1 : Math.max(CENSUS.axes[id][i][1], 1e-9);
  const text = {
    shown: parts.map(part => (part === CONTINUATION_MARK ? '' : part.trimStart())),
    gaps: parts.map((part, p) => (part.startsWith(' ') || special[p] || special[p - 1] ? ' ' : '')),
    flags: parts.map((part, p) => (special[p] ? SPECIAL_FLAG : part === CONTINUATION_MARK ? PIECE_FLAG : 0)),
    labels: parts,
    tail: '',
  };
  const box = el('p', { className: 'reading' });
  const shown = el('div');
  const spans = setText(box, text, 0, parts.length);
  const write = writer(id);
  spans.forEach((span, p) => {
    if (!isKnown(values[p])) return;
    paintElement(span, toneOf('linear', values[p], end));
    span.title = write(values[p]);
  });
  spans[position - start]?.classList.add('on');
  spans[key - start]?.classList.add('key');
  const far =
    key >= 0 && !spans[key - start]
      ? [
          el('span', {
            textContent: translate('example key', { token: quoteToken(CENSUS.words[keyToken].trim()), position: key }),
          }),
        ]
      : [];
  const [before, between, after] = CENSUS.runs[run].command;
  const file = `example-${IS_COMPARISON ? 'AB'[run] + '-' : ''}${place.replace(':', '-')}.safetensors`;
  const command = `${before}${place}${between}${file}${after}${file}`;
  return el(
    'li',
    {},
    box,
    el(
      'div',
      { className: 'what' },
      el('b', { textContent: write(value) }),
      el('span', { textContent: translate('example place', { place, position }) }),
      ...far,
      el('button', {
        className: 'btn',
        textContent: translate('copy command'),
        'aria-label': translate('copy command of', { n: rank + 1 }),
        onclick: () => copy(command, shown),
      }),
    ),
    shown,
  );
}

function side(id, run, i) {
  const found = CENSUS.examples[run][id]?.[i] ?? [];
  const list = found.length
    ? el('ol', { className: 'examples' }, ...found.map((each, rank) => example(each, id, run, i, rank)))
    : el('p', { className: 'note', textContent: translate(CENSUS.kept ? 'no examples' : 'no room for examples') });
  return el(
    'div',
    {},
    ...(IS_COMPARISON ? [el('h3', { textContent: `${'AB'[run]}: ${CENSUS.runs[run].label}` })] : []),
    list,
  );
}

// Fill the page of head i with the examples of the statistic `opened`; choose(id) is called for those of another one.
export function showHead(i, opened, choose) {
  const label = withUnit(summaryOf(opened));
  const sides = el('div', { className: 'sides' }, ...CENSUS.runs.map((_, run) => side(opened, run, i)));
  sides.style.setProperty('--sides', String(CENSUS.runs.length));
  const apart = IS_COMPARISON
    ? [
        el('p', {
          className: 'sub',
          textContent: translate('apart', { n: CENSUS.divergence[''][i]?.toFixed(3) ?? '–' }),
        }),
      ]
    : [];
  const kinds = CENSUS.runs.flatMap((_, run) => {
    const named = kindsOf(i, run);
    return named.length ? [el('p', { className: 'sub' }, IS_COMPARISON ? `${'AB'[run]}: ` : '', kindTags(named))] : [];
  });
  $('head').replaceChildren(
    el(
      'div',
      { className: 'hh' },
      el(
        'div',
        {},
        el('a', { className: 'back', href: '#', textContent: translate('back to all') }),
        el('h1', { textContent: HEADS.long(i) }),
        el('p', { className: 'path', textContent: HEADS.layer(i).name }),
        ...kinds,
        ...apart,
      ),
    ),
    el(
      'section',
      {},
      el('h2', { textContent: translate('distributions') }),
      el('p', {
        className: 'note',
        textContent: translate(IS_COMPARISON ? 'distributions note two' : 'distributions note'),
      }),
      el('div', { className: 'cards' }, ...CENSUS.columns.map(one => card(one.id, i, opened, choose))),
    ),
    el(
      'section',
      {},
      el('h2', { textContent: translate('strongest', { label }) }),
      el('p', { className: 'note', textContent: translate('strongest note') }),
      sides,
    ),
  );
}
