// The keyboard: on the map it moves and zooms, among the heads it walks; `?` lists the keys.
import { SCALES } from '../shared/colour.js';
import { $, elementAround, elementsIn, isTyped, translate } from '../shared/dom.js';
import { chanceWords, helpButton } from '../shared/help.js';
import { onKeyDown } from '../shared/host.js';
import { focusHead, litHead } from './grid.js';
import { sceneNow } from './head.js';
import { isOutsidePage } from './host.js';
import { panView, pinQuery, stepCell, zoomBy, zoomOne, zoomWhole } from './moves.js';
import { state } from './permalink.js';

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export function listenToKeyboard(page) {
  onKeyDown(event => {
    if (isTyped(event)) return;
    const handled = onText(event, page) || (state.a ? onHead(event, page) : onAll(event, page));
    if (handled) event.preventDefault();
  });
  $('helps').append(
    helpButton(
      [
        [['+', '−'], 'press.zoom'],
        [['0'], 'press.whole'],
        [['1'], 'press.one'],
        [['←', '→', '↑', '↓'], 'press.move'],
        [['⇧', '←'], 'press.cell'],
        [['Enter'], 'press.keep'],
        [['[', ']'], 'press.heads'],
        [[',', '.'], 'press.texts'],
        [['l'], 'press.log'],
        [['s'], 'press.first key'],
        [['c'], 'press.compare'],
        [['/'], 'press.filter'],
        [['Esc'], 'press.back'],
        [['?'], 'press.help'],
      ],
      [
        ...['head', 'query', 'key'].map(name => [translate('term.' + name), translate('plain.' + name)]),
        ...Object.keys(SCALES).map(name => [translate('scale.' + name), translate('scale.hint.' + name)]),
        [translate('hide first'), translate('hide first why')],
        [translate('zoom one'), translate('zoom one why')],
        chanceWords(),
      ],
    ),
  );
}

function onText(event, page) {
  const by = { ',': -1, '.': 1 }[event.key];
  if (!by || !page.record()) return false;
  page.stepText(by);
  return true;
}

function onHead(event, page) {
  const walks = elementAround(event, '#nav');
  const reads = elementAround(event, '#text');
  const arrow = ARROWS[event.key];
  if (arrow && walks) {
    const { record, i } = sceneNow();
    const next = record.moved(i, event.key);
    if (next >= 0) page.setHead(next, () => elementsIn($('nav'), 'a')[next].focus());
    return true;
  }
  if (arrow && reads) return false;
  const maps = sceneNow()?.layer.blocks.length > 0;
  const does = {
    '[': () => page.stepHead(-1),
    ']': () => page.stepHead(1),
    l: () => page.nextScale(),
    s: () => page.flipSink(),
    c: () => page.flipCompare(),
    Escape: () => page.toAll(),
    ...(maps
      ? {
          '+': () => zoomBy(0.5),
          '=': () => zoomBy(0.5),
          '-': () => zoomBy(2),
          0: zoomWhole,
          1: zoomOne,
          ...(elementAround(event, '#map') || isOutsidePage(event.target) ? { Enter: pinQuery } : {}),
        }
      : {}),
  }[event.key];
  if (does) does();
  else if (arrow && maps) (event.shiftKey ? stepCell : panView)(...arrow);
  else return false;
  return true;
}

function onAll(event, page) {
  if (event.key === '/') {
    $('filter').focus();
    return true;
  }
  if (event.key === 's' && !$('sink').hidden) {
    page.flipSink();
    return true;
  }
  if (!elementAround(event, '#grid')) return false;
  const next = page.record().moved(litHead(), event.key);
  if (next === undefined) return false;
  if (next >= 0) focusHead(next);
  return true;
}
