// Written by tools/page_types.py.

declare function viewer(host: object): {
  inView(): any;
  select(chosen: any): void;
};

interface ElementsById {
  after: HTMLElementTagNameMap['p'];
  aftername: HTMLElementTagNameMap['h3'];
  all: HTMLElementTagNameMap['main'];
  allon: HTMLElementTagNameMap['button'];
  along: HTMLElementTagNameMap['section'];
  answer: HTMLElementTagNameMap['div'];
  answers: HTMLElementTagNameMap['section'];
  apply: HTMLElementTagNameMap['button'];
  at: HTMLElementTagNameMap['output'];
  back: HTMLElementTagNameMap['a'];
  bar: HTMLElementTagNameMap['header'];
  before: HTMLElementTagNameMap['p'];
  blank: HTMLElementTagNameMap['p'];
  changed: HTMLElementTagNameMap['div'];
  changednote: HTMLElementTagNameMap['p'];
  changedsec: HTMLElementTagNameMap['section'];
  changedtools: HTMLElementTagNameMap['div'];
  changes: HTMLElementTagNameMap['div'] & HTMLElementTagNameMap['ul'];
  chips: HTMLElementTagNameMap['div'];
  choices: HTMLElementTagNameMap['div'];
  colourby: HTMLElementTagNameMap['span'];
  colours: HTMLElementTagNameMap['span'];
  cols: HTMLElementTagNameMap['tr'];
  compare: HTMLElementTagNameMap['button'];
  context: HTMLElementTagNameMap['section'];
  count: HTMLElementTagNameMap['span'];
  data: HTMLElementTagNameMap['script'];
  defs: HTMLElementTagNameMap['dl'];
  differ: HTMLElementTagNameMap['div'];
  divergence: HTMLElementTagNameMap['span'];
  edit: HTMLElementTagNameMap['button'];
  editing: HTMLElementTagNameMap['form'];
  editnote: HTMLElementTagNameMap['span'];
  endsnote: HTMLElementTagNameMap['span'];
  export: HTMLElementTagNameMap['p'];
  exporthead: HTMLElementTagNameMap['h2'];
  factor: HTMLElementTagNameMap['input'];
  facts: HTMLElementTagNameMap['span'];
  filter: HTMLElementTagNameMap['input'];
  finds: HTMLElementTagNameMap['ul'];
  findsec: HTMLElementTagNameMap['section'];
  findsof: HTMLElementTagNameMap['div'];
  foot: HTMLElementTagNameMap['div'] & HTMLElementTagNameMap['footer'];
  found: HTMLElementTagNameMap['div'];
  further: HTMLElementTagNameMap['section'];
  going: HTMLElementTagNameMap['span'];
  gone: HTMLElementTagNameMap['p'];
  grid: HTMLElementTagNameMap['div'];
  gridbox: HTMLElementTagNameMap['div'];
  gridstate: HTMLElementTagNameMap['p'];
  ha: HTMLElementTagNameMap['h2'];
  hc: HTMLElementTagNameMap['h2'];
  hd: HTMLElementTagNameMap['h2'];
  head: HTMLElementTagNameMap['main'];
  heada: HTMLElementTagNameMap['select'];
  headb: HTMLElementTagNameMap['select'];
  headname: HTMLElementTagNameMap['h1'];
  held: HTMLElementTagNameMap['script'];
  helps: HTMLElementTagNameMap['span'];
  hf: HTMLElementTagNameMap['h2'];
  hg: HTMLElementTagNameMap['h2'];
  hi: HTMLElementTagNameMap['h2'];
  hk: HTMLElementTagNameMap['h2'];
  hm: HTMLElementTagNameMap['h2'];
  hn: HTMLElementTagNameMap['h2'];
  home: HTMLElementTagNameMap['a'];
  howmany: HTMLElementTagNameMap['span'];
  ht: HTMLElementTagNameMap['h2'];
  hw: HTMLElementTagNameMap['h2'];
  important: HTMLElementTagNameMap['section'];
  importantabout: HTMLElementTagNameMap['p'];
  importantbox: HTMLElementTagNameMap['div'];
  importantchoice: HTMLElementTagNameMap['div'];
  importantgrid: HTMLElementTagNameMap['div'];
  importantlead: HTMLElementTagNameMap['p'];
  importantread: HTMLElementTagNameMap['p'];
  importantscale: HTMLElementTagNameMap['div'];
  insp: HTMLElementTagNameMap['aside'];
  keptshare: HTMLElementTagNameMap['p'];
  kindoff: HTMLElementTagNameMap['button'];
  kwic: HTMLElementTagNameMap['div'];
  language: HTMLElementTagNameMap['a'];
  lead: HTMLElementTagNameMap['p'];
  leave: HTMLElementTagNameMap['button'];
  left: HTMLElementTagNameMap['nav'];
  legend: HTMLElementTagNameMap['span'];
  length: HTMLElementTagNameMap['span'];
  level: HTMLElementTagNameMap['span'];
  link: HTMLElementTagNameMap['button'];
  lit: HTMLElementTagNameMap['p'];
  looking: HTMLElementTagNameMap['div'];
  losses: HTMLElementTagNameMap['div'];
  map: HTMLElementTagNameMap['canvas'];
  mapfoot: HTMLElementTagNameMap['div'];
  mapscale: HTMLElementTagNameMap['div'];
  mid: HTMLElementTagNameMap['main'];
  mini: HTMLElementTagNameMap['canvas'];
  more: HTMLElementTagNameMap['button'];
  mostheads: HTMLElementTagNameMap['ol'];
  mosttitle: HTMLElementTagNameMap['h3'];
  nav: HTMLElementTagNameMap['div'];
  nearest: HTMLElementTagNameMap['div'];
  nearesthead: HTMLElementTagNameMap['h2'];
  numbers: HTMLElementTagNameMap['tbody'];
  one: HTMLElementTagNameMap['div'];
  opening: HTMLElementTagNameMap['section'];
  othertext: HTMLElementTagNameMap['p'];
  othertitle: HTMLElementTagNameMap['h2'];
  over: HTMLElementTagNameMap['section'];
  pick: HTMLElementTagNameMap['span'];
  placebar: HTMLElementTagNameMap['div'];
  placechips: HTMLElementTagNameMap['div'];
  placechoice: HTMLElementTagNameMap['div'];
  placed: HTMLElementTagNameMap['canvas'];
  placeheads: HTMLElementTagNameMap['div'];
  placenote: HTMLElementTagNameMap['p'];
  placeread: HTMLElementTagNameMap['p'];
  places: HTMLElementTagNameMap['section'];
  placesave: HTMLElementTagNameMap['button'];
  placescale: HTMLElementTagNameMap['div'];
  placeshares: HTMLElementTagNameMap['p'];
  placetitle: HTMLElementTagNameMap['h2'];
  placewords: HTMLElementTagNameMap['p'];
  play: HTMLElementTagNameMap['button'];
  queries: HTMLElementTagNameMap['div'];
  querytext: HTMLElementTagNameMap['p'];
  random: HTMLElementTagNameMap['button'];
  read: HTMLElementTagNameMap['div'];
  right: HTMLElementTagNameMap['aside'];
  rowoffacts: HTMLElementTagNameMap['dl'];
  rows: HTMLElementTagNameMap['tbody'];
  rowtop: HTMLElementTagNameMap['span'];
  run: HTMLElementTagNameMap['select'];
  runb: HTMLElementTagNameMap['select'];
  sample: HTMLElementTagNameMap['select'];
  scale: HTMLElementTagNameMap['div'];
  scaled: HTMLElementTagNameMap['label'];
  scales: HTMLElementTagNameMap['span'];
  scaling: HTMLElementTagNameMap['div'];
  scroll: HTMLElementTagNameMap['div'];
  second: HTMLElementTagNameMap['span'];
  sentence: HTMLElementTagNameMap['h1'];
  share: HTMLElementTagNameMap['button'];
  shared: HTMLElementTagNameMap['p'];
  shownhead: HTMLElementTagNameMap['span'];
  sink: HTMLElementTagNameMap['button'];
  skip: HTMLElementTagNameMap['a'];
  span: HTMLElementTagNameMap['span'];
  stage: HTMLElementTagNameMap['div'];
  statistic: HTMLElementTagNameMap['select'];
  step: HTMLElementTagNameMap['input'];
  strip: HTMLElementTagNameMap['canvas'];
  strongest: HTMLElementTagNameMap['button'];
  sweep: HTMLElementTagNameMap['button'];
  swept: HTMLElementTagNameMap['span'];
  tablelinks: HTMLElementTagNameMap['span'];
  text: HTMLElementTagNameMap['p'];
  textafter: HTMLElementTagNameMap['button'];
  textbefore: HTMLElementTagNameMap['button'];
  textnote: HTMLElementTagNameMap['p'];
  textpick: HTMLElementTagNameMap['span'];
  texts: HTMLElementTagNameMap['script'];
  title: HTMLElementTagNameMap['h1'];
  together: HTMLElementTagNameMap['div'];
  togethernote: HTMLElementTagNameMap['p'];
  togetherrows: HTMLElementTagNameMap['tbody'];
  typed: HTMLElementTagNameMap['textarea'];
  under: HTMLElementTagNameMap['div'];
  undo: HTMLElementTagNameMap['button'];
  unfold: HTMLElementTagNameMap['button'];
  waiting: HTMLElementTagNameMap['div'];
  where: HTMLElementTagNameMap['span'];
  why: HTMLElementTagNameMap['p'];
  words: HTMLElementTagNameMap['div'];
  work: HTMLElementTagNameMap['div'];
  zoomin: HTMLElementTagNameMap['button'];
  zoomone: HTMLElementTagNameMap['button'];
  zoomout: HTMLElementTagNameMap['button'];
  zooms: HTMLElementTagNameMap['span'];
  zoomwhole: HTMLElementTagNameMap['button'];
}

