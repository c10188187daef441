// One network at one epoch, drawn: the host, its slots and the seeds in them; and the choice of that place.

import { Chart } from "./charts.js";
import { h, href, number, s, stage, table } from "./dom.js";
import { followRun, laneOf, outcome, roundLabel, runTitle, stageLegend } from "./run.js";
import { getEpisode, getRound } from "./source.js";

const NEWEST = "newest";
const PADDING = 13; // of the drawing's frame
const NO_ROUND = "No round of this run has recorded steps yet. They are written when a round ends, from level "
  + "normal on.";

/** The seed in a slot at an epoch; null if the slot is empty. */
export function seedAt(bands, epoch) {
  const band = bands?.find(({ from, to }) => from <= epoch && epoch <= to);
  if (!band) return null;
  const k = epoch - band.from;
  return { ...band, alpha: band.alpha[k] ?? 0, contribution: band.contribution[k] };
}

// -- the drawing ----------------------------------------------------------------------------------------------

/** Where things are: activations run to the right, or downwards where there is little room. */
function geometry(width, count) {
  const down = width < 170 * (count + 0.7);
  const step = down ? 96 : (width - 110) / count;
  return {
    down,
    width,
    height: down ? step * count + 60 : 190,
    length: down ? step * count + 60 : width,
    middle: (i) => (down ? 20 : 40) + step * (i + 0.62),
    host: step * 0.42,
    reach: down ? 46 : 58, // from the line to the seeds
    longest: down ? Math.max(width - 280, 10) : step * 0.62,
    /** x and y of a point along the activations and across, towards the seeds. */
    at: (along, across) => (down ? { x: 34 + across, y: along } : { x: along, y: 132 - across }),
  };
}

function wire(g, along, from, to, attributes) {
  const [a, b] = [g.at(along, from), g.at(along, to)];
  return s("line", { class: "wire", x1: a.x, y1: a.y, x2: b.x, y2: b.y, ...attributes });
}

/** A seed beside the line: its colour is its stage, its length its parameters, its opacity its alpha. */
function drawSeed(g, along, seed, largest) {
  const long = 18 + g.longest * (seed.params ?? 0) / largest;
  const { x, y } = g.at(along, g.reach);
  const box = g.down ? { x: x - 9, y: y - 20, width: long, height: 40 }
    : { x: x - long / 2, y: y - 17, width: long, height: 34 };
  const words = [seed.blueprint ?? "unknown", `${seed.stage.toLowerCase()}, α ${number(seed.alpha)}`,
    `${number(seed.params)} parameters`];
  const strength = { "stroke-width": 1 + 3 * seed.alpha };
  const edge = g.reach - (g.down ? 9 : 17);
  return [
    wire(g, along - 14, 0, edge, strength), wire(g, along + 14, 0, edge, strength),
    s("rect", { class: `body ${seed.stage}`, rx: 6, ...box, "fill-opacity": 0.15 + 0.85 * seed.alpha }),
    words.map((text, k) => s("text", {
      class: k ? null : "strong",
      ...(g.down ? { x: x + long, y: y - 11 + 15 * k } : { x, y: y - 54 + 15 * k, "text-anchor": "middle" }),
    }, text)),
  ];
}

function drawSlot(g, slot, along, seed, largest) {
  const { x, y } = g.at(along, 0);
  const name = slot.length > 22 ? `…${slot.slice(-21)}` : slot;
  const label = g.down ? { x: x + 22, y: y + (seed ? 36 : 4) } : { x, y: y + 34, "text-anchor": "middle" };
  const told = seed ? `${seed.blueprint}, contribution ${number(seed.contribution)} points` : "empty";
  return s("g", { class: "seed", "data-slot": slot, "data-stage": seed?.stage ?? "DORMANT" },
    s("title", {}, `${slot}: ${told}`), seed ? drawSeed(g, along, seed, largest) : null,
    s("circle", { class: seed ? "node" : "node empty", cx: x, cy: y, r: seed ? 14 : 8 }),
    seed ? s("text", { class: "plus", x, y: y + 5, "text-anchor": "middle" }, "+") : null,
    s("text", label, name, seed ? "" : " (empty)"));
}

