// The page's words and the small tools every part uses. Text goes in by textContent alone.
export const $ = id => document.getElementById(id);
export const NBSP = '\u00a0';
let words = {}, tongue = 'en';

export function speak(all, lang) {
  tongue = Object.hasOwn(all, lang) ? lang : 'en';
  words = all[tongue];
  document.documentElement.lang = tongue === 'zh' ? 'zh-CN' : tongue;
  for (const part of document.querySelectorAll('[data-say]')) part.textContent = say(part.dataset.say);
}

export const knows = key => Object.hasOwn(words, key);

// A sentence of the page with its {holes} filled.
export function say(key, given = {}) {
  return (knows(key) ? words[key] : key).replace(/\{(\w+)\}/g, (hole, name) => Object.hasOwn(given, name) ? String(given[name]) : hole);
}

export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === 'k') made.style.setProperty('--k', `var(--${value})`);
    else if (name === 'v') made.style.setProperty('--v', Number.isFinite(value) ? Math.max(0, Math.min(1, value)).toFixed(4) : 0);
    else if (name in made && !name.startsWith('aria')) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const known = value => value !== null && value !== undefined && Number.isFinite(value);
export const count = n => Math.round(n).toLocaleString(tongue === 'zh' ? 'zh-CN' : 'en-US');

// A share in per cent with about two digits; what is smaller than 0.001 % as a power of ten.
export function short(w) {
  if (!(w > 0)) return w === 0 ? '0' : '–';
  const p = w * 100;
  if (p >= .001) return (p >= 9.95 ? p.toFixed(0) : p >= .0995 ? p.toFixed(1) : String(+p.toPrecision(1))) + NBSP + '%';
  const [digit, power] = p.toExponential(0).split('e-');
  return `${digit}·10⁻${[...power].map(d => '⁰¹²³⁴⁵⁶⁷⁸⁹'[d]).join('')}${NBSP}%`;
}

// A single weight with three digits.
export function exact(w) {
  const p = w * 100;
  return p >= .001 || p === 0 ? +p.toPrecision(3) + NBSP + '%' : short(w);
}
