// Where the focus goes when the page has changed under it.

const LOOK_MS = 50;
const MOST_LOOKS = 2400; // two minutes: a busy server takes long
const SIGNS = ["input", "keydown", "pointerdown", "wheel"];

/**
 * Call `act` as soon as the server has answered and the page stands still, unless the learner goes on before: what is typed by then
 * must not lose its Enter, nor what is read its place.
 * @param {() => void} act
 */
export function onceStill(act) {
  let busy = false;
  const goesOn = () => {
    busy = true;
  };
  for (const sign of SIGNS) document.addEventListener(sign, goesOn, { capture: true, once: true, passive: true });
  let looks = 0;
  const timer = setInterval(() => {
    const app = document.querySelector("[data-testid=stApp]");
    const still = app?.getAttribute("data-test-script-state") === "notRunning" && looks > 0;
    if (still && !busy) act();
    if (still || busy || ++looks > MOST_LOOKS) clearInterval(timer);
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