/** Tokens as running text, see `layout_of_tokens`. */
interface TokenLayout {
  gaps: string[];
  shown: string[];
  labels: string[];
  flags: number[];
  tail: string;
}

/** A statistic in the tables of a page, see `describe_column`. */
interface ColumnDescription {
  id: string;
  label: string;
  unit: string;
  format: string;
  about: string;
  focus: boolean;
}

/** A statistic that was not recorded, see `columns_not_recorded`. */
interface UnrecordedStatistic {
  id: string;
  label: string;
}

/** A kind of head in the legend of a page, see `legend_of_kinds`; `noun` on the page of a series alone. */
interface KindDescription {
  id: string;
  label: string;
  about: string;
  statistic: string;
  glyph: string;
  colour: [string, string];
  repeats: boolean;
  measured: boolean;
  noun?: string;
}

/** What the list of heads needs of a layer. */
interface HeadsOfLayer {
  number: number;
  name: string;
  heads: number;
}

/** A layer on one text of a record. */
interface LayerDescription {
  number: number;
  name: string;
  heads: number;
  role: string;
  aligned: number[];
  queries: number;
  keys: number;
  queryStart: number;
  crosses: boolean;
  pattern: string;
  hides: boolean;
  blind: number;
  maps: boolean;
  blocks: [number, number][];
  rows: 'all' | 'largest' | '';
  margins: string[];
  queryText: number;
  keyText: number;
}

