// Elements of a page and its texts. Strings become textContent, so that no token can act as markup.
import { root, texts } from './host.js';
import { colourOf } from './kindlist.js';

export const NBSP = '\u00a0';
export const $ = id => root.getElementById(id);
export const knows = key => Object.hasOwn(texts, key);

// Return a text of the page in its language, with its {placeholders} filled in.
export function translate(key, values = {}) {
  return (knows(key) ? texts[key] : key).replace(/\{(\w+)\}/g, (placeholder, name) =>
    Object.hasOwn(values, name) ? String(values[name]) : placeholder,
  );
}

// A note with a progress bar, until an answer arrives.
export const waitingNote = () =>
  el('p', { className: 'note waiting', role: 'status' }, el('progress'), ' ', translate('comparing'));

// Create an element with properties or attributes and children. k is a kind, whose colour it gets, v a share, 0 to 1.
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === 'k') made.style.setProperty('--k', colourOf(value));
    else if (name === 'v')
      made.style.setProperty('--v', Number.isFinite(value) ? Math.max(0, Math.min(1, value)).toFixed(4) : 0);
    else if (name in made && !name.startsWith('aria')) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
