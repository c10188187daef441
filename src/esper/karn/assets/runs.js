// The lists of runs, own networks and proofs, and runs side by side.

import { sections } from "./blocks.js";
import { Chart } from "./charts.js";
import { duration, h, href, interval, number, table } from "./dom.js";
import { follow, frozen, getComparison, getProof } from "./source.js";

function progress(run) {
  return h("span", {}, number(run.rounds_done), h("small", {}, ` of ${number(run.rounds)}`), " ",
    h("progress", { max: run.rounds || 1, value: run.rounds_done ?? 0, "aria-hidden": "true" }));
}

function status(run) {
  return h("span", { class: `status ${(run.status ?? "").replace(" ", "-")}`, title: run.problem }, run.status);
}

/** Columns of the lists: the value to sort by, how it is shown, and on which side. */
const COLUMNS = {
  run: { value: (run) => run.id, show: (run) => h("a", { href: href("run", run.id) }, run.id) },
  status: { value: (run) => run.status, show: status },
  J: { value: (run) => run.objective, side: "n" },
  accuracy: { value: (run) => run.accuracy, side: "n" },
  task: { value: (run) => run.task },
  policy: { value: (run) => run.policy },
  "random seed": { value: (run) => run.seed, side: "n" },
  rounds: { value: (run) => run.rounds_done, show: progress, side: "n" },
  duration: { value: (run) => run.seconds, show: (run) => duration(run.seconds), side: "n" },
  started: { value: (run) => run.started, show: (run) => (run.started ?? "—").replace("T", " ").slice(0, 16) },
};

/** Runs in a table that can be sorted and searched; `choose` is told which of them are ticked. */
class RunTable {
  constructor(names, choose) {
    Object.assign(this, { names, choose, order: "started", down: true, runs: new Map(), chosen: new Set() });
    this.search = h("input", { type: "search", placeholder: "filter", "aria-label": "filter runs",
      input: () => this.draw() });
    this.heads = names.map((name) => h("th", { scope: "col", "data-column": name, class: COLUMNS[name].side },
      h("button", { click: () => this.sort(name) }, name)));
    const tick = choose ? h("th", { scope: "col" }, h("span", { class: "hidden" }, "compare")) : null;
    this.body = h("tbody");
    this.element = h("div", { class: "wide" }, h("table", { class: "runs" },
      h("thead", {}, h("tr", {}, tick, this.heads)), this.body));
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
    const has = (run) => {
      const text = `${run.id} ${run.task} ${run.policy} ${run.status}`.toLowerCase();
      return words.every((word) => text.includes(word));
    };
    const value = (run) => COLUMNS[this.order].value(run) ?? "";
    const compare = (a, b) => Number(value(a) > value(b)) - Number(value(a) < value(b));
    const shown = [...this.runs.values()].filter(has).sort((a, b) => (this.down ? -1 : 1) * compare(a, b));
    const direction = this.down ? "descending" : "ascending";
    this.heads.forEach((head) =>
      head.setAttribute("aria-sort", head.dataset.column === this.order ? direction : "none"));
    const focused = document.activeElement?.closest("tr")?.dataset.run;
    this.body.replaceChildren(...shown.map((run) => this.row(run)));
    if (focused) this.body.querySelector(`[data-run="${CSS.escape(focused)}"] a`)?.focus();
  }

  row(run) {
    const box = this.choose && h("input", {
      type: "checkbox", checked: this.chosen.has(run.id), "aria-label": `compare ${run.id}`,
      change: (event) => {
        this.chosen[event.target.checked ? "add" : "delete"](run.id);
        this.choose([...this.chosen]);
      },
    });
    const cells = this.names.map((name) => {
      const { value, show = (one) => number(value(one)), side } = COLUMNS[name];
      return h("td", { class: side }, show(run));
    });
    return h("tr", { "data-run": run.id, class: run.id === this.latest ? "latest" : null },
      box ? h("td", {}, box) : null, cells);
  }
}

export function runsView(main, _arguments, { tell }) {
  const compare = h("a", { class: "button" }, "Compare");
  const columns = ["run", "status", "J", "task", "policy", "random seed", "rounds", "duration", "started"];
  const list = new RunTable(columns, (ids) => {
    compare.textContent = ids.length > 1 ? `Compare ${ids.length} runs` : "Compare";
    if (ids.length > 1) compare.setAttribute("href", href("compare", ...ids));
    else compare.removeAttribute("href");
  });
  const note = h("p", { class: "absent" });
  main.append(h("h1", {}, "Runs"), h("p", { class: "bar" },
    h("a", { class: "button", href: href("run", "latest") }, "Follow the latest run"), compare, list.search),
  note, list.element);
  return follow(null, (message) => {
    list.hear(message);
    const empty = `There is no run below ${message.root} yet. A run that starts there appears by itself.`;
    note.textContent = list.runs.size ? "" : empty;
  }, tell);
}