/** What a head does on each of several texts, see `OverTexts`. */
interface OverTextsDescription {
  number: number;
  having: number;
  spread: number;
  sentence: string;
}

/** A notable head, see `Finding`. */
interface FindingDescription {
  topic: string;
  layer: number;
  head: number;
  value: number;
  chance: number;
  sentence: string;
  count: string;
  brief: string;
  over_texts: OverTextsDescription | null;
}

/** A picture: its grey copy as an address of a PNG file, "" if it is unknown, and its size in its own pixels. */
interface GreyPicture {
  source: string;
  width: number;
  height: number;
}

/** A view of a picture: its keys, and left, top, right and bottom of each, one after the other.

    `image` is the index of the picture among those of the text; `rows` is 0 where the keys form no grid.
     */
interface PictureView {
  picture: number;
  view: number;
  image: number;
  rows: number;
  columns: number;
  keys: number[];
  boxes: number[];
}

/** A text whose keys have places in pictures, see `describe_pictures`; `stored` in a file alone.

    `text` is its index among the texts, `groups` the group of each token (0: picture, 1: class token and registers, 2:
    prompt, 3: answer): first of the `keys`, then of those of the text `queryText`, if the queries are of another text
    than the keys. `opening` the one to show at first, `stored` the keys whose rows of weights the file has.
     */
