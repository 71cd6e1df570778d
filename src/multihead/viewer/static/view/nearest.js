// List the heads with similar weights; computed on demand, because it may take seconds.
import { $, el, translate, waitingNote } from '../shared/dom.js';
import { glyphElement, kindName } from '../shared/kinds.js';
import { pathOfHead, requestJson } from './api.js';
import { toHead } from './permalink.js';

/** @import { Scene } from './head.js' */

let turn = 0;
export function showNearest(/** @type {Scene} */ scene) {
  const mine = ++turn;
  const { run, sample, l, h } = scene.a;
  const box = $('nearest');
  const find = async () => {
    box.replaceChildren(waitingNote());
    /** @type {NearestHead[] | NearestHeads} a server lists them, a file also has what it compared */
    const answer = await requestJson(`${pathOfHead(run, sample, l, h)}/nearest?top=5`).catch(error => ({
      every: 1,
      heads: [],
      error: error.message,
    }));
    if (mine !== turn) return;
    const { heads: found, every, error } = Array.isArray(answer) ? { heads: answer, every: 1, error: '' } : answer;
    if (!found.length) {
      box.replaceChildren(el('p', { className: 'note', textContent: error || translate('no nearest') }));
      return;
    }
    const rows = found.map(one => {
      const i = scene.record.index(one.layer, one.head);
      const kind = scene.record.kinds[i];
      return el(
        'li',
        {},
        el(
          'a',
          { href: toHead(run, sample, one.layer, one.head), k: kind },
          glyphElement(kind),
          scene.record.short(i),
          el('small', { textContent: kindName(kind) }),
          el('span', { className: 'num', textContent: one.divergence?.toFixed(3) ?? '–' }),
        ),
      );
    });
    box.replaceChildren(
      el('ul', { className: 'near' }, ...rows),
      el('p', {
        className: 'note',
        textContent: every > 1 ? translate('divergence every', { n: every }) : translate('divergence'),
      }),
    );
  };
  box.replaceChildren(el('button', { className: 'btn', textContent: translate('find nearest'), onclick: find }));
}
