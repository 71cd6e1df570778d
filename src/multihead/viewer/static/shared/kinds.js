// How kinds of heads are shown: names and glyphs. A glyph is a small picture of the kind's pattern on 12 x 12 units. A
// head has one kind or more, the most specific first; the first one is its colour.
import { el, elementIn, translate } from './dom.js';
import { glyphOfKind, isOutlineKind, LEGEND, labelOfKind } from './kindlist.js';
import { svgElement } from './svg.js';

export const kindName = labelOfKind;

// Kinds that were measured on repeated random tokens are the outlines of those of the text.
const OUTLINE = { fill: 'none', stroke: 'currentColor', 'stroke-width': 1.4, transform: 'translate(.8 .8) scale(.87)' };
export const glyphElement = kind =>
  svgElement(
    'svg',
    { viewBox: '0 0 12 12', 'aria-hidden': 'true' },
    svgElement('path', { d: glyphOfKind(kind), ...(isOutlineKind(kind) ? OUTLINE : { fill: 'currentColor' }) }),
  );

export const kindNames = kinds => kinds.map(kindName).join(translate('join.comma'));
export const kindTag = kind => el('span', { className: 'kind', k: kind }, glyphElement(kind), kindName(kind));
export const kindTags = kinds => el('span', { className: 'kinds' }, ...kinds.map(kindTag));

// The name of a head’s first kind, and the glyphs of the others.
export const kindCell = kinds =>
  el(
    'span',
    { className: 'kind', k: kinds[0], title: kindNames(kinds) },
    glyphElement(kinds[0]),
    kindName(kinds[0]),
    ...kinds
      .slice(1)
      .map(kind =>
        el(
          'span',
          { className: 'also', k: kind },
          glyphElement(kind),
          el('span', { className: 'vh', textContent: kindName(kind) }),
        ),
      ),
  );

// What a head is besides its kind: the role of its layer in an encoder-decoder model, an alignment head of Whisper.
export const roleName = role => (role ? translate('role.' + role) : '');
export const alignmentTag = () =>
  el('span', { className: 'aligned', title: translate('alignment note'), textContent: translate('alignment') });
export const pathLine = (role, path) =>
  el('p', { className: 'path' }, ...(role ? [el('b', { textContent: roleName(role) }), ' '] : []), path);

// Buttons that filter by kind: `chosen` is the kind shown, or '' for all; choose(kind) is called with the next one.
// Where some kinds were measured on the text and others on repeated random tokens, a switch shows the ones or the
// others. Kinds that no head has are left out, except those in `kept`.
let onRepeats = false;
export function kindChips(box, kinds, chosen, choose, kept = []) {
  const counts = LEGEND.map(({ id }) => [id, kinds.filter(each => each.includes(id)).length]).filter(
    ([id, number]) => number || kept.includes(id),
  );
  const both = new Set(counts.map(([kind]) => isOutlineKind(kind))).size > 1;
  if (chosen) onRepeats = isOutlineKind(chosen);
  box.setAttribute('aria-label', translate('show kind'));
  const button = el('button', {
    className: 'btn',
    role: 'switch',
    'aria-checked': String(onRepeats),
    title: translate('on repeats why'),
    textContent: translate('on repeats'),
    onclick: () => {
      onRepeats = !onRepeats;
      choose('');
      elementIn(box, '[role=switch]').focus();
    },
  });
  box.replaceChildren(
    ...(both ? [button] : []),
    ...counts
      .filter(([kind]) => !both || isOutlineKind(kind) === onRepeats)
      .map(([kind, number]) => {
        const chip = el(
          'button',
          {
            className: 'chip',
            k: kind,
            'aria-pressed': String(chosen === kind),
            onclick: () => {
              choose(chosen === kind ? '' : kind);
              elementIn(box, `[data-kind=${kind}]`).focus();
            },
          },
          glyphElement(kind),
          kindName(kind) + ' ',
          el('i', { textContent: String(number) }),
        );
        chip.dataset.kind = kind;
        return chip;
      }),
  );
}
