// The maps of every head over training. Text goes in by textContent alone; all else on the page needs no script.
'use strict';
const D = JSON.parse(document.getElementById('data').textContent);
const NBSP = '\u00a0';
const dark = matchMedia('screen and (prefers-color-scheme: dark)');
const RAMP = {
  light: '#FBFAF7 #BFDFF1 #86C2E6 #54A3DA #387FCA #325AB4 #32388E #281E5E #150D2C',
  dark: '#101317 #1C2C4C #26477B #2966A2 #2B88C0 #30ADC8 #57CFC4 #A9E9B6 #FBF9CE',
};
const TICKS = [0, .01, .1, .25, .5, 1];
const LUT = new Uint8ClampedArray(256 * 3);

function palette() {
  const stops = RAMP[dark.matches ? 'dark' : 'light'].split(' ').map(hex => [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16)));
  for (let i = 0; i < 256; i++) {
    const place = i / 255 * (stops.length - 1), a = Math.min(stops.length - 2, Math.floor(place));
    for (let c = 0; c < 3; c++) LUT[i * 3 + c] = stops[a][c] + (stops[a + 1][c] - stops[a][c]) * (place - a);
  }
}
function say(key, given = {}) {
  return (D.words[key] ?? key).replace(/\{(\w+)\}/g, (hole, name) => name in given ? String(given[name]) : hole);
}
function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === 'v') made.style.setProperty('--v', Math.max(0, Math.min(1, value)).toFixed(4));
    else if (name in made && !name.startsWith('aria')) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
const percent = w => (100 * w).toFixed(1) + NBSP + '%';
const headsWord = n => n === 1 ? say('head') : say('heads', { n });

// One pixel a cell, on the scale of roots; a cell that may not be seen is left clear, so that the hatching shows.
function bitmap(rows, causal) {
  const canvas = el('canvas', { className: 'map', width: rows[0].length, height: rows.length, role: 'img' });
  const pen = canvas.getContext('2d'), image = pen.createImageData(canvas.width, canvas.height);
  rows.forEach((row, i) => row.forEach((w, j) => {
    if (causal && j > i) return;
    const t = Math.round(255 * Math.sqrt(Math.min(1, w / 1000))) * 3, at = (i * canvas.width + j) * 4;
    image.data.set([LUT[t], LUT[t + 1], LUT[t + 2], 255], at);
  }));
  pen.putImageData(image, 0, 0);
  return canvas;
}

function ramp() {
  const strip = el('canvas', { width: 220, height: 1, 'aria-hidden': 'true' }), pen = strip.getContext('2d');
  for (let x = 0; x < 220; x++) { const t = Math.round(x / 219 * 255) * 3; pen.fillStyle = `rgb(${LUT[t]},${LUT[t + 1]},${LUT[t + 2]})`; pen.fillRect(x, 0, 1, 1); }
  const ticks = el('div', { className: 'ticks' }, ...TICKS.map(w => { const s = el('span', { textContent: Math.round(w * 100) + (w === 1 ? NBSP + '%' : '') }); s.style.left = Math.sqrt(w) * 100 + '%'; return s; }));
  return el('div', { className: 'ramp' }, el('span', { textContent: say('scale') }), el('div', {}, strip, ticks));
}

function measures(task, look) {
  const cells = Object.entries(look.measures).flatMap(([name, value]) => {
    const label = el('span', { textContent: say('measure ' + (task.name === 'one' && name === 'first asked' ? 'only asked' : name)) });
    if (name === 'entropy') return [label, el('span', { className: 'wide', textContent: value.toFixed(2) })];
    return [label, el('span', {}, el('i', { v: value })), el('b', { textContent: percent(value) })];
  });
  return el('div', { className: 'measures' }, ...cells);
}

function show(box, task, chosen) {
  const course = task.courses.find(one => one.heads === chosen), causal = task.name === 'induction';
  const line = el('p', { className: 'note num', role: 'status', textContent: say('point') });
  const last = course.moments[course.moments.length - 1];
  const grid = el('div', { className: 'heads' }, el('span'), ...course.moments.map(moment => el('span', { className: 'hd num', textContent: say('step', { n: moment.step }) })), el('span', { className: 'hd end', textContent: say('at the end') }));
  grid.style.setProperty('--n', course.moments.length);
  last.looks.forEach((look, i) => {
    const name = causal ? say('layer head', look) : say('only head', look);
    grid.append(el('span', { className: 'nm', textContent: name }));
    for (const moment of course.moments) {
      const rows = moment.looks[i].picture, map = bitmap(rows, causal);
      map.setAttribute('aria-label', `${name}, ${say('step', { n: moment.step })}`);
      map.onpointermove = event => {
        const row = Math.min(rows.length - 1, Math.floor(event.offsetY / map.clientHeight * rows.length));
        const column = Math.min(rows[0].length - 1, Math.floor(event.offsetX / map.clientWidth * rows[0].length));
        const weight = causal && column > row ? say('hidden') : percent(rows[row][column] / 1000);
        const from = causal ? 0 : 1;
        line.textContent = `${name}, ${say('step', { n: moment.step })} · ` + say(causal ? 'value induction' : 'value lookup', { row: row + from, column: column + from, weight });
      };
      map.onpointerleave = () => { line.textContent = say('point'); };
      grid.append(map);
    }
    grid.append(measures(task, look));
  });
  const choice = el('div', { className: 'seg', role: 'group', 'aria-label': say('choose heads') }, ...task.courses.map(one => el('button', {
    textContent: headsWord(one.heads), 'aria-pressed': String(one.heads === chosen),
    onclick: () => { show(box, task, one.heads); box.querySelector('[aria-pressed=true]').focus(); },
  })));
  const scroll = el('div', { className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': headsWord(chosen) }, grid);
  box.dataset.heads = chosen;
  box.replaceChildren(el('p', { className: 'note', textContent: task.note }), el('div', { className: 'bar' }, choice, ramp()), scroll, line);
}

function draw() {
  palette();
  for (const box of document.querySelectorAll('.looks')) {
    const task = D.tasks.find(one => one.name === box.dataset.task), heads = task.courses.map(one => one.heads);
    show(box, task, +box.dataset.heads || (heads.includes(2) ? 2 : heads[0]));
  }
}
dark.addEventListener('change', draw);
draw();
