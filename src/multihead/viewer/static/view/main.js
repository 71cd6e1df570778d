// Start the page and show one of two views: all heads, or the map of one.
import { colourScheme, updatePalette } from '../shared/colour.js';
import { $, el, elementsIn, translate } from '../shared/dom.js';
import { root } from '../shared/host.js';
import { lastInput } from '../shared/keys.js';
import { kindName } from '../shared/kinds.js';
import { formatCount } from '../shared/numbers.js';
import { remember } from '../shared/remembered.js';
import { isolateToken } from '../shared/tokens.js';
import { pathOfSample, requestJson, server } from './api.js';
import { focusHead, retryMaps, returnToHead } from './grid.js';
import { leaveHead, redraw, sceneNow, showHead } from './head.js';
import { onResize, place, scrollToTop, setTitle, showMapLayout, windowSize } from './host.js';
import { returnToImportant } from './important.js';
import { listenToKeyboard } from './keyboard.js';
import { linkButton } from './link.js';
import { zoomBy, zoomOne, zoomWhole } from './moves.js';
import { showOpeningText } from './opening.js';
import { showOverview, showProgress } from './overview.js';
import { forgetPanels } from './panels.js';
import {
  markUnsaved,
  readAddress,
  saveAddress,
  saveAddressNow,
  state,
  toAll,
  toHead,
  writeAddress,
} from './permalink.js';
import { listenToPointer } from './pointer.js';
import { sampleOf, view } from './record.js';
import { rowsLoaded } from './rows.js';
import { listenToShare } from './share.js';
import { retryTiles } from './tiles.js';

/** @import { Sample } from './record.js' */

/** @type {Sample} */
let record = null;
/** @type {Sample} */
let other = null;
let turn = 0;
let drawnWidth = 0;
let begun = false;
const clampTo = (n, size) => Math.max(0, Math.min(size - 1, n));

// The address determines what is shown; invalid parts are corrected and are never an error.
async function route() {
  const mine = ++turn;
  const target = readAddress(place.read());
  const wasHead = state.a;
  markUnsaved();
  target.run = clampTo(target.run, view.runs.length);
  target.sample = clampTo(target.sample, view.runs[target.run].samples.length);
  const slow = setTimeout(() => {
    $('waiting').hidden = false;
  }, 400); // at first it is shown by the page's markup
  const shown = await sampleOf(target.run, target.sample).finally(() => {
    clearTimeout(slow);
    $('waiting').hidden = true;
  });
  const run = target.b ? clampTo(target.b.r, view.runs.length) : target.run;
  const second =
    target.compare && run !== target.run
      ? await sampleOf(run, clampTo(target.sample, view.runs[run].samples.length))
      : shown;
  if (mine !== turn) return;
  if (target.a) target.a = mended(shown, target.a);
  if (target.b) target.b = { r: run, ...mended(second, target.b) };
  if (target.compare && !target.b) target.b = secondFor(shown, target.a);
  target.usual = shown.keys > 512 ? 'log' : 'root';
  target.scale ||= target.usual;
  Object.assign(state, target);
  show(shown, second, wasHead);
}
const mended = (of, { l, h }) => {
  const layer = of.layers.reduce((best, one) => (Math.abs(one.number - l) < Math.abs(best.number - l) ? one : best));
  return { l: layer.number, h: clampTo(h, layer.heads) };
};

// The head to compare with at first: the same head of the next run, else a neighbour.
function secondFor(of, a) {
  if (view.runs.length > 1) return { r: (state.run + 1) % view.runs.length, ...a };
  const i = of.index(a.l, a.h);
  const { l, h } = of.heads[i + 1 < of.heads.length ? i + 1 : Math.max(0, i - 1)];
  return { r: state.run, l, h };
}

