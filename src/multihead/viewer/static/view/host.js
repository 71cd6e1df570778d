// What the viewer needs of the window and of the server. In a notebook a widget takes the place of this module, and its
// requests travel to the kernel (widget/widget.js).
export const addressOf = path => new URL(path, document.baseURI).href;
export const request = (path, signal) => fetch(addressOf(path), { signal, referrerPolicy: 'no-referrer' });

// What is shown, as the part of the address after #.
export const place = {
  read: () => location.hash,
  go: hash => {
    location.hash = hash;
  },
  replace: hash => history.replaceState(null, '', hash),
  listen: changed => addEventListener('hashchange', changed),
};

export const windowSize = () => ({ width: innerWidth, height: innerHeight });
export const onResize = changed => addEventListener('resize', changed);
// act(true) before the page is printed, act(false) after it.
export const onPrint = act => {
  addEventListener('beforeprint', () => act(true));
  addEventListener('afterprint', () => act(false));
};
export const isOutsidePage = target => target === document.body; // a key was pressed while no element had the focus
export const isWheelZoom = _event => true; // the wheel zooms wherever the focus is
export const showMapLayout = map => {
  document.body.classList.toggle('map', map);
};
export const setTitle = title => {
  document.title = title;
};
export const scrollToTop = () => scrollTo(0, 0);
export const markSaved = saved => {
  document.documentElement.dataset.saved = String(saved);
}; // the address matches the page
