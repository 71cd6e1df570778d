// The list of keys and words of a page: opened by `?` and by a button.
import { el, isTyped, translate } from './dom.js';
import { onKeyDown } from './host.js';

// Return a button that opens the list. lines: [keys, name of a text] for each key; words: [word, text] for each word to
// explain.
export function helpButton(lines, words) {
  const entries = pairs =>
    el('dl', {}, ...pairs.flatMap(([name, text]) => [el('dt', {}, ...[name].flat()), el('dd', { textContent: text })]));
  const keys = names => names.flatMap(name => [el('kbd', { textContent: name }), ' ']);
  const box = el('dialog', { className: 'help', 'aria-label': translate('help') });
  const close = el('button', { className: 'btn', textContent: translate('close'), onclick: () => box.close() });
  box.append(
    close,
    el('h2', { textContent: translate('keyboard') }),
    entries(lines.map(([names, key]) => [keys(names), translate(key)])),
    el('h2', { textContent: translate('words') }),
    entries(words),
  );
  const button = el('button', {
    className: 'btn',
    textContent: '?',
    title: translate('help'),
    'aria-label': translate('help'),
    'aria-haspopup': 'dialog',
    'aria-keyshortcuts': '?',
    onclick: () => open(),
  });
  const open = () => {
    if (!box.isConnected) button.after(box);
    if (!box.open) box.showModal();
  };
  box.addEventListener('keydown', event => event.stopPropagation()); // the page's keys rest while the list is open
  onKeyDown(event => {
    if (event.key !== '?' || isTyped(event) || !button.isConnected) return;
    event.preventDefault();
    open();
  });
  return button;
}

// The word "chance" and what it means, which the pages with statistics explain.
export const chanceWords = () => [translate('chance', { n: '' }).trim(), translate('chance why')];
