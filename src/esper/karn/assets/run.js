// One run: learning, growth, decisions, rewards, health, alerts, every metric, settings.

import { sections } from "./blocks.js";
import { Chart } from "./charts.js";
import { duration, h, href, number, stage, table } from "./dom.js";
import { RunState, follow, getLayout, getRound } from "./source.js";

const STAGES = ["DORMANT", "GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED",
  "EMBARGOED", "RESETTING"];
export const stageLegend = () => h("div", { class: "legend" }, STAGES.map(stage));
const NO_STEPS = "No steps were recorded: level normal or debug records them, at the end of each round.";

/** The slots of a run in the order in which activations pass them. */
export function slotOrder({ slots = [], depths }) {
  const place = (slot) => depths?.[slot] ?? slots.indexOf(slot);
  return [...slots].sort((a, b) => place(a) - place(b));
}

/** The seeds of a network by slot, slots that stayed empty included. */
export function laneOf(network, start) {
  const names = new Set([...slotOrder(start), ...Object.keys(network.slots)]);
  return Object.fromEntries([...names].map((slot) => [slot, network.slots[slot] ?? []]));
}

export function outcome(end) {
  if (!end) return "not finished";
  const rollbacks = end.rollbacks ? `, rollbacks: ${end.rollbacks}` : "";
  return `J ${number(end.objective)}, committed accuracy ${number(end.committed_accuracy)} of `
    + `${number(end.final_accuracy)}, +${number(end.added_params)} parameters${rollbacks}`;
}

/** The words for a round in a list. */
export function roundLabel(round, { rounds, best }) {
  return `${round}${round === best ? " (best J)" : ""}${round === rounds.at(-1) ? " (last)" : ""}`;
}

function factList({ facts: f }) {
  const rounds = `${number(f.rounds_done)} of ${number(f.rounds)}`;
  const shown = {
    status: f.status, task: f.task, policy: f.policy, "random seed": f.seed, envs: f.envs,
    ...(f.own ? {} : { rounds, "last J": f.objective, "best J": f.best }),
    alerts: f.alerts, time: duration(f.seconds), started: f.started,
  };
  return h("dl", { class: "facts" }, Object.entries(shown).map(([name, value]) =>
    h("div", { class: name === "alerts" && value ? "warning" : null },
      h("dt", {}, name), h("dd", {}, number(value)))));
}

/** Growth of every network of a round that the reader chooses; the newest round, until another is chosen.
    `settle` is called when it has its size. */
function growthBlock(run, state, settle) {
  const choose = h("select", { id: "round", "aria-label": "round", change: () => load() });
  const lanes = h("div", { class: "grid", id: "lanes" });
  async function load() {
    const round = choose.value;
    try {
      const { envs, epochs } = await getRound(run, round);
      if (choose.value !== round) return;
      lanes.replaceChildren(...envs.map((network) => {
        const title = `env ${network.env}`;
        const chart = new Chart({ type: "lanes", title, note: outcome(network.outcome), epochs });
        const link = h("a", { href: href("network", run, round, network.env) }, title);
        chart.element.querySelector("b").replaceChildren(link);
        chart.set(laneOf(network, state.parts.start));
        return chart.element;
      }));
      settle();
    } catch (error) {
      lanes.replaceChildren(h("p", { class: "absent" }, error.message));
    }
  }
  function update(_state, changed) {
    if (changed && !changed.has("recorded")) return;
    const { recorded } = state.parts;
    const follows = !choose.value || choose.value === choose.dataset.newest;
    const chosen = choose.value;
    choose.dataset.newest = recorded.rounds.at(-1) ?? "";
    choose.replaceChildren(...[...recorded.rounds].reverse().map((round) =>
      h("option", { value: round }, roundLabel(round, recorded))));
    choose.value = follows ? choose.dataset.newest : chosen;
    if (!recorded.rounds.length) lanes.replaceChildren(h("p", { class: "absent" }, NO_STEPS));
    else if (follows) load();
  }
  const note = " Bands are stages. The line is alpha, from 0 at the bottom of a lane to 1 at its top.";
  return { element: h("div", {}, h("p", {}, "Round ", choose, note), stageLegend(), lanes), update, wide: true };
}

function glossaryBlock(glossary) {
  const element = h("div");
  function update({ parts, curves }, changed) {
    if (changed && !changed.has("last")) return;
    const open = new Set([...element.querySelectorAll("details[open]")].map((one) => one.dataset.view));
    const last = (event, name) =>
      parts.last[event]?.[name] ?? curves.get(`${event}/${name}`)?.y.at(-1) ?? null;
    element.replaceChildren(...glossary.map(({ view, event, meaning, fields }) =>
      h("details", { "data-view": view, open: open.has(view) },
        h("summary", {}, h("b", {}, view), " ", meaning),
        table(fields.map((field) => ({
          field: h("code", {}, field.name), unit: field.unit, better: field.better,
          last: last(event, field.name), meaning: field.meaning,
        }))))));
  }
  return { element, update, wide: true };
}

function settingsBlock() {
  const element = h("div");
  function update({ parts }, changed) {
    if (changed && !changed.has("config") && !changed.has("info")) return;
    const files = [["config.json", parts.config], ["run.json", parts.info]];
    element.replaceChildren(...files.map(([name, content]) => h("details", {},
      h("summary", {}, h("b", {}, name)), h("pre", {}, JSON.stringify(content, null, 2)))));
  }
  return { element, update, wide: true };
}

/** Calls `draw(state, changed)` with every change of a run; without `changed` everything is new. */
export function followRun(run, draw, tell) {
  const state = new RunState();
  return follow(run, (message) => {
    const changed = state.apply(message);
    draw(state, message.whole ? null : changed);
  }, tell);
}

export function runTitle(run, { facts }) {
  return run === facts.name || run.endsWith(`/${facts.name}`) ? run : `${run}: ${facts.name}`;
}

export function runView(main, [run, target], { tell, move }) {
  const layout = getLayout();
  const [title, head, body] = [h("h1"), h("div"), h("div")];
  main.append(title, head, h("p", { class: "bar" },
    h("a", { class: "button", href: href("network", run) }, "Networks"),
    h("a", { class: "button", href: href("why", run) }, "Why it decided")), body);
  let made = null;
  let aim = target;
  function settle() {
    if (aim) document.getElementById(aim)?.scrollIntoView();
    aim = null;
  }
  return followRun(run, async (state, changed) => {
    const { run: all, own, glossary } = await layout;
    const { parts } = state;
    if (!changed) {
      const chosen = parts.facts.own ? own : all;
      made = sections(chosen, {
        growth: () => growthBlock(run, state, settle),
        glossary: () => glossaryBlock(glossary),
        settings: settingsBlock,
      });
      const jump = (id) => (event) => {
        event.preventDefault();
        document.getElementById(id).scrollIntoView();
        move(href("run", run, id));
      };
      body.replaceChildren(h("nav", { class: "sections", "aria-label": "sections" }, chosen.map(({ id, title: name }) =>
        h("a", { href: href("run", run, id), click: jump(id) }, name))), ...made.elements);
    }
    title.textContent = runTitle(run, parts);
    const problems = [parts.facts.message ?? [], ...parts.problems].flat();
    head.replaceChildren(factList(parts), ...problems.map((text) => h("p", { class: "error" }, text)));
    made.update(state, changed);
    if (!changed && target) document.getElementById(target)?.scrollIntoView();
  }, tell);
}
