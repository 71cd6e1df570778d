// The button below a list that shows its first items, then more of them or all.
import { translate } from './dom.js';
import { formatCount } from './numbers.js';

export const FIRST_ROWS = 12;
const MORE = 500;

// n: the length of the list; shown: how many items of it are shown; show(number) shows other items.
export function moreButton(button, n, shown, show) {
  const left = n > shown;
  button.hidden = n <= FIRST_ROWS;
  button.textContent = !left
    ? translate('show fewer')
    : n <= shown + MORE
      ? translate('show all', { n: formatCount(n) })
      : translate('show more', { n: MORE });
  button.onclick = () => show(left ? shown + MORE : FIRST_ROWS);
}
