// The page works without this; it adds the choice of a round and the values under the pointer.
const lanes = document.getElementById("lanes");
document.getElementById("round")?.addEventListener("change", (event) => {
  const page = document.querySelector(`template[data-round="${event.target.value}"]`);
  lanes.replaceChildren(page.content.cloneNode(true));
});

for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const { x, px, series } = JSON.parse(svg.dataset.chart);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", 10);
  cursor.setAttribute("y2", 168);
  const tip = document.createElement("div");
  tip.className = "tip";
  svg.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const i = px.reduce((best, p, k) => (Math.abs(p - at) < Math.abs(px[best] - at) ? k : best), 0);
    cursor.setAttribute("x1", px[i]);
    cursor.setAttribute("x2", px[i]);
    tip.textContent = [`at ${x[i]}`, ...Object.entries(series).map(([name, values]) => `${name}  ${values[i]}`)].join("\n");
    svg.append(cursor);
    svg.parentElement.append(tip);
  });
  svg.addEventListener("pointerleave", () => { cursor.remove(); tip.remove(); });
}
