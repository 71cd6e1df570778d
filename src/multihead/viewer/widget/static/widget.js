// The view of the widget in a notebook: a page in a shadow root, whose requests travel to the kernel. `viewer` is above.
const PATIENCE = 4000; // milliseconds until a page shows that the kernel does not answer
const OUTPUTS = '.jp-OutputArea-child, .output_area, .output-area, .output'; // around an output: JupyterLab, others

// Send requests to the kernel; an answer comes in parts, because a message has a limited size.
function transport(model, silent) {
  const waiting = new Map(),
    mine = Math.random().toString(36).slice(2); // other views of the model get the answers too
  let count = 0,
    heard = performance.now();
  const received = (answer, buffers) => {
    heard = performance.now();
    silent(false);
    const request = waiting.get(answer.id);
    if (!request) return;
    request.parts.push(
      ...buffers.map(part => new Uint8Array(part.buffer ?? part, part.byteOffset ?? 0, part.byteLength)),
    );
    if (!answer.last) return;
    waiting.delete(answer.id);
    request.resolve(new Response(new Blob(request.parts), { status: answer.status, headers: answer.headers }));
  };
  model.on('msg:custom', received);
  const clock = setInterval(() => {
    if (waiting.size) silent(performance.now() - Math.max(heard, [...waiting.values()][0].since) > PATIENCE);
  }, 1000);
  return {
    request: (path, signal) =>
      new Promise((resolve, reject) => {
        const id = `${mine} ${++count}`;
        if (signal?.aborted) {
          reject(signal.reason);
          return;
        }
        signal?.addEventListener(
          'abort',
          () => {
            if (!waiting.delete(id)) return;
            model.send({ cancel: id });
            reject(signal.reason);
          },
          { once: true },
        );
        waiting.set(id, { resolve, parts: [], since: performance.now() });
        model.send({ id, path });
      }),
    close: () => {
      clearInterval(clock);
      model.off('msg:custom', received);
      for (const id of waiting.keys()) model.send({ cancel: id });
      waiting.clear();
    },
  };
}

// Whether the page around an element is dark: by the first background that is not transparent.
function isDark(el) {
  for (let at = el.parentNode; at; at = at.parentNode ?? at.host) {
    const [r, g, b, a = 1] =
      at instanceof Element ? (getComputedStyle(at).backgroundColor.match(/[\d.]+/g) ?? []).map(Number) : [0, 0, 0, 0];
    if (a > 0.5) return 0.299 * r + 0.587 * g + 0.114 * b < 128;
  }
  return matchMedia('(prefers-color-scheme: dark)').matches;
}

// Notebooks change their theme by attributes of the document; its style sheets may arrive later.
function theme(el, page) {
  const listeners = [],
    scheme = { matches: isDark(el), addEventListener: (kind, changed) => listeners.push(changed) };
  const show = () => {
    page.dataset.scheme = scheme.matches ? 'dark' : 'light';
  };
  const check = () => {
    const matches = isDark(el);
    if (matches === scheme.matches) return;
    scheme.matches = matches;
    show();
    listeners.forEach(changed => changed());
  };
  const watch = new MutationObserver(() => {
      check();
      setTimeout(check, 400);
    }),
    media = matchMedia('(prefers-color-scheme: dark)');
  for (const part of [document.documentElement, document.body]) watch.observe(part, { attributes: true });
  media.addEventListener('change', check);
  show();
  return {
    scheme,
    close: () => {
      watch.disconnect();
      media.removeEventListener('change', check);
    },
  };
}

// Keys act on the page and not on the notebook, except for those with Ctrl or Cmd, such as saving.
const isCommand = event => event.ctrlKey || event.metaKey;

// Whether a page shows what was selected elsewhere; a part that was left open is never equal. The number of queries in view
// follows from the height of a map.
const shows = (now, { layer, head, queries, keys, query }) =>
  now.layer === layer &&
  now.head === head &&
  now.query === query &&
  now.queries[0] === queries?.[0] &&
  now.keys.every((end, k) => end === keys?.[k]);