function show(shown, second, wasHead) {
  record = shown;
  other = second;
  const all = !state.a;
  $('all').hidden = !all;
  $('one').hidden = all;
  showMapLayout(!all);
  for (const part of elementsIn(root, '.ofmap')) part.hidden = all;
  $('home').href = toAll();
  $('skip').href = all ? '#grid' : '#map';
  bar();
  setTitle((all ? '' : record.short(record.index(state.a.l, state.a.h)) + ' · ') + record.title + ' · multihead');
  if (all) {
    leaveHead();
    showOverview(record, i => {
      place.go(toHead(record.run, record.sample, record.heads[i].l, record.heads[i].h));
    });
    if (wasHead && root.activeElement) {
      const i = Math.max(0, record.index(wasHead.l, wasHead.h));
      if (!returnToImportant(i, lastInput.used)) returnToHead(i, lastInput.used);
    }
    drawnWidth = windowSize().width;
    saveAddress();
  } else {
    if (!wasHead) scrollToTop();
    showHead(record, other);
    if (begun && lastInput.used && !wasHead && root.activeElement && $('map').offsetParent)
      $('map').focus({ preventScroll: true });
  }
  begun = true;
  watchLevels(record);
  if (other !== record) watchLevels(other);
}

// ---- the bar
const optioned = {};
function bar() {
  const names = view.runs.map(run => run.name);
  const head = !!state.a;
  fill('run', names.length > 1 && names, state.run);
  const { samples, texts } = view.runs[state.run];
  $('textpick').hidden = samples.length < 2;
  fill(
    'sample',
    samples.map(one =>
      translate(one.opening ? 'text n' : 'text without words', {
        n: formatCount(one.number),
        texts: formatCount(texts),
        opening: isolateToken(one.opening),
        tokens: formatCount(one.keys),
      }),
    ),
    state.sample,
  );
  $('textbefore').disabled = state.sample === 0;
  $('textafter').disabled = state.sample === samples.length - 1;
  $('facts').textContent = [
    names.length > 1 ? '' : record.name,
    ...(head && !(state.compare && names.length > 1)
      ? [translate('tokens n', { n: formatCount(record.keys) }), record.pattern]
      : []),
  ]
    .filter(Boolean)
    .join(translate('join.facts'));
  $('facts').title = $('facts').textContent;
  if (!head) return;
  $('back').textContent = translate('all heads', { n: formatCount(record.heads.length) });
  $('back').href = toAll();
  heads('heada', record, record.index(state.a.l, state.a.h));
  $('second').hidden = !state.compare;
  if (!state.compare) return;
  fill('runb', names.length > 1 && names, state.b.r);
  heads('headb', other, other.index(state.b.l, state.b.h));
}
function fill(id, names, chosen) {
  $(id).hidden = !names;
  if (!names) return;
  $(id).replaceChildren(...names.map((name, n) => el('option', { value: n, textContent: name })));
  $(id).value = chosen;
}
function heads(id, of, chosen) {
  const key = `${of.run} ${of.sample}`;
  if (optioned[id] !== key) {
    optioned[id] = key;
    $(id).replaceChildren(
      ...of.layers.map(layer =>
        el(
          'optgroup',
          { label: translate('layer n', { n: layer.number }) },
          ...Array.from({ length: layer.heads }, (_, h) => {
            const i = of.index(layer.number, h);
            return el('option', { value: i, textContent: `${of.short(i)}, ${kindName(of.kinds[i])}` });
          }),
        ),
      ),
    );
  }
  $(id).value = chosen;
}

// ---- actions of the buttons and keys; they stay on the same page, so the address is replaced
const go = hash => {
  if (hash === place.read() || (hash === '#' && !place.read())) route();
  else place.go(hash);
};
async function again(change) {
  Object.assign(state, change);
  saveAddressNow();
  await route();
}
const page = {
  record: () => record,
  setHead: async (i, then) => {
    await again({ a: { ...record.heads[i] } });
    then?.();
  },
  stepHead: by => page.setHead((record.index(state.a.l, state.a.h) + by + record.heads.length) % record.heads.length),
  // Another text of the record; the same place in it would be a place without a meaning.
  setText: async sample => {
    const to = clampTo(sample, view.runs[state.run].samples.length);
    if (to !== state.sample) await again({ sample: to, ...(state.a ? { x: 0, y: 0, n: 0, q: -1 } : {}) });
  },
  stepText: by => page.setText(state.sample + by),
  setSecond: (r, { l, h }) => again({ b: { r, l, h } }),
  flipSink: () => {
    state.masked = !state.masked;
    remember('without first', state.masked);
    if (state.a) {
      forgetPanels();
      redraw();
    } else showOpeningText();
  },
  flipCompare: () => again({ compare: !state.compare, b: state.b ?? secondFor(record, state.a) }),
  nextScale: () => {
    state.scale = state.scale === 'log' ? 'linear' : 'log';
    redraw();
  },
  toAll: () => go(toAll()),
};

