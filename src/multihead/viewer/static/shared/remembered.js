// Choices that the browser remembers for all pages: whether the first token is left out of painted texts.
// Without storage (a private window, a sandbox) they last as long as the page.
const kept = new Map();
const PREFIX = 'multihead ';

export function remembered(name) {
  if (kept.has(name)) return kept.get(name);
  try {
    return localStorage.getItem(PREFIX + name) === '1';
  } catch {
    return false;
  }
}

export function remember(name, on) {
  kept.set(name, on);
  try {
    localStorage.setItem(PREFIX + name, on ? '1' : '0');
  } catch {
    /* kept by the page alone */
  }
}
