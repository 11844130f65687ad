"""The graph component on a bare page of its own: its files as they are, data from Python, times from performance.now."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from explorer.static import script, style, template

DRAW = """
async ([source, scene, open]) => {
  const { default: mount } = await import("data:text/javascript;base64," + source);
  const data = { key: "k", scene: JSON.parse(scene), overlay: { split: {}, stages: {}, messages: {} }, devices: [], selected: "", open, show: "split", asked: 1 };
  const root = document.getElementById("root");
  window.update = () => mount({ parentElement: root, data, setStateValue: () => {} });
  const start = performance.now();
  window.update();
  await new Promise(requestAnimationFrame);
  await new Promise((done) => setTimeout(done));
  return performance.now() - start;
}
"""
TOGGLE = """
() => new Promise((done) => {
  const toggle = document.querySelector(".toggle"), start = performance.now();
  const at = { bubbles: true, button: 0, clientX: 1, clientY: 1 };
  toggle.dispatchEvent(new PointerEvent("pointerdown", at));
  toggle.dispatchEvent(new PointerEvent("pointerup", at));
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
})
"""
SEEN = """
() => { const c = document.querySelector(".canvas").getBoundingClientRect();
  return [...document.querySelectorAll("g.node")].filter((g) => { const b = g.getBoundingClientRect();
    return b.right > c.left && b.left < c.right && b.bottom > c.top && b.top < c.bottom; }).length; }
"""
DRAWN = 3000


def source() -> str:
    """Return the component's JavaScript, as DRAW takes it."""
    return base64.b64encode(script("graph").encode()).decode()


@contextmanager
def mounted(browser: Any) -> Iterator[Any]:
    """A bare page that holds the component's own HTML and CSS."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.set_default_timeout(120_000)
    html, css = template("graph"), style("graph")
    look = ":root{--st-background-color:#fff;--st-secondary-background-color:#f3f5f7;--st-text-color:#111;--st-border-color:#ccc;--st-primary-color:#0072B2}"
    page.set_content(f"<style>{look}{css}</style><div id=root>{html}</div>")
    yield page
    context.close()


def grid(columns: int = 75, rows: int = 41) -> dict[str, Any]:
    """Return a made-up drawing whose nodes can all be in the window at once, each with an edge to the next two."""
    nodes = [
        {
            "id": f"n{i}",
            "label": f"node {i}",
            "sub": "16×4096",
            "kind": "weight",
            "x": 120 * (i % columns),
            "y": 70 * (i // columns),
            "w": 96,
            "h": 34,
        }
        for i in range(columns * rows)
    ]
    ends = [(i, j) for i in range(len(nodes)) for j in (i + 1, i + columns) if j < len(nodes)]
    wires = [
        [f"n{i}", f"n{j}", [nodes[i]["x"], nodes[i]["y"] + 17, nodes[j]["x"], nodes[j]["y"] - 17]] for i, j in ends
    ]
    return {"title": "grid", "scopes": {"": {"w": 120 * columns, "h": 70 * rows, "nodes": nodes, "wires": wires}}}
