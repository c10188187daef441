// Why a decision was taken: what was likely, what was legal, what was seen, and what came of it.

import { h, href, number, percent, table } from "./dom.js";
import { placeView, seedAt } from "./network.js";
import { laneOf, slotOrder } from "./run.js";

const KNOWN = " known";
const CHOICES = ["slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve"];
const words = (name) => name.replaceAll("_", " ");
const absent = (text) => h("p", { class: "absent" }, text);

function panel(title, ...children) {
  return h("section", { class: "panel", "data-panel": title }, h("h2", {}, title), children);
}

/** A share as a bar with its number. */
function share(value) {
  return h("span", { class: "share" }, h("meter", { min: 0, max: 1, value, "aria-hidden": "true" }),
    h("span", { "data-share": value }, percent(value)));
}

function decision(step) {
  const refusal = [step.veto, ...(step.gate_failures ?? [])].filter(Boolean).map(words).join(", ");
  const result = step.op === "WAIT" ? "nothing to carry out"
    : step.executed ? "carried out" : `refused: ${refusal || "no reason recorded"}`;
  const chips = CHOICES.filter((name) => step[name] !== null && step[name] !== undefined)
    .map((name) => `${words(name)} ${number(step[name])}`);
  const figures = {
    value: step.value, "log prob": step.log_prob, reward: step.reward, "reward so far": step.cumulative_reward,
    accuracy: step.accuracy, loss: step.loss,
  };
  return panel("Decision",
    h("p", { class: "headline" }, h("b", {}, step.op), " ",
      [...chips, result].map((text) => h("span", { class: "chip" }, text))),
    h("dl", { class: "facts" }, Object.entries(figures).map(([name, value]) =>
      h("div", {}, h("dt", {}, name), h("dd", { "data-figure": name }, number(value))))));
}

/** Operations against slots: the probability of each legal pair, the reason against each other one. */
function considered(step, slots) {
  const { op_probs: chances, slot_probs: pairs, vetoes, mask } = step;
  function cell(op, slot) {
    const pair = `${op} ${slot}`;
    if (op === "WAIT") return "";
    if (pairs?.[pair] !== undefined) return share(pairs[pair]);
    if (vetoes?.[pair]) return h("span", { class: "veto" }, words(vetoes[pair]));
    const other = op === "GERMINATE" ? "legal" : "slot empty";
    return h("span", { class: "veto" }, vetoes ? other : "not recorded");
  }
  const name = (op) => (op === step.op ? h("b", {}, `${op} ←`)
    : h("span", { class: mask?.[op] === false ? "veto" : null }, op));
  const rows = Object.keys(mask ?? chances ?? {}).map((op) => ({
    operation: name(op),
    probability: chances?.[op] === undefined ? "—" : h("span", { "data-op": op }, share(chances[op])),
    ...Object.fromEntries(slots.map((slot) =>
      [slot, h("span", { "data-pair": `${op} ${slot}` }, cell(op, slot))])),
  }));
  const heads = Object.entries(step.confidences ?? {}).filter(([head]) => head !== "op" && head !== "slot");
  const chosen = heads.map(([head, p]) => `${words(head)} ${percent(p)}`).join(", ");
  return panel("What was likely, what was legal", table(rows),
    chosen ? h("p", {}, `Probability of the chosen values: ${chosen}.`) : "",
    pairs ? "" : absent("This policy gives no probabilities of slots, or they were not recorded."));
}

/** Names against slots, from numbers that are named "slot name". */
function bySlot(values, slots) {
  const names = new Set(Object.keys(values).map((key) => key.slice(key.indexOf(" ") + 1)));
  return table([...names].map((name) => ({
    feature: words(name),
    ...Object.fromEntries(slots.map((slot) => {
      const key = `${slot} ${name}`;
      return [slot, h("span", { "data-value": key }, number(values[key]))];
    })),
  })));
}

function sensors({ sensors: values = {} }, slots) {
  return panel("Sensors", Object.keys(values ?? {}).length ? bySlot(values, slots) : absent("Not recorded."));
}

