// The lists of runs, own networks and proofs, and runs side by side.

import { sections } from "./blocks.js";
import { Chart } from "./charts.js";
import { duration, h, href, interval, number, table } from "./dom.js";
import { follow, frozen, getComparison, getProof } from "./source.js";

const progress = (run) => h("span", {}, number(run.rounds_done),
  h("small", {}, ` of ${number(run.rounds)}`), " ",
  h("progress", { max: run.rounds || 1, value: run.rounds_done ?? 0, "aria-hidden": "true" }));
const status = (run) => h("span", { class: `status ${(run.status ?? "").replace(" ", "-")}`, title: run.problem }, run.status);
const COLUMNS = {
  run: { value: (run) => run.id, show: (run) => h("a", { href: href("run", run.id) }, run.id) },
  status: { value: (run) => run.status, show: status },
  J: { value: (run) => run.objective },
  accuracy: { value: (run) => run.accuracy },
  task: { value: (run) => run.task },
  policy: { value: (run) => run.policy },
  "random seed": { value: (run) => run.seed },
  rounds: { value: (run) => run.rounds_done, show: progress },
  duration: { value: (run) => run.seconds, show: (run) => h("span", { class: "n" }, duration(run.seconds)) },
  started: { value: (run) => run.started, show: (run) => h("span", {}, (run.started ?? "—").replace("T", " ").slice(0, 16)) },
};

/** Runs in a table that can be sorted and searched. */
class RunTable {
  constructor(names, choose) {
    Object.assign(this, { names, choose, order: "started", down: true, runs: new Map(), chosen: new Set() });
    this.search = h("input", { type: "search", placeholder: "filter", "aria-label": "filter runs", input: () => this.draw() });
    this.heads = names.map((name) => h("th", { scope: "col", "data-column": name },
      h("button", { click: () => this.sort(name) }, name)));
    this.body = h("tbody");
    this.element = h("div", { class: "wide" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, choose ? h("th", { scope: "col" }, h("span", { class: "hidden" }, "compare")) : null, this.heads)), this.body));
  }

  sort(name) {
    this.down = this.order === name ? !this.down : name === "started" || name === "J";
    this.order = name;
    this.draw();
  }

  hear(message, keep = () => true) {
    if (message.whole) this.runs.clear();
    message.runs.filter(keep).forEach((run) => this.runs.set(run.id, run));
    this.latest = message.latest;
    this.draw();
  }

  draw() {
    const words = this.search.value.toLowerCase().split(/\s+/);
    const { value } = COLUMNS[this.order];
    const compare = (a, b) => (a ?? "") < (b ?? "") ? -1 : Number((a ?? "") > (b ?? ""));
    const shown = [...this.runs.values()]
      .filter((run) => words.every((word) => `${run.id} ${run.task} ${run.policy} ${run.status}`.toLowerCase().includes(word)))
      .sort((a, b) => (this.down ? -1 : 1) * compare(value(a), value(b)));
    this.heads.forEach((head) => head.setAttribute("aria-sort",
      head.dataset.column === this.order ? (this.down ? "descending" : "ascending") : "none"));
    const focused = document.activeElement?.closest("tr")?.dataset.run;
    this.body.replaceChildren(...shown.map((run) => this.row(run)));
    if (focused) this.body.querySelector(`[data-run="${CSS.escape(focused)}"] a`)?.focus();
  }

  row(run) {
    const box = this.choose && h("input", { type: "checkbox", checked: this.chosen.has(run.id), "aria-label": `compare ${run.id}`,
      change: (event) => {
        this.chosen[event.target.checked ? "add" : "delete"](run.id);
        this.choose([...this.chosen]);
      } });
    return h("tr", { "data-run": run.id, class: run.id === this.latest ? "latest" : null }, box ? h("td", {}, box) : null,
      this.names.map((name) => {
        const { value, show } = COLUMNS[name];
        return h("td", { class: typeof value(run) === "number" ? "n" : null }, show ? show(run) : number(value(run)));
      }));
  }
}

export function runsView(main, _arguments, { tell }) {
  const compare = h("a", { class: "button", "aria-disabled": "true" }, "Compare");
  const list = new RunTable(["run", "status", "J", "task", "policy", "random seed", "rounds", "duration", "started"], (ids) => {
    compare.toggleAttribute("href", false);
    compare.textContent = ids.length > 1 ? `Compare ${ids.length} runs` : "Compare";
    if (ids.length > 1) compare.setAttribute("href", href("compare", ...ids));
  });
  const note = h("p", { class: "absent" });
  main.append(h("h1", {}, "Runs"),
    h("p", { class: "bar" }, h("a", { class: "button", href: href("run", "latest") }, "Follow the latest run"), compare, list.search), note, list.element);
  return follow(null, (message) => {
    list.hear(message);
    note.textContent = list.runs.size ? "" : `There is no run below ${message.root} yet. A run that starts there appears by itself.`;
  }, tell);
}

