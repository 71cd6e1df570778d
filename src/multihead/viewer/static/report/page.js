// Start the page, handle the keyboard, and show one of two views: all heads, or one head.
import { dark, palette } from '../shared/colour.js';
import { $, translate } from '../shared/dom.js';
import { firstTokenWords, helpButton, scaleWords } from '../shared/help.js';
import { neighbour } from '../shared/keys.js';
import { showRows } from '../shared/table.js';
import { returnTo, showView } from '../shared/views.js';
import { chips, defined, findings, grid, gridNote, headsTable, inspect, legend, state } from './grid.js';
import { closeHead, headPage, shownHead, show } from './head.js';
import { loadThumbs, thumbs } from './maps.js';
import { paintedText } from './text.js';
import { addressOf, D, HEADS, indexOf, longName, numbered } from './record.js';

let failure = '';
const mapState = () => failure || (D.store.mode === 'none' ? translate(D.store.reason) : '');

// Choose a colour scale and redraw the page; the button keeps the focus.
function choose(name) {
  state.scale = name;
  draw();
  document.querySelector('main:not([hidden]) .seg [aria-pressed=true]').focus();
}
const openHead = i => headPage(i, { mapState: mapState(), choose });

function overview() {
  paintedText();
  findings();
  chips();
  grid();
  inspect(state.lit);
  $('scale').replaceChildren(...(thumbs.length ? legend(320, gridNote(), choose) : [gridNote()]));
  $('mapstate').hidden = !mapState();
  $('mapstate').textContent = mapState();
  headsTable();
}

function route() {
  const place = location.hash.match(/^#L(\d+)H(\d+)$/), i = place ? numbered(+place[1], +place[2]) : -1, before = shownHead();
  if (i < 0 && location.hash && location.hash !== '#' && before < 0) return;  // a link inside the page of all heads
  showView(i, before, (i >= 0 ? longName(i) + ' · ' : '') + D.title);
  if (i >= 0) {
    openHead(i);
    return;
  }
  closeHead();
  if (before < 0) return;
  state.lit = before;
  overview();
  returnTo(before);
}

function draw() {
  palette();
  if (shownHead() >= 0) openHead(shownHead()); else overview();
}

// The arrow keys move between heads, in the grid and on a head's page.
const moved = (i, key) => neighbour(key, HEADS[i].l, HEADS[i].h, D.layers, indexOf);
addEventListener('keydown', event => {
  if (/INPUT|TEXTAREA/.test(event.target.tagName) || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.key === 'Escape' && shownHead() >= 0) { location.hash = ''; return; }
  const inGrid = $('grid').contains(event.target), box = event.target.closest?.('.reading');
  const scrolls = box && box.scrollHeight > box.clientHeight && /Up|Down/.test(event.key);
  const next = shownHead() >= 0 && !scrolls ? moved(shownHead(), event.key) : inGrid ? moved(state.lit, event.key) : undefined;
  if (next === undefined) return;
  event.preventDefault();
  if (next < 0) return;
  if (shownHead() >= 0) location.replace(addressOf(next)); else $('grid').querySelector(`[data-i="${next}"]`).focus();
});
addEventListener('hashchange', route);
dark.addEventListener('change', draw);
let width = innerWidth;
addEventListener('resize', () => {
  if (shownHead() >= 0) show();
  else if (innerWidth !== width) { grid(); inspect(state.lit); }
  width = innerWidth;
});
$('filter').oninput = headsTable;
addEventListener('beforeprint', () => { showRows(true); headsTable(); });
addEventListener('afterprint', () => { showRows(false); headsTable(); });

async function start() {
  palette();
  defined();
  const press = (names, key) => [names, translate('press.' + key)];
  $('helps').append(helpButton([press(['←', '→', '↑', '↓'], 'neighbour'), press(['Enter'], 'open'), press(['Esc'], 'back'), press(['?'], 'help')], [...scaleWords(), ...firstTokenWords(), [translate('chance', { n: '' }).trim(), translate('chance why')]]));
  if (D.store.mode !== 'none' && typeof DecompressionStream === 'undefined') failure = translate('old browser');
  else await loadThumbs();
  state.lit = D.findings.length ? numbered(D.findings[0].layer, D.findings[0].head) : 0;
  overview();
  route();
}
start().catch(error => { failure = String(error); thumbs.length = 0; overview(); throw error; });