function render({ model, el }) {
  const { html, css, texts, lang, height, mark } = model.get('_page');
  const shadow = el.attachShadow({ mode: 'open' }),
    box = document.createElement('div'),
    page = document.createElement('div'),
    style = document.createElement('style');
  style.textContent = css;
  page.append(...new DOMParser().parseFromString(html, 'text/html').body.childNodes); // it has no text of a record
  page.lang = lang;
  page.className = 'page';
  page.setAttribute('role', 'region');
  box.className = 'box';
  box.style.height = height + 'px';
  box.append(page);
  shadow.append(style, box);
  el.classList.add('multihead-view');
  const notice = document.createElement('p');
  Object.assign(notice, { className: 'gone', hidden: true });
  notice.setAttribute('role', 'status');
  page.prepend(notice);
  const notify = words => {
    notice.hidden = !words;
    notice.textContent = words;
  };

  const kernel = transport(model, silent => {
    if (silent || notice.textContent === texts.silent) notify(silent ? texts.silent : '');
  });
  const colours = theme(el, page),
    sizes = [],
    observer = new ResizeObserver(sized);
  let viewed = null,
    engaged = false,
    hash = '',
    moved = () => {},
    sent = JSON.stringify(model.get('selection'));

  const host = {
    root: shadow,
    frame: page,
    texts: texts,
    scheme: colours.scheme,
    address: path => path,
    request: kernel.request,
    place: {
      read: () => hash,
      go: next => {
        if (next !== hash) {
          hash = next;
          moved();
        }
      },
      replace: next => {
        hash = next;
      },
      listen: changed => {
        moved = changed;
      },
    },
    size: () => ({ width: box.clientWidth, height: box.clientHeight }),
    resized: changed => sizes.push(changed),
    before: (kind, act) => shadow.addEventListener(kind, act, true),
    pressed: act =>
      shadow.addEventListener('keydown', event => {
        act(event);
        if (!isCommand(event)) event.stopPropagation();
      }),
    printed: () => {}, // a notebook prints the picture and the table that follow the widget
    isOutside: () => false,
    zooms: event => isCommand(event) || engaged, // else the wheel scrolls the notebook
    showKind: map => page.classList.toggle('map', map),
    entitle: title => page.setAttribute('aria-label', title),
    toTop: () => {
      box.scrollTop = 0;
    },
    mark: saved => {
      page.dataset.saved = String(saved);
      if (saved) report();
    },
  };

  // The kernel learns what is in view, and the page shows what was selected in the kernel.
  function report() {
    const now = viewed?.inView() ?? null,
      given = model.get('selection'),
      key = JSON.stringify(now);
    if (!viewed || key === sent) return;
    sent = key;
    if (now && given && shows(now, given)) return;
    model.set('selection', now);
    model.save_changes();
  }
  function follow() {
    const given = model.get('selection'),
      key = JSON.stringify(given);
    if (!viewed || key === sent) return;
    sent = key;
    const now = viewed.inView();
    if (given ? !now || !shows(now, given) : now) viewed.select(given);
  }
  model.on('change:selection', follow);

  // The page starts once it has a size; a notebook may take the cell out of the document, and put it back.
  let width = 0;
  function sized() {
    if (!box.clientWidth) return;
    if (!viewed) {
      viewed = viewer(host);
      const given = model.get('selection');
      if (given) viewed.select(given);
      hideStatic(true);
    } else if (width) sizes.forEach(changed => changed());
    width = box.clientWidth;
  }
  observer.observe(box);

  function hideStatic(hidden) {
    for (const output of document.querySelectorAll(`[data-multihead-static="${mark}"]`)) {
      const around = output.closest(OUTPUTS) ?? output;
      if (!around.contains(el)) around.style.display = hidden ? 'none' : '';
    }
  }
  const late = new MutationObserver(() => {
    if (viewed) hideStatic(true);
  }); // it is shown after the widget
  late.observe(document.body, { childList: true, subtree: true });

  // Links within the page change what is shown; downloads are requests too.
  shadow.addEventListener('click', event => {
    const link = event.target.closest('a[href]'),
      to = link?.getAttribute('href');
    if (!link || event.defaultPrevented) return;
    if (link.hasAttribute('download')) {
      event.preventDefault();
      save(to);
    } else if (to.startsWith('#')) {
      event.preventDefault();
      host.place.go(to);
    }
  });
  async function save(path) {
    const response = await kernel.request(path);
    if (!response.ok) {
      notify((await response.json()).error);
      return;
    }
    const address = URL.createObjectURL(await response.blob()),
      link = document.createElement('a');
    Object.assign(link, {
      href: address,
      download: /filename="([^"]*)"/.exec(response.headers.get('content-disposition'))?.[1] ?? '',
    });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  }

  // The wheel zooms from a click into the page to a click outside of it.
  const engage = event => {
    engaged = event.composedPath().includes(el);
  };
  addEventListener('pointerdown', engage, true);

  // JupyterLab acts on keys before or after the page, according to its version; this attribute keeps it from both.
  const suppress = event => el.toggleAttribute('data-lm-suppress-shortcuts', !isCommand(event));
  addEventListener('keydown', suppress, true);

  return () => {
    removeEventListener('keydown', suppress, true);
    removeEventListener('pointerdown', engage, true);
    model.off('change:selection', follow);
    observer.disconnect();
    late.disconnect();
    colours.close();
    kernel.close();
    hideStatic(false);
  };
}

export default { render };
