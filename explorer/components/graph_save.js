// The drawing as a file: SVG with the page's colours written into it, or PNG.

// The drawing as it stands, whole, with the page's colours and fonts written into it.
function still(graph) {
  graph.world.classList.remove("far");
  const copy = graph.canvas.cloneNode(true), box = graph.world.getBBox();
  const live = graph.canvas.querySelectorAll("*"), parts = copy.querySelectorAll("*");
  const kept = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-family", "font-size", "font-weight", "text-anchor", "opacity", "marker-end"];
  live.forEach((element, i) => { const style = getComputedStyle(element); for (const k of kept) parts[i].style.setProperty(k, style.getPropertyValue(k)); });
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
