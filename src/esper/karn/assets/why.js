// Why a decision was taken: what was likely, what was legal, what was seen, and what came of it.

import { h, href, number, percent, table } from "./dom.js";
import { placeView, seedAt } from "./network.js";
import { laneOf, slotOrder } from "./run.js";

const KNOWN = " known";
const CHOICES = ["slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve"];

/** A share as a bar with its number. */
const share = (value) => h("span", { class: "share" }, h("meter", { min: 0, max: 1, value, "aria-hidden": "true" }), h("span", { "data-share": value }, percent(value)));

const panel = (title, ...children) => h("section", { class: "panel", "data-panel": title }, h("h2", {}, title), children);
const absent = (text) => h("p", { class: "absent" }, text);

function decision(step) {
  const chosen = CHOICES.filter((name) => step[name] !== null && step[name] !== undefined);
  const refusal = [step.veto, ...(step.gate_failures ?? [])].filter(Boolean).join(", ");
  const result = step.op === "WAIT" ? "nothing to carry out" : step.executed ? "carried out" : `refused: ${refusal || "no reason recorded"}`;
  const figures = { "value expected": step.value, "log-probability": step.log_prob, reward: step.reward, "reward so far": step.cumulative_reward, accuracy: step.accuracy, loss: step.loss };
  return panel("Decision", h("p", { class: "headline" }, h("b", {}, step.op), " ", chosen.map((name) => h("span", { class: "chip" }, `${name.replace("_", " ")} ${number(step[name])}`)), h("span", { class: "chip" }, result)),
    h("dl", { class: "facts" }, Object.entries(figures).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { "data-figure": name }, number(value))))));
}

/** Operations against slots: the probability of each legal pair, the reason against each other one. */
function considered(step, slots) {
  const ops = Object.keys(step.mask ?? step.op_probs ?? {});
  const { op_probs: chances, slot_probs: pairs, vetoes = {}, stages = {} } = step;
  const cell = (op, slot) => {
    const pair = `${op} ${slot}`;
    if (pairs?.[pair] !== undefined) return share(pairs[pair]);
    if (vetoes?.[pair]) return h("span", { class: "veto" }, vetoes[pair].replaceAll("_", " "));
    if (op === "WAIT") return "";
    if (step.mask?.[op] && !pairs) return h("span", { class: "absent" }, "not recorded");
    return h("span", { class: "veto" }, stages?.[slot] === undefined || op !== "GERMINATE" ? "slot empty" : "not legal");
  };
  const rows = ops.map((op) => ({
    operation: op === step.op ? h("b", {}, `${op} ←`) : h("span", { class: step.mask?.[op] === false ? "veto" : null }, op),
    probability: chances?.[op] === undefined ? absent("not recorded") : share(chances[op]),
    ...Object.fromEntries(slots.map((slot) => [slot, h("span", { "data-pair": `${op} ${slot}` }, cell(op, slot))])),
  }));
  const heads = Object.entries(step.confidences ?? {}).filter(([name]) => name !== "op" && name !== "slot");
  return panel("What was likely, what was legal", table(rows),
    heads.length ? h("p", {}, "Probability of the chosen ", heads.map(([name, p], i) => [i ? ", " : "", h("span", {}, `${name.replace("_", " ")}: ${percent(p)}`)]), ".") : "",
    pairs ? "" : absent("This policy gave no probabilities of slots, or they were not recorded."));
}

/** A table of names against slots, from a map of "slot name" to number. */
function bySlot(values, slots, show = number) {
  const names = [...new Set(Object.keys(values).map((key) => key.slice(key.indexOf(" ") + 1)))];
  return table(names.map((name) => ({ feature: name.replaceAll("_", " "),
    ...Object.fromEntries(slots.map((slot) => [slot, h("span", { "data-value": `${slot} ${name}` }, show(values[`${slot} ${name}`]))])) })));
}

function sensors(step, slots) {
  const values = step.sensors ?? {};
  return panel("Sensors", Object.keys(values).length ? bySlot(values, slots) : absent("Not recorded."));
}

