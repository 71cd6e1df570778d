// Start the page of `multihead try`, and carry out what its reader asks for. A newer request cancels the older.
import { colourScheme, updatePalette } from '../shared/colour.js';
import { $, el, translate } from '../shared/dom.js';
import { helpButton } from '../shared/help.js';
import { frame, onKeyDown } from '../shared/host.js';
import { formatCount } from '../shared/numbers.js';
import { requestJson, server } from '../view/api.js';
import { onResize, place, setTitle, windowSize } from '../view/host.js';
import { linkButton } from '../view/link.js';
import { Sample, view } from '../view/record.js';
import { drawContinuation, stopContinuation, watchContinuation } from './continuation.js';
import { drawGrid, focusGrid, listenToGrid, paintGrid } from './heads.js';
import { drawMaps, repaintMaps } from './maps.js';
import { drawNext } from './next.js';
import { randomHeads, strongestHeads } from './presets.js';
import { showSentence } from './sentence.js';
import {
  answers,
  chosenPlace,
  commonFactor,
  copyState,
  nameOfHead,
  placeAsked,
  queryOfState,
  readAddress,
  saveAddress,
  state,
  undoSteps,
} from './state.js';
import { forgetEffects, isSweeping, runSweep, stopSweep, sweepButton } from './sweep.js';
import { drawWords, focusToken, listenToEditing } from './words.js';

let running = new AbortController();
let good = null;
let asked = '';
let random = -1;
let openEditor = () => {};
const lang = frame.lang.slice(0, 2);

function begin() {
  running.abort();
  stopSweep();
  stopContinuation();
  running = new AbortController();
  return running.signal;
}
const busy = on => {
  frame.dataset.busy = String(on);
  $('all').setAttribute('aria-busy', String(on));
};
function complain(message) {
  $('gone').hidden = !message;
  $('gone').textContent = message;
}

// Show another state: change has what differs from the one shown. Where the server refuses it, its sentence is shown
// and the page goes back to the last state that it answered. Returns whether it answered.
async function go(change, { step = true } = {}) {
  if (step) undoSteps.push(copyState());
  Object.assign(state, change);
  const signal = begin();
  busy(true);
  buttons();
  if (answers.record && state.text === asked) paintGrid();
  try {
    let { words, record } = answers;
    if (!record || state.text !== asked) {
      words = await requestJson(`api/text?${new URLSearchParams({ text: state.text, lang })}`, signal);
      record = new Sample(0, 0, words.grid);
    }
    const heads = new Map(
      [...state.heads].filter(([name]) => {
        const [l, h] = name.split('.').map(Number);
        return record.has(l, h);
      }),
    );
    const at = state.at < words.tokens.length - 1 ? state.at : -1;
    Object.assign(state, { heads, at });
    const answer = await requestJson(
      `api/change?${queryOfState({ lang, ...placeAsked(at < 0 ? words.tokens.length - 1 : at) })}`,
      signal,
    );
    const other = answers.record !== record || (good && good.at !== at);
    Object.assign(answers, { words, record, change: answer });
    asked = state.text;
    good = copyState();
    good.steps = undoSteps.length;
    complain('');
    if (other) forgetEffects();
    draw();
    await drawMaps(signal);
  } catch (error) {
    if (signal.aborted) return false;
    if (!server.gone) complain(error.message);
    if (!good) throw error;
    Object.assign(state, { ...good, heads: new Map(good.heads) });
    undoSteps.length = Math.min(undoSteps.length, good.steps);
    paintGrid();
    buttons();
    return false;
  } finally {
    if (!signal.aborted) busy(false);
  }
  return true;
}

function draw() {
  $('waiting').hidden = true;
  $('all').hidden = false;
  const grids = drawn !== answers.record;
  drawn = answers.record;
  showSentence();
  $('facts').textContent = [
    answers.model.title,
    translate('layers and heads', {
      layers: formatCount(answers.record.layers.length),
      heads: formatCount(answers.record.heads.length),
    }),
  ].join(translate('join.facts'));
  const reads = $('words').contains(document.activeElement);
  drawWords(choose);
  if (reads) focusToken(chosenPlace());
  drawNext();
  if (grids) drawGrid();
  else paintGrid();
  buttons();
  sweepButton();
  foot();
  saveAddress();
  drawContinuation();
}
let drawn = null;

const setHeads = heads => {
  random = -1;
  return go({ heads });
};
const allOn = () => {
  if (state.heads.size) setHeads(new Map());
};
function undo() {
  const before = undoSteps.pop();
  random = -1;
  if (before) go(before, { step: false });
}
function choose(p) {
  go({ at: p === answers.words.tokens.length - 1 ? -1 : p });
}

function buttons() {
  $('undo').disabled = !undoSteps.length;
  $('allon').disabled = !state.heads.size;
  if (!answers.record) return;
  const strongest = strongestHeads();
  const draws = randomHeads(Math.max(0, random));
  $('strongest').hidden = !strongest.length;
  $('strongest').textContent = translate('strongest heads', { n: strongest.length });
  $('random').hidden = !draws.length;
  $('random').textContent = translate('random', { n: draws.length });
}
const offMap = list => new Map(list.map(i => [nameOfHead(answers.record.heads[i]), 0]));