function drawNetwork(width, slots, epoch) {
  const names = Object.keys(slots);
  const g = geometry(width, names.length);
  const largest = Math.max(1, ...Object.values(slots).flat().map((band) => band.params ?? 0));
  const [start, end] = [g.at(12, 0), g.at(g.length - 12, 0)];
  const word = (text, along) => s("text", g.down ? { x: 48, y: along + 4 }
    : { x: along, y: 156, "text-anchor": "middle" }, text);
  const hosts = names.map((slot, i) => {
    const { x, y } = g.at(g.middle(i) - g.host, 0);
    return s("rect", { class: "host", x: x - 15, y: y - 15, width: 30, height: 30, rx: 5 },
      s("title", {}, `host, before ${slot}`));
  });
  const seeds = names.map((slot) => seedAt(slots[slot], epoch));
  const told = names.filter((_, i) => seeds[i]).map((slot) => {
    const { blueprint, stage: reached } = seedAt(slots[slot], epoch);
    return `${slot} ${blueprint} ${reached}`;
  });
  return s("svg", {
    id: "drawing", viewBox: `0 0 ${g.width} ${g.height}`, width: g.width, height: g.height, role: "img",
    "aria-label": `epoch ${epoch}: ${told.join("; ") || "no seeds"}`,
  },
  s("line", { class: "trunk", x1: start.x, y1: start.y, x2: end.x, y2: end.y }),
  word("input", g.down ? 14 : 28), word("output", g.length - (g.down ? 14 : 30)), hosts,
  names.map((slot, i) => drawSlot(g, slot, g.middle(i), seeds[i], largest)));
}

// -- the place ------------------------------------------------------------------------------------------------

/** What both views of an episode share: the choice of round, network and epoch, by hand, keys or playing.
    `show(body, place)` draws `{run, state, round, network, episode, epoch, turn}`. */
export function placeView(view, main, args, { tell, keys, move }, show) {
  const [run, round = NEWEST, env = "0", epoch = ""] = args;
  const place = { round, env: Number(env), epoch: epoch === "" ? null : Number(epoch) };
  const rounds = h("select", { "aria-label": "round", change: () => turn({ round: rounds.value }) });
  const envs = h("select", { "aria-label": "network", change: () => turn({ env: Number(envs.value) }) });
  const slider = h("input", { type: "range", min: 1, max: 1, value: 1, id: "epoch", "aria-label": "epoch",
    input: () => turn({ epoch: Number(slider.value) }) });
  const written = h("output", { for: "epoch" });
  const playing = h("button", { id: "play", click: () => play() }, "▶ play");
  const [title, note, body] = [h("h1"), h("p", { class: "note" }), h("div")];
  main.append(title, h("div", { class: "bar place" }, h("label", {}, "round ", rounds),
    h("label", {}, "network ", envs), playing, slider, written), note, body);
  let found = null;
  let state = null;
  let requests = 0;
  let timer = null;

  const acts = () => (found?.episode?.steps ?? []).filter((one) => one.op !== "WAIT").map((one) => one.epoch);
  const within = (value) => Math.min(Math.max(value, 1), found.round.epochs);

  function draw() {
    const last = found.round.epochs;
    const now = within(place.epoch ?? (view === "why" ? acts().at(-1) : null) ?? last);
    Object.assign(slider, { max: last, value: now });
    written.textContent = `epoch ${now} of ${last}`;
    envs.value = place.env;
    move(href(view, run, place.round, place.env, ...(place.epoch === null ? [] : [now])));
    show(body, { run, state, ...found, epoch: now, turn });
  }

  async function load() {
    const { recorded } = state.parts;
    const wanted = place.round === NEWEST ? recorded.rounds.at(-1) : Number(place.round);
    const request = requests += 1;
    title.textContent = runTitle(run, state.parts);
    if (wanted === undefined) {
      note.textContent = NO_ROUND;
      return;
    }
    try {
      const all = await getRound(run, wanted);
      const network = all.envs.find((one) => one.env === place.env);
      if (!network) throw new Error(`round ${wanted} has no env ${place.env}`);
      let [episode, problem] = [null, ""];
      try {
        episode = await getEpisode(run, wanted, place.env);
      } catch (error) {
        problem = error.message;
      }
      if (request !== requests) return;
      envs.replaceChildren(...all.envs.map((one) => h("option", { value: one.env }, one.env)));
      note.textContent = problem || `Round ${wanted}: ${outcome(network.outcome)}`;
      found = { round: all, network, episode };
      draw();
    } catch (error) {
      note.textContent = error.message;
      body.replaceChildren();
    }
  }

  function turn(change) {
    if ("round" in change || "env" in change) place.epoch = null;
    Object.assign(place, change);
    if ("epoch" in change && found) draw();
    else load();
  }

  function play() {
    if (timer || !found) {
      clearInterval(timer);
      timer = null;
    } else {
      if (Number(slider.value) >= found.round.epochs) turn({ epoch: 1 });
      timer = setInterval(() => {
        if (Number(slider.value) < found.round.epochs) turn({ epoch: Number(slider.value) + 1 });
        else play();
      }, 450);
    }
    playing.textContent = timer ? "⏸ pause" : "▶ play";
  }

  const step = (by) => () => found && turn({ epoch: within(Number(slider.value) + by) });
  function act(by) {
    const now = Number(slider.value);
    const next = by > 0 ? acts().find((e) => e > now) : acts().filter((e) => e < now).at(-1);
    if (next) turn({ epoch: next });
  }
  function neighbour(by) {
    const all = found?.round.envs.map((one) => one.env) ?? [];
    if (all.length) turn({ env: all[(all.indexOf(place.env) + by + all.length) % all.length] });
  }
  function other(by) {
    const all = state?.parts.recorded.rounds ?? [];
    const next = found && all[all.indexOf(found.round.round) + by];
    if (next) turn({ round: String(next) });
    rounds.value = place.round;
  }
  keys({
    ArrowLeft: step(-1), ArrowRight: step(1), p: () => act(-1), n: () => act(1), "[": () => other(-1),
    "]": () => other(1), e: () => neighbour(1), E: () => neighbour(-1), " ": play,
  });
  const end = followRun(run, (news, changed) => {
    state = news;
    if (changed && !changed.has("recorded")) return;
    const { recorded } = state.parts;
    rounds.replaceChildren(h("option", { value: NEWEST }, `newest (${recorded.rounds.at(-1) ?? "none"})`),
      ...[...recorded.rounds].reverse().map((r) => h("option", { value: r }, roundLabel(r, recorded))));
    rounds.value = place.round;
    if (!changed || place.round === NEWEST) load();
  }, tell);
  return () => {
    clearInterval(timer);
    end();
  };
}

