// A small overview of all heads, coloured by kind: the head in view is outlined, the second one dashed.
import { $, el, translate } from '../shared/dom.js';
import { kindNames } from '../shared/kinds.js';
import { state, toHead } from './permalink.js';

/** @import { Scene } from './head.js' */

let built = '';
export function drawNavigator(/** @type {Scene} */ scene) {
  const { record, i, j } = scene;
  const box = $('nav');
  const key = `${record.run} ${record.sample}`;
  if (built !== key) {
    built = key;
    const size = Math.max(4, Math.min(15, Math.floor(184 / record.widest) - 2));
    box.style.setProperty('--navw', size + 'px');
    box.style.setProperty('--navh', Math.max(4, Math.min(11, size, Math.floor(230 / record.layers.length) - 2)) + 'px');
    box.setAttribute('role', 'group');
    box.setAttribute('aria-label', translate('all heads', { n: record.heads.length }));
    box.replaceChildren(
      ...record.heads.map((head, n) => {
        const link = el('a', {
          k: record.kinds[n],
          'aria-label': record.named(n),
          title: `${record.short(n)}, ${kindNames(record.allKinds[n])}`,
          tabIndex: -1,
        });
        link.style.gridRow = String(record.layers.indexOf(record.layer(n)) + 1);
        link.style.gridColumn = String(head.h + 1);
        return link;
      }),
    );
  }
  const links = [...box.querySelectorAll('a')];
  links.forEach((link, n) => {
    link.href = toHead(record.run, record.sample, record.heads[n].l, record.heads[n].h);
    if (n === i) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
    link.tabIndex = n === i ? 0 : -1;
    link.classList.toggle('second', state.compare && n === j && scene.otherRecord === record);
  });
  const mark = links[i];
  const from = mark.offsetTop - box.offsetTop;
  if (from < box.scrollTop || from > box.scrollTop + box.clientHeight - 12) box.scrollTop = from - box.clientHeight / 2;
}