interface PictureText {
  text: number;
  queryText: number;
  keys: number;
  layers: number[];
  views: PictureView[];
  groups: number[];
  opening: number;
  stored?: number[];
}

/** What some heads do when all of them are off: a label, a number and its error of each of several rows. */
interface OffTogetherDescription {
  sentence: string;
  heads: number[];
  rows: ([string, number, number | null])[];
}

/** A number of each head that was measured on other texts than the record's, see `describe_head_numbers`.

    `id` is that of the column with the numbers. `name`, `of` and `most` name the method, the measure, and the list of
    the heads in `order`, the most important first. Heads are indices. `errors` is empty for a single text; `within`
    says which numbers are within two of them, and are hatched, and is empty where none has a meaning.
     */
interface HeadNumbers {
  id: string;
  name: string;
  of: string;
  most: string;
  sentence: string;
  about: string;
  note: string;
  errors: (number | null)[];
  within: boolean[];
  order: number[];
  together: OffTogetherDescription | null;
}

/** One text of a record, see `describe_sample`; `stored` and `precision` in a report alone. */
interface SampleDescription {
  lead: string;
  facts: [string, string][];
  pattern: string;
  texts: (TokenLayout | null)[];
  received: (number | null)[] | null;
  labels: Record<string, string>;
  layers: LayerDescription[];
  noMaps: string;
  kinds: string[][];
  metrics: Record<string, (number | null)[]>;
  chance: Record<string, (number | null)[]>;
  columns: ColumnDescription[];
  unrecorded: UnrecordedStatistic[];
  findings: FindingDescription[];
  full: (number | null)[];
  legend: KindDescription[];
  images: GreyPicture[];
  pictures: PictureText[];
  important: HeadNumbers[];
  stored?: string;
  precision?: string;
}

/** One text in the list of texts of a record. */
interface TextOfRun {
  number: number;
  queries: number;
  keys: number;
  opening: string;
}

/** A record, see `describe_run`. */
interface RunDescription {
  name: string;
  title: string;
  keep: 'all' | 'statistics';
  texts: number;
  comparable: boolean;
  samples: TextOfRun[];
}

/** The page of the viewer, see `describe_view`. */
interface ViewDescription {
  lang: string;
  runs: RunDescription[];
  foot: string;
  precision: string;
  similar: boolean;
  looking: boolean;
  served: boolean;
}

/** The heads over all texts of a record, see `describe_all_texts`. */
interface AllTextsDescription {
  texts: number;
  findings: FindingDescription[];
}

/** A head with similar weights; `queries`, which a file leaves out, is the number of queries compared. */
interface NearestHead {
  layer: number;
  head: number;
  divergence: number | null;
  queries?: number;
}

/** The heads with similar weights, of which every n-th query was compared; see `nearest_heads`. */
interface NearestHeads {
  every: number;
  heads: NearestHead[];
  error?: string;
}

/** A head that looks at a token: its mean weight, and the queries with the largest weights. */
interface LookingHead {
  layer: number;
  head: number;
  share: number;
  queries: [number, number][];
}

