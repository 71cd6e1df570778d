// The page of all heads: title and facts, the text, the findings, filter and kinds, the grid with its inspector, the
// table, the definitions.
import { $, choiceButtons, el, elementIn, NBSP, translate, waitingNote } from '../shared/dom.js';
import { explainNoMatch, passesFilter } from '../shared/filter.js';
import { colourOfKind, isOutlineKind } from '../shared/kindlist.js';
import { alignmentTag, kindChips, kindTags, pathLine } from '../shared/kinds.js';
import { blockNote, cellNote, scaleChoice, tickedRamp } from '../shared/legend.js';
import { formatCount } from '../shared/numbers.js';
import { numbersTable, showDefinitions } from '../shared/statistics.js';
import { showAllRows, showTable } from '../shared/table.js';
import { downloadLinks, pathOfSample, requestJson } from './api.js';
import { showChangedHeads } from './changed.js';
import {
  drawGridOfHeads,
  drawRow,
  fadeHeads,
  gridListeners,
  headLink,
  inspectedMap,
  litHead,
  mapBlocks,
  mapsMissing,
  redrawRows,
  scaleTop,
  thumbnailOf,
  topWeight,
} from './grid.js';
import { onPrint } from './host.js';
import { drawMost, fadeImportant, showImportant } from './important.js';
import { showOpeningText } from './opening.js';
import { saveAddress, state, toHead } from './permalink.js';
import { drawLegendOfPictures, fadePictures, kindsInPictures, showPictures } from './places.js';
import { view } from './record.js';

/** @import { Sample } from './record.js' */

/** @type {Sample} */
let record = null;
let goTo = () => {};
const asFiltered = i => ({
  ...record.heads[i],
  kinds: record.allKinds[i],
  path: record.layer(i).name,
  role: record.layer(i).role,
  aligned: record.aligned(i),
});
const marks = i => (record.aligned(i) ? [alignmentTag()] : []);
const passes = i =>
  (!state.kind || record.allKinds[i].includes(state.kind)) &&
  (!state.filter || passesFilter(state.filter, record.metrics, i, asFiltered(i)));
const why = () =>
  explainNoMatch(
    state.filter,
    record.metrics,
    record.unrecorded,
    record.heads.map((_, i) => asFiltered(i)),
  );
const statisticsTable = () =>
  showTable({
    kinds: record.allKinds,
    statistics: record.metrics,
    link: i => headLink(record, i),
    path: i => record.layer(i).name,
    passes,
    order: state.order,
    reorder: order => {
      state.order = order;
      saveAddress();
    },
    why: why(),
    marks,
  });

export function showOverview(shown, openHead) {
  record = shown;
  goTo = openHead;
  if (!record.legend.some(kind => kind.id === state.kind)) state.kind = '';
  $('title').textContent = record.title;
  $('lead').textContent = record.lead;
  $('rowoffacts').replaceChildren(
    ...record.facts.map(([label, value]) =>
      el('div', {}, el('dt', { textContent: label }), el('dd', { className: 'num', textContent: value })),
    ),
  );
  showOpeningText(record);
  showImportant(record, passes, goTo);
  drawLegendOfPictures();
  showPictures(record);
  $('filter').value = state.filter;
  chips();
  drawGridOfHeads(record, passes, goTo);
  gridListeners.pointed = inspect;
  let drawnTop = scaleTop();
  gridListeners.arrived = (of, l) => {
    if (of !== record) return;
    if (state.scale !== 'log' && scaleTop() !== drawnTop) redrawRows();
    else drawRow(l);
    drawnTop = scaleTop();
    scale();
    later();
  };
  inspect(litHead());
  scale();
  findings();
  statisticsTable();
  links();
  showChangedHeads(record);
  showDefinitions(
    $('defs'),
    [...record.metrics, ...(record.received ? [{ id: 'received', label: record.labels.received }] : [])],
    record.legend,
  );
  $('endsnote').hidden = !['previous_mass', 'next_mass'].every(id => record.metrics.some(one => one.id === id));
  $('foot').textContent = [view.foot, record.stored].filter(Boolean).join(translate('join.sentences'));
}

// The small maps of the inspector and the table arrive with their layer; redrawn once per burst of layers.
let waiting = 0;
function later() {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    inspect(litHead());
    drawMost();
    findings();
    statisticsTable();
  }, 150);
}

// Of several texts: what stands out over all of them, or on the chosen one; the maps are those of the chosen one.
/** @type {Map<number, FindingDescription[] | null>} */
const together = new Map(); // run -> the answer, or null until it has arrived
let ofAll = true;
function findingsOfAll(run) {
  if (!together.has(run)) {
    together.set(run, null);
    requestJson(`api/runs/${run}/texts`)
      .then(
        (/** @type {AllTextsDescription} */ answer) => together.set(run, answer.findings),
        () => together.delete(run),
      )
      .finally(() => {
        if (together.get(run) && record.run === run) findings();
      });
  }
  return together.get(run);
}
function choiceOfTexts(/** @type {RunDescription} */ { samples, texts }) {
  const n = formatCount(samples[record.sample].number);
  $('findsof').replaceChildren(
    choiceButtons(
      translate('findings'),
      [translate('over all texts', { texts: formatCount(texts) }), translate('on text', { n })],
      ofAll ? 0 : 1,
      place => {
        ofAll = place === 0;
        findings();
      },
    ),
    el('span', { className: 'note', textContent: ofAll ? translate('maps of text', { n }) : '' }),
  );
}

