// The button that copies the address of what is shown.
import { $, translate } from '../shared/dom.js';

// save(): called first, so that the address matches the page.
export function linkButton(save) {
  $('link').onclick = async () => {
    save();
    try {
      await navigator.clipboard.writeText(location.href);
      $('link').textContent = translate('copied');
    } catch {
      $('link').textContent = translate('copy yourself');
    }
    setTimeout(() => {
      $('link').textContent = translate('copy link');
    }, 1600);
  };
}