/** The heads that look at a token, and how much each token looks at it, see `heads_looking_at`. */
interface LookingHeads {
  heads: LookingHead[];
  tokens: (number | null)[];
}

/** A statistic of a head in two runs as text, see `StatisticChange`. */
interface StatisticChangeDescription {
  label: string;
  before: string;
  after: string;
}

/** A head that differs between two runs. */
interface ChangedHeadDescription {
  layer: number;
  head: number;
  divergence: number | null;
  kinds: [string[], string[]];
  change: StatisticChangeDescription | null;
}

/** The heads that differ between two runs, or of two models the kinds of their heads, see `changed_heads`. */
interface ChangedHeads {
  every: number;
  heads: ChangedHeadDescription[];
  kinds?: [string, string, string, string][];
  sentences?: string[];
  all?: number;
  sameTexts?: boolean;
  error?: string;
}

/** How far the coarse levels of a text's maps are built. */
interface LevelsProgress {
  state: 'none' | 'building' | 'ready';
  done: number;
  total: number;
  inMemory?: boolean;
  error?: string;
}

/** An array in the file of a page, see `PackedArrays`. */
interface StoredArray {
  shape: number[];
  coding: string;
  top?: number;
  first?: number;
  block?: number[];
  keys?: number;
}

/** What a page in one file answers its requests from, see `offline_page`. */
interface OfflineData {
  plain: Record<string, any>;
  arrays: Record<string, StoredArray>;
  tile: number;
  place: string;
  absent: string;
  old: string;
}

/** The model of a trial, see `Trial.describe_model`. */
interface TrialModel {
  title: string;
  name: string;
  version: string;
  lang: string;
  kind: 'language' | 'encoder';
  text: string;
  most_tokens: number;
  dtype: string;
}

/** A token of the text of a trial. */
interface TrialToken {
  text: string;
  gap: string;
  special: boolean;
  sentence: number;
  loss: number | null;
}

/** A text that the model of a trial has read, see `Trial.describe_text`. */
interface TrialText {
  sentences: string[];
  similarity: number[][] | null;
  tokens: TrialToken[];
  grid: SampleDescription;
  kinds: Record<string, [number, number][]>;
  sweep_seconds: number;
  seconds: number;
  replay: boolean;
}

/** A token that may follow, and its probability before and after a change of heads. */
interface NextToken {
  id: number;
  token: string;
  before: number;
  after: number;
}

/** The probability of all tokens that are not listed, before and after a change of heads. */
interface OtherTokens {
  before: number;
  after: number;
}

/** What a change of heads changes in the predictions of a model; an encoder has similarities alone. */
interface PredictionChange {
  losses: (number | null)[] | null;
  predictions: number | null;
  worse: number | null;
  at: number | null;
  kl: number | null;
  next: NextToken[] | null;
  others: OtherTokens | null;
  similarity: number[][] | null;
}

/** How far the maps of the heads of a layer changed. */
interface DistancesOfLayer {
  layer: number;
  heads: number[];
}

/** The model of a trial with other heads, see `Trial.change_heads`. */
interface TrialChange {
  losses: (number | null)[] | null;
  predictions: number | null;
  worse: number | null;
  at: number | null;
  kl: number | null;
  next: NextToken[] | null;
  others: OtherTokens | null;
  similarity: number[][] | null;
  changed: [number, number, number][];
  distances: DistancesOfLayer[];
  seconds: number;
  layers: number[] | null;
  whole: boolean;
  why_whole: string | null;
}

/** The effect of each head of a layer. */
interface SweepEffects {
  effects: (number | null)[];
  losses: (number | null)[] | null;
}

/** A line of a sweep, see `Trial.sweep`: the effect of each head of a layer. */
interface SweepOfLayer {
  effects: (number | null)[];
  losses: (number | null)[] | null;
  layer: number;
  done: number;
  total: number;
}

/** The effect of each head as gradients estimate it, before a sweep; None where there is no gradient. */
interface SweepEstimates {
  effects: (number | null)[] | null;
  seconds: number;
}

