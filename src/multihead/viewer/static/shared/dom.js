// Elements of a page and its texts. Strings become textContent, so that no token can act as markup.
import { root, texts } from './host.js';
import { colourOfKind } from './kindlist.js';

export const NBSP = '\u00a0';

/**
 * The element of an id; which ids there are, and their elements, is known from the templates.
 * @template {keyof ElementsById} Id
 * @param {Id} id
 * @returns {ElementsById[Id]}
 */
export const $ = id => /** @type {any} */ (root.getElementById(id)); // the host of a page finds any element

/**
 * The first element in a box that a selector matches.
 * @param {ParentNode} box
 * @param {string} selector
 * @returns {HTMLElement}
 */
export const elementIn = (box, selector) => box.querySelector(selector);

/**
 * All elements in a box that a selector matches.
 * @param {ParentNode} box
 * @param {string} selector
 * @returns {HTMLElement[]}
 */
export const elementsIn = (box, selector) => [...box.querySelectorAll(selector)].map(each => /** @type {any} */ (each));

/**
 * The nearest element at or around the place of an event that a selector matches.
 * @param {Event} event
 * @param {string} selector
 * @returns {HTMLElement | null}
 */
export const elementAround = (event, selector) =>
  event.target instanceof Element ? event.target.closest(selector) : null;

// The link that a click opens in this page, which the caller does; null for one that opens another tab.
export function takeLink(event) {
  const link = elementAround(event, 'a');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return null;
  event.preventDefault();
  return link;
}

/**
 * Whether a key is pressed for the element that has the focus, which reads text or has keys of its own.
 * @param {KeyboardEvent} event
 */
export const isTyped = event =>
  elementAround(event, 'input, textarea, select') !== null || event.metaKey || event.ctrlKey || event.altKey;

export const hasText = key => Object.hasOwn(texts, key);

// Return a text of the page in its language, with its {placeholders} filled in.
export function translate(key, values = {}) {
  return (hasText(key) ? texts[key] : key).replace(/\{(\w+)\}/g, (placeholder, name) =>
    Object.hasOwn(values, name) ? String(values[name]) : placeholder,
  );
}

// Buttons of which one is chosen, by its place. pick(place) chooses another one and draws them again; it has the focus.
export const choiceButtons = (label, words, chosen, pick, titles = []) =>
  el(
    'span',
    { className: 'seg', role: 'group', 'aria-label': label },
    ...words.map((textContent, place) =>
      el('button', {
        textContent,
        ...(titles[place] && { title: titles[place] }),
        'aria-pressed': String(place === chosen),
        onclick: event => {
          const box = elementAround(event, '[id]');
          pick(place);
          elementIn(box, `[aria-label="${CSS.escape(label)}"] [aria-pressed=true]`)?.focus();
        },
      }),
    ),
  );

// A note with a progress bar, until an answer arrives.
export const waitingNote = () =>
  el('p', { className: 'note waiting', role: 'status' }, el('progress'), ' ', translate('comparing'));

/**
 * Create an element with properties or attributes and children. k is a kind, whose colour it gets, v a share, 0 to 1.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, any>} [props]
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === 'k') made.style.setProperty('--k', colourOfKind(value));
    else if (name === 'v')
      made.style.setProperty('--v', Number.isFinite(value) ? Math.max(0, Math.min(1, value)).toFixed(4) : '0');
    else if (name in made && !name.startsWith('aria')) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
