// Requests to the server, and what happens when it no longer responds.
const BASE = new URL('.', document.baseURI);
export const sampleAt = (run, sample) => `api/runs/${run}/samples/${sample}`;
export const headAt = (run, sample, l, h) => `${sampleAt(run, sample)}/heads/${l}/${h}`;
export const address = path => new URL(path, BASE).href;

// An answer that is not there yet (503): worth asking again.
export class Later extends Error {}

export const server = { gone: false, changed: () => {} };
async function answer(path, signal) {
  let response;
  try {
    response = await fetch(address(path), { signal, referrerPolicy: 'no-referrer' });
  } catch (error) {
    if (error.name !== 'AbortError') lost();
    throw error;
  }
  if (response.status === 503) throw new Later();
  if (!response.ok) {
    const told = await response.json().catch(() => ({}));
    throw new Error(told.error ?? `${response.status} ${response.statusText}`);
  }
  return response;
}

export async function json(path, signal) {
  return (await answer(path, signal)).json();
}

// An array of float32 with its shape; NaN where there is no cell.
export async function floats(path, signal) {
  const response = await answer(path, signal), shape = (response.headers.get('X-Shape') ?? '').split(',').map(Number);
  return { shape, values: new Float32Array(await response.arrayBuffer()) };
}

// Asked again every other second until it answers; a new server has another token, so its page must be opened anew.
function lost() {
  if (server.gone) return;
  server.gone = true;
  server.changed();
  const again = setInterval(async () => {
    const back = await fetch(address('api/view')).then(response => response.ok, () => false);
    if (!back) return;
    clearInterval(again);
    server.gone = false;
    server.changed();
  }, 2000);
}
