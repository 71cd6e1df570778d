// Tokens made readable: spaces between words, byte pieces joined, invisible characters spelled out.
const BYTES = (() => {  // the printable characters that byte-level tokenizers write for the 256 bytes
  const printed = [...range(33, 126), ...range(161, 172), ...range(174, 255)], map = new Map(printed.map(b => [String.fromCharCode(b), b]));
  let next = 256;
  for (let b = 0; b < 256; b++) if (!printed.includes(b)) map.set(String.fromCharCode(next++), b);
  return map;
})();
function* range(from, to) { for (let i = from; i <= to; i++) yield i; }

// Marks that turn the direction of what follows, and characters without a shape, may not act: they are named.
const ACTING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/gu;
const named = text => text.replace(ACTING, sign => `U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}`);
const visible = text => named(text).replaceAll('\n', '↵').replaceAll('\t', '⇥');
const CLOSING = /^[.,;:!?)\]}’”%。，、；：！？）】」』]+$/u;
const CJK = /[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]/u;

// text: shown (one string a token), gaps (what stands before it), labels (for rulers), flags (1 a mark of the
// model, 2 a piece of a character). Tokens may be words, or a vocabulary's entries: Ġthe, ▁the, ##ing.
export function reading(tokens, special) {
  if (!tokens) return null;
  const bytes = tokens.some(token => /^[ĠĊ]/.test(token)), pieces = tokens.some(token => /^##./.test(token)), bars = tokens.some(token => token.startsWith('▁'));
  const spaced = tokens.some(token => /^ \S/.test(token));
  const shown = [], gaps = [], labels = [], flags = [];
  tokens.forEach((token, p) => {
    const mark = !!special?.[p];
    let text = token, gap = '';
    if (mark) gap = p ? ' ' : '';
    else if (bytes) text = unbyted(token);
    else if (bars) text = token.replaceAll('▁', ' ');
    else if (pieces) { gap = token.startsWith('##') || CLOSING.test(token) || (CJK.test(token) && CJK.test(tokens[p - 1] ?? '')) ? '' : ' '; text = token.replace(/^##/, ''); }
    else if (!spaced) gap = CLOSING.test(token) || CJK.test(token) ? '' : ' ';
    const lead = text.match(/^\s+/)?.[0] ?? '';
    if (!mark && lead && lead.length < text.length) { gap = lead.includes('\n') ? '\n' : ' '; text = text.slice(lead.length); }
    shown.push(visible(text) || '∅');
    gaps.push(gap);
    labels.push(text.trim() ? visible(text).trim() : text.includes('\n') ? '↵' : text ? '␣' : '∅');
    flags.push((mark ? 1 : 0) | (text.includes('\ufffd') ? 2 : 0));
  });
  return { shown, gaps, labels, flags };
}

function unbyted(token) {
  const bytes = [...token].map(letter => BYTES.get(letter));
  return bytes.includes(undefined) ? token : new TextDecoder().decode(Uint8Array.from(bytes));
}

// A run of tokens as one string, for the lines of a concordance.
export function phrase(text, from, to) {
  let line = '';
  for (let p = Math.max(0, from); p < Math.min(to, text.shown.length); p++) line += (line && text.gaps[p] ? ' ' : '') + text.shown[p];
  return line;
}

const MOST = 60;  // letters of one token that are set in running text; the whole of it is its title
export function span(text, p) {
  const made = document.createElement('bdi'), flags = text.flags[p], letters = text.shown[p];
  made.className = 'tk' + (flags & 1 ? ' sp' : '') + (flags & 2 ? ' part' : '');
  made.textContent = letters.length > MOST ? letters.slice(0, MOST) + '…' : letters;
  return made;
}
