// What the page shows: the text, the heads that are changed, and the place whose next token is asked for. The address
// restores it, and Undo goes back by one step.
import { place } from '../view/host.js';

/** @import { Sample } from '../view/record.js' */

// heads: "layer.head" -> the factor of its output, 0 for off; at: the place of a token, -1 for the last one.
export const state = { text: '', heads: new Map(), at: -1 };
// What is known: the model; the answer on the text, and the record of its heads; the answer on the changed heads.
/** @type {{ model: TrialModel, words: TrialText, record: Sample, change: TrialChange }} */
export const answers = { model: null, words: null, record: null, change: null };

export const nameOfHead = ({ l, h }) => `${l}.${h}`;
export const factorOf = head => state.heads.get(nameOfHead(head)) ?? 1;
export const isOff = head => factorOf(head) === 0;
export const changedHeads = () =>
  answers.record.heads.map((_, i) => i).filter(i => state.heads.has(nameOfHead(answers.record.heads[i])));
// The one factor of all changed heads, or null where they differ.
export const commonFactor = () => {
  const factors = new Set(state.heads.values());
  return factors.size === 1 ? [...factors][0] : null;
};

const written = heads => [...heads].map(([name, factor]) => (factor === 0 ? name : `${name}:${factor}`)).join(',');
// The part of an address after "?" that asks about the state; more: other parameters.
/** @param {Record<string, string | number>} [more] */
export const queryOfState = (more = {}) => {
  const given = Object.entries({ text: state.text, heads: written(state.heads), ...more });
  return new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
};
// The place of a token as the server is asked about it; an encoder compares whole sentences.
export const placeAsked = at => (answers.model.kind === 'encoder' ? {} : { at });
export const chosenPlace = () => (state.at < 0 ? answers.words.tokens.length - 1 : state.at);

export function readAddress(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ''));
  const at = given.get('at') ?? '';
  const heads = new Map();
  for (const [, name, factor] of (given.get('heads') ?? '').matchAll(/(\d+\.\d+)(?::(\d+(?:\.\d+)?))?/g))
    heads.set(name, Math.min(2, +(factor ?? 0)));
  return { text: given.get('text') ?? '', heads, at: /^\d+$/.test(at) ? +at : -1 };
}

export function saveAddress() {
  const hash =
    '#' +
    new URLSearchParams({
      text: state.text,
      ...(state.heads.size ? { heads: written(state.heads) } : {}),
      ...(state.at >= 0 ? { at: String(state.at) } : {}),
    });
  if (hash !== place.read()) place.replace(hash);
}

// The states that Undo goes back to; copy() is one.
export const undoSteps = [];
export const copyState = () => ({ ...state, heads: new Map(state.heads) });
