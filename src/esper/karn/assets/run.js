// One run: learning, growth, decisions, rewards, health, alerts, every metric, settings.

import { sections } from "./blocks.js";
import { Chart } from "./charts.js";
import { duration, h, href, number, stage, table } from "./dom.js";
import { RunState, follow, getLayout, getRound } from "./source.js";

export const STAGES = ["DORMANT", "GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED", "EMBARGOED", "RESETTING"];

/** The slots of a run in the order in which activations pass them. */
export function slotOrder({ slots = [], depths }) {
  return [...slots].sort((a, b) => (depths?.[a] ?? slots.indexOf(a)) - (depths?.[b] ?? slots.indexOf(b)));
}

/** The seeds of a network by slot, slots that stayed empty included. */
export const laneOf = (network, start) => Object.fromEntries(
  [...new Set([...slotOrder(start), ...Object.keys(network.slots)])].map((slot) => [slot, network.slots[slot] ?? []]));

export function outcome(end) {
  if (!end) return "not finished";
  const rollbacks = end.rollbacks ? `, rollbacks: ${end.rollbacks}` : "";
  return `J ${number(end.objective)}, committed accuracy ${number(end.committed_accuracy)} of ${number(end.final_accuracy)}, `
    + `+${number(end.added_params)} parameters${rollbacks}`;
}

function facts(parts) {
  const { facts: f } = parts;
  const done = f.own ? {} : { rounds: `${number(f.rounds_done)} of ${number(f.rounds)}`, "last J": f.objective, "best J": f.best };
  const shown = { status: f.status, task: f.task, policy: f.policy, "random seed": f.seed, envs: f.envs, ...done,
    alerts: f.alerts, time: duration(f.seconds), started: f.started };
  return h("dl", { class: "facts" }, Object.entries(shown).map(([name, value]) =>
    h("div", { class: name === "alerts" && value ? "warning" : null }, h("dt", {}, name), h("dd", {}, number(value)))));
}

/** Growth of every network of a round that the reader chooses. */
function growthBlock(run, state) {
  const choose = h("select", { id: "round", "aria-label": "round", change: () => load() });
  const lanes = h("div", { class: "grid", id: "lanes" });
  let shown = null;
  async function load() {
    const round = choose.value;
    shown = round;
    try {
      const { envs, epochs } = await getRound(state.id ?? run, round);
      if (shown !== round) return;
      lanes.replaceChildren(...envs.map((network) => {
        const chart = new Chart({ type: "lanes", title: `env ${network.env}`, note: outcome(network.outcome), epochs });
        chart.set(laneOf(network, state.parts.start));
        chart.element.querySelector("b").replaceChildren(h("a", { href: href("network", run, round, network.env) }, `env ${network.env}`));
        return chart.element;
      }));
    } catch (error) {
      lanes.replaceChildren(h("p", { class: "absent" }, error.message));
    }
  }
  function update(_state, changed) {
    if (changed && !changed.has("recorded")) return;
    const { rounds, best } = state.parts.recorded;
    const follows = !choose.value || choose.value === choose.dataset.newest;
    choose.dataset.newest = rounds.at(-1) ?? "";
    const label = (r) => `${r}${r === best ? " (best J)" : ""}${r === rounds.at(-1) ? " (last)" : ""}`;
    const chosen = choose.value;
    choose.replaceChildren(...[...rounds].reverse().map((r) => h("option", { value: r }, label(r))));
    choose.value = follows ? choose.dataset.newest : chosen;
    if (!rounds.length) lanes.replaceChildren(h("p", { class: "absent" }, "No steps were recorded: level normal or debug records them, at the end of each round."));
    else if (choose.value !== shown || follows) load();
  }
  const element = h("div", {}, h("p", {}, "Round ", choose, " Bands are stages. The line is alpha, from 0 at the bottom of a lane to 1 at its top."),
    h("div", { class: "legend" }, STAGES.map((name) => stage(name))), lanes);
  return { element, update, wide: true };
}

function glossaryBlock(glossary) {
  const element = h("div");
  function update(state, changed) {
    if (changed && !changed.has("last")) return;
    const open = new Set([...element.querySelectorAll("details[open]")].map((one) => one.dataset.view));
    element.replaceChildren(...glossary.map(({ view, event, meaning, fields }) => h("details", { "data-view": view, open: open.has(view) },
      h("summary", {}, h("b", {}, view), " ", meaning),
      table(fields.map((field) => ({
        field: h("code", {}, field.name), unit: field.unit, better: field.better,
        last: state.parts.last[event]?.[field.name] ?? state.curves.get(`${event}/${field.name}`)?.y.at(-1) ?? null,
        meaning: field.meaning,
      }))))));
  }
  return { element, update, wide: true };
}

function settingsBlock() {
  const element = h("div");
  function update(state, changed) {
    if (changed && !changed.has("config") && !changed.has("info")) return;
    element.replaceChildren(...[["config.json", state.parts.config], ["run.json", state.parts.info]].map(([name, content]) =>
      h("details", {}, h("summary", {}, h("b", {}, name)), h("pre", {}, JSON.stringify(content, null, 2)))));
  }
  return { element, update, wide: true };
}

/** Makes `draw(state, changed)` hear of every change of a run; without `changed` everything is new. */
export function followRun(run, draw, tell) {
  const state = new RunState();
  return follow(run, (message) => {
    const changed = state.apply(message);
    draw(state, message.whole ? null : changed);
  }, tell);
}

export function runView(main, [run, target], { tell }) {
  const head = h("div");
  const body = h("div");
  main.append(head, body);
  const layout = getLayout();
  let made = null;
  return followRun(run, async (state, changed) => {
    const { run: all, own, glossary } = await layout;
    const { parts } = state;
    if (!changed) {
      const chosen = parts.facts.own ? own : all;
      made = sections(chosen, { growth: () => growthBlock(run, state), glossary: () => glossaryBlock(glossary), settings: settingsBlock });
      body.replaceChildren(h("nav", { class: "sections", "aria-label": "sections" }, chosen.map(({ id, title }) => h("a", { href: href("run", run, id) }, title))), ...made.elements);
      head.replaceChildren(h("h1", {}, run));
    }
    head.replaceChildren(h("h1", {}, run),
      facts(parts),
      parts.facts.message ? h("p", { class: "error" }, parts.facts.message) : "",
      ...parts.problems.map((problem) => h("p", { class: "error" }, problem)),
      h("p", { class: "bar" }, h("a", { class: "button", href: href("network", run) }, "Networks"), h("a", { class: "button", href: href("why", run) }, "Why it decided")));
    made.update(state, changed);
    if (!changed && target) document.getElementById(target)?.scrollIntoView();
  }, tell);
}