// -- the view -------------------------------------------------------------------------------------------------

function seedTable(slots, epoch) {
  const rows = Object.keys(slots).map((slot) => [slot, seedAt(slots[slot], epoch)]).filter(([, seed]) => seed);
  if (!rows.length) return h("p", { class: "absent" }, "No seed at this epoch.");
  return table(rows.map(([slot, seed]) => ({
    slot, blueprint: seed.blueprint, stage: stage(seed.stage), alpha: seed.alpha, parameters: seed.params,
    contribution: seed.contribution,
  })));
}

function decisionLine(run, { round, network, epoch }, step) {
  if (!step) return "";
  const refused = step.executed === false && step.op !== "WAIT" ? " (refused) " : " ";
  const words = [step.op, step.slot, step.blueprint].filter(Boolean).join(" ");
  return h("p", {}, "Decision: ", h("b", {}, words), refused,
    h("a", { href: href("why", run, round.round, network.env, epoch) }, "why?"));
}

export function networkView(main, args, context) {
  const lanes = new Chart({ type: "lanes", title: "Growth", note: "Bands are stages, the line is alpha." });
  const course = new Chart({ type: "lines", title: "Accuracy", note: "(points) Before each decision.",
    label: "epoch" });
  const [holder, told, seeds] = [h("div", { id: "stage" }), h("div"), h("div", { id: "seeds" })];
  const grid = h("div", { class: "grid" }, lanes.element, course.element);
  let redraw = () => {};
  new ResizeObserver(() => redraw()).observe(holder);
  return placeView("network", main, args, context, (body, place) => {
    const { run, state, round, network, episode, epoch, turn } = place;
    const slots = laneOf(network, state.parts.start);
    const steps = episode?.steps ?? [];
    if (!body.children.length) body.append(holder, stageLegend(), told, seeds, grid);
    redraw = () => {
      const width = holder.clientWidth - 2 * PADDING;
      if (width > 0) holder.replaceChildren(drawNetwork(width, slots, epoch));
    };
    redraw();
    told.replaceChildren(decisionLine(run, place, steps.find((one) => one.epoch === epoch)));
    seeds.replaceChildren(seedTable(slots, epoch));
    lanes.set(slots, { epochs: round.epochs, at: epoch });
    lanes.holder.onclick = (event) => {
      const box = lanes.holder.querySelector("rect").getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      turn({ epoch: Math.min(Math.max(Math.ceil(share * round.epochs), 1), round.epochs) });
    };
    const [x, y] = [steps.map((one) => one.epoch), steps.map((one) => one.accuracy)];
    course.set([{ name: "accuracy", x, y }], { at: epoch });
  });
}