export function ownView(main, _arguments, { tell }) {
  const list = new RunTable(["run", "status", "task", "policy", "accuracy", "J", "duration", "started"]);
  const note = h("p", { class: "absent" });
  main.append(h("h1", {}, "Own networks"), h("p", { class: "bar" }, list.search), note, list.element);
  return follow(null, (message) => {
    list.hear(message, (run) => run.own);
    note.textContent = list.runs.size ? "" : "No network of your own is recorded here: esper.attach(…, record=\"runs/mine\") records one.";
  }, tell);
}

// -- comparison -----------------------------------------------------------------------------------------------

function verdict(row, [, low, high]) {
  if (!row.better || (low <= 0 && high >= 0)) return "";
  return (low > 0) === (row.better === "higher") ? " better" : " worse";
}

export function compareView(main, ids, { tell }) {
  const body = h("div", { "aria-live": "polite" });
  main.append(h("h1", {}, "Compare"), body);
  if (ids.length < 2) {
    body.append(h("p", {}, "Choose two or more runs of one task in the ", h("a", { href: href("runs") }, "list of runs"), "."));
    return () => {};
  }
  const chart = new Chart({ type: "lines", title: "Objective J", note: "Mean over the envs, by round.", label: "round" });
  const intervals = new Chart({ type: "intervals", title: "Objective J", note: "Mean over the episodes that all runs have, 95 % interval." });
  const rest = h("div");
  body.append(h("div", { class: "grid" }, chart.element, intervals.element), rest);
  async function load() {
    try {
      const found = await getComparison(ids);
      chart.set(ids.map((name) => ({ name, x: found.curves[name][0], y: found.curves[name][1] })));
      const j = found.rows.find((row) => row.metric === "objective");
      if (j) intervals.set(Object.fromEntries(ids.map((name, i) => [name, j.runs[i]])));
      rest.replaceChildren(
        h("p", {}, `Intervals are over the ${number(found.units)} episodes that every run has. ${found.paired
          ? "Differences are paired: with one random seed, every run gives an env and episode the same draws."
          : "The random seeds differ, so episodes cannot be paired and no differences are shown."}`),
        table(found.rows.map((row) => ({
          metric: row.metric,
          unit: row.unit,
          ...Object.fromEntries(ids.map((name, i) => [name, interval(row.runs[i])])),
          ...Object.fromEntries(row.differences.map((d, i) => [`${ids[i + 1]} − ${ids[0]}`, `${interval(d)}${verdict(row, d)}`])),
        }))),
        h("h3", {}, "What differs"),
        found.notes.length ? h("ul", {}, found.notes.map((note) => h("li", {}, note))) : h("p", { class: "absent" }, "Nothing."));
    } catch (error) {
      rest.replaceChildren(h("p", { class: "error" }, error.message));
    }
  }
  let timer = null;
  const end = follow(null, (message) => {
    if (message.whole || message.runs.some((run) => ids.includes(run.id))) {
      clearTimeout(timer);
      timer = setTimeout(load, message.whole ? 0 : 3000);
    }
  }, tell);
  return () => {
    clearTimeout(timer);
    end();
  };
}

// -- proofs ---------------------------------------------------------------------------------------------------

export function proofView(main, [name], { tell }) {
  const body = h("div");
  const list = h("p", { class: "bar" });
  main.append(h("h1", {}, frozen ? document.title : "Proof"), list, body);
  async function load(proof) {
    try {
      const made = sections(await getProof(proof));
      body.replaceChildren(...made.elements);
      made.update(null);
    } catch (error) {
      body.replaceChildren(h("p", { class: "error" }, error.message));
    }
  }
  if (frozen) {
    load();
    return () => {};
  }
  let shown = null;
  return follow(null, ({ proofs, root }) => {
    list.replaceChildren(...proofs.map((proof) => h("a", { class: "button", href: href("proof", proof), "aria-current": String(proof === (name ?? proofs.at(-1))) }, proof)));
    if (!proofs.length) list.replaceChildren(h("span", { class: "absent" }, `There is no proof.json below ${root}: esper prove writes one.`));
    const wanted = name ?? proofs.at(-1);
    if (wanted && wanted !== shown) load(shown = wanted);
  }, tell);
}
