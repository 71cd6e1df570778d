// One sample of a run, as the server describes it: its layers, heads, kinds, numbers and texts. A layer is identified
// by its number in the model everywhere, also in addresses.
import { translate } from '../shared/dom.js';
import { HeadList } from '../shared/headlist.js';
import { addLegend } from '../shared/kindlist.js';
import { kindNames, roleName } from '../shared/kinds.js';
import { makeStatistic } from '../shared/statistics.js';
import { pathOfSample, requestJson } from './api.js';

const BUILT = 6;

/**
 * A number of each head that was measured apart from the record: its values, their errors, and the columns of both.
 * @typedef {ReturnType<typeof makeImportant>} Important
 */

/**
 * @param {HeadNumbers} numbers
 * @param {SampleDescription} described
 */
function makeImportant(numbers, { columns, metrics }) {
  const column = columns.find(each => each.id === numbers.id);
  const errorColumn = { ...column, format: column.format === 'share' ? 'share' : '.2g' };
  return {
    ...numbers,
    column,
    errorColumn,
    shown: makeStatistic(column, metrics[numbers.id]),
    error: makeStatistic(errorColumn, numbers.errors),
  };
}
/** @type {ViewDescription} */
export const view = { lang: 'en', runs: [], foot: '', precision: '', similar: false, looking: false, served: false };

/** @extends {HeadList<LayerDescription>} */
export class Sample extends HeadList {
  /**
   * @param {number} run
   * @param {number} sample
   * @param {SampleDescription} described
   */
  constructor(run, sample, described) {
    const { layers, legend, kinds, columns, metrics, chance, full } = described;
    super(layers);
    this.run = run;
    this.sample = sample;
    this.lead = described.lead;
    this.facts = described.facts;
    this.pattern = described.pattern;
    this.texts = described.texts;
    this.received = described.received;
    this.labels = described.labels;
    this.noMaps = described.noMaps;
    this.unrecorded = described.unrecorded;
    this.findings = described.findings;
    this.legend = legend;
    this.images = described.images;
    this.pictures = described.pictures;
    this.important = described.important.map(numbers => makeImportant(numbers, described));
    this.stored = described.stored; // of a file
    addLegend(legend);
    this.allKinds = kinds;
    this.kinds = kinds.map(([first]) => first); // the colour of each head
    this.name = view.runs[run].name;
    this.title = view.runs[run].title || this.name;
    this.keep = view.runs[run].keep;
    this.precision = described.precision ?? view.precision;
    this.queries = Math.max(...layers.map(layer => layer.queries));
    this.keys = Math.max(...layers.map(layer => layer.keys));
    // The bars of these statistics end at what the masks allow.
    const largest = { entropy: i => full[i], effective_keys: i => this.layer(i).keys };
    this.metrics = columns
      .filter(column => Object.hasOwn(metrics, column.id))
      .map(column =>
        makeStatistic(
          column,
          metrics[column.id],
          Object.hasOwn(largest, column.id) ? largest[column.id] : undefined,
          Object.hasOwn(chance, column.id) ? chance[column.id] : [],
        ),
      );
    // Levels from 6 on are not requested until the server has built them.
    /** @type {Omit<LevelsProgress, 'state'> & { state: LevelsProgress['state'] | 'unknown' }} */
    this.progress = {
      state: this.layers.some(layer => layer.blocks.length > BUILT) ? 'unknown' : 'ready',
      done: 0,
      total: this.heads.length,
    };
  }

  aligned(i) {
    return this.layer(i).aligned.includes(this.heads[i].h);
  }
  named(i) {
    return translate('head and kind', {
      head: this.long(i),
      kind: [roleName(this.layer(i).role), kindNames(this.allKinds[i]), this.aligned(i) ? translate('alignment') : '']
        .filter(Boolean)
        .join(translate('join.comma')),
    });
  }

  get coarse() {
    return this.progress.state === 'ready';
  }
  // Return whether the small maps of a layer are available; heads are computed one after the other.
  mapped(l) {
    return (
      this.keep === 'statistics' ||
      this.numbered.get(l).blocks.length <= BUILT ||
      this.coarse ||
      this.first.get(l) + this.numbered.get(l).heads <= this.progress.done
    );
  }

  // The texts of a layer's queries and keys; position p of a side is token p + from of its text.
  sides(/** @type {LayerDescription} */ layer) {
    const text = n => this.texts[n] ?? null;
    return {
      query: { text: text(layer.queryText), from: layer.crosses ? 0 : layer.queryStart },
      key: { text: text(layer.keyText), from: 0 },
    };
  }
}

const kept = new Map();

/**
 * Request the description of a text of a run, once.
 * @param {number} run
 * @param {number} sample
 * @returns {Promise<Sample>}
 */
export function sampleOf(run, sample) {
  const key = `${run} ${sample}`;
  if (!kept.has(key)) {
    const request = requestJson(pathOfSample(run, sample)).then(described => new Sample(run, sample, described));
    request.catch(() => kept.delete(key));
    kept.set(key, request);
  }
  return kept.get(key);
}

export const labelOfToken = (side, p) => side.text?.labels[p + side.from] ?? String(p);
