// Where the focus goes when the page has changed under it.

const LOOK_MS = 50;
const MOST_LOOKS = 60;

/**
 * Call `act` as soon as the server has answered and the page stands still.
 * @param {() => void} act
 */
export function onceStill(act, looks = 0) {
  setTimeout(() => {
    const app = document.querySelector("[data-testid=stApp]");
    const still = app?.getAttribute("data-test-script-state") === "notRunning";
    if (still && looks > 0) act();
    else if (looks < MOST_LOOKS) onceStill(act, looks + 1);
  }, LOOK_MS);
}

/**
 * Focus what is no control, so that keys and screen readers go on from there.
 * @param {string} selector
 */
export function land(selector) {
  const found = document.querySelector(selector);
  if (!(found instanceof HTMLElement)) return;
  found.tabIndex = -1;
  found.focus();
}
