// "Which heads matter for this token?": a gradient's estimate of every head, and then every head alone, layer after
// layer as the answers arrive; exact effects replace the estimates.
import { $, translate } from '../shared/dom.js';
import { formatCount, formatSigned, isKnown } from '../shared/numbers.js';
import { requestJson, requestLines } from '../view/api.js';
import { colourBy, effectOfHead, estimatedHeads, paintGrid } from './heads.js';
import { answers, chosenPlace, placeAsked, queryOfState } from './state.js';

const STRONGEST = 4;
let control = null;

export const isSweeping = () => control !== null;
export function stopSweep() {
  control?.abort();
  control = null;
}
export function forgetEffects() {
  stopSweep();
  effectOfHead.clear();
  estimatedHeads.clear();
  $('swept').textContent = '';
}

export function sweepButton() {
  const encoder = answers.model.kind === 'encoder';
  const seconds = Math.max(1, Math.round(answers.words.sweep_seconds));
  const time =
    seconds < 100 ? translate('seconds n', { n: seconds }) : translate('minutes n', { n: formatCount(seconds / 60) });
  $('sweep').textContent = control ? translate('stop') : translate(encoder ? 'sweep sentences' : 'sweep', { time });
  $('sweep').setAttribute('aria-pressed', String(control !== null));
}

function largestEffects() {
  const { record } = answers;
  const exact = [...effectOfHead].filter(([i]) => !estimatedHeads.has(i));
  const order = exact.sort(([, a], [, b]) => Math.abs(b) - Math.abs(a)).slice(0, STRONGEST);
  const heads = order
    .map(([i, value]) => `${record.short(i)}\u00a0${formatSigned(value, 2) || '0'}`)
    .join(translate('join.comma'));
  return translate(answers.model.kind === 'encoder' ? 'largest effects similarity' : 'largest effects', { heads });
}

// How long the sweep took, and the peak memory of the process where the operating system reports it.
function summary(/** @type {SweepEnd} */ { seconds, peak_mib }, /** @type {number} */ heads) {
  const took = translate('sweep took', { n: formatCount(heads), seconds: seconds.toFixed(1) });
  return [took, ...(isKnown(peak_mib) ? [translate('sweep memory', { memory: formatCount(peak_mib) })] : [])].join(
    translate('join.sentences'),
  );
}

// Show what gradients estimate of every head, where the model has one.
async function showEstimates(/** @type {URLSearchParams} */ query, /** @type {AbortSignal} */ signal) {
  /** @type {SweepEstimates} */
  const { effects, seconds } = await requestJson(`api/estimates?${query}`, signal);
  if (signal.aborted || !effects) return;
  for (const [i, value] of effects.entries()) {
    effectOfHead.set(i, value);
    estimatedHeads.add(i);
  }
  $('swept').textContent = translate('estimated', { seconds: seconds.toFixed(1) });
  paintGrid();
}

// begin(): stops what else may be computed; failed(error): shows why it ended.
export async function runSweep(begin, failed) {
  if (control) {
    stopSweep();
    sweepButton();
    return;
  }
  begin();
  const mine = new AbortController();
  control = mine;
  const { record } = answers;
  effectOfHead.clear();
  estimatedHeads.clear();
  colourBy('effect');
  sweepButton();
  /** @type {SweepOfLayer | null} */
  let last = null;
  /** @type {SweepEnd | null} */
  let whole = null;
  const query = queryOfState({ heads: '', ...placeAsked(chosenPlace()) });
  try {
    await showEstimates(query, mine.signal);
    await requestLines(`api/sweep?${query}`, mine.signal, (/** @type {SweepOfLayer | SweepEnd} */ line) => {
      if (mine !== control) return;
      if ('effects' in line) {
        for (const [h, value] of line.effects.entries()) {
          effectOfHead.set(record.index(line.layer, h), value);
          estimatedHeads.delete(record.index(line.layer, h));
        }
        last = line;
        $('swept').textContent = translate('sweep progress', { done: line.done, total: line.total });
        paintGrid();
      } else whole = line;
    });
  } catch (error) {
    if (!mine.signal.aborted) failed(error);
  }
  const stopped = mine.signal.aborted;
  if (control === mine) control = null;
  if (!stopped || last)
    $('swept').textContent = whole
      ? translate('swept', { effects: largestEffects(), seconds: whole.seconds.toFixed(1) })
      : last
        ? translate('sweep stopped', { done: last.done, total: last.total, effects: largestEffects() })
        : '';
  if (!effectOfHead.size) $('swept').textContent = '';
  sweepButton();
  $('sweep').title = whole ? summary(whole, record.heads.length) : '';
}
