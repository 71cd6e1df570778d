// The view of the widget in a notebook: a page in a shadow root, whose requests travel to the kernel.
// The function `viewer` is that of the page's scripts, which stand before this file (widget/page.py).
const PATIENCE = 4000; // milliseconds until a page shows that the kernel does not answer
const OUTPUTS = '.jp-OutputArea-child, .output_area, .output-area, .output'; // around an output: JupyterLab, others

// Send requests to the kernel; an answer comes in parts, because a message has a limited size.
function transport(model, silent) {
  const waiting = new Map();
  const mine = Math.random().toString(36).slice(2); // other views of the model get the answers too
  let count = 0;
  let heard = performance.now();
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
  const listeners = [];
  const scheme = { matches: isDark(el), addEventListener: (_kind, changed) => listeners.push(changed) };
  const show = () => {
    page.dataset.scheme = scheme.matches ? 'dark' : 'light';
  };
  const check = () => {
    const matches = isDark(el);
    if (matches === scheme.matches) return;
    scheme.matches = matches;
    show();
    for (const changed of listeners) changed();
  };
  const watch = new MutationObserver(() => {
    check();
    setTimeout(check, 400);
  });
  const media = matchMedia('(prefers-color-scheme: dark)');
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

// Whether a page shows what was selected elsewhere; a part that was left open is never equal. The number of queries in
// view follows from the height of a map.
const shows = (now, { layer, head, queries, keys, query }) =>
  now.layer === layer &&
  now.head === head &&
  now.query === query &&
  now.queries[0] === queries?.[0] &&
  now.keys.every((end, k) => end === keys?.[k]);

// One view of the widget: the page in a shadow root, and what it does with the notebook around it.
class View {
  constructor(model, el) {
    this.model = model;
    this.el = el;
    this.viewed = null; // the viewer's page, once the box has a size
    this.width = 0; // of the box
    this.sizes = []; // functions that are called when the size has changed
    this.engaged = false; // whether the last press was in the page
    this.hash = ''; // what is shown, as the part of an address after #
    this.moved = () => {};
    this.sent = JSON.stringify(model.get('selection'));
    this.build(model.get('_page'));
    this.kernel = transport(model, silent => this.showSilence(silent));
    this.colours = theme(el, this.page);
    this.close = this.listen();
  }

  build({ html, css, lang, height, texts, mark }) {
    this.texts = texts;
    this.mark = mark;
    this.shadow = this.el.attachShadow({ mode: 'open' });
    this.box = document.createElement('div');
    this.page = document.createElement('div');
    this.notice = document.createElement('p');
    const style = document.createElement('style');
    style.textContent = css;
    // It has no text of a record.
    this.page.append(...new DOMParser().parseFromString(html, 'text/html').body.childNodes);
    Object.assign(this.page, { lang, className: 'page' });
    this.page.setAttribute('role', 'region');
    Object.assign(this.notice, { className: 'gone', hidden: true });
    this.notice.setAttribute('role', 'status');
    this.page.prepend(this.notice);
    this.box.className = 'box';
    this.box.style.height = height + 'px';
    this.box.append(this.page);
    this.shadow.append(style, this.box);
    this.el.classList.add('multihead-view');
  }

  // Listen to the notebook, the kernel and the reader; returns the function that ends it.
  listen() {
    const observer = new ResizeObserver(() => this.resize());
    const late = new MutationObserver(() => {
      if (this.viewed) this.hideStatic(true); // it is shown after the widget
    });
    const follow = () => this.follow();
    // The wheel zooms from a click into the page to a click outside of it.
    const engage = event => {
      this.engaged = event.composedPath().includes(this.el);
    };
    // JupyterLab acts on keys before or after the page, according to its version; this attribute keeps it from both.
    const suppress = event => this.el.toggleAttribute('data-lm-suppress-shortcuts', !isCommand(event));
    this.model.on('change:selection', follow);
    observer.observe(this.box);
    late.observe(document.body, { childList: true, subtree: true });
    this.shadow.addEventListener('click', event => this.click(event));
    addEventListener('pointerdown', engage, true);
    addEventListener('keydown', suppress, true);
    return () => {
      removeEventListener('keydown', suppress, true);
      removeEventListener('pointerdown', engage, true);
      this.model.off('change:selection', follow);
      observer.disconnect();
      late.disconnect();
      this.colours.close();
      this.kernel.close();
      this.hideStatic(false);
    };
  }

  // What takes the place of the modules host.js for the page's scripts.
  host() {
    const { box, page, shadow } = this;
    return {
      root: shadow,
      frame: page,
      texts: this.texts,
      scheme: this.colours.scheme,
      addressOf: path => path,
      request: this.kernel.request,
      place: this.place(),
      windowSize: () => ({ width: box.clientWidth, height: box.clientHeight }),
      onResize: changed => this.sizes.push(changed),
      beforeEvent: (kind, act) => shadow.addEventListener(kind, act, true),
      onKeyDown: act =>
        shadow.addEventListener('keydown', event => {
          act(event);
          if (!isCommand(event)) event.stopPropagation();
        }),
      onPrint: () => {}, // a notebook prints the picture and the table that follow the widget
      isOutsidePage: () => false,
      isWheelZoom: event => isCommand(event) || this.engaged, // else the wheel scrolls the notebook
      showMapLayout: map => page.classList.toggle('map', map),
      setTitle: title => page.setAttribute('aria-label', title),
      scrollToTop: () => {
        box.scrollTop = 0;
      },
      markSaved: saved => {
        page.dataset.saved = String(saved);
        if (saved) this.report();
      },
    };
  }

  place() {
    return {
      read: () => this.hash,
      go: next => {
        if (next === this.hash) return;
        this.hash = next;
        this.moved();
      },
      replace: next => {
        this.hash = next;
      },
      listen: changed => {
        this.moved = changed;
      },
    };
  }

  notify(words) {
    this.notice.hidden = !words;
    this.notice.textContent = words;
  }

  showSilence(silent) {
    if (silent || this.notice.textContent === this.texts.silent) this.notify(silent ? this.texts.silent : '');
  }

  // The kernel learns what is in view, and the page shows what was selected in the kernel.
  report() {
    const now = this.viewed?.inView() ?? null;
    const given = this.model.get('selection');
    const key = JSON.stringify(now);
    if (!this.viewed || key === this.sent) return;
    this.sent = key;
    if (now && given && shows(now, given)) return;
    this.model.set('selection', now);
    this.model.save_changes();
  }

  follow() {
    const given = this.model.get('selection');
    const key = JSON.stringify(given);
    if (!this.viewed || key === this.sent) return;
    this.sent = key;
    const now = this.viewed.inView();
    if (given ? !now || !shows(now, given) : now) this.viewed.select(given);
  }

  // The page starts once it has a size; a notebook may take the cell out of the document, and put it back.
  resize() {
    if (!this.box.clientWidth) return;
    if (!this.viewed) {
      this.viewed = viewer(this.host());
      const given = this.model.get('selection');
      if (given) this.viewed.select(given);
      this.hideStatic(true);
    } else if (this.width) for (const changed of this.sizes) changed();
    this.width = this.box.clientWidth;
  }

  hideStatic(hidden) {
    for (const output of document.querySelectorAll(`[data-multihead-static="${this.mark}"]`)) {
      const around = output.closest(OUTPUTS) ?? output;
      if (around instanceof HTMLElement && !around.contains(this.el)) around.style.display = hidden ? 'none' : '';
    }
  }

  // Links within the page change what is shown; downloads are requests too.
  click(event) {
    const link = event.target.closest('a[href]');
    const to = link?.getAttribute('href');
    if (!link || event.defaultPrevented) return;
    if (link.hasAttribute('download')) {
      event.preventDefault();
      this.save(to);
    } else if (to.startsWith('#')) {
      event.preventDefault();
      this.place().go(to);
    }
  }

  async save(path) {
    const response = await this.kernel.request(path);
    if (!response.ok) {
      this.notify((await response.json()).error);
      return;
    }
    const address = URL.createObjectURL(await response.blob());
    const name = /filename="([^"]*)"/.exec(response.headers.get('content-disposition'))?.[1] ?? '';
    Object.assign(document.createElement('a'), { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  }
}

// What notebooks call for each view, with the element of its cell; returns what they call when the cell is removed.
export default { render: ({ model, el }) => new View(model, el).close };