/** The last line of a sweep. */
interface SweepEnd {
  seconds: number;
  peak_mib: number | null;
}

/** A line of a continuation: tokens of one side, or that both are complete. */
interface ContinuationLine {
  before?: string[];
  after?: string[];
  done?: boolean;
}

/** A notable head of a census. */
interface CensusFinding {
  layer: number;
  head: number;
  statistic: string;
  sentence: string;
  count: string;
}

/** One of the heads with the largest shares of a kind. */
interface NamedHead {
  layer: number;
  head: number;
  share: string;
}

/** The heads of a kind in a census. */
interface HeadsOfKind {
  kind: string;
  number: number;
  chance: string;
  best: NamedHead[];
}

/** One census of the page; the lists have an item per head, layer after layer. */
interface CensusRun {
  label: string;
  command: string[];
  numbers: Record<string, Record<string, (number | null)[]>>;
  bars: Record<string, ((number | null)[] | null)[]>;
  chance: Record<string, (number | null)[]>;
  kinds: string[][];
  found: HeadsOfKind[];
}

/** The strongest examples per census, statistic and head. */
interface CensusExamples {
  examples: (Record<string, (([number | null, string, number, number, number, number, number[], (number | null)[]])[])[]>)[];
  words: string[];
  special: number[];
}

/** What the page of a census has besides its examples. */
interface CensusSummary {
  title: string;
  nats: string;
  columns: ColumnDescription[];
  layers: HeadsOfLayer[];
  legend: KindDescription[];
  divergence?: Record<string, (number | null)[]>;
  axes: Record<string, ((number | null)[])[]>;
  own: string[];
  findings: CensusFinding[];
  runs: CensusRun[];
}

/** The data of the page of a census; `kept` is the number of examples per head and statistic. */
interface CensusData {
  title: string;
  nats: string;
  columns: ColumnDescription[];
  layers: HeadsOfLayer[];
  legend: KindDescription[];
  divergence?: Record<string, (number | null)[]>;
  axes: Record<string, ((number | null)[])[]>;
  own: string[];
  findings: CensusFinding[];
  runs: CensusRun[];
  examples: (Record<string, (([number | null, string, number, number, number, number, number[], (number | null)[]])[])[]>)[];
  words: string[];
  special: number[];
  kept: number;
}

/** When a head became a kind or ceased to be one; `at` is the index of the first step of the page that shows it. */
interface KindChangeDescription {
  layer: number;
  head: number;
  kind: string;
  gained: boolean;
  step: number;
  at: number;
}

/** The kinds of the heads of a series: `kinds` has the index of each head's combination at each step. */
interface SeriesKinds {
  legend: KindDescription[];
  combinations: string[][];
  kinds: number[][];
  changes: KindChangeDescription[];
}

/** The statistics of the heads of a series at each step. */
interface SeriesNumbers {
  steps: number[];
  layers: HeadsOfLayer[];
  columns: ColumnDescription[];
  ends: Record<string, [number, number]>;
  values: Record<string, ((number | null)[])[]>;
}

/** The data of the page of a series. */
interface SeriesData {
  steps: number[];
  layers: HeadsOfLayer[];
  columns: ColumnDescription[];
  ends: Record<string, [number, number]>;
  values: Record<string, ((number | null)[])[]>;
  legend: KindDescription[];
  combinations: string[][];
  kinds: number[][];
  changes: KindChangeDescription[];
}

/** A head at a step: its measures, and its weights in thousandths. */
interface LabLook {
  layer: number;
  head: number;
  measures: Record<string, number>;
  picture: number[][];
}

/** The heads of a model at a step of its training. */
interface LabMoment {
  step: number;
  looks: LabLook[];
}

/** The training of a model with a number of heads. */
interface LabCourse {
  heads: number;
  moments: LabMoment[];
}

/** An experiment of the lab. */
interface LabTask {
  name: string;
  note: string;
  courses: LabCourse[];
}

/** The data of the page of the lab. */
interface LabData {
  tasks: LabTask[];
}
