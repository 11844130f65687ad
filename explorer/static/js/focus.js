// Streamlit disables a download button while its file is made, and an element that is disabled loses the focus. Who works by keys
// would begin again at the top of the page; so the button gets the focus back, unless it has gone elsewhere meanwhile.

const BUTTON = '[data-testid="stDownloadButton"] button';
const PATIENCE_MS = 120_000;

/** @param {MouseEvent} event */
function pressed(event) {
  const button = event.target instanceof Element ? event.target.closest(BUTTON) : null;
  if (button instanceof HTMLButtonElement && button === document.activeElement) giveBack(button);
}

/** @param {HTMLButtonElement} button that has the focus, and that its press may disable */
function giveBack(button) {
  const observer = new MutationObserver(() => {
    if (button.disabled) return;
    observer.disconnect();
    if (document.activeElement === document.body) button.focus();
  });
  observer.observe(button, { attributes: true, attributeFilter: ["disabled"] });
  setTimeout(() => observer.disconnect(), PATIENCE_MS);
}

/** Begin to listen, once for each document. */
export function keepFocus() {
  const root = document.documentElement;
  if (root.dataset.keepsFocus) return;
  root.dataset.keepsFocus = "downloads";
  document.addEventListener("click", pressed, true);
}
