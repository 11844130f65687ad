"""Times that a page notes itself, by its own clock: a question from outside waits while the page is busy."""

from __future__ import annotations

import json
from typing import Any

from bench.support.app.running_explorer import Place

PAINTED = """
(sign) => {
  const inside = (root) => [
    ...root.querySelectorAll(sign),
    ...[...root.querySelectorAll('*')].flatMap((e) => (e.shadowRoot ? inside(e.shadowRoot) : [])),
  ];
  const look = () => {
    const shown = inside(document).some((e) => e.getClientRects().length && (e.complete ?? true));
    if (shown) requestAnimationFrame(() => { window.painted = performance.now(); });
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}
"""
"""Notes when a sign was drawn, in the page or in a component of it."""
LOADED = """
() => [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
  .filter((e) => e.responseEnd <= window.painted).reduce((sum, e) => sum + e.transferSize, 0)
"""
WATCH = """
() => new Promise((done) => {
  const text = (key) => document.querySelector('.st-key-whatif_' + key)?.innerText;
  const before = text('answer'), start = performance.now(), times = {};
  const look = () => {
    const early = text('early'), best = text('answer');
    if (!('any' in times) && (early || (best && best !== before))) times.any = performance.now() - start;
    if (best && best !== before && !early) return done({ ...times, best: performance.now() - start });
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})
"""
"""Milliseconds until the panel has figures for the new value, and until these are the best plan's."""


def first_picture(place: Place, path: str, sign: str) -> tuple[float, float]:
    """Milliseconds from a cold browser's request until a sign is drawn, and the bytes that were loaded till then."""
    context = place.browser.new_context(viewport={"width": 1440, "height": 1000})
    page = context.new_page()
    page.add_init_script(f"({PAINTED.strip()})({json.dumps(sign)})")
    page.goto(place.url + path, wait_until="commit")
    page.wait_for_function("() => window.painted", timeout=120_000)
    found = page.evaluate("() => window.painted"), page.evaluate(LOADED)
    context.close()
    return found


def answered(page: Any, key: str) -> dict[str, float]:
    """Press a key on the focused slider; what WATCH says."""
    watching = page.evaluate_handle(f"() => {{ window.seen = ({WATCH.strip()})(); }}")
    page.keyboard.press(key)
    found: dict[str, float] = page.evaluate("() => window.seen")
    watching.dispose()
    return found