function findings() {
  const run = view.runs[record.run];
  const several = run.comparable && run.samples.length > 1;
  const found = several && ofAll ? findingsOfAll(record.run) : record.findings;
  $('findsec').hidden = false;
  $('findsof').hidden = !several;
  if (several) choiceOfTexts(run);
  if (!found) {
    $('finds').replaceChildren(el('li', {}, waitingNote()));
    return;
  }
  if (!found.length) {
    $('finds').replaceChildren(el('li', { textContent: translate('nothing stands out') }));
    return;
  }
  $('finds').replaceChildren(
    ...found.map(({ layer, head, sentence, count: number, over_texts: over }) => {
      const i = record.index(layer, head);
      const notes = [over?.sentence, number, isOutlineKind(record.kinds[i]) ? translate('map of text') : ''];
      const words = el(
        'p',
        {},
        el('b', { textContent: record.long(i) }),
        translate('join.sentences') + sentence,
        el('small', { textContent: notes.filter(Boolean).join(translate('join.parts')) }),
      );
      return el(
        'li',
        {},
        el(
          'a',
          { href: toHead(record.run, record.sample, layer, head) },
          el('span', { className: 'framed', k: record.kinds[i] }, thumbnailOf(record, i, 56)),
          words,
        ),
      );
    }),
  );
}

function chips() {
  const choose = kind => {
    state.kind = kind;
    narrowed();
    chips();
  };
  kindChips($('chips'), record.allKinds, state.kind, choose);
  if (record.pictures.length) kindChips($('placechips'), kindsInPictures(), state.kind, choose);
}

function narrowed() {
  fadeHeads(passes);
  fadeImportant(passes);
  if (record.pictures.length) fadePictures(passes);
  statisticsTable();
  saveAddress();
}
// Paper shows every row.
onPrint(all => {
  showAllRows(all);
  if (record) statisticsTable();
});

$('filter').oninput = () => {
  state.filter = $('filter').value;
  narrowed();
};

function scale() {
  const missing = mapsMissing(record);
  const change = name => {
    state.scale = name;
    redrawRows();
    scale();
    inspect(litHead());
    statisticsTable();
    saveAddress();
    elementIn($('scale'), '[aria-pressed=true]').focus();
  };
  const means = mapBlocks(record);
  const hides = record.layers.some(layer => layer.hides);
  const blind = record.layers.filter(layer => layer.blind).length;
  const notes = [
    translate('one scale'),
    ...new Set(means.map(blockNote)),
    ...(topWeight.single || state.scale === 'log' ? [] : [translate('scale.by means')]),
    hides
      ? translate(record.layers.every(layer => /^(full|causal)$/.test(layer.pattern)) ? 'hidden later' : 'hidden')
      : translate('nothing hidden'),
  ];
  if (record.heads.some((_, i) => record.aligned(i))) notes.push(translate('alignment note'));
  if (blind) notes.push(translate(blind === 1 ? 'blind queries in 1 layer' : 'blind queries', { layers: blind }));
  $('scale').hidden = missing;
  $('scale').replaceChildren(
    tickedRamp(Math.min(320, $('gridbox').clientWidth - 8), state.scale, scaleTop()),
    scaleChoice(state.scale, change),
    el('div', { className: 'note', textContent: notes.join(translate('join.sentences')) }),
  );
  const words = missing ? record.noMaps || translate('share absent') : buildingNote();
  $('gridstate').hidden = !words;
  $('gridstate').textContent = words;
}
export function buildingNote(of = record) {
  const { state: at, done, total, inMemory, error } = of.progress;
  if (error) return error;
  return at === 'building'
    ? translate(inMemory ? 'building in memory' : 'building', {
        share: Math.floor((100 * done) / Math.max(1, total)) + NBSP + '%',
      })
    : '';
}
export const showProgress = () => scale();

function inspect(i) {
  const { picture, block, top } = inspectedMap(record, i, 300);
  const note = block ? [el('p', { className: 'note', textContent: cellNote(block, state.scale, top) })] : [];
  const { l, h } = record.heads[i];
  const link = el('a', { href: toHead(record.run, record.sample, l, h), tabIndex: -1, 'aria-hidden': 'true' }, picture);
  link.classList.add('framed');
  link.style.setProperty('--k', colourOfKind(record.kinds[i]));
  $('insp').replaceChildren(
    link,
    ...note,
    el('h3', {}, record.long(i), kindTags(record.allKinds[i])),
    ...marks(i),
    pathLine(record.layer(i).role, record.layer(i).name),
    numbersTable(record.metrics, i),
  );
}

function links() {
  $('tablelinks').hidden = !view.served;
  $('tablelinks').replaceChildren(
    translate('download') + ' ',
    ...downloadLinks(`${pathOfSample(record.run, record.sample)}/table`),
  );
}