export function ownView(main, _arguments, { tell }) {
  const list = new RunTable(["run", "status", "task", "policy", "accuracy", "J", "duration", "started"]);
  const note = h("p", { class: "absent" });
  main.append(h("h1", {}, "Own networks"), h("p", { class: "bar" }, list.search), note, list.element);
  const empty = "No network of your own is recorded here: esper.attach(…, record=\"runs/mine\") records one.";
  return follow(null, (message) => {
    list.hear(message, (run) => run.own);
    note.textContent = list.runs.size ? "" : empty;
  }, tell);
}

// -- comparison -----------------------------------------------------------------------------------------------

function verdict(row, [, low, high]) {
  if (!row.better || (low <= 0 && high >= 0)) return "";
  return (low > 0) === (row.better === "higher") ? " better" : " worse";
}

function comparisonTable({ rows }, ids) {
  return table(rows.map((row) => {
    const differences = row.differences.map((difference, i) =>
      [`${ids[i + 1]} − ${ids[0]}`, `${interval(difference)}${verdict(row, difference)}`]);
    return {
      metric: row.metric,
      unit: row.unit,
      ...Object.fromEntries(ids.map((name, i) => [name, interval(row.runs[i])])),
      ...Object.fromEntries(differences),
    };
  }));
}

const PAIRED = "Differences are paired: with one random seed, every run gives an env and episode the same draws.";
const UNPAIRED = "The random seeds differ, so episodes cannot be paired and no differences are shown.";

export function compareView(main, ids, { tell }) {
  main.append(h("h1", {}, "Compare"));
  if (ids.length < 2) {
    main.append(h("p", {}, "Choose two or more runs of one task in the ",
      h("a", { href: href("runs") }, "list of runs"), "."));
    return () => {};
  }
  const curves = new Chart({ type: "lines", title: "Objective J", note: "Mean over the envs.", label: "round" });
  const dots = new Chart({ type: "intervals", title: "Objective J",
    note: "Mean over the episodes that all runs have, 95 % interval." });
  const rest = h("div", { "aria-live": "polite" }, h("p", { class: "absent" }, "comparing …"));
  main.append(h("div", { class: "grid" }, curves.element, dots.element), rest);
  async function load() {
    try {
      const found = await getComparison(ids);
      curves.set(ids.map((name) => ({ name, x: found.curves[name][0], y: found.curves[name][1] })));
      const objective = found.rows.find((row) => row.metric === "objective");
      if (objective) dots.set(Object.fromEntries(ids.map((name, i) => [name, objective.runs[i]])));
      const units = `Intervals are over the ${number(found.units)} episodes that every run has. `;
      rest.replaceChildren(h("p", {}, units, found.paired ? PAIRED : UNPAIRED), comparisonTable(found, ids),
        h("h3", {}, "What differs"), h("ul", {}, found.notes.map((note) => h("li", {}, note))));
    } catch (error) {
      rest.replaceChildren(h("p", { class: "error" }, error.message));
    }
  }
  let timer = null;
  const end = follow(null, (message) => {
    if (!message.whole && !message.runs.some((run) => ids.includes(run.id))) return;
    clearTimeout(timer);
    timer = setTimeout(load, message.whole ? 0 : 3000);
  }, tell);
  return () => {
    clearTimeout(timer);
    end();
  };
}

// -- proofs ---------------------------------------------------------------------------------------------------

export function proofView(main, [name], { tell }) {
  const [list, body] = [h("p", { class: "bar" }), h("div")];
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
    load(name);
    return () => {};
  }
  let shown = null;
  return follow(null, ({ proofs, root }) => {
    const wanted = name ?? proofs.at(-1);
    const links = proofs.map((proof) => h("a", {
      class: "button", href: href("proof", proof), "aria-current": String(proof === wanted),
    }, proof));
    const empty = h("span", { class: "absent" }, `There is no proof.json below ${root}: esper prove writes one.`);
    list.replaceChildren(...(links.length ? links : [empty]));
    if (wanted && wanted !== shown) load(shown = wanted);
  }, tell);
}
