// Sections of charts, tables and notes, as the server lays them out for runs and proofs.

import { Chart } from "./charts.js";
import { h, table } from "./dom.js";

const at = (parts, path) => path.split(".").reduce((value, name) => value?.[name], parts);
const listed = (data, only) => Object.entries(data?.series ?? {}).filter(([name]) => !only || name === only)
  .map(([name, y]) => ({ name, x: data.x, y }));

/** A chart over curves of a run, over one of its parts, or over data of its own. */
function chartBlock(block) {
  const { keys = [], part, only, data, rows, x: label, band, ...options } = block;
  const chart = new Chart({ label: part ? "epoch" : label, ...options });
  const read = (state, name) =>
    ({ name: name.split("/").at(-1), ...(state.curves.get(name) ?? { x: [], y: [] }) });
  function update(state, changed) {
    if (rows || data) chart.set(rows ?? listed(data));
    else if (part) {
      if (!changed || changed.has(part.split(".")[0])) chart.set(listed(at(state.parts, part), only));
    } else {
      const names = keys.flatMap((key) => state.names(key));
      if (!changed || names.some((name) => changed.has(name))) {
        const shade = band ? { band: band.map((name) => read(state, name)) } : {};
        chart.set(names.map((name) => read(state, name)), shade);
      }
    }
  }
  return { element: chart.element, update, wide: false };
}

function tableBlock({ part, rows, title, absent }) {
  const element = h("div");
  function update(state, changed) {
    if (changed && !(part && changed.has(part))) return;
    const found = rows ?? state.parts[part] ?? [];
    if (found.length) element.replaceChildren(title ? h("h3", {}, title) : "", table(found));
    else element.replaceChildren(absent ? h("p", { class: "absent" }, absent) : "");
  }
  return { element, update, wide: true };
}

const noteBlock = ({ text }) => ({ element: h("p", {}, text), update: () => {}, wide: true });

const BLOCKS = {
  lines: chartBlock, bars: chartBlock, intervals: chartBlock, table: tableBlock, note: noteBlock,
};

/** Sections with their blocks; `special` makes those that are not charts, tables or notes.
    `update(state, changed)` draws what has changed, or everything without `changed`. */
export function sections(layout, special = {}) {
  const updates = [];
  const elements = layout.map(({ id, title, blocks }) => {
    const section = h("section", { id }, h("h2", {}, title));
    let grid = null;
    for (const block of blocks) {
      const made = (BLOCKS[block.type] ?? special[block.type])(block);
      updates.push(made.update);
      if (made.wide) {
        section.append(made.element);
        grid = null;
      } else {
        if (!grid) section.append(grid = h("div", { class: "grid" }));
        grid.append(made.element);
      }
    }
    return section;
  });
  return { elements, update: (state, changed) => updates.forEach((update) => update(state, changed)) };
}