function foot() {
  const { seconds, layers, whole, why_whole: why } = answers.change;
  const factor = commonFactor();
  const ran = whole
    ? why
      ? translate('ran whole because', { why })
      : translate('ran whole')
    : !layers
      ? translate('ran none')
      : layers[0] === layers[1]
        ? translate('ran layer', { n: layers[0] })
        : translate('ran layers', { from: layers[0], to: layers[1] });
  const by = !state.heads.size
    ? []
    : [
        factor === 0
          ? translate('by zero')
          : factor === null
            ? translate('by factors')
            : translate('by factor', { factor }),
      ];
  $('foot').textContent = [
    translate('took', { seconds: seconds.toFixed(seconds < 0.1 ? 2 : 1) }),
    ran,
    answers.model.dtype,
    ...by,
  ].join(translate('join.parts'));
}

function keyboard() {
  onKeyDown(event => {
    if (event.target.matches('textarea, select, input:not([type=range])') || event.altKey || !answers.record) return;
    const control = event.ctrlKey || event.metaKey;
    const does = control
      ? { z: undo }[event.key]
      : { x: allOn, e: openEditor, Escape: isSweeping() ? () => $('sweep').click() : undefined }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  });
  $('helps').append(
    helpButton(
      [
        [['←', '→', '↑', '↓'], 'does.walk'],
        [['Enter'], 'does.toggle'],
        [['⇧', 'Enter'], 'does.layer'],
        [['Ctrl', 'Z'], 'does.undo'],
        [['x'], 'does.on'],
        [['e'], 'does.edit'],
        [['Ctrl', 'Enter'], 'does.apply'],
        [['Esc'], 'does.stop'],
        [['?'], 'press.help'],
      ],
      ['off', 'loss', 'divergence', 'maps', 'effect', 'nat'].map(name => [
        translate('word.' + name),
        translate('means.' + name),
      ]),
    ),
  );
}

function listenAll() {
  listenToGrid({ set: setHeads });
  openEditor = listenToEditing(text => go({ text, at: -1 }));
  $('undo').onclick = undo;
  $('allon').onclick = allOn;
  $('strongest').onclick = () => setHeads(offMap(strongestHeads()));
  // Again for the next draw that differs; each is the same for everybody.
  $('random').onclick = () => {
    const shown = String([...state.heads.keys()]);
    const drawn = n => offMap(randomHeads(n));
    let next = random + 1;
    while (next < random + 20 && String([...drawn(next).keys()]) === shown) next++;
    setHeads(drawn(next));
    random = next;
  };
  $('sweep').onclick = () =>
    runSweep(stopContinuation, error => {
      if (!server.gone) complain(error.message);
    }).then(drawContinuation);
  linkButton(saveAddress);
  $('home').onclick = event => {
    event.preventDefault();
    allOn();
  };
  $('skip').onclick = event => {
    event.preventDefault();
    focusGrid();
  };
  const other = lang === 'zh' ? 'en' : 'zh';
  Object.assign($('language'), {
    textContent: new Intl.DisplayNames(other, { type: 'language' }).of(other),
    hreflang: other,
    lang: other,
  });
  $('language').onclick = event => {
    event.preventDefault();
    saveAddress();
    location.search = '?lang=' + other;
  };
  place.listen(() => {
    const next = readAddress(place.read());
    go({ ...next, text: next.text || answers.model.text });
  });
  colourScheme.addEventListener('change', () => {
    updatePalette();
    if (answers.change) {
      drawn = null;
      draw();
      repaintMaps();
    }
  });
  let width = windowSize().width;
  onResize(() => {
    if (windowSize().width !== width && answers.record) drawGrid();
    width = windowSize().width;
  });
}

server.alive = 'api/model';
server.changed = () => {
  complain(server.gone ? translate('gone') : '');
  if (server.gone) $('gone').append(' ', el('code', {}, `multihead try ${answers.model?.name ?? ''}`));
};

async function start() {
  updatePalette();
  /** @type {TrialModel} */
  const model = await requestJson('api/model');
  const wanted = readAddress(place.read());
  answers.model = model;
  view.lang = lang;
  view.runs = [{ name: model.name, title: model.title, keep: 'all', texts: 1, comparable: false, samples: [] }];
  setTitle(model.title + ' · multihead');
  $('facts').textContent = model.title;
  keyboard();
  listenAll();
  watchContinuation();
  await go({ ...wanted, text: wanted.text || model.text }, { step: false }).catch(error => {
    if (!wanted.text) throw error; // the text of a link may be too long for this model
    return go({ text: model.text, heads: new Map(), at: -1 }, { step: false }).then(() => complain(error.message));
  });
}
start().catch(error => {
  $('waiting').hidden = true;
  if (!server.gone) complain(error.message);
});