function buttons() {
  $('heada').onchange = () => page.setHead(+$('heada').value);
  $('headb').onchange = () => page.setSecond(state.b.r, other.heads[+$('headb').value]);
  $('runb').onchange = () => page.setSecond(+$('runb').value, state.b);
  $('run').onchange = () => {
    const run = +$('run').value;
    return again({ run, sample: clampTo(state.sample, view.runs[run].samples.length) });
  };
  $('sample').onchange = () => page.setText(+$('sample').value);
  $('textbefore').onclick = () => page.stepText(-1);
  $('textafter').onclick = () => page.stepText(1);
  $('compare').onclick = page.flipCompare;
  $('sink').onclick = page.flipSink;
  $('zoomin').onclick = () => zoomBy(0.5);
  $('zoomout').onclick = () => zoomBy(2);
  $('zoomwhole').onclick = zoomWhole;
  $('zoomone').onclick = zoomOne;
  $('skip').onclick = event => {
    event.preventDefault();
    if (state.a) $('map').focus();
    else focusHead(0);
  };
  linkButton(saveAddressNow);
}

// ---- progress of the coarse levels of a long text, built while the page is open
const watched = new Set();
async function watchLevels(of) {
  if (watched.has(of) || of.progress.state === 'ready') return;
  watched.add(of);
  try {
    for (;;) {
      of.progress = await requestJson(`${pathOfSample(of.run, of.sample)}/levels`);
      if (of === record || of === other) {
        if (state.a) {
          if (of.coarse) retryTiles();
          redraw();
        } else {
          retryMaps(of);
          showProgress();
        }
      }
      if (of.progress.state !== 'building') return;
      await new Promise(done => setTimeout(done, 700));
    }
  } catch {
    watched.delete(of);
  } // the server stopped; watched again when a page is shown
}

server.changed = () => {
  $('gone').hidden = !server.gone;
  $('gone').replaceChildren(
    translate('gone') + ' ',
    el('code', { textContent: 'multihead view ' + view.runs.map(run => run.name).join(' ') }),
  );
  if (!server.gone) {
    retryTiles();
    if (record) {
      retryMaps(record);
      watchLevels(record);
    }
    redraw();
  }
};

// Show a head and a part of its map, as `inView` describes them; parts may be missing. Without a head, show all heads.
export function select(chosen) {
  if (!chosen) {
    go(toAll());
    return;
  }
  const { layer: l, head: h, queries, keys, query } = chosen;
  go(
    writeAddress({
      ...state,
      a: { l, h },
      x: keys?.[0] ?? 0,
      y: queries?.[0] ?? 0,
      n: keys ? keys[1] - keys[0] : 0,
      q: query ?? -1,
    }),
  );
}

async function start() {
  Object.assign(view, await requestJson('api/view'));
  $('link').hidden = !view.served;
  updatePalette();
  listenToKeyboard(page);
  buttons();
  listenToPointer();
  listenToShare();
  rowsLoaded.notify = redraw;
  place.listen(route);
  onResize(() => {
    if (sceneNow()) {
      forgetPanels();
      redraw();
    } else if (windowSize().width !== drawnWidth && record) {
      drawnWidth = windowSize().width;
      route();
    }
  });
  colourScheme.addEventListener('change', () => {
    updatePalette();
    forgetPanels();
    if (sceneNow()) redraw();
    else if (record) route();
  });
  await route();
}
start().catch(error => {
  $('waiting').hidden = true;
  $('gone').hidden = false;
  if (!server.gone) $('gone').textContent = error.message;
});
