// "Share this view": one file with the heads in view, their maps and the place, made by the server and saved by the browser.
import { $, translate } from '../shared/dom.js';
import { frame } from '../shared/host.js';
import { sampleAt } from './api.js';
import { place, request } from './host.js';
import { saveNow, state } from './permalink.js';

// What the file shall hold, as the server reads it: the heads, and the place in view, which it opens with.
function wanted() {
  saveNow();
  const given = new URLSearchParams({ a: `${state.a.l}.${state.a.h}`, place: place.read() });
  if (state.compare) given.set('b', `${state.b.l}.${state.b.h}`);
  if (state.compare && state.b.r !== state.run) given.set('run', state.b.r);
  return `${sampleAt(state.run, state.sample)}/share?${given}`;
}

async function share() {
  const say = words => { $('shared').hidden = !words; $('shared').textContent = words; };
  say(translate('sharing'));
  try {
    const response = await request(wanted());
    if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error ?? `${response.status} ${response.statusText}`);
    const name = /filename="([^"]+)"/.exec(response.headers.get('Content-Disposition') ?? '')?.[1] ?? 'view.html', url = URL.createObjectURL(await response.blob());
    Object.assign(document.createElement('a'), { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
    say('');
  } catch (error) { say(error.message); }
}

export function sharing() {
  $('share').onclick = share;
  const { note } = frame.dataset;  // this page is such a file
  if (note) { $('shared').hidden = false; $('shared').textContent = note; }
}
