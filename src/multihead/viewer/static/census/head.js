// The page of one head: the distributions of its statistics, and its strongest examples painted over their texts.
import { paint, tone } from '../shared/colour.js';
import { $, el, NBSP, translate } from '../shared/dom.js';
import { kindTags } from '../shared/kinds.js';
import { known } from '../shared/numbers.js';
import { withUnit } from '../shared/statistics.js';
import { FURTHER, PART, quoted, SPECIAL, setText } from '../shared/tokens.js';
import { columnOf, D, kindsOf, LIST, summarised, TWO } from './record.js';

const writer = id =>
  columnOf(id).format === 'share'
    ? value => +(value * 100).toFixed(1) + NBSP + '%'
    : value => String(+value.toPrecision(3));

// The bars of a distribution. Their heights follow the square root of the share, so that rare values can be seen.
export function bars(id, i, run) {
  const shares = D.runs[run].bars[id][i];
  if (!shares) return el('div', { className: 'bins' });
  const top = Math.max(...shares, 1e-9);
  return el(
    'div',
    { className: run ? 'bins b' : 'bins', 'aria-hidden': 'true' },
    ...shares.map(share => el('i', { v: Math.sqrt(share / top) })),
  );
}

export function distribution(id, i) {
  const ends = D.axes[id][i];
  const write = writer(id);
  return [
    ...D.runs.map((_, run) => bars(id, i, run)),
    el('div', { className: 'ends' }, ...ends.map(end => el('span', { textContent: write(end) }))),
  ];
}

function card(id, i, opened, choose) {
  const one = summarised(id, 0, 'mean');
  const rest = ['median', 'p95', 'max'].map(of => translate(`of short.${of}`, { n: summarised(id, 0, of).text(i) }));
  const chance = new Set(D.runs.map((_, run) => summarised(id, run, 'mean').level(i)).filter(Boolean));
  const values = D.runs.map((_, run) => summarised(id, run, 'mean').text(i)).join(' → ');
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
  const parts = tokens.map(token => D.words[token]);
  const special = tokens.map(token => D.special.includes(token));
  const one = summarised(id, run);
  const end = one.percentage ? 1 : Math.max(D.axes[id][i][1], 1e-9);
  const text = {
    shown: parts.map(part => (part === FURTHER ? '' : part.trimStart())),
    gaps: parts.map((part, p) => (part.startsWith(' ') || special[p] || special[p - 1] ? ' ' : '')),
    flags: parts.map((part, p) => (special[p] ? SPECIAL : part === FURTHER ? PART : 0)),
    labels: parts,
  };
  const box = el('p', { className: 'reading' });
  const shown = el('div');
  const spans = setText(box, text, 0, parts.length);
  const write = writer(id);
  spans.forEach((span, p) => {
    if (!known(values[p])) return;
    paint(span, tone('linear', values[p], end));
    span.title = write(values[p]);
  });
  spans[position - start]?.classList.add('on');
  spans[key - start]?.classList.add('key');
  const far =
    key >= 0 && !spans[key - start]
      ? [
          el('span', {
            textContent: translate('example key', { token: quoted(D.words[keyToken].trim()), position: key }),
          }),
        ]
      : [];
  const [before, between, after] = D.runs[run].command;
  const file = `example-${TWO ? 'AB'[run] + '-' : ''}${place.replace(':', '-')}.safetensors`;
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
  const found = D.examples[run][id]?.[i] ?? [];
  const list = found.length
    ? el('ol', { className: 'examples' }, ...found.map((each, rank) => example(each, id, run, i, rank)))
    : el('p', { className: 'note', textContent: translate(D.kept ? 'no examples' : 'no room for examples') });
  return el('div', {}, ...(TWO ? [el('h3', { textContent: `${'AB'[run]}: ${D.runs[run].label}` })] : []), list);
}

// Fill the page of head i with the examples of the statistic `opened`; choose(id) is called for those of another one.
export function headPage(i, opened, choose) {
  const label = withUnit(summarised(opened));
  const sides = el('div', { className: 'sides' }, ...D.runs.map((_, run) => side(opened, run, i)));
  sides.style.setProperty('--sides', String(D.runs.length));
  const apart = TWO
    ? [el('p', { className: 'sub', textContent: translate('apart', { n: D.divergence[''][i]?.toFixed(3) ?? '–' }) })]
    : [];
  const kinds = D.runs.flatMap((_, run) => {
    const named = kindsOf(i, run);
    return named.length ? [el('p', { className: 'sub' }, TWO ? `${'AB'[run]}: ` : '', kindTags(named))] : [];
  });
  $('head').replaceChildren(
    el(
      'div',
      { className: 'hh' },
      el(
        'div',
        {},
        el('a', { className: 'back', href: '#', textContent: translate('back to all') }),
        el('h1', { textContent: LIST.long(i) }),
        el('p', { className: 'path', textContent: LIST.layer(i).name }),
        ...kinds,
        ...apart,
      ),
    ),
    el(
      'section',
      {},
      el('h2', { textContent: translate('distributions') }),
      el('p', { className: 'note', textContent: translate(TWO ? 'distributions note two' : 'distributions note') }),
      el('div', { className: 'cards' }, ...D.columns.map(one => card(one.id, i, opened, choose))),
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