/** Every recorded feature by its name: those of the network, then those of each slot. */
function observed(step, names, slots) {
  if (!step.observation || !names) return panel("What the policy saw", absent("Not recorded: the run is older, or its level was too low."));
  const all = Object.fromEntries(names.map((name, i) => [name, step.observation[i]]));
  const measured = Object.entries(all).filter(([name]) => !name.endsWith(KNOWN)).map(([name, v]) => [name, all[name + KNOWN] === 0 ? null : v]);
  const ofSlot = (name) => slots.some((slot) => name.startsWith(`${slot} `));
  const own = measured.filter(([name]) => !ofSlot(name));
  return panel("What the policy saw", h("p", { class: "absent" }, "As the policy's network reads it: each number is scaled. A dash was not measured."),
    h("dl", { class: "features" }, own.map(([name, value]) => h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", { "data-value": name }, number(value))))),
    bySlot(Object.fromEntries(measured.filter(([name]) => ofSlot(name))), slots));
}

function contributions(step, slots, seeds) {
  const rows = slots.filter((slot) => seeds[slot]).map((slot) => ({ slot, blueprint: seeds[slot].blueprint, stage: seeds[slot].stage.toLowerCase(), alpha: seeds[slot].alpha,
    "contribution (points)": h("span", { "data-contribution": slot }, number(step.contributions?.[slot])) }));
  return panel("Contributions", rows.length ? table(rows) : absent("There was no seed after this decision."));
}

function rewards({ terms }) {
  const rows = Object.entries(terms ?? {}).map(([term, amount]) => ({ term, amount: h("span", { "data-term": term }, number(amount)) }));
  return panel("Reward of this step", rows.length ? table(rows) : absent("No terms were recorded."));
}

/** Later decisions and changes of seeds, and how it ended. */
function afterwards(run, { round, network, episode }, step) {
  const slot = step.slot;
  const later = episode.steps.filter((one) => one.epoch > step.epoch);
  const gain = (n) => (later[n - 1] ? later[n - 1].accuracy - step.accuracy : null);
  const events = [
    ...episode.lifecycle.filter((one) => one.epoch >= step.epoch && (!slot || one.slot === slot)).map((one) => ({
      epoch: one.epoch, slot: one.slot, what: `${one.kind.replaceAll("_", " ")}: ${one.blueprint_id ?? ""} ${one.stage_from ?? ""} → ${one.stage_to ?? ""}`, contribution: one.contribution })),
    ...episode.rollbacks.filter((one) => one.epoch >= step.epoch).map((one) => ({ epoch: one.epoch, slot: "all", what: `rollback: ${one.reason}`, contribution: null })),
  ].sort((a, b) => a.epoch - b.epoch);
  const next = later.filter((one) => one.op !== "WAIT").slice(0, 6);
  const end = episode.outcome;
  return panel("What happened next",
    h("p", {}, `Accuracy after 1, 3 and 8 epochs: ${[1, 3, 8].map((n) => (gain(n) === null ? "—" : `${gain(n) >= 0 ? "+" : ""}${number(gain(n))}`)).join(", ")} points. `,
      end ? `In the end: J ${number(end.objective)}, accuracy ${number(end.final_accuracy)}, ${number(end.fossilized)} of ${number(end.germinated)} seeds permanent.` : "The episode is not finished."),
    events.length ? table(events) : absent("No seed changed."),
    next.length ? h("p", {}, "Next decisions: ", next.map((one) => [h("a", { href: href("why", run, round.round, network.env, one.epoch) }, `${one.epoch}: ${one.op} ${one.slot ?? ""}`), " "])) : "");
}

export function whyView(main, args, context) {
  return placeView("why", main, args, context, (body, place) => {
    const { run, state, network, episode, epoch, turn } = place;
    const step = episode?.steps.find((one) => one.epoch === epoch);
    if (!step) {
      body.replaceChildren(absent("Nothing was recorded of this decision."));
      return;
    }
    const { start } = state.parts;
    const slots = slotOrder(start);
    const lanes = laneOf(network, start);
    const seeds = Object.fromEntries(slots.map((slot) => [slot, seedAt(lanes[slot], epoch)]));
    const acts = episode.steps.filter((one) => one.op !== "WAIT");
    body.replaceChildren(
      h("p", { class: "bar" }, acts.map((one) => h("button", { "aria-pressed": String(one.epoch === epoch), click: () => turn({ epoch: one.epoch }) }, `${one.epoch}: ${one.op.toLowerCase().replaceAll("_", " ")}`)),
        acts.length ? "" : h("span", { class: "absent" }, "This network was only ever left to wait.")),
      h("div", { class: "panels" }, decision(step), considered(step, slots), sensors(step, slots), contributions(step, slots, seeds), rewards(step), afterwards(run, place, step), observed(step, start.observed, slots)));
  });
}
