// The two views of a page of heads: all of them, or one. A head is its index, -1 is none.
import { $ } from './dom.js';
import { keys } from './keys.js';

// Show the view of head i after that of head before; the window has its title.
export function showView(i, before, title) {
  $('all').hidden = i >= 0;
  $('head').hidden = i < 0;
  document.title = title + ' · multihead';
  if (i >= 0 && before < 0) scrollTo(0, 0);
}

// After all heads are drawn again: show the cell of head i, whose page was left, and move the focus there where keys are used.
export function returnTo(i) {
  const link = $('grid').querySelector(`[data-i="${i}"]`);
  if (keys.used) link.focus({ preventScroll: true });
  link.scrollIntoView({ block: 'center' });
}
