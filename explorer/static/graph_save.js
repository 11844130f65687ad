// The drawing as a file: SVG with the page's colours written into it, or PNG.

// The drawing as it stands, whole, with the page's colours and fonts written into it.
function still(graph) {
  graph.world.classList.remove("far");
  const key = drawKey(graph), box = graph.world.getBBox(), copy = graph.canvas.cloneNode(true);
  const live = graph.canvas.querySelectorAll("*"), parts = copy.querySelectorAll("*");
  const kept = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-family", "font-size", "font-weight", "text-anchor", "opacity", "marker-end"];
  live.forEach((element, i) => { const style = getComputedStyle(element); for (const k of kept) parts[i].style.setProperty(k, style.getPropertyValue(k)); });
  key.remove();
  copy.querySelector(".world").removeAttribute("transform");
  const width = Math.ceil(box.width + 32), height = Math.ceil(box.height + 32);
  copy.setAttribute("viewBox", [box.x - 16, box.y - 16, width, height].join(" "));
  copy.setAttribute("width", width); copy.setAttribute("height", height);
  copy.setAttribute("xmlns", SVG);
  const paper = getComputedStyle(graph.root.querySelector(".graph")).backgroundColor;
  const ground = make("rect", { x: box.x - 16, y: box.y - 16, width, height, fill: paper });
  copy.insertBefore(ground, copy.querySelector(".world"));
  graph.place();
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

// The legend below the drawing, one entry a line, the shades of a scale beside each other; empty where nothing is to be told.
function drawKey(graph) {
  const { x: left, y, height } = graph.world.getBBox(), keys = graph.keys();
  const g = make("g", { class: "key" }, keys.length ? graph.world : undefined);
  let x = left, top = y + height + 30;
  for (const { mark, fill, text } of keys.length ? [{ text: graph.scene.title }, ...keys] : []) {
    if (mark !== "shade" && x > left) { x = left; top += 20; }
    drawMark(graph, g, mark, fill, x, top);
    const lines = broken(text).map((line, i) => make("text", { x: mark ? x + 30 : x, y: top + 16 * i }, g, line));
    if (mark === "shade") x += 48 + lines[0].getComputedTextLength(); else top += 4 + 16 * lines.length;
  }
  return g;
}

// Words in lines that the fonts of other programs, which may be wider, still keep inside most drawings.
function broken(text, most = 64) {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length >= most) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) && " ") + word;
  }
  return lines;
}

function drawMark(graph, g, mark, fill, x, y) {
  const box = { x, y: y - 9, width: 22, height: 10 };
  if (mark === "grey" || mark === "stripes") make("rect", { ...box, class: mark === "grey" ? "whole" : "partial" }, g);
  if (mark === "slices") graph.data.devices.slice(0, 4).forEach((colour, i) => make("rect", { ...box, x: x + i * 5.5, width: 5, fill: colour }, g));
  if (mark === "shade") make("rect", { ...box, class: "swatch", style: `fill: ${fill}` }, g);
  if (mark === "line") make("path", { class: "wire sends", style: "marker-end: none; stroke-width: 4", d: `M${x},${y - 4}L${x + 22},${y - 4}` }, g);
  if (mark === "diamond") make("rect", { class: "diamond", x: x + 6, y: y - 9, width: 10, height: 10, transform: `rotate(45 ${x + 11} ${y - 4})` }, g);
  if (mark === "bare") {
    const b = make("g", { class: "bare" }, g);
    make("rect", { x: x + 4, y: y - 12, width: 14, height: 16, rx: 3 }, b);
    make("text", { x: x + 11, y: y + 0.5 }, b, "!");
  }
}

function keep(graph, blob, suffix) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${graph.scene.title}.${suffix}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function saveSvg(graph) { keep(graph, new Blob([still(graph).text], { type: "image/svg+xml" }), "svg"); }

// Two dots a pixel, fewer where the picture would be larger than browsers draw.
function savePng(graph) {
  const { text, width, height } = still(graph), most = 16384, k = Math.min(2, most / width, most / height, Math.sqrt(1e8 / (width * height)));
  const image = new Image(), page = document.createElement("canvas");
  page.width = Math.round(width * k); page.height = Math.round(height * k);
  image.onload = () => {
    page.getContext("2d").drawImage(image, 0, 0, page.width, page.height);
    page.toBlob((blob) => { if (blob) keep(graph, blob, "png"); else graph.said.textContent = "The picture is too large for a PNG; take the SVG."; });
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}
