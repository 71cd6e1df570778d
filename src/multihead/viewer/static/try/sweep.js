// "Which heads matter for this token?": every head alone, layer after layer as the answers arrive.
import { $, translate } from '../shared/dom.js';
import { count, known, signed } from '../shared/numbers.js';
import { lines } from '../view/api.js';
import { colourBy, effects, paintGrid } from './heads.js';
import { chosen, found, placeAsked, query } from './state.js';

const STRONGEST = 4;
let control = null;

export const sweeping = () => control !== null;
export function stopSweep() {
  control?.abort();
  control = null;
}
export function forgetEffects() {
  stopSweep();
  effects.clear();
  $('swept').textContent = '';
}

export function sweepButton() {
  const encoder = found.model.kind === 'encoder';
  const seconds = Math.max(1, Math.round(found.words.sweep_seconds));
  const time =
    seconds < 100 ? translate('seconds n', { n: seconds }) : translate('minutes n', { n: count(seconds / 60) });
  $('sweep').textContent = control ? translate('stop') : translate(encoder ? 'sweep sentences' : 'sweep', { time });
  $('sweep').setAttribute('aria-pressed', String(control !== null));
}

function largestEffects() {
  const { record } = found;
  const order = [...effects].sort(([, a], [, b]) => Math.abs(b) - Math.abs(a)).slice(0, STRONGEST);
  const heads = order
    .map(([i, value]) => `${record.short(i)}\u00a0${signed(value, 2) || '0'}`)
    .join(translate('join.comma'));
  return translate(found.model.kind === 'encoder' ? 'largest effects similarity' : 'largest effects', { heads });
}

// How long the sweep took, and the peak memory of the process where the operating system reports it.
function summary({ seconds, floor_seconds, peak_mib }, heads) {
  const took = translate('sweep took', {
    n: count(heads),
    seconds: seconds.toFixed(1),
    floor: floor_seconds.toFixed(1),
  });
  return [took, ...(known(peak_mib) ? [translate('sweep memory', { memory: count(peak_mib) })] : [])].join(
    translate('join.sentences'),
  );
}

// begin(): stops what else may be computed; failed(error): shows why it ended.
export async function sweep(begin, failed) {
  if (control) {
    stopSweep();
    sweepButton();
    return;
  }
  begin();
  const mine = new AbortController();
  control = mine;
  const { record } = found;
  effects.clear();
  colourBy('effect');
  sweepButton();
  let last = null;
  let whole = null;
  try {
    await lines(`api/sweep?${query({ heads: '', ...placeAsked(chosen()) })}`, mine.signal, line => {
      if (mine !== control) return;
      if (line.effects) {
        for (const [h, value] of line.effects.entries()) effects.set(record.index(line.layer, h), value);
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
  if (!effects.size) $('swept').textContent = '';
  sweepButton();
  $('sweep').title = whole ? summary(whole, record.heads.length) : '';
}