/** Every recorded feature by its name: those of the network, then those of each slot. */
function observed({ observation }, names, slots) {
  const title = "What the policy saw";
  const missing = "Not recorded: the run is older, or its level was too low.";
  if (!observation || !names) return panel(title, absent(missing));
  const all = Object.fromEntries(names.map((name, i) => [name, observation[i]]));
  const measured = names.filter((name) => !name.endsWith(KNOWN))
    .map((name) => [name, all[name + KNOWN] === 0 ? null : all[name]]);
  const ofSlot = ([name]) => slots.some((slot) => name.startsWith(`${slot} `));
  return panel(title, absent("Scaled as the policy's network reads it. A dash was not measured."),
    h("dl", { class: "features" }, measured.filter((one) => !ofSlot(one)).map(([name, value]) =>
      h("div", {}, h("dt", {}, words(name)), h("dd", { "data-value": name }, number(value))))),
    bySlot(Object.fromEntries(measured.filter(ofSlot)), slots));
}

function contributions(step, slots, lanes) {
  const seeds = slots.map((slot) => [slot, seedAt(lanes[slot], step.epoch)]).filter(([, seed]) => seed);
  return panel("Contributions", seeds.length ? table(seeds.map(([slot, seed]) => ({
    slot, blueprint: seed.blueprint, stage: seed.stage.toLowerCase(), alpha: seed.alpha,
    "contribution (points)": h("span", { "data-contribution": slot }, number(step.contributions?.[slot])),
  }))) : absent("There was no seed after this decision."));
}

function rewards({ terms }) {
  const rows = Object.entries(terms ?? {}).map(([term, amount]) =>
    ({ term: words(term), amount: h("span", { "data-term": term }, number(amount)) }));
  return panel("Reward of this step", rows.length ? table(rows) : absent("No terms were recorded."));
}

/** Later decisions and changes of seeds, and how it ended. */
function afterwards({ run, round, network, episode }, step) {
  const later = episode.steps.filter((one) => one.epoch > step.epoch);
  const gains = [1, 3, 8].map((n) => later[n - 1]?.accuracy - step.accuracy)
    .map((gain) => (Number.isFinite(gain) ? `${gain > 0 ? "+" : ""}${number(gain)}` : "—"));
  const changes = episode.lifecycle.filter((one) => !step.slot || one.slot === step.slot).map((one) => ({
    epoch: one.epoch, slot: one.slot, contribution: one.contribution,
    what: `${words(one.kind)}: ${one.blueprint_id ?? ""} ${one.stage_from ?? ""} → ${one.stage_to ?? ""}`,
  }));
  const rollbacks = episode.rollbacks.map((one) =>
    ({ epoch: one.epoch, slot: "all", what: `rollback: ${one.reason}`, contribution: null }));
  const events = [...changes, ...rollbacks].filter((one) => one.epoch >= step.epoch)
    .sort((a, b) => a.epoch - b.epoch);
  const end = episode.outcome;
  const ended = end ? `In the end: J ${number(end.objective)}, accuracy ${number(end.final_accuracy)}, `
    + `${number(end.fossilized)} of ${number(end.germinated)} seeds permanent.` : "The episode is not finished.";
  const next = later.filter((one) => one.op !== "WAIT").slice(0, 6);
  return panel("What happened next",
    h("p", {}, `Accuracy after 1, 3 and 8 epochs: ${gains.join(", ")} points. ${ended}`),
    events.length ? table(events) : absent("No seed changed."),
    next.length ? h("p", {}, "Next decisions: ", next.map((one) => [h("a",
      { href: href("why", run, round.round, network.env, one.epoch) },
      `${one.epoch}: ${words(one.op)} ${one.slot ?? ""}`), " "])) : "");
}

export function whyView(main, args, context) {
  return placeView("why", main, args, context, (body, place) => {
    const { state, network, episode, epoch, turn } = place;
    const step = episode?.steps.find((one) => one.epoch === epoch);
    if (!step) {
      body.replaceChildren(absent("Nothing was recorded of this decision."));
      return;
    }
    const { start } = state.parts;
    const slots = slotOrder(start);
    const acts = episode.steps.filter((one) => one.op !== "WAIT").map((one) =>
      h("button", { "aria-pressed": String(one.epoch === epoch), click: () => turn({ epoch: one.epoch }) },
        `${one.epoch}: ${words(one.op.toLowerCase())}`));
    body.replaceChildren(
      h("p", { class: "bar" }, acts.length ? acts : absent("This network was only ever left to wait.")),
      h("div", { class: "panels" }, decision(step), considered(step, slots), sensors(step, slots),
        contributions(step, slots, laneOf(network, start)), rewards(step), afterwards(place, step),
        observed(step, start.observed, slots)));
  });
}
